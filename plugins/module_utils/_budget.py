# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The arithmetic of a node's memory: what the caps, the engine, the host side and the system take, and what it serves.

CPU and GPU share one memory on a DGX Spark. What CUDA allocates there is, as far as is known, not charged to a cgroup,
so that caps bound the host side only and the engine's claim is a sum of its own. The caps say what may be used, the
needs what is used: they are two inputs.
"""

from __future__ import annotations

import math
import typing as t
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB, format_gib

# What a rank takes beside weights and KV pool: CUDA context, NCCL buffers, activations of 8192 tokens and, because free
# memory is the node's there, the growth of the host side while it profiles. One figure for every case: what LibertAI's
# log leaves (0.85 of 121.69 GiB, counted weights of 84.4 GiB, 176,784 tokens). docs/preflight.md has the comparison.
ENGINE_OVERHEAD = int(5.4 * GIB)
# vLLM's KV block on CUDA, in tokens; a pool is whole blocks.
BLOCK_TOKENS = 16
# What a parallel loader stages in host buffers while it reads, measured with fastsafetensors. Source: field case B42
# (Blackwellboy/model-serving-minefield, traps/memory/152).
PARALLEL_LOADER = 24 * GIB
# SGLang ends a start where a rank has less than this share of what the best one has (model_runner, "The memory capacity
# is unbalanced").
BALANCE = 0.9
# One compiler of a cold start (FlashInfer, Triton). Source: Blackwellboy/model-serving-minefield, traps/runtime/131.
COMPILE_JOB = int(1.5 * GIB)
COMPILERS = "compilers"


@dataclass(frozen=True)
class Cap:
    """The memory limit of one unit, in bytes."""

    name: str
    limit: int


@dataclass(frozen=True)
class ObjectStore:
    """Ray's shared-memory store, in bytes; it is charged to the cap of the raylet named ``cap``."""

    cap: str
    size: int


class Rank(t.NamedTuple):
    """What one rank holds (``weights``, bytes) and keeps for each token (``kv_bytes_per_token``, bytes).

    ``max_positions`` is the longest context that the model allows, in tokens.
    """

    weights: int
    kv_bytes_per_token: int
    max_positions: int


@dataclass(frozen=True)
class Engine:
    """The settings that decide what the engine takes of a node. Sizes are bytes, None is not set.

    Of ``gpu_memory_utilization`` (vLLM's share of MemTotal, for everything) and ``mem_fraction_static`` (SGLang's share
    of what is available at its start, for weights and KV pool) at most one is set. An engine with neither, as vLLM on
    CPUs, claims no share. ``kv_cache_memory`` fixes the pool, and then the claim is the sum of its parts.
    """

    gpu_memory_utilization: float | None = None
    mem_fraction_static: float | None = None
    kv_cache_memory: int | None = None
    max_model_len: int | None = None
    overhead: int = ENGINE_OVERHEAD
    rank: Rank | None = None


