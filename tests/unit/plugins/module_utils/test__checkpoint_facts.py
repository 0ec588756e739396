# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_facts import (
    describe_tensors,
    matches,
    read_checkpoint,
    scheme_of,
)
from ansible_collections.sparks.hy3.plugins.module_utils._rules import judge
from hypothesis import given, settings
from hypothesis import strategies as st

Json = dict[str, t.Any]
FLOAT4: Json = {"num_bits": 4, "type": "float", "group_size": 16}
FLOAT8: Json = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def groups(*weights: tuple[Json, Json | None]) -> Json:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"], "weights": weight, "input_activations": inputs}
            for number, (weight, inputs) in enumerate(weights)
        },
    }


# (what, quantization_config, quantization of hf_quant_config.json, scheme)
SCHEMES: list[tuple[str, Json, Json, str]] = [
    ("tencent/Hy3", {}, {}, "none"),
    ("LibertAI", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, "nvfp4"),
    ("legacy file alone", {}, {"quant_algo": "NVFP4"}, "nvfp4"),
    ("ModelOpt weight-only", {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, {}, "w4a16"),
    ("ModelOpt FP8", {"quant_method": "modelopt", "quant_algo": "FP8"}, {}, "fp8"),
    (
        "AngelSlim mixed",
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.1.mlp.experts": {"quant_algo": "NVFP4"},
                "model.layers.80.mlp": {"quant_algo": "FP8"},
            },
        },
        {},
        "nvfp4",
    ),
    ("kodelow", groups((FLOAT4, None)), {}, "w4a16"),
    ("W4A4", groups((FLOAT4, {"num_bits": 4, "type": "float"})), {}, "nvfp4"),
    ("RedHatAI NVFP4-FP8", groups((FLOAT8, {"num_bits": 8}), (FLOAT4, {"num_bits": 4})), {}, "nvfp4"),
    ("FP8 blocks", {"quant_method": "fp8", "weight_block_size": [128, 128]}, {}, "fp8"),
    ("8 bits for activations", groups((FLOAT4, {"num_bits": 8, "type": "float"})), {}, "unknown"),
    ("INT4", groups(({"num_bits": 4, "type": "int"}, None)), {}, "int4"),
    ("something else", {"quant_method": "gguf"}, {}, "unknown"),
]


@pytest.mark.parametrize(("quant", "legacy", "scheme"), [row[1:] for row in SCHEMES], ids=[row[0] for row in SCHEMES])
def test_scheme(quant: Json, legacy: Json, scheme: str) -> None:
    assert scheme_of(quant, legacy) == scheme


LAYER = 79
SHARED = f"model.layers.{LAYER}.mlp.shared_mlp.down_proj.weight"
PLAIN = ["model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"]

# (what, ignore list, quantization_config, further tensors, whether only the name shared_mlp keeps it BF16)
SHARED_NAMES: list[tuple[str, list[str], Json, list[str], bool]] = [
    ("AngelSlim", [f"model.layers.{LAYER}.mlp.shared_mlp*"], {}, [], True),
    ("a regular expression", ["re:.*shared_mlp.*"], groups((FLOAT4, None)), [], True),
    ("the plain names as well", ["*shared_mlp*", *PLAIN], {}, [], False),
    ("the fused name", ["*shared_mlp*", "*.mlp.gate_up_proj", "*.mlp.down_proj"], {}, [], False),
    ("half of the plain names", ["*shared_mlp*", "*.mlp.down_proj"], {}, [], True),
    ("not named at all", ["lm_head"], {}, [], False),
    ("quantized like the rest", ["*shared_mlp*"], {}, [SHARED.replace(".weight", ".weight_scale")], False),
    (
        "only experts are quantized",
        ["*shared_mlp*"],
        {"config_groups": {"a": {"targets": ["re:.*experts.*"]}}},
        [],
        False,
    ),
]


@pytest.mark.parametrize(
    ("ignored", "quant", "more", "expected"), [row[1:] for row in SHARED_NAMES], ids=[row[0] for row in SHARED_NAMES]
)
def test_shared_expert_by_name_only(ignored: list[str], quant: Json, more: list[str], expected: bool) -> None:
    facts = describe_tensors({"num_hidden_layers": 80}, quant, ignored, {SHARED, *more})
    assert facts["shared_by_name_only"] is expected


