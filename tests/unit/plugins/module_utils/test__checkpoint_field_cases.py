# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What went wrong with other people's checkpoints, by the number of its report; each must come out right here."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import Report, compare, inspect
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import lfs_size
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import Reference, hub_reference
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import read_header, render_header

NOT_OURS = {
    "B60 name of the repository's directory": "role checkpoint takes a directory, and makes none from a repository's "
    "name: hf download does that",
}
S1, S2, S3 = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "layers-22.safetensors"


def make(directory: Path, shards: dict[str, dict[str, int]]) -> Path:
    """A whole checkpoint of these tensors, of so many bytes each."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        header = render_header({tensor: ("U8", (size,)) for tensor, size in tensors.items()}, {})
        (directory / name).write_bytes(header + bytes(sum(tensors.values())))
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    return directory


def into_cache(directory: Path, repository: Path, *, name: str, blob: str) -> None:
    """Move a file behind a link, as huggingface_hub keeps it."""
    (repository / "blobs").mkdir(exist_ok=True)
    (directory / name).rename(repository / "blobs" / blob)
    (directory / name).symlink_to(f"../../blobs/{blob}")


@pytest.mark.parametrize("level", ["size", "header", "sha256"])
def test_b50_shard_of_the_index_is_not_there(tmp_path: Path, level: str) -> None:
    make(tmp_path, {S1: {"a": 9}, S2: {"b": 9}, S3: {"c": 9}})
    (tmp_path / S2).rename(tmp_path / f"{S2}.incomplete")
    report = inspect(tmp_path, level=level)
    assert report.problems == [
        f"1 of the 3 shards that the index names are missing: {S2}; fetch them.",
        f"Unfinished downloads are left: {S2}.incomplete; finish the download, or remove them if none is running.",
    ]
    assert {file.name for file in report.files} >= {S1, S3}
    assert f"{S2}.incomplete" not in {file.name for file in report.files}


def test_b51_tensor_of_the_index_in_no_shard_or_in_another() -> None:
    mtp = "model.layers.80.eh_proj.weight"
    problems = compare({"a": "s1", "b": "s2", mtp: "s2", "d": "s1"}, {"s1": ["a"], "s2": ["b", "d"]})
    assert [problem.partition(";")[0] for problem in problems] == [
        f"Tensors in the index and in no shard (1): {mtp} ({mtp} belongs in s2)",
        "Tensors in another shard than the index says (1): d (d is in s2, not in s1)",
    ]


def test_b53_pointer_in_place_of_a_shard(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"5a" * 32 + b"\nsize 4999999999\n"
    assert lfs_size(pointer) == 4999999999
    (make(tmp_path, {S1: {"a": 9}}) / S1).write_bytes(pointer)
    assert "pointers stand in place of files of 4999999999 bytes" in inspect(tmp_path, level="header").problems[0]


def entry(start: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def shard(header: Any, data: int = 16) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


TWO = {"a": entry(0, 8), "b": entry(8, 16)}
B54: dict[str, bytes] = {
    "trailing_byte": shard(TWO, 17),
    "truncated": shard(TWO, 15),
    "hole": shard({"a": entry(0, 8), "b": entry(9, 17)}, 17),
    "overlap": shard({"a": entry(0, 8), "b": entry(4, 12)}, 12),
    "empty_file": b"",
    "three_bytes": b"\x10\0\0",
    "len_2^63": struct.pack("<Q", 2**63) + bytes(16),
    "len_gt_file": struct.pack("<Q", 5000) + bytes(16),
    "zeros": bytes(4096),
    "shape_mismatch": shard({"a": entry(0, 8, dtype="F32", shape=[3])}, 8),
    "metadata_int": shard({"__metadata__": {"n": 1}, **TWO}),
    "unknown_dtype": shard({"a": entry(0, 16, dtype="F7")}),
    "bom": shard(b"\xef\xbb\xbf" + json.dumps(TWO).encode()),
}


def test_b54_broken_shards_each_for_its_own_reason(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(shard(TWO))
    assert set(read_header(path).tensors) == {"a", "b"}
    reasons = set()
    for content in B54.values():
        path.write_bytes(content)
        with pytest.raises(Hy3Error) as caught:
            read_header(path)
        reasons.add(str(caught.value))
    assert len(reasons) == len(B54)


def test_b56_right_size_wrong_bytes(tmp_path: Path) -> None:
    repository = tmp_path / "models--acme--Hy3"
    snapshot = make(repository / "snapshots" / "0123abc", {S1: {"a": 9}, S2: {"b": 9}})
    for name in (S1, S2):
        content = (snapshot / name).read_bytes()
        into_cache(snapshot, repository, name=name, blob=hashlib.sha256(content).hexdigest())
    assert inspect(snapshot, level="sha256").problems == []
    blob = (snapshot / S2).resolve()
    flipped = bytearray(blob.read_bytes())
    flipped[-1] ^= 1
    blob.write_bytes(flipped)
    assert inspect(snapshot, level="header").problems == []
    report = inspect(snapshot, level="sha256")
    assert report.problems == [
        f"{S2} has sha256 {hashlib.sha256(flipped).hexdigest()} and the hub recorded {blob.name}, so it is damaged; "
        "fetch it again."
    ]
    assert report.digest is None


# Name in the snapshot, what its link says, and what that is worth.
B57: list[tuple[str, str, str | None]] = [
    ("config.json", "../../blobs/" + "a" * 40, "git-sha1"),
    ("m1.safetensors", "../../blobs/" + "b" * 64, "sha256"),
    ("m2.safetensors", "../../../blobs/ab/" + "ab" * 32, None),
    ("other-folder.safetensors", "../../trash/" + "d" * 64, None),
    ("elsewhere.safetensors", "/mnt/" + "c" * 64, None),
    ("no-hash.safetensors", "../../blobs/5a5a", None),
    ("capitals.safetensors", "../../blobs/" + "A" * 64, None),
]


@pytest.mark.parametrize(("name", "target", "algorithm"), B57, ids=[row[0] for row in B57])
@pytest.mark.parametrize("by_link", [False, True], ids=["in-the-cache", "by-a-link"])
def test_b57_names_of_blobs(tmp_path: Path, name: str, target: str, algorithm: str | None, by_link: bool) -> None:
    snapshot = tmp_path / "hub" / "models--acme--Hy3" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / name).symlink_to(target)
    directory = snapshot
    if by_link:
        directory = tmp_path / "Hy3"
        directory.symlink_to(snapshot)
    found = hub_reference(directory, name)
    assert found == (Reference(algorithm, target.rpartition("/")[2]) if algorithm else None)  # type: ignore[arg-type]  # a table's word


def test_b57_blob_that_is_a_link_into_the_shared_store(tmp_path: Path) -> None:
    """huggingface_hub 2.4.0 keeps the etag as the name of the blob, which then leads to the Xet hash."""
    repository = tmp_path / "models--acme--Hy3"
    snapshot = make(repository / "snapshots" / "0123abc", {S1: {"a": 9}})
    digest = hashlib.sha256((snapshot / S1).read_bytes()).hexdigest()
    into_cache(snapshot, repository, name=S1, blob=digest)
    store = tmp_path / "blobs" / "ab"
    store.mkdir(parents=True)
    (repository / "blobs" / digest).rename(store / ("ab" * 32))
    (repository / "blobs" / digest).symlink_to(f"../../blobs/ab/{'ab' * 32}")
    report = inspect(snapshot, level="header")
    assert (report.problems, report.outside) == ([], [])
    assert next((file.sha256, file.source) for file in report.files if file.name == S1) == (digest, "hub")
    assert inspect(snapshot, level="sha256").problems == []


def test_b59_small_shards_are_no_damage(tmp_path: Path) -> None:
    sizes = (5000, 5000, 900, 1)
    make(tmp_path, {f"m{number}.safetensors": {f"t{number}": size} for number, size in enumerate(sizes)})
    report: Report = inspect(tmp_path, level="header")
    assert (report.problems, report.warnings) == ([], [])


def test_b60_cache_with_a_configuration_only(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--Hy3-NVFP4" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    for level in ("size", "header", "sha256"):
        assert inspect(snapshot, level=level).problems == [
            f"Neither model.safetensors.index.json nor model.safetensors is in {snapshot}; fetch the checkpoint."
        ]
