# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""How the nodes of a cluster are cabled, and what NCCL makes of it.

Pure: from the facts that ``_fabric.read_node`` found on each node. Two ports are on one link when each one's address
lies in the other's subnet; no cable is looked at.
"""

from __future__ import annotations

import ipaddress
import itertools
import typing as t
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._fabric import (
    Facts,
    fabric_addresses,
    fabric_gids,
    link_speed,
    used_netdevs,
)
from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    Port,
    RoceError,
    exact_selector,
    selected_ports,
    usable_ports,
)

# Without these NCCL (2.30 or newer) opens a switchless ring's connections on ports that are cabled to another node.
RING_ENVIRONMENT = {"NCCL_IB_SUBNET_AWARE_ROUTING": "1", "NCCL_IB_MERGE_NICS": "0", "NCCL_CROSS_NIC": "1"}
# Each rail has a subnet of its own, so a port reaches only the peer's port on the same rail.
RAIL_ENVIRONMENT = {"NCCL_CROSS_NIC": "0"}


@dataclass(frozen=True)
class End:
    """A port with a fabric address; ``mtu`` in bytes, ``speed`` in Gbit/s, both None if not known."""

    node: str
    interface: str
    place: ipaddress.IPv4Interface
    mtu: int | None
    speed: float | None
    used: bool

    def meets(self, other: End) -> bool:
        """Whether two ports of different nodes are on one link."""
        return (
            self.node != other.node
            and self.place.ip != other.place.ip
            and self.place.ip in other.place.network
            and other.place.ip in self.place.network
        )

    @property
    def label(self) -> str:
        return f"{self.interface} of {self.node}"


Link = tuple[End, End]


@dataclass(frozen=True)
class Shape:
    """How nodes are cabled.

    ``topology`` is single, pair, switch, ring or broken; ``rails`` are the subnets on which every node is; ``apart``
    are the pairs without a link.
    """

    topology: str
    rails: tuple[str, ...]
    apart: tuple[tuple[str, str], ...]


def find_ends(node: str, facts: Facts) -> list[End]:
    """Return the ports of a node that have a fabric address and are not known to lack a carrier."""
    used = [netdev["name"] for netdev in used_netdevs(facts)]
    return [
        End(
            node=node,
            interface=netdev["name"],
            place=ipaddress.IPv4Interface(place),
            mtu=netdev["mtu"],
            speed=link_speed(netdev, facts),
            used=netdev["name"] in used,
        )
        for netdev, place in fabric_addresses(facts)
        if netdev["carrier"] is not False
    ]


def find_links(ends: Sequence[End]) -> list[Link]:
    """Return each two ports that are on one link."""
    return [(a, b) for a, b in itertools.combinations(ends, 2) if a.meets(b)]


def reach(links: Sequence[Link]) -> dict[str, dict[str, str]]:
    """Return, for each node, the address at which it reaches each other: a port that both use comes first."""
    found: dict[str, dict[str, str]] = {}
    for a, b in sorted(links, key=lambda link: not (link[0].used and link[1].used)):
        found.setdefault(a.node, {}).setdefault(b.node, str(b.place.ip))
        found.setdefault(b.node, {}).setdefault(a.node, str(a.place.ip))
    return found


def other_rails(nodes: Mapping[str, Facts], links: Sequence[Link]) -> dict[str, list[str]]:
    """Return, for each node, its peers' addresses in use besides their fabric addresses."""
    own = {facts["address"] for facts in nodes.values()}
    found: dict[str, set[str]] = {name: set() for name in nodes}
    for a, b in links:
        if a.used and b.used:
            found[a.node] |= {str(b.place.ip)} - own
            found[b.node] |= {str(a.place.ip)} - own
    return {name: sorted(addresses) for name, addresses in found.items()}


def classify(nodes: Sequence[str], ends: Sequence[End], links: Sequence[Link]) -> Shape:
    """Return the topology of a cluster."""
    pairs = {frozenset((a.node, b.node)) for a, b in links}
    apart = tuple((a, b) for a, b in itertools.combinations(nodes, 2) if frozenset((a, b)) not in pairs)
    subnets = sorted({a.place.network for a, _b in links})
    rails = tuple(str(net) for net in subnets if {end.node for end in ends if end.place.ip in net} == set(nodes))
    if len(nodes) < 2:
        return Shape("single", (), ())
    if len(nodes) == 2:
        return Shape("broken" if apart else "pair", rails, apart)
    if rails:
        return Shape("switch", rails, apart)
    degrees = [sum(node in pair for pair in pairs) for node in nodes]
    ring = min(degrees) >= 2 and _connected(nodes, pairs)
    return Shape("ring" if ring else "broken", (), apart)


