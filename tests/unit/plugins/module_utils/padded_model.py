# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A Hy3 with the real head counts and neurons and a narrow hidden state, in the formats that are published.

All weights and scales are small dyadic numbers, so that every sum is exact in 64 bits.
"""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import numpy as np
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header, tensor_bytes
from safetensors import deserialize

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, DENSE, EXPERT, EXPERTS, LAYERS = 64, 8, 128, 128, 13312, 1536, 2, 2
Array = np.ndarray[t.Any, t.Any]
Stored = tuple[str, tuple[int, ...], bytes]

CONFIG = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "hidden_size": HIDDEN,
    "head_dim": HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": DENSE,
    "expert_hidden_dim": EXPERT,
    "moe_intermediate_size": EXPERT,
    "num_experts": EXPERTS,
    "num_shared_experts": 1,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1024,
    "vocab_size": 64,
    "dtype": "bfloat16",
}
QUANT: dict[str, dict[str, t.Any] | None] = {
    "bf16": None,
    "fp8_block": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [128, 128]}}},
    },
    "fp8_block_inv": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8_channel": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
    "fp8_tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "nvfp4_modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "nvfp4_packed": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}

# Values of the two small formats; entries for infinities and NaN are not used.
E2M1 = np.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
_EXPONENT, _FRACTION = np.arange(128) >> 3, (np.arange(128) & 7) / 8
_E4M3 = np.where(_EXPONENT > 0, 2.0 ** (_EXPONENT - 7) * (1 + _FRACTION), _FRACTION * 2.0**-6)
E4M3 = np.concatenate([_E4M3, -_E4M3])
SMALL = np.array([0x00, 0x38, 0x40, 0xB8, 0xC0], np.uint8)  # 0, 1, 2, -1, -2
SCALES = np.array([0x30, 0x38, 0x40], np.uint8)  # 1/2, 1, 2


def bf16(values: Array) -> bytes:
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def projection(kind: str, rows: int, columns: int, random: np.random.Generator) -> dict[str, Stored]:
    """The tensors of one projection: suffix to dtype, shape and bytes."""
    if kind == "bf16":
        return {"weight": ("BF16", (rows, columns), bf16(random.integers(-3, 4, (rows, columns))))}
    return (_fp8 if kind.startswith("fp8") else _nvfp4)(kind, rows, columns, random)


def _fp8(kind: str, rows: int, columns: int, random: np.random.Generator) -> dict[str, Stored]:
    weight: Stored = ("F8_E4M3", (rows, columns), random.choice(SMALL, (rows, columns)).tobytes())
    one = {"weight_scale": ("F32", (), np.float32(0.5).tobytes()), "input_scale": ("F32", (), bytes(4))}
    if kind == "fp8_tensor":
        return {"weight": weight, **one}
    if kind == "fp8_channel":
        scales = random.choice([0.5, 1, 2], (rows, 1))
        return {"weight": weight, "weight_scale": ("F32", (rows, 1), scales.astype("<f4").tobytes())}
    shape = (-(-rows // 128), -(-columns // 128))
    scales = random.choice([0.5, 1, 2], shape)
    if kind == "fp8_block":
        return {"weight": weight, "weight_scale": ("BF16", shape, bf16(scales))}
    return {"weight": weight, "weight_scale_inv": ("F32", shape, scales.astype("<f4").tobytes())}


def _nvfp4(kind: str, rows: int, columns: int, random: np.random.Generator) -> dict[str, Stored]:
    packed: Stored = ("U8", (rows, columns // 2), random.bytes(rows * columns // 2))
    groups: Stored = ("F8_E4M3", (rows, columns // 16), random.choice(SCALES, (rows, columns // 16)).tobytes())
    number = np.float32(2).tobytes()
    if kind == "nvfp4_modelopt":
        second: Stored = ("F32", (), number)
        return {"weight": packed, "weight_scale": groups, "weight_scale_2": second, "input_scale": second}
    globals_: Stored = ("F32", (1,), number)
    return {
        "weight_packed": packed,
        "weight_scale": groups,
        "weight_global_scale": globals_,
        "input_global_scale": globals_,
    }


def model(attention: str, mlp: str, *, experts: str) -> dict[str, Stored]:
    """All tensors, the formats of attention, the dense MLP and the experts given. Layer 0 is dense, 2 the drafter."""
    random = np.random.default_rng(0)
    tensors: dict[str, Stored] = {}

    def put(prefix: str, kind: str, rows: int, columns: int) -> None:
        for suffix, stored in projection(kind, rows, columns, random).items():
            tensors[f"{prefix}.{suffix}"] = stored

    def neurons(prefix: str, kind: str, size: int) -> None:
        for name in ("gate_proj", "up_proj"):
            put(f"{prefix}.{name}", kind, size, HIDDEN)
        put(f"{prefix}.down_proj", kind, HIDDEN, size)

    tensors["model.embed_tokens.weight"] = ("BF16", (64, HIDDEN), bf16(random.integers(-3, 4, (64, HIDDEN))))
    for layer in range(LAYERS + 1):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            put(f"{prefix}.self_attn.{name}", attention, heads * HEAD_DIM, HIDDEN)
        put(f"{prefix}.self_attn.o_proj", attention, HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}.self_attn.q_norm.weight"] = ("BF16", (HEAD_DIM,), bf16(np.ones(HEAD_DIM)))
        tensors[f"{prefix}.input_layernorm.weight"] = ("BF16", (HIDDEN,), bf16(np.ones(HIDDEN)))
        if layer == 0:
            neurons(f"{prefix}.mlp", mlp, DENSE)
            continue
        tensors[f"{prefix}.mlp.router.gate.weight"] = ("F32", (EXPERTS, HIDDEN), bytes(EXPERTS * HIDDEN * 4))
        for expert in range(EXPERTS):
            neurons(f"{prefix}.mlp.experts.{expert}", experts, EXPERT)
        neurons(f"{prefix}.mlp.shared_mlp", experts, EXPERT)
    tensors[f"model.layers.{LAYERS}.eh_proj.weight"] = ("BF16", (HIDDEN, 2 * HIDDEN), bytes(HIDDEN * HIDDEN * 4))
    return tensors


def write_model(
    directory: Path, tensors: dict[str, Stored], *, shards: int = 3, quant: t.Any = None, config: t.Any = None
) -> None:
    """A checkpoint of these tensors; one shard has no index."""
    directory.mkdir()
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = {key: tensors[key] for key in names[number::shards]}
        content = render_header({key: stored[:2] for key, stored in part.items()}, {"format": "pt"})
        (directory / name).write_bytes(content + b"".join(stored[2] for stored in part.values()))
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        size = sum(tensor_bytes(dtype, shape) for dtype, shape, _data in tensors.values())
        index = {"metadata": {"total_size": size, "made": "here"}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    said = {**CONFIG, **({"quantization_config": quant} if quant else {}), **(config or {})}
    (directory / "config.json").write_text(json.dumps(said))
    for name in ("LICENSE", "tokenizer.json", "chat template.jinja"):
        (directory / name).write_text(f'"{name}"')


def read_model(directory: Path) -> dict[str, Stored]:
    """All tensors, as the safetensors library reads them."""
    found: dict[str, Stored] = {}
    for path in directory.glob("*.safetensors"):
        for name, view in deserialize(path.read_bytes()):
            found[name] = (view["dtype"], tuple(view["shape"]), bytes(view["data"]))
    return found


def numbers(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """A tensor's stored numbers, FP4 pairs as bytes."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(float).reshape(shape)
    if dtype == "F32":
        return np.frombuffer(data, "<f4").astype(float).reshape(shape)
    raw = np.frombuffer(data, np.uint8).reshape(shape)
    return E4M3[raw] if dtype.startswith("F8_E4M3") else raw


def weights(tensors: dict[str, Stored], prefix: str) -> Array:
    """The weights of a projection as an engine means them. NVFP4: low nibble first."""
    own = {
        name[len(prefix) + 1 :]: numbers(*stored) for name, stored in tensors.items() if name.startswith(prefix + ".")
    }
    stored = own.get("weight", own.get("weight_packed"))
    assert stored is not None
    scale = own.get("weight_scale", own.get("weight_scale_inv"))
    if scale is None:
        return stored
    if stored.dtype == np.uint8:
        pairs = np.stack([E2M1[stored & 15], E2M1[stored >> 4]], axis=-1).reshape(len(stored), -1)
        return pairs * np.repeat(scale, 16, axis=1) * own.get("weight_scale_2", 1 / own.get("weight_global_scale", 1.0))
    if scale.size > 1 and scale.shape != (len(stored), 1):
        scale = np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)[: stored.shape[0], : stored.shape[1]]
    return stored * scale
