# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's checkpoint without an engine: structure, determinism, and how it is written."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import inspect
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import read_header

SCRIPT = Path(__file__).parents[3] / "roles/lab/files/make_tiny_hy3.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_hy3", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tiny = load()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lab") / "hy3"
    assert tiny.main([str(out)]) == 0
    return out


def test_it_is_whole_and_has_a_drafter(checkpoint: Path) -> None:
    report = inspect(checkpoint, level="header")
    assert (report.problems, report.warnings) == ([], [])
    assert (len(report.shards), report.mtp) == (4, True)
    assert report.model["architecture"] == "HYV3ForCausalLM"
    assert (report.model["layers"], report.model["nextn_layers"]) == (3, 1)


# Stated here, so that an interpreter or machine that makes other bytes is noticed.
SHA256_OF_SEED_0 = "d8571e3c0a8d58b0467b57b4a980ed8c318745335f54b4c1a9c663ade62322af"


def test_seed_0_makes_the_same_bytes_everywhere(checkpoint: Path) -> None:
    digest = sha256()
    for path in sorted(checkpoint.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest() == SHA256_OF_SEED_0


def test_another_seed_changes_every_shard_and_nothing_else() -> None:
    options = {"shards": 2, "acceptance": 1.0, "layers": 2}
    first, other = tiny.checkpoint(seed=1, **options), tiny.checkpoint(seed=2, **options)
    assert {name for name in first if first[name] != other[name]} == {name for name in first if "-of-" in name}


def written(checkpoint: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in checkpoint.iterdir()}


def test_second_run_leaves_it_alone_and_another_seed_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(checkpoint)
    assert tiny.main([str(checkpoint)]) == 0
    assert capsys.readouterr().out == "unchanged\n"
    assert tiny.main([str(checkpoint), "--seed", "1"]) == 1
    assert "holds something else than this checkpoint" in capsys.readouterr().err
    assert written(checkpoint) == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["hy3"]


def test_half_written_tree_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".hy3.partial").mkdir()
    (tmp_path / ".hy3.partial" / "junk").touch()
    assert tiny.write(tmp_path / "hy3", {"config.json": b"{}"})
    assert [path.name for path in tmp_path.rglob("*")] == ["hy3", "config.json"]


REFUSED: list[tuple[list[str], str]] = [
    (["--layers", "1"], "--layers 1 leaves no layer with experts"),
    (["--acceptance", "1.5"], "--acceptance 1.5 is not a share"),
    (["--shards", "0"], "--shards 0 holds no weights"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[row[0][0] for row in REFUSED])
def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        tiny.main([str(tmp_path / "hy3"), *arguments])
    assert message in capsys.readouterr().err


def test_more_shards_than_tensors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.main([str(tmp_path / "hy3"), "--shards", "9999"]) == 1
    assert "9999 shards are more than the" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sizes_divide_by_four() -> None:
    config = tiny.config(3)
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "vocab_size",
    ):
        assert config[key] % 4 == 0, key
    assert config["expert_hidden_dim"] == config["moe_intermediate_size"]


TEXTS: list[tuple[str, int, str]] = [
    ("<assistant>", 3, "Paris."),
    ("<assistant>", 5, "Paris. w000 w001"),
    ("<think>", 8, " France has one capital</think>Paris."),
    (
        "<tools>",
        13,
        "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Tokyo</arg_value></tool_call>"
        "</tool_calls>",
    ),
    (tiny.CYCLE[-1], 2, " w000 w001"),
    ("a", 3, "bcd"),
]


@pytest.mark.parametrize(("after", "count", "text"), TEXTS, ids=[row[0].strip() for row in TEXTS])
def test_expected_text(after: str, count: int, text: str) -> None:
    assert tiny.expected_text(count, after) == text


def test_every_token_leads_into_the_cycle() -> None:
    for start in tiny.TOKENS:
        token = start
        for _step in range(2 * len(tiny.TOKENS)):
            token = tiny.successor(token)
        assert token in tiny.CYCLE, start


def test_no_row_of_the_head_is_long() -> None:
    followed = list(tiny.SUCCESSORS.values())
    assert max(followed.count(token) for token in set(followed)) == 2


def test_vocabulary(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(tiny.VOCAB_SIZE))
    assert len(set(tiny.TOKENS)) == tiny.VOCAB_SIZE
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    assert special == set(tiny.SPECIAL)


def test_embeddings_point_to_successors(checkpoint: Path) -> None:
    """The construction itself, without the noisy layers: norm, signs and head name each token's successor."""
    weights = tiny.Weights(seed=0, layers=3, acceptance=1.0)
    tensors = {tensor.name: tensor for tensor in weights.tensors()}

    def rows(name: str) -> list[list[float]]:
        columns = tensors[name].shape[-1]
        halves = struct.unpack(f"<{len(tensors[name].data) // 2}H", tensors[name].data)
        numbers = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
        return [numbers[start : start + columns] for start in range(0, len(numbers), columns)]

    embedding, head = rows("model.embed_tokens.weight"), rows("lm_head.weight")
    signs = rows("model.norm.weight")[0]
    for token in ("<assistant>", "Paris", "<eos>", " w000", "a"):
        state = [sign * entry for sign, entry in zip(signs, embedding[tiny.IDS[token]], strict=True)]
        logits = [sum(a * b for a, b in zip(row, state, strict=True)) for row in head]
        best = max(range(len(logits)), key=logits.__getitem__)
        assert tiny.TOKENS[best] == tiny.successor(token)
        assert logits[best] == 16.0
        assert sorted(logits)[-2] == 0.0


def test_wrong_drafts_have_the_share_asked_for() -> None:
    """eh_proj passes a word's direction on, or for the share 1 - acceptance another word's."""
    weights = tiny.Weights(seed=0, layers=2, acceptance=0.75)
    data = next(tensor for tensor in weights.tensors() if tensor.name.endswith("eh_proj.weight")).data
    size = tiny.HIDDEN
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    matrix = [
        [
            struct.unpack("<f", struct.pack("<I", half << 16))[0]
            for half in halves[2 * size * row : 2 * size * row + size]
        ]
        for row in range(size)
    ]
    right = 0
    sample = tiny.CYCLE[::5]
    for word in sample:
        direction = weights.directions[tiny.IDS[word]]
        passed = [sum(a * b for a, b in zip(row, direction, strict=True)) for row in matrix]
        right += sum(a * b for a, b in zip(passed, direction, strict=True)) > size / 2
    assert abs(right / len(sample) - 0.75) < 0.15


def test_shards_read_by_our_reader(checkpoint: Path) -> None:
    header = read_header(checkpoint / "model-00001-of-00004.safetensors")
    assert header.metadata == {"format": "pt"}
    assert all(tensor.start % (4 if tensor.dtype == "F32" else 2) == 0 for tensor in header.tensors.values())
