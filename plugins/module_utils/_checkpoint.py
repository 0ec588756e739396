# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Whether a checkpoint is whole, what it holds, and a digest by which nodes compare theirs."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import (
    CONFIG,
    INDEX,
    LEGACY_QUANT_CONFIG,
    LFS_MAX_BYTES,
    SINGLE_SHARD,
    foreign,
    is_small,
    lfs_size,
    naming,
    parse_index,
    parse_object,
    read_small,
    unfinished,
)
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_model import describe_model, has_mtp
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_shapes import (
    absent,
    is_hy3,
    misshapen,
    sizes_of,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import (
    BUFFER_BYTES,
    SMALL_BYTES,
    File,
    Hashed,
    Reference,
    contradiction,
    differences,
    hash_all,
    hub_reference,
    links_outside,
    list_files,
)
from ansible_collections.sparks.hy3.plugins.module_utils._quantization import (
    Stored,
    describe_storage,
    storage_warnings,
)
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import Header, read_header

MAX_PROBLEMS = 20
MIXED = "index and shards are of different revisions, so fetch the whole checkpoint again"


@dataclass(frozen=True)
class Shard:
    """One weight file: size in bytes, and how many tensors its header (level size: the index) lists."""

    name: str
    size: int
    tensors: int


@dataclass
class Report:
    """What ``inspect`` found. ``total_size`` is the bytes of all tensors, file headers excluded.

    ``files`` is the manifest, ``outside`` which of them are links out of the checkpoint, ``foreign`` what looks like
    weights and belongs to no index, ``stored`` how the tensors are quantized (empty without headers).
    """

    exists: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    tensors: int = 0
    total_size: int = 0
    digest: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    mtp: bool = False
    files: list[File] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)


def capped(problems: list[str], limit: int = MAX_PROBLEMS) -> list[str]:
    """The first ``limit`` problems, then a sentence that counts the rest."""
    if len(problems) <= limit:
        return problems
    return [*problems[:limit], f"Problems left out here: {len(problems) - limit}."]


def compare(weight_map: Mapping[str, str], headers: Mapping[str, Collection[str]]) -> list[str]:
    """Problems between the index and the tensors in each shard's header, as sentences.

    Tensors of shards that ``headers`` lacks are left out: such a shard is a problem of its own.
    """
    expected: dict[str, set[str]] = defaultdict(set)
    for tensor, shard in weight_map.items():
        expected[shard].add(tensor)
    lacking = {tensor for shard, names in headers.items() for tensor in expected[shard].difference(names)}
    surplus = {shard: set(names) - expected[shard] for shard, names in headers.items()}
    places = {tensor: shard for shard, names in surplus.items() for tensor in names}
    problems: list[str] = []
    if absent := lacking - places.keys():
        first = min(absent)
        problems.append(
            f"Tensors in the index and in no shard ({len(absent)}): {naming(absent)} ({first} belongs in"
            f" {weight_map[first]}); fetch that shard again, or another conversion if its producer lost them."
        )
    if moved := lacking & places.keys():
        first = min(moved)
        problems.append(
            f"Tensors in another shard than the index says ({len(moved)}): {naming(moved)} ({first} is in"
            f" {places[first]}, not in {weight_map[first]}); {MIXED}."
        )
    counts = Counter(tensor for names in headers.values() for tensor in names)
    if doubles := {tensor for tensor, count in counts.items() if count > 1}:
        problems.append(f"Tensors in more than one shard ({len(doubles)}): {naming(doubles)}; {MIXED}.")
    if foreign := places.keys() - weight_map.keys():
        problems.append(f"Tensors that the index does not know ({len(foreign)}): {naming(foreign)}; {MIXED}.")
    return problems


def digest_of(directory: Path, headers: Mapping[str, Header], sizes: Mapping[str, int]) -> str:
    """sha256 over each shard's name, size and header, and each small file's name, size and content.

    Equal on two nodes exactly when these are; tensor data is not read. Raises OSError.
    """
    digest = sha256()

    def begin(name: str, size: int, content_bytes: int) -> None:
        encoded = os.fsencode(name)
        digest.update(f"{len(encoded)} ".encode() + encoded + f" {size} {content_bytes}\n".encode())

    for name in sorted(sizes):
        raw = headers[name].raw if name in headers else b""
        begin(name, sizes[name], len(raw))
        digest.update(raw)
    for path in sorted(directory.iterdir()):
        if is_small(path.name) and path.is_file():
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin(path.name, size, size)
                while content := file.read(BUFFER_BYTES):
                    digest.update(content)
    return digest.hexdigest()


