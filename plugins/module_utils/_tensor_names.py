# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a tensor of Hy3 is, by its name: the part of the model, and how tensor parallelism splits it.

Source of the partition rule: ``hy_v3.py`` and ``hy_v3_mtp.py`` of vLLM 0.32.0; SGLang splits the same way.
"""

from __future__ import annotations

import re
from functools import cache

PARTS = ("experts", "shared", "dense", "attention", "embeddings", "router", "norms", "mtp", "rotary", "other")

LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.(.+)")
# The first match decides: part, pattern within a layer, how it is split. "column" splits the output rows, "row" the
# input columns, "kv" the output rows by KV heads, "whole" is on every rank, "float32" too, widened by the engine.
_RULES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("router", re.compile(r"mlp\.(router\.gate|gate)\."), "float32"),
    ("router", re.compile(r"mlp\.(expert_bias|e_score_correction_bias)$"), "float32"),
    ("experts", re.compile(r"mlp\.experts\..*down_proj"), "row"),
    ("experts", re.compile(r"mlp\.experts\."), "column"),
    ("shared", re.compile(r"mlp\.(shared_mlp|shared_experts)\.down_proj\."), "row"),
    ("shared", re.compile(r"mlp\.(shared_mlp|shared_experts)\."), "column"),
    ("dense", re.compile(r"mlp\.down_proj\."), "row"),
    ("dense", re.compile(r"mlp\.(gate_proj|up_proj)\."), "column"),
    ("attention", re.compile(r"self_attn\.o_proj\."), "row"),
    ("attention", re.compile(r"self_attn\.[kv]_proj\."), "kv"),
    ("attention", re.compile(r"self_attn\.q_proj\."), "column"),
    ("norms", re.compile(r"(self_attn\.[qk]_norm|\w+_layernorm)\."), "whole"),
)


def place(name: str) -> tuple[int | None, str, str]:
    """Number of the layer (None outside of the layers), part and split of a tensor."""
    layer = LAYER.fullmatch(name)
    if layer:
        return (int(layer[1]), *inside(layer[2]))
    if name.startswith(("model.embed_tokens.", "lm_head.")):
        return None, "embeddings", "vocab"
    return (None, "norms", "whole") if name.startswith("model.norm.") else (None, "other", "whole")


# Asked for each of the 185,000 tensors of a real checkpoint, which are few kinds.
@cache
def inside(name: str) -> tuple[str, str]:
    """Part and split of a tensor by its name within a layer."""
    found = ((part, split) for part, pattern, split in _RULES if pattern.match(name))
    return next(found, ("other", "whole"))
