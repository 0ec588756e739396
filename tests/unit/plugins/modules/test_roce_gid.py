# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import Row, make_sysfs, v4
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.fixture
def sysfs(tmp_path: Path) -> str:
    rows: list[Row] = [
        (0, ZERO, None, ""),
        (2, v4("127.0.0.1"), "RoCE v1", "lo"),
        (3, v4("127.0.0.1"), "RoCE v2", "lo"),
        (4, v4("127.0.0.9"), "?", "lo"),
    ]
    return str(make_sysfs(tmp_path, {"rocelo:1": rows}))


def test_resolves(sysfs: str) -> None:
    result = run_module("roce_gid", address="127.0.0.1", sysfs_root=sysfs, _ansible_check_mode=True)
    warnings = ["rocelo:1 has GIDs of an unknown type at 4; they are not used"]
    assert result == {
        "warnings": warnings,
        "changed": False,
        "gid_index": 3,
        "address": "127.0.0.1",
        "hca": "=rocelo",
        "interface": "lo",
        "env": {
            "NCCL_IB_GID_INDEX": "3",
            "NCCL_IB_HCA": "=rocelo",
            "NCCL_SOCKET_IFNAME": "=lo",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "0",
        },
        "hcas": [
            {
                "name": "rocelo",
                "port": 1,
                "netdev": "lo",
                "index": 3,
                "usable": [3],
                "skipped": [0],
                "table": [
                    {"index": 2, "gid": v4("127.0.0.1"), "type": "v1", "ndev": "lo"},
                    {"index": 3, "gid": v4("127.0.0.1"), "type": "v2", "ndev": "lo"},
                    {"index": 4, "gid": v4("127.0.0.9"), "type": "unknown", "ndev": "lo"},
                ],
                "warnings": warnings,
            }
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": "127.0.0.1/8"}, "The fabric address '127.0.0.1/8' is no IPv4 address"),
        ({"address": "127.0.0.1", "hca": "=absent"}, "No HCA of this node matches absent: it has rocelo:1"),
        ({"address": "127.0.0.1", "interface": "eth9"}, "127.0.0.1 is owned by lo, not by eth9"),
    ],
)
def test_refuses(sysfs: str, arguments: dict[str, str], message: str) -> None:
    result = run_module("roce_gid", sysfs_root=sysfs, **arguments)
    assert result["failed"]
    assert result["msg"].startswith(message)
    (hca,) = result["hcas"]
    assert (hca["name"], hca["index"], hca["usable"], hca["skipped"]) == ("rocelo", None, [3], [0])


def test_refuses_without_any_hca(tmp_path: Path) -> None:
    result = run_module("roce_gid", sysfs_root=str(tmp_path), address="127.0.0.1")
    assert (result["failed"], result["hcas"]) == (True, [])
