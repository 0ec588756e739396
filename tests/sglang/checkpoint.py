# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's checkpoint as ModelOpt exports it: all layers are BF16 and excluded from NVFP4, which no CPU computes."""

from __future__ import annotations

import json
from pathlib import Path

from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny

LAYERS = 3
# Tencent's names and what transformers calls the same, which ModelOpt exports.
NAMES = {
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
    ".mlp.router.gate.": ".mlp.gate.",
    ".mlp.expert_bias": ".mlp.e_score_correction_bias",
}


def exported(tensor: tiny.Tensor) -> tiny.Tensor:
    name = tensor.name
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return tensor._replace(name=name)


def write(place: Path, *, native: bool = False) -> Path:
    """Write it into an empty directory; ``native`` keeps Tencent's names, with the same values."""
    tensors = list(tiny.Weights(seed=0, layers=LAYERS, acceptance=1.0).tensors())
    named = tensors if native else list(map(exported, tensors))
    (place / "model.safetensors").write_bytes(tiny.shard(sorted(named, key=lambda tensor: tensor.dtype != "F32")))
    for name, text in tiny.small_files(LAYERS).items():
        (place / name).write_text(text)
    excluded = ["lm_head", *(f"model.layers.{number}*" for number in range(LAYERS + 1))]
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    config = tiny.config(LAYERS)
    config["quantization_config"] = {"quant_method": "modelopt", **quantization, "ignore": excluded}
    (place / "config.json").write_text(json.dumps(config))
    legacy = {"producer": {"name": "modelopt"}, "quantization": {**quantization, "exclude_modules": excluded}}
    (place / "hf_quant_config.json").write_text(json.dumps(legacy))
    return place
