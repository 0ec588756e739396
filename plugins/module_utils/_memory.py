# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What the kernel says about memory: meminfo, the limit that really binds a process, its resource limits.

A unit's ``MemoryMax`` may be accepted and not enforced, so a limit is read back, never assumed. The file imports
nothing but the standard library, so that it can run on a node by itself.
"""

from __future__ import annotations

import re
import typing as t
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

GIB = 1024**3
# systemd.resource-control(5): suffixes are base 1024.
UNITS = {"": 1, "B": 1, "K": 1024, "M": 1024**2, "G": GIB, "T": 1024**4, "P": 1024**5, "E": 1024**6}
# cgroup v1 has no word for "no limit": it shows the largest multiple of the page size, which is up to 64 KiB on arm64.
V1_UNLIMITED = 2**63 - 64 * 1024


class MemoryInputError(ValueError):
    """A size or file that cannot be read, said in one sentence: the value found, the rule it breaks, the way out."""


class MemoryLimit(t.NamedTuple):
    """The limit that binds a process, in bytes (None: none does), and the file that sets it (empty: none does)."""

    limit: int | None
    source: str


class Owner(t.NamedTuple):
    """A process with memory on the GPU: its name, and how much in MiB (None: the driver does not say)."""

    pid: int
    name: str
    mib: int | None


def parse_meminfo(text: str) -> dict[str, int]:
    """Return ``/proc/meminfo`` by name, in bytes; the few rows without a unit are plain counts."""
    found = {}
    for name, value, unit in re.findall(r"^([^:\n]+):[ \t]*([0-9]{1,20})(?: (kB))?$", text, re.MULTILINE):
        found[name] = int(value) * (1024 if unit else 1)
    for name in ("MemTotal", "MemAvailable"):
        if name not in found:
            raise MemoryInputError(f"The meminfo text has no {name} line: give the kernel's /proc/meminfo")
    if found["MemTotal"] < 1:
        raise MemoryInputError("The meminfo text has a MemTotal of 0: give the kernel's own /proc/meminfo")
    return found


def parse_size(text: str | None, *, mem_total: int | None = None) -> int | None:
    """Return bytes as systemd reads them (``104G`` is 104 GiB), or None for no limit: ``infinity``, or not set.

    A share such as ``50%`` is one of ``mem_total``, in bytes; without that it is refused.
    """
    size = "infinity" if text is None else text.strip()
    if size == "infinity":
        return None
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)([BKMGTPE%]?)", size)
    if match is None:
        raise MemoryInputError(
            f"Size {text!r} is not a number with B, K, M, G, T, P or E (base 1024): write it as in 104G"
        )
    if match[2] != "%":
        return int(Decimal(match[1]) * UNITS[match[2]])
    if mem_total is None:
        raise MemoryInputError(
            f"Size {text!r} is a share, which differs from node to node: write it in bytes, as in 104G"
        )
    if Decimal(match[1]) > 100:
        raise MemoryInputError(f"Size {text!r} is more than the whole memory: write up to 100%, or bytes as in 104G")
    return int(Decimal(match[1]) * mem_total / 100)


def format_gib(size: int) -> str:
    """Write bytes as GiB with two decimals."""
    return f"{size / GIB:.2f} GiB"


def parse_limits(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Return ``/proc/PID/limits`` as {name: (soft, hard)} in the kernel's units; None is ``unlimited``."""
    rows = re.findall(r"^(Max .+?)[ \t]{2,}([0-9]{1,20}|unlimited)[ \t]+([0-9]{1,20}|unlimited)\b", text, re.MULTILINE)
    return {name: (_number(soft), _number(hard)) for name, soft, hard in rows}


def parse_cgroups(text: str) -> dict[str, str]:
    """Return ``/proc/PID/cgroup`` as {controller: path}; the unified hierarchy (``0::``) has the empty name."""
    found = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3:
            raise MemoryInputError(f"The cgroup line {line!r} is not ID:CONTROLLERS:PATH: give /proc/PID/cgroup")
        for controller in fields[1].split(","):
            found[controller] = fields[2]
    return found


