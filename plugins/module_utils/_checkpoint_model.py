# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What the configuration of a checkpoint says about the model, and whether its MTP layer is there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ansible_collections.sparks.hy3.plugins.module_utils._quantization import ignore_patterns, matches, sections

# The tensors without which neither vLLM nor SGLang can build the drafter.
MTP_TENSORS = ("eh_proj", "enorm", "hnorm")


def excludes_lm_head(patterns: Iterable[Any]) -> bool:
    """Whether a quantization ignore list names ``lm_head``: exactly, by a wildcard, or as ``re:`` expression."""
    return any(matches(str(pattern), "lm_head") for pattern in patterns)


def describe_model(config: Mapping[str, Any], legacy_quant: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json (and ModelOpt's older hf_quant_config.json, which may stand alone) say about the model.

    Sizes are counts, ``head_dim`` and ``hidden_size`` elements, ``max_position_embeddings`` tokens. None where the
    files are silent.
    """
    layers, heads = _integer(config, "num_hidden_layers"), _integer(config, "num_attention_heads")
    hidden, head_dim = _integer(config, "hidden_size"), _integer(config, "head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    quant, legacy = sections(config, legacy_quant)
    architectures = config.get("architectures")
    return {
        "architecture": _text(architectures[0]) if isinstance(architectures, list) and architectures else None,
        "layers": layers,
        "heads": heads,
        "kv_heads": _integer(config, "num_key_value_heads") or heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "experts": _integer(config, "num_experts"),
        "nextn_layers": _integer(config, "num_nextn_predict_layers") or 0,
        "max_position_embeddings": _integer(config, "max_position_embeddings"),
        "quant_method": _text(quant.get("quant_method")) or ("modelopt" if legacy else None),
        "quant_algo": _text(quant.get("quant_algo")) or _text(legacy.get("quant_algo")),
        "lm_head_excluded": excludes_lm_head([*ignore_patterns(quant), *ignore_patterns(legacy)]),
    }


def has_mtp(tensors: Collection[str], layers: int | None) -> bool:
    """Whether the tensors of the MTP layer, the one after the last decoder layer, are among ``tensors``."""
    return layers is not None and all(f"model.layers.{layers}.{part}.weight" in tensors for part in MTP_TENSORS)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    number = config.get(key)
    return number if isinstance(number, int) and not isinstance(number, bool) else None
