# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``other_cluster``: units of ours that run for another cluster than this inventory's."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._units import of_another_cluster

DOCUMENTATION = r"""
name: other_cluster
short_description: Units of ours that run for another cluster than this inventory's
version_added: 0.1.0
description:
  - Tells the units of one cluster from those of another, so that a wrong or overlapping inventory stops nothing.
  - A unit names its cluster in its description. One that names none, or neither runs nor would start with the node, is
    nobody's.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: What M(sparks.hy3.engine_status) says of units, by name.
  cluster:
    type: str
    required: true
    description: The name of the inventory's own cluster.
  installed:
    type: bool
    default: false
    description:
      - Units that do not run count, too, unless one is here for O(cluster). There is nothing to stop, but something to
        remove, which is the other cluster's.
"""

EXAMPLES = r"""
- name: Stop the engine if it is ours
  ansible.builtin.systemd_service: {name: hy3-serve.service, state: stopped}
  when: status.units | sparks.hy3.other_cluster(cluster='sparks') | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per unit of another cluster; an empty list is good.
  type: list
  elements: str
"""


def _does(unit: t.Mapping[str, t.Any], installed: bool) -> str:
    if installed:
        return "is installed here as"
    return "would start with the node as" if unit["active_state"] in ("inactive", "failed") else "runs here as"


def other_cluster(units: t.Mapping[str, t.Mapping[str, t.Any]], cluster: str, installed: bool = False) -> list[str]:
    """One sentence for each unit that is here for another cluster than ``cluster``, with the way to be rid of it."""
    left, play = ("the node", "remove") if installed else ("it", "stop")
    return [
        f"{name} {_does(units[name], installed)} '{role}' of cluster '{other}', and this inventory is that of "
        f"'{cluster}', so {left} is left alone; run {play}_hy3 with the inventory of '{other}', or with "
        f"`-e hy3_cluster={other}` if it is the same cluster under another name."
        for name, role, other in of_another_cluster(units, cluster, enabled=True, installed=installed)
    ]


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"other_cluster": other_cluster}
