# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints whole and damaged in the ways that the field reports."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import Report, capped, compare, inspect
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import lfs_size, naming
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_model import (
    describe_model,
    excludes_lm_head,
    has_mtp,
)
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header

S1, S2, S3 = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "layers-22.safetensors"
# Sizes differ a lot on purpose: a small shard is no damage.
SHARDS = {
    S1: {"a": 4096, "b": 8},
    S2: {"c": 8},
    S3: {f"model.layers.2.{part}.weight": 8 for part in ("eh_proj", "enorm")},
}
SHARDS[S3]["model.layers.2.hnorm.weight"] = 8
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4999999999\n"
CONFIG = {"architectures": ["HYV3ForCausalLM"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1}


def write_shard(path: Path, tensors: dict[str, int], dtype: str = "U8") -> None:
    header = render_header({name: (dtype, (size,)) for name, size in tensors.items()}, {"format": "pt"})
    path.write_bytes(header + bytes(sum(tensors.values())))


def make(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in SHARDS.items():
        write_shard(directory / name, tensors)
    index = {
        "metadata": {"total_size": sum(sum(tensors.values()) for tensors in SHARDS.values())},
        "weight_map": {tensor: name for name, tensors in SHARDS.items() for tensor in tensors},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "LICENSE").write_text("free")
    return directory


def edit_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def header(directory: Path) -> Report:
    return inspect(directory, level="header")


@pytest.mark.parametrize("level", ["header", "size"])
def test_whole(tmp_path: Path, level: str) -> None:
    report = inspect(make(tmp_path), level=level)
    assert (report.problems, report.warnings) == ([], [])
    assert [(shard.name, shard.tensors) for shard in report.shards] == [(S3, 3), (S1, 2), (S2, 1)]
    assert (report.tensors, report.total_size, report.mtp) == (6, 4136, True)
    assert report.digest is not None


def leave_unfinished(directory: Path) -> None:
    corner = directory / ".cache/huggingface/download/sub"
    corner.mkdir(parents=True)
    (corner / "abc.incomplete").touch()


def lose_second_shard(directory: Path) -> None:
    (directory / S2).rename(directory / f"{S2}.incomplete")


DAMAGE: list[Any] = [
    pytest.param(
        lose_second_shard, [f"1 of the 3 shards that the index names are missing: {S2}", "incomplete"], id="B50"
    ),
    pytest.param(leave_unfinished, ["abc.incomplete"], id="unfinished-download"),
    pytest.param(
        lambda d: (d / S1).write_bytes(POINTER), ["pointers stand in place of files of 4999999999 bytes"], id="B53"
    ),
    pytest.param(lambda d: (d / "config.json").write_bytes(POINTER), ["Git LFS pointers"], id="config-is-pointer"),
    pytest.param(lambda d: (d / "config.json").unlink(), ["config.json is missing"], id="no-config"),
    pytest.param(
        lambda d: (d / "config.json").write_text("[]"), ["config.json holds no JSON object"], id="config-list"
    ),
    pytest.param(lambda d: (d / "config.json").write_text("{"), ["config.json is no valid JSON"], id="config-cut"),
    pytest.param(
        lambda d: (d / "model.safetensors.index.json").unlink(), ["Neither model.safetensors.index.json"], id="no-index"
    ),
    pytest.param(
        lambda d: (d / "model.safetensors.index.json").write_text("{}"), ["has no weight_map"], id="index-empty"
    ),
    pytest.param(
        lambda d: edit_index(d, lambda index: index["weight_map"].update(x="../x.safetensors")),
        ["puts tensor x into '../x.safetensors'"],
        id="index-leads-outside",
    ),
    pytest.param(
        lambda d: edit_index(d, lambda index: index["weight_map"].update({"model.layers.80.eh_proj.weight": S2})),
        [f"in no shard (1): model.layers.80.eh_proj.weight (model.layers.80.eh_proj.weight belongs in {S2})"],
        id="B51-missing",
    ),
    pytest.param(
        lambda d: edit_index(d, lambda index: index["weight_map"].update(b=S2)),
        [f"another shard than the index says (1): b (b is in {S1}, not in {S2})"],
        id="B51-wrong-shard",
    ),
    pytest.param(
        lambda d: edit_index(d, lambda index: index["weight_map"].pop("a")),
        ["that the index does not know (1): a"],
        id="foreign",
    ),
    pytest.param(
        lambda d: write_shard(d / S2, {"c": 8, "a": 8}), ["Tensors in more than one shard (1): a"], id="double"
    ),
    pytest.param(lambda d: (d / S1).open("ab").write(b"x"), [f"{S1} is no whole safetensors file"], id="B54"),
]


@pytest.mark.parametrize(("damage", "problems"), DAMAGE)
def test_damage(tmp_path: Path, damage: Callable[[Path], object], problems: list[str]) -> None:
    damage(make(tmp_path))
    report = header(tmp_path)
    assert len(report.problems) == len(problems)
    for found, expected in zip(report.problems, problems, strict=True):
        assert expected in found
        assert found.endswith(".")
    assert report.digest is None


def test_size_level_sees_a_short_shard_by_the_sum(tmp_path: Path) -> None:
    (make(tmp_path) / S1).write_bytes(bytes(2000))
    assert "The shards have" in inspect(tmp_path, level="size").problems[0]


def test_wrong_total_size_is_only_a_warning(tmp_path: Path) -> None:
    edit_index(make(tmp_path), lambda index: index["metadata"].update(total_size=1))
    report = header(tmp_path)
    assert report.problems == []
    assert "claims 1 bytes and the tensors have 4136" in report.warnings[0]


@pytest.mark.parametrize("level", ["header", "size"])
def test_single_file_without_index(tmp_path: Path, level: str) -> None:
    write_shard(tmp_path / "model.safetensors", {"a": 8, "b": 8})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    report = inspect(tmp_path, level=level)
    assert (report.problems, report.tensors, report.total_size, report.mtp) == ([], 2, 16, False)


def test_broken_single_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2000))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    report = header(tmp_path)
    assert len(report.problems) == 1
    assert "model.safetensors is no whole" in report.problems[0]


