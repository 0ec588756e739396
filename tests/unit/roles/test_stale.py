# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a unit has to restart, by the real Ansible, with what the modules say of real files and processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.module_utils._units import Processes
from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook

FILE = "vllm/model_executor/models/hy_v3_mtp.py"
DEFECT = """\
class HYV3SharedHead:
    def __init__(self, config, quant_config=None):
        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant_config)


class HYV3MultiTokenPredictorLayer:
    def __init__(self, config, prefix, quant_config=None):
        self.shared_head = HYV3SharedHead(config=config, quant_config=quant_config)
"""
Patches = list[dict[str, t.Any]]


def why(home: Path, *, processes: list[dict[str, t.Any]], patches: Patches, **variables: t.Any) -> str:
    answer = home / "answer"
    given = {"stale_to": str(answer), "stale_processes": processes, "stale_patches": patches, **variables}
    done = run_playbook("stale", home, given)
    assert done.returncode == 0, done.stdout + done.stderr
    return answer.read_text()


def patch(written: float | None, *, file: str = FILE, state: str = "applied") -> dict[str, t.Any]:
    return {"id": "P1", "file": file, "state": state, "written": written}


def process(started: float | None, *, pid: int = 7, title: str = "raylet") -> dict[str, t.Any]:
    return {"pid": pid, "title": title, "started": started}


OLD, NEW = process(100.0), process(300.0, pid=8, title="ray::RayWorkerProc")
BEFORE = f"raylet (process 7) started before {FILE} was patched"
INDEX_3, INDEX_6 = {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_HCA": "=a"}, {"NCCL_IB_GID_INDEX": "6", "NCCL_IB_HCA": "=a"}
STARTED = process(100.0) | {"environment": INDEX_3}
WORKER = process(300.0, pid=8, title="ray::RayWorkerProc") | {"environment": None}
# (id, processes, patches, other variables, answer)
TEST_STALE: list[tuple[str, list[dict[str, t.Any]], Patches, dict[str, t.Any], str]] = [
    ("after", [NEW], [patch(200.0)], {}, ""),
    ("before", [NEW, OLD], [patch(200.0)], {}, BEFORE),
    ("within the rounding", [OLD], [patch(100.9)], {}, ""),
    ("newest file counts", [OLD], [patch(200.0), patch(50.0, file="vllm/b.py")], {}, BEFORE),
    ("no patch", [OLD], [], {}, ""),
    ("not ours", [OLD], [patch(200.0, state="upstream_fixed")], {}, ""),
    ("clock was set back", [OLD], [patch(None)], {}, ""),
    ("process has ended", [process(None)], [patch(200.0)], {}, ""),
    ("down", [], [patch(200.0)], {"stale_active": "inactive"}, "it is inactive"),
    (
        "digest",
        [OLD],
        [patch(200.0)],
        {"stale_digest": "another"},
        "it runs with other settings, versions or patches than wanted",
    ),
    # Whoever started it, a play, a reboot or systemd after a crash, resolved the index of that time.
    ("the fabric as it was", [STARTED, WORKER], [], {"stale_fabric": INDEX_3}, ""),
    (
        "the fabric drifted",
        [STARTED, WORKER],
        [],
        {"stale_fabric": INDEX_6},
        f"it was started with {INDEX_3}, and the fabric of this node is now {INDEX_6}",
    ),
    (
        "no index any more",
        [STARTED, WORKER],
        [],
        {"stale_fabric": {"NCCL_IB_HCA": "=a"}},
        f"it was started with {INDEX_3}, and the fabric of this node is now {{'NCCL_IB_HCA': '=a'}}",
    ),
    ("no ranks, no fabric", [STARTED], [], {}, ""),
]


@pytest.mark.parametrize(
    ("processes", "patches", "variables", "expected"),
    [row[1:] for row in TEST_STALE],
    ids=[row[0] for row in TEST_STALE],
)
def test_stale(
    tmp_path: Path,
    processes: list[dict[str, t.Any]],
    patches: Patches,
    variables: dict[str, t.Any],
    expected: str,
) -> None:
    assert why(tmp_path, processes=processes, patches=patches, **variables) == expected


def test_real_process_and_file(tmp_path: Path) -> None:
    """A file is reverted and patched again to the same bytes, by a copy that keeps its old time."""
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    path.write_text(DEFECT)

    def look(**options: t.Any) -> dict[str, t.Any]:
        return _patch.run(
            engine="vllm", patches=["P1"], state="present", package_path=str(tmp_path / "vllm"), **options
        )

    first = look()
    time.sleep(1.2)  # more than the rounding
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        started = Processes().started(sleeper.pid)
        processes = [process(started, pid=sleeper.pid, title="sleep")]
        second = look()
        assert second["patches"][0]["written"] == first["patches"][0]["written"]
        assert why(tmp_path, processes=processes, patches=second["patches"]) == ""

        kept = tmp_path / "kept"
        shutil.copy2(path, kept)
        time.sleep(2.2)
        path.write_text("")
        os.replace(kept, path)
        again = look()
        assert (again["changed"], again["digest"]) == (False, first["digest"])
        assert path.stat().st_mtime < t.cast(float, started)
        assert why(tmp_path, processes=processes, patches=again["patches"]) == (
            f"sleep (process {sleeper.pid}) started before {FILE} was patched"
        )
    finally:
        sleeper.kill()
        sleeper.wait()
