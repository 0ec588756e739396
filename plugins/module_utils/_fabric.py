# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What one node has of the fabric, and what is wrong with it there.

Facts are plain dictionaries, as they travel to the controller: see the return values of module ``fabric_info``. A fact
that the kernel does not tell is None, which is neither good nor bad.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re
import typing as t
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._path import Path as PeerPath
from ansible_collections.sparks.hy3.plugins.module_utils._path import route_problem
from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    ADDRESS_VARIABLE,
    Port,
    RoceError,
    Sysfs,
    netdev_name,
    parse_address,
    parse_selector,
    selected_ports,
    usable_ports,
)

LINK_COMMAND = ["ip", "-j", "addr", "show"]
# What the QSFP cages of a DGX Spark link at (NVIDIA's hardware guide).
LINK_GBPS = 200.0
# Holds the largest RoCE packet (4096 bytes of payload) and is what NVIDIA's own guides set.
JUMBO_MTU = 9000

Facts = Mapping[str, t.Any]


def parse_links(text: str) -> list[dict[str, t.Any]]:
    """Return name, mtu (bytes), carrier, parent and IPv4 addresses of each link that ``ip -j addr show`` prints."""
    try:
        return [_link(link) for link in json.loads(text) if link]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise Hy3Error(f"'{' '.join(LINK_COMMAND)}' printed no list of links: install iproute2 5.0 or newer") from exc


def _link(link: Facts) -> dict[str, t.Any]:
    flags, mtu = link.get("flags", []), link.get("mtu")
    addresses = [
        str(ipaddress.IPv4Interface(f"{info['local']}/{info['prefixlen']}"))
        for info in link.get("addr_info", [])
        if info.get("family") == "inet"
    ]
    return {
        "name": netdev_name(link["ifname"]),
        "mtu": mtu if isinstance(mtu, int) else None,
        "carrier": "LOWER_UP" in flags if flags else None,
        "parent": str(link["link"]) if link.get("link") else None,
        "addresses": addresses,
    }


def parse_speed(text: str | None) -> float | None:
    """Return Gbit/s for the text of a netdev's ``speed`` file (Mbit/s); -1 and garbage mean not known."""
    match = re.fullmatch(r"[1-9][0-9]{0,8}", (text or "").strip(), re.ASCII)
    return int(match[0]) / 1000 if match else None


def parse_rate(text: str | None) -> float | None:
    """Return Gbit/s for the text of an HCA port's ``rate`` file, such as ``200 Gb/sec (4X HDR)``."""
    match = re.match(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text or "", re.ASCII)
    return float(match[1]) if match and float(match[1]) else None


def find_twins(devices: Mapping[str, str | None]) -> dict[str, str]:
    """Return the twin of each netdev that has one.

    One cage of a Spark is two PCI functions of the same number in different domains, hence two netdevs and two HCAs.

    Args:
        devices: PCI address (``0002:01:00.1``) of each netdev with an HCA; None if it has none.
    """
    functions = {name: pci.partition(":")[2] for name, pci in devices.items() if pci}
    found = {}
    for name, function in functions.items():
        others = [other for other, same in functions.items() if other != name and same == function]
        if len(others) == 1:
            found[name] = others[0]
    return found


