# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._budget import (
    COMPILERS,
    ENGINE_OVERHEAD,
    PARALLEL_LOADER,
    Cap,
    Engine,
    ObjectStore,
    Rank,
    balance,
    compile_transient,
    device_budget,
    judge,
    predict,
    static_need,
    table,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB
from ansible_collections.sparks.hy3.plugins.module_utils._weights import (
    kv_bytes_per_token,
    read_sizes,
    weights_per_rank,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.hy3_checkpoint import CONFIG, hy3_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

SPARK = 127600748 * 1024  # 121.69 GiB
SMALL = 125483110 * 1024  # 119.67 GiB
FREE = int(111.4 * GIB)  # what a Spark has at boot (recipe "Hy3 on 2x DGX Spark")

SIZES = read_sizes(CONFIG, {})
COUNTED = sum(weights_per_rank(hy3_tensors(), SIZES, tensor_parallel=2, speculative=True).values())
KV = kv_bytes_per_token(SIZES, tensor_parallel=2, cache_dtype="fp8", speculative=True)
HY3 = Rank(weights=COUNTED, kv_bytes_per_token=KV, max_positions=262144)
# Of the profile libertai_nvfp4_tp2.
HEAD_CAPS = {"ray": 104, "serve": 8}
HEAD_NEEDS = {"ray": 4 * GIB, "serve": 2 * GIB, "loader": 2 * GIB}


def caps(**sizes: int) -> list[Cap]:
    return [Cap(name, size * GIB) for name, size in sizes.items()]


# id, MemTotal, caps, headroom in GiB, problem
TEST_CAPS: list[tuple[str, int, list[Cap], float, list[str]]] = [
    ("B35 head", SPARK, caps(raylet=104, driver=8), 5.69, []),
    ("B35 worker", SPARK, caps(raylet=110), 7.69, []),
    ("nothing capped", SPARK, [], 117.69, []),
    (
        "B35 head with the worker's cap",
        SPARK,
        caps(raylet=110, driver=8),
        -0.31,
        [
            "The caps (raylet 110.00 GiB + driver 8.00 GiB) and the reserve of 4.00 GiB add up to 122.00 GiB, "
            "more than the 121.69 GiB of this node: lower the caps by 0.31 GiB in all, in hy3_memory"
        ],
    ),
    (
        "B35 smaller node",
        SMALL,
        caps(raylet=110, driver=6),
        -0.33,
        [
            "The caps (raylet 110.00 GiB + driver 6.00 GiB) and the reserve of 4.00 GiB add up to 120.00 GiB, "
            "more than the 119.67 GiB of this node: lower the caps by 0.33 GiB in all, in hy3_memory"
        ],
    ),
    ("exact fit", 116 * GIB, caps(raylet=104, driver=8), 0, []),
]


@pytest.mark.parametrize(
    ("mem_total", "units", "headroom", "problems"),
    [case[1:] for case in TEST_CAPS],
    ids=[case[0] for case in TEST_CAPS],
)
def test_caps(mem_total: int, units: list[Cap], headroom: float, problems: list[str]) -> None:
    verdict = judge(mem_total=mem_total, reserve=4 * GIB, caps=units)
    assert (round(verdict.headroom / GIB, 2), verdict.problems) == (headroom, problems)


# id, share, needs in GiB, largest share, problem
TEST_SHARES: list[tuple[str, float, dict[str, int], float, list[str]]] = [
    ("head", 0.85, {"driver": 8}, 0.90, []),
    ("worker", 0.85, {}, 0.96, []),
    (
        "B36 with needs larger than the profile's",
        0.9,
        {"raylet": 6, "driver": 8},
        0.85,
        [
            "The engine's 109.52 GiB, the host side of 14.00 GiB (raylet 6.00 GiB + driver 8.00 GiB) and the reserve "
            "of 4.00 GiB add up to 127.52 GiB, more than the 121.69 GiB of this node: "
            "lower gpu_memory_utilization to 0.85"
        ],
    ),
    ("the advice itself", 0.85, {"raylet": 6, "driver": 8}, 0.85, []),
    (
        "no share helps",
        0.1,
        {"all": 120},
        0.0,
        [
            "The engine's 12.17 GiB, the host side of 120.00 GiB (all 120.00 GiB) and the reserve of 4.00 GiB add up "
            "to 136.17 GiB, more than the 121.69 GiB of this node: lower the host side or the reserve"
        ],
    ),
]


@pytest.mark.parametrize(
    ("share", "needs", "largest", "problems"), [case[1:] for case in TEST_SHARES], ids=[case[0] for case in TEST_SHARES]
)
def test_share(share: float, needs: dict[str, int], largest: float, problems: list[str]) -> None:
    verdict = judge(
        mem_total=SPARK,
        reserve=4 * GIB,
        caps=caps(raylet=104, driver=8),
        engine=Engine(gpu_memory_utilization=share),
        needs={name: size * GIB for name, size in needs.items()},
    )
    assert (verdict.headroom > 0, verdict.largest_share, verdict.problems) == (True, largest, problems)


# id, loader in GiB, compilers, sum in GiB, fits
TEST_LOADS: list[tuple[str, int, int, float, bool]] = [
    ("B42 auto, 2 jobs", 2, 2, 109.0, True),
    ("B42 auto, 20 jobs", 2, 20, 136.0, False),
    ("B42 fastsafetensors, 2 jobs", 24, 2, 131.0, False),
]


@pytest.mark.parametrize(
    ("loader", "jobs", "total", "fits"), [case[1:] for case in TEST_LOADS], ids=[case[0] for case in TEST_LOADS]
)
def test_what_a_start_takes_for_a_while(loader: int, jobs: int, total: float, fits: bool) -> None:
    box = int(121.6 * GIB)
    engine = Engine(kv_cache_memory=12 * GIB, overhead=0, rank=HY3._replace(weights=84 * GIB))
    needs = {"loader": loader * GIB, "compilers": compile_transient(jobs)}
    verdict = judge(mem_total=box, reserve=8 * GIB, engine=engine, needs=needs)
    rows = dict(table(engine=engine, parts={}, needs=needs, reserve=8 * GIB, verdict=verdict, mem_total=box))
    assert (round((box - rows["left"]) / GIB, 2), not verdict.problems) == (total, fits)


def test_too_many_compilers_are_named_with_a_number_that_fits() -> None:
    """B42: MAX_JOBS is not set on 20 cores."""
    engine = Engine(kv_cache_memory=12 * GIB, overhead=0, rank=HY3._replace(weights=84 * GIB))
    box, needs = int(121.6 * GIB), {"loader": 2 * GIB, COMPILERS: compile_transient(20)}
    [problem] = judge(mem_total=box, reserve=8 * GIB, engine=engine, needs=needs).problems
    assert "compilers 30.00 GiB" in problem
    assert problem.endswith("set MAX_JOBS to 10 (hy3_engine_env), or lower the size of the KV pool, or leave it out")
    fewer = {**needs, COMPILERS: compile_transient(10)}
    assert judge(mem_total=box, reserve=8 * GIB, engine=engine, needs=fewer).problems == []
    more = {"loader": PARALLEL_LOADER, COMPILERS: compile_transient(2)}
    [problem] = judge(mem_total=box, reserve=8 * GIB, engine=engine, needs=more).problems
    assert "MAX_JOBS" not in problem


# id, caps in GiB, needs in GiB, beginnings of the problems
TEST_NEEDS: list[tuple[str, dict[str, int], dict[str, int], list[str]]] = [
    ("below", {"ray": 2, "serve": 1}, {"ray": 2, "serve": 1}, []),
    (
        "both above",
        {"ray": 2, "serve": 1},
        {"ray": 6, "serve": 8},
        [
            "The cap ray is 2.00 GiB and 6.00 GiB are needed there: raise it to at least 6.00 GiB",
            "The cap serve is 1.00 GiB and 8.00 GiB are needed there: raise it to at least 8.00 GiB",
        ],
    ),
    ("a need without a cap", {"ray": 2}, {"loader": 24}, []),
    ("none is allowed", {"ray": 0}, {}, ["The cap ray is 0, under which nothing starts"]),
    ("none is allowed and some is needed", {"ray": 0}, {"ray": 1}, ["The cap ray is 0.00 GiB and 1.00 GiB are needed"]),
]


@pytest.mark.parametrize(
    ("units", "needs", "beginnings"), [case[1:] for case in TEST_NEEDS], ids=[case[0] for case in TEST_NEEDS]
)
def test_needs_under_their_caps(units: dict[str, int], needs: dict[str, int], beginnings: list[str]) -> None:
    found = judge(
        mem_total=SPARK,
        reserve=4 * GIB,
        caps=caps(**units),
        engine=Engine(gpu_memory_utilization=0.7),
        needs={name: size * GIB for name, size in needs.items()},
    ).problems
    assert len(found) == len(beginnings)
    assert all(problem.startswith(beginning) for problem, beginning in zip(found, beginnings, strict=True))


# ---- The published recipes, with the profile's needs

# id, caps, engine, needs, what is available at the start, beginnings of the problems
TEST_RECIPES: list[tuple[str, dict[str, int], Engine, int | None, list[str]]] = [
    ("LibertAI as published", HEAD_CAPS, Engine(gpu_memory_utilization=0.85, max_model_len=163840, rank=HY3), FREE, []),
    ("the pair of 0.90", HEAD_CAPS, Engine(gpu_memory_utilization=0.90, max_model_len=131072, rank=HY3), FREE, []),
    (
        "the pair at 0.92",
        HEAD_CAPS,
        Engine(gpu_memory_utilization=0.92, max_model_len=131072, rank=HY3),
        FREE,
        [
            "The engine's 111.95 GiB, the host side of 8.00 GiB",
            "The engine asks for 111.95 GiB at its start and 111.40",
        ],
    ),
    (
        "the pair at 0.92, where nothing is known about its start",
        HEAD_CAPS,
        Engine(gpu_memory_utilization=0.92, max_model_len=131072, rank=HY3),
        None,
        ["The engine's 111.95 GiB, the host side of 8.00 GiB"],
    ),
    (
        "110G and 8G on the head",
        {"ray": 110, "serve": 8},
        Engine(gpu_memory_utilization=0.85, max_model_len=163840, rank=HY3),
        FREE,
        ["The caps (ray 110.00 GiB + serve 8.00 GiB)"],
    ),
    (
        "262144 with 23 GiB of KV a rank",
        HEAD_CAPS,
        Engine(gpu_memory_utilization=0.85, kv_cache_memory=23 * GIB, max_model_len=262144, rank=HY3),
        FREE,
        ["The engine's 112.87 GiB, the host side of 8.00 GiB", "The engine asks for 112.87 GiB at its start"],
    ),
    (
        "262144 in what 0.85 leaves",
        HEAD_CAPS,
        Engine(gpu_memory_utilization=0.85, max_model_len=262144, rank=HY3),
        FREE,
        [
            "max_model_len 262144 needs 20.25 GiB of KV a rank and 13.56 GiB are left for it, which hold 175552 "
            "tokens: lower it to 175552"
        ],
    ),
    (
        "one node",
        HEAD_CAPS,
        Engine(gpu_memory_utilization=0.85, max_model_len=8192, rank=HY3._replace(weights=2 * COUNTED)),
        FREE,
        ["The weights of a rank are 168.95 GiB and the engine's own need is 5.40 GiB, which leaves -70.91 GiB"],
    ),
]


@pytest.mark.parametrize(
    ("units", "engine", "available", "beginnings"),
    [case[1:] for case in TEST_RECIPES],
    ids=[case[0] for case in TEST_RECIPES],
)
def test_recipes(units: dict[str, int], engine: Engine, available: int | None, beginnings: list[str]) -> None:
    verdict = judge(
        mem_total=SPARK,
        reserve=4 * GIB,
        caps=caps(**units),
        engine=engine,
        needs=HEAD_NEEDS,
        object_store=ObjectStore("ray", 2_000_000_000),
        available=available,
    )
    assert len(verdict.problems) == len(beginnings)
    for problem, beginning in zip(verdict.problems, beginnings, strict=True):
        assert problem.startswith(beginning)


def test_memory_that_has_not_come_back_yet() -> None:
    """B116: 14.2 GiB a moment after a stop, 113.9 a minute later."""
    engine = Engine(gpu_memory_utilization=0.85, rank=HY3)
    found = [
        judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, available=int(size * GIB)) for size in (14.2, 113.9)
    ]
    assert [round(verdict.missing / GIB, 1) for verdict in found] == [89.2, 0]
    assert [len(verdict.problems) for verdict in found] == [1, 0]


