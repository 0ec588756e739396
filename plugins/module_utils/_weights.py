# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What one rank of a tensor-parallel Hy3 holds: weights by part, and KV bytes per token. No tensor data is read."""

from __future__ import annotations

import math
import re
import typing as t
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import (
    CONFIG,
    INDEX,
    LEGACY_QUANT_CONFIG,
    SINGLE_SHARD,
    parse_index,
    parse_object,
    read_object,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import read_header, tensor_bytes
from ansible_collections.sparks.hy3.plugins.module_utils._tensor_names import PARTS, place

# Name of a tensor: safetensors dtype and shape.
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

# Both engines round the vocabulary up to 64 rows; patch P3 to the least common multiple with the ranks.
VOCAB_ROWS = 64
FLOAT32_BYTES = 4
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# What engines call the dtype of the KV pool, in bits an element; NVFP4 has a scale of 8 bits for each 16 elements.
KV_DTYPE_BITS = {
    "nvfp4": 4.5,
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), 8),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "half"), 16),
    "float32": 32,
}

# The drafter takes both from the target and never reads its own.
_DRAFTER_SKIPS = re.compile(r"model\.layers\.[0-9]+\.(embed_tokens|shared_head)\.")


class Sizes(t.NamedTuple):
    """The sizes of a Hy3 that decide what a rank holds: counts, but ``head_dim`` in elements.

    ``dtype_bytes`` is the model's own dtype, ``kv_dtype`` what the checkpoint says about the KV pool (empty: nothing).
    """

    layers: int
    drafter_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    dtype_bytes: int
    kv_dtype: str
    divided: Mapping[str, int]


def read_sizes(config: Mapping[str, t.Any], legacy_quant: Mapping[str, t.Any]) -> Sizes:
    """The sizes from config.json and ModelOpt's hf_quant_config.json, which may be empty.

    Raises Hy3Error for another model and for a size that is none.
    """
    if config.get("model_type") != "hy_v3":
        raise Hy3Error(
            f"{CONFIG} has model_type {config.get('model_type')!r}, and only hy_v3 is counted here; "
            "add up its weights by hand."
        )
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    expert = "expert_hidden_dim" if config.get("expert_hidden_dim") is not None else "moe_intermediate_size"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise Hy3Error(f"{CONFIG} has dtype {dtype!r}, which is none of {', '.join(DTYPE_BYTES)}; correct it.")
    return Sizes(
        layers=_size(config, "num_hidden_layers"),
        drafter_layers=_size(config, "num_nextn_predict_layers") if config.get("num_nextn_predict_layers") else 0,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads") if "num_key_value_heads" in config else heads,
        head_dim=_size(config, "head_dim") if config.get("head_dim") is not None else hidden // heads,
        max_positions=_size(config, "max_position_embeddings"),
        dtype_bytes=DTYPE_BYTES[dtype],
        kv_dtype=_kv_dtype(config.get("quantization_config"), legacy_quant.get("quantization")),
        divided={name: _size(config, name) for name in ("intermediate_size", expert)},
    )


def weights_per_rank(tensors: Tensors, sizes: Sizes, *, tensor_parallel: int, speculative: bool) -> dict[str, int]:
    """Bytes that one rank holds once loaded, by part; all of :data:`PARTS` are there. The largest rank counts.

    With ``speculative`` the MTP layer is among them, as part ``mtp`` whole; without, the engine skips it.

    Raises Hy3Error for a size that ``tensor_parallel`` does not divide.
    """
    check_partition(sizes, tensor_parallel=tensor_parallel)
    parts = dict.fromkeys(PARTS, 0)
    for name, (dtype, shape) in tensors.items():
        layer, part, split = place(name)
        if layer is not None and layer >= sizes.layers:
            if not speculative or _DRAFTER_SKIPS.match(name):
                continue
            part = "mtp"
        ranks = min(tensor_parallel, sizes.kv_heads) if split == "kv" else tensor_parallel
        parts[part] += _rank_bytes(dtype, shape, split=split, ranks=ranks)
    # One table of sines and cosines, as long as the model allows, which all layers share.
    parts["rotary"] = sizes.max_positions * sizes.head_dim * sizes.dtype_bytes
    return parts


