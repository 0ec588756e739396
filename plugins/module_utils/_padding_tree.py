# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Writes a padded checkpoint beside the original, a file at a time, in a few MiB of memory.

Each file is written under another name, synced and renamed; config.json comes last and goes first, so a tree that lacks
something is never one that an engine would load. A shard with its own name, the right header and the modification time
of the shard it came from is done: a run after one that was killed writes only the rest.
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import shutil
import typing as t
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import (
    CONFIG,
    INDEX,
    LEGACY_QUANT_CONFIG,
    SINGLE_SHARD,
    inspect,
    parse_index,
)
from ansible_collections.sparks.hy3.plugins.module_utils._durable import sync_directory
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._padding import (
    Plan,
    block_sizes,
    check_original,
    groups_of,
    make_plan,
    padded_config,
    shape_of,
)
from ansible_collections.sparks.hy3.plugins.module_utils._padding_writer import (
    copy_range,
    shard_pieces,
    write_all,
    write_piece,
)
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import (
    LENGTH_BYTES,
    Header,
    read_header,
)
from ansible_collections.sparks.hy3.plugins.module_utils._weights import read_sizes

# Says what a directory is being filled with. No suffix, so that it does not count as a file that engines read.
MARKER = ".hy3-padding"
PARTIAL = ".hy3-partial"
# Its last head tells whether a tool padded the checkpoint and recorded nothing.
KEYS = "model.layers.0.self_attn.k_proj.weight"
# Weights that the index does not name would lie there unpadded; downloads leave the others.
LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".incomplete", ".lock", PARTIAL)
# A file system may keep times no closer than this; FAT has the coarsest.
MTIME_NS = 2 * 10**9


@dataclass
class Shard:
    """A shard as it will be: bytes, number of padded tensors, the stat of the original, and whether it is written."""

    name: str
    size: int
    padded: int
    source: os.stat_result
    done: bool


@dataclass
class Source:
    """The original, read once: no tensor data."""

    directory: Path
    config: dict[str, t.Any]
    index: dict[str, t.Any] | None
    names: list[str]
    plan: Plan
    digest: str
    tensors: int


@dataclass
class Work:
    """What a run has to do. ``texts`` are the files that are rewritten, config.json the last of them."""

    shards: list[Shard] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    total_size: int = 0

    @property
    def files(self) -> list[str]:
        """Names of the files to write, in the order of writing."""
        return [*(shard.name for shard in self.shards if not shard.done), *self.copies, *self.stale]

    @property
    def bytes(self) -> int:
        """Size in bytes of the shards to write."""
        return sum(shard.size for shard in self.shards if not shard.done)


def read_source(directory: Path, *, tensor_parallel: int) -> Source:
    """Read the original and plan its padding.

    Raises Hy3Error when it is not whole, not a Hy3, or padded already for another number of ranks.
    """
    # All headers together take most of the memory, so they are only read so to say what is wrong. What level size alone
    # minds, an index that claims too much, is no fault.
    if inspect(directory, level="size").problems:
        _refuse_broken(directory)
    try:
        config = json.loads((directory / CONFIG).read_bytes())
        index = json.loads((directory / INDEX).read_bytes()) if (directory / INDEX).exists() else None
        legacy = directory / LEGACY_QUANT_CONFIG
        shape = shape_of(read_sizes(config, json.loads(legacy.read_bytes()) if legacy.is_file() else {}), config)
        weight_map = parse_index(index)[0] if index else {}
        headers = _Headers(directory, weight_map, shape.kv_heads)
        blocks = block_sizes(config.get("quantization_config"))
        groups = groups_of(headers, shape, blocks)
        if headers.misplaced or (weight_map and headers.count != len(weight_map)):
            _refuse_broken(directory)
    except OSError as error:
        raise Hy3Error(
            f"{error.filename or directory} cannot be read ({error.strerror}); run as a user who may read it."
        ) from error
    plan = make_plan(shape, groups, tensor_parallel=tensor_parallel, blocks=blocks)
    check_original(config, plan, zero_tail=headers.zero_tail, origin=str(_marker(directory).get("source", "")))
    return Source(directory, config, index, headers.names, plan, headers.digest.hexdigest(), headers.count)


def _refuse_broken(directory: Path) -> None:
    if problems := inspect(directory, level="header").problems:
        raise Hy3Error(problems[0])