class Reader:
    """Facts of this node from the kernel's tree and the output of :data:`LINK_COMMAND`."""

    def __init__(self, sysfs: Sysfs, links: str) -> None:
        self.sysfs = sysfs
        self.links = {link["name"]: link for link in parse_links(links)}

    def hca(self, port: Port) -> dict[str, t.Any]:
        """Return the facts of an HCA port; one whose table cannot be read has no GIDs and says why."""
        base = self.sysfs.infiniband / port.name / "ports" / str(port.number)
        error, gids = "", []
        try:
            rows = [row for row in self.sysfs.table(port) if row.usable]
            gids = [{"index": row.index, "address": str(row.gid.ipv4_mapped), "netdev": row.ndev} for row in rows]
        except RoceError as exc:
            error = str(exc)
        return {
            "name": port.name,
            "port": port.number,
            "active": port.active,
            "link_layer": port.link_layer,
            "speed": parse_rate(_text(base / "rate")),
            "gids": gids,
            "error": error,
        }

    def netdevs(self, hcas: Sequence[Facts]) -> list[dict[str, t.Any]]:
        """Return each netdev with an HCA behind it or with a GID row of its own, such as a VLAN."""
        behind = {name: self._behind(name) for name in sorted({*self.links, *self._classes()})}
        with_row = {
            name: {hca["name"] for hca in hcas for gid in hca["gids"] if gid["netdev"] == name} for name in behind
        }
        devices = {name: self._pci(name) if names else None for name, names in behind.items()}
        twins = find_twins(devices)
        unknown: dict[str, t.Any] = {"mtu": None, "carrier": None, "parent": None, "addresses": []}
        return [
            {
                **self.links.get(name, {"name": name, **unknown}),
                "speed": parse_speed(_text(self.sysfs.net / name / "speed")),
                "hcas": sorted(names or with_row[name]),
                "pci": devices[name],
                "twin": twins.get(name),
            }
            for name, names in behind.items()
            if names or with_row[name]
        ]

    def _classes(self) -> list[str]:
        return _names(self.sysfs.net)

    def _behind(self, netdev: str) -> list[str]:
        return _names(self.sysfs.net / netdev / "device" / "infiniband")

    def _pci(self, netdev: str) -> str | None:
        place = os.path.basename(os.path.realpath(self.sysfs.net / netdev / "device"))
        return place if re.fullmatch(r"[0-9a-f]{4,}(:[0-9a-f]{2}){2}\.[0-7]", place, re.ASCII) else None


def read_node(
    *,
    address: str | None,
    interface: str | None,
    hca: str | None,
    sysfs: Sysfs,
    links: str,
    ring: Sequence[Facts] = (),
) -> dict[str, t.Any]:
    """Return the facts of a node, in ``problems`` what was asked for and is not there, in ``notes`` what is left out.

    Args:
        address: The node's fabric address, or None to look without one.
        interface: The netdev that the user named, or None for the one that owns the address.
        hca: The ``NCCL_IB_HCA`` selector that the user named, or None for the HCAs behind the netdev.
        sysfs: The kernel's view.
        links: Output of :data:`LINK_COMMAND`.
        ring: ``interface`` and ``address`` of each link of a ring. Their HCAs are then used, and ``address`` may be on
            any interface.

    Raises:
        Hy3Error: ``address``, ``hca``, ``links`` or ``ring`` is malformed.
    """
    reader = Reader(sysfs, links)
    try:
        wanted = None if address is None else str(parse_address(address))
        if hca is not None:
            parse_selector(hca)
        places = [(str(link["interface"]), str(parse_address(link["address"]))) for link in ring]
    except RoceError as exc:
        raise Hy3Error(str(exc)) from exc
    known = list(reader.links.values())
    owner, problems = find_interface(wanted, interface, known)
    for name, place in places:
        problems += find_interface(place, name, known)[1]
    carriers = [name for name, _place in places if name in reader.links] or ([owner] if owner and not places else [])
    ports: list[Port] = []
    try:
        ports = sysfs.ports()
    except RoceError as exc:
        problems.append(f"{exc}; NCCL would use sockets.")
    hcas = [reader.hca(port) for port in ports]
    netdevs = reader.netdevs(hcas)
    notes: list[str] = []
    selected: list[Port] = []
    try:
        if ports and hca is not None:
            selected = selected_ports(hca, ports)
        elif ports:
            behind = [port for name in carriers for port in sysfs.ports_of(name, ports)]
            selected = list(dict.fromkeys(behind))
        if selected:
            selected, warnings = usable_ports(selected)
            notes += [f"{warning}." for warning in warnings]
    except RoceError as exc:
        selected = []
        problems.append(f"{exc}; NCCL would say nothing and fall back to sockets.")
    return {
        "address": wanted,
        "interface": owner,
        "mtu": reader.links[owner]["mtu"] if owner else None,
        "selected": [port.label for port in selected],
        "netdevs": netdevs,
        "hcas": hcas,
        "problems": problems,
        "notes": notes,
    }


