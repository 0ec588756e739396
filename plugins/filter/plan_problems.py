# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``plan_problems``: where a plan and its inventory do not fit."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._ray import ports
from ansible_collections.sparks.hy3.plugins.module_utils._rules_ray import PER_NODE

DOCUMENTATION = r"""
name: plan_problems
short_description: Where a plan and its inventory do not fit
version_added: 0.1.0
description:
  - Finds in the plan of role P(sparks.hy3.profile#role) what no cluster could do, before a node is contacted.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  addresses:
    type: dict
    required: true
    description: The fabric address of each host by its name.
"""

EXAMPLES = r"""
- name: Refuse a plan that does not fit the inventory
  ansible.builtin.assert:
    that: hy3_plan | sparks.hy3.plan_problems(addresses=address_of_host) | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

Facts = t.Mapping[str, t.Any]
# What starts the ranks of each engine.
EXECUTORS = {"vllm": ("ray", "mp"), "sglang": ("mp",)}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Options that are counts, the variable that sets each, and where it lies in the plan.
COUNTS = {
    "tensor-parallel-size": "engine_args",
    "pipeline-parallel-size": "engine_args",
    "num-gpus": "ray_args",
}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _count_problems(plan: Facts) -> list[str]:
    return [
        f"hy3_{part} has {name} {plan[part][name]!r}, and it must be a whole number above 0; write one, without quotes."
        for name, part in COUNTS.items()
        if name in plan[part] and not _is_count(plan[part][name])
    ]


def _size_problems(plan: Facts) -> list[str]:
    """Ranks against GPUs, of which a Spark has one. A user may give a profile another number of both."""
    nodes = len(plan["hosts"])
    tensor, pipeline, gpus = (plan[part].get(name, 1) for name, part in COUNTS.items())
    if plan["executor"] == "mp":  # Ray alone is told of GPUs; one host brings as many as there are ranks
        gpus = tensor * pipeline if nodes == 1 else 1
    if tensor * pipeline == nodes * gpus:
        return []
    if nodes != plan["nodes"]:
        return [
            f"The inventory has {nodes} node(s) and profile {plan['profile']} wants {plan['nodes']} (tensor parallel "
            f"{tensor}); add or remove hosts, set tensor-parallel-size in hy3_engine_args, or choose another profile."
        ]
    return [
        f"tensor-parallel-size {tensor} x pipeline-parallel-size {pipeline} needs {tensor * pipeline} GPU(s) and "
        f"{nodes} node(s) x {gpus} GPU(s) have {nodes * gpus}; correct hy3_engine_args, or choose another profile."
    ]


def _address_problems(addresses: t.Mapping[str, str]) -> list[str]:
    owners: dict[str, list[str]] = {}
    for host, address in addresses.items():
        owners.setdefault(address, []).append(host)
    return [
        f"hy3_fabric_address {address} is that of {' and '.join(hosts)}, and each node has its own; correct the others."
        for address, hosts in owners.items()
        if len(hosts) > 1
    ]


def _port_problems(plan: Facts) -> list[str]:
    port = plan["api"]["port"]
    if not 0 < port < 65536:
        return [f"hy3_api_port is {port}, which is no TCP port; choose one from 1024 to 65535."]
    if plan["executor"] != "ray":
        taken = port in (plan["rank_port"], plan["tie_port"])
        return [f"hy3_api_port is {port}, where the ranks meet; choose another, for instance 8000."] if taken else []
    if any(port in found for found in ports(plan, head=True).values()):
        return [f"hy3_api_port is {port}, which Ray needs for itself; choose another, for instance 8000."]
    return []


def _executor_problems(plan: Facts) -> list[str]:
    known = EXECUTORS[plan["engine"]]
    if plan["executor"] in known:
        return []
    return [
        f"hy3_executor is '{plan['executor']}', and {plan['engine']} is served with {' or '.join(known)} only; leave "
        "it out."
    ]


def _cluster_problems(plan: Facts) -> list[str]:
    """The name is part of a table's, a directory's and a token file's."""
    if NAME.fullmatch(plan["cluster"]):
        return []
    return [
        f"hy3_cluster is {plan['cluster']!r} (the inventory directory's name if it is not set), and it names files and "
        "a firewall table; use letters, digits, '-', '_' and '.' only."
    ]


def _speculative_problems(plan: Facts) -> list[str]:
    if not plan["speculative"] or plan.get("speculative_args"):
        return []
    return [
        f"hy3_speculative is true, and profile {plan['profile']} has nothing that it switches on; leave it out (a "
        "profile that speculates by itself says so in its engine_args)."
    ]


def _memory_problems(plan: Facts) -> list[str]:
    return [
        f"hy3_memory has {node} {plan['memory'][node]!r}, and it must be a dictionary of caps by unit; write "
        f"`{node}: {{ray: 104G}}`, for instance."
        for node in ("head", "worker")
        if not isinstance(plan["memory"].get(node, {}), t.Mapping)
    ]


def _environment_problems(plan: Facts) -> list[str]:
    """What is resolved on each node, and would be dropped without a word or, where nothing is resolved, stay."""
    shared = [name for name in PER_NODE if name in plan.get("engine_env", {})]
    if not shared or not plan.get("fabric", True):
        return []
    listed = ", ".join(f"{name}={plan['engine_env'][name]}" for name in shared)
    return [
        f"hy3_engine_env has {listed}, and such a value belongs to one node, which finds its own at each start; take "
        "it out, and set hy3_hca or hy3_fabric_interface for a node that is to use another port."
    ]


def plan_problems(plan: Facts, addresses: t.Mapping[str, str]) -> list[str]:
    """One sentence for each way in which ``plan`` does not fit its hosts; empty is good."""
    sizes = _count_problems(plan) or _size_problems(plan)
    rest = _port_problems(plan) + _executor_problems(plan) + _cluster_problems(plan) + _memory_problems(plan)
    rest += _environment_problems(plan)
    return sizes + _address_problems(addresses) + rest + _speculative_problems(plan)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"plan_problems": plan_problems}
