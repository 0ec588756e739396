# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.ring_problems import ring_problems

Node = dict[str, t.Any]


def link(number: int, address: str, peer: str) -> dict[str, str]:
    return {"interface": f"enp1s0f{number}np{number}", "address": address, "peer": peer}


def straight(fabric: str, host: str = "") -> Node:
    return {"hy3_fabric_address": fabric, "hy3_host_address": host}


def round_of(*links: t.Any, host: str = "192.168.1.11") -> Node:
    return {"hy3_host_address": host, "hy3_fabric_links": list(links)}


RING = {
    "s1": round_of(link(0, "192.168.12.1", "s2"), link(1, "192.168.31.1", "s3"), host="192.168.1.11"),
    "s2": round_of(link(0, "192.168.23.2", "s3"), link(1, "192.168.12.2", "s1"), host="192.168.1.12"),
    "s3": round_of(link(0, "192.168.31.3", "s1"), link(1, "192.168.23.3", "s2"), host="192.168.1.13"),
}

TEST_PROBLEMS: dict[str, tuple[dict[str, Node], list[str]]] = {
    "pair": ({"s1": straight("192.168.100.1"), "s2": straight("192.168.100.2")}, []),
    "ring": (RING, []),
    "one host without a fabric": ({"s1": straight("")}, []),
    "no address": (
        {"s1": straight("192.168.100.1"), "s2": straight("")},
        [
            "hy3_fabric_address is not set for s2, and it is required; set it in the inventory (in a ring "
            "hy3_fabric_links and hy3_host_address)."
        ],
    ),
    "host address without a ring": (
        {"s1": straight("192.168.100.1", "192.168.1.11")},
        [
            "s1 has hy3_host_address 192.168.1.11 and no hy3_fabric_links, and only a ring needs it; take it out, or "
            "state the links."
        ],
    ),
    "one without links": (
        RING | {"s3": straight("192.168.100.3")},
        [
            "s1, s2 has hy3_fabric_links and s3 has none, and in a ring every node has; state them for each, or for "
            "none."
        ],
    ),
    "no host address": (
        RING | {"s3": round_of(*RING["s3"]["hy3_fabric_links"], host="")},
        [
            "s3 has hy3_fabric_links and no hy3_host_address, and Ray needs one address that every node reaches; set "
            "it, for instance that of the management network."
        ],
    ),
    "misspelt peer": (
        RING | {"s3": round_of(link(0, "192.168.31.3", "s1"), link(1, "192.168.23.3", "s22"))},
        [
            "s2 has a link to s3 and s3 none to s2; add it, or take this one out.",
            "s3 has a link to 's22', which is no other node of this play; write s2.",
        ],
    ),
    "to itself": (
        {"spark": round_of(link(0, "192.168.12.1", "spark")), "other": round_of(link(0, "192.168.12.2", "other"))},
        [
            "spark has a link to 'spark', which is no other node of this play; name one of other.",
            "other has a link to 'other', which is no other node of this play; name one of spark.",
        ],
    ),
    "same address": (
        RING | {"s3": round_of(link(0, "192.168.12.1", "s1"), link(1, "192.168.23.3", "s2"))},
        [
            "hy3_fabric_links gives 192.168.12.1 to enp1s0f0np0 of s1 and enp1s0f0np0 of s3, and each port has its "
            "own; correct the others."
        ],
    ),
    "a key missing, and text": (
        RING | {"s3": round_of({"interface": "enp1s0f0np0", "peer": "s1"}, "s2")},
        [
            "s3 has the link {'interface': 'enp1s0f0np0', 'peer': 's1'} in hy3_fabric_links, and each needs interface, "
            "address, peer; write `{interface: enp1s0f0np0, address: 192.168.12.1, peer: spark-2}`.",
            "s3 has the link 's2' in hy3_fabric_links, and each needs interface, address, peer; write "
            "`{interface: enp1s0f0np0, address: 192.168.12.1, peer: spark-2}`.",
        ],
    ),
}


@pytest.mark.parametrize(("nodes", "expected"), TEST_PROBLEMS.values(), ids=TEST_PROBLEMS)
def test_problems(nodes: dict[str, Node], expected: list[str]) -> None:
    assert ring_problems(nodes) == expected
