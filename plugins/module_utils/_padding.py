# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which sizes of a Hy3 to pad with zeros so that tensor parallelism divides them, and how each tensor changes.

Query head i reads KV head i // (heads / KV heads), on every rank by that rank's counts. So whole groups are appended: a
zero KV head with its zero query heads, at the end. The ratio stays, hence each old head keeps its partner and each rank
gets whole groups. A zero value head gives a zero output, which besides meets zero columns of o_proj; a zero neuron of a
gated MLP gives silu(0) x 0. Nothing here reads a file.
"""

from __future__ import annotations

import math
import re
import typing as t
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import CONFIG
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._tensor_names import LAYER, inside
from ansible_collections.sparks.hy3.plugins.module_utils._weights import Sizes

# Beside each rewritten size in config.json stands the original, under its name with this suffix.
ORIGINAL = "_ckpt"
PADDED_FOR = "padded_for_tensor_parallel_size"
HEADS, KV_HEADS, DENSE = "num_attention_heads", "num_key_value_heads", "intermediate_size"
# vLLM reads the first, SGLang the second.
EXPERTS = ("expert_hidden_dim", "moe_intermediate_size")
# What grows, grows until a rank's neurons are a multiple of this, whatever the scales: FP8 and FP4 products (torch's
# _scaled_mm) take no other sizes, and SGLang's and FlashInfer's activations want rows of whole 16 bytes.
MULTIPLE = 16
WEIGHTS = ("weight", "weight_packed")
GROUP_SCALES = ("weight_scale", "weight_scale_inv")
# Zero bytes are zeros in all of these. U8 is two FP4 numbers: whole numbers come with a zero point, which is refused.
ZEROS = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F4", "U8", "I8")
# The scale of zeros is one: finite, and not zero, by which a kernel may divide. Little-endian; U8 is MXFP4's exponent.
ONE = {
    "F8_E4M3": b"\x38",
    "F8_E5M2": b"\x3c",
    "F8_E8M0": b"\x7f",
    "U8": b"\x7f",
    "BF16": b"\x80\x3f",
    "F16": b"\x00\x3c",
    "F32": b"\x00\x00\x80\x3f",
}
_PARTS = {"attention": "attention", "dense": "dense", "experts": "experts", "shared": "experts"}
_INDIFFERENT = re.compile(r"(?!self_attn\.|mlp\.)|self_attn\.rotary_emb\.")
_NOUNS = {HEADS: "attention heads", KV_HEADS: "KV heads", DENSE: "dense neurons", EXPERTS[0]: "neurons an expert"}

Blocks = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """What tensor parallelism divides: counts of heads and neurons (``experts``: of one routed expert, 0 if none).

    ``head_dim`` is elements a head, ``shared`` the number of shared experts, which lie in one MLP.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dense: int
    experts: int = 0
    shared: int = 1

    def length(self, part: str, split: str) -> int:
        """Elements along the split axis of a tensor of this part."""
        if part == "attention":
            return (self.kv_heads if split == "kv" else self.heads) * self.head_dim
        return self.dense if part == "dense" else self.experts * (self.shared if part == "shared" else 1)


@dataclass(frozen=True)
class Plan:
    """The sizes before and after, and the blocks (rows, columns) that the checkpoint says share a scale."""

    tensor_parallel: int
    before: Shape
    after: Shape
    blocks: Blocks = ()

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The sizes in config.json that change: name to number before and after."""
        old, new = self.before, self.after
        pairs = {
            HEADS: (old.heads, new.heads),
            KV_HEADS: (old.kv_heads, new.kv_heads),
            DENSE: (old.dense, new.dense),
            **dict.fromkeys(EXPERTS, (old.experts, new.experts)),
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


class Padding(t.NamedTuple):
    """How one tensor changes: the axis that grows, the new shape, and the bytes that the new part repeats."""

    axis: int
    shape: tuple[int, ...]
    fill: bytes


def shape_of(sizes: Sizes, config: Mapping[str, t.Any]) -> Shape:
    """The sizes that may be padded, of all that were read."""
    shared = config.get("num_shared_experts")
    return Shape(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        dense=sizes.divided[DENSE],
        experts=next((size for name, size in sizes.divided.items() if name in EXPERTS), 0),
        shared=shared if isinstance(shared, int) and shared > 1 else 1,
    )


def pad_heads(heads: int, kv_heads: int, *, head_dim: int, tensor_parallel: int, group: int = 1) -> tuple[int, int]:
    """Query and KV heads that the ranks split evenly: the fewest with the same ratio.

    ``group`` is the number of rows that share a scale. Raises Hy3Error when the ratio is no whole number.
    """
    if heads % kv_heads:
        raise Hy3Error(
            f"{CONFIG} has {heads} attention heads, which {kv_heads} KV heads do not divide; fetch it again."
        )
    unit = tensor_parallel * (group // math.gcd(group, head_dim))
    # Fewer KV heads than ranks are copied by both engines, if evenly.
    copied = kv_heads < tensor_parallel and tensor_parallel % kv_heads == 0 and heads % tensor_parallel == 0
    if tensor_parallel == 1 or (copied and head_dim % group == 0):
        return heads, kv_heads
    padded = _round_up(kv_heads, unit)
    return heads // kv_heads * padded, padded


def pad_length(length: int, *, tensor_parallel: int, group: int = 1) -> int:
    """``length`` if a rank's part of it is a multiple of ``group``, else the next that is one of 16 as well."""
    if tensor_parallel == 1 or length % (tensor_parallel * group) == 0:
        return length
    return _round_up(length, tensor_parallel * math.lcm(group, MULTIPLE))


