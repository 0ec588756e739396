# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hashes against the hub's records, a manifest, and files that change meanwhile."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import (
    BUFFER_BYTES,
    WINDOW_BYTES,
    File,
    Hashed,
    Reference,
    contradiction,
    differences,
    hash_all,
    hash_file,
    hub_reference,
    links_outside,
    list_files,
    parse_download,
    parse_etag,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SHA, GIT = "5a" * 32, "5a" * 20

# What huggingface_hub noted, the file's time, and what that is worth.
NOTES: list[tuple[str, str, float, Reference | None]] = [
    ("large", f"c0ffee\n{SHA}\n1712656091.1\n", 1712656091.0, Reference("sha256", SHA)),
    ("small", f"c0ffee\n{GIT}\n1712656091.1\n", 1712656091.0, Reference("git-sha1", GIT)),
    ("a second of slack", f"c0ffee\n{GIT}\n1712656091.1\n", 1712656092.0, Reference("git-sha1", GIT)),
    ("edited since", f"c0ffee\n{SHA}\n1712656091.1\n", 1712656093.0, None),
    ("etag that is no hash", "c0ffee\nW/5a5a\n1712656091.1\n", 0.0, None),
    ("cut", f"c0ffee\n{SHA}\n", 0.0, None),
    ("no time", f"c0ffee\n{SHA}\nnow\n", 0.0, None),
    ("not a number", f"c0ffee\n{SHA}\nnan\n", 0.0, None),
    ("empty", "", 0.0, None),
]


@pytest.mark.parametrize(("text", "mtime", "expected"), [row[1:] for row in NOTES], ids=[row[0] for row in NOTES])
def test_download_notes(text: str, mtime: float, expected: Reference | None) -> None:
    assert parse_download(text, mtime=mtime) == expected


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="0123456789abcdefABCDEF\n\x00é", max_size=70), mtime=st.floats(allow_nan=False))
def test_any_note_gives_a_reference_or_none(text: str, mtime: float) -> None:
    for found in (parse_etag(text), parse_download(text, mtime=mtime)):
        assert found is None or len(found.value) in (40, 64)


def test_note_beside_a_directory(tmp_path: Path) -> None:
    name = "sub/model 1.safetensors"
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_bytes(b"x")
    assert hub_reference(tmp_path, name) is None
    note = tmp_path / ".cache/huggingface/download" / f"{name}.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"c0ffee\n{SHA}\n{time.time()}\n")
    assert hub_reference(tmp_path, name) == Reference("sha256", SHA)
    os.utime(tmp_path / name, (time.time() + 9, time.time() + 9))
    assert hub_reference(tmp_path, name) is None
    note.write_bytes(b"\xff\xfe")
    assert hub_reference(tmp_path, name) is None


