# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the nodes of a chain pull from: on a switch, and in rings."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.checkpoint_chain import checkpoint_chain
from ansible_collections.sparks.hy3.plugins.module_utils._chain import addresses, listening, sources

SWITCH: dict[str, dict[str, t.Any]] = {f"n{number}": {"address": f"10.0.0.{number}"} for number in (1, 2, 3, 4)}


def link(peer: str, address: str) -> dict[str, str]:
    return {"interface": "x", "peer": peer, "address": address}


# Links 12, 23, 34 and 41; each end's address is the link's number and its own.
RING: dict[str, dict[str, t.Any]] = {
    "n1": {"address": "10.0.0.1", "links": [link("n2", "10.0.12.1"), link("n4", "10.0.41.1")]},
    "n2": {"address": "10.0.0.2", "links": [link("n1", "10.0.12.2"), link("n3", "10.0.23.2")]},
    "n3": {"address": "10.0.0.3", "links": [link("n2", "10.0.23.3"), link("n4", "10.0.34.3")]},
    "n4": {"address": "10.0.0.4", "links": [link("n3", "10.0.34.4"), link("n1", "10.0.41.4")]},
}


@pytest.mark.parametrize(
    ("nodes", "me", "expected"),
    [
        (SWITCH, "n1", []),
        (SWITCH, "n2", [("n1", "10.0.0.1")]),
        (SWITCH, "n4", [("n3", "10.0.0.3"), ("n2", "10.0.0.2"), ("n1", "10.0.0.1")]),
        (RING, "n2", [("n1", "10.0.12.1")]),
        # Nodes that no link joins reach each other by the fabric's address, through others.
        (RING, "n3", [("n2", "10.0.23.2"), ("n1", "10.0.0.1")]),
        (RING, "n4", [("n3", "10.0.34.3"), ("n2", "10.0.0.2"), ("n1", "10.0.41.1")]),
    ],
)
def test_sources(nodes: dict[str, dict[str, t.Any]], me: str, expected: list[tuple[str, str]]) -> None:
    assert [(source["name"], source["address"]) for source in sources(me, nodes)] == expected


@pytest.mark.parametrize(
    ("nodes", "me", "pullers", "expected"),
    [
        (SWITCH, "n1", ["n2", "n3", "n4"], ["10.0.0.1"]),
        (SWITCH, "n3", ["n2", "n3"], []),
        (SWITCH, "n4", ["n2", "n3", "n4"], []),
        # It has the tree already, and serves it to those after it.
        (SWITCH, "n3", ["n4"], ["10.0.0.3"]),
        (RING, "n1", ["n2", "n3", "n4"], ["10.0.0.1", "10.0.12.1", "10.0.41.1"]),
        (RING, "n1", ["n4"], ["10.0.41.1"]),
        (RING, "n3", ["n4"], ["10.0.34.3"]),
    ],
)
def test_listening(nodes: dict[str, dict[str, t.Any]], me: str, pullers: list[str], expected: list[str]) -> None:
    assert listening(me, nodes, pullers) == expected


def test_everyone_reaches_an_address_that_is_served() -> None:
    for nodes in (SWITCH, RING):
        served = {(name, address) for name in nodes for address in listening(name, nodes, list(nodes))}
        for me in nodes:
            assert {(source["name"], source["address"]) for source in sources(me, nodes)} <= served


def test_filter() -> None:
    assert addresses(SWITCH) == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert checkpoint_chain(RING, "n2", ["n3"], 8730) == {
        "sources": [{"name": "n1", "address": "10.0.12.1", "port": 8730}],
        "listen": ["10.0.23.2"],
        "allowed": [
            *("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.12.1", "10.0.12.2"),
            *("10.0.23.2", "10.0.23.3", "10.0.34.3", "10.0.34.4", "10.0.41.1", "10.0.41.4"),
        ],
    }
