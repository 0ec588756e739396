# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Indexes and names as nobody should write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import inspect
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import (
    MAX_JSON_BYTES,
    claimed_size,
    foreign,
    parse_index,
    parse_object,
    read_object,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# total_size as JSON text, and what it is worth.
CLAIMS: list[tuple[str, int | None]] = [
    ("169000000000", 169000000000),
    ("1.69e11", 169000000000),
    ("0", 0),
    ("-1", None),
    ("true", None),
    ('"5"', None),
    ("null", None),
    ("1e999", None),
    ("-1e999", None),
    ("NaN", None),
    ("1" * 400, None),
]


@pytest.mark.parametrize(("text", "expected"), CLAIMS)
def test_claimed_size(text: str, expected: int | None) -> None:
    assert claimed_size(json.loads(f'{{"metadata": {{"total_size": {text}}}}}')) == expected


SHARDS: list[tuple[Any, bool]] = [
    ("model 1.safetensors", True),
    ("sub/m.safetensors", True),
    ("m\n.safetensors", True),
    ("", False),
    ("/etc/passwd", False),
    ("a/../../b", False),
    ("a\0b", False),
    ("m" * 256, False),
    ("m/" * 2048 + "x", False),
    (5, False),
    (None, False),
    (["m"], False),
]


@pytest.mark.parametrize(("name", "taken"), SHARDS, ids=[repr(row[0])[:20] for row in SHARDS])
def test_names_of_shards(name: Any, taken: bool) -> None:
    index = {"weight_map": {"first": "m.safetensors", "second": name}}
    if taken:
        assert parse_index(index)[0] == index["weight_map"]
    else:
        with pytest.raises(Hy3Error, match="puts tensor second into .*, which is no file of it; fetch it again"):
            parse_index(index)


def test_objects(tmp_path: Path) -> None:
    assert read_object(tmp_path / "none.json") is None
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(Hy3Error, match=r"^list\.json holds no JSON object; fetch it again\.$"):
        read_object(tmp_path / "list.json")
    for content in (b"\xff", b"{", b"[" * 100_000, b"", b'{"a": ' + b"1" * 5000 + b"}"):
        with pytest.raises(Hy3Error, match="^x is no valid JSON"):
            parse_object(content, "x")


def test_file_too_large_for_json(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    assert "config.json has 268435457 bytes" in inspect(tmp_path, level="header").problems[0]


def test_foreign(tmp_path: Path) -> None:
    names = ("m.safetensors", "consolidated.safetensors", "m.safetensors.part", "x.gguf", "README.md", "config.json")
    for name in names:
        (tmp_path / name).touch()
    assert foreign(tmp_path, {"m.safetensors"}) == ["consolidated.safetensors", "m.safetensors.part", "x.gguf"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["model_type", "num_hidden_layers", "num_experts", "architectures", "quantization_config", "head_dim", "vocab_size"]
)
CONFIGS = st.dictionaries(KEYS, JSON | st.just("hy_v3"), max_size=5)
NAMES = st.sampled_from(["m.safetensors", "é x"])
INDEXES = st.fixed_dictionaries(
    {},
    optional={
        "weight_map": JSON | st.dictionaries(st.text(max_size=9), NAMES, max_size=4),
        "metadata": JSON | st.fixed_dictionaries({"total_size": JSON}),
    },
)
ENTRIES = st.dictionaries(
    st.sampled_from(["lm_head.weight", "model.layers.0.mlp.experts.0.up_proj.weight", "a", "__metadata__"]),
    JSON
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["U8", "F4", "BF16", "X"]) | JSON,
            "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
            "data_offsets": st.tuples(st.integers(0, 8), st.integers(0, 8)) | JSON,
        }
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("garbage")


def look(place: Path) -> None:
    for level in ("size", "header", "sha256"):
        report = inspect(place, level=level)
        assert (report.digest is None) == bool(report.problems)
        assert all(problem.endswith(".") for problem in report.problems)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=CONFIGS, index=INDEXES, header=ENTRIES, data=st.binary(max_size=9))
def test_garbage_that_is_json(place: Path, config: Any, index: Any, header: Any, data: bytes) -> None:
    raw = json.dumps(header).encode()
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "m.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    look(place)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(
        ["config.json", "model.safetensors.index.json", "m.safetensors", "model.safetensors", "hf_quant_config.json"]
    ),
    content=st.binary(max_size=64),
)
def test_garbage_of_any_bytes(place: Path, name: str, content: bytes) -> None:
    (place / name).write_bytes(content)
    look(place)
