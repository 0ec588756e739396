# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How modules are stored, by the dtypes and scales beside their weights."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._quantization import (
    Stored,
    describe_storage,
    format_of,
    ignore_patterns,
    matches,
    sections,
    storage_warnings,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.hy3_checkpoint import bf16, hy3_tensors

Leaves = dict[str, tuple[str, tuple[int, ...]]]
FLOAT4 = ("U8", (64, 32))
FP8 = ("F8_E4M3", (64, 64))

# What is beside a weight of 64 x 64, and what that makes it.
FORMATS: list[tuple[str, Leaves, str]] = [
    ("plain", {"weight": ("BF16", (64, 64))}, "bf16"),
    ("bias alone", {"expert_bias": ("F32", (64,))}, "f32"),
    (
        "ModelOpt NVFP4",
        {"weight": FLOAT4, "weight_scale": ("F8_E4M3", (64, 4)), "weight_scale_2": ("F32", ()), "input_scale": FLOAT4},
        "nvfp4",
    ),
    (
        "ModelOpt weight-only",
        {"weight": FLOAT4, "weight_scale": ("F8_E4M3", (64, 4)), "weight_scale_2": ("F32", ())},
        "w4a16",
    ),
    (
        "compressed-tensors NVFP4",
        {
            "weight_packed": FLOAT4,
            "weight_scale": ("F8_E4M3", (64, 4)),
            "weight_global_scale": ("F32", (1,)),
            "input_global_scale": ("F32", (1,)),
        },
        "nvfp4",
    ),
    (
        "compressed-tensors weight-only",
        {"weight_packed": FLOAT4, "weight_scale": ("F8_E4M3", (64, 4)), "weight_global_scale": ("F32", (1,))},
        "w4a16",
    ),
    ("MXFP4", {"weight": FLOAT4, "weight_scale": ("F8_E8M0", (64, 2))}, "mxfp4"),
    ("FP8, one scale", {"weight": FP8, "weight_scale": ("F32", ())}, "fp8_tensor"),
    ("FP8, one scale in a list", {"weight": FP8, "weight_scale": ("F32", (1,))}, "fp8_tensor"),
    ("FP8, a scale for each row", {"weight": FP8, "weight_scale": ("BF16", (64, 1))}, "fp8_channel"),
    ("FP8, blocks", {"weight": FP8, "weight_scale_inv": ("F32", (2, 2))}, "fp8_block"),
    ("FP8 without a scale", {"weight": FP8}, "f8_e4m3"),
    ("INT8", {"weight": ("I8", (64, 64)), "weight_scale": ("F32", (64, 1))}, "int8"),
    ("INT4", {"weight_packed": ("I32", (64, 8)), "weight_scale": ("BF16", (64, 1))}, "int_packed"),
    ("GPTQ", {"qweight": ("I32", (8, 64)), "scales": ("F16", (1, 64)), "qzeros": ("I32", (1, 8))}, "int_packed"),
]


@pytest.mark.parametrize(("leaves", "expected"), [row[1:] for row in FORMATS], ids=[row[0] for row in FORMATS])
def test_format(leaves: Leaves, expected: str) -> None:
    assert format_of(leaves) == expected


def test_the_real_hy3() -> None:
    tensors = hy3_tensors(mtp_experts=bf16)
    stored = describe_storage(tensors, 80)
    assert stored[0] == Stored("experts", False, "nvfp4", 79 * 192 * 3, 161036471808)
    assert {(one.part, one.drafter, one.format) for one in stored} >= {
        ("experts", True, "bf16"),
        ("attention", False, "bf16"),
        ("router", False, "f32"),
    }
    assert describe_storage(tensors, None)[0].modules == 79 * 192 * 3
    assert not any(one.drafter for one in describe_storage(tensors, None))


def test_modules_without_a_leaf_of_their_own() -> None:
    fused = {"model.layers.1.mlp.experts.gate_up_proj": ("BF16", (2, 4, 4)), "odd": ("F32", (1,))}
    bias = {"model.layers.1.mlp.expert_bias": ("F32", (2,)), "model.layers.1.mlp.gate.weight": ("BF16", (2, 4))}
    assert describe_storage({**fused, **bias}, 9) == [
        Stored("experts", False, "bf16", 1, 64),
        Stored("router", False, "bf16", 1, 16),
        Stored("router", False, "f32", 1, 8),
        Stored("other", False, "f32", 1, 4),
    ]


NVFP4, PLAIN = Stored("experts", False, "nvfp4", 1, 1), Stored("norms", False, "bf16", 1, 1)
FP8_ALONE = Stored("experts", False, "f8_e4m3", 1, 1)
WARNINGS: list[tuple[str, bool, list[Stored], str]] = [
    ("quantized and said", True, [NVFP4, PLAIN], ""),
    ("not quantized", False, [PLAIN], ""),
    ("no headers", True, [], ""),
    ("scales unsaid", False, [NVFP4, PLAIN], "stored as nvfp4 and config.json has no quantization_config"),
    ("said without scales", True, [PLAIN], "no tensor has a scale"),
    ("said, and scales are made at load", True, [FP8_ALONE, PLAIN], ""),
]


@pytest.mark.parametrize(
    ("quantized", "stored", "warning"), [row[1:] for row in WARNINGS], ids=[row[0] for row in WARNINGS]
)
def test_storage_against_the_configuration(quantized: bool, stored: list[Stored], warning: str) -> None:
    found = storage_warnings(quantized, stored)
    assert len(found) == bool(warning)
    assert warning in "".join(found)


def test_sections_and_patterns() -> None:
    nonsense: list[t.Any] = [None, 5, [], "x"]
    for value in nonsense:
        assert sections({"quantization_config": value}, {"quantization": value}) == ({}, {})
        assert ignore_patterns({"ignore": value}) == []
    assert ignore_patterns({"ignore": ["a", 5], "exclude_modules": ["b"]}) == ["a", "5", "b"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("lm_head", True), ("lm_*", True), ("re:lm", True), ("re:(", False), ("*.lm_head", False), ("re:.*head$", True)],
)
def test_matches(pattern: str, expected: bool) -> None:
    assert matches(pattern, "lm_head") == expected
