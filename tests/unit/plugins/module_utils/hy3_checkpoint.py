# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names, dtypes and shapes of all tensors of the real Hy3, from the sizes that tencent/Hy3 publishes."""

from __future__ import annotations

import typing as t
from functools import cache

CONFIG: dict[str, t.Any] = {
    "model_type": "hy_v3",
    "dtype": "bfloat16",
    "expert_hidden_dim": 1536,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "max_position_embeddings": 262144,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "vocab_size": 120832,
}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def bf16(name: str, *shape: int) -> Tensors:
    return {f"{name}.weight": ("BF16", shape)}


def nvfp4(name: str, rows: int, columns: int) -> Tensors:
    """Two numbers to a byte, a scale of 8 bits for each 16."""
    return {
        f"{name}.weight": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
    }


def fp8_block(name: str, rows: int, columns: int) -> Tensors:
    """A BF16 scale for each 128 by 128."""
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale": ("BF16", (-(-rows // 128), -(-columns // 128))),
    }


Make = t.Callable[..., Tensors]


def feed_forward(prefix: str, size: int, make: Make, hidden: int) -> Tensors:
    return {
        **make(f"{prefix}.gate_proj", size, hidden),
        **make(f"{prefix}.up_proj", size, hidden),
        **make(f"{prefix}.down_proj", hidden, size),
    }


@cache
def hy3_tensors(
    *,
    experts: Make = nvfp4,
    mtp_experts: Make = nvfp4,
    rest: Make = bf16,
    attention: Make | None = None,
    mtp: Make | None = None,
    heads: tuple[int, int] = (64, 8),
    dense: int = 13312,
) -> Tensors:
    """All tensors; ``experts`` are the routed ones, ``rest`` shared experts and the dense layer, and the attention.

    ``mtp`` makes the drafter's own attention and shared expert, as the other layers' unless given.
    """
    hidden, query, kv = 4096, heads[0] * 128, heads[1] * 128
    tensors = {**bf16("model.embed_tokens", 120832, hidden), **bf16("lm_head", 120832, hidden)}
    tensors |= bf16("model.norm", hidden)
    for number in range(81):
        layer = f"model.layers.{number}"
        tensors |= bf16(f"{layer}.input_layernorm", hidden) | bf16(f"{layer}.post_attention_layernorm", hidden)
        tensors |= bf16(f"{layer}.self_attn.q_norm", 128) | bf16(f"{layer}.self_attn.k_norm", 128)
        own = mtp if number == 80 else None
        make = own or attention or rest
        tensors |= make(f"{layer}.self_attn.q_proj", query, hidden) | make(f"{layer}.self_attn.k_proj", kv, hidden)
        tensors |= make(f"{layer}.self_attn.v_proj", kv, hidden) | make(f"{layer}.self_attn.o_proj", hidden, query)
        if number == 0:
            tensors |= feed_forward(f"{layer}.mlp", dense, rest, hidden)
            continue
        tensors[f"{layer}.mlp.router.gate.weight"] = ("F32", (192, hidden))
        tensors[f"{layer}.mlp.expert_bias"] = ("F32", (192,))
        tensors |= feed_forward(f"{layer}.mlp.shared_mlp", 1536, own or rest, hidden)
        for expert in range(192):
            make = mtp_experts if number == 80 else experts
            tensors.update(feed_forward(f"{layer}.mlp.experts.{expert}", 1536, make, hidden))
    drafter = "model.layers.80"
    tensors |= bf16(f"{drafter}.enorm", hidden) | bf16(f"{drafter}.hnorm", hidden)
    return {**tensors, **bf16(f"{drafter}.eh_proj", hidden, 2 * hidden), **bf16(f"{drafter}.final_layernorm", hidden)}
