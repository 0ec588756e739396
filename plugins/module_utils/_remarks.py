# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a log says that is no failure: an engine that waits, one that serves and is slow or drafts in vain, and why."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import Acceptance, Facts, read_acceptance
from ansible_collections.sparks.hy3.plugins.module_utils._failure import RECIPE, SGLANG_RECIPE
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import Line


class Remark(t.TypedDict):
    """What was seen, what to do about it if anything, where that is known from, and the line that says it."""

    rule: str
    cause: str
    fix: str
    source: str
    line: str


# (rule, line, what it means, what to do, source); the newest line of each counts.
LINE_REMARKS: tuple[tuple[str, re.Pattern[str], str, str, str], ...] = (
    (
        "overwritten",
        re.compile(r"Overwriting environment variable (?:NCCL_|GLOO_|VLLM_HOST)"),
        "vLLM copied the head's value of a variable over the worker's own, and each node has its own",
        "Keep it out of the driver's environment, or list it in ray_non_carry_over_env_vars.json",
        "vLLM's first Ray executor; field case B27",
    ),
    (
        "sockets",
        re.compile(r"Using network Socket|NET/Socket : Using|NET/IB : No device found"),
        "NCCL uses TCP sockets instead of RoCE, several times slower",
        "Compare NCCL_IB_HCA, NCCL_IB_DISABLE and the link with the node (doctor_hy3)",
        "NCCL; field case B26",
    ),
    (
        "nan-sanitized",
        re.compile(r"NaN detected in .*sanitized before sampling"),
        "The model computes NaN, which SGLang replaces before it samples: its answers are wrong",
        "Apply patch P4 on every node (tag patch)",
        SGLANG_RECIPE + "; SGLang 0.5.14 to 0.5.23, read",
    ),
    (
        "plasma-on-disk",
        re.compile(r"object store is using \S+ instead of /dev/shm"),
        "Ray's object store lies on a disk, because /dev/shm is too small or full",
        "Enlarge /dev/shm (in a container --shm-size), or remove what earlier engines left there",
        "Ray",
    ),
    (
        "import-hidden",
        re.compile(r"Ignore import error when loading \S*(?:hunyuan_v3|hy_v3)"),
        "The engine's Hy3 model file cannot be imported, which its registry hides",
        "Revert the patches of that file (sparks.hy3.engine_patch) or reinstall the engine",
        "model registries of SGLang and vLLM; field case B80",
    ),
)
# While it starts: a rank that waits for another says so, and it is no reason to restart anything.
WAIT_REMARKS: tuple[tuple[str, re.Pattern[str], str, str, str], ...] = (
    (
        "waits-for-rank",
        re.compile(r"No available shared memory broadcast block found in \d+ seconds"),
        "A rank waits for another one, which loads, compiles or hangs; a first start may be silent for 20 minutes",
        "Look at the progress of the other nodes (their Ray logs, worker-*.out) before anything is restarted",
        "vLLM shm_broadcast; field case B31",
    ),
    (
        "waits-for-gpus",
        re.compile(r"Waiting for creating a placement group|exceeds the total number of available"),
        "vLLM waits for GPUs that Ray does not have: a node has not joined, joined by another address, or is in use",
        "Compare `ray status` with the inventory's fabric addresses",
        "vLLM ray_utils; field case B28",
    ),
)
# (rule, mark of the last steps, seconds of silence, meaning, what to do, source): the first that holds.
STALLS: tuple[tuple[str, re.Pattern[str], float, str, str, str], ...] = (
    (
        "b12x-livelock",
        re.compile(r"B12X|b12x"),
        300,
        "The b12x backend was chosen and nothing was written since: with cutlass-dsl 4.5 it livelocks in its compiler",
        "Serve with moe_backend marlin",
        RECIPE,
    ),
    (
        "queue-address",
        re.compile(r"[Cc]ustom ?[Aa]ll-?[Rr]educe is disabled"),
        120,
        "SGLang's ranks found each other over NCCL and then went silent: its message queue advertises another address",
        "Set SGLANG_HOST_IP to the fabric address on every node",
        "field case B93",
    ),
    (
        "rendezvous-stall",
        re.compile(r"Init torch distributed begin|vLLM is using nccl|distributed_init_method=|Bootstrap ?: Using"),
        120,
        "The ranks have not found each other: one is missing, a firewall stands between them, or NCCL uses a wrong "
        "interface or GID index",
        "Look at the unit on every node, then compare interfaces and indexes (doctor_hy3)",
        RECIPE,
    ),
    (
        "load-stall",
        re.compile(r"shards:|Load weight begin|Starting to load model|Loading drafter model"),
        600,
        "The load of the weights has stopped: a rank is gone (Ray's memory monitor and the kernel kill without a word "
        "here), or the disk hangs",
        "Look at memory and kernel's log of every node, and that RAY_memory_monitor_refresh_ms is 0 for every raylet",
        "field case B30",
    ),
)
_LAST_LINES = 12
_COLD_SECONDS = 600
# Fewer drafted tokens than this tell nothing, and less than these shares of them tell that something is wrong, or that
# drafting does not pay.
_ENOUGH_DRAFTED, _NONE_ACCEPTED, _FEW_ACCEPTED = 200, 0.1, 0.3
_ACCEPTANCE_LINES, _ENOUGH_LINES = 20, 3
_READY = re.compile(r"Starting vLLM server on|Application startup complete|fired up and ready to roll")


