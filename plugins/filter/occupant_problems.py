# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``occupant_problems``: who has taken what a cluster needs on a node."""

from __future__ import annotations

import ipaddress
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._ray import ports
from ansible_collections.sparks.hy3.plugins.module_utils._units import of_another_cluster

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


def _who(listener: Facts) -> str:
    if listener["pid"] is None:
        return f"an unknown process on {listener['address']}"
    return f"{listener['name']} (pid {listener['pid']}, {listener['unit'] or 'no unit'})"


def _other_cluster(plan: Facts, units: t.Mapping[str, Facts]) -> list[str]:
    """A unit of our own, written and started for another inventory; the first of several says enough."""
    return [
        f"{name} runs here as '{role}' of cluster '{cluster}', and a node serves one cluster at a time, here "
        f"'{plan['cluster']}'; run stop_hy3 with that cluster's inventory, or set hy3_cluster if it is the same one."
        for name, role, cluster in of_another_cluster(units, plan["cluster"])
    ][:1]


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


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, an IPv4 one also where IPv6 wraps it; None for a name."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _collide(ours: str, theirs: str) -> bool:
    """Whether no two can listen on one port of these addresses: one is every address, or a name, or both are the same.

    An IPv6 socket on all addresses may leave IPv4 alone; the kernel does not tell, and by default it does not.
    """
    pair = {_address(ours), _address(theirs)}
    return len(pair) == 1 or any(address is None or address.is_unspecified for address in pair)


class Wanted(t.NamedTuple):
    """Ports that a node needs, what for, and the address on which it will listen."""

    ports: range
    what: str
    address: str = "0.0.0.0"  # Ray, and where ranks meet, whatever they are told


def _wanted(plan: Facts) -> list[Wanted]:
    head, port, meet = plan["node"]["is_head"], plan["api"]["port"], plan["rank_port"]
    # SGLang listens on it on every node, of which only the head has an API.
    address = plan["api"]["host"] if head else "127.0.0.1"
    api = [Wanted(range(port, port + 1), "hy3_api_port", address)] if head or plan["engine"] == "sglang" else []
    if plan["executor"] != "ray":
        return api + ([Wanted(range(meet, meet + 1), "where the ranks meet")] if head else [])
    return api + [Wanted(found, what) for what, found in ports(plan, head=head).items()]


def _taken_ports(strangers: t.Sequence[Facts], plan: Facts) -> list[str]:
    holders: dict[tuple[int, str], Facts] = {}
    for listener in strangers:
        for wanted in _wanted(plan) if listener["name"] not in RAY_ROLES else ():
            if listener["port"] in wanted.ports and _collide(wanted.address, listener["address"]):
                holders.setdefault((listener["port"], wanted.what), listener)
    return [
        f"Port {port} ({what}) is in use by {_who(holder)}, and no two can listen on one; stop that process"
        + (", or choose another hy3_api_port." if what == "hy3_api_port" else ".")
        for (port, what), holder in sorted(holders.items(), key=lambda found: found[0])
    ]


def occupant_problems(listeners: t.Sequence[Facts], plan: Facts, units: t.Mapping[str, Facts]) -> list[str]:
    """One sentence for each stranger that has what ``plan`` needs on this node; empty is good."""
    # In a container they are the daemon's, in a scope that the unit's client does not share.
    ours = {*OURS, *(unit.get("scope") for unit in units.values())}
    strangers = [listener for listener in listeners if listener["unit"] not in ours]
    return _other_cluster(plan, units) + _other_ray(strangers) + _taken_ports(strangers, plan)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"occupant_problems": occupant_problems}
