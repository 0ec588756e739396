# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

MIB = 1024**2


@pytest.fixture
def shard() -> Iterator[Path]:
    output = Path(__file__).parents[3] / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as name:
        path = Path(name, "model.safetensors")
        path.write_bytes(os.urandom(MIB))
        yield path


# check mode, changed, resident before, resident after, released
STEPS: list[tuple[bool, bool, int, int, int]] = [
    (True, True, MIB, MIB, 0),
    (False, True, MIB, 0, MIB),
    (True, False, 0, 0, 0),
    (False, False, 0, 0, 0),
]


def test_check_and_real_run_twice(shard: Path) -> None:
    for check, changed, before, after, released in STEPS:
        result = run_module("page_cache", paths=[str(shard.parent)], _ansible_check_mode=check)
        memory = result.pop("memory")
        assert result == {
            "changed": changed,
            "resident_before": before,
            "resident_after": after,
            "released": released,
            "files": 1,
            "kept_paths": [{"path": str(shard), "bytes": after}] if after else [],
            "mapped_by": [],
            "skipped_paths": [],
            "failed_paths": [],
        }
        # Field case B48: both figures, for engines differ in which they ask for.
        assert memory["available_after"] >= memory["free_after"] * 0.5 > 0


def test_mapped_pages_are_no_change(shard: Path) -> None:
    with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert len(pages[:]) == MIB
        result = run_module("page_cache", paths=[str(shard)])
        predicted = run_module("page_cache", paths=[str(shard)], _ansible_check_mode=True)
    assert (result["changed"], result["resident_after"], predicted["changed"]) == (False, MIB, False)
    assert [(mapper["pid"], mapper["paths"]) for mapper in result["mapped_by"]] == [(os.getpid(), [str(shard)])]
    assert len(result["warnings"]) == 1
    assert result["warnings"][0].startswith(f"Process {os.getpid()} (")


def test_an_absent_path_is_said() -> None:
    result = run_module("page_cache", paths=["/nonexistent"])
    assert not result["changed"]
    assert result["skipped_paths"] == [{"path": "/nonexistent", "reason": "No such file or directory"}]
    assert result["warnings"][0] == "Nothing could be treated: /nonexistent: No such file or directory"


def test_what_no_process_holds_is_said(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(4096))
        file.flush()
        result = run_module("page_cache", paths=[file.name])
    assert (result["changed"], result["kept_paths"]) == (False, [{"path": file.name, "bytes": 4096}])
    assert result["warnings"] == [
        f"Pages of {file.name} stay although no process that this user may see maps it: look as root, and whether it "
        "lies on a tmpfs or is being written"
    ]


def test_a_path_that_cannot_be_treated_is_a_failure_only_alone(shard: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    said = (
        f"Could not treat {loop} (Too many levels of symbolic links): run the task as the owner of the files or as root"
    )
    alone = run_module("page_cache", paths=[str(loop)])
    assert (alone["failed"], alone["msg"]) == (True, said)
    result = run_module("page_cache", paths=[str(loop), str(shard)])
    assert (result["files"], result["warnings"]) == (1, [said])
    assert result["failed_paths"] == [
        {"path": str(loop), "errno": "ELOOP", "reason": "Too many levels of symbolic links"}
    ]


def test_dropping_all_caches_is_only_predicted_in_check_mode(shard: Path) -> None:
    result = run_module("page_cache", paths=[str(shard)], drop_caches=True, _ansible_check_mode=True)
    assert (result["changed"], result["resident_after"]) == (True, MIB)


def test_names_that_are_not_utf_8_are_escaped(shard: Path) -> None:
    # Ansible refuses an answer that is not UTF-8.
    os.mkfifo(os.fsencode(shard.parent) + b"/caf\xe9")
    Path(os.fsdecode(os.fsencode(shard.parent) + b"/loop\xe9")).symlink_to(os.fsdecode(b"loop\xe9"))
    result = run_module("page_cache", paths=[str(shard.parent)])
    assert (result["files"], len(result["warnings"])) == (1, 1)
    assert result["skipped_paths"] == [{"path": f"{shard.parent}/caf\\udce9", "reason": "Not a regular file"}]
    assert [failed["path"] for failed in result["failed_paths"]] == [f"{shard.parent}/loop\\udce9"]
    json.dumps(result, ensure_ascii=False).encode()
