# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The manifest of a checkpoint: size and SHA-256 of each file, from huggingface_hub's own records or computed.

Names of blobs and etags come from ``file_download.py``, ``_local_folder.py`` and ``utils/_shared_blobs.py`` of
huggingface_hub 2.4.0.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import LOCAL_DOWNLOADS, naming
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._page_cache import resident

# One buffer for each thread. hashlib and readinto let other threads run while they work on one.
BUFFER_BYTES = 1024**2
# What is read is let go from the page cache in steps of this: a checkpoint is larger than the memory it must not fill.
WINDOW_BYTES = 32 * BUFFER_BYTES
# More threads than a disk takes requests at once gain nothing.
MAX_WORKERS = 32
# Files up to this are hashed whenever shards' headers are read; only weights are larger.
SMALL_BYTES = 64 * 1024**2
# The hub records the time of a download after the file is there; its own allowance.
MTIME_SLACK_SECONDS = 1.0
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


class Reference(NamedTuple):
    """What a file must hash to by the hub. ``git-sha1`` is over ``blob SIZE``, a zero byte and the content."""

    algorithm: Literal["sha256", "git-sha1"]
    value: str


@dataclass(frozen=True)
class File:
    """One line of a manifest: ``name`` below the checkpoint, ``size`` in bytes, ``sha256`` None if not known.

    ``source`` of the hash: ``read`` (computed from what is there now), ``hub`` (what the hub recorded), or None.
    """

    name: str
    size: int
    sha256: str | None = None
    source: Literal["read", "hub"] | None = None


class Hashed(NamedTuple):
    """A file with its hash, and git's if that was asked for; or without, and a sentence that says why."""

    file: File
    git: str | None = None
    error: str | None = None


def parse_etag(etag: str) -> Reference | None:
    """What an etag of the hub, which is also the name of a blob in a repository's cache, says about the content.

    64 hexadecimal digits are the SHA-256 of a large file, also where Xet stores it; 40 are git's hash of a small one.
    """
    if re.fullmatch(r"[0-9a-f]{64}", etag):
        return Reference("sha256", etag)
    return Reference("git-sha1", etag) if re.fullmatch(r"[0-9a-f]{40}", etag) else None


def blob_reference(target: str) -> Reference | None:
    """What the absolute target of a snapshot's link says; None outside of one repository's blobs.

    The store that repositories share (``blobs/ab/...`` beside them) names its files by Xet hashes, of 64 digits too.
    """
    *_before, repository, folder, name = ("", "", "", *PurePosixPath(os.path.normpath(target)).parts)
    return parse_etag(name) if folder == "blobs" and _REPOSITORY.fullmatch(repository) else None


def parse_download(text: str, *, mtime: float) -> Reference | None:
    """What huggingface_hub noted beside a directory about a file whose time is ``mtime`` (seconds); None if outdated.

    Three lines: commit, etag, time.
    """
    lines = text.splitlines()
    try:
        noted = float(lines[2])
    except (IndexError, ValueError):
        return None
    return parse_etag(lines[1].strip()) if mtime - MTIME_SLACK_SECONDS <= noted else None


def hub_reference(directory: Path, name: str) -> Reference | None:
    """What the hub recorded about a file of the checkpoint; None if nothing, or nothing that is a hash of content."""
    path = directory / name
    if path.is_symlink():
        # The directory may itself be reached by a link, against which a relative target must not be resolved.
        return blob_reference(os.path.join(os.path.realpath(path.parent), os.readlink(path)))
    note = directory / LOCAL_DOWNLOADS / f"{name}.metadata"
    try:
        return parse_download(note.read_text(encoding="utf-8"), mtime=path.stat().st_mtime)
    except (OSError, ValueError):
        return None


def list_files(directory: Path) -> tuple[dict[str, int], list[str]]:
    """Sizes in bytes of the files below a checkpoint by their posix paths, sorted; then folders that cannot be read.

    A link to a file stands for the file, as in the hub's cache; a link to a directory is not entered. What begins with
    a dot is some tool's own, and what ends in ``.incomplete`` is no file yet.
    """
    sizes: dict[str, int] = {}
    unread: list[str] = []
    for folder, folders, names in os.walk(directory, onerror=lambda error: unread.append(str(error.filename))):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith(".") or name.endswith(".incomplete"):
                continue
            path = os.path.join(folder, name)
            try:
                found = os.stat(path)
            except OSError:  # a link to nowhere or to itself, or gone by now
                continue
            if stat.S_ISREG(found.st_mode):
                sizes[os.path.relpath(path, directory)] = found.st_size
    return dict(sorted(sizes.items())), sorted(unread)