def inspect(directory: Path, *, level: str, manifest: Sequence[File] = ()) -> Report:
    """Examine the checkpoint in ``directory``, and compare its files with those of ``manifest``.

    Level ``size`` only compares names and sizes, ``header`` reads every shard's header and hashes the small files,
    ``sha256`` hashes all of them. Whatever is wrong with the checkpoint is a problem in the report, most important
    first; nothing is raised for it.
    """
    if not directory.is_dir():
        return Report(problems=[f"{directory} is no directory; fetch the checkpoint to it."])
    report = Report(exists=True)
    try:
        _Inspection(directory, report).run(level, manifest)
    except OSError as error:
        way_out = (
            "run as a user who may read it"
            if isinstance(error, PermissionError)
            else "see whether something writes to it, and what the kernel's log says of the disk"
        )
        report.problems.append(f"{error.filename or directory} cannot be read ({error.strerror}); {way_out}.")
    return report


class _Inspection:
    """One walk through a directory, from the small files to the shards' headers and the content of all."""

    def __init__(self, directory: Path, report: Report) -> None:
        self.directory = directory
        self.report = report
        self.config: dict[str, Any] = {}
        self.headers: dict[str, Header] = {}
        self.sizes: dict[str, int] = {}

    def run(self, level: str, manifest: Sequence[File]) -> None:
        report = self.report
        self._describe()
        weight_map, claimed = self._index()
        alone = not weight_map and (self.directory / SINGLE_SHARD).is_file()
        shards = {SINGLE_SHARD} if alone else set(weight_map.values())
        self._measure(shards)
        self._find_unfinished()
        if level != "size" or alone:
            self._read_headers()
        if alone:
            weight_map = {tensor: shard for shard, header in self.headers.items() for tensor in header.tensors}
        if self.headers:
            report.problems += compare(weight_map, {name: header.tensors for name, header in self.headers.items()})
        self._count(weight_map, claimed)
        report.mtp = has_mtp(weight_map, report.model.get("layers"))
        self._compare_with_config(weight_map)
        self._list(level, manifest)
        self._find_foreign(shards, alone)
        if not report.problems:
            report.digest = digest_of(self.directory, self.headers, self.sizes)

    def _describe(self) -> None:
        if not (self.directory / CONFIG).is_file():
            snapshots = self.directory / "snapshots"
            way_out = f"give a directory in {snapshots} instead" if snapshots.is_dir() else "fetch it"
            self.report.problems.append(f"{CONFIG} is missing in {self.directory}; {way_out}.")
        elif (config := self._json(CONFIG)) is not None:
            self.config = config
            self.report.model = describe_model(config, self._json(LEGACY_QUANT_CONFIG) or {})

    def _json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is no such file, or after noting why it is none."""
        path = self.directory / name
        if not path.is_file():
            return None
        try:
            content = read_small(path)
            if (size := lfs_size(content)) is None:
                return parse_object(content, name)
            self._note_pointers({name: size})
        except Hy3Error as error:
            self.report.problems.append(str(error))
        return None

    def _index(self) -> tuple[dict[str, str], int | None]:
        """The weight map, empty if there is no usable index, and the total size that the index claims."""
        if not (self.directory / INDEX).is_file():
            if not (self.directory / SINGLE_SHARD).is_file():
                self.report.problems.append(
                    f"Neither {INDEX} nor {SINGLE_SHARD} is in {self.directory}; fetch the checkpoint."
                )
        elif (index := self._json(INDEX)) is not None:
            try:
                return parse_index(index)
            except Hy3Error as error:
                self.report.problems.append(str(error))
        return {}, None

    def _measure(self, names: set[str]) -> None:
        missing: list[str] = []
        pointers: dict[str, int] = {}
        for name in sorted(names):
            path = self.directory / name
            if not path.is_file():
                missing.append(name)
                continue
            size = path.stat().st_size
            declared = lfs_size(path.read_bytes()) if size < LFS_MAX_BYTES else None
            if declared is None:
                self.sizes[name] = size
            else:
                pointers[name] = declared
        if missing:
            self.report.problems.append(
                f"{len(missing)} of the {len(names)} shards that the index names are missing: {naming(missing)};"
                " fetch them."
            )
        self._note_pointers(pointers)

    def _note_pointers(self, pointers: Mapping[str, int]) -> None:
        if pointers:
            self.report.problems.append(
                f"Git LFS pointers stand in place of files of {sum(pointers.values())} bytes: {naming(pointers)};"
                " run git lfs pull, or fetch them with hf download."
            )

    def _find_unfinished(self) -> None:
        if leftovers := unfinished(self.directory):
            self.report.problems.append(
                f"Unfinished downloads are left: {naming([path.name for path in leftovers])};"
                " finish the download, or remove them if none is running."
            )

    def _read_headers(self) -> None:
        for name in self.sizes:
            try:
                self.headers[name] = read_header(self.directory / name)
            except Hy3Error as error:
                self.report.problems.append(str(error))

    def _count(self, weight_map: Mapping[str, str], claimed: int | None) -> None:
        report = self.report
        listed = Counter(weight_map.values())
        report.shards = [
            Shard(name, size, len(self.headers[name].tensors) if name in self.headers else listed[name])
            for name, size in self.sizes.items()
        ]
        report.tensors = sum(shard.tensors for shard in report.shards)
        if self.headers:
            report.total_size = sum(header.data_bytes for header in self.headers.values())
            if claimed not in (None, report.total_size) and not report.problems:
                # No engine reads the number, and published checkpoints whose producer counted otherwise work.
                report.warnings.append(
                    f"{INDEX} claims {claimed} bytes and the tensors have {report.total_size}; no engine minds."
                )
        else:
            report.total_size = claimed or 0
            on_disk = sum(self.sizes.values())
            if on_disk < report.total_size and not report.problems:
                report.problems.append(
                    f"The shards have {on_disk} bytes and the index claims {claimed}; fetch the checkpoint again,"
                    " or look with level header which shard is short."
                )

    def _compare_with_config(self, weight_map: Mapping[str, str]) -> None:
        report = self.report
        tensors = {
            name: (tensor.dtype, tensor.shape)
            for header in self.headers.values()
            for name, tensor in header.tensors.items()
        }
        if tensors and not report.problems:
            report.stored = describe_storage(tensors, report.model["layers"])
            report.warnings += storage_warnings(report.model["quant_method"] is not None, report.stored)
        if is_hy3(self.config) and weight_map:
            report.problems += absent(weight_map, report.model)
            report.problems += misshapen(tensors, sizes_of(self.config, report.model))

    def _list(self, level: str, manifest: Sequence[File]) -> None:
        """Make the manifest, hashing what the level asks for, and compare it with the one that is given."""
        if not (self.directory / CONFIG).is_file():  # no checkpoint, but perhaps a whole disk
            return
        sizes, unread = list_files(self.directory)
        references = {
            name: reference for name in sizes if (reference := hub_reference(self.directory, name)) is not None
        }
        files = {name: File(name, size) for name, size in sizes.items()}
        for name, reference in references.items():
            if reference.algorithm == "sha256":
                files[name] = File(name, sizes[name], reference.value, "hub")
        wanted = {} if level == "size" else sizes
        if level == "header":
            wanted = {name: size for name, size in sizes.items() if name not in self.sizes and size <= SMALL_BYTES}
        for hashed in hash_all(self.directory, wanted, references=references):
            files[hashed.file.name] = hashed.file
            self._judge(hashed, references.get(hashed.file.name))
        self.report.files = list(files.values())
        self.report.problems += differences(manifest, files)
        self.report.outside = links_outside(self.directory, sizes)
        if unread:
            self.report.warnings.append(f"Directories that cannot be read are left out of the files: {naming(unread)}.")

    def _judge(self, hashed: Hashed, reference: Reference | None) -> None:
        """Note what is wrong with a file; engines read no others than shards and those of the small names."""
        name = hashed.file.name
        if hashed.error:
            needed = name in self.sizes or is_small(name)
            (self.report.problems if needed else self.report.warnings).append(hashed.error)
        elif wrong := contradiction(hashed, reference):
            if name in self.sizes:
                self.report.problems.append(f"{wrong}, so it is damaged; fetch it again.")
            else:
                self.report.warnings.append(f"{wrong}; fetch it again unless it was edited here on purpose.")

    def _find_foreign(self, shards: set[str], alone: bool) -> None:
        report = self.report
        report.foreign = foreign(self.directory, shards)
        if weights := [name for name in report.foreign if name.endswith(".safetensors")]:
            effect = "which engines load as well, since there is no index" if alone else "which no engine needs"
            report.warnings.append(
                f"Weights that do not belong to the checkpoint lie beside it, {effect}: {naming(weights)}; move them "
                "elsewhere."
            )
        if report.outside:
            report.warnings.append(
                f"Files of the checkpoint are links to elsewhere ({len(report.outside)}): {naming(report.outside)}; a "
                "copy of the directory that keeps links holds nothing of them."
            )
