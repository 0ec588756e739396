# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``bench_workloads``: the workloads that a plan can take."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._bench_verdict import fitting

DOCUMENTATION = r"""
name: bench_workloads
short_description: The workloads of the benchmark that a plan can take
version_added: 0.1.0
description:
  - Makes each workload as small as the engine's context length and number of sequences want, and says in C(sized) what
    that changed. What becomes equal to another one is left out.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: list
    elements: dict
    required: true
    description: The workloads, each with C(id), C(output_tokens), C(streams), C(temperature), C(top_p) and C(source).
  plan:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  streams:
    type: list
    elements: int
    default: []
    description: Numbers of streams for which the first workload is run, too. If empty, as many as the engine takes.
  only:
    type: list
    elements: str
    default: []
    description: The ids of the workloads to run. If empty, all.
"""

EXAMPLES = r"""
- name: Say what will be run
  ansible.builtin.debug:
    msg: "{{ workloads | sparks.hy3.bench_workloads(plan=hy3_plan) | map(attribute='id') }}"
"""

RETURN = r"""
_value:
  description: The workloads to run, the shortest first.
  type: list
  elements: dict
"""


def bench_workloads(
    workloads: t.Sequence[t.Mapping[str, t.Any]],
    plan: t.Mapping[str, t.Any],
    streams: t.Sequence[int] = (),
    only: t.Sequence[str] = (),
) -> list[dict[str, t.Any]]:
    """Workloads that fit ``plan``, with what was changed for that."""
    return fitting(workloads, plan["engine_args"], [int(count) for count in streams], only)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"bench_workloads": bench_workloads}
