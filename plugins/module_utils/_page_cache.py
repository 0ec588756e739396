# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Release the page cache of files without root, and measure what was really released.

The file is also a node-side program: a role copies it to the node, where ``page_cache.py PATH`` runs before each start
of an engine. So it imports nothing but the standard library.
"""
# pylint: disable=ansible-bad-function  # a node runs this file as a program, without Ansible

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import stat
import sys
import typing as t
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Bytes of a file that are mapped at once to ask for residency; the answer takes one byte a page, 64 KiB in all.
WINDOW = 256 * 1024**2
# cachestat(2), Linux 6.5: the same number on x86-64 and arm64. It counts large folios as one, mincore(2) each page.
_SYS_CACHESTAT = 451
# What a drop of all clean caches is in Documentation/admin-guide/sysctl/vm.rst: page cache, dentries and inodes.
_DROP_ALL = "3"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value
# mincore(2): the lowest bit of a page's byte says resident, the others are undefined.
_LOWEST_BIT = bytes(value & 1 for value in range(256))


class Skipped(t.NamedTuple):
    """A path that has nothing to release (absent, no regular file), and why."""

    path: str
    reason: str


class Failed(t.NamedTuple):
    """A path that could not be treated; ``errno`` is the error's name, such as EACCES."""

    path: str
    errno: str
    reason: str


class Kept(t.NamedTuple):
    """A file of which this many bytes are still in the page cache; ``path`` has no links in it."""

    path: str
    bytes: int


class Mapper(t.NamedTuple):
    """A process that maps files, and which."""

    pid: int
    name: str
    paths: list[str]


@dataclass
class Outcome:
    """Bytes in the page cache before and after, summed over ``files``; ``kept`` are those not wholly released."""

    resident_before: int = 0
    resident_after: int = 0
    files: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    @property
    def released(self) -> int:
        return max(0, self.resident_before - self.resident_after)


def resident(descriptor: int) -> int:
    """Return how many bytes of an open file are in the page cache, in whole pages."""
    try:
        return _count_cached(descriptor) * mmap.PAGESIZE
    except OSError:  # a kernel before 6.5, a seccomp filter or hugetlbfs
        return resident_by_mincore(descriptor)


