# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Release the page cache of files without root, and measure what was really released."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import stat
import typing as t
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Bytes of a file that are mapped at once to ask for residency; the answer takes one byte a page, 64 KiB in all.
WINDOW = 256 * 1024**2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value
# mincore(2): the lowest bit of a page's byte says resident, the others are undefined.
_LOWEST_BIT = bytes(value & 1 for value in range(256))


class Skipped(t.NamedTuple):
    """A path that was left alone, and why."""

    path: str
    reason: str


@dataclass
class Outcome:
    """Bytes in the page cache before and after, summed over ``files``; ``kept`` are those not wholly released."""

    resident_before: int = 0
    resident_after: int = 0
    files: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def released(self) -> int:
        return max(0, self.resident_before - self.resident_after)


def resident(descriptor: int) -> int:
    """Return how many bytes of an open file are in the page cache, in whole pages."""
    size = os.fstat(descriptor).st_size
    return sum(
        _resident_pages(descriptor, start, min(WINDOW, size - start)) * mmap.PAGESIZE
        for start in range(0, size, WINDOW)
    )


def _resident_pages(descriptor: int, start: int, length: int) -> int:
    # Python's own mmap gives no address of a read-only mapping, hence libc's. No page is touched, so none is read.
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _libc.mincore(address, length, pages):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return pages.raw.translate(_LOWEST_BIT).count(1)
    finally:
        _libc.munmap(address, length)


def release(descriptor: int) -> None:
    """Drop an open file from the page cache; dirty pages are written first, for the kernel keeps those."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def find_paths(top: str) -> Iterator[str | Skipped]:
    """Yield what is no directory at and below a path, and the directories that are not entered.

    A link to a directory is followed only if it is ``top``: one that leads upwards would never end.
    """
    if not os.path.isdir(top):
        yield top
        return
    skipped: list[Skipped] = []

    def note(exc: OSError) -> None:
        skipped.append(_skip(exc.filename, exc))

    for folder, subfolders, names in os.walk(top, onerror=note):
        subfolders.sort()
        inside = [os.path.join(folder, name) for name in subfolders]
        skipped += [Skipped(path, "Link to a directory") for path in inside if os.path.islink(path)]
        yield from (os.path.join(folder, name) for name in sorted(names))
    yield from skipped


def purge(paths: Iterable[str], *, measure_only: bool = False) -> Outcome:
    """Release all files at and below the paths, each inode once, one at a time.

    Args:
        paths: Files and directories; a link to a file stands for the file, as in a Hugging Face cache.
        measure_only: Change nothing; ``resident_after`` is what it was before.
    """
    outcome = Outcome()
    seen: set[tuple[int, int]] = set()
    for path in itertools.chain.from_iterable(map(find_paths, paths)):
        if isinstance(path, Skipped):
            outcome.skipped.append(path)
            continue
        try:
            _purge_file(path, outcome, seen, measure_only=measure_only)
        except OSError as exc:
            outcome.skipped.append(_skip(path, exc))
    return outcome


def _purge_file(path: str, outcome: Outcome, seen: set[tuple[int, int]], *, measure_only: bool) -> None:
    # A FIFO must not be opened at all: its writer would take us for the reader it waits for.
    if not stat.S_ISREG(os.stat(path).st_mode):
        outcome.skipped.append(Skipped(path, "Not a regular file"))
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) in seen:
            return
        seen.add((found.st_dev, found.st_ino))
        if found.st_uid != os.geteuid() and not os.access(path, os.W_OK, effective_ids=True):
            # mincore(2) then calls every page resident, whatever it is.
            outcome.skipped.append(
                Skipped(path, "Neither owned nor writable, so the kernel does not tell its residency")
            )
            return
        before = resident(descriptor)
        if not measure_only:
            release(descriptor)
        after = before if measure_only else resident(descriptor)
    finally:
        os.close(descriptor)
    outcome.files += 1
    outcome.resident_before += before
    outcome.resident_after += after
    if after and not measure_only:
        outcome.kept.append(os.path.realpath(path))


def mapped_by(files: Iterable[str], *, proc: str = "/proc") -> dict[int, str]:
    """Return {pid: name} of the readable processes that map one of the files: the kernel keeps mapped pages."""
    wanted = set(files)
    found = {}
    for process in Path(proc).iterdir() if wanted else ():
        if not process.name.isdecimal():
            continue
        try:
            with (process / "maps").open(encoding="utf-8", errors="surrogateescape") as lines:
                if any(_mapped_path(line) in wanted for line in lines):
                    found[int(process.name)] = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def _mapped_path(line: str) -> str:
    # address, permissions, offset, device, inode, path; the path is missing for anonymous memory.
    return "".join(line.rstrip("\n").split(maxsplit=5)[5:])


def _skip(path: str, exc: OSError) -> Skipped:
    return Skipped(path, exc.strerror or str(exc))