def _connected(nodes: Sequence[str], pairs: set[frozenset[str]]) -> bool:
    reached = {nodes[0]}
    while more := {node for pair in pairs if pair & reached for node in pair} - reached:
        reached |= more
    return reached == set(nodes)


def link_findings(link: Link) -> tuple[list[str], list[str]]:
    """Return problems and warnings of one link; what nobody uses is only worth a warning."""
    a, b = link
    problems: list[str] = []
    warnings: list[str] = []
    if a.mtu is not None and b.mtu is not None and a.mtu != b.mtu:
        (problems if a.used and b.used else warnings).append(
            f"{a.label} has MTU {a.mtu} and {b.label} {b.mtu}, so small messages pass and large ones are lost; set one "
            "value on both, where it survives a restart (netplan)."
        )
    if a.speed is not None and b.speed is not None and a.speed != b.speed:
        warnings.append(
            f"{a.label} links at {a.speed:g} Gbit/s and {b.label} at {b.speed:g}; check the cable of the slower one."
        )
    if a.place.network != b.place.network:
        warnings.append(
            f"{a.label} has {a.place} and {b.label} {b.place}, which are unlike subnets; use one prefix length."
        )
    return problems, warnings


def find_duplicates(ends: Sequence[End]) -> list[str]:
    """Return a sentence for each address that several nodes have."""
    owners: dict[str, list[str]] = {}
    for end in ends:
        owners.setdefault(str(end.place.ip), []).append(end.label)
    return [
        f"{address} is the address of {' and '.join(labels)}; give each port its own."
        for address, labels in owners.items()
        if len(labels) > 1
    ]


def gid_indexes(facts: Facts) -> list[set[int]]:
    """Return the usable GID indexes of each HCA port that carries traffic."""
    return [
        {gid["index"] for gid in fabric_gids(hca, facts)}
        for hca in facts["hcas"]
        if f"{hca['name']}:{hca['port']}" in facts["selected"]
    ]


def own_gid(facts: Facts) -> int | None:
    """Return the GID index of a node's fabric address, None if there is none."""
    found = [
        gid["index"]
        for hca in facts["hcas"]
        for gid in hca["gids"]
        if gid["address"] == facts["address"] and gid["netdev"] in ("", facts["interface"])
    ]
    return min(found, default=None)


