# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``svg_chart``: a chart as SVG."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._chart import Bar, Series, bar_chart, line_chart

DOCUMENTATION = r"""
name: svg_chart
short_description: A chart as SVG
version_added: 0.1.0
description:
  - Draws lines with whiskers or bars, for a page that needs no script and no other file. All text is escaped.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: list
    elements: dict
    required: true
    description:
      - With O(kind=lines), the lines. Each has a C(name) and C(points) with C(x), C(y), C(low) and C(high).
      - With O(kind=bars), the bars. Each has C(name), C(value), C(of) (the whole, or V(null)) and C(text).
  kind:
    type: str
    choices: [lines, bars]
    required: true
    description: What to draw.
  x:
    type: str
    default: ""
    description: Label of the horizontal axis.
  y:
    type: str
    default: ""
    description: Label of the vertical axis, or the title of bars.
"""

EXAMPLES = r"""
- name: Draw the memory of a node
  ansible.builtin.debug:
    msg: "{{ [{'name': 'spark-1', 'value': 103.4, 'of': 121.7, 'text': '103.4 of 121.7 GiB'}]
      | sparks.hy3.svg_chart(kind='bars', y='Memory') }}"
"""

RETURN = r"""
_value:
  description: The chart, an C(svg) element.
  type: str
"""


def svg_chart(data: list[t.Any], kind: str, x: str = "", y: str = "") -> str:
    """Draw ``data`` as ``kind``."""
    if kind == "bars":
        return bar_chart(t.cast(list[Bar], data), title=y)
    return line_chart(t.cast(list[Series], data), x=x, y=y)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"svg_chart": svg_chart}