@dataclass(frozen=True)
class Prediction:
    """What the engine will do on this node; None is unknown, and ``unknown`` says why. Bytes, tokens and ratios.

    ``claim`` is what it takes of the node in all, ``kv_room`` what of that is left for the KV pool (may be negative).
    """

    claim: int | None = None
    kv_room: int | None = None
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    largest_max_model_len: int | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Sums in bytes; ``headroom`` is negative if the caps do not fit. ``largest_share`` is a ratio of two decimals.

    ``missing`` is what the engine will ask for at its start beyond what is available now: vLLM its claim, SGLang enough
    that its share holds weights and one request, and either the floor that was given.
    """

    caps_total: int
    headroom: int
    prediction: Prediction
    largest_share: float
    missing: int
    problems: list[str]


def device_budget(mem_total: int, utilization: float) -> int:
    """Return the bytes vLLM claims: it rounds ``total x gpu_memory_utilization`` up."""
    return math.ceil(mem_total * _share("gpu_memory_utilization", utilization))


def compile_transient(jobs: int) -> int:
    """Return the bytes that this many compilers take on a cold start."""
    if jobs < 0:
        raise Hy3Error(f"compile_jobs is {jobs}, a number of compilers: choose 0 or more")
    return jobs * COMPILE_JOB


def predict(engine: Engine, *, mem_total: int, available: int | None = None) -> Prediction:
    """Predict what one rank claims and how many tokens its KV pool holds.

    Args:
        engine: Its settings.
        mem_total: MemTotal of the node, in bytes.
        available: What can be had before the engine starts, in bytes; None where that cannot be known.

    Raises:
        Hy3Error: A share is none, two of them are set, or a size is below 1.
    """
    if mem_total < 1:
        raise Hy3Error(f"MemTotal is {mem_total} bytes, which is no memory: give the node's own /proc/meminfo")
    if engine.max_model_len is not None and engine.max_model_len < 1:
        raise Hy3Error(f"max_model_len is {engine.max_model_len}, a number of tokens: choose 1 or more")
    if engine.rank is not None and min(engine.rank) < 1:
        raise Hy3Error(f"The figures of a rank are {tuple(engine.rank)}, and none may be below 1: count it again")
    if engine.gpu_memory_utilization is not None and engine.mem_fraction_static is not None:
        raise Hy3Error(
            "gpu_memory_utilization is vLLM's share and mem_fraction_static is SGLang's: give the one of your engine"
        )
    claim, room, unknown = _claim(engine, mem_total=mem_total, available=available)
    if engine.rank is None:
        unknown = ("The weights of a rank are not known, so neither is its KV pool.", *unknown)
    if room is None or engine.rank is None:
        return Prediction(claim=claim, unknown=unknown)
    tokens = max(0, room) // engine.rank.kv_bytes_per_token // BLOCK_TOKENS * BLOCK_TOKENS
    return Prediction(
        claim=claim,
        kv_room=room,
        kv_tokens=tokens,
        max_concurrency=round(tokens / engine.max_model_len, 2) if engine.max_model_len else None,
        largest_max_model_len=min(tokens, engine.rank.max_positions),
        unknown=unknown,
    )


def judge(
    *,
    mem_total: int,
    reserve: int,
    caps: Sequence[Cap] = (),
    engine: Engine | None = None,
    needs: Mapping[str, int] | None = None,
    object_store: ObjectStore | None = None,
    available: int | None = None,
    floor: int = 0,
) -> Verdict:
    """Check the sums of one node.

    Args:
        mem_total: MemTotal of the node, in bytes.
        reserve: Bytes left to the operating system.
        caps: The limits of all units on the node; they may all be reached at once.
        engine: Its settings, or None if no engine claims memory here.
        needs: Bytes really used beside the engine's claim, by name: processes, and what a start takes for a while.
        object_store: Size of Ray's object store and the cap it lives in.
        available: What can be had before the engine starts, in bytes; None while it runs.
        floor: What must be available at the least before the engine starts, in bytes, whatever it claims.

    Raises:
        Hy3Error: Two caps have one name, the object store names none of them, or a share is no share.
    """
    limits = {cap.name: cap.limit for cap in caps}
    if len(limits) < len(caps):
        raise Hy3Error(f"The caps {', '.join(cap.name for cap in caps)} repeat a name: give each unit one cap")
    needs, engine = needs or {}, engine or Engine()
    caps_total = sum(limits.values())
    headroom = mem_total - reserve - caps_total
    prediction = predict(engine, mem_total=mem_total, available=available)
    free = mem_total - reserve - sum(needs.values())
    # Rounded down to the two decimals people write, so that the advice itself fits.
    share = max(0.0, math.floor(min(free, free if available is None else available) / mem_total * 100) / 100)
    asked = static_need(engine) if engine.mem_fraction_static is not None else prediction.claim or 0
    missing = 0 if available is None else max(0, asked - available, floor - available)
    problems = [] if headroom >= 0 else [_caps_problem(limits, reserve=reserve, mem_total=mem_total)]
    problems += _cap_problems(limits, needs)
    if prediction.claim is not None:
        problems += _claim_problems(
            engine, prediction.claim, needs, reserve=reserve, mem_total=mem_total, available=available, share=share
        )
    if available is not None and engine.mem_fraction_static is not None and available < asked <= free:
        problems.append(_static_problem(engine, asked, available))
    else:
        problems += _pool_problems(engine, prediction)
    if available is not None and available < floor:
        problems.append(
            f"{format_gib(available)} are available on this node now and {format_gib(floor)} must be before a start: "
            f"end what uses {format_gib(floor - available)} of it, or lower the floor"
        )
    if object_store is not None:
        problems += _store_problems(object_store, limits)
    return Verdict(caps_total, headroom, prediction, share, missing, problems)


def static_need(engine: Engine) -> int:
    """Return the bytes that must be available so that SGLang's share holds the weights and one longest request."""
    if engine.rank is None or engine.mem_fraction_static is None:
        return 0
    tokens = max(engine.max_model_len or 0, BLOCK_TOKENS)
    static = engine.rank.weights + tokens * engine.rank.kv_bytes_per_token
    return math.ceil(static / _share("mem_fraction_static", engine.mem_fraction_static))


