# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._topology import RING_ENVIRONMENT, judge
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.fabric_facts import Facts, node, port

A, B = "enp1s0f0np0", "enp1s0f1np1"
TWIN = "enP2p1s0f1np1"


def pair(one: Facts, two: Facts) -> dict[str, Facts]:
    return {"s1": one, "s2": two}


def ring(size: int) -> dict[str, Facts]:
    """Port A of each node is cabled to port B of the next."""
    nodes = {}
    for number in range(size):
        ahead, behind = number + 1, (number - 1) % size + 1
        ports = [port(A, f"10.71.{ahead}.1/24"), port(B, f"10.71.{behind}.2/24")]
        nodes[f"s{number + 1}"] = node(*ports, selected=["rocep1s0f0", "rocep1s0f1"])
    return nodes


PAIR = pair(node(port(B, "10.77.0.1/24")), node(port(B, "10.77.0.2/24")))
RAILS = pair(
    node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24"), selected=["rocep1s0f1", "roceP2p1s0f1"]),
    node(port(B, "10.77.0.2/24"), port(TWIN, "10.78.0.2/24"), selected=["rocep1s0f1", "roceP2p1s0f1"]),
)


def rails(number: int, one: str, two: str, **other: t.Any) -> Facts:
    """A node with both HCAs of a cage, each in its subnet."""
    ports = port(B, f"{one}.{number}/24", **other), port(TWIN, f"{two}.{number}/24", **other)
    return node(*ports, selected=["rocep1s0f1", "roceP2p1s0f1"])


SPARE_RAIL = pair(
    node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24")), node(port(B, "10.77.0.2/24"), port(TWIN, "10.78.0.2/24"))
)
SWITCH = {f"s{number}": node(port(B, f"10.77.0.{number}/24")) for number in range(1, 5)}
AUTOCONF = pair(
    node(port(B, "10.77.0.1/24"), port(A, "169.254.1.1/16")), node(port(B, "10.77.0.2/24"), port(A, "169.254.1.2/16"))
)

# nodes, topology, rails
SHAPES: dict[str, tuple[dict[str, Facts], str, list[str]]] = {
    "one node": ({"s1": PAIR["s1"]}, "single", []),
    "pair": (PAIR, "pair", ["10.77.0.0/24"]),
    "pair on other ports": (
        pair(node(port(A, "10.77.0.1/24")), node(port(B, "10.77.0.2/24"))),
        "pair",
        ["10.77.0.0/24"],
    ),
    "pair with two rails": (RAILS, "pair", ["10.77.0.0/24", "10.78.0.0/24"]),
    "pair with a spare rail": (SPARE_RAIL, "pair", ["10.77.0.0/24", "10.78.0.0/24"]),
    "what ports gave themselves is no rail": (AUTOCONF, "pair", ["10.77.0.0/24"]),
    "the fabric itself is 169.254": (
        pair(node(port(B, "169.254.18.7/16")), node(port(B, "169.254.9.1/16"))),
        "pair",
        ["169.254.0.0/16"],
    ),
    "a VLAN": (
        pair(
            node(port(f"{B}.40", "10.40.0.1/24", hca="rocep1s0f1", parent=B)),
            node(port(f"{B}.40", "10.40.0.2/24", hca="rocep1s0f1", parent=B)),
        ),
        "pair",
        ["10.40.0.0/24"],
    ),
    "point to point": (pair(node(port(B, "10.77.0.0/31")), node(port(B, "10.77.0.1/31"))), "pair", ["10.77.0.0/31"]),
    "switch": (SWITCH, "switch", ["10.77.0.0/24"]),
    "ring of three": (ring(3), "ring", []),
    "ring of four": (ring(4), "ring", []),
    "three in a row": ({name: facts for name, facts in ring(4).items() if name != "s4"}, "broken", []),
    "two subnets": (pair(node(port(B, "10.77.0.1/24")), node(port(B, "10.78.0.2/24"))), "broken", []),
    "no carrier": (pair(PAIR["s1"], node(port(B, "10.77.0.2/24", carrier=False))), "broken", []),
    "carrier not known": (pair(PAIR["s1"], node(port(B, "10.77.0.2/24", carrier=None))), "pair", ["10.77.0.0/24"]),
    "nothing known of one": (pair(PAIR["s1"], node()), "broken", []),
}