def links_outside(directory: Path, names: Iterable[str]) -> list[str]:
    """Those of the files whose content lies outside of the directory and of the hub's cache around it."""
    top = Path(os.path.realpath(directory))
    # snapshots/COMMIT of a repository, beside which lie the blobs, and beside the repository those that several share.
    stores = [top.parent.parent / "blobs", top.parent.parent.parent / "blobs"] if top.parent.name == "snapshots" else []
    homes = [top, *stores]
    outside = []
    for name in names:
        real = Path(os.path.realpath(directory / name))
        if not any(real.is_relative_to(home) for home in homes):
            outside.append(name)
    return outside


def hash_file(path: Path, *, git: bool = False) -> tuple[int, str, str | None]:
    """Size in bytes, SHA-256, and if ``git`` is asked for git's hash, of a file.

    Raises Hy3Error if the file changes meanwhile, and OSError. The page cache is left about as it was.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        digest = hashlib.sha256()
        git_digest = hashlib.sha1(f"blob {before.st_size}\0".encode(), usedforsecurity=False) if git else None
        # Whatever else reads the file wants it to stay.
        release = resident(file.fileno()) < before.st_size // 2
        size = 0
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
            if git_digest:
                git_digest.update(buffer[:got])
            size += got
            if release and size % WINDOW_BYTES < got:
                os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        if release:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        # A file that was replaced by another of its name is as wrong as one that was written to.
        if not size == before.st_size or not _same(before, os.fstat(file.fileno())) or not _same(before, path.stat()):
            raise Hy3Error(f"{path.name} changed while it was read; wait until nothing writes to it, and look again.")
    return size, digest.hexdigest(), git_digest.hexdigest() if git_digest else None


def hash_all(
    directory: Path, sizes: Mapping[str, int], *, references: Mapping[str, Reference], workers: int | None = None
) -> Iterator[Hashed]:
    """Hash files (name to size in bytes) in parallel, the largest first; git's hash where the reference is one.

    Memory is one buffer for each of ``workers``, by default as many as this process may use cores.
    """

    def work(name: str) -> Hashed:
        git = name in references and references[name].algorithm == "git-sha1"
        try:
            size, digest, git_digest = hash_file(directory / name, git=git)
        except Hy3Error as error:
            return Hashed(File(name, sizes[name]), error=str(error))
        except OSError as error:
            return Hashed(File(name, sizes[name]), error=f"{name} cannot be read ({error.strerror}).")
        return Hashed(File(name, size, digest, "read"), git_digest)

    if not workers:
        workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(work, sorted(sizes, key=lambda name: (-sizes[name], name)))


def contradiction(hashed: Hashed, reference: Reference | None) -> str | None:
    """A clause that says how a file that was read differs from what the hub recorded; None if it does not."""
    if reference is None:
        return None
    found = hashed.file.sha256 if reference.algorithm == "sha256" else hashed.git
    if found == reference.value:
        return None
    return f"{hashed.file.name} has {reference.algorithm} {found} and the hub recorded {reference.value}"


def differences(expected: Iterable[File], found: Mapping[str, File]) -> list[str]:
    """Problems of the files found against a manifest, as sentences. A hash that either lacks is not compared."""
    missing, sizes, hashes = [], [], []
    for want in expected:
        have = found.get(want.name)
        if have is None:
            missing.append(want.name)
        elif have.size != want.size:
            sizes.append(f"{want.name} ({have.size} bytes, not {want.size})")
        elif want.sha256 and have.sha256 and want.sha256.lower() != have.sha256:
            hashes.append(f"{want.name} (sha256 {have.sha256[:12]}, not {want.sha256[:12]})")
    kinds = (
        (missing, "Files of the manifest are missing", "fetch them"),
        (sizes, "Files of another size than the manifest's", "fetch them again"),
        (hashes, "Files with other content than the manifest's", "fetch them again"),
    )
    return [f"{what} ({len(names)}): {naming(names)}; {way_out}." for names, what, way_out in kinds if names]


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return all(
        getattr(one, field) == getattr(other, field)
        for field in ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    )
