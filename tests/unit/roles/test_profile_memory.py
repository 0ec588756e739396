# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The sums of each profile, as it stands, on a Spark with the checkpoint that its author published."""

from __future__ import annotations

import typing as t
from functools import cache

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._budget import (
    Cap,
    Engine,
    ObjectStore,
    Rank,
    Verdict,
    judge,
)
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB, parse_size
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import tensor_bytes
from ansible_collections.sparks.hy3.plugins.module_utils._weights import (
    kv_bytes_per_token,
    read_sizes,
    weights_per_rank,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.hy3_checkpoint import (
    CONFIG,
    bf16,
    fp8_block,
    hy3_tensors,
    nvfp4,
)
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT

SPARK = 127600748 * 1024  # MemTotal, 121.69 GiB
FREE = int(111.4 * GIB)  # of it after boot (seed 001)

# RedHatAI: attention in FP8 blocks, all experts and the dense layer in NVFP4, the MTP layer and the rest as they were.
MIXED: dict[str, t.Any] = {"rest": nvfp4, "attention": fp8_block, "mtp": bf16, "mtp_experts": bf16}
# Padded for three ranks.
HEADS, DENSE = (72, 9), 13344
PADDED = CONFIG | {"num_attention_heads": HEADS[0], "num_key_value_heads": HEADS[1], "intermediate_size": DENSE}

# Profile, tensors and configuration of its checkpoint.
CHECKPOINTS: dict[str, tuple[dict[str, t.Any], dict[str, t.Any]]] = {
    "libertai_nvfp4_tp2": ({}, CONFIG),
    "kodelow_w4a16_tp2": ({}, CONFIG),
    "marianbusoi_nvfp4_fp8_tp3": (MIXED | {"heads": HEADS, "dense": DENSE}, PADDED),
    "redhatai_nvfp4_fp8_tp2": (MIXED, CONFIG),
}


@cache
def rank_of(name: str, ranks: int, cache_dtype: str = "auto", *, drafter: bool = True) -> Rank:
    options, config = CHECKPOINTS[name]
    sizes = read_sizes(config, {})
    parts = weights_per_rank(hy3_tensors(**options), sizes, tensor_parallel=ranks, speculative=drafter)
    kv = kv_bytes_per_token(sizes, tensor_parallel=ranks, cache_dtype=cache_dtype, speculative=drafter)
    return Rank(sum(parts.values()), kv, sizes.max_positions)


def verdict(name: str, node: str = "head", **arguments: t.Any) -> Verdict:
    """What the preflight says of a node, with engine arguments laid over the profile's."""
    profile = yaml.safe_load((ROOT / f"roles/profile/files/profiles/{name}.yml").read_text())
    args, memory = profile["engine_args"] | arguments, profile["memory"]
    needs = {part: parse_size(size) or 0 for part, size in memory["needs"].items() if node == "head" or part != "serve"}
    return judge(
        mem_total=SPARK,
        reserve=parse_size(memory["os_reserve"]) or 0,
        caps=[Cap(unit, parse_size(size) or 0) for unit, size in memory[node].items()],
        engine=Engine(
            gpu_memory_utilization=args["gpu-memory-utilization"],
            max_model_len=args["max-model-len"],
            rank=rank_of(name, args["tensor-parallel-size"], args.get("kv-cache-dtype", "auto")),
        ),
        needs=needs,
        object_store=ObjectStore("ray", profile["ray_args"]["object-store-memory"]),
        available=FREE,
    )


# ---- The verdicts


@pytest.mark.parametrize("node", ["head", "worker"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_profile_fits_a_spark(name: str, node: str) -> None:
    found = verdict(name, node)
    assert found.problems == []
    assert found.headroom >= 0


# Node, largest share of it that fits.
TEST_TOO_MUCH: list[tuple[str, str]] = [("head", "0.90"), ("worker", "0.91")]


@pytest.mark.parametrize(("node", "largest"), TEST_TOO_MUCH)
def test_seed_001_at_the_share_that_failed(node: str, largest: str) -> None:
    sums, asked = verdict("kodelow_w4a16_tp2", node, **{"gpu-memory-utilization": 0.92}).problems
    assert sums.startswith("The engine's 111.95 GiB, the host side of")
    assert asked.startswith("The engine asks for 111.95 GiB at its start and 111.40 GiB are available on this node now")
    assert {problem.rpartition(" lower ")[2] for problem in (sums, asked)} == {f"gpu_memory_utilization to {largest}"}


def test_four_sparks_serve_the_original_too() -> None:
    assert verdict("redhatai_nvfp4_fp8_tp2", **{"tensor-parallel-size": 4, "max-model-len": 262144}).problems == []


def test_two_do_not_hold_the_models_own_length() -> None:
    (problem,) = verdict("redhatai_nvfp4_fp8_tp2", **{"max-model-len": 262144}).problems
    assert problem.startswith("max_model_len 262144 needs 20.25 GiB of KV a rank and 15.06 GiB are left for it")


def test_two_do_not_hold_the_profiles_length_in_bf16() -> None:
    (problem,) = verdict("redhatai_nvfp4_fp8_tp2", **{"kv-cache-dtype": "auto"}).problems
    assert problem.startswith("max_model_len 131072 needs 20.25 GiB of KV a rank and 15.06 GiB are left for it")


# ---- What was counted, against what is published

TEST_SIZES: list[tuple[str, float]] = [
    ("kodelow_w4a16_tp2", 181),  # the post
    ("redhatai_nvfp4_fp8_tp2", 178),  # kaitakuai/experiments, 2026-08
]


@pytest.mark.parametrize(("name", "published"), TEST_SIZES)
def test_size_of_the_checkpoint(name: str, published: float) -> None:
    """In GB, as the hub writes it; the profile says the same."""
    tensors = hy3_tensors(**CHECKPOINTS[name][0])
    assert round(sum(tensor_bytes(dtype, shape) for dtype, shape in tensors.values()) / 1e9) == published
    profile = yaml.safe_load((ROOT / f"roles/profile/files/profiles/{name}.yml").read_text())
    assert profile["checkpoint"]["size_gb"] == published


def test_weights_of_a_rank_against_a_real_start() -> None:
    """39.99 GiB a rank on four B200 with vLLM 0.25.1, without the drafter (kaitakuai/experiments, 2026-08)."""
    counted = rank_of("redhatai_nvfp4_fp8_tp2", 4, drafter=False).weights / GIB
    assert abs(counted / 39.99 - 1) < 0.01


# Profile, GiB of weights on a rank, bytes of KV for a token there, tokens of its pool.
TEST_POOLS: list[tuple[str, float, int, int]] = [
    ("libertai_nvfp4_tp2", 84.47, 82_944, 175_552),
    ("kodelow_w4a16_tp2", 84.47, 82_944, 254_320),  # published: ~180K, see docs/preflight.md
    ("marianbusoi_nvfp4_fp8_tp3", 55.68, 124_416, 365_520),
    ("redhatai_nvfp4_fp8_tp2", 82.98, 82_944, 194_896),
]


@pytest.mark.parametrize(("name", "weights", "kv", "tokens"), TEST_POOLS, ids=[case[0] for case in TEST_POOLS])
def test_pool(name: str, weights: float, kv: int, tokens: int) -> None:
    args = yaml.safe_load((ROOT / f"roles/profile/files/profiles/{name}.yml").read_text())["engine_args"]
    rank = rank_of(name, args["tensor-parallel-size"], args.get("kv-cache-dtype", "auto"))
    assert (round(rank.weights / GIB, 2), rank.kv_bytes_per_token) == (weights, kv)
    assert verdict(name).prediction.kv_tokens == tokens >= args["max-model-len"]
