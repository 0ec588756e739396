# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What the end of a systemd unit says, and the memory of a node, where no log line does."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._failure import (
    CONSEQUENCE,
    RECIPE,
    ROOT,
    SUSPECT,
    Failure,
    made,
)
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB, format_gib

Facts = t.Mapping[str, t.Any]

_SERVE = "Run serve_hy3 again"
_VENV = "See that the venv is there (tag engine), and run serve_hy3 again"
_MEMORY = "Lower max_model_len, gpu_memory_utilization or hy3_memory, or what else runs on that node"

# Exit statuses of systemd.exec(5): what it could not do before the program began.
_EXITS: dict[int, tuple[str, str]] = {
    126: ("its program may not be run", _VENV),
    127: ("a program that it calls is not there", _VENV),
    200: ("its working directory is not there", _SERVE),
    203: ("its program is not there or cannot be run", _VENV),
    205: ("its limits cannot be set", "See LimitMEMLOCK of the unit and the limits of a container that it runs in"),
    209: ("its log cannot be opened", "See the disk that its log lies on"),
    216: ("its group does not exist", "Create hy3_user on that node, and run serve_hy3 again"),
    217: ("its user does not exist", "Create hy3_user on that node, and run serve_hy3 again"),
    219: ("its control group cannot be set up", "Reboot the node, and see that cgroup v2 is in use"),
    226: ("its directories cannot be set up", _SERVE),
    233: ("its runtime directory cannot be made", "See that /run is not full"),
    238: ("its state directory cannot be made", "See that /var is not full or read-only"),
}
_SIGNALS: dict[int, tuple[str, str]] = {
    4: ("ran an instruction that this processor does not have", "Install the engine's wheel for this machine"),
    6: ("ended itself (SIGABRT), as NCCL's watchdog does", "Read the log of every node for the first error"),
    7: ("read memory that is not there (SIGBUS): a full /dev/shm or a shard that shrank", "Look at both"),
    9: (
        "was killed (SIGKILL): by the kernel or a guard of memory, or by hand",
        "Look at the memory and the kernel's log of that node",
    ),
    11: ("crashed (SIGSEGV)", "Compare the packages of the nodes, and reinstall the engine where they differ"),
}
_RESULTS: dict[str, tuple[str, str, str]] = {
    "oom-kill": ("lost a process to the kernel, which killed it for memory", _MEMORY, ROOT),
    "start-limit-hit": (
        "was started too often in a short time, so systemd gave up",
        "Cure what ended it first; serve_hy3 starts it again",
        CONSEQUENCE,
    ),
    "timeout": (
        "did not start or stop in time",
        "Read the last lines of its log: it waits for the fabric or for the head",
        SUSPECT,
    ),
    "watchdog": ("gave no sign of life in time", "Look at the memory of that node", SUSPECT),
    "resources": (
        "could not be started: a file that it needs is not there, or systemd lacks memory",
        _SERVE,
        ROOT,
    ),
}

# Less than this is what a node has that begins to swap, with what the kernel keeps for itself.
_LEAST = 2 * GIB
# Of /proc/pressure/memory: percent of the last minute in which nothing could run for want of memory.
_PRESSURE = 20.0


def unit_failure(name: str, unit: Facts) -> Failure | None:
    """What systemd says of how a unit ended, None where that is nothing but an exit status of the program itself.

    ``unit`` is one of ``units`` of engine_status.
    """
    result, status = unit.get("result") or "success", unit.get("exec_main_status") or 0
    line = f"{name}: Result={result}, ExecMainStatus={status}, {unit.get('active_state')}"
    kills = unit.get("oom_kills") or 0
    if kills:
        times = "a process" if kills == 1 else f"{kills} processes"
        cause = f"The kernel has killed {times} of {name} for memory since its start"
        return made("unit-oom-kill", ROOT, cause, _MEMORY, source="memory.events of its control group", line=line)
    if result in _RESULTS:
        what, fix, kind = _RESULTS[result]
        return made(f"unit-{result}", kind, f"{name} {what}", fix, source="systemd", line=line)
    if result == "exit-code" and status in _EXITS:
        what, fix = _EXITS[status]
        cause = f"{name} could not be started: {what}"
        return made("unit-exit", ROOT, cause, fix, source="systemd.exec(5)", line=line)
    # A shell's status of a program that a signal ended is 128 and the signal.
    signal = status if result in ("signal", "core-dump") else status - 128 if result == "exit-code" else 0
    if signal in _SIGNALS:
        what, fix = _SIGNALS[signal]
        return made("unit-signal", SUSPECT, f"{name} {what}", fix, source="systemd", line=line)
    return None


def memory_failure(memory: Facts) -> Failure | None:
    """The memory of a node that is short of it now, None for one that is not.

    ``memory`` has ``total`` and ``available`` in bytes, and as far as known ``swap_total``, ``swap_free`` (bytes) and
    ``pressure`` (percent of the last minute).
    """
    total, available = memory.get("total"), memory.get("available")
    if not total or available is None:
        return None
    swap = (memory.get("swap_total") or 0) - (memory.get("swap_free") or 0)
    pressure = memory.get("pressure") or 0.0
    words = f"{format_gib(available)} of {format_gib(total)} are available"
    words += f", {format_gib(swap)} of swap are in use" if swap > 0 else ""
    words += f", and {pressure:.0f} % of the last minute nothing could run for want of memory" if pressure else ""
    if available >= _LEAST and pressure < _PRESSURE and (swap < GIB or available >= 2 * _LEAST):
        return None
    cause = f"The node is short of memory: {words}"
    return made("node-memory", SUSPECT, cause, _MEMORY, source=RECIPE, line=words)
