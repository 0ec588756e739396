# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``balance_problems``: nodes with so much less available memory than the best one that SGLang refuses."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._budget import BALANCE, balance
from ansible_collections.sparks.hy3.plugins.module_utils._memory import format_gib

DOCUMENTATION = r"""
name: balance_problems
short_description: Nodes with much less available memory than the best one
version_added: 0.1.0
description:
  - SGLang ends a start with "The memory capacity is unbalanced" where a rank has less than 0.9 of what another has. On
    a node of unified memory a crashed process, or one that was just stopped, is the usual reason.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: Available memory in bytes, by the node's name.
"""

EXAMPLES = r"""
- name: Refuse a node that a crash has left with less
  ansible.builtin.assert:
    that: "{'spark-1': 122620792012, 'spark-2': 86973087744} | sparks.hy3.balance_problems | length == 0"
"""

RETURN = r"""
_value:
  description: One sentence for each node that has too little, by its name; empty is good.
  type: dict
"""


def balance_problems(available: t.Mapping[str, int]) -> dict[str, str]:
    """One sentence for each node that lacks memory against the best one."""
    best = max(available, key=lambda node: available[node], default="")
    return {
        node: f"{node} has {format_gib(available[node])} available and {best} {format_gib(available[best])}, and "
        f"SGLang refuses a node with less than {BALANCE:g} of another ('The memory capacity is unbalanced'); end what "
        f"uses {format_gib(lacks)} of it on {node}, or wait until a stopped engine's memory has come back."
        for node, lacks in balance(available).items()
    }


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"balance_problems": balance_problems}