def _count_cached(descriptor: int) -> int:
    # struct cachestat_range {offset, length}, where length 0 means to the end; struct cachestat begins with nr_cache.
    whole, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if _libc.syscall(_SYS_CACHESTAT, descriptor, whole, counts, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(counts[0])


def resident_by_mincore(descriptor: int) -> int:
    """Return the same as ``resident``, on any Linux, some twenty times slower where folios are large."""
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


def release(descriptor: int) -> int:
    """Drop an open file from the page cache and return how many bytes stay.

    The advice leaves dirty pages, so it is repeated after ``fsync``. That is not called where nothing stays, for it
    flushes the disk's own cache, a millisecond and more for each file of a large tree.
    """
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    stays = resident(descriptor)
    if stays:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        stays = resident(descriptor)
    return stays


def find_paths(top: str) -> Iterator[str | Skipped | Failed]:
    """Yield what is no directory at and below a path, and the directories that are not entered.

    A link to a directory is followed only if it is ``top``: one that leads upwards would never end.
    """
    if not os.path.isdir(top):
        yield top
        return
    # No recursion, for a tree may be deeper than Python's stack.
    pending = [top]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as exc:
            yield _left_alone(folder, exc)
            continue
        pending += [entry.path for entry in reversed(entries) if entry.is_dir(follow_symlinks=False)]
        for entry in entries:
            if entry.is_symlink() and os.path.isdir(entry.path):
                yield Skipped(entry.path, "Link to a directory")
            elif not entry.is_dir(follow_symlinks=False):
                yield entry.path


def purge(paths: Iterable[str], *, measure_only: bool = False) -> Outcome:
    """Release all files at and below the paths, each inode once, one at a time.

    Args:
        paths: Files and directories; a link to a file stands for the file, as in a Hugging Face cache.
        measure_only: Change nothing; ``resident_after`` is what it was before, and ``kept`` what is resident.
    """
    outcome = Outcome()
    seen: set[tuple[int, int]] = set()
    for path in itertools.chain.from_iterable(map(find_paths, paths)):
        left: Skipped | Failed | None
        if not isinstance(path, str):
            left = path
        else:
            try:
                left = _purge_file(path, outcome, seen, measure_only=measure_only)
            except OSError as exc:
                left = _left_alone(path, exc)
            except ValueError:
                left = Failed(path, "EINVAL", "A path cannot contain a NUL or an unpaired surrogate")
        if isinstance(left, Skipped):
            outcome.skipped.append(left)
        elif isinstance(left, Failed):
            outcome.failed.append(left)
    return outcome


def _purge_file(
    path: str, outcome: Outcome, seen: set[tuple[int, int]], *, measure_only: bool
) -> Skipped | Failed | None:
    # A FIFO must not be opened at all: its writer would take us for the reader it waits for.
    if not stat.S_ISREG(os.stat(path).st_mode):
        return Skipped(path, "Not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) in seen:
            return None
        seen.add((found.st_dev, found.st_ino))
        if os.geteuid() not in (0, found.st_uid) and not os.access(path, os.W_OK, effective_ids=True):
            # mincore(2) then calls every page resident, whatever it is, and cachestat(2) refuses.
            return Failed(path, "EPERM", "Neither owned nor writable, so the kernel does not tell its residency")
        before = resident(descriptor)
        after = before if measure_only else release(descriptor)
    finally:
        os.close(descriptor)
    outcome.files += 1
    outcome.resident_before += before
    outcome.resident_after += after
    if after:
        outcome.kept.append(Kept(os.path.realpath(path), after))
    return None


def mapped_by(paths: Iterable[str], *, proc: str = "/proc") -> list[Mapper]:
    """Return the readable processes that map one of the files, by pid: the kernel keeps mapped pages.

    A file is known by its path, or, where a container gives it another one, by its device and inode.
    """
    wanted = {}
    for path in paths:
        # The kernel writes a line break in a path so, and nothing else.
        wanted[path.replace("\n", "\\012")] = path
        try:
            found = os.stat(path)
        except OSError:  # gone meanwhile; who maps it still holds its pages
            continue
        wanted[f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino}"] = path
    pids = sorted(int(name) for name in os.listdir(proc) if name.isdecimal()) if wanted else []
    found_by = ((pid, _mapped_paths(Path(proc, str(pid)), wanted)) for pid in pids)
    return [Mapper(pid, _name(Path(proc, str(pid))), sorted(mapped)) for pid, mapped in found_by if mapped]


def _mapped_paths(process: Path, wanted: dict[str, str]) -> set[str]:
    mapped = set()
    try:
        with (process / "maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                # address, permissions, offset, device, inode, path; the path is missing for anonymous memory.
                fields = line.rstrip("\n").split(maxsplit=5)
                mapped |= {wanted[key] for key in (" ".join(fields[3:5]), *fields[5:]) if key in wanted}
    except OSError:  # gone meanwhile, or another user's
        pass
    return mapped


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return ""


def drop_all(*, proc: str = "/proc") -> None:
    """Drop all clean caches of the machine (page cache, dentries, inodes), after everything dirty was written.

    Raises:
        OSError: Not root, or a container whose /proc/sys is read-only.
    """
    os.sync()
    with open(os.path.join(proc, "sys/vm/drop_caches"), "w", encoding="ascii") as file:
        file.write(_DROP_ALL)


def _left_alone(path: str, exc: OSError) -> Skipped | Failed:
    reason = exc.strerror or str(exc)
    if exc.errno == errno.ENOENT:
        return Skipped(path, reason)
    return Failed(path, errno.errorcode.get(exc.errno or 0, "EIO"), reason)


def main(arguments: Sequence[str]) -> int:
    """Release the files at and below each argument, and say how much. What stays is no reason not to start: 0."""
    outcome = purge(arguments)
    print(f"Released {outcome.released} bytes of page cache of {outcome.files} files; {outcome.resident_after} stay")
    for one in outcome.failed:
        print(f"warning: {one.path} was left alone: {one.reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