def test_the_worker_of_23_gib_does_not_fit_either() -> None:
    """The rank that climbed to 120 GB used, 1 GB free, in the published account."""
    engine = Engine(gpu_memory_utilization=0.85, kv_cache_memory=23 * GIB, max_model_len=262144, rank=HY3)
    needs = {name: size for name, size in HEAD_NEEDS.items() if name != "serve"}
    assert len(judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, needs=needs).problems) == 1


# ---- The published pools

# id, weights of a rank, share, published tokens. Published sizes are read as GiB, which is what engines and `du -h`
# print: for LibertAI that is what the parameters count up to, for the other it is "~90GB weights/node".
TEST_POOLS: list[tuple[str, int, float, int]] = [
    ("LibertAI", COUNTED, 0.85, 176_784),
    ("the pair of 0.90", 90 * GIB, 0.90, 180_000),
]


@pytest.mark.parametrize(
    ("weights", "share", "published"), [case[1:] for case in TEST_POOLS], ids=[case[0] for case in TEST_POOLS]
)
def test_published_pools_with_one_overhead(weights: int, share: float, published: int) -> None:
    engine = Engine(gpu_memory_utilization=share, rank=HY3._replace(weights=weights))
    tokens = predict(engine, mem_total=SPARK).kv_tokens
    assert tokens is not None
    assert abs(tokens / published - 1) < 0.02