def node_environment(facts: Facts) -> dict[str, str]:
    """Return what NCCL and Gloo need on one node besides the GID index, which is resolved at each start."""
    ports = [Port(hca["name"], hca["port"]) for hca in facts["hcas"]]
    selected = [port for port in ports if port.label in facts["selected"]]
    interface = facts["interface"]
    return {
        **({"NCCL_IB_HCA": exact_selector(selected, ports)} if selected else {}),
        **({"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface} if interface else {}),
    }


def judge(nodes: Mapping[str, Facts], environment: Mapping[str, str]) -> dict[str, t.Any]:
    """Return the topology of a cluster, what is wrong with it and what NCCL will do.

    Args:
        nodes: The facts of each node by its name, ``problems`` and ``notes`` of its own included.
        environment: What the engine's processes will be started with on all nodes.
    """
    ends = [end for name, facts in nodes.items() for end in find_ends(name, facts)]
    links = find_links(ends)
    shape = classify(list(nodes), ends, links)
    problems = [f"{name}: {sentence}" for name, facts in nodes.items() for sentence in facts["problems"]]
    warnings = [f"{name}: {sentence}" for name, facts in nodes.items() for sentence in facts["notes"]]
    problems += find_duplicates(ends)
    for link in links:
        said = link_findings(link)
        problems += said[0]
        warnings += said[1]
    problems += _apart(nodes, shape, links)
    if shape.topology in ("pair", "switch"):
        said = _rail_findings(nodes, ends, environment)
        problems += said[0]
        warnings += said[1]
    nccl, wanted, unset = _nccl(nodes, shape)
    if shape.topology == "ring":
        problems += _ring_problems(environment, wanted, unset)
    else:
        problems += _shared_values(nodes, environment, unset)
    return {
        "topology": shape.topology,
        "rails": list(shape.rails),
        "reach": reach(links),
        "other_rails": other_rails(nodes, links),
        "problems": problems,
        "warnings": warnings,
        "nccl": nccl,
        "set": {name: {**node_environment(facts), **wanted} for name, facts in nodes.items()},
        "unset": unset,
    }


def _apart(nodes: Mapping[str, Facts], shape: Shape, links: Sequence[Link]) -> list[str]:
    """Pairs of ranks that cannot talk: no link at all, or none between the addresses that were given."""
    used = {frozenset((a.node, b.node)) for a, b in links if a.used and b.used}
    pairs = itertools.combinations(nodes, 2)
    apart = shape.apart if shape.topology == "ring" else [pair for pair in pairs if frozenset(pair) not in used]
    return [
        f"{a} ({_places(nodes[a])}) and {b} ({_places(nodes[b])}) have no RoCE subnet in common, and every two ranks "
        "talk; give both an address in one subnet, on ports that one cable or switch joins."
        for a, b in apart
    ]


def _places(facts: Facts) -> str:
    ports = [f"{place} on {netdev['name']}" for netdev, place in fabric_addresses(facts)]
    return ", ".join(ports) or "no fabric address"


def _places_of(ends: Sequence[End]) -> str:
    return ", ".join(f"{end.interface} with {end.place}" for end in ends)


def _meet(one: Sequence[End], two: Sequence[End]) -> bool:
    return any(a.meets(b) for a, b in itertools.product(one, two))


def _used_by_hca(facts: Facts, ends: Sequence[End]) -> dict[str, list[End]]:
    """The ports in use of one node by their selected HCA, as NCCL counts HCAs: in the order of the PCI bus."""
    found = {}
    for hca in {label.rpartition(":")[0] for label in facts["selected"]}:
        pci = {netdev["name"]: netdev["pci"] or "" for netdev in facts["netdevs"] if hca in netdev["hcas"]}
        if own := [end for end in ends if end.used and end.interface in pci]:
            found[max(pci.values()).rjust(16), hca] = own
    return {hca: found[pci, hca] for pci, hca in sorted(found)}


def _rail_findings(
    nodes: Mapping[str, Facts], ends: Sequence[End], environment: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Problems and warnings of HCAs that meet none of a peer's, or not the one that NCCL pairs them with."""
    if str(environment.get("NCCL_IB_DISABLE")) == "1":
        return [], []
    used = {name: _used_by_hca(facts, [end for end in ends if end.node == name]) for name, facts in nodes.items()}
    every = {name: [end for own in by_hca.values() for end in own] for name, by_hca in used.items()}
    problems: list[str] = []
    for name, by_hca in used.items():
        # Nodes without any link in use are said to be apart.
        peers = [peer for peer in nodes if _meet(every[name], every[peer])]
        for hca, own in by_hca.items():
            if lone := [peer for peer in peers if not _meet(own, every[peer])]:
                theirs = "; ".join(f"{peer} has {_places_of(every[peer])}" for peer in lone)
                problems.append(
                    f"{hca} of {name} ({_places_of(own)}) is selected and shares no subnet with a selected HCA of "
                    f"{', '.join(lone)} ({theirs}), so NCCL's connections from it time out; give both ends of its "
                    "cable one subnet, or select the same rails on all nodes with hy3_hca."
                )
    if not problems and str(environment.get("NCCL_IB_SUBNET_AWARE_ROUTING")) != "1":
        problems = [
            sentence for a, b in itertools.combinations(nodes, 2) for sentence in _crossed(a, used[a], b, used[b])
        ]
    counts = {name: len(by_hca) for name, by_hca in used.items() if by_hca}
    if len(set(counts.values())) < 2:
        return problems, []
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    return problems, [
        f"The nodes use unlike numbers of HCAs ({listed}), so NCCL has channels that share one; select as many on each "
        "node with hy3_hca."
    ]


def _crossed(a: str, one: Mapping[str, list[End]], b: str, two: Mapping[str, list[End]]) -> list[str]:
    """NCCL pairs the n-th HCA of one node with the n-th of the other, whatever their subnets are."""
    wrong = [pair for pair in zip(one.items(), two.items(), strict=False) if not _meet(pair[0][1], pair[1][1])]
    # With one HCA each they are apart, which is said.
    if len(one) != len(two) or len(one) < 2 or not wrong:
        return []
    (hca, own), (other, places) = wrong[0]
    return [
        f"NCCL pairs {hca} of {a} ({_places_of(own)}) with {other} of {b} ({_places_of(places)}), for it goes by the "
        "order of the HCAs, and they share no subnet, so its start times out; exchange the cables or the addresses of "
        f"the ports of {b}."
    ]


def _shared_values(nodes: Mapping[str, Facts], environment: Mapping[str, str], unset: Sequence[str]) -> list[str]:
    """What the environment of all nodes says and is wrong on one of them; values that belong to a node have no use."""
    problems = [
        f"{name}={environment[name]} is set on all nodes, and the HCAs of one have no GID index in common; take it out "
        "of hy3_engine_env, so that NCCL chooses."
        for name in unset
        if name in environment
    ]
    index, hca = environment.get("NCCL_IB_GID_INDEX"), environment.get("NCCL_IB_HCA")
    for node, facts in nodes.items():
        own = own_gid(facts)
        if not unset and index is not None and own is not None and str(index).strip() != str(own):
            problems.append(
                f"{node}: NCCL_IB_GID_INDEX={index} is set on all nodes, and {facts['address']} is at {own} here; take "
                "it out of hy3_engine_env, for each start finds it."
            )
        ports = [Port(each["name"], each["port"], each["active"], each["link_layer"]) for each in facts["hcas"]]
        try:
            if hca is not None and ports:
                usable_ports(selected_ports(str(hca), ports))
        except RoceError as exc:
            problems.append(
                f"{node}: NCCL_IB_HCA={hca} is set on all nodes ({exc}); take it out of hy3_engine_env, and set "
                "hy3_hca for the nodes that need it."
            )
    return problems


def _ring_problems(environment: Mapping[str, str], wanted: Mapping[str, str], unset: Sequence[str]) -> list[str]:
    if str(environment.get("NCCL_IB_DISABLE")) == "1":
        return []
    missing = [f"{name}={value}" for name, value in wanted.items() if str(environment.get(name)) != value]
    missing += [f"no {name}" for name in unset if name in environment]
    if not missing:
        return []
    return [
        "The nodes form a ring without a switch, where NCCL connects through ports that are cabled to another node and "
        f"its start times out; set {' '.join(missing)} in hy3_engine_env with NCCL 2.30 or newer, or use a switch."
    ]


def _nccl(nodes: Mapping[str, Facts], shape: Shape) -> tuple[list[str], dict[str, str], list[str]]:
    """What NCCL will do in sentences, what to set on all nodes, and what must not be set."""
    if shape.topology == "single":
        return ["NCCL needs no network on one node."], {}, []
    if shape.topology == "broken":
        return ["NCCL cannot connect every two ranks."], {}, []
    if shape.topology == "ring":
        return (
            [
                "NCCL gives its channels the HCAs in turn, whichever node each is cabled to; with 2.30 or newer and "
                "subnet-aware routing it takes the port in the peer's subnet, and finds the GID index of each itself."
            ],
            RING_ENVIRONMENT,
            ["NCCL_IB_GID_INDEX"],
        )
    return _rails(nodes, shape)


def _rails(nodes: Mapping[str, Facts], shape: Shape) -> tuple[list[str], dict[str, str], list[str]]:
    by_node = {name: [label.rpartition(":")[0] for label in facts["selected"]] for name, facts in nodes.items()}
    listed = "; ".join(f"{name} {', '.join(hcas) or 'none'}" for name, hcas in by_node.items())
    several = max(len(hcas) for hcas in by_node.values()) > 1
    nccl = [f"NCCL {'spreads its channels over the HCAs' if several else 'uses one HCA'} of each node ({listed})."]
    if not several and len(shape.rails) > 1:
        nccl.append(
            f"The nodes share {len(shape.rails)} rails ({', '.join(shape.rails)}) and one is used; name an HCA of each "
            "in hy3_hca to use them."
        )
    for name, facts in nodes.items():
        nccl += [f"{name}: {sentence}" for sentence in _idle_twins(facts)]
    own = {name: index for name, facts in nodes.items() if (index := own_gid(facts)) is not None}
    if len(set(own.values())) > 1:
        listed = ", ".join(f"{name} {index}" for name, index in own.items())
        nccl.append(f"The GID index differs ({listed}), so NCCL_IB_GID_INDEX must not be one value for all nodes.")
    tables = [sets for facts in nodes.values() if (sets := gid_indexes(facts)) and all(sets)]
    unset = [] if all(set.intersection(*sets) for sets in tables) else ["NCCL_IB_GID_INDEX"]
    if unset:
        nccl.append(
            "The HCAs of a node have no GID index in common, so NCCL has to choose one for each (2.21 or newer does)."
        )
    return nccl, RAIL_ENVIRONMENT if several else {}, unset


def _idle_twins(facts: Facts) -> list[str]:
    """One cage is two netdevs; with an address on one of them half of its bandwidth is used."""
    bare = {netdev["name"] for netdev in facts["netdevs"] if not netdev["addresses"]}
    return [
        f"{netdev['twin']} shares the cage of {netdev['name']} and has no address, so one HCA carries what two could; "
        "give it a subnet of its own and name both HCAs to use it."
        for netdev in used_netdevs(facts)
        if netdev["twin"] in bare
    ]
