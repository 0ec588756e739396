# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What checkpoints need: the published kinds of Hy3, in miniature (two layers and an MTP layer)."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_facts import (
    read_checkpoint as describe_checkpoint,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch._needs import (
    Checkpoint,
    excluded,
    needed_by,
    problems,
    read_checkpoint,
    suffix_of,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils._patch.published import (
    ANGELSLIM,
    CONFIG,
    KODELOW,
    LIBERTAI,
    NAMED,
    PLAIN,
    VROOMFONDEL,
    checkpoint,
    tensors,
)

NO_HEAD = checkpoint(tensors([".experts."]), "*self_attn*")
HEAD_QUANTIZED = checkpoint({*tensors(["."]), "lm_head.weight_scale"}, "*self_attn*")


def bf16_mtp(*ignored: str) -> Checkpoint:
    return checkpoint(tensors(["layers.0.", "layers.1."]), "lm_head", *ignored)


NOT_IN_LIST = checkpoint(tensors(["layers.0.", "layers.1."]), "lm_head")
WORKAROUND = checkpoint(
    tensors([".experts."]),
    "lm_head",
    "*self_attn*",
    *(f"model.layers.{n}.mlp.{p}" for n in range(3) for p in ("gate_up_proj", "gate_proj", "up_proj", "down_proj")),
)

# What, checkpoint, patch, ranks, whether it needs the patch, a part of the reason.
TEST_NEEDS: list[tuple[str, Checkpoint, str, int, str, str]] = [
    ("bf16", PLAIN, "P1", 1, "not_needed", "ModelOpt"),
    ("libertai", LIBERTAI, "P1", 2, "needed", "lm_head is excluded"),
    ("no-mtp", checkpoint(tensors(["."], mtp=False), "lm_head"), "P1", 1, "not_needed", "no MTP layer"),
    ("lm-head-not-in-list", NO_HEAD, "P1", 2, "not_needed", "the target model dies first"),
    ("lm-head-quantized", HEAD_QUANTIZED, "P1", 2, "not_needed", "not stored in full width"),
    ("mixed", checkpoint(tensors(["."]), "lm_head", algo="MIXED_PRECISION"), "P1", 1, "not_needed", "of one kind"),
    ("fp8", checkpoint(tensors(["."]), "lm_head", algo="FP8"), "P1", 1, "needed", "lm_head"),
    ("compressed-tensors", KODELOW, "P1", 2, "not_needed", "ModelOpt"),
    ("bare", LIBERTAI, "P2", 2, "not_needed", "no suffix"),
    ("suffix", KODELOW, "P2", 2, "needed", "end in :opensource"),
    ("three-ranks", PLAIN, "P3", 3, "needed", "120832 does not divide among 3"),
    ("two-ranks", PLAIN, "P3", 2, "not_needed", "divides"),
    ("four-ranks", PLAIN, "P3", 4, "not_needed", "divides"),
    ("own-names", LIBERTAI, "P4", 2, "not_needed", "names that the engine knows"),
    ("transformers-names", VROOMFONDEL, "P4", 4, "needed", "shared_experts"),
    ("bias-only", checkpoint(tensors(more=NAMED["more"])), "P4", 1, "needed", "e_score_correction_bias"),
    ("mtp-bf16", VROOMFONDEL, "P5", 4, "needed", "full width and would be built quantized"),
    ("mtp-nvfp4", LIBERTAI, "P5", 2, "harmful", "stored quantized"),
    ("mtp-nvfp4-other-format", KODELOW, "P5", 2, "harmful", "stored quantized"),
    ("mtp-not-in-list", NOT_IN_LIST, "P5", 2, "not_needed", "add model.layers.2* to that list"),
    ("mtp-of-bf16", PLAIN, "P5", 1, "not_needed", "not quantized by ModelOpt"),
    ("no-mtp-experts", checkpoint(tensors(mtp=False)), "P5", 1, "not_needed", "no MTP layer"),
    ("mtp-in-list-by-up", bf16_mtp("model.layers.2.mlp.experts.0.up_proj"), "P5", 1, "needed", "full width"),
    ("mtp-in-list-by-down", bf16_mtp("*.2.mlp.experts.*.down_proj"), "P5", 1, "needed", "full width"),
    ("mtp-in-list-by-other", bf16_mtp("*.2.mlp.gate"), "P5", 1, "not_needed", "missing from the list"),
    ("final-norm", VROOMFONDEL, "P6", 4, "needed", "final_layernorm.weight is stored"),
    ("no-final-norm", checkpoint(tensors(mtp=False)), "P6", 1, "not_needed", "is not stored"),
    ("shared-in-list", ANGELSLIM, "P7", 2, "needed", "shared_mlp"),
    ("shared-in-list-regex", KODELOW, "P7", 2, "not_needed", "found without"),
    ("shared-quantized", LIBERTAI, "P7", 2, "not_needed", "found without"),
    ("shared-under-wrong-name", WORKAROUND, "P7", 2, "harmful", "only without"),
    ("shared-of-bf16", PLAIN, "P7", 2, "not_needed", "not quantized"),
    ("wildcards", ANGELSLIM, "P8", 2, "needed", "leading dot"),
    ("mtp-wildcard-only", VROOMFONDEL, "P8", 4, "not_needed", "found without"),
    ("one-part-wildcards", LIBERTAI, "P8", 2, "not_needed", "found without"),
]


@pytest.mark.parametrize(
    ("given", "patch", "ranks", "needed", "reason"), [row[1:] for row in TEST_NEEDS], ids=[row[0] for row in TEST_NEEDS]
)
def test_needed_by(given: Checkpoint, patch: str, ranks: int, needed: str, reason: str) -> None:
    need = needed_by(given, patch, ranks=ranks)
    assert (need.needed_by, reason in need.why) == (needed, True), need.why


# Engine, patterns, quantization method, name, whether it is excluded, by the functions of vLLM 0.32 and SGLang 0.5.23.
TEST_EXCLUDED: list[tuple[str, str, str, str, bool]] = [
    ("vllm", "lm_head", "modelopt", "model.layers.2.lm_head", True),
    ("vllm", "lm_head", "modelopt", "model.layers.2.shared_head.head", False),
    ("vllm", "model.layers.1.mlp.shared_mlp*", "modelopt", "model.layers.1.mlp.shared_mlp.down_proj", True),
    ("vllm", "model.layers.1.mlp.shared_mlp*", "modelopt", "model.layers.1.mlp.down_proj", False),
    ("vllm", "re:.*shared_mlp.*", "compressed-tensors", "model.layers.1.mlp.shared_mlp.down_proj", True),
    ("vllm", "lm_head", "compressed-tensors", "model.layers.2.lm_head", False),
    ("vllm", "re:(", "compressed-tensors", "lm_head", False),
    ("sglang", "model.layers.0*", "modelopt", ".model.layers.0.self_attn.o_proj", False),
    ("sglang", "model.layers.0*", "modelopt", "model.layers.0.self_attn.o_proj", True),
    ("sglang", "lm_head", "modelopt", ".lm_head", True),
    ("sglang", "model.layers.0.self_attn.o_proj", "modelopt", ".model.layers.0.self_attn.o_proj", True),
    ("sglang", "*layers*", "modelopt", "model.layers.2.mlp.experts", True),
    ("sglang", "model.layers.2*", "modelopt", "model.decoder.mlp.experts", False),
    ("sglang", "model.layers.2.mlp.experts", "modelopt", ".model.layers.2.mlp.experts", False),
    ("sglang", "model.layers.2.mlp", "modelopt", "model.layers.2.mlp.down_proj", True),
]


@pytest.mark.parametrize(("engine", "pattern", "method", "name", "expected"), TEST_EXCLUDED)
def test_excluded(engine: str, pattern: str, method: str, name: str, expected: bool) -> None:
    assert excluded(engine, checkpoint([], pattern, method=method), name) is expected


def test_fused_modules_are_excluded_by_their_parts() -> None:
    parts = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv"]
    for engine in ("vllm", "sglang"):
        assert excluded(engine, checkpoint([], *parts), "model.layers.0.self_attn.qkv_proj") is True
        assert excluded(engine, checkpoint([], *parts[:2]), "model.layers.0.self_attn.qkv_proj") is False


def test_mixed_precision_lists_what_is_quantized() -> None:
    given = checkpoint([], algo="MIXED_PRECISION")
    quant = {**given.quantization, "quantized_layers": {"model.layers.1.mlp.experts.0.up_proj": {}, "lm_head": {}}}
    given = Checkpoint({**CONFIG, "quantization_config": quant}, {}, {}, (), ())
    assert [
        excluded("vllm", given, name) for name in ("model.layers.1.mlp.experts", "lm_head", "model.layers.1.mlp")
    ] == [
        False,
        False,
        False,
    ]
    assert excluded("vllm", given, "model.layers.1.self_attn.o_proj") is True


def mixed(quant: Any, legacy: Any) -> Checkpoint:
    """Whose quantization is said in config.json, in hf_quant_config.json, or in both."""
    return Checkpoint(
        {**CONFIG, **({"quantization_config": quant} if quant else {})},
        {"quantization": legacy},
        {},
        (),
        tensors(["."]),
    )


def keyed(given: Checkpoint, key: Any) -> Checkpoint:
    return replace(given, tokenizer_config={"token_suffix": key})


MIXED, LISTED = {"quant_algo": "MIXED_PRECISION"}, {"quantized_layers": {"model.layers.1.mlp.experts": {}}}
METHOD = {"quant_method": "modelopt"}
NAMED_LAYER = [f"model.layers.{number}.self_attn*" for number in range(3)]
DRAFTER_KINDS = tensors(["layers.0.", "layers.1.", "layers.2.self_attn"])
# What, checkpoint, engine, a part of the one sentence, or nothing.
TEST_PROBLEMS: list[tuple[str, Checkpoint, str, str]] = [
    ("libertai", LIBERTAI, "vllm", ""),
    ("libertai-sglang", LIBERTAI, "sglang", ""),
    ("vroomfondel-sglang", VROOMFONDEL, "sglang", ""),
    ("bf16", PLAIN, "vllm", ""),
    ("bf16-sglang", PLAIN, "sglang", ""),
    ("head-not-in-list", NO_HEAD, "vllm", "lm_head is stored in full width and missing from the list"),
    ("no-key", KODELOW, "vllm", "has token_suffix None and the special tokens end in ':opensource'"),
    ("no-key-sglang", KODELOW, "sglang", ""),
    ("right-key", keyed(KODELOW, ":opensource"), "vllm", ""),
    (
        "wrong-key",
        keyed(KODELOW, ":preview"),
        "vllm",
        "has token_suffix ':preview' and the special tokens end in ':opens",
    ),
    ("key-and-bare", keyed(LIBERTAI, ":opensource"), "vllm", "the special tokens have no suffix"),
    ("empty-key-and-bare", keyed(LIBERTAI, ""), "vllm", ""),
    ("null-key-and-bare", keyed(LIBERTAI, None), "vllm", ""),
    ("key-and-no-tokens", keyed(replace(LIBERTAI, tokens=()), ":a"), "vllm", ""),
    ("mixed-in-both", mixed({**METHOD, **MIXED, **LISTED}, {**MIXED, **LISTED}), "vllm", ""),
    ("mixed-layers-in-legacy", mixed({**METHOD, **MIXED}, {**MIXED, **LISTED}), "vllm", ""),
    ("mixed-all-in-legacy", mixed(None, {**MIXED, **LISTED}), "vllm", ""),
    ("mixed-by-method", mixed({"quant_method": "modelopt_mixed", **LISTED}, {}), "vllm", ""),
    ("mixed-by-method-layers-in-legacy", mixed({"quant_method": "modelopt_mixed"}, LISTED), "vllm", ""),
    ("not-mixed", mixed({**METHOD, "quant_algo": "NVFP4"}, {**MIXED, **LISTED}), "vllm", "lm_head is stored in full"),
    (
        "drafter-of-two-kinds",
        checkpoint(DRAFTER_KINDS, "lm_head", "model.layers.2.mlp.experts*"),
        "sglang",
        "model.layers.2.self_attn.o_proj is stored quantized and the experts beside it in full width",
    ),
    ("drafter-not-in-list", NOT_IN_LIST, "sglang", "add model.layers.2* to that list"),
    (
        "drafter-by-layer-name",
        checkpoint(tensors([".experts.", "shared_mlp", "layers.0.mlp"]), "lm_head", *NAMED_LAYER),
        "sglang",
        "add model.decoder.self_attn.o_proj to that list",
    ),
    ("drafter-in-list", checkpoint(tensors(["."]), "lm_head", "*self_attn*"), "sglang", "take it off that list"),
]


@pytest.mark.parametrize(
    ("given", "engine", "sentence"), [row[1:] for row in TEST_PROBLEMS], ids=[row[0] for row in TEST_PROBLEMS]
)
def test_problems_that_no_patch_repairs(given: Checkpoint, engine: str, sentence: str) -> None:
    found = problems(given, engine)
    assert len(found) == bool(sentence), found
    assert sentence in "".join(found)


def write(place: Path, **files: Any) -> Path:
    """A directory with these JSON files; two underscores in a name are a dot."""
    for name, value in files.items():
        (place / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return place


INDEX = {"weight_map": {"lm_head.weight": "model-1.safetensors"}}


def test_read_checkpoint(tmp_path: Path) -> None:
    write(
        tmp_path,
        config__json=CONFIG,
        hf_quant_config__json={"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        tokenizer_config__json={"added_tokens_decoder": {"1": {"content": "<think:a>"}}, "token_suffix": ":a"},
        model__safetensors__index__json=INDEX,
    )
    read = read_checkpoint(tmp_path)
    assert (read.modelopt, read.ignored, read.suffix, set(read.tensors)) == (
        True,
        ["lm_head"],
        ":a",
        {"lm_head.weight"},
    )
    assert problems(read, "vllm") == []


def test_read_tokens_and_tensors_from_other_places(tmp_path: Path) -> None:
    write(tmp_path, config__json=CONFIG, tokenizer__json={"added_tokens": [{"content": "<think:b>"}]})
    header = json.dumps({"lm_head.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    read = read_checkpoint(tmp_path)
    assert (read.suffix, set(read.tensors), dict(read.quantization)) == (":b", {"lm_head.weight"}, {})


ADDED = {"tokenizer_config__json": {"added_tokens_decoder": {"1": {"content": "<think:a>"}}}}
# What, files, suffix.
TEST_SUFFIX: list[tuple[str, dict[str, Any], str | None]] = [
    ("decoder", ADDED, ":a"),
    ("added", {"tokenizer__json": {"added_tokens": [{"content": "<think:a>"}]}}, ":a"),
    (
        "decoder-empty",
        {
            "tokenizer_config__json": {"added_tokens_decoder": {}},
            "tokenizer__json": {"added_tokens": [{"content": "<think:a>"}]},
        },
        ":a",
    ),
    ("vocabulary", {"tokenizer__json": {"model": {"vocab": {"<think:a>": 1, "think": 2}}}}, ":a"),
    ("vocabulary-bare", {"tokenizer__json": {"model": {"vocab": {"<think>": 1, "<tool_calls>": 2}}}}, ""),
    ("tool-calls", {"tokenizer__json": {"model": {"vocab": {"<tool_calls:v2>": 2}}}}, ":v2"),
    ("both", {**ADDED, "tokenizer__json": {"model": {"vocab": {"<think>": 1}}}}, ":a"),
    ("no-marks", {"tokenizer__json": {"model": {"vocab": {"think": 1, "<thinking:a>": 2}}}}, None),
    ("odd", {"tokenizer__json": {"model": {"vocab": [["<think>", 0]]}, "added_tokens": [1]}}, None),
    ("none", {}, None),
]


@pytest.mark.parametrize(("files", "suffix"), [row[1:] for row in TEST_SUFFIX], ids=[row[0] for row in TEST_SUFFIX])
def test_suffix_wherever_it_stands(tmp_path: Path, files: dict[str, Any], suffix: str | None) -> None:
    read = read_checkpoint(write(tmp_path, config__json=CONFIG, model__safetensors__index__json=INDEX, **files))
    assert (suffix_of(read.tokens), read.suffix) == (suffix, suffix or "")
    assert needed_by(read, "P2").needed_by == ("needed" if suffix else "not_needed")
    # The rules of the preflight must see the same.
    facts = describe_checkpoint(tmp_path)
    assert facts is not None
    assert facts["vocab_suffix"] == suffix


# Files, a part of the sentence.
TEST_UNREADABLE: list[tuple[str, dict[str, Any], str]] = [
    ("empty", {}, "has no config.json with settings"),
    ("no-index", {"config__json": CONFIG}, "Neither model.safetensors.index.json nor model.safetensors is in"),
    ("bad-json", {"config__json": "{"}, "config.json is no valid JSON"),
    ("no-object", {"config__json": []}, "config.json holds no JSON object"),
    ("bad-index", {"config__json": CONFIG, "model__safetensors__index__json": {}}, "has no weight_map"),
]


@pytest.mark.parametrize(
    ("files", "message"), [row[1:] for row in TEST_UNREADABLE], ids=[row[0] for row in TEST_UNREADABLE]
)
def test_unreadable(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(Hy3Error, match=message):
        read_checkpoint(write(tmp_path, **files))
