# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Whether a checkpoint is whole, what it holds, and a digest by which nodes compare theirs. No tensor data is read."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import Header, read_header

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"
LEGACY_QUANT_CONFIG = "hf_quant_config.json"
# What engines read besides weights: configuration, tokenizer, chat template, and Python for trust-remote-code.
SMALL_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".py")
SMALL_NAMES = ("merges.txt", "vocab.txt")
# Where huggingface_hub puts unfinished downloads below a local directory; unfinished blobs of its cache lie elsewhere.
LOCAL_DOWNLOADS = ".cache/huggingface/download"
# Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md; a pointer is shorter than 1024 bytes.
LFS_PREFIX = b"version https://git-lfs"
LFS_MAX_BYTES = 1024
MAX_PROBLEMS = 20
MIXED = "index and shards are of different revisions, so fetch the whole checkpoint again"
# The tensors without which neither vLLM nor SGLang can build the drafter.
MTP_TENSORS = ("eh_proj", "enorm", "hnorm")


@dataclass(frozen=True)
class Shard:
    """One weight file: size in bytes, and how many tensors its header (level size: the index) lists."""

    name: str
    size: int
    tensors: int


@dataclass
class Report:
    """What ``inspect`` found. ``total_size`` is the bytes of all tensors, file headers excluded."""

    exists: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    tensors: int = 0
    total_size: int = 0
    digest: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    mtp: bool = False


