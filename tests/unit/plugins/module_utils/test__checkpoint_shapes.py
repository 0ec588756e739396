# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real Hy3 against its configuration, and each way in which the two can be of different revisions."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_model import describe_model
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_shapes import absent, misshapen, sizes_of
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.hy3_checkpoint import (
    CONFIG,
    Tensors,
    bf16,
    hy3_tensors,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st


def fp8_blocks(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale_inv": ("F32", (rows // 128, columns // 128)),
    }


def int4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight_packed": ("I32", (rows, columns // 8)),
        f"{name}.weight_scale": ("BF16", (rows, columns // 128)),
    }


def problems(config: dict[str, t.Any], tensors: Tensors) -> list[str]:
    model = describe_model(config, {})
    return absent(tensors, model) + misshapen(tensors, sizes_of(config, model))


# (what, tensors)
WHOLE: list[tuple[str, Tensors]] = [
    ("NVFP4", hy3_tensors()),
    ("BF16", hy3_tensors(experts=bf16, mtp_experts=bf16)),
    ("FP8", hy3_tensors(experts=fp8_blocks, mtp_experts=fp8_blocks, rest=fp8_blocks)),
    ("INT4", hy3_tensors(experts=int4, mtp_experts=bf16)),
]


@pytest.mark.parametrize("tensors", [row[1] for row in WHOLE], ids=[row[0] for row in WHOLE])
def test_whole(tensors: Tensors) -> None:
    assert problems(CONFIG, tensors) == []
    without = {key: value for key, value in CONFIG.items() if key in ("model_type", "num_hidden_layers")}
    assert problems(without, tensors) == []


NVFP4 = hy3_tensors()
QUERIES = "model.layers.0.self_attn.q_proj.weight is BF16 [8192, 4096]"
# (what, configuration that differs, tensors left out by a part of their names, parts of the sentences)
WRONG: list[tuple[str, dict[str, t.Any], str, list[str]]] = [
    (
        "padded configuration",
        {"num_attention_heads": 72, "num_key_value_heads": 9},
        "",
        [
            "(81): model.layers.0.self_attn.o_proj.weight is BF16 [4096, 8192] and config.json makes it [4096, 9216]",
            f"(81): {QUERIES} and config.json makes it [9216, 4096] (queries, hidden)",
            "(162): model.layers.0.self_attn.k_proj.weight is BF16 [1024, 4096] and config.json makes it [1152, 4096]",
        ],
    ),
    ("vocabulary", {"vocab_size": 120818}, "", ["(2): lm_head.weight is BF16 [120832, 4096]"]),
    ("experts", {"num_experts": 193}, "", ["80 layers lack some, such as layer 1 number 192;", "[193, 4096]"]),
    ("layers", {"num_hidden_layers": 90}, "", ["counts 90 layers and no tensor is of 81 and 8 more;"]),
    ("one layer lost", {}, "model.layers.7.", ["counts 80 layers and no tensor is of 7;"]),
    (
        "one expert lost",
        {},
        "model.layers.7.mlp.experts.3.",
        ["counts 192 experts and 1 layers lack some, such as layer 7 number 3;"],
    ),
    ("expert size", {"expert_hidden_dim": 1600}, "", ["U8 [4096, 768]", "U8 [1536, 2048]"]),
    ("a billion layers", {"num_hidden_layers": 10**9}, "", ["no tensor is of 81 and 999999918 more"]),
]


@pytest.mark.parametrize(("changes", "lost", "parts"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong(changes: dict[str, t.Any], lost: str, parts: list[str]) -> None:
    tensors = {name: tensor for name, tensor in NVFP4.items() if not lost or not name.startswith(lost)}
    found = sorted(problems({**CONFIG, **changes}, tensors))
    assert len(found) == len(parts)
    for part in parts:
        assert any(part in sentence for sentence in found), found
    assert all(sentence.endswith(".") for sentence in found)


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers())
SOME = {name: tensor for name, tensor in NVFP4.items() if not name.startswith("model.layers.") or ".80." in name}


@settings(max_examples=60, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(list(CONFIG)), JSON, max_size=4), shape=st.lists(st.integers(0, 2**70)))
@example(changes={"num_experts": -1, "num_hidden_layers": -1}, shape=[])
def test_any_configuration_and_shape_give_sentences(changes: dict[str, t.Any], shape: list[int]) -> None:
    tensors = {**SOME, "lm_head.weight": ("BF16", tuple(shape))}
    assert all(sentence.endswith(".") for sentence in problems({**CONFIG, **changes}, tensors))