@pytest.mark.parametrize(("nodes", "topology", "rails"), SHAPES.values(), ids=SHAPES)
def test_shape(nodes: dict[str, Facts], topology: str, rails: list[str]) -> None:
    found = judge(nodes, {})
    assert (found["topology"], found["rails"]) == (topology, rails)


@pytest.mark.parametrize("nodes", [PAIR, RAILS, SPARE_RAIL, SWITCH, AUTOCONF])
def test_a_healthy_cluster_has_no_fault(nodes: dict[str, Facts]) -> None:
    found = judge(nodes, {})
    assert (found["problems"], found["warnings"]) == ([], [])


# nodes, part of the one problem
PROBLEMS: dict[str, tuple[dict[str, Facts], str]] = {
    "MTU": (
        pair(PAIR["s1"], node(port(B, "10.77.0.2/24", mtu=1500))),
        "enp1s0f1np1 of s1 has MTU 9000 and enp1s0f1np1 of s2 1500, so small messages pass and large ones are lost; ",
    ),
    "two subnets": (
        pair(node(port(B, "10.77.0.1/24")), node(port(B, "10.78.0.2/24"))),
        "s1 (10.77.0.1/24 on enp1s0f1np1) and s2 (10.78.0.2/24 on enp1s0f1np1) have no RoCE subnet in common, ",
    ),
    "fabric addresses on unlike rails": (
        pair(
            node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24")),
            node(port(TWIN, "10.78.0.2/24"), port(B, "10.77.0.2/24")),
        ),
        "have no RoCE subnet in common",
    ),
    "one address twice": (
        pair(
            node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24")),
            node(port(B, "10.77.0.2/24"), port(TWIN, "10.78.0.1/24")),
        ),
        "10.78.0.1 is the address of enP2p1s0f1np1 of s1 and enP2p1s0f1np1 of s2; ",
    ),
    "what a node says of itself": (
        pair(PAIR["s1"], {**PAIR["s2"], "problems": ["It is broken."]}),
        "s2: It is broken.",
    ),
    "ring of three": (ring(3), "The nodes form a ring without a switch, where NCCL connects through ports that"),
}


@pytest.mark.parametrize(("nodes", "part"), PROBLEMS.values(), ids=PROBLEMS)
def test_one_problem(nodes: dict[str, Facts], part: str) -> None:
    (problem,) = judge(nodes, {})["problems"]
    assert part in problem


WARNINGS: dict[str, tuple[dict[str, Facts], str]] = {
    "MTU of a spare rail": (
        pair(SPARE_RAIL["s1"], node(port(B, "10.77.0.2/24"), port(TWIN, "10.78.0.2/24", mtu=1500))),
        "enP2p1s0f1np1 of s1 has MTU 9000 and enP2p1s0f1np1 of s2 1500",
    ),
    "speed": (
        pair(PAIR["s1"], node(port(B, "10.77.0.2/24", speed=100.0))),
        "enp1s0f1np1 of s1 links at 200 Gbit/s and enp1s0f1np1 of s2 at 100; ",
    ),
    "prefix length": (
        pair(PAIR["s1"], node(port(B, "10.77.0.2/16"))),
        "enp1s0f1np1 of s1 has 10.77.0.1/24 and enp1s0f1np1 of s2 10.77.0.2/16",
    ),
    "what a node notes": (pair(PAIR["s1"], {**PAIR["s2"], "notes": ["It is slow."]}), "s2: It is slow."),
}


@pytest.mark.parametrize(("nodes", "part"), WARNINGS.values(), ids=WARNINGS)
def test_one_warning(nodes: dict[str, Facts], part: str) -> None:
    found = judge(nodes, {})
    (warning,) = found["warnings"]
    assert (found["problems"], part in warning) == ([], True)