def block_sizes(quant: t.Any) -> Blocks:
    """Rows and columns of the weight blocks that a ``quantization_config`` declares; whatever is none is left out."""
    if not isinstance(quant, Mapping):
        return ()
    said = [quant.get("weight_block_size")]
    groups = quant.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        said.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    return tuple(
        (block[0], block[1])
        for block in said
        if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    )


def groups_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]], shape: Shape, blocks: Blocks) -> dict[str, int]:
    """How many neighbours along the split axis must stay on one rank: of attention, dense and experts.

    ``tensors`` are names, dtypes and shapes.
    """
    found = dict.fromkeys(_PARTS.values(), 1)
    for name, _dtype, dimensions in tensors:
        part, split, kind = _place(name)
        axis = _axis(split, dimensions)
        if part in _PARTS and kind in GROUP_SCALES and axis is not None:
            group = _group(shape.length(part, split), dimensions[axis], axis=axis, blocks=blocks)
            found[_PARTS[part]] = math.lcm(found[_PARTS[part]], group or 1)
    return found


def make_plan(shape: Shape, groups: Mapping[str, int], *, tensor_parallel: int, blocks: Blocks = ()) -> Plan:
    """The sizes that a checkpoint must have for this many ranks. Raises Hy3Error for a number that is none."""
    if tensor_parallel < 1:
        raise Hy3Error(f"tensor_parallel_size is {tensor_parallel}, a number of ranks: choose 1 or more.")
    heads, kv_heads = pad_heads(
        shape.heads,
        shape.kv_heads,
        head_dim=shape.head_dim,
        tensor_parallel=tensor_parallel,
        group=groups["attention"],
    )
    after = replace(
        shape,
        heads=heads,
        kv_heads=kv_heads,
        dense=pad_length(shape.dense, tensor_parallel=tensor_parallel, group=groups["dense"]),
        experts=pad_length(shape.experts, tensor_parallel=tensor_parallel, group=groups["experts"]),
    )
    return Plan(tensor_parallel, shape, after, blocks)


