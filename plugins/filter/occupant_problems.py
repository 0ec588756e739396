# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``occupant_problems``: who has taken what a cluster needs on a node."""

from __future__ import annotations

import typing as t

DOCUMENTATION = r"""
name: occupant_problems
short_description: Who has taken what a cluster needs on a node
version_added: 0.1.0
description:
  - Tells the Ray and the ports of other people from the cluster's own, which a second run meets and must accept.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: list
    elements: dict
    required: true
    description: Who listens on the node, RV(sparks.hy3.port_info#module:listeners).
  plan:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  units:
    type: dict
    required: true
    description: What M(sparks.hy3.engine_status) says of the cluster's own units, by name.
"""

EXAMPLES = r"""
- name: Nobody else may be there
  ansible.builtin.assert:
    that: ports.listeners | sparks.hy3.occupant_problems(plan=hy3_plan, units=status.units) | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

Facts = t.Mapping[str, t.Any]
OURS = ("hy3-ray.service", "hy3-serve.service")
# The names of Ray's programs, and what a node is that runs one.
RAY_ROLES = {"gcs_server": "head", "raylet": "worker"}
CLUSTER = " of cluster "  # as the roles write it into the descriptions of their units


def _who(listener: Facts) -> str:
    if listener["pid"] is None:
        return f"an unknown process on {listener['address']}"
    return f"{listener['name']} (pid {listener['pid']}, {listener['unit'] or 'no unit'})"


def _other_cluster(plan: Facts, units: t.Mapping[str, Facts]) -> list[str]:
    """A unit of our own, written and started for another inventory."""
    for name, unit in units.items():
        role, named, cluster = unit["description"].partition(CLUSTER)
        if unit["active_state"] in ("inactive", "failed") or not named or cluster == plan["cluster"]:
            continue
        return [
            f"{name} runs here as '{role}' of cluster '{cluster}', and a node serves one cluster at a time, here "
            f"'{plan['cluster']}'; run stop_hy3 with that cluster's inventory, or set hy3_cluster if it is the same "
            "one."
        ]
    return []


def _other_ray(strangers: t.Sequence[Facts]) -> list[str]:
    """A Ray that we did not start: its head if that is here, else its worker."""
    for name, role in RAY_ROLES.items():
        found = [listener for listener in strangers if listener["name"] == name]
        if found:
            return [
                f"This node is the {role} of another Ray cluster, by {_who(found[0])} on port {found[0]['port']}, and "
                "two Rays would share its GPU and memory; end that one, or take the node out of the inventory."
            ]
    return []


def _wanted_ports(plan: Facts) -> dict[int, str]:
    head, api = plan["node"]["is_head"], {plan["api"]["port"]: "hy3_api_port"}
    if plan["executor"] != "ray":
        # SGLang listens on it on every node.
        wanted = api if head or plan["engine"] == "sglang" else {}
        return wanted | ({plan["rank_port"]: "where the ranks meet"} if head else {})
    wanted = {plan["ray_ports"][name]: f"Ray's {name}" for name in plan["ray_ports"]}
    return wanted | ({plan["ray_port"]: "Ray's head", **api} if head else {})


def _taken_ports(strangers: t.Sequence[Facts], plan: Facts) -> list[str]:
    holders: dict[int, Facts] = {}
    for listener in strangers:
        if listener["name"] not in RAY_ROLES:
            holders.setdefault(listener["port"], listener)
    return [
        f"Port {port} ({what}) is in use by {_who(holders[port])}, and no two can listen on one; stop that process"
        + (", or choose another hy3_api_port." if what == "hy3_api_port" else ".")
        for port, what in sorted(_wanted_ports(plan).items())
        if port in holders
    ]


def occupant_problems(listeners: t.Sequence[Facts], plan: Facts, units: t.Mapping[str, Facts]) -> list[str]:
    """One sentence for each stranger that has what ``plan`` needs on this node; empty is good."""
    strangers = [listener for listener in listeners if listener["unit"] not in OURS]
    return _other_cluster(plan, units) + _other_ray(strangers) + _taken_ports(strangers, plan)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"occupant_problems": occupant_problems}
