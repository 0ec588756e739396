# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fabric variables of a process that somebody else started: what works here is no fault, however it is written."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._started_fabric import node_fabric, started_faults
from hypothesis import given, settings
from hypothesis import strategies as st

Facts = dict[str, t.Any]
ROCE: Facts = {
    "gid_index": 6,
    "hca": "=rocep1s0f1",
    "interface": "enp1s0f1np1",
    "address": "10.77.0.2",
    "hcas": [{"name": "rocep1s0f1", "port": 1, "usable": [4, 6]}],
}
ENV = {
    "NCCL_IB_GID_INDEX": "6",
    "NCCL_IB_HCA": "=rocep1s0f1",
    "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
    "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
    "NCCL_IB_DISABLE": "0",
}


def hca(name: str, gids: dict[int, str], **over: t.Any) -> Facts:
    rows = [{"index": index, "address": address, "netdev": "x"} for index, address in gids.items()]
    return {"name": name, "port": 1, "active": True, "link_layer": "Ethernet", "gids": rows, **over}


# A Spark's four HCAs: one cage is cabled, its twin has an address of its own, the other cage is dark.
HCAS = [
    hca("rocep1s0f0", {}, active=False),
    hca("rocep1s0f1", {4: "10.99.0.2", 6: "10.77.0.2"}),
    hca("roceP2p1s0f0", {}, active=False),
    hca("roceP2p1s0f1", {6: "10.78.0.2"}),
    hca("ibp9s0", {6: "10.90.0.2"}, link_layer="InfiniBand"),
]
INTERFACES = ["lo", "enP7s7", "wlP9s9", "enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1", "docker0"]


def faults(over: dict[str, str | None], roce: Facts | None = None) -> list[tuple[str, str]]:
    node = node_fabric({**ROCE, **(roce or {})}, HCAS, INTERFACES)
    assert node
    return started_faults({name: value for name, value in {**ENV, **over}.items() if value is not None}, node)


FINE: list[tuple[str, dict[str, str | None]]] = [
    ("ours", {}),
    ("nothing is set", dict.fromkeys(ENV)),
    ("a prefix", {"NCCL_IB_HCA": "rocep1s0f1"}),
    ("with its port", {"NCCL_IB_HCA": "rocep1s0f1:1"}),
    ("both HCAs of the cage", {"NCCL_IB_HCA": "rocep1s0f1,roceP2p1s0f1"}),
    ("all HCAs, of which NCCL skips the dark ones", {"NCCL_IB_HCA": "roce"}),
    ("all but the dark ones", {"NCCL_IB_HCA": "^=rocep1s0f0,roceP2p1s0f0"}),
    ("NCCL chooses", {"NCCL_IB_GID_INDEX": None}),
    ("a prefix of the interface", {"NCCL_SOCKET_IFNAME": "enp1s0f1"}),
    ("a list with the interface", {"NCCL_SOCKET_IFNAME": "enp1s0f1np1,enP7s7"}),
    ("all but others", {"NCCL_SOCKET_IFNAME": "^lo,docker0"}),
    ("several for Gloo", {"GLOO_SOCKET_IFNAME": "enP2p1s0f1np1,enp1s0f1np1"}),
    ("no RDMA, which is a rule's", {"NCCL_IB_DISABLE": "1", "NCCL_IB_GID_INDEX": "3", "NCCL_IB_HCA": "mlx5_0"}),
    ("no number, which is a rule's", {"NCCL_IB_GID_INDEX": "auto"}),
    ("not Gloo's syntax, which is a rule's", {"GLOO_SOCKET_IFNAME": "=enp1s0f1np1"}),
]


@pytest.mark.parametrize("over", [row[1] for row in FINE], ids=[row[0] for row in FINE])
def test_what_works_is_no_fault(over: dict[str, str | None]) -> None:
    assert faults(over) == []


def test_a_ring_has_no_index_and_a_host_address_elsewhere() -> None:
    ring = {"gid_index": None, "hca": "=rocep1s0f1,roceP2p1s0f1", "interface": "enP7s7", "address": "192.168.1.12"}
    lan = {"NCCL_SOCKET_IFNAME": "=enP7s7", "GLOO_SOCKET_IFNAME": "enP7s7"}
    env: dict[str, str | None] = {**lan, "NCCL_IB_GID_INDEX": None, "NCCL_IB_HCA": ring["hca"]}
    assert faults(env, ring) == []


