# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The arithmetic of a node's memory: do the caps, the device budget and the reserve fit into it?

CPU and GPU share one memory on a DGX Spark. What CUDA allocates there is, as far as is known, not charged to a cgroup,
so that caps bound the host side only and the device budget is a sum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import format_gib


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


@dataclass(frozen=True)
class Verdict:
    """Sums in bytes; ``headroom`` is negative if the caps do not fit, ``device_budget`` None without an engine."""

    caps_total: int
    headroom: int
    device_budget: int | None
    problems: list[str]


def device_budget(mem_total: int, utilization: float) -> int:
    """Return the bytes vLLM claims: it rounds ``total x gpu_memory_utilization`` up."""
    if not 0 < utilization <= 1:
        raise Hy3Error(
            f"gpu_memory_utilization is {utilization}, a share of the node's memory: choose one above 0, up to 1"
        )
    return math.ceil(mem_total * utilization)


def judge(
    *,
    mem_total: int,
    reserve: int,
    caps: Sequence[Cap],
    gpu_memory_utilization: float | None = None,
    host_side: int = 0,
    object_store: ObjectStore | None = None,
) -> Verdict:
    """Check the sums of one node.

    Args:
        mem_total: MemTotal of the node, in bytes.
        reserve: Bytes left to the operating system.
        caps: The limits of all units on the node; they may all be reached at once.
        gpu_memory_utilization: The engine's share of MemTotal, or None if no engine computes here.
        host_side: Bytes that the engine's processes need beside the device budget.
        object_store: Size of Ray's object store and the cap it lives in.

    Raises:
        Hy3Error: Two caps have one name, the object store names none of them, or the share is no share.
    """
    limits = {cap.name: cap.limit for cap in caps}
    if len(limits) < len(caps):
        raise Hy3Error(f"The caps {', '.join(cap.name for cap in caps)} repeat a name: give each unit one cap")
    caps_total = sum(limits.values())
    headroom = mem_total - reserve - caps_total
    budget = None if gpu_memory_utilization is None else device_budget(mem_total, gpu_memory_utilization)
    problems = []
    if headroom < 0:
        named = " + ".join(f"{name} {format_gib(limit)}" for name, limit in limits.items())
        problems.append(
            f"The caps ({named}) and the reserve of {format_gib(reserve)} add up to "
            f"{format_gib(caps_total + reserve)}, more than the {format_gib(mem_total)} of this node: "
            f"lower the caps by {format_gib(-headroom)} in all"
        )
    if budget is not None and budget + host_side + reserve > mem_total:
        problems.append(_device_problem(mem_total=mem_total, budget=budget, host_side=host_side, reserve=reserve))
    if object_store is not None:
        if object_store.cap not in limits:
            raise Hy3Error(
                f"The object store lives in {object_store.cap!r}, which is none of the caps: name one of them"
            )
        if object_store.size > limits[object_store.cap]:
            problems.append(
                f"The object store of {format_gib(object_store.size)} lives inside the cap {object_store.cap} of "
                f"{format_gib(limits[object_store.cap])} and does not fit: make it smaller"
            )
    return Verdict(caps_total, headroom, budget, problems)


def _device_problem(*, mem_total: int, budget: int, host_side: int, reserve: int) -> str:
    # Rounded down to the two decimals people write, so that the advice itself fits.
    share = math.floor((mem_total - host_side - reserve) / mem_total * 100) / 100
    way_out = f"lower gpu_memory_utilization to {share:.2f}" if share > 0 else "lower the host side or the reserve"
    return (
        f"The device budget of {format_gib(budget)}, the host side of {format_gib(host_side)} and the reserve of "
        f"{format_gib(reserve)} add up to {format_gib(budget + host_side + reserve)}, more than the "
        f"{format_gib(mem_total)} of this node: {way_out}"
    )