# (name of a tensor in the index, what it changes)
TENSORS: list[tuple[str, str, bool]] = [
    ("model.layers.80.mlp.experts.0.gate_proj.weight_scale", "mtp_quantized", True),
    ("model.layers.80.mlp.experts.0.gate_proj.weight_packed", "mtp_quantized", True),
    ("model.layers.80.mlp.experts.0.gate_proj.weight", "mtp_quantized", False),
    ("model.layers.79.mlp.experts.0.gate_proj.weight_scale", "mtp_quantized", False),
    ("model.layers.1.mlp.shared_experts.down_proj.weight", "shared_experts_names", True),
    ("model.layers.1.mlp.shared_mlp.down_proj.weight", "shared_experts_names", False),
    ("lm_head.weight", "lm_head_plain", True),
    ("model.embed_tokens.weight", "lm_head_plain", False),
]


@pytest.mark.parametrize(("tensor", "fact", "expected"), TENSORS)
def test_tensors(tensor: str, fact: str, expected: bool) -> None:
    assert describe_tensors({"num_hidden_layers": 80}, {}, [], {tensor})[fact] is expected


def test_a_whole_directory(tmp_path: Path) -> None:
    files: dict[str, Json] = {
        "config.json": {
            "architectures": ["HYV3ForCausalLM"],
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "vocab_size": 448,
            "route_norm": True,
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.3*"],
            },
        },
        "model.safetensors.index.json": {
            "metadata": {"total_size": 1000},
            "weight_map": {f"model.layers.3.{part}.weight": "a" for part in ("eh_proj", "enorm", "hnorm")},
        },
        "tokenizer_config.json": {"token_suffix": ":opensource"},
        "tokenizer.json": {"added_tokens": [{"content": "<think:opensource>"}]},
        "generation_config.json": {"top_k": 0},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    facts = read_checkpoint(tmp_path)
    assert facts is not None
    assert (
        facts.items()
        >= {
            "scheme": "nvfp4",
            "method": "modelopt",
            "lm_head_excluded": True,
            "layer_wildcards": False,  # of the MTP layer alone
            "missing_keys": ["expert_hidden_dim", "first_k_dense_replace", "num_nextn_predict_layers"],
            "num_key_value_heads": 8,
            "intermediate_size": None,
            "total_size": 1000,
            "mtp_layer": True,
            "mtp_quantized": False,
            "vocab_suffix": ":opensource",
            "token_suffix": ":opensource",
            "top_k": 0,
        }.items()
    )


def test_what_is_missing_is_unknown(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path / "none") is None
    (tmp_path / "config.json").write_text("{}")
    facts = read_checkpoint(tmp_path)
    assert facts is not None
    assert "mtp_layer" not in facts
    assert (facts["vocab_suffix"], facts["token_suffix"], facts["total_size"]) == (None, None, None)


def test_a_broken_pattern_matches_nothing() -> None:
    assert not matches("re:(", "lm_head")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["quantization_config", "num_hidden_layers", "num_attention_heads", "architectures", "vocab_size"]
)
GROUP = st.dictionaries(st.sampled_from(["targets", "weights", "input_activations", "quant_algo", "num_bits"]), JSON)
QUANT = st.dictionaries(
    st.sampled_from(["quant_algo", "quant_method", "config_groups", "ignore", "quantized_layers", "weight_block_size"]),
    JSON | st.dictionaries(st.text(max_size=3), GROUP, max_size=2),
)
FILES = st.fixed_dictionaries(
    {
        "config.json": st.dictionaries(KEYS, QUANT | JSON),
        "hf_quant_config.json": st.fixed_dictionaries({"quantization": QUANT | JSON}),
        "model.safetensors.index.json": st.fixed_dictionaries({"weight_map": JSON, "metadata": JSON}),
        "tokenizer_config.json": JSON,
        "generation_config.json": JSON,
    }
)


@settings(max_examples=40, deadline=None)
@given(files=FILES)
def test_any_files_give_facts_and_a_verdict(tmp_path_factory: pytest.TempPathFactory, files: dict[str, t.Any]) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    judge({"engine": "vllm", "version": "0.24.0", "arguments": {}, "checkpoint": read_checkpoint(directory)})