def balance(available: Mapping[str, int]) -> dict[str, int]:
    """Return the nodes that SGLang calls unbalanced, with the bytes that each lacks of what it accepts."""
    accepted = math.ceil(max(available.values(), default=0) * BALANCE)
    return {node: accepted - size for node, size in available.items() if size < accepted}


def table(
    *,
    engine: Engine,
    parts: Mapping[str, int],
    needs: Mapping[str, int],
    reserve: int,
    verdict: Verdict,
    mem_total: int,
) -> list[tuple[str, int]]:
    """Return what takes the node's memory as rows of a name and bytes; ``left`` is the rest, negative if none is.

    ``parts`` are the weights of a rank by part. A row that is not known is left out, and then there is no ``left``.
    """
    prediction = verdict.prediction
    rows = [(f"weights: {part}", size) for part, size in parts.items() if size]
    if prediction.claim is not None and prediction.kv_room is not None:
        rows += [("engine overhead", engine.overhead), ("KV pool", max(0, prediction.kv_room))]
    elif prediction.claim is not None:
        rows = [("engine", prediction.claim)]
    rows += [*needs.items(), ("reserve", reserve)]
    if prediction.claim is not None:
        rows.append(("left", mem_total - prediction.claim - sum(needs.values()) - reserve))
    return rows


def _share(name: str, share: float) -> float:
    if not 0 < share <= 1:
        raise Hy3Error(f"{name} is {share}, a share of the node's memory: choose one above 0, up to 1")
    return share


def _claim(engine: Engine, *, mem_total: int, available: int | None) -> tuple[int | None, int | None, tuple[str, ...]]:
    """What the engine takes in all, what of that is for the KV pool (each None if unknown), and why."""
    weights = None if engine.rank is None else engine.rank.weights
    claim = room = None
    why: tuple[str, ...] = ()
    if engine.gpu_memory_utilization is not None:
        claim = device_budget(mem_total, engine.gpu_memory_utilization)
        room = None if weights is None else claim - weights - engine.overhead
    elif engine.mem_fraction_static is not None:
        share = _share("mem_fraction_static", engine.mem_fraction_static)
        static = math.floor((mem_total if available is None else available) * share)
        claim = static + engine.overhead
        room = None if weights is None or available is None else static - weights
        if available is None:
            why = ("SGLang's share is one of what is available at its start, which cannot be known while it runs.",)
    elif engine.kv_cache_memory is None:
        why = ("The engine claims no share of the node, so its KV pool is not known.",)
    if engine.kv_cache_memory is not None:
        room = engine.kv_cache_memory
        # Without known weights this is the least that it takes. The share is none of the engine's business then.
        claim = (weights or 0) + engine.overhead + room
    return claim, room, why


def _caps_problem(limits: Mapping[str, int], *, reserve: int, mem_total: int) -> str:
    named = " + ".join(f"{name} {format_gib(limit)}" for name, limit in limits.items())
    total = sum(limits.values()) + reserve
    return (
        f"The caps ({named}) and the reserve of {format_gib(reserve)} add up to {format_gib(total)}, more than the "
        f"{format_gib(mem_total)} of this node: lower the caps by {format_gib(total - mem_total)} in all, in hy3_memory"
    )


