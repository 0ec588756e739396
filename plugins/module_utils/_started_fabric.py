# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a process was started with for NCCL and Gloo, held against the node that it runs on.

Other values than ours are no fault while they work here: a prefix, both HCAs of a cage, a list that has more.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    Port,
    RoceError,
    Selector,
    index_text,
    parse_selector,
)

Facts = t.Mapping[str, t.Any]
ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Usable:
    """A port that NCCL can use, and the indexes of its usable rows: address by index."""

    port: Port
    rows: dict[int, str]


@dataclass(frozen=True)
class NodeFabric:
    """The fabric of one node.

    ``ports`` and ``interfaces`` are all that it has, or those of its fabric address where more is not known, which
    ``whole_ports`` and ``whole_interfaces`` say.
    """

    address: str
    index: int | None
    interface: str
    hca: str
    ports: list[Usable]
    whole_ports: bool
    interfaces: list[str]
    whole_interfaces: bool

    @property
    def own(self) -> list[Usable]:
        """The ports that the fabric address leads to."""
        return _matching(parse_selector(self.hca), self.ports)


def node_fabric(roce: Facts, hcas: t.Sequence[Facts], interfaces: t.Sequence[str]) -> NodeFabric | None:
    """The fabric from what ``roce_gid`` and ``fabric_info`` returned; None if the first could not tell."""
    if not roce.get("hca") or not roce.get("interface"):
        return None
    tables = {(one["name"], one["port"]): one for one in roce.get("hcas") or []}
    ports = [
        Usable(Port(one["name"], one["port"]), {gid["index"]: gid["address"] for gid in one["gids"]})
        for one in hcas
        if one["active"] and one["link_layer"] == "Ethernet"
    ]
    if not ports:
        named = list(tables) or [(name, number or 1) for name, number in parse_selector(roce["hca"]).entries]
        index = roce.get("gid_index")
        ports = [
            Usable(Port(*place), dict.fromkeys(tables[place]["usable"], "") if place in tables else {})
            for place in named
        ]
        ports = [Usable(one.port, one.rows or ({} if index is None else {index: ""})) for one in ports]
    return NodeFabric(
        address=roce.get("address") or "",
        index=roce.get("gid_index"),
        interface=roce["interface"],
        hca=roce["hca"],
        ports=ports,
        whole_ports=bool(hcas),
        interfaces=list(interfaces) or [roce["interface"]],
        whole_interfaces=bool(interfaces),
    )


def _matching(selector: Selector, ports: t.Sequence[Usable]) -> list[Usable]:
    return [
        one for one in ports if any(selector.matches(entry, one.port) for entry in selector.entries) != selector.exclude
    ]


def _labels(ports: t.Sequence[Usable]) -> str:
    return ", ".join(one.port.label for one in ports) or "none"


def _hca_fault(value: str, node: NodeFabric) -> tuple[str, str] | None:
    way = f"start it with NCCL_IB_HCA={node.hca}"
    try:
        chosen = _matching(parse_selector(value), node.ports)
    except RoceError as exc:
        return ERROR, f"NCCL_IB_HCA: {exc}; {way}"
    known = "ACTIVE here are" if node.whole_ports else "this node's is"
    if not chosen:
        return ERROR, (
            f"NCCL_IB_HCA={value}, which is no ACTIVE RoCE port of this node ({known} {_labels(node.ports)}), so NCCL "
            f"uses sockets or fails; {way}"
        )
    if not set(map(_label, chosen)) & set(map(_label, node.own)):
        return WARNING, (
            f"NCCL_IB_HCA={value}, and the fabric address {node.address} is behind {node.hca.removeprefix('=')}; {way}"
            ", unless the other nodes are reached through that port"
        )
    return None


def _label(one: Usable) -> str:
    return one.port.label


def _index_fault(value: str, chosen: t.Sequence[Usable], node: NodeFabric) -> tuple[str, str] | None:
    try:
        text = index_text(value)
    except RoceError:
        return None  # rule nccl-gid-index-empty says it
    if text is None:
        return None
    index = int(text)
    way = "take it out" if node.index is None else f"start it with NCCL_IB_GID_INDEX={node.index}"
    for one in chosen:
        if index not in one.rows:
            usable = ", ".join(map(str, sorted(one.rows))) or "none"
            return ERROR, (
                f"NCCL_IB_GID_INDEX={value}, which is no RoCE v2 row with an IPv4 address on {one.port.label} (usable "
                f"there: {usable}), and each node has its own; {way}"
            )
    for one in chosen:
        if node.address in one.rows.values() and one.rows[index] != node.address:
            return WARNING, (
                f"NCCL_IB_GID_INDEX={value}, which is {one.rows[index]} on {one.port.label} and not the fabric address "
                f"{node.address}; {way}"
            )
    return None


def _interface_fault(name: str, value: str, node: NodeFabric) -> tuple[str, str] | None:
    nccl = name.startswith("NCCL")
    if not nccl and value[:1] in ("=", "^"):
        return None  # rule gloo-interface says it
    exclude, rest = (value.startswith("^"), value.removeprefix("^")) if nccl else (False, value)
    exact, rest = (rest.startswith("="), rest.removeprefix("=")) if nccl else (True, rest)
    words = [word.strip().partition(":")[0] for word in rest.split(",") if word.strip()]
    if not words:
        return None

    def meant(interface: str) -> bool:
        hit = any(interface == word if exact else interface.startswith(word) for word in words)
        return hit != exclude

    if meant(node.interface):
        return None
    way = f"start it with {name}={'=' if nccl else ''}{node.interface}"
    where = f"the fabric address {node.address} is on {node.interface}"
    if node.whole_interfaces and any(meant(interface) for interface in node.interfaces):
        return WARNING, f"{name}={value}, and {where}; {way}, unless that network is meant"
    return ERROR, f"{name}={value}, which is no interface of this node's fabric ({where}), so it cannot start; {way}"


def started_faults(environment: t.Mapping[str, str], node: NodeFabric) -> list[tuple[str, str]]:
    """Severity and sentence (without the process and the full stop) for each variable that does not work here."""
    faults: list[tuple[str, str] | None] = []
    if environment.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        hca = environment.get("NCCL_IB_HCA")
        fault = _hca_fault(hca, node) if hca else None
        faults.append(fault)
        # Where the HCA is wrong, its rows say nothing.
        chosen = node.own if not hca or (fault and fault[0] == ERROR) else _matching(parse_selector(hca), node.ports)
        faults.append(_index_fault(environment.get("NCCL_IB_GID_INDEX", ""), chosen, node))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if environment.get(name):
            faults.append(_interface_fault(name, environment[name], node))
    return [fault for fault in faults if fault]