def pad_tensor(name: str, dtype: str, shape: tuple[int, ...], plan: Plan) -> Padding | None:
    """How a tensor changes, or None if it stays as it is, byte for byte.

    Raises Hy3Error for a tensor that would have to grow and whose layout is not known here.
    """
    part, split, kind = _place(name)
    # A single number holds for the whole tensor.
    if not plan.sizes or math.prod(shape) <= 1:
        return None
    _refuse_unknown(name, part, shape, plan)
    if part not in _PARTS or plan.before.length(part, split) == plan.after.length(part, split):
        return None
    axis = _axis(split, shape)
    if axis is None and kind in ("bias", *GROUP_SCALES):
        return None
    if axis is not None and kind in GROUP_SCALES:
        return _pad_scale(name, dtype, shape, axis=axis, lengths=_lengths(part, split, plan), plan=plan)
    if axis is None or kind not in ("bias", *WEIGHTS):
        raise Hy3Error(
            f"Tensor {name} of {dtype} {list(shape)} is of a layout that is not padded here; use a conversion with "
            "separate projections in BF16, FP8 or NVFP4."
        )
    packed = 2 if dtype == "U8" and axis == 1 else 1
    before, after = _lengths(part, split, plan)
    if shape[axis] * packed != before or dtype not in ZEROS or after % packed:
        raise Hy3Error(
            f"Tensor {name} of {dtype} {list(shape)} does not have the {before} elements that {CONFIG} gives it, in "
            f"one of {', '.join(ZEROS)}; fetch the checkpoint again, or use a conversion to BF16, FP8 or NVFP4."
        )
    return Padding(axis, _replaced(shape, axis, after // packed), b"\0")


def padded_config(config: Mapping[str, t.Any], plan: Plan) -> dict[str, t.Any]:
    """config.json for the padded tensors: the new sizes, and the originals under the same names with ``_ckpt``.

    It says head_dim aloud: where it is left out, engines divide hidden_size by the heads, now another number.
    """
    changed = dict(config)
    for name, (before, after) in plan.sizes.items():
        if name in config or name == KV_HEADS:
            changed |= {name: after, name + ORIGINAL: before}
    return {**changed, "head_dim": plan.before.head_dim, PADDED_FOR: plan.tensor_parallel}


def check_original(config: Mapping[str, t.Any], plan: Plan, *, zero_tail: bool, origin: str) -> None:
    """Raise Hy3Error for a checkpoint that was padded before and does not fit: padding it again would only grow it.

    ``zero_tail`` says that its last KV head is all zeros, as where a tool recorded nothing. ``origin`` is where its
    original lay, empty if not known.
    """
    recorded = {noun: config[name + ORIGINAL] for name, noun in _NOUNS.items() if name + ORIGINAL in config}
    if not plan.sizes or not (zero_tail or recorded or PADDED_FOR in config):
        return
    padded_for = config.get(PADDED_FOR)
    raise Hy3Error(
        f"The checkpoint is padded already{f', for tensor parallel size {padded_for},' if padded_for else ''} and has "
        f"{', '.join(f'{name} {before}' for name, (before, _after) in plan.sizes.items())}, which "
        f"{plan.tensor_parallel} ranks cannot split evenly; use the original"
        f"{' with ' + ' and '.join(f'{size} {noun}' for noun, size in recorded.items()) if recorded else ''}"
        f"{f', {origin}' if origin else ''}."
    )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _replaced(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _lengths(part: str, split: str, plan: Plan) -> tuple[int, int]:
    return plan.before.length(part, split), plan.after.length(part, split)


def _place(name: str) -> tuple[str, str, str]:
    """Part, split and kind of a tensor. The kind is what follows the projection's name, empty for fused ones."""
    layer = LAYER.fullmatch(name)
    if layer is None:
        return "outside", "whole", ""
    part, split = inside(layer[2])
    if part == "other" and _INDIFFERENT.match(layer[2]):
        part = "outside"
    return part, split, layer[2].partition("_proj.")[2]


def _refuse_unknown(name: str, part: str, shape: tuple[int, ...], plan: Plan) -> None:
    """A norm over all heads would count the zero ones, and an unknown tensor may be one that must grow."""
    whole_norm = part == "norms" and ".self_attn." in name and shape != (plan.before.head_dim,)
    if whole_norm or part == "other":
        raise Hy3Error(
            f"Tensor {name} of shape {list(shape)} is not one of a Hy3 with separate projections and norms per head, "
            "and only that is padded here; use another conversion."
        )


def _axis(split: str, shape: tuple[int, ...]) -> int | None:
    """The axis that is split; None if there is none, as in a vector along the other axis."""
    if len(shape) not in (1, 2):
        return None
    if split == "row":
        return 1 if len(shape) == 2 else None
    return 0


# Asked for each of the 185,000 tensors of a real checkpoint, which are few kinds.
@cache
def _group(length: int, scales: int, *, axis: int, blocks: Blocks) -> int | None:
    """How many of ``length`` elements share each of ``scales``; None where one holds for all or nothing fits.

    The last group may be a part of one. What the checkpoint declares comes first, then the usual powers of two.
    """
    if scales == length:
        return 1
    usual = [2**power for power in range(1, 12)] if scales > 1 else []
    candidates = [block[axis] for block in blocks] + usual
    return next((group for group in candidates if -(-length // group) == scales), None)


def _pad_scale(
    name: str, dtype: str, shape: tuple[int, ...], *, axis: int, lengths: tuple[int, int], plan: Plan
) -> Padding | None:
    before, after = lengths
    group = _group(before, shape[axis], axis=axis, blocks=plan.blocks)
    if group is None and shape[axis] == 1:
        return None
    if group is None or dtype not in ONE:
        raise Hy3Error(
            f"Tensor {name} of {dtype} {list(shape)} has {shape[axis]} scales for {before} elements, which is no "
            "grouping known here; use a conversion to BF16, FP8 or NVFP4."
        )
    scales = -(-after // group)
    return None if scales == shape[axis] else Padding(axis, _replaced(shape, axis, scales), ONE[dtype])