class _Headers:
    """The name, dtype and shape of each tensor, one shard's header in memory at a time."""

    def __init__(self, directory: Path, weight_map: Mapping[str, str], kv_heads: int) -> None:
        self.directory = directory
        self.weight_map = weight_map
        self.names = sorted(set(weight_map.values())) or [SINGLE_SHARD]
        self.kv_heads = kv_heads
        self.digest = sha256()
        self.count = 0
        self.misplaced = False
        self.zero_tail = False

    def __iter__(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for shard in self.names:
            header = read_header(self.directory / shard)
            self.digest.update(f"{shard} {len(header.raw)}\n".encode() + header.raw)
            self.count += len(header.tensors)
            if KEYS in header.tensors:
                self.zero_tail = _zero_tail(self.directory / shard, header, self.kv_heads)
            for name, tensor in header.tensors.items():
                self.misplaced |= self.weight_map.get(name, shard) != shard
                yield name, tensor.dtype, tensor.shape


def _zero_tail(path: Path, header: Header, kv_heads: int) -> bool:
    """Whether the last of the KV heads is all zeros and the first is not, as in a model without any numbers."""
    place = header.tensors[KEYS]
    length = (place.end - place.start) // kv_heads
    with path.open("rb") as file:
        file.seek(LENGTH_BYTES + len(header.raw) + place.start)
        first = file.read(length)
        file.seek(LENGTH_BYTES + len(header.raw) + place.end - length)
        return any(first) and not any(file.read(length))


def _marker(directory: Path) -> dict[str, t.Any]:
    try:
        marker = json.loads((directory / MARKER).read_bytes())
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


class Target:
    """The directory that becomes the padded checkpoint."""

    def __init__(self, source: Source, directory: Path) -> None:
        self.source = source
        self.directory = directory
        self.identity = {
            "tensor_parallel_size": source.plan.tensor_parallel,
            "sizes": {name: list(pair) for name, pair in source.plan.sizes.items()},
            "headers": source.digest,
        }

    def check(self) -> None:
        """Raise Hy3Error for a directory that holds anything but this padding."""
        here, there = self.directory.resolve(), self.source.directory.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise Hy3Error(
                f"{self.directory} is or contains the original {self.source.directory}, or lies within it, and the "
                "original is never changed; name a directory beside it."
            )
        if self.directory.exists() and not self.directory.is_dir():
            raise Hy3Error(f"{self.directory} is no directory; name another, or remove it.")
        present = self.directory.iterdir() if self.directory.is_dir() else ()
        # A run may have been killed before it wrote its mark.
        if all(path.name.endswith(PARTIAL) for path in present):
            return
        marker = _marker(self.directory)
        if {key: marker.get(key) for key in self.identity} == self.identity:
            return
        what = "something else than a padded checkpoint"
        if "tensor_parallel_size" in marker:
            what = (
                f"the padding of {marker.get('source')} for tensor parallel size {marker['tensor_parallel_size']}, not "
                f"that of {self.source.directory} as it is now for {self.source.plan.tensor_parallel}"
            )
        raise Hy3Error(f"{self.directory} holds {what}; name another directory, or remove that one.")

    def survey(self) -> Work:
        """What is left to do. Reads the headers of both sides and compares the small files."""
        work = Work()
        for name in self.source.names:
            path = self.source.directory / name
            stat = path.stat()
            prefix, pieces, padded = shard_pieces(read_header(path), self.source.plan)
            data = sum(piece.size for piece in pieces)
            done = self._is_done(name, prefix, len(prefix) + data, stat)
            work.shards.append(Shard(name, len(prefix) + data, padded, stat, done))
            work.total_size += data
        work.copies = [
            name
            for name in _small_files(self.source.directory, {*self.source.names, INDEX, CONFIG, MARKER})
            if not _same(self.source.directory / name, self.directory / name)
        ]
        if self.source.index is not None:
            metadata = self.source.index.get("metadata")
            metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": work.total_size}
            work.texts[INDEX] = _json({**self.source.index, "metadata": metadata})
        work.texts[CONFIG] = _json(padded_config(self.source.config, self.source.plan))
        work.stale = [name for name, text in work.texts.items() if self.text(name) != text]
        if work.files and CONFIG not in work.stale:
            work.stale.append(CONFIG)
        return work

    def text(self, name: str) -> str:
        """A small file as it is now, empty if it is not there."""
        try:
            return (self.directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def check_space(self, work: Work) -> None:
        """Raise Hy3Error when the file system has less room than the files to write take."""
        place = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        needed = work.bytes + sum((self.source.directory / name).stat().st_size for name in work.copies)
        left = sum(path.stat().st_size for path in self._partials())
        free = shutil.disk_usage(place).free + left
        if needed > free:
            raise Hy3Error(
                f"{self.directory} needs {needed} bytes for {len(work.files)} files and has {free} free; make room, or "
                "name a directory on a larger disk."
            )

    def write(self, work: Work) -> None:
        """Write what is left. Raises Hy3Error when the disk is full, or when a shard changes under the run."""
        try:
            self._make_directory()
            with _locked(self.directory):
                for path in self._partials():
                    path.unlink()
                if not _marker(self.directory):
                    self._write_text(MARKER, _json({**self.identity, "source": str(self.source.directory)}))
                if work.files:
                    (self.directory / CONFIG).unlink(missing_ok=True)
                    sync_directory(self.directory)
                for shard in work.shards:
                    if not shard.done:
                        self._write_shard(shard)
                for name in work.copies:
                    self._copy(name)
                for name in work.stale:
                    self._write_text(name, work.texts[name])
        except OSError as error:
            raise Hy3Error(
                f"{error.filename or self.directory} cannot be written ({error.strerror or error}); see to that and "
                "run again, and only the rest is written."
            ) from error

    def _is_done(self, name: str, prefix: bytes, size: int, source: os.stat_result) -> bool:
        path = self.directory / name
        if not path.is_file():
            return False
        stat = path.stat()
        if stat.st_size != size or abs(stat.st_mtime_ns - source.st_mtime_ns) >= MTIME_NS:
            return False
        with path.open("rb") as file:
            return file.read(len(prefix)) == prefix

    def _partials(self) -> list[Path]:
        return sorted(self.directory.rglob(f"*{PARTIAL}")) if self.directory.is_dir() else []

    def _make_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True)
            _give(self.directory, self.source.directory.stat())

    def _write_shard(self, shard: Shard) -> None:
        path = self.source.directory / shard.name
        header = read_header(path)
        prefix, pieces, _padded = shard_pieces(header, self.source.plan)
        with self._replacing(shard.name, shard.source) as target, path.open("rb", buffering=0) as source:
            write_all(target, prefix)
            for piece in pieces:
                write_piece(source.fileno(), target, piece, offset=LENGTH_BYTES + len(header.raw))
            now = os.fstat(source.fileno())
            if (now.st_size, now.st_mtime_ns) != (shard.source.st_size, shard.source.st_mtime_ns):
                raise Hy3Error(f"{path} was changed while it was read; wait until it is whole, then run again.")
            # 170 GB of page cache would be taken from the GPU, which shares this memory.
            os.fsync(target)
            for file in (source.fileno(), target):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _copy(self, name: str) -> None:
        path = self.source.directory / name
        with self._replacing(name, path.stat()) as target, path.open("rb", buffering=0) as source:
            copy_range(source.fileno(), target, start=0, length=os.fstat(source.fileno()).st_size)

    def _write_text(self, name: str, text: str) -> None:
        like = self.source.directory / (CONFIG if name == MARKER else name)
        with self._replacing(name, like.stat(), keep_time=False) as target:
            write_all(target, text.encode())

    @contextmanager
    def _replacing(self, name: str, like: os.stat_result, *, keep_time: bool = True) -> Iterator[int]:
        """A descriptor to write a file with; it takes the file's name, whole and synced, when the block ends well."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        target = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            yield target
            _give(target, like)
            if keep_time:
                os.utime(target, ns=(like.st_mtime_ns, like.st_mtime_ns))
            os.fsync(target)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(target)
        sync_directory(path.parent)


def _small_files(directory: Path, others: set[str]) -> list[str]:
    """Every other file below a directory but for hidden directories, which tools keep for themselves."""
    found: list[str] = []
    for place, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [str((Path(place) / name).relative_to(directory)) for name in files if not name.endswith(LEFT_OUT)]
    return sorted(set(found) - others)


def _same(source: Path, target: Path) -> bool:
    return target.is_file() and filecmp.cmp(source, target, shallow=False)


def _json(content: Mapping[str, t.Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _give(target: int | Path, like: os.stat_result) -> None:
    """Give a new file or directory the mode of the one it stands for and, as root, its owner."""
    os.chmod(target, like.st_mode & 0o777)
    if os.geteuid() == 0:
        os.chown(target, like.st_uid, like.st_gid)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise Hy3Error(f"Another run is writing {directory}; wait for it, or stop it, and run again.") from error
    finally:
        os.close(handle)