def test_hub_cache(tmp_path: Path) -> None:
    """B60: links into blobs are followed; the repository's directory itself is no checkpoint."""
    repository = tmp_path / "models--acme--Hy3-NVFP4"
    snapshot = make(repository / "snapshots" / "0123abc")
    blobs = repository / "blobs"
    blobs.mkdir()
    (snapshot / S1).rename(blobs / "5a5a")
    (snapshot / S1).symlink_to("../../blobs/5a5a")
    assert header(snapshot).problems == []
    assert f"give a directory in {repository / 'snapshots'} instead" in header(repository).problems[0]
    (blobs / "77.incomplete").touch()
    assert "77.incomplete" in header(snapshot).problems[0]
    (blobs / "5a5a").unlink()
    assert "1 of the 3 shards" in header(snapshot).problems[0]


def test_no_directory(tmp_path: Path) -> None:
    report = header(tmp_path / "none")
    assert not report.exists
    assert report.problems == [f"{tmp_path / 'none'} is no directory; fetch the checkpoint to it."]


def test_a_disk_is_not_walked(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "photo").touch()
    assert header(tmp_path).files == []


def test_file_of_no_engine_that_cannot_be_hashed_is_a_warning(tmp_path: Path) -> None:
    """A log that is written to beside the shards must not keep the checkpoint from being served."""
    log = make(tmp_path) / "serve.log"
    log.write_bytes(bytes(32 * 1024**2))
    stop = threading.Event()

    def write() -> None:
        with log.open("ab") as file:
            while not stop.wait(0.0005):
                file.write(b"x")
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        report = header(tmp_path)
    finally:
        stop.set()
        writer.join()
    assert report.problems == []
    assert report.warnings[0].startswith("serve.log changed while it was read;")


DIGEST_CHANGES: list[Any] = [
    pytest.param(lambda d: (d / "LICENSE").write_text("other"), False, id="license"),
    pytest.param(lambda d: (d / "README.md").write_text("new"), False, id="readme"),
    pytest.param(lambda d: (d / "tokenizer.json").write_text("[]"), True, id="tokenizer"),
    pytest.param(lambda d: (d / "chat_template.jinja").write_text("x"), True, id="template"),
    pytest.param(lambda d: write_shard(d / S1, SHARDS[S1], "I8"), True, id="header-of-equal-length"),
]