# (what, laid over ours, severity, words)
FAULTS: list[tuple[str, dict[str, str | None], str, list[str]]] = [
    (
        "B01 and B27: the head's index",
        {"NCCL_IB_GID_INDEX": "3"},
        "error",
        ["NCCL_IB_GID_INDEX=3", "rocep1s0f1:1 (usable there: 4, 6)", "NCCL_IB_GID_INDEX=6"],
    ),
    (
        "a row that only one of two HCAs has",
        {"NCCL_IB_GID_INDEX": "4", "NCCL_IB_HCA": "roce"},
        "error",
        ["roceP2p1s0f1:1 (usable there: 6)"],
    ),
    (
        "another address of the port",
        {"NCCL_IB_GID_INDEX": "4"},
        "warning",
        ["is 10.99.0.2", "not the fabric address 10.77.0.2"],
    ),
    (
        "B17: the cage without a cable",
        {"NCCL_IB_HCA": "rocep1s0f0"},
        "error",
        ["NCCL_IB_HCA=rocep1s0f0", "rocep1s0f1:1, roceP2p1s0f1:1", "NCCL_IB_HCA==rocep1s0f1"],
    ),
    ("an HCA of another machine", {"NCCL_IB_HCA": "=mlx5_0"}, "error", ["no ACTIVE RoCE port"]),
    ("InfiniBand", {"NCCL_IB_HCA": "ibp9s0"}, "error", ["no ACTIVE RoCE port"]),
    ("everything left out", {"NCCL_IB_HCA": "^roce,ib"}, "error", ["no ACTIVE RoCE port"]),
    ("no selector", {"NCCL_IB_HCA": "rocep1s0f1;x"}, "error", ["as [^][=]NAME"]),
    ("the twin alone", {"NCCL_IB_HCA": "roceP2p1s0f1"}, "warning", ["10.77.0.2 is behind rocep1s0f1"]),
    (
        "no such interface",
        {"NCCL_SOCKET_IFNAME": "enp9s9"},
        "error",
        ["NCCL_SOCKET_IFNAME=enp9s9", "on enp1s0f1np1", "NCCL_SOCKET_IFNAME==enp1s0f1np1"],
    ),
    ("an exact name that is a prefix", {"NCCL_SOCKET_IFNAME": "=enp1s0f1"}, "error", ["NCCL_SOCKET_IFNAME==enp1s0f1,"]),
    ("a prefix for Gloo", {"GLOO_SOCKET_IFNAME": "enp1s0f1"}, "error", ["GLOO_SOCKET_IFNAME=enp1s0f1np1"]),
    ("the LAN", {"NCCL_SOCKET_IFNAME": "enP7s7"}, "warning", ["unless that network is meant"]),
    ("the LAN for Gloo", {"GLOO_SOCKET_IFNAME": "wlP9s9"}, "warning", ["unless that network is meant"]),
]


@pytest.mark.parametrize(("over", "severity", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_fault(over: dict[str, str | None], severity: str, words: list[str]) -> None:
    [(how, sentence)] = faults(over)
    assert how == severity
    assert [word for word in words if word not in sentence] == []


def test_without_the_lists_only_the_fabric_is_known() -> None:
    """The audit's case: three values of another node."""
    node = node_fabric({"gid_index": 6, "hca": "=rocep1s0f1", "interface": "enp1s0f1np1"}, [], [])
    assert node
    wrong = {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_HCA": "=mlx5_0", "NCCL_SOCKET_IFNAME": "enp9s9"}
    assert [how for how, _sentence in started_faults(wrong, node)] == ["error"] * 3
    assert started_faults(ENV, node) == []


@pytest.mark.parametrize("roce", [{}, {"msg": "No interface"}, {"skipped": True}])
def test_where_the_node_is_not_resolved_nothing_is_held_against_it(roce: Facts) -> None:
    assert node_fabric(roce, HCAS, INTERFACES) is None


WORDS = st.one_of(st.text(max_size=12), st.sampled_from(["=", "^", "^=", ",", "=rocep1s0f1", "6", "roce", "lo", ":1"]))


@settings(max_examples=200, deadline=None)
@given(environment=st.dictionaries(st.sampled_from(sorted(ENV)), WORDS))
def test_any_value_gives_sentences(environment: dict[str, str]) -> None:
    node = node_fabric(ROCE, HCAS, INTERFACES)
    assert node
    assert {how for how, _sentence in started_faults(environment, node)} <= {"error", "warning"}
