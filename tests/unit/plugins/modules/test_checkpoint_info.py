# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as Ansible runs it: JSON in, JSON out."""

from __future__ import annotations

import json
import os
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
    assert "value of level must be one of" in run(path=str(tmp_path), level="md5")["msg"]


def test_every_byte_against_another_node(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two with a space"
    for directory in (one, two):
        directory.mkdir()
        make(directory, 2000)
    first = run(path=str(one), level="sha256")
    assert [(file["name"], file["source"]) for file in first["files"]] == [
        ("config.json", "read"),
        ("model.safetensors.index.json", "read"),
        ("s.safetensors", "read"),
    ]
    assert run(path=str(two), level="sha256", manifest=first["files"])["digest"] == first["digest"]
    with (two / "s.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert run(path=str(two), manifest=first["files"])["complete"]
    damaged = run(path=str(two), level="sha256", manifest=first["files"])
    assert (damaged["complete"], damaged["digest"]) == (False, None)
    assert damaged["problems"][0].startswith("Files with other content than the manifest's (1): s.safetensors (")


def test_manifest_without_hashes(tmp_path: Path) -> None:
    make(tmp_path, 2000)
    result = run(path=str(tmp_path), level="size", manifest=[{"name": "README.md", "size": 5}])
    assert result["problems"] == ["Files of the manifest are missing (1): README.md; fetch them."]
    assert "missing required arguments: size" in run(path=str(tmp_path), manifest=[{"name": "x"}])["msg"]


def test_how_it_is_stored(tmp_path: Path) -> None:
    make(tmp_path, 2000)
    stored = {"part": "other", "drafter": False, "format": "u8", "modules": 1, "size": 2000}
    assert run(path=str(tmp_path))["quantization"] == [stored]
    assert run(path=str(tmp_path), level="size")["quantization"] == []


def test_names_that_are_no_text_and_links_that_lead_away(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    make(home, 2000)
    (home / "s.safetensors").rename(tmp_path / "s")
    (home / "s.safetensors").symlink_to("../s")
    (home / "old.safetensors").touch()
    Path(os.fsdecode(os.fsencode(home) + b"/\xff.json")).write_text("{}")
    result = run(path=str(home))
    assert result["complete"]
    assert (result["outside"], result["foreign"]) == (["s.safetensors"], ["old.safetensors"])
    assert "\\udcff.json" in {file["name"] for file in result["files"]}
    assert [warning.split(":")[0] for warning in result["warnings"]] == [
        "Weights that do not belong to the checkpoint lie beside it, which no engine needs",
        "Files of the checkpoint are links to elsewhere (1)",
    ]


def test_edited_small_file_is_only_a_warning(tmp_path: Path) -> None:
    """Our own rules ask to add lm_head to the ignore list of config.json."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c"
    snapshot.mkdir(parents=True)
    make(snapshot, 2000)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (snapshot / "config.json").rename(tmp_path / "models--a--b" / "blobs" / ("5a" * 20))
    (snapshot / "config.json").symlink_to("../../blobs/" + "5a" * 20)
    for level in ("header", "sha256"):
        result = run(path=str(snapshot), level=level)
        assert result["complete"]
        assert "fetch it again unless it was edited here on purpose" in result["warnings"][0]
