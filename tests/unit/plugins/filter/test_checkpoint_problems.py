# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.checkpoint_problems import checkpoint_problems

Facts = dict[str, t.Any]
MTP: Facts = {"method": "mtp", "num_speculative_tokens": 1}
CHECKPOINT: Facts = {
    "shards": [{"name": f"model-{number:05}-of-00099.safetensors"} for number in range(1, 100)],
    "model": {"layers": 80, "heads": 64, "kv_heads": 8, "nextn_layers": 1},
    "mtp": True,
}


def plan_with(tensor: int = 2, *, speculative: object = None, shards: int | None = 99) -> Facts:
    return {
        "profile": "libertai_nvfp4_tp2",
        "checkpoint_path": "/opt/hy3/models/Hy3-NVFP4",
        "checkpoint": {"shards": shards} if shards else {},
        "engine_args": {"tensor-parallel-size": tensor, "speculative-config": speculative},
    }


# Hy3 has 64 heads and 8 KV heads, which vLLM copies when there are more ranks than those (vllm hy_v3.py, read).
@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
def test_ranks_that_divide_the_heads(tensor: int) -> None:
    assert checkpoint_problems(CHECKPOINT, plan_with(tensor, speculative=MTP)) == []


# What pad_hy3 and marianbusoi make of it for three ranks (seed 002).
PADDED = CHECKPOINT | {"model": {"layers": 80, "heads": 72, "kv_heads": 9, "nextn_layers": 1}}


@pytest.mark.parametrize("tensor", [1, 3])
def test_ranks_that_divide_padded_heads(tensor: int) -> None:
    assert checkpoint_problems(PADDED, plan_with(tensor, speculative=MTP)) == []


WITHOUT_MTP = CHECKPOINT | {"mtp": False}
SERVABLE: dict[str, tuple[Facts, Facts]] = {
    "a profile that does not know how many shards there are": (CHECKPOINT, plan_with(shards=None)),
    "heads that the configuration does not state": (CHECKPOINT | {"model": {}}, plan_with(3)),
    "no MTP and none asked for": (WITHOUT_MTP, plan_with()),
    "another way to speculate": (WITHOUT_MTP, plan_with(speculative={"method": "ngram"})),
    "a drafter of its own": (WITHOUT_MTP, plan_with(speculative=MTP | {"model": "/opt/hy3/models/drafter"})),
    "JSON that asks for nothing": (WITHOUT_MTP, plan_with(speculative="null")),
    "JSON that asks for MTP": (CHECKPOINT, plan_with(speculative='{"method": "mtp"}')),
}


@pytest.mark.parametrize(("checkpoint", "plan"), SERVABLE.values(), ids=SERVABLE)
def test_servable(checkpoint: Facts, plan: Facts) -> None:
    assert checkpoint_problems(checkpoint, plan) == []


NO_MTP = (
    "speculative-config asks for MTP and /opt/hy3/models/Hy3-NVFP4 has no tensors for model.layers.80, so it cannot "
    "draft; set speculative-config to null in hy3_engine_args, or use a conversion that kept them."
)


def way_out(sizes: str, tensor: int) -> str:
    return (
        f"serve it with {sizes} ranks, or for {tensor} take another checkpoint: the original if this one is padded, "
        "else a copy padded by playbook pad_hy3."
    )


PROBLEMS: dict[str, tuple[Facts, Facts, str]] = {
    "three ranks": (
        CHECKPOINT,
        plan_with(3),
        "tensor-parallel-size is 3, which does not divide the model's 64 attention heads and 8 KV heads; "
        + way_out("1, 2, 4 or 8", 3),
    ),
    "seed 002 says that its padded one runs on two": (
        PADDED,
        plan_with(2),
        "tensor-parallel-size is 2, which does not divide the model's 9 KV heads; " + way_out("1 or 3", 2),
    ),
    "and on four": (
        PADDED,
        plan_with(4),
        "tensor-parallel-size is 4, which does not divide the model's 9 KV heads; " + way_out("1 or 3", 4),
    ),
    "KV heads alone": (
        CHECKPOINT | {"model": {"heads": 64, "kv_heads": 6}},
        plan_with(4),
        f"tensor-parallel-size is 4, which does not divide the model's 6 KV heads; {way_out('1 or 2', 4)}",
    ),
    "more ranks than KV heads": (
        CHECKPOINT | {"model": {"heads": 48, "kv_heads": 8}},
        plan_with(12),
        "tensor-parallel-size is 12, which does not divide the model's 8 KV heads; " + way_out("1, 2, 4 or 8", 12),
    ),
    "MTP that the conversion lost": (WITHOUT_MTP, plan_with(speculative=MTP), NO_MTP),
    "the same by an older name": (WITHOUT_MTP, plan_with(speculative={"method": "deepseek_mtp"}), NO_MTP),
    "the same as JSON": (WITHOUT_MTP, plan_with(speculative='{"method": "mtp"}'), NO_MTP),
    "no JSON": (
        CHECKPOINT,
        plan_with(speculative="mtp"),
        "speculative-config is 'mtp', which is no JSON; write it as a dictionary.",
    ),
    "JSON of something else": (
        CHECKPOINT,
        plan_with(speculative='["mtp"]'),
        "speculative-config is ['mtp'], which is no dictionary; write it as one.",
    ),
    "another checkpoint": (
        CHECKPOINT,
        plan_with(shards=47),
        "/opt/hy3/models/Hy3-NVFP4 has 99 shards and profile libertai_nvfp4_tp2 wants 47; it is another checkpoint, or "
        "half of one.",
    ),
}


@pytest.mark.parametrize(("checkpoint", "plan", "sentence"), PROBLEMS.values(), ids=PROBLEMS)
def test_one_sentence(checkpoint: Facts, plan: Facts, sentence: str) -> None:
    assert checkpoint_problems(checkpoint, plan) == [sentence]
