# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._budget import ENGINE_OVERHEAD
from ansible_collections.sparks.hy3.plugins.module_utils._memory import parse_size
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header
from ansible_collections.sparks.hy3.plugins.modules import memory_budget
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.hy3_checkpoint import CONFIG
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

HEAD = [{"name": "raylet", "limit": "104G"}, {"name": "driver", "limit": "8G"}]
# What the head counts of LibertAI's checkpoint.
RANK = {"weights": 90703655424, "kv_bytes_per_token": 82944, "max_positions": 262144}


@pytest.fixture
def meminfo(tmp_path: Path) -> str:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       127600748 kB\nMemAvailable:   118566368 kB\n")
    return str(path)


def test_head_of_a_pair_fits(meminfo: str) -> None:
    result = run_module(
        "memory_budget",
        meminfo=meminfo,
        caps=HEAD,
        needs={"raylet": "4G", "driver": "2G"},
        gpu_memory_utilization=0.85,
        max_model_len=163840,
        rank=RANK,
        object_store={"cap": "raylet", "size": 2000000000},
        idle=True,
    )
    rank, owners, table = (result.pop(name) for name in ("rank", "owners", "table"))
    assert result == {
        "changed": False,
        "mem_total": 130663165952,
        "mem_available": 121411960832,
        "caps_total": 120259084288,
        "headroom": 6109114368,
        "predicted": {
            "claim": 111063691060,
            "kv_room": 14561829787,
            "kv_tokens": 175552,
            "max_concurrency": 1.07,
            "largest_max_model_len": 175552,
        },
        "largest_share": 0.91,
        "missing": 0,
        "idle": True,
        "unknown": [],
        "fits": True,
        "problems": [],
    }
    assert rank == {**RANK, "parts": {}}
    assert owners == []
    assert table[-1] == {"name": "left", "bytes": 130663165952 - 111063691060 - 10 * 1024**3}


def test_one_overhead_in_documentation_and_arithmetic() -> None:
    options = yaml.safe_load(memory_budget.DOCUMENTATION)["options"]
    assert parse_size(options["engine_overhead"]["default"]) == ENGINE_OVERHEAD


def test_a_plan_that_does_not_fit_is_no_failure(meminfo: str) -> None:
    caps = [*HEAD, {"name": "more", "limit": "6G"}]
    result = run_module("memory_budget", meminfo=meminfo, caps=caps, reserve="4096M")
    assert not result.get("failed")
    assert (result["fits"], len(result["problems"]), result["predicted"]["claim"]) == (False, 1, None)


def test_checkpoint_is_counted(tmp_path: Path, meminfo: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {"model.layers.0.self_attn.o_proj.weight": ("BF16", (0, 8192)), "lm_head.weight": ("BF16", (0, 4096))}
    (tmp_path / "model.safetensors").write_bytes(render_header(tensors, {}))
    result = run_module(
        "memory_budget",
        meminfo=meminfo,
        checkpoint=str(tmp_path),
        tensor_parallel_size=2,
        speculative=True,
        kv_cache_dtype="fp8",
        kv_cache_memory="1G",
    )
    rank = result["rank"]
    assert (rank["kv_bytes_per_token"], rank["max_positions"]) == (82944, 262144)
    assert rank["weights"] == sum(rank["parts"].values()) == 262144 * 128 * 2
    assert result["predicted"]["kv_tokens"] == 1024**3 // 82944 // 16 * 16


def test_a_checkpoint_that_cannot_be_counted_is_unknown(tmp_path: Path, meminfo: str) -> None:
    result = run_module("memory_budget", meminfo=meminfo, checkpoint=str(tmp_path / "none"), gpu_memory_utilization=0.5)
    assert (result["fits"], result["rank"], result["predicted"]["kv_tokens"]) == (True, None, None)
    assert result["unknown"][0].startswith(f"{tmp_path}/none/config.json cannot be read (No such file or directory)")


def test_kernel_that_lends_memory_out_is_for_a_rule(tmp_path: Path) -> None:
    """B34: rule kexec-handover says it, and hy3_allow can accept that."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 127600748 kB\nMemAvailable: 1 kB\nCmaTotal: 0 kB\nCmaFree: 9742336 kB\n")
    assert run_module("memory_budget", meminfo=str(meminfo))["problems"] == []


# id, arguments, rows of the table in GiB
TEST_STARTS: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("nothing is compiled", {}, {}),
    ("MAX_JOBS", {"compiles": True, "compile_jobs": 2}, {"compilers": 3}),
    ("B42 MAX_JOBS is not set", {"compiles": True}, {"compilers": 1.5 * (os.cpu_count() or 1)}),
    ("a number alone counts", {"compile_jobs": 2}, {"compilers": 3}),
    ("B42 a parallel loader", {"load_format": "fastsafetensors"}, {"loader": 24}),
    ("more than was stated", {"load_format": "runai_streamer", "needs": {"loader": "2G"}}, {"loader": 24}),
    ("less than was stated", {"load_format": "runai_streamer", "needs": {"loader": "40G"}}, {"loader": 40}),
    ("the default loader", {"load_format": "auto", "needs": {"loader": "2G"}}, {"loader": 2}),
]


@pytest.mark.parametrize(
    ("arguments", "rows"), [case[1:] for case in TEST_STARTS], ids=[case[0] for case in TEST_STARTS]
)
def test_what_a_start_takes(meminfo: str, arguments: dict[str, Any], rows: dict[str, float]) -> None:
    table = run_module("memory_budget", meminfo=meminfo, **arguments)["table"]
    found = {row["name"]: row["bytes"] / 1024**3 for row in table}
    assert {name: size for name, size in found.items() if name in ("compilers", "loader")} == rows


def test_a_floor_is_missing(meminfo: str) -> None:
    result = run_module("memory_budget", meminfo=meminfo, floor="114G", idle=True)
    assert (result["missing"], result["fits"]) == (114 * 1024**3 - 121411960832, False)
    assert run_module("memory_budget", meminfo=meminfo, floor="114G")["missing"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"caps": [{"name": "raylet", "limit": "infinity"}]}, "The size of cap raylet is infinity"),
        ({"caps": [{"name": "raylet"}]}, "The size of cap raylet is not set, which bounds nothing"),
        ({"caps": [{"name": "raylet", "limit": "120%"}]}, "Size '120%' is more than the whole memory"),
        ({"caps": HEAD, "reserve": ""}, "Size '' is not a number"),
        ({"caps": HEAD, "needs": {"driver": "8GB"}}, "Size '8GB' is not a number"),
        ({"caps": HEAD, "needs": {"driver": {"x": 1}}}, "Size \"{'x': 1}\" is not a number"),
        ({"caps": HEAD, "object_store": {"cap": "plasma", "size": "2G"}}, "The object store lives in 'plasma'"),
        ({"caps": HEAD, "gpu_memory_utilization": 85}, "gpu_memory_utilization is 85.0"),
        ({"caps": HEAD, "compile_jobs": -1}, "compile_jobs is -1"),
        ({"caps": HEAD, "rank": {**RANK, "kv_bytes_per_token": 0}}, "The figures of a rank are"),
        ({"caps": HEAD, "meminfo": "/nonexistent"}, "Cannot read /nonexistent: No such file or directory"),
    ],
)
def test_bad_input_fails(meminfo: str, arguments: dict[str, Any], message: str) -> None:
    result = run_module("memory_budget", **{"meminfo": meminfo, **arguments})
    assert result["failed"]
    assert result["msg"].startswith(message)