def test_what_no_single_overhead_explains() -> None:
    """Were the second pair's weights what its 181e9 bytes count up to, its pool would need twice the overhead.

    Both pools at 84.5 GiB a rank leave 5.3 and 11.1 GiB: either "~90GB" is GiB, or something else took 5.8 GiB there.
    The figure for every case stays the first, which the parameter count confirms.
    """
    left = [
        round((device_budget(SPARK, share) - COUNTED - published * KV) / GIB, 1)
        for share, published in ((0.85, 176_784), (0.90, 180_000))
    ]
    assert left == [5.3, 11.1]
    assert round(ENGINE_OVERHEAD / GIB, 1) == 5.4


def test_prediction_of_the_published_recipe() -> None:
    engine = Engine(gpu_memory_utilization=0.85, max_model_len=163840, rank=HY3)
    found = predict(engine, mem_total=SPARK)
    assert (found.claim, found.kv_tokens, found.max_concurrency) == (111_063_691_060, 175_552, 1.07)
    assert (found.largest_max_model_len, found.unknown) == (175_552, ())


def test_context_is_bounded_by_the_model() -> None:
    engine = Engine(gpu_memory_utilization=0.85, rank=HY3._replace(weights=GIB))
    assert predict(engine, mem_total=SPARK).largest_max_model_len == 262144


