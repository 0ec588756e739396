# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Whether the tensors of a Hy3 are those that its config.json describes: all layers and experts, each in its shape."""

from __future__ import annotations

import re
import typing as t
from collections import defaultdict
from functools import cache

Json = t.Mapping[str, t.Any]
Shape = tuple[int, ...]

_EXPERT = re.compile(r"model\.layers\.([0-9]{1,9})\.mlp\.experts\.([0-9]{1,9})\.")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
# What a layer holds, by the rest of the name: the sizes of rows and columns, by the names in ``sizes_of``.
_LINEARS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(rf"(?:model\.layers\.[0-9]+\.)?{pattern}"), sizes)
    for pattern, sizes in (
        (r"(?:model\.embed_tokens|lm_head)\.weight", ("vocabulary", "hidden")),
        (r"model\.norm\.weight", ("hidden",)),
        (r"(?:input|post_attention|final)_layernorm\.weight", ("hidden",)),
        (r"[eh]norm\.weight", ("hidden",)),
        (r"self_attn\.[qk]_norm\.weight", ("head",)),
        (r"self_attn\.q_proj\.weight(?:_packed)?", ("queries", "hidden")),
        (r"self_attn\.[kv]_proj\.weight(?:_packed)?", ("keys", "hidden")),
        (r"self_attn\.o_proj\.weight(?:_packed)?", ("hidden", "queries")),
        (r"mlp\.(?:gate|up)_proj\.weight(?:_packed)?", ("dense", "hidden")),
        (r"mlp\.down_proj\.weight(?:_packed)?", ("hidden", "dense")),
        (r"mlp\.experts\.[0-9]+\.(?:gate|up)_proj\.weight(?:_packed)?", ("expert", "hidden")),
        (r"mlp\.experts\.[0-9]+\.down_proj\.weight(?:_packed)?", ("hidden", "expert")),
        (r"mlp\.(?:router\.gate|gate)\.weight", ("experts", "hidden")),
    )
)
# Elements in one stored number: two halves of a byte in ModelOpt's U8; how many integers I32 packs is not told.
_PACKED = {"U8": (1, 2), "I32": (4, 8)}


def is_hy3(config: Json) -> bool:
    """Whether the names and shapes of this model are known here."""
    return config.get("model_type") == "hy_v3"


def sizes_of(config: Json, model: Json) -> dict[str, int | None]:
    """Elements by the names of ``_LINEARS``; ``model`` is what ``describe_model`` says. None where unknown."""

    def product(*numbers: int | None) -> int | None:
        result = 1
        for number in numbers:
            if number is None:
                return None
            result *= number
        return result

    def size(*names: str) -> int | None:
        found = (config[name] for name in names if config.get(name) is not None)
        number = next(found, None)
        return number if isinstance(number, int) and not isinstance(number, bool) else None

    return {
        "vocabulary": size("vocab_size"),
        "hidden": model["hidden_size"],
        "head": model["head_dim"],
        "queries": product(model["heads"], model["head_dim"]),
        "keys": product(model["kv_heads"], model["head_dim"]),
        "dense": size("intermediate_size"),
        "expert": size("expert_hidden_dim", "moe_intermediate_size"),
        "experts": model["experts"],
    }


def absent(names: t.Iterable[str], model: Json) -> list[str]:
    """Layers and experts that the configuration counts and no tensor is of, one sentence for each kind."""
    layers, experts = model["layers"], model["experts"]
    found: set[int] = set()
    by_layer: dict[int, set[int]] = defaultdict(set)
    for name in names:
        if expert := _EXPERT.match(name):
            by_layer[int(expert[1])].add(int(expert[2]))
        if layer := _LAYER.match(name):
            found.add(int(layer[1]))
    problems = []
    if layers and (lost := _lost(found, layers)):
        problems.append(
            f"config.json counts {layers} layers and no tensor is of {lost}; fetch config.json and index of one "
            "revision, or another conversion."
        )
    if experts:
        losses = {layer: lost for layer, here in by_layer.items() if (lost := _lost(here, experts))}
        if losses:
            first = min(losses)
            problems.append(
                f"config.json counts {experts} experts and {len(losses)} layers lack some, such as layer {first} "
                f"number {losses[first]}; fetch config.json and index of one revision, or another conversion."
            )
    return problems


def misshapen(tensors: t.Mapping[str, tuple[str, Shape]], sizes: t.Mapping[str, int | None]) -> list[str]:
    """Tensors of another shape than the configuration says, one sentence for each pair of sizes."""
    wrong: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, (dtype, shape) in tensors.items():
        wanted = _sizes_by_name(_kind(name))
        if wanted and not _fits(dtype, shape, [sizes[size] for size in wanted]):
            wrong[wanted].append(name)
    return [
        f"Tensors of another shape than config.json says ({len(names)}): {min(names)} is "
        f"{tensors[min(names)][0]} {list(tensors[min(names)][1])} and config.json makes it "
        f"[{', '.join(str(sizes[size] or '?') for size in wanted)}] ({', '.join(wanted)}); fetch config.json and "
        "shards of one revision."
        for wanted, names in wrong.items()
    ]


def _lost(found: set[int], count: int) -> str:
    """The lowest number below ``count`` that was not found, and how many more; empty if none."""
    number = count - sum(0 <= one < count for one in found)
    if number <= 0:
        return ""
    first = next(one for one in range(count) if one not in found)
    return f"{first} and {number - 1} more" if number > 1 else str(first)


def _kind(name: str) -> str:
    """A name with the number of its layer and expert taken out, of which there are few."""
    return re.sub(r"\.[0-9]+\.", ".0.", name)


@cache
def _sizes_by_name(kind: str) -> tuple[str, ...]:
    return next((sizes for pattern, sizes in _LINEARS if pattern.fullmatch(kind)), ())


def _fits(dtype: str, shape: Shape, wanted: list[int | None]) -> bool:
    if len(shape) != len(wanted):
        return False
    *rows, columns = zip(shape, wanted, strict=True)
    packed = _PACKED.get(dtype, (1,))
    return all(want in (None, size) for size, want in rows) and (
        columns[1] is None or any(columns[0] * each == columns[1] for each in packed)
    )
