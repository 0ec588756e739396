# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as Ansible runs it: JSON in, JSON out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module


def run(**arguments: Any) -> dict[str, Any]:
    return run_module("checkpoint_info", **arguments)


def make(directory: Path, claimed: int) -> None:
    (directory / "s.safetensors").write_bytes(render_header({"a": ("U8", (2000,))}, {}) + bytes(2000))
    index = {"metadata": {"total_size": claimed}, "weight_map": {"a": "s.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"num_hidden_layers": 1}')


@pytest.mark.parametrize("check_mode", [False, True])
def test_whole(tmp_path: Path, check_mode: bool) -> None:
    make(tmp_path, 2000)
    result = run(path=str(tmp_path), _ansible_check_mode=check_mode)
    assert (result["complete"], result["exists"], result["changed"], result["mtp"]) == (True, True, False, False)
    assert (result["problems"], result["problem_count"]) == ([], 0)
    assert [(shard["name"], shard["tensors"]) for shard in result["shards"]] == [("s.safetensors", 1)]
    assert result["model"]["layers"] == 1
    assert len(result["digest"]) == 64


def test_warning_is_passed_on(tmp_path: Path) -> None:
    make(tmp_path, 5)
    result = run(path=str(tmp_path))
    assert result["complete"]
    assert "claims 5 bytes" in json.dumps(result["warnings"])


def test_incomplete_and_absent_do_not_fail(tmp_path: Path) -> None:
    make(tmp_path, 2000)
    (tmp_path / "s.safetensors").unlink()
    result = run(path=str(tmp_path), level="size")
    assert (result["complete"], result["problem_count"], result["digest"]) == (False, 1, None)
    result = run(path=str(tmp_path / "none"))
    assert (result["complete"], result["exists"], result["shards"], result["model"]) == (False, False, [], {})


def test_unknown_level(tmp_path: Path) -> None:
    assert "value of level must be one of" in run(path=str(tmp_path), level="hash")["msg"]
