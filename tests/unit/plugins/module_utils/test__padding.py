# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of a padding: sizes, tensors, configuration, and the sentences that refuse.

All field cases of tp_pad are here, by their ids, but for the runs of B72, which are in test_checkpoint_pad.py.
"""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._padding import (
    Padding,
    Plan,
    Shape,
    block_sizes,
    check_original,
    groups_of,
    make_plan,
    pad_heads,
    pad_length,
    pad_tensor,
    padded_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st

HY3 = Shape(heads=64, kv_heads=8, head_dim=128, dense=13312, experts=1536)
BLOCKS = ((128, 128),)
ALONE = {"attention": 1, "dense": 1, "experts": 1}
IN_BLOCKS = dict.fromkeys(ALONE, 128)
LAYER = "model.layers.7."
Q, OUT = LAYER + "self_attn.q_proj.", LAYER + "self_attn.o_proj."
GATE, DOWN = LAYER + "mlp.gate_proj.", LAYER + "mlp.down_proj."
EXPERT, SHARED = LAYER + "mlp.experts.3.", LAYER + "mlp.shared_mlp."


def plan(ranks: int, groups: dict[str, int] | None = None, shape: Shape = HY3, blocks: t.Any = BLOCKS) -> Plan:
    return make_plan(shape, groups or ALONE, tensor_parallel=ranks, blocks=blocks)


HEADS: list[tuple[int, int, int, int, int, tuple[int, int]]] = [
    # query heads, KV heads, head_dim, ranks, group, expected
    (64, 8, 128, 1, 128, (64, 8)),
    (64, 8, 128, 2, 128, (64, 8)),
    (64, 8, 128, 3, 1, (72, 9)),  # B68: not 66
    (64, 8, 128, 3, 128, (72, 9)),
    (64, 8, 128, 4, 1, (64, 8)),
    (64, 8, 128, 5, 1, (80, 10)),
    (64, 8, 128, 6, 1, (96, 12)),
    (64, 8, 128, 7, 1, (112, 14)),
    (64, 8, 128, 16, 1, (64, 8)),  # B87: KV heads are copied
    (64, 8, 128, 12, 1, (96, 12)),
    (64, 8, 128, 24, 1, (192, 24)),  # copied thrice, 24 ranks do not divide 64
    (8, 4, 128, 3, 1, (12, 6)),
    (8, 8, 128, 3, 1, (9, 9)),
    (8, 1, 128, 3, 1, (24, 3)),
    (64, 8, 64, 8, 128, (128, 16)),  # 64 rows a rank are half a block
    (64, 8, 64, 16, 128, (256, 32)),
    (64, 8, 64, 3, 128, (96, 12)),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "ranks", "group", "expected"), HEADS)
def test_heads(*, heads: int, kv_heads: int, head_dim: int, ranks: int, group: int, expected: tuple[int, int]) -> None:
    assert pad_heads(heads, kv_heads, head_dim=head_dim, tensor_parallel=ranks, group=group) == expected


@given(st.integers(1, 12), st.integers(1, 16), st.sampled_from([32, 64, 128]), st.integers(1, 24), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_rank_reads_its_own_kv_heads(ratio: int, kv_heads: int, head_dim: int, ranks: int, block: bool) -> None:
    heads, group = ratio * kv_heads, 128 if block else 1
    new_heads, new_kv = pad_heads(heads, kv_heads, head_dim=head_dim, tensor_parallel=ranks, group=group)
    assert new_heads >= heads
    assert new_heads % ranks == 0
    per_rank, kv_per_rank = new_heads // ranks, max(1, new_kv // ranks)
    assert ranks == 1 or (per_rank * head_dim % group == 0 and kv_per_rank * head_dim % group == 0)
    copies = max(1, ranks // new_kv)
    assert new_kv % ranks == 0 or new_kv * copies == ranks
    for head in range(heads):
        rank, local = divmod(head, per_rank)
        # As both engines count: local heads over local KV heads, from the rank's first.
        mine = rank * kv_per_rank if copies == 1 else rank // copies
        assert mine + local // (per_rank // kv_per_rank) == head // ratio


LENGTHS = [
    (13312, 1, 128, 13312),
    (13312, 2, 128, 13312),
    (13312, 3, 128, 13440),  # B69
    (13312, 3, 16, 13344),
    (13312, 3, 1, 13344),  # 13314 would do for the ranks, and a rank's 4438 is no multiple of 16
    (13312, 16, 128, 14336),  # B87: 832 a rank are no whole blocks
    (13312, 16, 16, 13312),
    (1536, 3, 128, 1536),  # B69: 512 a rank
    (1536, 5, 16, 1600),
    (1536, 5, 128, 1920),
    (0, 3, 1, 0),
    (1000, 4, 1, 1000),  # divides as it is: nothing to do
]


@pytest.mark.parametrize(("length", "ranks", "group", "expected"), LENGTHS)
def test_lengths(length: int, ranks: int, group: int, expected: int) -> None:
    assert pad_length(length, tensor_parallel=ranks, group=group) == expected


TENSORS: list[tuple[str, str, tuple[int, ...], int, dict[str, int], Padding | None]] = [
    (Q + "weight", "BF16", (8192, 4096), 3, ALONE, Padding(0, (9216, 4096), b"\0")),  # B68
    (LAYER + "self_attn.k_proj.weight", "BF16", (1024, 4096), 3, ALONE, Padding(0, (1152, 4096), b"\0")),
    (LAYER + "self_attn.v_proj.weight", "F8_E4M3", (1024, 4096), 3, ALONE, Padding(0, (1152, 4096), b"\0")),
    (OUT + "weight", "BF16", (4096, 8192), 3, ALONE, Padding(1, (4096, 9216), b"\0")),
    (Q + "weight", "BF16", (8192, 4096), 4, ALONE, None),
    (Q + "bias", "BF16", (8192,), 3, ALONE, Padding(0, (9216,), b"\0")),
    (OUT + "bias", "BF16", (4096,), 3, ALONE, None),
    ("model.layers.80.self_attn.q_proj.weight", "BF16", (8192, 4096), 3, ALONE, Padding(0, (9216, 4096), b"\0")),  # B71
    ("model.layers.80.eh_proj.weight", "BF16", (4096, 8192), 3, ALONE, None),
    ("model.layers.80.final_layernorm.weight", "BF16", (4096,), 3, ALONE, None),
    (LAYER + "self_attn.q_norm.weight", "BF16", (128,), 3, ALONE, None),
    (LAYER + "mlp.router.gate.weight", "F32", (192, 4096), 5, ALONE, None),
    (LAYER + "mlp.expert_bias", "F32", (192,), 5, ALONE, None),
    ("lm_head.weight", "BF16", (120832, 4096), 3, ALONE, None),
    (LAYER + "self_attn.k_scale", "F32", (), 3, ALONE, None),
    (LAYER + "self_attn.rotary_emb.inv_freq", "F32", (64,), 3, ALONE, None),
    # FP8 in blocks, B69
    (GATE + "weight", "F8_E4M3", (13312, 4096), 3, IN_BLOCKS, Padding(0, (13440, 4096), b"\0")),
    (GATE + "weight_scale", "BF16", (104, 32), 3, IN_BLOCKS, Padding(0, (105, 32), b"\x80\x3f")),
    (DOWN + "weight", "F8_E4M3", (4096, 13312), 3, IN_BLOCKS, Padding(1, (4096, 13440), b"\0")),
    (DOWN + "weight_scale_inv", "F32", (32, 104), 3, IN_BLOCKS, Padding(1, (32, 105), b"\0\0\x80\x3f")),
    # FP8 by channel and by tensor
    (GATE + "weight_scale", "F32", (13312, 1), 3, ALONE, Padding(0, (13344, 1), b"\0\0\x80\x3f")),
    (GATE + "weight_scale", "F32", (13312,), 3, ALONE, Padding(0, (13344,), b"\0\0\x80\x3f")),
    (DOWN + "weight_scale", "F32", (4096, 1), 3, ALONE, None),
    (DOWN + "weight_scale", "F32", (4096,), 3, ALONE, None),
    (GATE + "weight_scale", "F32", (1,), 3, ALONE, None),
    # NVFP4
    (GATE + "weight", "U8", (13312, 2048), 3, ALONE, Padding(0, (13344, 2048), b"\0")),
    (GATE + "weight_scale", "F8_E4M3", (13312, 256), 3, ALONE, Padding(0, (13344, 256), b"\x38")),
    (DOWN + "weight_packed", "U8", (4096, 6656), 3, ALONE, Padding(1, (4096, 6672), b"\0")),
    (DOWN + "weight_scale", "F8_E4M3", (4096, 832), 3, ALONE, Padding(1, (4096, 834), b"\x38")),
    (DOWN + "weight_scale_2", "F32", (), 3, ALONE, None),
    (DOWN + "input_global_scale", "F32", (1,), 3, ALONE, None),
    (OUT + "weight", "U8", (4096, 4096), 3, ALONE, Padding(1, (4096, 4608), b"\0")),
    (OUT + "weight_scale", "F8_E4M3", (4096, 512), 3, ALONE, Padding(1, (4096, 576), b"\x38")),
    # experts
    (EXPERT + "up_proj.weight", "U8", (1536, 2048), 3, ALONE, None),
    (EXPERT + "up_proj.weight", "U8", (1536, 2048), 5, ALONE, Padding(0, (1600, 2048), b"\0")),
    (EXPERT + "down_proj.weight", "F4", (4096, 1536), 5, ALONE, Padding(1, (4096, 1600), b"\0")),
    (EXPERT + "down_proj.weight_scale", "F8_E8M0", (4096, 48), 5, ALONE, Padding(1, (4096, 50), b"\x7f")),
    (SHARED + "down_proj.weight_scale", "F8_E4M3", (4096, 96), 5, ALONE, Padding(1, (4096, 100), b"\x38")),
    (SHARED + "gate_proj.weight", "BF16", (1536, 4096), 5, ALONE, Padding(0, (1600, 4096), b"\0")),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "ranks", "groups", "expected"), TENSORS)
def test_tensors(
    *, name: str, dtype: str, shape: tuple[int, ...], ranks: int, groups: dict[str, int], expected: Padding | None
) -> None:
    assert pad_tensor(name, dtype, shape, plan(ranks, groups)) == expected


def test_two_shared_experts_lie_in_one_mlp() -> None:
    two = Shape(heads=64, kv_heads=8, head_dim=128, dense=13312, experts=1536, shared=2)
    assert pad_tensor(SHARED + "up_proj.weight", "BF16", (3072, 4096), plan(5, shape=two)) == Padding(
        0, (3200, 4096), b"\0"
    )


REFUSED = [
    (Q + "weight", "I32", (8192, 512), "does not have the 8192 elements"),
    (Q + "weight", "BF16", (4096, 4096), "does not have the 8192 elements"),
    (Q + "weight_zero_point", "I32", (8192, 8), "a layout that is not padded here"),
    (OUT + "weight", "F8_E4M3", (2, 4096, 8192), "a layout that is not padded here"),
    (DOWN + "weight_scale", "F32", (32, 105), "105 scales for 13312 elements"),
    (DOWN + "weight_scale", "F64", (4096, 832), "no grouping known here"),
    (LAYER + "self_attn.qkv_proj.weight", "BF16", (10240, 4096), "separate projections"),
    (LAYER + "mlp.gate_up_proj.weight", "BF16", (26624, 4096), "separate projections"),
    (LAYER + "self_attn.q_norm.weight", "BF16", (8192,), "norms per head"),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "message"), REFUSED)
def test_unknown_layouts_are_refused(name: str, dtype: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(Hy3Error, match=message):
        pad_tensor(name, dtype, shape, plan(3))
    assert pad_tensor(name, dtype, shape, plan(4)) is None


def test_fused_experts_are_refused_only_if_they_grow() -> None:
    fused = (LAYER + "mlp.experts.gate_up_proj", "BF16", (192, 3072, 4096))
    assert pad_tensor(*fused, plan(3)) is None
    with pytest.raises(Hy3Error, match="a layout that is not padded here"):
        pad_tensor(*fused, plan(5))


def test_groups() -> None:
    tensors = [
        (Q + "weight_scale", "BF16", (64, 32)),
        (GATE + "weight_scale", "F32", (13312, 1)),
        (DOWN + "weight_scale", "F8_E4M3", (4096, 832)),
        (EXPERT + "down_proj.weight_scale", "F8_E8M0", (4096, 48)),
        (SHARED + "down_proj.weight_scale_inv", "F32", (32, 12)),
        (OUT + "weight_scale", "F32", ()),
        (LAYER + "mlp.router.gate.weight", "F32", (192, 4096)),
        (LAYER + "eh_proj.weight", "BF16", (4096, 8192)),
    ]
    assert groups_of(tensors, HY3, BLOCKS) == {"attention": 128, "dense": 16, "experts": 128}
    assert groups_of([], HY3, ()) == ALONE


BLOCKS_SAID: list[tuple[t.Any, t.Any]] = [
    (None, ()),
    ({"weight_block_size": [128, 64]}, ((128, 64),)),
    ({"config_groups": {"a": {"weights": {"block_structure": [128, 128]}}, "b": {"weights": None}}}, ((128, 128),)),
    ({"weight_block_size": [128]}, ()),
    ({"weight_block_size": [0, 128], "config_groups": []}, ()),
    ("fp8", ()),
]


@pytest.mark.parametrize(("quant", "expected"), BLOCKS_SAID)
def test_blocks_said(quant: t.Any, expected: t.Any) -> None:
    assert block_sizes(quant) == expected


def test_config_records_the_originals() -> None:
    config = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 13312, "hidden_size": 4096}
    assert padded_config(config, plan(3, IN_BLOCKS)) == {
        **{"num_attention_heads": 72, "num_key_value_heads": 9, "intermediate_size": 13440, "hidden_size": 4096},
        **{"num_attention_heads_ckpt": 64, "num_key_value_heads_ckpt": 8, "intermediate_size_ckpt": 13312},
        **{"head_dim": 128, "padded_for_tensor_parallel_size": 3},
    }


PADDED = Shape(heads=72, kv_heads=9, head_dim=128, dense=13440, experts=1536)
RECORD = {"num_attention_heads_ckpt": 64, "num_key_value_heads_ckpt": 8, "padded_for_tensor_parallel_size": 3}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("record", "zero_tail", "origin", "said"),
    [
        (RECORD, True, "/m/hy3", r"for tensor parallel size 3, .*the original with 64 .* 8 KV heads, /m/hy3\."),
        ({}, True, "", r"padded already and has .*num_key_value_heads 9.* use the original\."),
        (RECORD, False, "", "64 attention heads and 8 KV heads"),
    ],
)
def test_padded_for_another_size(ranks: int, record: dict[str, int], zero_tail: bool, origin: str, said: str) -> None:
    with pytest.raises(Hy3Error, match=said):  # B72: 9 KV heads
        check_original(record, plan(ranks, shape=PADDED), zero_tail=zero_tail, origin=origin)


def test_what_fits_or_is_no_padded_one_passes() -> None:
    check_original(RECORD, plan(3, shape=PADDED), zero_tail=True, origin="")
    check_original({}, plan(3), zero_tail=False, origin="")


@pytest.mark.parametrize("ranks", [0, -3])
def test_no_number_of_ranks(ranks: int) -> None:
    with pytest.raises(Hy3Error, match=f"tensor_parallel_size is {ranks}"):
        plan(ranks)


def test_heads_without_a_whole_ratio() -> None:
    with pytest.raises(Hy3Error, match="66 attention heads, which 9 KV heads do not divide"):
        pad_heads(66, 9, head_dim=128, tensor_parallel=3)
