# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory part of preflight: the head counts, every node adds up its own sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT, run_playbook

# So little that any machine has it.
SMALL = {
    "os_reserve": "1M",
    "head": {"ray": "300M", "serve": "1M"},
    "worker": {"ray": "300M"},
    "needs": {"ray": "1M", "serve": "1M"},
    "engine_overhead": "1M",
}
PLAN: dict[str, t.Any] = {
    "hy3_profile": "tiny_lab",
    "hy3_memory": SMALL,
    "hy3_engine_args": {"kv-cache-memory-bytes": "64M"},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("models") / "Hy3-tiny"
    subprocess.run([sys.executable, ROOT / "roles/lab/files/make_tiny_hy3.py", out], check=True, capture_output=True)
    return str(out)


def predict(home: Path, **variables: t.Any) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, t.Any]]]:
    to = home / "to"
    to.mkdir()
    done = run_playbook("memory", home, {"memory_to": str(to), **PLAN, **variables})
    return done, {path.name: json.loads(path.read_text()) for path in to.iterdir()}


def test_every_node_uses_what_the_head_counted(tmp_path: Path, checkpoint: str) -> None:
    done, found = predict(tmp_path, hy3_checkpoint_dir=checkpoint)
    assert done.returncode == 0, done.stdout
    assert set(found) == {"spark-1", "spark-2"}
    for prediction in found.values():
        assert {name: prediction[name] for name in ("weights", "kv_bytes_per_token", "kv_tokens", "unknown")} == {
            "weights": 87_160_928,
            "kv_bytes_per_token": 4096,
            "kv_tokens": 16384,
            "unknown": [],
        }


def test_without_a_checkpoint_it_says_why(tmp_path: Path) -> None:
    done, found = predict(tmp_path, hy3_checkpoint_dir="/nonexistent")
    assert done.returncode == 0, done.stdout
    assert {prediction["kv_tokens"] for prediction in found.values()} == {None}
    for prediction in found.values():
        assert prediction["unknown"][0].startswith("/nonexistent/config.json cannot be read")


def test_a_context_that_does_not_fit_is_refused_on_every_node(tmp_path: Path, checkpoint: str) -> None:
    args = {"kv-cache-memory-bytes": "4M", "max-model-len": 2048}
    done, found = predict(tmp_path, hy3_checkpoint_dir=checkpoint, hy3_engine_args=args)
    assert (done.returncode, found) == (2, {})
    said = "max_model_len 2048 needs 0.01 GiB of KV a rank and 0.00 GiB are left for it, which hold 1024 tokens"
    assert [f"spark-{n}: {said}" in done.stdout for n in (1, 2)] == [True, True]


# id, variables, rows of the table in GiB
CPUS = os.cpu_count() or 1
GRAPHS = {"kv-cache-memory-bytes": "64M", "enforce-eager": None}
PARALLEL = {"kv-cache-memory-bytes": "64M", "load-format": "fastsafetensors"}
TEST_STARTS: list[tuple[str, dict[str, t.Any], dict[str, float]]] = [
    ("eager", {}, {}),
    ("MAX_JOBS", {"hy3_engine_args": GRAPHS, "hy3_engine_env": {"MAX_JOBS": 2}}, {"compilers": 3}),
    ("B42 MAX_JOBS is not set", {"hy3_engine_args": GRAPHS}, {"compilers": 1.5 * CPUS}),
    (
        "eager with kernels that are compiled",
        {"hy3_engine_args": {"kv-cache-memory-bytes": "64M", "moe-backend": "flashinfer_cutlass"}},
        {"compilers": 1.5 * CPUS},
    ),
    ("B42 a parallel loader", {"hy3_engine_args": PARALLEL}, {"loader": 24}),
    ("one that is accepted", {"hy3_engine_args": PARALLEL, "hy3_allow": ["loader-parallel"]}, {}),
]


@pytest.mark.parametrize(
    ("variables", "rows"), [case[1:] for case in TEST_STARTS], ids=[case[0] for case in TEST_STARTS]
)
def test_what_a_start_takes_is_counted(tmp_path: Path, variables: dict[str, t.Any], rows: dict[str, float]) -> None:
    done, found = predict(tmp_path, hy3_checkpoint_dir="/nonexistent", **variables)
    if done.returncode:  # a machine with less than that
        assert all(name in done.stdout for name in rows)
        return
    table = {row["name"]: row["bytes"] / 1024**3 for row in found["spark-2"]["table"]}
    assert {name: size for name, size in table.items() if name in ("compilers", "loader")} == rows


SGLANG: dict[str, t.Any] = {
    "hy3_profile": "vroomfondel_w4a4_tp4",
    "hy3_checkpoint_dir": "/nonexistent",
    "hy3_engine_args": {"tensor-parallel-size": 2, "mem-fraction-static": 0.01},
    "hy3_engine_env": {"MAX_JOBS": 0},
    "hy3_memory": {
        **{
            "os_reserve": "1M",
            "engine_overhead": "1M",
            "floor": "1M",
            "head": {"serve": "3M"},
            "worker": {"serve": "3M"},
        },
        "needs": {"serve": "1M", "rank": "1M", "loader": "1M"},
    },
}


def test_sglang_on_nodes_of_equal_memory(tmp_path: Path) -> None:
    done, found = predict(tmp_path, **SGLANG)
    assert (done.returncode, set(found)) == (0, {"spark-1", "spark-2"}), done.stdout


def test_sglang_on_a_node_with_less(tmp_path: Path) -> None:
    """B94."""
    gib = 1024**3
    done, found = predict(tmp_path, **SGLANG, __hy3_preflight_available={"spark-1": 114 * gib, "spark-2": 81 * gib})
    assert "spark-2" not in found
    assert "spark-2 has 81.00 GiB available and spark-1 114.00 GiB" in " ".join(done.stdout.split())


def test_sglang_waits_for_a_floor(tmp_path: Path) -> None:
    """B94, B116: what is not back in time is named."""
    memory = {**SGLANG["hy3_memory"], "floor": "999999G"}
    done, found = predict(tmp_path, **{**SGLANG, "hy3_memory": memory}, __hy3_preflight_patience=0)
    assert (done.returncode, found) == (2, {})
    assert "999999.00 GiB must be before a start" in " ".join(done.stdout.split())