# ---- SGLang


def test_sglang_shares_what_is_available() -> None:
    """Weights and pool in 0.70 of 111.4 GiB; what else it takes is outside of that share."""
    four = Rank(42 * GIB, 41_472, 262144)
    engine = Engine(mem_fraction_static=0.70, max_model_len=262144, rank=four)
    found = predict(engine, mem_total=SPARK, available=FREE)
    assert (found.kv_tokens, found.max_concurrency) == (931_536, 3.55)
    assert found.claim == int(FREE * 0.70) + ENGINE_OVERHEAD
    assert judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, needs=HEAD_NEEDS, available=FREE).problems == []


def test_sglang_that_runs_cannot_be_predicted() -> None:
    found = predict(Engine(mem_fraction_static=0.70, rank=HY3), mem_total=SPARK)
    assert (found.kv_tokens, len(found.unknown)) == (None, 1)
    assert found.unknown[0].startswith("SGLang's share is one of what is available at its start")


def test_sglang_advice_is_in_its_own_share() -> None:
    engine = Engine(mem_fraction_static=0.98, rank=HY3)
    problem = judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, needs=HEAD_NEEDS, available=FREE).problems[0]
    assert problem.endswith("lower mem_fraction_static to 0.93")
    better = Engine(mem_fraction_static=0.93, rank=HY3)
    assert judge(mem_total=SPARK, reserve=4 * GIB, engine=better, needs=HEAD_NEEDS, available=FREE).problems == []