def test_list_files(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "a b", tmp_path / "elsewhere"
    for name in ("config.json", "sub/x y.safetensors", ".cache/z", ".hidden", "m.incomplete"):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").touch()
    (home / "link.safetensors").symlink_to("../elsewhere/model.safetensors")
    (home / "folder").symlink_to("../elsewhere")
    (home / "up").symlink_to("..")
    (home / "loop").symlink_to("loop")
    (home / "broken").symlink_to("nowhere")
    (home / "within").symlink_to("config.json")
    os.mkfifo(home / "fifo")
    (home / "config.json").write_bytes(b"{}")
    sizes, unread = list_files(home)
    assert list(sizes.items()) == [
        ("config.json", 2),
        ("link.safetensors", 0),
        ("sub/x y.safetensors", 0),
        ("within", 2),
    ]
    assert unread == []
    assert links_outside(home, sizes) == ["link.safetensors"]


@pytest.mark.parametrize("size", [0, 1, BUFFER_BYTES, BUFFER_BYTES + 1, 2 * WINDOW_BYTES + 5])
def test_hashes_are_those_of_the_tools(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a b"
    path.write_bytes(os.urandom(4096) * (size // 4096) + os.urandom(size % 4096))
    git = subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True).stdout.strip()
    assert hash_file(path, git=True) == (size, hashlib.sha256(path.read_bytes()).hexdigest(), git)
    assert hash_file(path)[2] is None


def test_hash_all_is_complete_and_needs_no_more_than_its_buffers(tmp_path: Path) -> None:
    names = [f"{number} é.safetensors" for number in range(20)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(number))
    references = {names[3]: Reference("git-sha1", GIT)}
    sizes = {name: number for number, name in enumerate(names)}
    found = {one.file.name: one for one in hash_all(tmp_path, sizes, references=references, workers=4)}
    assert list(found) == names[::-1]  # the largest first
    assert {name for name, one in found.items() if one.git} == {names[3]}
    assert [found[name].file for name in names] == [
        File(name, number, hashlib.sha256(bytes(number)).hexdigest(), "read") for number, name in enumerate(names)
    ]


def test_file_that_is_gone_is_said(tmp_path: Path) -> None:
    (found,) = hash_all(tmp_path, {"gone": 5}, references={})
    assert found == Hashed(File("gone", 5), error="gone cannot be read (No such file or directory).")


def test_file_that_changes_while_it_is_hashed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(bytes(64 * BUFFER_BYTES))
    stop = threading.Event()

    def write() -> None:
        with path.open("r+b") as file:
            while not stop.wait(0.001):
                file.seek(0)
                file.write(b"x")
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(Hy3Error, match=r"s\.safetensors changed while it was read; wait"):
            hash_file(path)
    finally:
        stop.set()
        writer.join()


def test_file_that_is_replaced_while_it_is_hashed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(bytes(64 * BUFFER_BYTES))
    stop = threading.Event()

    def replace() -> None:
        while not stop.wait(0.001):
            (tmp_path / "new").write_bytes(bytes(9))
            os.replace(tmp_path / "new", path)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        with pytest.raises(Hy3Error, match="changed while it was read"):
            for _turn in range(1000):
                hash_file(path)
    finally:
        stop.set()
        writer.join()


READ = File("m", 5, SHA, "read")
CONTRADICTIONS: list[tuple[str, str | None, Reference | None, str | None]] = [
    ("nothing recorded", None, None, None),
    ("the same", None, Reference("sha256", SHA), None),
    ("another", None, Reference("sha256", "0" * 64), f"m has sha256 {SHA} and the hub recorded {'0' * 64}"),
    ("the same by git", GIT, Reference("git-sha1", GIT), None),
    ("another by git", "1" * 40, Reference("git-sha1", GIT), f"m has git-sha1 {'1' * 40} and the hub recorded {GIT}"),
]


@pytest.mark.parametrize(
    ("git", "reference", "clause"), [row[1:] for row in CONTRADICTIONS], ids=[row[0] for row in CONTRADICTIONS]
)
def test_contradiction(git: str | None, reference: Reference | None, clause: str | None) -> None:
    assert contradiction(Hashed(READ, git), reference) == clause


DIFFERENCES: list[tuple[str, File, list[str]]] = [
    ("the same", READ, []),
    ("in capitals", File("m", 5, SHA.upper()), []),
    ("hash not known", File("m", 5), []),
    ("missing", File("n", 5), ["Files of the manifest are missing (1): n; fetch them."]),
    (
        "size",
        File("m", 6, SHA),
        ["Files of another size than the manifest's (1): m (5 bytes, not 6); fetch them again."],
    ),
    (
        "content",
        File("m", 5, "0" * 64),
        [
            "Files with other content than the manifest's (1): m (sha256 5a5a5a5a5a5a, not 000000000000); "
            "fetch them again."
        ],
    ),
]


@pytest.mark.parametrize(
    ("expected", "problems"), [row[1:] for row in DIFFERENCES], ids=[row[0] for row in DIFFERENCES]
)
def test_differences(expected: File, problems: list[str]) -> None:
    assert differences([expected], {"m": READ}) == problems