def find_remarks(lines: t.Sequence[Line], facts: Facts, *, now: float, running: bool) -> list[Remark]:
    """What a person should know of a start that has not failed. ``now`` is in Unix seconds."""
    ready = facts["phase"] == "ready"
    rules = LINE_REMARKS if ready else (*LINE_REMARKS, *WAIT_REMARKS)
    found: list[Remark] = []
    for rule, pattern, cause, fix, source in rules:
        line = next((line.text for line in reversed(lines) if pattern.search(line.text)), None)
        if line is not None:
            found.append(Remark(rule=rule, cause=cause, fix=fix, source=source, line=line.strip()[:300]))
    found += _acceptance(lines)
    if running and ready:
        found += _cold(lines, now)
    elif running and facts["phase"] != "failed":
        found += _stall(lines, now)
    return found


def silence(lines: t.Sequence[Line], now: float) -> float | None:
    """Seconds since the last line with a time, None if none has one."""
    times = [line.time for line in lines if line.time is not None]
    return max(0.0, now - times[-1]) if times else None


def _acceptance(lines: t.Sequence[Line]) -> list[Remark]:
    seen: list[Acceptance] = []
    for line in reversed(lines):
        if len(seen) == _ACCEPTANCE_LINES:
            break
        one = read_acceptance(line.text)
        seen += [one] if one and one["rate"] is not None else []
    drafted = sum(one["drafted"] or 0 for one in seen)
    # SGLang does not count, and one line of its is one moment.
    if drafted < _ENOUGH_DRAFTED and (drafted or len(seen) < _ENOUGH_LINES):
        return []
    rate = sum(one["rate"] or 0.0 for one in seen) / len(seen)
    if rate >= _FEW_ACCEPTED:
        return []
    if rate < _NONE_ACCEPTED:
        cause = f"Almost no drafted token is accepted ({100 * rate:.0f} %): the drafter computes with a wrong weight"
        fix = "See that the patches of the drafter are applied on every node (tag patch: P4 and P6 of SGLang)"
    else:
        cause = f"Few drafted tokens are accepted ({100 * rate:.0f} %), so drafting may cost more than it saves"
        fix = "Draft one token, or measure without speculation (bench_hy3)"
    source = SGLANG_RECIPE + "; SGLang 0.5.23, run; field case B91"
    return [
        Remark(rule="acceptance", cause=cause, fix=fix, source=source, line=f"mean of {len(seen)} lines: {rate:.3f}")
    ]


def _cold(lines: t.Sequence[Line], now: float) -> list[Remark]:
    since = next((line.time for line in reversed(lines) if _READY.search(line.text)), None)
    if since is None or not 0 <= now - since < _COLD_SECONDS:
        return []
    return [
        Remark(
            rule="cold",
            cause="It has been ready for less than ten minutes: first answers are slow, as weights come from disk",
            fix="Ask two throwaway questions before anything is measured; it is no hang",
            source=RECIPE,
            line=f"ready since {now - since:.0f} s",
        )
    ]


def _stall(lines: t.Sequence[Line], now: float) -> list[Remark]:
    quiet = silence(lines, now)
    last = [line.text for line in lines[-_LAST_LINES:]]
    for rule, pattern, seconds, cause, fix, source in STALLS:
        line = next((text for text in reversed(last) if pattern.search(text)), None)
        if quiet is not None and quiet >= seconds and line is not None:
            words = f"{cause} ({quiet:.0f} s)"
            return [Remark(rule=rule, cause=words, fix=fix, source=source, line=line.strip()[:300])]
    return []