def naming(names: Collection[str], *, limit: int = 3) -> str:
    """Sorted names for a sentence, at most ``limit`` of them."""
    shown = ", ".join(sorted(names)[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def capped(problems: list[str], limit: int = MAX_PROBLEMS) -> list[str]:
    """The first ``limit`` problems, then a sentence that counts the rest."""
    if len(problems) <= limit:
        return problems
    return [*problems[:limit], f"Problems left out here: {len(problems) - limit}."]


def parse_index(index: Any) -> tuple[dict[str, str], int | None]:
    """The weight map (tensor to shard) of a parsed index, and the total size in bytes that it claims, if it does.

    Raises Hy3Error when it is no index, or names a file outside of the checkpoint.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise Hy3Error(f"{INDEX} has no weight_map that names a shard for each tensor; fetch it again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or ".." in name.split("/"):
            raise Hy3Error(f"{INDEX} puts tensor {tensor} into {name!r}, which is no file of it; fetch it again.")
    metadata = index.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(claimed) if isinstance(claimed, int | float) else None


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


def lfs_size(head: bytes) -> int | None:
    """The size in bytes that a Git LFS pointer declares, 0 if it declares none, None if this is no pointer."""
    if not head.startswith(LFS_PREFIX):
        return None
    match = re.search(rb"^size (\d+)$", head, re.MULTILINE)
    return int(match[1]) if match else 0


def excludes_lm_head(patterns: Iterable[Any]) -> bool:
    """Whether a quantization ignore list names ``lm_head``: exactly, by a wildcard, or as ``re:`` expression."""
    for pattern in patterns:
        text = str(pattern)
        if text.startswith("re:"):
            try:
                if re.match(text[3:], "lm_head"):
                    return True
            except re.error:
                continue
        elif fnmatchcase("lm_head", text):
            return True
    return False


def describe_model(config: Mapping[str, Any], legacy_quant: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json (and ModelOpt's older hf_quant_config.json, which may stand alone) say about the model.

    Sizes are counts, ``head_dim`` and ``hidden_size`` elements, ``max_position_embeddings`` tokens. None where the
    files are silent.
    """
    layers, heads = _integer(config, "num_hidden_layers"), _integer(config, "num_attention_heads")
    hidden, head_dim = _integer(config, "hidden_size"), _integer(config, "head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    quant, legacy = config.get("quantization_config"), legacy_quant.get("quantization")
    quant = quant if isinstance(quant, dict) else {}
    legacy = legacy if isinstance(legacy, dict) else {}
    ignored = [
        pattern
        for source in (quant, legacy)
        for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
        if isinstance(source.get(key), list)
        for pattern in source[key]
    ]
    architectures = config.get("architectures")
    return {
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "layers": layers,
        "heads": heads,
        "kv_heads": _integer(config, "num_key_value_heads") or heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "experts": _integer(config, "num_experts"),
        "nextn_layers": _integer(config, "num_nextn_predict_layers") or 0,
        "max_position_embeddings": _integer(config, "max_position_embeddings"),
        "quant_method": quant.get("quant_method") or ("modelopt" if legacy else None),
        "quant_algo": quant.get("quant_algo") or legacy.get("quant_algo"),
        "lm_head_excluded": excludes_lm_head(ignored),
    }


def has_mtp(tensors: Collection[str], layers: int | None) -> bool:
    """Whether the tensors of the MTP layer, the one after the last decoder layer, are among ``tensors``."""
    return layers is not None and all(f"model.layers.{layers}.{part}.weight" in tensors for part in MTP_TENSORS)


def unfinished(directory: Path) -> list[Path]:
    """Unfinished downloads beside the files, in huggingface_hub's corner of a directory, or behind a snapshot."""
    places = [directory.glob("*.incomplete"), (directory / LOCAL_DOWNLOADS).rglob("*.incomplete")]
    if directory.parent.name == "snapshots":
        places.append((directory.parent.parent / "blobs").glob("*.incomplete"))
    return sorted(path for place in places for path in place)


def digest_of(directory: Path, headers: Mapping[str, Header], sizes: Mapping[str, int]) -> str:
    """sha256 over each shard's name, size and header, and each small file's name, size and content.

    Equal on two nodes exactly when these are; tensor data is not read. Raises OSError.
    """
    digest = sha256()

    def add(name: str, size: int, content: bytes) -> None:
        digest.update(f"{len(name.encode())} {name} {size} {len(content)}\n".encode())
        digest.update(content)

    for name in sorted(sizes):
        add(name, sizes[name], headers[name].raw if name in headers else b"")
    for path in sorted(directory.iterdir()):
        if (path.suffix in SMALL_SUFFIXES or path.name in SMALL_NAMES) and path.is_file():
            content = path.read_bytes()
            add(path.name, len(content), content)
    return digest.hexdigest()


def inspect(directory: Path, *, level: str) -> Report:
    """Examine the checkpoint in ``directory``.

    Level ``header`` reads every shard's header; ``size`` only compares names and sizes. Whatever is wrong with the
    checkpoint is a problem in the report, most important first; nothing is raised for it.
    """
    if not directory.is_dir():
        return Report(problems=[f"{directory} is no directory; fetch the checkpoint to it."])
    report = Report(exists=True)
    try:
        _Inspection(directory, report).run(read_headers=level == "header")
    except OSError as error:
        report.problems.append(
            f"{error.filename or directory} cannot be read ({error.strerror}); run as a user who may read it."
        )
    return report


class _Inspection:
    """One walk through a directory, from the small files to the shards' headers."""

    def __init__(self, directory: Path, report: Report) -> None:
        self.directory = directory
        self.report = report
        self.headers: dict[str, Header] = {}
        self.sizes: dict[str, int] = {}

    def run(self, *, read_headers: bool) -> None:
        report = self.report
        self._describe()
        weight_map, claimed = self._index()
        alone = not weight_map and (self.directory / SINGLE_SHARD).is_file()
        self._measure({SINGLE_SHARD} if alone else set(weight_map.values()))
        self._find_unfinished()
        if read_headers or alone:
            self._read_headers()
        if alone:
            weight_map = {tensor: shard for shard, header in self.headers.items() for tensor in header.tensors}
        if self.headers:
            report.problems += compare(weight_map, {name: header.tensors for name, header in self.headers.items()})
        self._count(weight_map, claimed)
        report.mtp = has_mtp(weight_map, report.model.get("layers"))
        if not report.problems:
            report.digest = digest_of(self.directory, self.headers, self.sizes)

    def _describe(self) -> None:
        if not (self.directory / CONFIG).exists():
            snapshots = self.directory / "snapshots"
            way_out = f"give a directory in {snapshots} instead" if snapshots.is_dir() else "fetch it"
            self.report.problems.append(f"{CONFIG} is missing in {self.directory}; {way_out}.")
        elif (config := self._json(CONFIG)) is not None:
            self.report.model = describe_model(config, self._json(LEGACY_QUANT_CONFIG) or {})

    def _json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is no such file, or after noting why it is none."""
        path = self.directory / name
        if not path.is_file():
            return None
        content = path.read_bytes()
        if (size := lfs_size(content)) is not None:
            self._note_pointers({name: size})
            return None
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError) as error:
            self.report.problems.append(f"{name} is no valid JSON ({error}); fetch it again.")
            return None
        if not isinstance(parsed, dict):
            self.report.problems.append(f"{name} holds no JSON object; fetch it again.")
            return None
        return parsed

    def _index(self) -> tuple[dict[str, str], int | None]:
        """The weight map, empty if there is no usable index, and the total size that the index claims."""
        if not (self.directory / INDEX).exists():
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


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    number = config.get(key)
    return number if isinstance(number, int) and not isinstance(number, bool) else None
