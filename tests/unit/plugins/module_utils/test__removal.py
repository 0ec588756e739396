# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import socket
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._removal import Remover, expand, refuse_shallow


@pytest.mark.parametrize("path", ["", "/", "/etc", "/etc/", "etc/hy3", "//hy3", "/var/../etc/hy3", "/var/lib/.."])
def test_what_may_not_be_removed(path: str) -> None:
    with pytest.raises(Hy3Error, match="absolute path"):
        refuse_shallow(["/etc/hy3/hy3.nft", path])


def test_what_may_be_removed() -> None:
    refuse_shallow(["/etc/hy3", "/run/hy3-*", "/etc/systemd/system/*.wants/hy3-ray.service"])


def make(root: Path, *paths: str) -> None:
    """A file for each path, with its directories; one that ends with a slash is a directory."""
    for path in paths:
        place = root / path
        (place if path.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            place.write_text(path)


def left(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


class Case(t.NamedTuple):
    """What is there, what is asked for, and what is said and left; paths are relative to the test's directory."""

    there: list[str]
    paths: list[str]
    removed: list[str]
    left: list[str]
    keep: t.Sequence[str] = ()
    directories: t.Sequence[str] = ()
    kept: t.Sequence[str] = ()


RAY = ["ray/session_a/logs/gcs.out", "ray/session_a/logs/old/x", "ray/session_a/sockets/s", "ray/session_b/logs/r.out"]
CASES: dict[str, Case] = {
    "nothing there": Case([], ["a/b", "c"], [], []),
    "a file": Case(["a/b", "a/c"], ["a/b"], ["a/b"], ["a", "a/c"]),
    "a file where a directory is asked for": Case(["a"], ["a/b"], [], ["a"]),
    "a tree is named once": Case(["a/b/c", "a/b/d/e", "a/f/"], ["a/b"], ["a/b"], ["a", "a/f"]),
    "an empty directory": Case(["a/b/"], ["a/b"], ["a/b"], ["a"]),
    "logs stay": Case(
        [*RAY, "ray/address"],
        ["ray"],
        ["ray/address", "ray/session_a/sockets"],
        [
            *("ray", "ray/session_a", "ray/session_a/logs", "ray/session_a/logs/gcs.out", "ray/session_a/logs/old"),
            *("ray/session_a/logs/old/x", "ray/session_b", "ray/session_b/logs", "ray/session_b/logs/r.out"),
        ],
        keep=["ray/session_*/logs"],
        kept=["ray/session_a/logs", "ray/session_b/logs"],
    ),
    "what is kept is found at its own depth only": Case(
        ["ray/session_a/x/logs/y", "ray/logs"], ["ray"], ["ray"], [], keep=["ray/session_*/logs"]
    ),
    "no other's directory": Case(
        ["a/ours", "a/theirs"], ["a/ours"], ["a/ours"], ["a", "a/theirs"], directories=["a"], kept=["a/theirs"]
    ),
    "an emptied directory": Case(["a/b/ours"], ["a/b/ours"], ["a/b/ours", "a/b", "a"], [], directories=["a/b", "a"]),
    "a file is no directory": Case(["a/b"], [], [], ["a", "a/b"], directories=["a/b"]),
    "a directory with a tree that stays": Case(
        ["a/ray/logs/x"], ["a/ray"], [], ["a", "a/ray", "a/ray/logs", "a/ray/logs/x"],
        keep=["a/ray/logs"], directories=["a"], kept=["a/ray/logs", "a/ray"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("write", [False, True], ids=["foreseen", "done"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_removed_and_kept(tmp_path: Path, case: Case, write: bool) -> None:
    make(tmp_path, *case.there)
    before = left(tmp_path)
    remover = Remover(write=write, keep=[f"{tmp_path}/{pattern}" for pattern in case.keep])
    for path in case.paths:
        remover.tree(f"{tmp_path}/{path}")
    for path in case.directories:
        remover.directory(f"{tmp_path}/{path}")
    assert [path.removeprefix(f"{tmp_path}/") for path in remover.removed] == case.removed
    assert [path.removeprefix(f"{tmp_path}/") for path in remover.kept] == list(case.kept)
    assert left(tmp_path) == (sorted(case.left) if write else before)


def test_links_and_what_is_no_file_go_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "theirs/model", "ours/")
    (tmp_path / "ours/link").symlink_to(tmp_path / "theirs")
    (tmp_path / "ours/dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "ours/pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("ours/socket")
        remover = Remover(write=True)
        remover.tree(f"{tmp_path}/ours")
    assert left(tmp_path) == ["theirs", "theirs/model"]


def test_a_link_is_no_directory_to_empty(tmp_path: Path) -> None:
    make(tmp_path, "theirs/")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    remover = Remover(write=True)
    remover.directory(f"{tmp_path}/link")
    assert (remover.removed, left(tmp_path)) == ([], ["link", "theirs"])


def test_a_link_that_takes_a_directorys_place_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's user owns Ray's directory, and root removes it."""
    make(tmp_path, "theirs/model", "ours/session/sockets/s")
    listed = os.listdir

    def exchange(directory: int) -> list[str]:
        names = listed(directory)
        if "sockets" in names:
            (tmp_path / "ours/session/sockets/s").unlink()
            (tmp_path / "ours/session/sockets").rmdir()
            (tmp_path / "ours/session/sockets").symlink_to(tmp_path / "theirs")
        return names

    monkeypatch.setattr(os, "listdir", exchange)
    Remover(write=True).tree(f"{tmp_path}/ours")
    monkeypatch.undo()
    assert left(tmp_path) == ["theirs", "theirs/model"]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="nothing is mounted there")
def test_what_is_mounted_stays() -> None:
    remover = Remover(write=False)
    remover.tree("/dev/shm")
    assert (remover.removed, remover.kept) == ([], ["/dev/shm"])


def test_patterns(tmp_path: Path) -> None:
    make(tmp_path, "hy3-checkpoint-b/x", "hy3-checkpoint-a/x", "hy3-ray/x")
    patterns = [f"{tmp_path}/hy3-checkpoint-*", f"{tmp_path}/hy3-checkpoint-a", f"{tmp_path}/none-*"]
    assert expand(patterns) == [f"{tmp_path}/hy3-checkpoint-a", f"{tmp_path}/hy3-checkpoint-b"]