# id, weights of a rank in GiB, longest request, available and floor in GiB, missing in GiB, words of the problems
StaticCase = tuple[int, "int | None", float, int, float, list[str]]
TEST_STATIC: list[tuple[str, StaticCase]] = [
    ("as after boot", (42, 262144, 111.4, 0, 0, [])),
    ("enough is left", (42, 262144, 81.0, 0, 0, [])),
    (
        "B94 the floor of all nodes",
        (
            42,
            262144,
            81.0,
            100,
            19.0,
            ["81.00 GiB are available on this node now and 100.00 GiB must be before a start: end what uses 19.00 GiB"],
        ),
    ),
    ("B94 the others", (42, 262144, 113.8, 100, 0, [])),
    (
        "B116 a moment after a stop",
        (
            42,
            262144,
            14.2,
            0,
            60.3,
            ["so 74.46 GiB must be, and 14.20 GiB are available on this node now: end what uses 60.26 GiB"],
        ),
    ),
    ("B116 a minute later", (42, 262144, 113.9, 0, 0, [])),
    ("the weights alone", (42, None, 50.0, 0, 10.0, ["so 60.00 GiB must be, and 50.00 GiB are available"])),
    ("what no node of this size has", (90, 8192, 111.4, 0, 17.6, ["use more nodes, a smaller checkpoint"])),
]


@pytest.mark.parametrize("case", [case[1] for case in TEST_STATIC], ids=[case[0] for case in TEST_STATIC])
def test_sglang_against_what_is_available(case: StaticCase) -> None:
    weights, context, available, floor, missing, words = case
    rank = Rank(weights * GIB, 41_472, 262144)
    engine = Engine(mem_fraction_static=0.70, max_model_len=context, rank=rank, overhead=GIB)
    found = judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, available=int(available * GIB), floor=floor * GIB)
    assert round(found.missing / GIB, 1) == missing
    assert len(found.problems) == len(words)
    assert all(part in problem for problem, part in zip(found.problems, words, strict=True))


def test_what_is_missing_is_what_would_be_enough() -> None:
    engine = Engine(mem_fraction_static=0.70, max_model_len=262144, rank=Rank(42 * GIB, 41_472, 262144))
    for short, problems in ((0, 0), (1, 1)):
        available = static_need(engine) - short
        found = judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, available=available)
        assert (found.missing, len(found.problems)) == (short, problems)


def test_a_floor_holds_for_any_engine() -> None:
    """B116: 61 GiB are back after 30 s, the floor is 112."""
    engine = Engine(gpu_memory_utilization=0.30)
    found = [
        judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, available=int(size * GIB), floor=112 * GIB)
        for size in (61.0, 113.9)
    ]
    assert [(round(one.missing / GIB, 1), len(one.problems)) for one in found] == [(51.0, 1), (0, 0)]
    assert judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, floor=112 * GIB).problems == []


# id, available in GiB by node, what each lacks in GiB
TEST_BALANCE: list[tuple[str, dict[str, float], dict[str, float]]] = [
    ("B94", {"n1": 114.2, "n2": 81.0, "n3": 113.8}, {"n2": 21.78}),
    ("healthy", {"n1": 114.2, "n2": 111.4}, {}),
    ("at the limit", {"n1": 100, "n2": 90}, {}),
    ("two of three", {"n1": 20, "n2": 30, "n3": 110}, {"n1": 79, "n2": 69}),
    ("alone", {"n1": 3}, {}),
    ("nobody", {}, {}),
]


@pytest.mark.parametrize(
    ("available", "lacking"), [case[1:] for case in TEST_BALANCE], ids=[case[0] for case in TEST_BALANCE]
)
def test_balance(available: dict[str, float], lacking: dict[str, float]) -> None:
    found = balance({node: int(size * GIB) for node, size in available.items()})
    assert {node: round(size / GIB, 2) for node, size in found.items()} == lacking


# ---- What is not known


