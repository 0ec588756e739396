# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

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
        assert run_module("page_cache", paths=[str(shard.parent)], _ansible_check_mode=check) == {
            "changed": changed,
            "resident_before": before,
            "resident_after": after,
            "released": released,
            "files": 1,
            "skipped_paths": [],
        }


def test_mapped_pages_are_no_change(shard: Path) -> None:
    with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert len(pages[:]) == MIB
        result = run_module("page_cache", paths=[str(shard)])
    assert (result["changed"], result["resident_after"]) == (False, MIB)
    assert result["warnings"][0].startswith(f"Process {os.getpid()} (")


def test_an_absent_path_is_said() -> None:
    result = run_module("page_cache", paths=["/nonexistent"])
    assert not result["changed"]
    assert result["skipped_paths"] == [{"path": "/nonexistent", "reason": "No such file or directory"}]
    assert result["warnings"][0] == "Nothing could be treated: /nonexistent: No such file or directory"
