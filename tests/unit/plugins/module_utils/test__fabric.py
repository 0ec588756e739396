# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._fabric import (
    find_twins,
    node_findings,
    parse_links,
    parse_rate,
    parse_speed,
    read_node,
    way_to,
)
from ansible_collections.sparks.hy3.plugins.module_utils._path import Path as PeerPath
from ansible_collections.sparks.hy3.plugins.module_utils._path import Route
from ansible_collections.sparks.hy3.plugins.module_utils._roce import Sysfs
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.fabric_facts import Facts, node, port
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import UNREADABLE, Row, make_sysfs, v4

A, B, TWIN = "enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"


def ip_link(name: str, *places: str, up: bool = True, **other: t.Any) -> Facts:
    """An entry of ``ip -j addr show``."""
    return {
        "ifname": name,
        "flags": ["BROADCAST", "UP", "LOWER_UP"] if up else ["NO-CARRIER", "BROADCAST", "UP"],
        "mtu": 9000,
        "addr_info": [
            {"family": "inet", "local": place.partition("/")[0], "prefixlen": int(place.partition("/")[2])}
            for place in places
        ]
        + [{"family": "inet6", "local": "fe80::1", "prefixlen": 64}],
        **other,
    }


LINKS = json.dumps(
    [
        {},
        ip_link("lo", "127.0.0.1/8", mtu=65536),
        ip_link("enP7s7", "192.168.1.5/24", mtu=1500),
        ip_link(A, up=False),
        ip_link(B, "10.77.0.1/24", "10.9.0.1/24"),
        ip_link(f"{B}.40", "10.40.0.1/24", link=B),
        ip_link(TWIN, "10.78.0.1/24"),
    ]
)
PORTS: dict[str, list[Row]] = {
    "rocep1s0f0:1": [],
    "rocep1s0f1:1": [
        (0, "fe80::1", "RoCE v2", B),
        (2, v4("10.77.0.1"), "IB/RoCE v1", B),
        (3, v4("10.77.0.1"), "RoCE v2", B),
        (4, v4("10.77.0.9"), None, ""),
        (10, v4("10.40.0.1"), "RoCE v2", f"{B}.40"),
    ],
    "roceP2p1s0f1:1": [(3, v4("10.78.0.1"), "RoCE v2", TWIN)],
}
DEVICES = {A: ["rocep1s0f0"], B: ["rocep1s0f1"], TWIN: ["roceP2p1s0f1"], "enP7s7": []}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A Spark: one cage with a cable, hence two HCAs, the other without."""
    root = make_sysfs(tmp_path / "sys", PORTS, devices=DEVICES, down=["rocep1s0f0:1"])
    for netdev, pci in ((A, "0000:01:00.0"), (B, "0000:01:00.1"), (TWIN, "0002:01:00.1"), ("enP7s7", "0007:01:00.0")):
        device = root / "class" / "net" / netdev / "device"
        place = root / "devices" / pci
        device.rename(place)
        device.symlink_to(place)
        speed = device.parent / "speed"
        if netdev == A:
            speed.symlink_to(UNREADABLE)
        else:
            speed.write_text("200000\n")
    for name in DEVICES[A] + DEVICES[B] + DEVICES[TWIN]:
        base = root / "devices" / name / "ports" / "1"
        (base / "rate").write_text("200 Gb/sec (4X HDR)\n")
        (base / "link_layer").write_text("Ethernet\n")
    return root


def read(root: Path, *, address: str | None = None, interface: str | None = None, hca: str | None = None) -> Facts:
    return read_node(address=address, interface=interface, hca=hca, sysfs=Sysfs(str(root)), links=LINKS)


def test_read_node(root: Path) -> None:
    facts = read(root, address="10.77.0.1")
    assert {name: facts[name] for name in ("address", "interface", "mtu", "selected", "problems")} == {
        "address": "10.77.0.1",
        "interface": B,
        "mtu": 9000,
        "selected": ["rocep1s0f1:1"],
        "problems": [],
    }
    assert [(each["name"], each["hcas"], each["twin"], each["speed"]) for each in facts["netdevs"]] == [
        (TWIN, ["roceP2p1s0f1"], B, 200.0),
        (A, ["rocep1s0f0"], None, None),
        (B, ["rocep1s0f1"], TWIN, 200.0),
        (f"{B}.40", ["rocep1s0f1"], None, None),
    ]
    assert facts["netdevs"][2] == {
        "name": B,
        "mtu": 9000,
        "carrier": True,
        "parent": None,
        "addresses": ["10.77.0.1/24", "10.9.0.1/24"],
        "speed": 200.0,
        "hcas": ["rocep1s0f1"],
        "pci": "0000:01:00.1",
        "twin": TWIN,
    }
    assert facts["hcas"][2] == {
        "name": "rocep1s0f1",
        "port": 1,
        "active": True,
        "link_layer": "Ethernet",
        "speed": 200.0,
        "gids": [
            {"index": 3, "address": "10.77.0.1", "netdev": B},
            {"index": 10, "address": "10.40.0.1", "netdev": f"{B}.40"},
        ],
        "error": "",
    }


# address, interface, HCA, (interface found, selected HCAs)
FOUND: dict[str, tuple[str | None, str | None, str | None, tuple[str | None, list[str]]]] = {
    "second address": ("10.9.0.1", None, None, (B, ["rocep1s0f1:1"])),
    "VLAN": ("10.40.0.1", None, None, (f"{B}.40", ["rocep1s0f1:1"])),
    "named": ("10.77.0.1", B, "=rocep1s0f1,roceP2p1s0f1", (B, ["roceP2p1s0f1:1", "rocep1s0f1:1"])),
    "without an address": (None, TWIN, None, (TWIN, ["roceP2p1s0f1:1"])),
    "nothing asked": (None, None, None, (None, [])),
}


@pytest.mark.parametrize(("address", "interface", "hca", "expected"), FOUND.values(), ids=FOUND)
def test_what_is_used(
    root: Path, address: str | None, interface: str | None, hca: str | None, expected: tuple[str | None, list[str]]
) -> None:
    facts = read(root, address=address, interface=interface, hca=hca)
    assert (facts["interface"], facts["selected"]) == expected
    assert node_findings(facts, []) == ([], [])


ASKED_IN_VAIN: dict[str, tuple[dict[str, str], str]] = {
    "interface that does not exist": (
        {"address": "10.77.0.1", "interface": "enp1s0f9"},
        "This node has no interface 'enp1s0f9' (it has lo, enP7s7, enp1s0f0np0, enp1s0f1np1, enp1s0f1np1.40, "
        "enP2p1s0f1np1), on which NCCL and Gloo stop at the start; correct hy3_fabric_interface or leave it out.",
    ),
    "HCA that does not exist": (
        {"address": "10.77.0.1", "hca": "=rocep1s0f9"},
        "No HCA of this node matches rocep1s0f9: it has roceP2p1s0f1:1, rocep1s0f0:1, rocep1s0f1:1, so correct hy3_hca "
        "or leave it out; NCCL would say nothing and fall back to sockets.",
    ),
    "address that nobody has": ({"address": "10.0.0.1"}, "No interface owns 10.0.0.1 (there is 127.0.0.1 on lo, "),
    "address of another": (
        {"address": "10.78.0.1", "interface": B},
        "10.78.0.1 is on enP2p1s0f1np1, not on enp1s0f1np1; correct hy3_fabric_interface or leave it out.",
    ),
    "no HCA behind it": (
        {"address": "192.168.1.5"},
        "No RDMA device behind enP7s7: set hy3_fabric_address (in a ring hy3_host_address) to that of a RoCE port, or "
        "name its HCA in hy3_hca; NCCL would say nothing and fall back to sockets.",
    ),
    "HCA without a cable": (
        {"address": "10.77.0.1", "hca": "=rocep1s0f0"},
        "No selected HCA port is ACTIVE (rocep1s0f0:1): check the cable and, if it is set, hy3_hca; NCCL would say "
        "nothing and fall back to sockets.",
    ),
}


def test_a_port_without_a_cable_is_left_out_beside_another(root: Path) -> None:
    facts = read(root, address="10.77.0.1", hca="rocep1s0f")
    assert facts["selected"] == ["rocep1s0f1:1"]
    assert node_findings(facts, []) == ([], ["rocep1s0f0:1 is not ACTIVE and is left out."])


def test_a_selector_that_leaves_nothing(root: Path) -> None:
    (problem,) = node_findings(read(root, address="10.77.0.1", hca="^roce"), [])[0]
    assert problem.startswith("HCA selector '^roce' excludes every HCA of this node: it has roceP2p1s0f1:1, ")


def test_an_infiniband_port(root: Path) -> None:
    (root / "devices" / "rocep1s0f1" / "ports" / "1" / "link_layer").write_text("InfiniBand\n")
    (problem,) = node_findings(read(root, address="10.77.0.1"), [])[0]
    assert problem.startswith("No selected HCA port has the link layer Ethernet (rocep1s0f1:1: InfiniBand), ")


@pytest.mark.parametrize(("asked", "start"), ASKED_IN_VAIN.values(), ids=ASKED_IN_VAIN)
def test_asked_in_vain(root: Path, asked: dict[str, str], start: str) -> None:
    problems, _notes = node_findings(read(root, **asked), [])
    assert [problem[: len(start)] for problem in problems] == [start]


def test_a_node_without_hca(tmp_path: Path) -> None:
    problems, _notes = node_findings(read(tmp_path, address="10.77.0.1"), [])
    assert problems == [
        f"{tmp_path}/class/infiniband has no HCA: load the RDMA driver (mlx5_ib) or correct hy3_sysfs_root; NCCL would "
        "use sockets."
    ]


@pytest.mark.parametrize("asked", [{"address": "10.77.0.1/24"}, {"address": "10.77.0.1", "hca": "a b"}])
def test_malformed_options(root: Path, asked: dict[str, str]) -> None:
    with pytest.raises(Hy3Error, match="is no IPv4 address|HCA selector"):
        read(root, **asked)


@pytest.mark.parametrize(
    "text", ["", "Usage: ip", "[1]", '[{"mtu": 1}]', '[{"ifname": "a/b"}]', '[{"ifname": "\\u0000"}]', "[" * 99999]
)
def test_parse_links_refuses(text: str) -> None:
    with pytest.raises(Hy3Error, match="printed no list of links"):
        parse_links(text)


SPEEDS: list[tuple[str | None, float | None]] = [
    ("200000\n", 200.0),
    ("2500", 2.5),
    ("-1\n", None),
    ("0", None),
    ("", None),
    (None, None),
    ("fast", None),
]


@pytest.mark.parametrize(("text", "expected"), SPEEDS)
def test_parse_speed(text: str | None, expected: float | None) -> None:
    assert parse_speed(text) == expected


RATES: list[tuple[str | None, float | None]] = [
    ("200 Gb/sec (4X HDR)\n", 200.0),
    ("2.5 Gb/sec (1X SDR)\n", 2.5),
    ("0 Gb/sec", None),
    ("200", None),
    (None, None),
]


@pytest.mark.parametrize(("text", "expected"), RATES)
def test_parse_rate(text: str | None, expected: float | None) -> None:
    assert parse_rate(text) == expected


def test_find_twins() -> None:
    devices = {A: "0000:01:00.0", B: "0000:01:00.1", TWIN: "0002:01:00.1", "eth9": "0000:02:00.1", "bond0": None}
    assert find_twins(devices) == {B: TWIN, TWIN: B}
    assert find_twins({B: "0000:01:00.1", TWIN: "10002:01:00.1"}) == {B: TWIN, TWIN: B}


SAME_SUBNET = (port(B, "10.77.0.1/24"), port(TWIN, "10.77.0.11/24"))
ONE_SUBNET = (
    "enp1s0f1np1 (10.77.0.1/24) and enP2p1s0f1np1 (10.77.0.11/24) are in one subnet, so packets leave by either; give "
    "each interface a subnet of its own."
)
# facts, problems, notes
FINDINGS: dict[str, tuple[Facts, list[str], list[str]]] = {
    "healthy": (node(port(B, "10.77.0.1/24")), [], []),
    "nothing known": (node(port(B, "10.77.0.1/24", mtu=None, carrier=None, speed=None, rate=None)), [], []),
    "twins on one subnet": (node(*SAME_SUBNET, selected=["rocep1s0f1", "roceP2p1s0f1"]), [ONE_SUBNET], []),
    "twins on one subnet, one used": (node(*SAME_SUBNET), [], [ONE_SUBNET]),
    "twins on two subnets": (node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24")), [], []),
    "no carrier": (
        node(port(B, "10.77.0.1/24", carrier=False)),
        ["enp1s0f1np1 has no carrier; bring it up and plug the cable in at both ends, or use another port."],
        [],
    ),
    "twin without an address": (
        node(port(B, "10.77.0.1/24"), port(TWIN, None), selected=["rocep1s0f1", "roceP2p1s0f1"]),
        [
            "roceP2p1s0f1:1 is selected and has no RoCE v2 GID with an IPv4 address; give its netdev an address in a "
            "subnet of its own, or select the other HCA alone "
            "with hy3_hca."
        ],
        [],
    ),
    "twin with an address that it gave itself": (
        node(port(B, "10.77.0.1/24"), port(TWIN, "169.254.7.7/16"), selected=["rocep1s0f1", "roceP2p1s0f1"]),
        [
            "roceP2p1s0f1:1 is selected and has no RoCE v2 GID with an IPv4 address of the fabric (it has 169.254.7.7 "
            "of enP2p1s0f1np1); give its netdev an address in a subnet of its own, or select the other HCA alone "
            "with hy3_hca."
        ],
        [],
    ),
    "twin with an address on a VLAN alone": (
        node(
            port(B, "10.77.0.1/24"),
            port(f"{TWIN}.40", "10.99.0.1/24", hca="roceP2p1s0f1", parent=TWIN),
            selected=["rocep1s0f1", "roceP2p1s0f1"],
        ),
        [
            "roceP2p1s0f1:1 is selected and has no RoCE v2 GID with an IPv4 address of the fabric (it has 10.99.0.1 of "
            "enP2p1s0f1np1.40); give its netdev an address in a subnet of its own, or select the other HCA alone "
            "with hy3_hca."
        ],
        [],
    ),
    "twins on VLANs": (
        node(
            port(f"{B}.40", "10.40.0.1/24", hca="rocep1s0f1", parent=B),
            port(f"{TWIN}.40", "10.41.0.1/24", hca="roceP2p1s0f1", parent=TWIN),
            selected=["rocep1s0f1", "roceP2p1s0f1"],
        ),
        [],
        [],
    ),
    "slow netdev": (
        node(port(B, "10.77.0.1/24", speed=100.0)),
        [],
        ["enp1s0f1np1 links at 100 Gbit/s and a Spark's port does 200; check the cable and what the other end offers."],
    ),
    "slow HCA": (
        node(port(B, "10.77.0.1/24", speed=None, rate=12.5)),
        [],
        [
            "enp1s0f1np1 links at 12.5 Gbit/s and a Spark's port does 200; check the cable and what the other end "
            "offers."
        ],
    ),
    "small MTU": (
        node(port(B, "10.77.0.1/24", mtu=1500)),
        [],
        ["enp1s0f1np1 has MTU 1500, so RDMA sends in small packets; set 9000 on all nodes, in netplan."],
    ),
}


@pytest.mark.parametrize(("facts", "problems", "notes"), FINDINGS.values(), ids=FINDINGS)
def test_findings(facts: Facts, problems: list[str], notes: list[str]) -> None:
    assert node_findings(facts, []) == (problems, notes)


RAILS = node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24", mtu=1500))
WAYS: dict[str, tuple[Facts, str, tuple[str | None, str | None, int | None]]] = {
    "fabric": (RAILS, "10.77.0.2", (B, "10.77.0.1", 9000)),
    "other rail": (RAILS, "10.78.0.2", (TWIN, "10.78.0.1", 1500)),
    "elsewhere": (RAILS, "10.79.0.2", (B, "10.77.0.1", 9000)),
    "both in its subnet": (node(*SAME_SUBNET), "10.77.0.2", (B, "10.77.0.1", 9000)),
    "nothing known": (node(), "10.77.0.2", (None, None, None)),
}


@pytest.mark.parametrize(("facts", "peer", "expected"), WAYS.values(), ids=WAYS)
def test_way_to(facts: Facts, peer: str, expected: tuple[str | None, str | None, int | None]) -> None:
    assert way_to(peer, facts) == expected


PEER, FABRIC = "10.77.0.2", Route(B, "10.77.0.1", "")
# path, (start of the problem or None, start of the note or None)
PATHS: dict[str, tuple[PeerPath, tuple[str | None, str | None]]] = {
    "healthy": (PeerPath(PEER, FABRIC, 9000, True, True, ""), (None, None)),
    "the MTU trap": (
        PeerPath(PEER, FABRIC, 9000, True, False, ""),
        ("10.77.0.2 answers small packets through enp1s0f1np1 but none of 9000 bytes, which is this end's MTU, ", None),
    ),
    "silent": (
        PeerPath(PEER, FABRIC, 9000, False, None, ""),
        ("10.77.0.2 does not answer a small packet through enp1s0f1np1; ", None),
    ),
    "another network": (
        PeerPath(PEER, Route("wlP9s9", "192.168.1.20", "192.168.1.1"), 9000, False, None, ""),
        ("10.77.0.2 is reached through wlP9s9, not through the fabric interface enp1s0f1np1", None),
    ),
    "a gateway in its own subnet": (
        PeerPath(PEER, Route(B, "10.77.0.1", "10.77.0.254"), 9000, True, True, ""),
        (None, "10.77.0.2 is reached through the gateway 10.77.0.254, though it is in the subnet of enp1s0f1np1, "),
    ),
    "not allowed": (
        PeerPath(PEER, FABRIC, 9000, None, None, "Operation not permitted"),
        (None, "The path to 10.77.0.2 was not tried (Operation not permitted); run the check as root."),
    ),
    "MTU not known": (
        PeerPath(PEER, FABRIC, 84, True, None, ""),
        (None, "The path to 10.77.0.2 was tried with small packets only (the MTU of enp1s0f1np1 is not known)."),
    ),
}


@pytest.mark.parametrize(("path", "expected"), PATHS.values(), ids=PATHS)
def test_path_findings(path: PeerPath, expected: tuple[str | None, str | None]) -> None:
    found = node_findings(node(port(B, "10.77.0.1/24")), [path])
    for sentences, start in zip(found, expected, strict=True):
        assert [sentence[: len(start or "")] for sentence in sentences] == ([] if start is None else [start])
