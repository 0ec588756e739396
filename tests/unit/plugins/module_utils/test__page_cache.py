# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._page_cache import WINDOW, Skipped, mapped_by, purge, resident

MIB = 1024**2
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory on disk: a tmpfs, as /tmp may be, has nothing but page cache."""
    output = Path(__file__).parents[3] / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as name:
        yield Path(name)


@pytest.fixture
def stranger() -> Iterator[None]:
    """A user who owns nothing that root owns."""
    user = os.geteuid()
    os.seteuid(user or NOBODY)
    yield
    os.seteuid(user)


def write(path: Path, size: int) -> str:
    path.write_bytes(os.urandom(4096) * (size // 4096))
    return str(path)


def test_dirty_pages_are_released(folder: Path) -> None:
    write(folder / "model.safetensors", 8 * MIB)
    outcome = purge([str(folder)])
    assert (outcome.resident_before, outcome.resident_after, outcome.released) == (8 * MIB, 0, 8 * MIB)
    assert (outcome.files, outcome.skipped, outcome.kept) == (1, [], [])


def test_a_second_purge_releases_nothing(folder: Path) -> None:
    path = write(folder / "model.safetensors", MIB)
    purge([path])
    assert purge([path]).released == 0


def test_measure_only_keeps_the_pages(folder: Path) -> None:
    path = write(folder / "model.safetensors", MIB)
    outcome = purge([path], measure_only=True)
    assert (outcome.resident_before, outcome.resident_after, outcome.released, outcome.kept) == (MIB, MIB, 0, [])
    assert purge([path]).released == MIB


def test_mapped_pages_stay_and_name_the_process(folder: Path) -> None:
    mapped, other = (write(folder / name, 4096) for name in ("mapped", "other"))
    with open(mapped, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert len(pages[:]) == 4096
        outcome = purge([mapped, other])
        assert (outcome.resident_before, outcome.resident_after, outcome.kept) == (8192, 4096, [mapped])
        assert list(mapped_by(outcome.kept)) == [os.getpid()]
    assert mapped_by(outcome.kept) == {}


def test_residency_is_counted_over_windows(folder: Path) -> None:
    # Sparse: only the pages that were written are in the page cache.
    path = folder / "large"
    with path.open("wb") as file:
        for start in (0, WINDOW - 4096, WINDOW, 2 * WINDOW + 4096):
            os.pwrite(file.fileno(), b"x" * 4096, start)
        os.truncate(file.fileno(), 2 * WINDOW + 8192 + 1)
    with path.open("rb") as file:
        assert resident(file.fileno()) == 4 * 4096


def test_an_empty_file_has_no_pages(folder: Path) -> None:
    (folder / "empty").touch()
    outcome = purge([str(folder)])
    assert (outcome.files, outcome.resident_before, outcome.skipped) == (1, 0, [])


def test_links_to_blobs_are_followed_once(folder: Path) -> None:
    for name in ("blobs", "snapshots/a", "snapshots/b"):
        (folder / name).mkdir(parents=True)
    write(folder / "blobs" / "hash", MIB)
    for name in ("a", "b"):
        (folder / "snapshots" / name / "model.safetensors").symlink_to("../../blobs/hash")
    assert (purge([str(folder / "snapshots")]).files, purge([str(folder), str(folder / "blobs" / "hash")]).files) == (
        1,
        1,
    )


def test_links_to_directories_are_followed_only_if_named(folder: Path) -> None:
    (folder / "real").mkdir()
    write(folder / "real" / "model.safetensors", MIB)
    (folder / "real" / "up").symlink_to(folder)
    (folder / "link").symlink_to("real")
    outcome = purge([str(folder / "link")])
    assert (outcome.files, outcome.released) == (1, MIB)
    assert outcome.skipped == [Skipped(str(folder / "link" / "up"), "Link to a directory")]


def test_what_is_no_regular_file_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # the path of a socket must be short
    os.mkfifo("fifo")
    Path("gone").symlink_to("nowhere")
    write(Path("model.safetensors"), 4096)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        outcome = purge([".", "absent"])
    assert (outcome.files, outcome.released) == (1, 4096)
    assert outcome.skipped == [
        Skipped("./fifo", "Not a regular file"),
        Skipped("./gone", "No such file or directory"),
        Skipped("./socket", "Not a regular file"),
        Skipped("absent", "No such file or directory"),
    ]


@pytest.mark.usefixtures("stranger")
def test_files_of_another_user_are_skipped() -> None:
    outcome = purge(["/etc/passwd", "/etc/shadow"])
    assert outcome.files == 0
    assert [(path, reason.partition(",")[0]) for path, reason in outcome.skipped] == [
        ("/etc/passwd", "Neither owned nor writable"),
        ("/etc/shadow", "Permission denied"),
    ]