def test_pair_is_told_apart_by_node() -> None:
    """Names belong to a node: one value for all is wrong as soon as another cage is used."""
    found = judge(pair(node(port(A, "10.77.0.1/24", index=3)), node(port(B, "10.77.0.2/24", index=6))), {})
    assert found["set"] == {
        "s1": {"NCCL_IB_HCA": "=rocep1s0f0", "NCCL_SOCKET_IFNAME": f"={A}", "GLOO_SOCKET_IFNAME": A},
        "s2": {"NCCL_IB_HCA": "=rocep1s0f1", "NCCL_SOCKET_IFNAME": f"={B}", "GLOO_SOCKET_IFNAME": B},
    }
    assert found["unset"] == []
    assert found["nccl"] == [
        "NCCL uses one HCA of each node (s1 rocep1s0f0; s2 rocep1s0f1).",
        "The GID index differs (s1 3, s2 6), so NCCL_IB_GID_INDEX must not be one value for all nodes.",
    ]


def test_two_rails() -> None:
    found = judge(RAILS, {})
    assert found["other_rails"] == {"s1": ["10.78.0.2"], "s2": ["10.78.0.1"]}
    assert judge(SPARE_RAIL, {})["other_rails"] == {"s1": [], "s2": []}
    assert found["set"]["s2"] == {
        "NCCL_IB_HCA": "=rocep1s0f1,roceP2p1s0f1",
        "NCCL_SOCKET_IFNAME": f"={B}",
        "GLOO_SOCKET_IFNAME": B,
        "NCCL_CROSS_NIC": "0",
    }
    assert found["unset"] == []
    assert found["nccl"] == [
        "NCCL spreads its channels over the HCAs of each node (s1 rocep1s0f1, roceP2p1s0f1; s2 rocep1s0f1, "
        "roceP2p1s0f1)."
    ]


ONE_OF_TWO = node(port(B, "10.77.0.2/24"), port(TWIN, "10.78.0.2/24"))
TWO_ON_A_SWITCH = {f"s{number}": rails(number, "10.77.0", "10.78.0") for number in range(1, 4)}
AWARE = {"NCCL_IB_SUBNET_AWARE_ROUTING": "1"}
SOCKETS = {"NCCL_IB_DISABLE": "1"}
LONE = "shares no subnet with a selected HCA of"
# nodes, environment, parts of each problem, warnings
RAIL_FINDINGS: dict[str, tuple[dict[str, Facts], dict[str, str], list[list[str]], int]] = {
    "both meet": (RAILS, {}, [], 0),
    "on a switch": (TWO_ON_A_SWITCH, {}, [], 0),
    "two apart": (
        pair(RAILS["s1"], rails(2, "10.77.0", "10.79.0")),
        {},
        [
            [
                "roceP2p1s0f1 of s1 (enP2p1s0f1np1 with 10.78.0.1/24) is",
                f"{LONE} s2",
                "enP2p1s0f1np1 with 10.79.0.2/24",
            ],
            ["roceP2p1s0f1 of s2 (enP2p1s0f1np1 with 10.79.0.2/24) is", f"{LONE} s1"],
        ],
        0,
    ),
    "two on one node, one on the other": (
        pair(RAILS["s1"], ONE_OF_TWO),
        {},
        [["roceP2p1s0f1 of s1", f"{LONE} s2 (s2 has enp1s0f1np1 with 10.77.0.2/24), "]],
        1,
    ),
    "crossed cables": (
        pair(RAILS["s1"], rails(2, "10.78.0", "10.77.0")),
        {},
        [
            [
                "NCCL pairs roceP2p1s0f1 of s1 (enP2p1s0f1np1 with 10.78.0.1/24) with roceP2p1s0f1 of s2 "
                "(enP2p1s0f1np1 with 10.77.0.2/24), ",
            ]
        ],
        0,
    ),
    "crossed cables, routing by subnet": (pair(RAILS["s1"], rails(2, "10.78.0", "10.77.0")), AWARE, [], 0),
    "without RDMA": (pair(RAILS["s1"], rails(2, "10.77.0", "10.79.0")), SOCKETS, [], 0),
    "a node of a switch without the second": (
        {**TWO_ON_A_SWITCH, "s3": node(port(B, "10.77.0.3/24"))},
        {},
        [["roceP2p1s0f1 of s1", f"{LONE} s3 ("], ["roceP2p1s0f1 of s2", f"{LONE} s3 ("]],
        1,
    ),
    "one HCA in two subnets": (
        pair(RAILS["s1"], node(port(B, "10.77.0.2/24", addresses=["10.77.0.2/24", "10.78.0.2/24"]))),
        {},
        [],
        1,
    ),
}


