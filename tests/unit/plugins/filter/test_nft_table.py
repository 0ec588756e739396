# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.nft_table import nft_table

WORKER: dict[str, t.Any] = {
    "table": "hy3_home",
    "interface": "enp1s0f1np1",
    "peers": ["192.168.100.1", "192.168.100.3"],
    "ports": [6379, "10100-10299"],
    "user": "hy3",
    "ephemeral": "32768-60999",
    "api": None,
}
HEAD = WORKER | {"api": {"port": 8000, "sources": ["192.168.1.0/24", "fd00::/8"]}}

NEW = "tcp flags & (fin | syn | rst | ack) != syn accept"
ANSWER = "tcp flags & (fin | syn | rst | ack) != (syn | ack) accept"
NODES = [
    'iifname "enp1s0f1np1" ip saddr 192.168.100.1 accept',
    'iifname "enp1s0f1np1" ip saddr 192.168.100.3 accept',
    "drop",
]
ANSWERS = [
    'oifname "enp1s0f1np1" ip daddr 192.168.100.1 accept',
    'oifname "enp1s0f1np1" ip daddr 192.168.100.3 accept',
    "drop",
]
INPUT = ["type filter hook input priority -10; policy accept;", 'iif "lo" accept', NEW]
OUTPUT = ["type filter hook output priority -10; policy accept;", 'oif "lo" accept', ANSWER]
PICKED = 'meta skuid "hy3" tcp sport 32768-60999 jump answers'

CHAINS: dict[str, tuple[dict[str, t.Any], dict[str, list[str]]]] = {
    "worker": (
        WORKER,
        {
            "input": [*INPUT, "tcp dport { 6379, 10100-10299 } jump nodes"],
            "nodes": NODES,
            "output": [*OUTPUT, PICKED],
            "answers": ANSWERS,
        },
    ),
    "head that serves others": (
        HEAD,
        {
            "input": [*INPUT, "tcp dport { 6379, 10100-10299 } jump nodes", "tcp dport 8000 jump api"],
            "nodes": NODES,
            "api": ["ip saddr 192.168.1.0/24 accept", "ip6 saddr fd00::/8 accept", "drop"],
            "output": [*OUTPUT, "tcp sport 8000 accept", PICKED],
            "answers": ANSWERS,
        },
    ),
    "alone": (
        WORKER | {"peers": []},
        {
            "input": [*INPUT, "tcp dport { 6379, 10100-10299 } jump nodes"],
            "nodes": ["drop"],
            "output": [*OUTPUT, PICKED],
            "answers": ["drop"],
        },
    ),
}


def chains(text: str) -> dict[str, list[str]]:
    return {
        name: [line.strip() for line in body.strip().splitlines()]
        for name, body in re.findall(r"chain (\w+) \{\n(.*?)\n    \}", text, re.DOTALL)
    }


@pytest.mark.parametrize(("firewall", "wanted"), CHAINS.values(), ids=CHAINS)
def test_chains(firewall: dict[str, t.Any], wanted: dict[str, list[str]]) -> None:
    assert chains(nft_table(firewall)) == wanted


def test_loading_replaces_the_table() -> None:
    lines = nft_table(WORKER).splitlines()
    assert lines[:3] == ["table inet hy3_home", "delete table inet hy3_home", "table inet hy3_home {"]
    assert re.fullmatch(r' +comment "[0-9a-f]{64}"', lines[3])
    assert lines[-1] == "}"


def digest(firewall: dict[str, t.Any]) -> str:
    return nft_table(firewall).splitlines()[3]


@pytest.mark.parametrize(
    "change",
    [
        {"interface": "enp1s0f0np0"},
        {"peers": ["192.168.100.1"]},
        {"ports": [6379]},
        {"user": "other"},
        {"ephemeral": "40000-50000"},
        {"api": {"port": 8001, "sources": ["192.168.1.0/24", "fd00::/8"]}},
        {"api": {"port": 8000, "sources": ["192.168.1.0/24"]}},
        {"api": None},
    ],
    ids=str,
)
def test_digest_changes_with_the_rules(change: dict[str, t.Any]) -> None:
    assert digest(HEAD) == digest(dict(HEAD))
    assert digest(HEAD | change) != digest(HEAD)