def find_interface(address: str | None, interface: str | None, links: Sequence[Facts]) -> tuple[str | None, list[str]]:
    """Return the netdev of the fabric, and why there is none."""
    names = [link["name"] for link in links]
    owned = [(link["name"], _ip(place)) for link in links for place in link["addresses"]]
    owners = [name for name, place in owned if place == address]
    if interface is not None and interface not in names:
        return None, [
            f"This node has no interface {interface!r} (it has {', '.join(names) or 'none'}), on which NCCL and Gloo "
            "stop at the start; correct hy3_fabric_interface or leave it out."
        ]
    if address is not None and not owners:
        others = ", ".join(f"{place} on {name}" for name, place in owned) or "no address"
        return interface, [
            f"No interface owns {address} (there is {others}); correct {ADDRESS_VARIABLE} or configure it."
        ]
    if address is not None and interface is not None and interface not in owners:
        return interface, [
            f"{address} is on {', '.join(owners)}, not on {interface}; correct hy3_fabric_interface or leave it out."
        ]
    if interface is not None:
        return interface, []
    if len(owners) > 1:
        return None, [
            f"{address} is on {' and '.join(owners)}; name one in hy3_fabric_interface, or take one address off."
        ]
    return (owners[0] if owners else None), []


def used_netdevs(facts: Facts) -> list[Facts]:
    """Return the netdevs of a node that carry the cluster's traffic: the fabric's own and those of selected HCAs."""
    names = {label.rpartition(":")[0] for label in facts["selected"]}
    return [
        netdev
        for netdev in facts["netdevs"]
        if netdev["name"] == facts["interface"]
        or (netdev["parent"] is None and netdev["addresses"] and names.intersection(netdev["hcas"]))
    ]


def fabric_addresses(facts: Facts) -> list[tuple[Facts, str]]:
    """Return netdev and address (with prefix length) of each port.

    An address that a port gave itself (169.254/16) counts only if it is the fabric's.
    """
    return [
        (netdev, place)
        for netdev in facts["netdevs"]
        for place in netdev["addresses"]
        if not ipaddress.IPv4Interface(place).is_link_local or _ip(place) == facts["address"]
    ]


def fabric_gids(hca: Facts, facts: Facts) -> list[Facts]:
    """Return the GIDs of an HCA that may lead to a peer, as ``_roce.fabric_rows`` takes them."""
    stacked = {netdev["name"] for netdev in facts["netdevs"] if netdev["parent"] is not None}
    plain = facts["interface"] in {netdev["name"] for netdev in facts["netdevs"]} - stacked
    local = facts["address"] is None or ipaddress.IPv4Address(facts["address"]).is_link_local
    return [
        gid
        for gid in hca["gids"]
        if (local or not ipaddress.IPv4Address(gid["address"]).is_link_local)
        and not (plain and gid["netdev"] in stacked)
    ]


def way_to(peer: str, facts: Facts) -> tuple[str | None, str | None, int | None]:
    """Return interface, own address and MTU (bytes) for a peer: of the port in its subnet, or else the fabric's."""
    places = [
        (netdev, ipaddress.IPv4Interface(place))
        for netdev, place in fabric_addresses(facts)
        if ipaddress.IPv4Address(peer) in ipaddress.IPv4Interface(place).network
    ]
    places.sort(key=lambda found: (found[0]["name"] != facts["interface"], str(found[1].ip) != facts["address"]))
    for netdev, place in places:
        return netdev["name"], str(place.ip), netdev["mtu"]
    return facts["interface"], facts["address"], facts["mtu"]


def link_speed(netdev: Facts, facts: Facts) -> float | None:
    """Return a link's speed in Gbit/s: the slower of what the netdev and its HCA say, None if neither does."""
    own = [hca["speed"] for hca in facts["hcas"] if hca["name"] in netdev["hcas"] and hca["active"]]
    known = [speed for speed in [netdev["speed"], *own] if speed is not None]
    return min(known) if known else None


def node_findings(facts: Facts, paths: Iterable[PeerPath]) -> tuple[list[str], list[str]]:
    """Return problems and warnings of one node, each one sentence."""
    problems, warnings = list(facts["problems"]), list(facts["notes"])
    problems += _hca_problems(facts)
    problems += [
        f"{netdev['name']} has no carrier; bring it up and plug the cable in at both ends, or use another port."
        for netdev in used_netdevs(facts)
        if netdev["carrier"] is False
    ]
    for sentence, serious in _shared_subnets(facts):
        (problems if serious else warnings).append(sentence)
    for netdev in used_netdevs(facts):
        warnings += _link_warnings(netdev, facts)
    for path in paths:
        said = path_findings(path, facts)
        problems += said[0]
        warnings += said[1]
    return problems, warnings


