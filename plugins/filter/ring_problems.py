# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``ring_problems``: where the addresses and links that the inventory states do not make a cluster."""

from __future__ import annotations

import typing as t
from difflib import get_close_matches

DOCUMENTATION = r"""
name: ring_problems
short_description: Where the addresses and links of an inventory do not make a cluster
version_added: 0.1.0
description:
  - Each node has one fabric address, or, in a ring without a switch, a link to each neighbour and one address that
    every node reaches. Reads the inventory only; M(sparks.hy3.fabric_info) looks at the nodes.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - The variables of each node by its name, of which C(hy3_fabric_address), C(hy3_host_address) and
        C(hy3_fabric_links) are read.
"""

EXAMPLES = r"""
- name: Refuse links that lead nowhere
  ansible.builtin.assert:
    that: variables_of_node | sparks.hy3.ring_problems | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

Facts = t.Mapping[str, t.Any]
FABRIC = "hy3_fabric_address"
HOST = "hy3_host_address"
LINKS = "hy3_fabric_links"
KEYS = ("interface", "address", "peer")


def _links(node: Facts) -> list[t.Any]:
    return node.get(LINKS) or []


def ring_problems(nodes: t.Mapping[str, Facts]) -> list[str]:
    """One sentence for each way in which what ``nodes`` state does not make a cluster; empty is good."""
    with_links = [name for name, node in nodes.items() if _links(node)]
    without = [name for name in nodes if name not in with_links]
    if not with_links:
        return _straight(nodes)
    if without:
        return [
            f"{', '.join(with_links)} has hy3_fabric_links and {', '.join(without)} has none, and in a ring every node "
            "has; state them for each, or for none."
        ]
    malformed = [sentence for name, node in nodes.items() for sentence in _malformed(name, _links(node))]
    if malformed:
        return malformed
    hostless = [
        f"{name} has hy3_fabric_links and no hy3_host_address, and Ray needs one address that every node reaches; set "
        "it, for instance that of the management network."
        for name, node in nodes.items()
        if not node.get(HOST)
    ]
    return hostless + [sentence for name in nodes for sentence in _dangling(name, nodes)] + _twice(nodes)


def _straight(nodes: t.Mapping[str, Facts]) -> list[str]:
    """A pair or a switch: one fabric address for each node and nothing else. One node alone needs none."""
    problems = [
        f"hy3_fabric_address is not set for {name}, and it is required; set it in the inventory (in a ring "
        "hy3_fabric_links and hy3_host_address)."
        for name, node in nodes.items()
        if not node.get(FABRIC) and len(nodes) > 1
    ]
    problems += [
        f"{name} has hy3_host_address {node[HOST]} and no hy3_fabric_links, and only a ring needs it; take it out, "
        "or state the links."
        for name, node in nodes.items()
        if node.get(HOST)
    ]
    return problems


def _malformed(name: str, links: t.Any) -> list[str]:
    return [
        f"{name} has the link {link!r} in hy3_fabric_links, and each needs {', '.join(KEYS)}; write "
        "`{interface: enp1s0f0np0, address: 192.168.12.1, peer: spark-2}`."
        for link in links
        if not isinstance(link, t.Mapping) or not all(isinstance(link.get(key), str) and link[key] for key in KEYS)
    ]


def _dangling(name: str, nodes: t.Mapping[str, Facts]) -> list[str]:
    problems = []
    for peer in dict.fromkeys(link["peer"] for link in _links(nodes[name])):
        if peer not in nodes or peer == name:
            near = get_close_matches(peer, [other for other in nodes if other != name], n=1)
            way = f"write {near[0]}" if near else f"name one of {', '.join(other for other in nodes if other != name)}"
            problems.append(f"{name} has a link to {peer!r}, which is no other node of this play; {way}.")
        elif name not in [link["peer"] for link in _links(nodes[peer])]:
            problems.append(f"{name} has a link to {peer} and {peer} none to {name}; add it, or take this one out.")
    return problems


def _twice(nodes: t.Mapping[str, Facts]) -> list[str]:
    owners: dict[str, list[str]] = {}
    for name, node in nodes.items():
        for link in _links(node):
            owners.setdefault(link["address"], []).append(f"{link['interface']} of {name}")
    return [
        f"hy3_fabric_links gives {address} to {' and '.join(ports)}, and each port has its own; correct the others."
        for address, ports in owners.items()
        if len(ports) > 1
    ]


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"ring_problems": ring_problems}