@pytest.mark.parametrize(("nodes", "environment", "problems", "warnings"), RAIL_FINDINGS.values(), ids=RAIL_FINDINGS)
def test_selected_hcas_meet(
    nodes: dict[str, Facts], environment: dict[str, str], problems: list[list[str]], warnings: int
) -> None:
    found = judge(nodes, environment)
    assert (len(found["problems"]), len(found["warnings"])) == (len(problems), warnings)
    for sentence, parts in zip(found["problems"], problems, strict=True):
        assert [part for part in parts if part not in sentence] == []


def test_the_order_is_that_of_the_pci_bus() -> None:
    """Two cables on one node, a cage's twins on the other; the names sort otherwise than the bus."""
    one = node(
        port(A, "10.77.0.1/24", pci="0000:01:00.0"),
        port(B, "10.78.0.1/24", pci="0000:01:00.1"),
        selected=["rocep1s0f0", "rocep1s0f1"],
    )
    places = {B: ("10.77.0.2/24", "0000:01:00.1"), TWIN: ("10.78.0.2/24", "0002:01:00.1")}
    two = node(
        *(port(name, place, pci=pci) for name, (place, pci) in places.items()), selected=["roceP2p1s0f1", "rocep1s0f1"]
    )
    assert judge(pair(one, two), {})["problems"] == []