@pytest.mark.parametrize(("change", "differs"), DIGEST_CHANGES)
def test_digest(tmp_path: Path, change: Callable[[Path], object], differs: bool) -> None:
    before = header(make(tmp_path / "one")).digest
    changed = make(tmp_path / "two")
    assert header(changed).digest == before
    change(changed)
    after = header(changed).digest
    assert after is not None
    assert (after != before) == differs


def test_compare_leaves_out_shards_without_header() -> None:
    assert compare({"a": "s1", "b": "s2"}, {"s1": ["a"]}) == []


HY3_MTP = {f"model.layers.80.{part}.weight" for part in ("eh_proj", "enorm", "hnorm")}
MTP: list[tuple[str, set[str], int | None, bool]] = [
    ("there", HY3_MTP, 80, True),
    ("B85-stripped", {"model.layers.0.x", "model.layers.79.x"}, 80, False),
    ("other-layer", HY3_MTP, 79, False),
    ("one-lacks", HY3_MTP - {"model.layers.80.enorm.weight"}, 80, False),
    ("layers-unknown", HY3_MTP, None, False),
]


@pytest.mark.parametrize(("tensors", "layers", "expected"), [row[1:] for row in MTP], ids=[row[0] for row in MTP])
def test_has_mtp(tensors: set[str], layers: int | None, expected: bool) -> None:
    assert has_mtp(tensors, layers) == expected


PATTERNS: list[tuple[list[Any], bool]] = [
    ([], False),
    (["lm_head"], True),
    (["*.self_attn*", "lm_*"], True),
    (["re:.*head$"], True),
    (["re:(", "model.embed_tokens"], False),
    (["*.lm_head"], False),
    ([5], False),
]


@pytest.mark.parametrize(("patterns", "expected"), PATTERNS, ids=[str(row[0]) for row in PATTERNS])
def test_excludes_lm_head(patterns: list[Any], expected: bool) -> None:
    assert excludes_lm_head(patterns) == expected


HY3 = {
    "architectures": ["HYV3ForCausalLM"],
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "num_experts": 192,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 262144,
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
LEGACY = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
MODELS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("hy3", HY3, {}, {"layers": 80, "heads": 64, "kv_heads": 8, "experts": 192, "nextn_layers": 1, "quant_algo": None}),
    (
        "modelopt",
        {**HY3, "quantization_config": MODELOPT},
        {},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "lm_head_excluded": True},
    ),
    ("legacy-alone", HY3, LEGACY, {"quant_method": "modelopt", "quant_algo": "NVFP4", "lm_head_excluded": True}),
    ("head-dim-derived", {"hidden_size": 512, "num_attention_heads": 8}, {}, {"head_dim": 64, "kv_heads": 8}),
    (
        "nonsense",
        {"architectures": "x", "num_hidden_layers": "80", "quantization_config": []},
        {"quantization": 1},
        {"architecture": None, "layers": None, "quant_method": None, "lm_head_excluded": False},
    ),
]


@pytest.mark.parametrize(("config", "legacy", "expected"), [row[1:] for row in MODELS], ids=[row[0] for row in MODELS])
def test_describe_model(config: dict[str, Any], legacy: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected.items() <= describe_model(config, legacy).items()


LFS: list[tuple[bytes, int | None]] = [
    (POINTER, 4999999999),
    (b"version https://git-lfs.github.com/spec/v1\n", 0),
    (b"{}", None),
]


@pytest.mark.parametrize(("head", "expected"), LFS, ids=["pointer", "without-size", "json"])
def test_lfs_size(head: bytes, expected: int | None) -> None:
    assert lfs_size(head) == expected


def test_sentences_stay_short() -> None:
    assert naming({"c", "a"}) == "a, c"
    assert naming([f"{number:02}" for number in range(99)]) == "00, 01, 02 and 96 more"
    assert capped(["x"] * 20) == ["x"] * 20
    assert capped(["x"] * 22)[-1] == "Problems left out here: 2."