# id, engine, claim in GiB
TEST_FIXED: list[tuple[str, Engine, float]] = [
    ("pool alone", Engine(kv_cache_memory=500 * GIB, overhead=5 * GIB), 505),
    ("a share that is ignored", Engine(kv_cache_memory=500 * GIB, gpu_memory_utilization=0.5, overhead=5 * GIB), 505),
    ("and one that is larger", Engine(kv_cache_memory=GIB, gpu_memory_utilization=0.99, overhead=5 * GIB), 6),
]


@pytest.mark.parametrize(("engine", "claim"), [case[1:] for case in TEST_FIXED], ids=[case[0] for case in TEST_FIXED])
def test_a_fixed_pool_without_known_weights_is_a_lower_bound(engine: Engine, claim: float) -> None:
    found = judge(mem_total=SPARK, reserve=4 * GIB, engine=engine)
    assert found.prediction.claim == claim * GIB
    assert found.prediction.unknown == ("The weights of a rank are not known, so neither is its KV pool.",)
    assert (len(found.problems) == 1) == (claim > 117)
    assert all("lower the size of the KV pool" in problem for problem in found.problems)


def test_an_engine_without_a_share_is_not_guessed() -> None:
    found = predict(Engine(max_model_len=2048, rank=HY3), mem_total=SPARK)
    assert (found.claim, found.kv_tokens) == (None, None)
    assert found.unknown == ("The engine claims no share of the node, so its KV pool is not known.",)


def test_a_pool_of_fixed_size_needs_no_share() -> None:
    tiny = Rank(weights=87_160_928, kv_bytes_per_token=4096, max_positions=262144)
    found = predict(Engine(kv_cache_memory=GIB, max_model_len=2048, overhead=GIB, rank=tiny), mem_total=SPARK)
    assert (found.kv_tokens, found.max_concurrency, found.unknown) == (262_144, 128.0, ())


# What vLLM 0.24.0 logged on an H200 for a small Hy3 of 3 layers and MTP with FP8 KV: ranks, pool, tokens, requests.
TEST_MEASURED: list[tuple[int, int, int, float]] = [
    (1, 362_053_632, 176_784, 1.08),
    (2, int(118.06 * GIB), 123_792_752, 755.57),
]


@pytest.mark.parametrize(("ranks", "pool", "tokens", "concurrency"), TEST_MEASURED)
def test_measured_pools(ranks: int, pool: int, tokens: int, concurrency: float) -> None:
    sizes = SIZES._replace(layers=3, heads=8, kv_heads=2, divided={})
    per_token = kv_bytes_per_token(sizes, tensor_parallel=ranks, cache_dtype="fp8", speculative=True)
    engine = Engine(kv_cache_memory=pool, max_model_len=163840, rank=Rank(1, per_token, 262144))
    found = predict(engine, mem_total=SPARK)
    assert found.kv_tokens == pytest.approx(tokens, rel=5e-5)  # the log rounds the pool to two decimals
    assert found.max_concurrency == pytest.approx(concurrency, abs=0.05)


def test_without_weights_only_the_claim_is_known() -> None:
    found = predict(Engine(gpu_memory_utilization=0.85), mem_total=SPARK)
    assert (found.claim, found.kv_tokens) == (111_063_691_060, None)
    assert found.unknown == ("The weights of a rank are not known, so neither is its KV pool.",)


# ---- The table


def test_table_adds_up_to_the_node() -> None:
    parts = weights_per_rank(hy3_tensors(), SIZES, tensor_parallel=2, speculative=True)
    engine = Engine(gpu_memory_utilization=0.85, rank=HY3)
    verdict = judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, needs=HEAD_NEEDS)
    rows = table(engine=engine, parts=parts, needs=HEAD_NEEDS, reserve=4 * GIB, verdict=verdict, mem_total=SPARK)
    names = [name for name, _size in rows]
    assert names[-6:] == ["KV pool", "ray", "serve", "loader", "reserve", "left"]
    assert sum(size for _name, size in rows) == SPARK


def test_table_without_weights() -> None:
    engine = Engine(gpu_memory_utilization=0.85)
    verdict = judge(mem_total=SPARK, reserve=4 * GIB, engine=engine)
    rows = table(engine=engine, parts={}, needs={}, reserve=4 * GIB, verdict=verdict, mem_total=SPARK)
    assert [name for name, _size in rows] == ["engine", "reserve", "left"]


