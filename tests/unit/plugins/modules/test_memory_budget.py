# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

HEAD = [{"name": "raylet", "limit": "104G"}, {"name": "driver", "limit": "8G"}]


@pytest.fixture
def meminfo(tmp_path: Path) -> str:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       127600748 kB\nMemAvailable:   118566368 kB\n")
    return str(path)


def test_head_of_a_pair_fits(meminfo: str) -> None:
    assert run_module(
        "memory_budget",
        meminfo=meminfo,
        caps=HEAD,
        gpu_memory_utilization=0.85,
        host_side="8G",
        object_store={"cap": "raylet", "size": 2000000000},
    ) == {
        "changed": False,
        "mem_total": 130663165952,
        "mem_available": 121411960832,
        "caps_total": 120259084288,
        "headroom": 6109114368,
        "device_budget": 111063691060,
        "fits": True,
        "problems": [],
    }


def test_a_plan_that_does_not_fit_is_no_failure(meminfo: str) -> None:
    result = run_module(
        "memory_budget", meminfo=meminfo, caps=[*HEAD, {"name": "more", "limit": "6G"}], reserve="4096M"
    )
    assert not result.get("failed")
    assert (result["fits"], len(result["problems"]), "device_budget" in result) == (False, 1, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"caps": [{"name": "raylet", "limit": "infinity"}]}, "The size of cap raylet is infinity"),
        ({"caps": [{"name": "raylet", "limit": "85%"}]}, "Size '85%' is a share"),
        ({"caps": HEAD, "reserve": ""}, "Size '' is not a number"),
        ({"caps": HEAD, "host_side": "8GB"}, "Size '8GB' is not a number"),
        ({"caps": HEAD, "object_store": {"cap": "plasma", "size": "2G"}}, "The object store lives in 'plasma'"),
        ({"caps": HEAD, "gpu_memory_utilization": 85}, "gpu_memory_utilization is 85.0"),
        ({"caps": HEAD, "meminfo": "/nonexistent"}, "Cannot read /nonexistent: No such file or directory"),
    ],
)
def test_bad_input_fails(meminfo: str, arguments: dict[str, Any], message: str) -> None:
    result = run_module("memory_budget", **{"meminfo": meminfo, **arguments})
    assert result["failed"]
    assert result["msg"].startswith(message)
