# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import make_sysfs, v4
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module


@pytest.fixture
def sysfs(tmp_path: Path) -> str:
    """One HCA behind the loopback interface, which every machine has."""
    rows = [(0, "fe80::1", "RoCE v2", "lo"), (3, v4("127.0.0.1"), "RoCE v2", "lo")]
    return str(make_sysfs(tmp_path, {"rocelo:1": rows}, devices={"lo": ["rocelo"]}))


def test_looks(sysfs: str) -> None:
    result = run_module("fabric_info", address="127.0.0.1", sysfs_root=sysfs, _ansible_check_mode=True)
    assert result == {
        "changed": False,
        "address": "127.0.0.1",
        "interface": "lo",
        "mtu": 65536,
        "selected": ["rocelo:1"],
        "netdevs": [
            {
                "name": "lo",
                "mtu": 65536,
                "carrier": True,
                "parent": None,
                "addresses": ["127.0.0.1/8"],
                "speed": None,
                "hcas": ["rocelo"],
                "pci": None,
                "twin": None,
            }
        ],
        "hcas": [
            {
                "name": "rocelo",
                "port": 1,
                "active": True,
                "link_layer": "Ethernet",
                "speed": None,
                "gids": [{"index": 3, "address": "127.0.0.1", "netdev": "lo"}],
                "error": "",
            }
        ],
        "paths": [],
        "problems": [],
        "notes": [],
    }


def test_reaches_a_peer(sysfs: str) -> None:
    result = run_module("fabric_info", address="127.0.0.1", peers=["127.0.0.1"], sysfs_root=sysfs)
    (path,) = result["paths"]
    assert path["route"] == {"interface": "lo", "source": "127.0.0.1", "gateway": ""}
    # Without CAP_NET_RAW nothing can be sent, and that is said.
    tried = not path["error"]
    assert (path["bytes"], path["small"], path["full"]) == (65535, *((True, True) if tried else (None, None)))
    assert (result["problems"], len(result["notes"])) == ([], 0 if tried else 1)


def test_a_peer_on_another_network_is_a_problem(sysfs: str) -> None:
    result = run_module("fabric_info", address="127.0.0.1", peers=["198.51.100.7"], sysfs_root=sysfs)
    (problem,) = result["problems"]
    assert "198.51.100.7" in problem


def test_says_what_is_missing(sysfs: str) -> None:
    result = run_module("fabric_info", address="127.0.0.1", hca="=rocep1s0f1", interface="eth9", sysfs_root=sysfs)
    assert [problem.partition(" (it has ")[0].partition(":")[0] for problem in result["problems"]] == [
        "This node has no interface 'eth9'",
        "No HCA of this node matches rocep1s0f1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": "127.0.0.1/8"}, "The fabric address '127.0.0.1/8' is no IPv4 address"),
        ({"address": "127.0.0.1", "peers": ["spark-2"]}, "The fabric address 'spark-2' is no IPv4 address"),
        ({"hca": "a b"}, "HCA selector 'a b'"),
        ({"peers": ["127.0.0.1"]}, "peers is given without address"),
    ],
)
def test_refuses(sysfs: str, arguments: dict[str, str], message: str) -> None:
    result = run_module("fabric_info", sysfs_root=sysfs, **arguments)
    assert result["failed"]
    assert result["msg"].startswith(message)
