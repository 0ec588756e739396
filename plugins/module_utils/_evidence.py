# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a node has besides the journal that tells how an engine ended: logs in files, memory, swap, pressure, boot."""

from __future__ import annotations

import re
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._engine_processes import LOG_FILES, read_log
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import Line, timed
from ansible_collections.sparks.hy3.plugins.module_utils._memory import parse_meminfo
from ansible_collections.sparks.hy3.plugins.module_utils._units import boot_time

# Of a directory of logs: those of Ray's workers and daemons, and those that NCCL_DEBUG_FILE names.
_PATTERNS = ("worker-*.out", "worker-*.err", "raylet.out", "raylet.err", "gcs_server.err", "nccl.*.log")
# Ray names the log of a worker by worker, job and process; an idle one has a job of f only.
_JOB = re.compile(r"worker-[0-9a-f]+-([0-9a-f]{8})-\d+\.(?:out|err)")
_IDLE = "ffffffff"
_FULL = re.compile(r"^full avg10=[\d.]+ avg60=([\d.]+)", re.MULTILINE)


class Memory(t.TypedDict):
    """Bytes; ``pressure`` is the percent of the last minute in which nothing could run for want of memory, or None."""

    total: int
    available: int
    swap_total: int
    swap_free: int
    pressure: float | None


def stalled_share(text: str) -> float | None:
    """C(full avg60) of /proc/pressure/memory in percent, None where the kernel does not tell."""
    match = _FULL.search(text)
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def read_memory(proc: Path = Path("/proc")) -> Memory:
    """The memory of this node."""
    meminfo = parse_meminfo((proc / "meminfo").read_text(encoding="ascii"))
    try:
        pressure = stalled_share((proc / "pressure/memory").read_text(encoding="ascii"))
    except (OSError, ValueError):  # a kernel without PSI
        pressure = None
    return Memory(
        total=meminfo["MemTotal"],
        available=meminfo["MemAvailable"],
        swap_total=meminfo.get("SwapTotal", 0),
        swap_free=meminfo.get("SwapFree", 0),
        pressure=pressure,
    )


def read_boot(proc: Path = Path("/proc")) -> int | None:
    """When this node was booted, in Unix seconds, None where that cannot be read."""
    try:
        return boot_time((proc / "stat").read_text(encoding="ascii", errors="replace")) or None
    except OSError:
        return None


def logs_since(places: t.Iterable[str], since: float | None, now: float) -> list[list[Line]]:
    """The lines of each log file at these places that was written to since then (Unix seconds).

    A place is a file or a directory of logs, of which Ray's workers count with the newest job only: those of an
    earlier start may lie beside them. What is not there or cannot be read is left out.
    """
    files = [path for place in places for path in _files(Path(place), since)]
    return [lines for path in files[:LOG_FILES] if (lines := _dated(timed(read_log(path), now=now), _age(path)))]


def _dated(lines: list[Line], changed: float | None) -> list[Line]:
    # A file whose lines have no times is at least no younger than its last change.
    return [line if line.time is not None else line._replace(time=changed) for line in lines]


def _files(place: Path, since: float | None) -> list[Path]:
    try:
        found = [path for pattern in _PATTERNS for path in place.glob(pattern)] if place.is_dir() else [place]
    except (OSError, ValueError):
        return []
    ages = {path: age for path in found if (age := _age(path)) is not None and (since is None or age >= since)}
    jobs = {path: match[1] for path in ages if (match := _JOB.fullmatch(path.name)) and match[1] != _IDLE}
    newest = max(jobs, key=lambda path: ages[path], default=None)
    kept = [path for path in ages if path not in jobs or jobs[path] == jobs.get(newest or path)]
    return sorted(kept, key=lambda path: ages[path], reverse=True)


def _age(path: Path) -> float | None:
    try:
        return path.stat().st_mtime if path.is_file() else None
    except (OSError, ValueError):
        return None
