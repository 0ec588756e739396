# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The published kinds of Hy3, in miniature: two layers and an MTP layer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible_collections.sparks.hy3.plugins.module_utils._patch._needs import Checkpoint

CONFIG = {"num_hidden_layers": 2, "vocab_size": 120832, "num_nextn_predict_layers": 1}
ATTENTION = [f"self_attn.{kind}_proj" for kind in "qkvo"]


def linears(*, shared: str = "shared_mlp", mtp: bool = True) -> list[str]:
    """Names of the linear modules."""
    found = [f"model.layers.0.{name}" for name in (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    for layer in range(1, 3 if mtp else 2):
        inner = [f"mlp.{part}.{kind}_proj" for part in (shared, "experts.0") for kind in ("gate", "up", "down")]
        found += [f"model.layers.{layer}.{name}" for name in (*ATTENTION, *inner)]
    return found


def tensors(
    quantized: Iterable[str] = (), *, shared: str = "shared_mlp", mtp: bool = True, more: Iterable[str] = ()
) -> set[str]:
    """Names of the tensors; a linear is stored quantized if its name contains one of ``quantized``."""
    words = tuple(quantized)
    found = {"lm_head.weight", *more}
    for name in linears(shared=shared, mtp=mtp):
        found.add(f"{name}.weight")
        if any(word in name for word in words):
            found |= {f"{name}.weight_scale", f"{name}.weight_scale_2", f"{name}.input_scale"}
    if mtp:
        found |= {"model.layers.2.enorm.weight", "model.layers.2.final_layernorm.weight"}
    return found


def checkpoint(
    names: Iterable[str], *ignored: str, method: str = "modelopt", algo: str = "NVFP4", **more: Any
) -> Checkpoint:
    quant = {"quant_method": method, "quant_algo": algo, "ignore": list(ignored)} if method else {}
    return Checkpoint(
        {**CONFIG, **({"quantization_config": quant} if method else {})},
        {},
        more.get("tokenizer_config", {}),
        more.get("tokens", {"<think>", "</think>"}),
        set(names),
    )


# BF16, as Tencent published it.
PLAIN = checkpoint(tensors(), method="")
# Seed 000: experts and shared experts in NVFP4, also of the MTP layer; attention and lm_head in BF16.
LIBERTAI = checkpoint(tensors([".experts.", "shared_mlp", "layers.0.mlp"]), "lm_head", "*self_attn*")
# Seed 003: everything in NVFP4 but lm_head and the MTP layer, with the names that transformers gives.
NAMED = {"shared": "shared_experts", "more": ["model.layers.1.mlp.e_score_correction_bias"]}
VROOMFONDEL = checkpoint(
    tensors(["layers.0.", "layers.1."], shared="shared_experts", more=["model.layers.1.mlp.e_score_correction_bias"]),
    "lm_head",
    "model.layers.2*",
)
# Tencent's exporter: experts only; the shared expert is named in the list.
ANGELSLIM = checkpoint(
    tensors([".experts."]),
    "lm_head",
    *(f"model.layers.{n}.{part}*" for n in range(3) for part in ("self_attn", "mlp.shared_mlp")),
    "model.layers.0.mlp.*_proj",
)
# Seed 001: compressed-tensors with suffixed tokens.
KODELOW = checkpoint(
    tensors([".experts."]),
    "lm_head",
    "re:.*self_attn.*",
    r"re:.*mlp\.(gate|up|down)_proj$",
    "re:.*shared_mlp.*",
    method="compressed-tensors",
    tokens={"<think:opensource>", "</think:opensource>", "<thinking>"},
)


def store(given: Checkpoint, directory: Path) -> None:
    """Write the small files of ``given``."""
    added = {str(number): {"content": token} for number, token in enumerate(sorted(given.tokens))}
    for name, content in (
        ("config.json", given.config),
        ("tokenizer_config.json", {"added_tokens_decoder": added, **given.tokenizer_config}),
        ("model.safetensors.index.json", {"weight_map": dict.fromkeys(sorted(given.tensors), "a.safetensors")}),
    ):
        directory.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