UNLIKE = node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24", index=5), selected=["rocep1s0f1", "roceP2p1s0f1"])
# nodes, what all of them are given, start of each problem
SHARED: dict[str, tuple[dict[str, Facts], dict[str, str], list[str]]] = {
    "right everywhere": (PAIR, {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_HCA": "=rocep1s0f1"}, []),
    "not for one index": (
        pair(UNLIKE, RAILS["s2"]),
        {"NCCL_IB_GID_INDEX": "5"},
        ["NCCL_IB_GID_INDEX=5 is set on all nodes, and the HCAs of one have no GID index in common; "],
    ),
    "wrong on one": (
        pair(node(port(B, "10.77.0.1/24", index=6)), PAIR["s2"]),
        {"NCCL_IB_GID_INDEX": "3"},
        ["s1: NCCL_IB_GID_INDEX=3 is set on all nodes, and 10.77.0.1 is at 6 here; "],
    ),
    "an HCA that one has not": (
        pair(node(port(A, "10.77.0.1/24")), PAIR["s2"]),
        {"NCCL_IB_HCA": "=rocep1s0f0"},
        ["s2: NCCL_IB_HCA==rocep1s0f0 is set on all nodes (No HCA of this node matches rocep1s0f0: it has "],
    ),
    "garbage": (
        pair(PAIR["s1"], node(port(B, "10.77.0.2/24", gids=[]))),
        {"NCCL_IB_HCA": "a b", "NCCL_IB_GID_INDEX": "auto"},
        ["s1: NCCL_IB_GID_INDEX=auto ", "s1: NCCL_IB_HCA=a b is ", "s2: NCCL_IB_HCA=a b is "],
    ),
}


@pytest.mark.parametrize(("nodes", "environment", "starts"), SHARED.values(), ids=SHARED)
def test_one_value_for_all_nodes(nodes: dict[str, Facts], environment: dict[str, str], starts: list[str]) -> None:
    found = judge(nodes, environment)["problems"]
    assert [problem[: len(start)] for problem, start in zip(found, starts, strict=True)] == starts


def test_two_rails_without_a_common_index() -> None:
    found = judge(pair(UNLIKE, RAILS["s2"]), {})
    assert (found["problems"], found["unset"]) == ([], ["NCCL_IB_GID_INDEX"])
    assert "so NCCL has to choose one for each (2.21 or newer does)" in found["nccl"][-1]


def test_one_port_of_an_hca_with_two() -> None:
    one, two = port("ens4", None, hca="mlx4_0"), port("ens4d1", "10.77.0.1/24", hca="mlx4_0")
    two[1]["port"] = 2
    facts = node(two, one) | {"selected": ["mlx4_0:2"]}
    assert judge(pair(facts, PAIR["s2"]), {})["set"]["s1"]["NCCL_IB_HCA"] == "=mlx4_0:2"


def test_a_spare_rail_and_an_idle_twin_are_said() -> None:
    assert judge(SPARE_RAIL, {})["nccl"][1].startswith("The nodes share 2 rails (10.77.0.0/24, 10.78.0.0/24) and one")
    bare = pair(node(port(B, "10.77.0.1/24", twin=TWIN), port(TWIN, None, twin=B)), PAIR["s2"])
    assert judge(bare, {})["nccl"][1].startswith("s1: enP2p1s0f1np1 shares the cage of enp1s0f1np1 and has no address")


RINGS: dict[str, tuple[int, dict[str, t.Any], list[str]]] = {
    "stock": (
        3,
        {"NCCL_IB_GID_INDEX": "3"},
        [
            "The nodes form a ring without a switch, where NCCL connects through ports that are cabled to another node "
            "and its start times out; set NCCL_IB_SUBNET_AWARE_ROUTING=1 NCCL_IB_MERGE_NICS=0 NCCL_CROSS_NIC=1 no "
            "NCCL_IB_GID_INDEX in hy3_engine_env with NCCL 2.30 or newer, or use a switch."
        ],
    ),
    "subnet-aware": (3, RING_ENVIRONMENT, []),
    "numbers": (3, {name: int(value) for name, value in RING_ENVIRONMENT.items()}, []),
    "sockets": (3, {"NCCL_IB_DISABLE": 1}, []),
    "four": (
        4,
        RING_ENVIRONMENT,
        [
            f"s{a} (10.71.{a}.1/24 on {A}, 10.71.{b}.2/24 on {B}) and s{c} (10.71.{c}.1/24 on {A}, 10.71.{d}.2/24 on "
            f"{B}) have no RoCE subnet in common, and every two ranks talk; give both an address in one subnet, on "
            "ports that one cable or switch joins."
            for a, b, c, d in [(1, 4, 3, 2), (2, 1, 4, 3)]
        ],
    ),
}


@pytest.mark.parametrize(("size", "environment", "problems"), RINGS.values(), ids=RINGS)
def test_ring(size: int, environment: dict[str, t.Any], problems: list[str]) -> None:
    found = judge(ring(size), environment)
    assert found["problems"] == problems
    assert found["unset"] == ["NCCL_IB_GID_INDEX"]
    assert RING_ENVIRONMENT.items() <= found["set"]["s1"].items()


def test_reach_prefers_the_ports_in_use() -> None:
    assert judge(RAILS, {})["reach"] == {"s1": {"s2": "10.77.0.2"}, "s2": {"s1": "10.77.0.1"}}
    swapped = pair(
        node(port(TWIN, "10.78.0.1/24"), port(B, "10.77.0.1/24")),
        node(port(TWIN, "10.78.0.2/24"), port(B, "10.77.0.2/24")),
    )
    assert judge(swapped, {})["reach"]["s1"] == {"s2": "10.78.0.2"}
