# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a checkpoint's small files say to the rules. No tensor is read, and a file that is missing is unknown."""

from __future__ import annotations

import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import (
    CONFIG,
    INDEX,
    LEGACY_QUANT_CONFIG,
    claimed_size,
    read_object,
)
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_model import describe_model, has_mtp
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch import _needs
from ansible_collections.sparks.hy3.plugins.module_utils._quantization import (
    SCALES,
    dicts,
    ignore_patterns,
    matches,
    scheme_of,
    sections,
)

SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("moe_intermediate_size", "vocab_size", "max_position_embeddings"),
)
# What vLLM 0.32.0 and newer find no default for.
NEEDED = ("expert_hidden_dim", "first_k_dense_replace", "route_norm", "num_nextn_predict_layers")

Json = t.Mapping[str, t.Any]


def _object(directory: Path, name: str) -> dict[str, t.Any] | None:
    try:
        return read_object(directory / name)
    except (OSError, Hy3Error):
        return None


def _blocks(quant: Json) -> bool:
    """Whether FP8 weights have a scale per block rather than per row or tensor."""
    weights = [group.get("weights") for group in dicts(quant.get("config_groups"))]
    return bool(quant.get("weight_block_size")) or any(
        isinstance(one, dict) and one.get("strategy") == "block" for one in weights
    )


def _shared_by_name_only(quant: Json, ignored: t.Sequence[str], tensors: t.Collection[str], layer: int) -> bool:
    """Whether a BF16 shared expert is kept from quantization by the name ``shared_mlp`` alone."""
    mlp = f"model.layers.{layer}.mlp"
    plain = f"{mlp}.shared_mlp.down_proj.weight" in tensors and not any(
        f"{mlp}.shared_mlp.down_proj{scale}" in tensors for scale in SCALES
    )
    named = any(matches(pattern, f"{mlp}.shared_mlp.down_proj") or "shared_mlp" in pattern for pattern in ignored)
    otherwise = all(
        any(matches(pattern, f"{mlp}.{part}") for pattern in ignored for part in parts)
        for parts in (("gate_proj", "gate_up_proj"), ("down_proj",))
    )
    # compressed-tensors may name what it quantizes, and then what is not named needs no entry.
    aims = [group.get("targets") for group in dicts(quant.get("config_groups"))]
    targets = [target for aim in aims if isinstance(aim, list) for target in aim]
    aimed = not targets or "Linear" in targets or any(matches(str(one), f"{mlp}.down_proj") for one in targets)
    return plain and named and not otherwise and aimed


def describe_tensors(
    config: Json, quant: Json, ignored: t.Sequence[str], tensors: t.Collection[str]
) -> dict[str, t.Any]:
    """What the names of the tensors say, beside the configuration."""
    layers = config.get("num_hidden_layers")
    layers = layers if isinstance(layers, int) and not isinstance(layers, bool) else 0
    mtp = f"model.layers.{layers}.mlp.experts."
    return {
        "mtp_layer": has_mtp(tensors, layers),
        "mtp_quantized": any(name.startswith(mtp) and name.endswith(SCALES) for name in tensors),
        "lm_head_plain": "lm_head.weight" in tensors and not any(f"lm_head{scale}" in tensors for scale in SCALES),
        "shared_experts_names": any(".mlp.shared_experts." in name for name in tensors),
        "shared_by_name_only": _shared_by_name_only(quant, ignored, tensors, max(layers - 1, 1)),
    }


def _hides_layers(directory: Path) -> bool | None:
    """Whether the ignore list has wildcards that SGLang's names of layers escape; None if that cannot be told."""
    try:
        return _needs.needed_by(_needs.read_checkpoint(directory), "P8").needed_by == "needed"
    except (OSError, Hy3Error):
        return None


def read_checkpoint(directory: Path) -> dict[str, t.Any] | None:
    """The facts of the checkpoint in ``directory``, None without a readable config.json.

    ``scheme`` (see :func:`scheme_of`), ``method`` (of quantization, ``none`` without), the sizes of ``SIZES``
    (elements, tokens, counts), ``total_size`` in bytes, and what the rules ask for by name. A fact is None where its
    file is missing.
    """
    config = _object(directory, CONFIG)
    if config is None:
        return None
    legacy_file = _object(directory, LEGACY_QUANT_CONFIG) or {}
    quant, legacy = sections(config, legacy_file)
    ignored = [*ignore_patterns(quant), *ignore_patterns(legacy)]
    model = describe_model(config, legacy_file)
    algorithm = str(model["quant_algo"]).upper()
    method = f"{model['quant_method'] or 'none'}_mixed" if algorithm == "MIXED_PRECISION" else model["quant_method"]
    index = _object(directory, INDEX) or {}
    tensors = index.get("weight_map")
    facts: dict[str, t.Any] = {
        "scheme": scheme_of(quant, legacy),
        "method": str(method or "none"),
        "block_fp8": _blocks(quant),
        "lm_head_excluded": model["lm_head_excluded"],
        "layer_wildcards": _hides_layers(directory),
        "missing_keys": [name for name in NEEDED if name not in config],
        "total_size": claimed_size(index),
        **{name: config.get(name) for name in SIZES},
        "num_key_value_heads": model["kv_heads"],
    }
    if isinstance(tensors, dict):
        facts |= describe_tensors(config, quant, ignored, set(tensors))
    return facts | _of_tokenizer(directory) | _of_generation(directory)


def _of_tokenizer(directory: Path) -> dict[str, t.Any]:
    settings = _object(directory, "tokenizer_config.json")
    try:
        suffix = _needs.suffix_of(_needs.read_tokens(directory))
    except (OSError, Hy3Error):
        suffix = None
    return {
        "vocab_suffix": suffix,
        "token_suffix": None if settings is None else str(settings.get("token_suffix") or ""),
    }


def _of_generation(directory: Path) -> dict[str, t.Any]:
    return {"top_k": (_object(directory, "generation_config.json") or {}).get("top_k")}