def _cap_problems(limits: Mapping[str, int], needs: Mapping[str, int]) -> list[str]:
    problems = []
    for name, limit in limits.items():
        if needs.get(name, 0) > limit:
            problems.append(
                f"The cap {name} is {format_gib(limit)} and {format_gib(needs[name])} are needed there: raise it to at "
                f"least {format_gib(needs[name])}, or lower the need if it is less"
            )
        elif limit == 0:
            problems.append(f"The cap {name} is 0, under which nothing starts: raise it to what runs there")
    return problems


def _static_problem(engine: Engine, asked: int, available: int) -> str:
    weights = engine.rank.weights if engine.rank else 0
    request = f" and one request of {engine.max_model_len} tokens" if engine.max_model_len else ""
    return (
        f"The weights of {format_gib(weights)}{request} must fit into mem_fraction_static "
        f"{engine.mem_fraction_static:g} of what is available at the start, so {format_gib(asked)} must be, and "
        f"{format_gib(available)} are available on this node now: end what uses {format_gib(asked - available)} of it"
        f"{', or lower max_model_len' if request else ''}"
    )


def _claim_problems(
    engine: Engine,
    claim: int,
    needs: Mapping[str, int],
    *,
    reserve: int,
    mem_total: int,
    available: int | None,
    share: float,
) -> list[str]:
    option = "gpu_memory_utilization" if engine.mem_fraction_static is None else "mem_fraction_static"
    lower = _lower(engine, share, mem_total, available)
    way_out = f"lower {option} to {lower:.2f}" if lower > 0 else "lower the host side or the reserve"
    if engine.kv_cache_memory is not None:
        way_out = "lower the size of the KV pool, or leave it out"
    problems = []
    total = claim + sum(needs.values()) + reserve
    if total > mem_total:
        named = " + ".join(f"{name} {format_gib(size)}" for name, size in needs.items())
        jobs = (mem_total - total + needs.get(COMPILERS, 0)) // COMPILE_JOB
        fewer = f"set MAX_JOBS to {jobs} (hy3_engine_env), or " if COMPILERS in needs and jobs > 0 else ""
        problems.append(
            f"The engine's {format_gib(claim)}, the host side of {format_gib(sum(needs.values()))}"
            f"{f' ({named})' if named else ''} and the reserve of {format_gib(reserve)} add up to {format_gib(total)}, "
            f"more than the {format_gib(mem_total)} of this node: {fewer}{way_out}"
        )
    if available is not None and engine.mem_fraction_static is None and claim > available:
        problems.append(
            f"The engine asks for {format_gib(claim)} at its start and {format_gib(available)} are available on this "
            f"node now: end what uses {format_gib(claim - available)} of it, or {way_out}"
        )
    return problems


def _lower(engine: Engine, share: float, mem_total: int, available: int | None) -> float:
    """The share that fits, in the engine's own base."""
    if engine.mem_fraction_static is None:
        return share
    base = mem_total if available is None else max(1, available)
    return max(0.0, math.floor((share * mem_total - engine.overhead) / base * 100) / 100)


def _pool_problems(engine: Engine, prediction: Prediction) -> list[str]:
    rank, room, tokens = engine.rank, prediction.kv_room, prediction.kv_tokens
    if rank is None or room is None or tokens is None:
        return []
    if tokens == 0:
        return [
            f"The weights of a rank are {format_gib(rank.weights)} and the engine's own need is "
            f"{format_gib(engine.overhead)}, which leaves {format_gib(room)} for the KV pool: use more nodes, a "
            "smaller checkpoint, or a larger share if the node has it"
        ]
    if engine.max_model_len is not None and engine.max_model_len > tokens:
        wanted = engine.max_model_len * rank.kv_bytes_per_token
        return [
            f"max_model_len {engine.max_model_len} needs {format_gib(wanted)} of KV a rank and {format_gib(room)} are "
            f"left for it, which hold {tokens} tokens: lower it to {prediction.largest_max_model_len}"
        ]
    return []


def _store_problems(store: ObjectStore, limits: Mapping[str, int]) -> list[str]:
    if store.cap not in limits:
        raise Hy3Error(f"The object store lives in {store.cap!r}, which is none of the caps: name one of them")
    if store.size <= limits[store.cap]:
        return []
    return [
        f"The object store of {format_gib(store.size)} lives inside the cap {store.cap} of "
        f"{format_gib(limits[store.cap])} and does not fit: make it smaller"
    ]