def _hca_problems(facts: Facts) -> list[str]:
    problems = []
    for hca in facts["hcas"]:
        label = f"{hca['name']}:{hca['port']}"
        if label not in facts["selected"]:
            continue
        if hca["error"]:
            problems.append(f"{hca['error']}.")
        elif not fabric_gids(hca, facts):
            others = ", ".join(f"{gid['address']} of {gid['netdev'] or 'no netdev'}" for gid in hca["gids"])
            problems.append(
                f"{label} is selected and has no RoCE v2 GID with an IPv4 address"
                f"{f' of the fabric (it has {others})' if others else ''}; give its netdev an address in a subnet of "
                "its own, or select the other HCA alone with hy3_hca."
            )
    return problems


def _shared_subnets(facts: Facts) -> list[tuple[str, bool]]:
    """Two interfaces of one node in one subnet: the kernel answers on either, so packets arrive at the wrong port."""
    used = [netdev["name"] for netdev in used_netdevs(facts)]
    places = [(netdev["name"], ipaddress.IPv4Interface(place)) for netdev, place in fabric_addresses(facts)]
    found = []
    for number, (name, place) in enumerate(places):
        for other, neighbour in places[number + 1 :]:
            if name != other and place.network.overlaps(neighbour.network):
                sentence = (
                    f"{name} ({place}) and {other} ({neighbour}) are in one subnet, so packets leave by either; give "
                    "each interface a subnet of its own."
                )
                found.append((sentence, {name, other} <= set(used)))
    return found


def _link_warnings(netdev: Facts, facts: Facts) -> list[str]:
    name = netdev["name"]
    warnings: list[str] = []
    speed = link_speed(netdev, facts)
    if speed is not None and speed < LINK_GBPS:
        warnings.append(
            f"{name} links at {speed:g} Gbit/s and a Spark's port does {LINK_GBPS:g}; check the cable and what the "
            "other end offers."
        )
    if netdev["mtu"] is not None and netdev["mtu"] < JUMBO_MTU:
        warnings.append(
            f"{name} has MTU {netdev['mtu']}, so RDMA sends in small packets; set {JUMBO_MTU} on all nodes, in netplan."
        )
    return warnings


def path_findings(path: PeerPath, facts: Facts) -> tuple[list[str], list[str]]:
    """Return problems and warnings of the path to one peer."""
    interface, address, _mtu = way_to(path.address, facts)
    problem = route_problem(path.route, peer=path.address, interface=interface or "", address=address or "")
    if problem:
        return [problem], []
    problems, warnings = _echo_findings(path, interface)
    places = [
        ipaddress.IPv4Interface(place) for netdev, place in fabric_addresses(facts) if netdev["name"] == interface
    ]
    if path.route.gateway and any(ipaddress.IPv4Address(path.address) in place.network for place in places):
        warnings.append(
            f"{path.address} is reached through the gateway {path.route.gateway}, though it is in the subnet of "
            f"{interface}, so packets go through a third machine; take that route out (ip route show)."
        )
    return problems, warnings


def _echo_findings(path: PeerPath, interface: str | None) -> tuple[list[str], list[str]]:
    if path.small is None:
        return [], [f"The path to {path.address} was not tried ({path.error}); run the check as root."]
    if not path.small:
        return [
            f"{path.address} does not answer a small packet through {interface}; check the cable, the peer's address "
            "and its firewall (ICMP echo)."
        ], []
    if path.full is False:
        return [
            f"{path.address} answers small packets through {interface} but none of {path.bytes} bytes, which is this "
            "end's MTU, so a start hangs or dies in retries; set one MTU on both nodes, switch ports and bridges."
        ], []
    if path.full is None:
        reason = path.error or f"the MTU of {interface} is not known"
        return [], [f"The path to {path.address} was tried with small packets only ({reason})."]
    return [], []


def path_facts(path: PeerPath) -> dict[str, t.Any]:
    """Return a path as facts."""
    return {**dataclasses.asdict(path), "route": dataclasses.asdict(path.route)}


def _ip(place: str) -> str:
    return place.partition("/")[0]


def _text(path: Path) -> str | None:
    """Return the text of a file that may be absent or, as a port's speed without carrier, refuse to be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