def kv_bytes_per_token(sizes: Sizes, *, tensor_parallel: int, cache_dtype: str, speculative: bool) -> int:
    """Bytes of KV that one rank keeps for one token: layers x 2 x KV heads x head_dim x dtype.

    The MTP layer keeps its own. ``cache_dtype`` is the engine's option; ``auto`` is the checkpoint's or the model's.

    Raises Hy3Error for a dtype whose size is not known here.
    """
    check_partition(sizes, tensor_parallel=tensor_parallel)
    dtype = (sizes.kv_dtype or "auto") if cache_dtype == "auto" else cache_dtype
    if dtype != "auto" and dtype not in KV_DTYPE_BITS:
        raise Hy3Error(
            f"The KV pool's dtype is {dtype!r}, which has no size known here ({', '.join(KV_DTYPE_BITS)}); "
            "set kv-cache-dtype to one of them, or read the pool from the engine's log."
        )
    bits = sizes.dtype_bytes * 8 if dtype == "auto" else KV_DTYPE_BITS[dtype]
    layers = sizes.layers + (sizes.drafter_layers if speculative else 0)
    return int(layers * 2 * max(1, sizes.kv_heads // tensor_parallel) * sizes.head_dim * bits / 8)


def count(directory: Path, *, tensor_parallel: int, speculative: bool, cache_dtype: str) -> dict[str, t.Any]:
    """What one rank of the checkpoint in ``directory`` holds: the return value ``rank`` of module memory_budget.

    Raises Hy3Error when it cannot be counted.
    """
    sizes, tensors = read_checkpoint(directory)
    parts = weights_per_rank(tensors, sizes, tensor_parallel=tensor_parallel, speculative=speculative)
    return {
        "weights": sum(parts.values()),
        "parts": parts,
        "kv_bytes_per_token": kv_bytes_per_token(
            sizes, tensor_parallel=tensor_parallel, cache_dtype=cache_dtype, speculative=speculative
        ),
        "max_positions": sizes.max_positions,
    }


def check_partition(sizes: Sizes, *, tensor_parallel: int) -> None:
    """Raise Hy3Error for a size that this many ranks cannot split evenly: the engine would not start."""
    if tensor_parallel < 1:
        raise Hy3Error(f"tensor_parallel_size is {tensor_parallel}, a number of ranks: choose 1 or more.")
    divided = {"num_attention_heads": sizes.heads, **sizes.divided}
    if sizes.kv_heads >= tensor_parallel:
        divided["num_key_value_heads"] = sizes.kv_heads
    for name, size in divided.items():
        if size % tensor_parallel:
            raise Hy3Error(
                f"The checkpoint has {name} {size}, which tensor parallel size {tensor_parallel} does not divide; "
                "choose another size, or a checkpoint that is padded for it."
            )


def read_checkpoint(directory: Path) -> tuple[Sizes, dict[str, tuple[str, tuple[int, ...]]]]:
    """Sizes and tensors of the checkpoint in ``directory``, from config.json and every shard's header.

    Raises Hy3Error when a file is missing or is not what its name says.
    """
    try:
        sizes = read_sizes(
            parse_object((directory / CONFIG).read_bytes(), CONFIG), read_object(directory / LEGACY_QUANT_CONFIG) or {}
        )
        if (directory / INDEX).exists():
            shards = sorted(set(parse_index(parse_object((directory / INDEX).read_bytes(), INDEX))[0].values()))
        else:
            shards = [SINGLE_SHARD]
        headers = [read_header(directory / name) for name in shards]
    except OSError as error:
        raise Hy3Error(
            f"{error.filename or directory} cannot be read ({error.strerror}), so the checkpoint is not counted."
        ) from error
    return sizes, {name: (tensor.dtype, tensor.shape) for header in headers for name, tensor in header.tensors.items()}


# Asked for each of the 185,000 tensors of a real checkpoint, which are few kinds.
@cache
def _rank_bytes(dtype: str, shape: tuple[int, ...], *, split: str, ranks: int) -> int:
    """Bytes of one tensor on the largest rank. Scales are split like the weight; a single number is on each rank."""
    if split == "float32":
        return math.prod(shape) * FLOAT32_BYTES
    if split == "whole" or not shape:
        return tensor_bytes(dtype, shape)
    # Fused experts have a dimension more in front.
    axis = len(shape) - 1 if split == "row" else max(0, len(shape) - 2)
    if split == "row" and len(shape) == 1:
        return tensor_bytes(dtype, shape)
    length = shape[axis]
    if split == "vocab" and length > 1:
        rows = math.lcm(VOCAB_ROWS, ranks)
        length = math.ceil(length / rows) * rows
    part = (*shape[:axis], math.ceil(length / ranks), *shape[axis + 1 :])
    # An odd share of packed nibbles still takes its last byte.
    return math.ceil(tensor_bytes(dtype, shape) * math.prod(part) / math.prod(shape)) if math.prod(shape) else 0


def _kv_dtype(quant: t.Any, legacy: t.Any) -> str:
    """What the checkpoint says about its KV pool, in the engines' words; empty where it is silent."""
    for source in (quant, legacy):
        if not isinstance(source, Mapping):
            continue
        said = source.get("kv_cache_scheme") or source.get("kv_cache_quant_algo")
        if isinstance(said, Mapping) and said.get("type") == "float":
            said = {8: "fp8", 4: "nvfp4"}.get(said.get("num_bits", 0), said)
        if said:
            return str(said).lower()
    return ""


def _size(config: Mapping[str, t.Any], key: str) -> int:
    size = config.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise Hy3Error(f"{CONFIG} has {key} {size!r}, which is no size; fetch it again.")
    return size
