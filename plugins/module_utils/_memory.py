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
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": GIB, "T": 1024**4}
# cgroup v1 has no word for "no limit": it shows the largest multiple of the page size, which is up to 64 KiB on arm64.
V1_UNLIMITED = 2**63 - 64 * 1024


class MemoryInputError(ValueError):
    """A size or file that cannot be read, said in one sentence: the value found, the rule it breaks, the way out."""


class MemoryLimit(t.NamedTuple):
    """The limit that binds a process, in bytes (None: none does), and the file that sets it (empty: none does)."""

    limit: int | None
    source: str


def parse_meminfo(text: str) -> dict[str, int]:
    """Return ``/proc/meminfo`` by name, in bytes; the few rows without a unit are plain counts."""
    found = {}
    for name, value, unit in re.findall(r"^([^:\n]+):\s*(\d+)(?: (kB))?$", text, re.MULTILINE):
        found[name] = int(value) * (1024 if unit else 1)
    for name in ("MemTotal", "MemAvailable"):
        if name not in found:
            raise MemoryInputError(f"The meminfo text has no {name} line: give the kernel's /proc/meminfo")
    return found


def parse_size(text: str) -> int | None:
    """Return bytes as systemd reads them (``104G`` is 104 GiB), or None for ``infinity``."""
    size = text.strip()
    if size == "infinity":
        return None
    if size.endswith("%"):
        raise MemoryInputError(
            f"Size {text!r} is a share, which differs from node to node: write it in bytes, as in 104G"
        )
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)", size)
    if match is None:
        raise MemoryInputError(f"Size {text!r} is not a number with K, M, G or T (base 1024): write it as in 104G")
    return int(Decimal(match[1]) * UNITS[match[2]])


def format_gib(size: int) -> str:
    """Write bytes as GiB with two decimals."""
    return f"{size / GIB:.2f} GiB"


def parse_limits(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Return ``/proc/PID/limits`` as {name: (soft, hard)} in the kernel's units; None is ``unlimited``."""
    rows = re.findall(r"^(Max .+?)\s{2,}(\d+|unlimited)\s+(\d+|unlimited)\b", text, re.MULTILINE)
    return {name: (_number(soft), _number(hard)) for name, soft, hard in rows}


def parse_cgroups(text: str) -> dict[str, str]:
    """Return ``/proc/PID/cgroup`` as {controller: path}; the unified hierarchy (``0::``) has the empty name."""
    found = {}
    for line in text.splitlines():
        _hierarchy, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
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
        paths = parse_cgroups(Path(proc, str(pid), "cgroup").read_text(encoding="utf-8"))
    except OSError as exc:
        raise MemoryInputError(
            f"Cannot read the cgroup of process {pid} ({exc.strerror}): is it still running?"
        ) from exc
    # Of equal limits the first one names the file that an administrator can change.
    found = min(_limits_on_the_way(paths, Path(cgroup)), default=None, key=lambda pair: pair[0])
    return MemoryLimit(None, "") if found is None else MemoryLimit(*found)


def _limits_on_the_way(paths: dict[str, str], root: Path) -> Iterator[tuple[int, str]]:
    # A controller lives in one hierarchy only: where v1 has memory, the unified one has no memory.max to read.
    if "memory" in paths:
        base, path, name = root / "memory", paths["memory"], "memory.limit_in_bytes"
    else:
        base, path, name = root, paths.get("", "/"), "memory.max"
    parts = path.strip("/").split("/")
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


def _bytes(text: str) -> int | None:
    number = text.strip()
    return int(number) if number.isdecimal() and int(number) < V1_UNLIMITED else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # the root, or a level without the controller
        return ""


def _number(text: str) -> int | None:
    return None if text == "unlimited" else int(text)
