# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``fabric_faults``: a judgement of the fabric as faults of the cluster."""

from __future__ import annotations

import typing as t

DOCUMENTATION = r"""
name: fabric_faults
short_description: A judgement of the fabric as faults of the cluster
version_added: 0.1.0
description:
  - Turns the problems and warnings of filter P(sparks.hy3.fabric_problems#filter) into faults as those of filter
    P(sparks.hy3.doctor_faults#filter).
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The judgement; an empty dictionary where no node could be looked at.
"""

EXAMPLES = r"""
- name: List the faults of the links
  ansible.builtin.debug:
    msg: "{{ links_by_node | sparks.hy3.fabric_problems | sparks.hy3.fabric_faults }}"
"""

RETURN = r"""
_value:
  description: The faults, with C(host) (the whole fabric), C(severity), C(rule) and C(sentence).
  type: list
  elements: dict
"""


def fabric_faults(judgement: t.Mapping[str, t.Any]) -> list[dict[str, str]]:
    """Problems are errors; the rest is warnings."""
    kinds = {"error": "problems", "warning": "warnings"}
    return [
        {"host": "all", "severity": severity, "rule": "fabric", "sentence": sentence}
        for severity, kind in kinds.items()
        for sentence in judgement.get(kind, [])
    ]


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"fabric_faults": fabric_faults}
