# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which tensors of a checkpoint are quantized, and how: what its small files say, and what its shards hold."""

from __future__ import annotations

import re
import typing as t
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache

from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import tensor_bytes
from ansible_collections.sparks.hy3.plugins.module_utils._tensor_names import place

IGNORE_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
# A quantized weight has one of these beside it: ModelOpt and compressed-tensors.
SCALES = (".weight_scale", ".weight_packed", ".weight_scale_inv")

Json = t.Mapping[str, t.Any]
# Dtype and shape by the last part of a tensor's name.
Leaves = t.Mapping[str, tuple[str, tuple[int, ...]]]


class Stored(t.NamedTuple):
    """What is stored alike: a part of the model (``_tensor_names.PARTS``), of the drafter or not, and its format.

    ``modules`` are counted, ``size`` is bytes, scales included.
    """

    part: str
    drafter: bool
    format: str
    modules: int
    size: int


def sections(config: Json, legacy_file: Json) -> tuple[dict[str, t.Any], dict[str, t.Any]]:
    """quantization_config of config.json, and quantization of hf_quant_config.json; empty where there is none."""
    found = (config.get("quantization_config"), legacy_file.get("quantization"))
    quant, legacy = (section if isinstance(section, dict) else {} for section in found)
    return quant, legacy


def ignore_patterns(section: Json) -> list[str]:
    """The patterns of what is not quantized, from all the lists that a section has."""
    lists = [section[key] for key in IGNORE_LISTS if isinstance(section.get(key), list)]
    return [str(pattern) for patterns in lists for pattern in patterns]


def matches(pattern: str, name: str) -> bool:
    """Whether an entry of an ignore list matches a layer: exactly, by a wildcard, or as ``re:`` expression."""
    if not pattern.startswith("re:"):
        return fnmatchcase(name, pattern)
    try:
        return re.match(pattern[3:], name) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def dicts(value: object) -> list[dict[str, t.Any]]:
    """Those values of an object that are objects; none if it is no object."""
    values = value.values() if isinstance(value, dict) else []
    return [one for one in values if isinstance(one, dict)]


def _group_scheme(group: Json) -> str:
    """The scheme of one group of compressed-tensors."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not weights.get("num_bits"):
        return "unknown"
    if weights["num_bits"] == 4:
        if weights.get("type") != "float":
            return "int4"
        if not isinstance(inputs, dict):
            return "w4a16"
        return "nvfp4" if inputs.get("num_bits") == 4 else "unknown"
    return "fp8" if weights.get("type") == "float" else "int8"


def scheme_of(quant: Json, legacy: Json) -> str:
    """What the routed experts are stored in: none, nvfp4, w4a16, fp8, int4, int8 or unknown.

    ``quant`` is quantization_config of config.json, ``legacy`` quantization of hf_quant_config.json. Where a checkpoint
    mixes formats the experts have the one with the fewest bits.
    """
    if not quant and not legacy:
        return "none"
    found: set[str] = {_group_scheme(group) for group in dicts(quant.get("config_groups"))}
    layers = [*dicts(quant.get("quantized_layers")), *dicts(legacy.get("quantized_layers"))]
    algorithms = [quant.get("quant_algo"), legacy.get("quant_algo"), *(layer.get("quant_algo") for layer in layers)]
    for algorithm in algorithms:
        name = str(algorithm).upper()
        if name != "MIXED_PRECISION" and algorithm:
            found.add(
                "w4a16" if "W4A16" in name else "nvfp4" if "NVFP4" in name else "fp8" if "FP8" in name else "unknown"
            )
    if quant.get("quant_method") == "fp8":
        found.add("fp8")
    return next((name for name in ("nvfp4", "w4a16", "int4", "fp8", "int8") if name in found), "unknown")


def format_of(leaves: Leaves) -> str:
    """How one module is stored: its dtype in small letters, or the format of a quantized one.

    ``nvfp4`` (scales for the inputs too), ``w4a16`` (weights alone), ``mxfp4``, ``fp8_tensor``, ``fp8_channel``,
    ``fp8_block`` by what one scale is for, ``int8``, and ``int_packed`` for integers of less than a byte.
    """
    weight = next((leaves[name] for name in ("weight_packed", "qweight", "weight") if name in leaves), None)
    scale = next((leaves[name] for name in ("weight_scale", "weight_scale_inv", "scales") if name in leaves), None)
    dtype = weight[0] if weight else min(dtype for dtype, _shape in leaves.values())
    if weight is None or scale is None:
        return dtype.lower()
    if dtype in ("U8", "F4"):
        if scale[0] != "F8_E4M3":
            return "mxfp4"
        return "nvfp4" if "input_scale" in leaves or "input_global_scale" in leaves else "w4a16"
    if dtype.startswith("F8"):
        shape = [size for size in scale[1] if size != 1]
        return ("fp8_tensor", "fp8_channel")[len(shape)] if len(shape) < 2 else "fp8_block"
    return {"I8": "int8", "I32": "int_packed"}.get(dtype, dtype.lower())


def describe_storage(tensors: Leaves, layers: int | None) -> list[Stored]:
    """How all the tensors (name to dtype and shape) are stored, the largest first.

    Layers from number ``layers`` on are the drafter's; None: there is none.
    """
    modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _dot, leaf = name.rpartition(".")
        # A bias of the router hangs on the layer itself, and fused experts have no leaf: each is its own module.
        own = leaf.startswith(("weight", "input", "q", "scales", "g_idx")) and module
        modules[module if own else name][leaf] = tensor
    counts: dict[tuple[str, bool, str], list[int]] = defaultdict(lambda: [0, 0])
    for module, leaves in modules.items():
        layer, part, _split = place(f"{module}.{next(iter(leaves))}" if module not in tensors else module)
        drafter = layers is not None and layer is not None and layer >= layers
        counted = counts[part, drafter, format_of(leaves)]
        counted[0] += 1
        counted[1] += sum(_bytes(dtype, shape) for dtype, shape in leaves.values())
    found = [Stored(*key, modules=number, size=size) for key, (number, size) in counts.items()]
    return sorted(found, key=lambda one: (-one.size, one))


# Asked for each of the 185,000 tensors of a real checkpoint, which have few shapes.
_bytes = cache(tensor_bytes)


def storage_warnings(quantized: bool, stored: t.Iterable[Stored]) -> list[str]:
    """Where what the configuration says of quantization and what the shards hold cannot both be right."""
    formats = {one.format for one in stored}
    scaled = formats & {"nvfp4", "w4a16", "mxfp4", "fp8_tensor", "fp8_channel", "fp8_block", "int8", "int_packed"}
    if scaled and not quantized:
        return [
            f"Tensors are stored as {', '.join(sorted(scaled))} and config.json has no quantization_config, so engines "
            "load them as plain numbers; fetch config.json of the same revision."
        ]
    if quantized and formats and not scaled and formats <= {"bf16", "f16", "f32"}:
        return [
            "config.json has a quantization and no tensor has a scale, so engines look for scales in vain; fetch "
            "config.json of the same revision."
        ]
    return []
