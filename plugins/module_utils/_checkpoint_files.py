# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The files of a checkpoint: their names, and what the small ones hold. What reads a checkpoint begins here."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"
LEGACY_QUANT_CONFIG = "hf_quant_config.json"
# What engines read besides weights: configuration, tokenizer, chat template, and Python for trust-remote-code.
SMALL_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".py")
SMALL_NAMES = ("merges.txt", "vocab.txt")
# Weights in the other formats that engines look for, and the names under which downloaders and rsync leave halves.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PARTIAL_SUFFIXES = (".part", ".partial", ".aria2", ".tmp", ".download")
# Where huggingface_hub puts unfinished downloads below a local directory; unfinished blobs of its cache lie elsewhere.
LOCAL_DOWNLOADS = ".cache/huggingface/download"
# Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md; a pointer is shorter than 1024 bytes.
LFS_PREFIX = b"version https://git-lfs"
LFS_MAX_BYTES = 1024
# The index of the real Hy3 has 20 million bytes; memory is not for what only bears such a name.
MAX_JSON_BYTES = 256 * 1024**2
# Linux, in bytes: NAME_MAX and PATH_MAX.
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095


def naming(names: Collection[str], *, limit: int = 3) -> str:
    """Sorted names for a sentence, at most ``limit`` of them."""
    shown = ", ".join(sorted(names)[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def read_small(path: Path) -> bytes:
    """The content of a small file; raises Hy3Error if it is none, and OSError."""
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            size = file.seek(0, 2)
            raise Hy3Error(f"{path.name} has {size} bytes, over the {MAX_JSON_BYTES} of any such file; fetch it again.")
    return content


def parse_object(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object in the content of a file; raises Hy3Error, which names it, if there is none."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Hy3Error(f"{name} is no valid JSON ({error}); fetch it again.") from error
    if not isinstance(parsed, dict):
        raise Hy3Error(f"{name} holds no JSON object; fetch it again.")
    return parsed


def read_object(path: Path, *, name: str | None = None) -> dict[str, Any] | None:
    """The JSON object in a file, None if there is no such file; ``name`` is for the sentence, the file's if left out.

    Raises Hy3Error if it holds none, and OSError if it cannot be read.
    """
    try:
        return parse_object(read_small(path), name or path.name)
    except FileNotFoundError:
        return None


def parse_index(index: Any) -> tuple[dict[str, str], int | None]:
    """The weight map (tensor to shard) of a parsed index, and the total size in bytes that it claims, if it does.

    Raises Hy3Error when it is no index, or names a file outside of the checkpoint.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise Hy3Error(f"{INDEX} has no weight_map that names a shard for each tensor; fetch it again.")
    checked: set[str] = set()
    for tensor, name in weight_map.items():
        if isinstance(name, str) and name in checked:
            continue
        if not isinstance(name, str) or not is_inside(name):
            raise Hy3Error(f"{INDEX} puts tensor {tensor} into {name!r}, which is no file of it; fetch it again.")
        checked.add(name)
    return weight_map, claimed_size(index)


def claimed_size(index: Any) -> int | None:
    """The total size in bytes that a parsed index claims, None if it claims none or nonsense."""
    metadata = index.get("metadata") if isinstance(index, dict) else None
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some producers write it as 1.69e11. Not a number compares to nothing.
    if not isinstance(claimed, int | float) or isinstance(claimed, bool) or not 0 <= claimed < 1e18:
        return None
    return int(claimed)


def lfs_size(head: bytes) -> int | None:
    """The size in bytes that a Git LFS pointer declares, 0 if it declares none, None if this is no pointer."""
    if not head.startswith(LFS_PREFIX):
        return None
    match = re.search(rb"^size (\d{1,18})\r?$", head, re.MULTILINE)
    return int(match[1]) if match else 0


def unfinished(directory: Path) -> list[Path]:
    """Unfinished downloads beside the files, in huggingface_hub's corner of a directory, or behind a snapshot."""
    places = [directory.glob("*.incomplete"), (directory / LOCAL_DOWNLOADS).rglob("*.incomplete")]
    if directory.parent.name == "snapshots":
        places.append((directory.parent.parent / "blobs").glob("*.incomplete"))
    return sorted(path for place in places for path in place)


def is_small(name: str) -> bool:
    """Whether engines read a file of this name besides weights. Hidden ones are some tool's own."""
    if name.startswith("."):
        return False
    return PurePosixPath(name).suffix in SMALL_SUFFIXES or name in SMALL_NAMES


def foreign(directory: Path, shards: set[str]) -> list[str]:
    """Names beside the shards that look like weights, or like halves of them, and belong to no index; sorted."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name.endswith((*WEIGHT_SUFFIXES, *PARTIAL_SUFFIXES)) and path.name not in shards
    )


def is_inside(name: str) -> bool:
    """Whether a name can be that of a file in or below the checkpoint."""
    encoded = name.encode(errors="surrogatepass")
    return (
        bool(name)
        and not PurePosixPath(name).is_absolute()
        and ".." not in name.split("/")
        and b"\0" not in encoded
        and len(encoded) <= MAX_PATH_BYTES
        and all(len(part) <= MAX_NAME_BYTES for part in encoded.split(b"/"))
    )