def memory_limit(pid: int | str, *, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> MemoryLimit:
    """Return the smallest memory limit on the way from a process's cgroup up to the root.

    Args:
        pid: Process id, or ``self``.
        proc: Where procfs is mounted.
        cgroup: Where the cgroup hierarchies are mounted (unified, v1, or hybrid).

    Raises:
        MemoryInputError: The process is gone or cannot be read.
    """
    try:
        paths = parse_cgroups(Path(proc, str(pid), "cgroup").read_text(encoding="utf-8", errors="replace"))
    except OSError as exc:
        raise MemoryInputError(
            f"Cannot read the cgroup of process {pid} ({exc.strerror}): is it still running?"
        ) from exc
    # Of equal limits the first one names the file that an administrator can change.
    found = min(_limits_on_the_way(paths, Path(cgroup)), default=None, key=lambda pair: pair[0])
    return MemoryLimit(None, "") if found is None else MemoryLimit(*found)


def swap_limit(pid: int | str, *, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return how many bytes of a process's memory may be swapped out, or None where no limit is enforced.

    cgroup v2 has that limit; v1 has one on memory and swap together, and only where the kernel accounts for swap, so
    the memory limit is taken off it. A node without any swap enforces 0. Arguments and errors: :func:`memory_limit`.
    """
    try:
        paths = parse_cgroups(Path(proc, str(pid), "cgroup").read_text(encoding="utf-8", errors="replace"))
    except OSError as exc:
        raise MemoryInputError(
            f"Cannot read the cgroup of process {pid} ({exc.strerror}): is it still running?"
        ) from exc
    if re.search(r"^SwapTotal:\s+0 kB$", _read(Path(proc, "meminfo")), re.MULTILINE):
        return 0
    base, parts = _group(paths, Path(cgroup))
    name = "memory.memsw.limit_in_bytes" if "memory" in paths else "memory.swap.max"
    found = [_bytes(_read(base.joinpath(*parts[:depth], name))) for depth in range(len(parts), -1, -1)]
    limits = [limit for limit in found if limit is not None]
    if not limits:
        return None
    if "memory" not in paths:
        return min(limits)
    memory = memory_limit(pid, proc=proc, cgroup=cgroup).limit
    return min(limits) if memory is None else max(0, min(limits) - memory)


def is_delegated(pid: int | str, unit: str, *, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> bool:
    """Return whether a unit's process lives in a control group of the unit's own that has the memory controller.

    Without, systemd accepts a limit and the kernel never hears of it. A process that is gone has none.
    """
    own = _own_file(pid, unit, "memory.max", v1="memory.limit_in_bytes", proc=proc, cgroup=cgroup)
    return own is not None and own.exists()


def parse_owners(text: str) -> list[Owner]:
    """Return ``nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv,noheader,nounits``.

    Per-process figures work on a GB10; any other reads ``[N/A]`` there, and a line that is none is left out.
    """
    rows = re.findall(r"^\s*(\d+)\s*,\s*(.*?)\s*,\s*([^,\n]*?)\s*$", text, re.MULTILINE)
    return [Owner(int(pid), name, int(mib) if re.fullmatch(r"[0-9]{1,20}", mib) else None) for pid, name, mib in rows]


def oom_kills(pid: int | str, unit: str, *, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return how often the kernel has killed in a unit's control group, or None where no counter tells.

    systemd makes the group anew for each start, so that the count is that of the current one.
    """
    own = _own_file(pid, unit, "memory.events", v1="memory.oom_control", proc=proc, cgroup=cgroup)
    match = re.search(r"^oom_kill ([0-9]{1,20})$", _read(own), re.MULTILINE) if own else None
    return int(match[1]) if match else None


def memory_charged(pid: int | str, unit: str, *, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return how many bytes are charged to a unit's control group, or None where that is not counted."""
    own = _own_file(pid, unit, "memory.current", v1="memory.usage_in_bytes", proc=proc, cgroup=cgroup)
    return _bytes(_read(own)) if own else None


def _own_file(pid: int | str, unit: str, name: str, *, v1: str, proc: str, cgroup: str) -> Path | None:
    """A file of the control group of a unit or scope that a process is in, None where it is in none of that name."""
    try:
        paths = parse_cgroups(Path(proc, str(pid), "cgroup").read_text(encoding="utf-8", errors="replace"))
    except (OSError, MemoryInputError):
        return None
    base, parts = _group(paths, Path(cgroup))
    if unit not in parts:
        return None
    return base.joinpath(*parts[: parts.index(unit) + 1], v1 if "memory" in paths else name)


def _limits_on_the_way(paths: dict[str, str], root: Path) -> Iterator[tuple[int, str]]:
    base, parts = _group(paths, root)
    name = "memory.limit_in_bytes" if "memory" in paths else "memory.max"
    for depth in range(len(parts), -1, -1):
        file = base.joinpath(*parts[:depth], name)
        limit = _bytes(_read(file))
        if limit is not None:
            yield limit, str(file)
    # v1 also tells of ancestors that a cgroup namespace hides.
    stat = base.joinpath(*parts, "memory.stat")
    match = re.search(r"^hierarchical_memory_limit (\d+)$", _read(stat), re.MULTILINE)
    limit = _bytes(match[1]) if match else None
    if limit is not None:
        yield limit, str(stat)


def _group(paths: dict[str, str], root: Path) -> tuple[Path, list[str]]:
    """Where the hierarchy of the memory controller is mounted, and the steps from there to the process's own group."""
    # A controller lives in one hierarchy only: where v1 has memory, the unified one has no memory.max to read.
    base, path = (root / "memory", paths["memory"]) if "memory" in paths else (root, paths.get("", "/"))
    # A path that leaves the root (/../x) belongs to a group outside of this namespace, which has no files here.
    return base, [part for part in path.split("/") if part not in ("", "..", ".") and "\0" not in part]


def _bytes(text: str) -> int | None:
    number = text.strip()
    if not re.fullmatch(r"[0-9]{1,20}", number):
        return None
    return int(number) if int(number) < V1_UNLIMITED else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except (OSError, ValueError):  # the root, or a level without the controller, or a name that is none
        return ""


def _number(text: str) -> int | None:
    return None if text == "unlimited" else int(text)
