# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``bench_summary``: what the runs of the benchmark say together."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._bench import acceptance_between, figures
from ansible_collections.sparks.hy3.plugins.module_utils._bench_verdict import differing_arguments, verdicts

DOCUMENTATION = r"""
name: bench_summary
short_description: What the runs of the benchmark say together
version_added: 0.1.0
description:
  - Puts the counted runs of each workload together and holds them against what the profile's author published.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: list
    elements: dict
    required: true
    description:
      - The results of a loop over M(sparks.hy3.engine_bench). C(item) of each is a pair, the workload and the number of
        its run; number V(0) is the warm-up and does not count.
  plan:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  profile:
    type: dict
    required: true
    description: The profile as it was read, before the inventory was laid over it.
  engine:
    type: dict
    default: {}
    description: What the engine says of its KV pool, C(kv_cache_tokens) and C(max_concurrency).
"""

EXAMPLES = r"""
- name: Compare
  ansible.builtin.debug:
    msg: "{{ (runs.results | sparks.hy3.bench_summary(plan=hy3_plan, profile=profile)).verdicts }}"
"""

RETURN = r"""
_value:
  description:
    - C(workloads) with their figures and C(remarks). C(ttft_ms) is in milliseconds, C(decode_tps) (of one stream) and
      C(total_tps) (of all) in tokens per second; each is the C(median) of the runs with C(min) and C(max), or null.
    - C(verdicts), each with C(figure), C(workload), C(published) and C(measured) (lowest and highest, or null), the
      same as C(published_text) and C(measured_text), C(verdict) (V(within), V(above), V(below) or V(not comparable))
      and C(why).
  type: dict
"""

Facts = t.Mapping[str, t.Any]


def _of_workload(workload: Facts, results: t.Sequence[Facts]) -> dict[str, t.Any]:
    runs = [result["run"] for result in results]
    requests = [request for run in runs for request in run["requests"]]
    # As far as could be seen: what ran when a run began.
    others = max((result["metrics_before"] or {}).get("running") or 0 for result in results)
    return {
        **workload,
        "shape": f"{workload['output_tokens']} tokens, temperature {workload['temperature']:g}",
        **figures(runs),
        "acceptance": acceptance_between((result["metrics_before"], result["metrics_after"]) for result in results),
        # SGLang's, since its start.
        "accept_length": runs[-1]["accept_length"],
        "failed": sum(request["error"] is not None for request in requests),
        "shortest": min((request["tokens"] for request in requests if request["error"] is None), default=None),
        "others": others,
        "runs": runs,
        "remarks": [*workload["sized"], *_remarks(requests, others)],
    }


def _remarks(requests: t.Sequence[Facts], others: int) -> list[str]:
    untimed = sum(request["error"] is None and request["decode_tps"] is None for request in requests)
    remarks = sorted({request["error"] for request in requests if request["error"]})
    if untimed:
        remarks.append(f"{untimed} of {len(requests)} requests have no times, as their text did not come bit by bit")
    if others:
        remarks.append(f"{others} requests of others ran meanwhile")
    return remarks


def bench_summary(
    results: t.Sequence[Facts], plan: Facts, profile: Facts, engine: Facts | None = None
) -> dict[str, t.Any]:
    """Counted runs by workload, and a verdict for each published figure."""
    order: list[Facts] = []
    counted: dict[str, list[Facts]] = {}
    for result in results:
        workload, number = result["item"]
        if number and result.get("run"):
            if workload["id"] not in counted:
                order.append(workload)
            counted.setdefault(workload["id"], []).append(result)
    workloads = [_of_workload(workload, counted[workload["id"]]) for workload in order]
    differences = differing_arguments(
        {"executor": profile["executor"], **profile["engine_args"]},
        {"executor": plan["executor"], **plan["engine_args"]},
    )
    measured = {workload["id"]: workload for workload in workloads}
    return {
        "workloads": workloads,
        "verdicts": verdicts(plan["expected"], measured, engine or {}, differences) if workloads else [],
    }


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"bench_summary": bench_summary}