# ---- The object store


def test_object_store_lives_inside_its_cap() -> None:
    verdict = judge(
        mem_total=SPARK, reserve=4 * GIB, caps=caps(raylet=110), object_store=ObjectStore("raylet", 110 * GIB)
    )
    assert (verdict.caps_total, verdict.problems) == (110 * GIB, [])


def test_object_store_larger_than_its_cap() -> None:
    verdict = judge(mem_total=SPARK, reserve=4 * GIB, caps=caps(raylet=2), object_store=ObjectStore("raylet", 3 * GIB))
    assert verdict.problems == [
        "The object store of 3.00 GiB lives inside the cap raylet of 2.00 GiB and does not fit: make it smaller"
    ]


# ---- Bad input

# id, arguments, message
TEST_REFUSED: list[tuple[str, dict[str, t.Any], str]] = [
    *(
        (f"share {share}", {"engine": Engine(gpu_memory_utilization=share)}, "gpu_memory_utilization is")
        for share in (0, -0.5, 1.01, 85, float("nan"))
    ),
    ("SGLang's share", {"engine": Engine(mem_fraction_static=70)}, "mem_fraction_static is 70"),
    (
        "both shares",
        {"engine": Engine(gpu_memory_utilization=0.8, mem_fraction_static=0.7)},
        "give the one of your engine",
    ),
    ("context", {"engine": Engine(max_model_len=0)}, "max_model_len is 0"),
    ("rank", {"engine": Engine(rank=Rank(1, 0, 1))}, r"The figures of a rank are \(1, 0, 1\)"),
    ("no memory", {"mem_total": 0}, "MemTotal is 0 bytes"),
    ("store without a cap", {"object_store": ObjectStore("plasma", 1)}, "lives in 'plasma', which is none of the caps"),
    ("repeated cap", {"caps": [Cap("ray", 1), Cap("ray", 2)]}, "The caps ray, ray repeat a name"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), [case[1:] for case in TEST_REFUSED], ids=[case[0] for case in TEST_REFUSED]
)
def test_refused(arguments: dict[str, t.Any], message: str) -> None:
    with pytest.raises(Hy3Error, match=message):
        judge(**{"mem_total": SPARK, "reserve": 0, "caps": caps(ray=2), **arguments})


def test_negative_compilers() -> None:
    with pytest.raises(Hy3Error, match="compile_jobs is -1"):
        compile_transient(-1)


BYTES = st.integers(0, 2**45)
ENGINES = st.builds(
    Engine,
    gpu_memory_utilization=st.none() | st.floats(),
    mem_fraction_static=st.none() | st.floats(),
    kv_cache_memory=st.none() | BYTES,
    max_model_len=st.none() | st.integers(),
    rank=st.none() | st.builds(Rank, st.integers(), st.integers(), st.integers()) | st.just(HY3),
)


@settings(max_examples=100, deadline=None)
@given(total=BYTES, reserve=BYTES, available=st.none() | BYTES, engine=ENGINES)
def test_any_numbers_give_a_verdict_or_one_sentence(
    total: int, reserve: int, available: int | None, engine: Engine
) -> None:
    try:
        verdict = judge(mem_total=total, reserve=reserve, engine=engine, available=available)
    except Hy3Error as error:
        assert "\n" not in str(error)
        return
    assert 0 <= verdict.largest_share <= 1
    assert all("\n" not in problem for problem in verdict.problems)


@settings(max_examples=100, deadline=None)
@given(share=st.floats(0.01, 1), needs=st.integers(0, 100 * GIB), available=st.integers(1, SPARK))
def test_the_largest_share_is_safe(share: float, needs: int, available: int) -> None:
    """Whatever was asked for, what the verdict advises instead is accepted."""

    def verdict(value: float) -> t.Any:
        engine = Engine(gpu_memory_utilization=value)
        return judge(mem_total=SPARK, reserve=4 * GIB, engine=engine, needs={"x": needs}, available=available)

    largest = verdict(share).largest_share
    assert largest == 0 or verdict(largest).problems == []
