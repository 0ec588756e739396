# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module with the real huggingface_hub against a double of the hub: what is asked for, what comes, what is said."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import LOCAL_DOWNLOADS, unfinished
from ansible_collections.sparks.hy3.plugins.module_utils._download_tree import PROGRESS, RECORD
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.local_hub import LARGE_BYTES, REPOSITORY, LocalHub
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

OLD, NEW = "1" * 40, "2" * 40
TOKEN = "hf_aVerySecretToken"
# The client writes in pieces of 10 MiB, and a connection that is cut loses what it has of the last one.
PIECE = 10 * 1024**2
ELEMENTS = 4096


def shard(value: int) -> bytes:
    """A shard of one tensor."""
    return render_header({"a": ("U8", (ELEMENTS,))}, {}) + bytes([value]) * ELEMENTS


FILES = {
    "config.json": b'{"architectures": ["HYV3ForCausalLM"]}',
    "model.safetensors": shard(1),
    "notes/read me [1].md": b"Hello\n",
}


@pytest.fixture(autouse=True)
def without_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double has no Xet."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub({OLD: FILES}) as double:
        yield double


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "Hy3 tiny"


def arguments(hub: LocalHub, dest: Path, **others: t.Any) -> dict[str, t.Any]:
    usual = {"repository": REPOSITORY, "revision": OLD, "dest": str(dest), "venv": sys.prefix, "timeout": 10}
    return {**usual, "endpoint": hub.endpoint, **others}


def download(hub: LocalHub, dest: Path, **others: t.Any) -> dict[str, t.Any]:
    return run_module("checkpoint_download", **arguments(hub, dest, **others))


def content(directory: Path) -> dict[str, bytes]:
    """The files but for the hidden ones."""
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in sorted(found.items()) if not name.startswith(".")}


def files_of(directory: Path, level: str = "header") -> dict[str, tuple[str | None, str | None]]:
    """Hash and its source of each file, by module checkpoint_info."""
    answer = run_module("checkpoint_info", path=str(directory), level=level)
    return {file["name"]: (file["sha256"], file["source"]) for file in answer["files"]}


# ---- It fetches once


def test_check_mode_says_what_would_be_fetched_and_writes_nothing(hub: LocalHub, dest: Path) -> None:
    answer = download(hub, dest, _ansible_check_mode=True)
    assert answer["changed"]
    assert answer["fetched"] == sorted(FILES)
    assert answer["fetched_bytes"] == sum(map(len, FILES.values()))
    assert answer["diff"]["after"] == "".join(f"{name}\n" for name in sorted(FILES))
    assert not dest.exists()
    assert {one.method for one in hub.seen if "/resolve/" in one.path} == {"HEAD"}


def test_fetches_all_and_then_needs_no_network(hub: LocalHub, dest: Path) -> None:
    answer = download(hub, dest)
    assert (answer["changed"], answer["revision"], answer["fetched"]) == (True, OLD, sorted(FILES))
    assert content(dest) == FILES
    assert not (dest / PROGRESS).exists()
    hub.seen.clear()
    for check in (False, True):
        again = download(hub, dest, _ansible_check_mode=check)
        assert (again["changed"], again["revision"], again["fetched_bytes"]) == (False, OLD, 0)
    assert hub.seen == []


def test_a_branch_is_resolved_to_a_commit(hub: LocalHub, dest: Path) -> None:
    assert download(hub, dest, revision="main")["revision"] == OLD
    assert not download(hub, dest, revision="main")["changed"]
    hub.commits[NEW] = FILES
    assert download(hub, dest, revision="main", _ansible_check_mode=True)["revision"] == NEW


def test_the_manifest_has_the_hub_s_hashes(hub: LocalHub, dest: Path) -> None:
    """What the real client leaves beside the files is what checkpoint_info reads."""
    download(hub, dest)
    assert files_of(dest, "size")["model.safetensors"] == (hashlib.sha256(shard(1)).hexdigest(), "hub")
    assert files_of(dest)["config.json"] == (hashlib.sha256(FILES["config.json"]).hexdigest(), "read")
    assert set(files_of(dest)) == set(FILES)


def test_patterns(hub: LocalHub, dest: Path) -> None:
    answer = download(hub, dest, allow_patterns=["*.json", "notes/"], ignore_patterns=["*.md"])
    assert answer["fetched"] == ["config.json"]
    assert not download(hub, dest, allow_patterns=["*.json", "notes/"], ignore_patterns=["*.md"])["changed"]
    assert download(hub, dest)["fetched"] == sorted(set(FILES) - {"config.json"})


def test_another_commit_fetches_what_differs(hub: LocalHub, dest: Path) -> None:
    download(hub, dest)
    hub.commits[NEW] = {**FILES, "config.json": b'{"new": 1}', "added.json": b"{}"}
    hub.seen.clear()
    answer = download(hub, dest, revision=NEW)
    assert answer["fetched"] == ["added.json", "config.json"]
    assert content(dest) == hub.commits[NEW]
    assert hub.gets("model.safetensors") == []


# ---- What is there already


def test_a_tree_that_was_brought_is_taken_as_it_is(hub: LocalHub, dest: Path) -> None:
    for name, data in FILES.items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_bytes(data)
    assert files_of(dest)["model.safetensors"] == (None, None)
    answer = download(hub, dest)
    assert (answer["changed"], answer["fetched"], answer["kept"]) == (False, [], [])
    assert [one for one in hub.seen if "/resolve/" in one.path] == []
    # Its hashes were proved, so they are noted as the hub's.
    assert files_of(dest, "size")["model.safetensors"][1] == "hub"
    hub.seen.clear()
    assert not download(hub, dest)["changed"]
    assert hub.seen == []


def test_a_shard_that_is_cut_short_or_damaged_is_fetched_again(hub: LocalHub, dest: Path) -> None:
    dest.mkdir()
    for data in (shard(1)[:-1], shard(2)):
        (dest / "model.safetensors").write_bytes(data)
        (dest / RECORD).unlink(missing_ok=True)
        assert "model.safetensors" in download(hub, dest)["fetched"]
        assert content(dest) == FILES


@pytest.mark.parametrize("text", [b'{"edited": true}', FILES["config.json"].replace(b"C", b"c")])
def test_what_was_edited_is_kept(hub: LocalHub, dest: Path, text: bytes) -> None:
    """Some have to be edited, as an ignore list without lm_head; the client alone would overwrite it."""
    download(hub, dest)
    (dest / "config.json").write_bytes(text)
    os.utime(dest / "config.json", (time.time() + 10, time.time() + 10))
    assert not download(hub, dest)["changed"]  # recorded, so nobody looks
    (dest / RECORD).unlink()
    answer = download(hub, dest)
    assert (answer["changed"], answer["kept"]) == (False, ["config.json"])
    assert answer["warnings"] == ["config.json was edited and is kept; remove it to have the repository's fetched."]
    assert (dest / "config.json").read_bytes() == text
    hub.commits[NEW] = {**FILES, "config.json": b'{"new": 1}'}
    assert download(hub, dest, revision=NEW)["kept"] == ["config.json"]
    (dest / "config.json").unlink()
    assert download(hub, dest, revision=NEW)["fetched"] == ["config.json"]


# ---- Faults


def test_a_connection_that_is_cut_is_taken_up_where_it_was(hub: LocalHub, dest: Path) -> None:
    hub.commits[OLD] = {"model.safetensors": os.urandom(2 * PIECE)}
    hub.cut_after, hub.cuts = PIECE + 1000, 1
    assert download(hub, dest)["changed"]
    assert [one.range for one in hub.gets("model.safetensors")] == [None, f"bytes={PIECE}-"]
    assert content(dest) == hub.commits[OLD]


def test_a_transfer_that_stays_cut_says_how_to_go_on(hub: LocalHub, dest: Path) -> None:
    hub.cuts = 100
    answer = download(hub, dest)
    assert answer["msg"].startswith(f"The transfer was cut off and {hub.endpoint} did not come back (")
    assert answer["msg"].endswith("; run again, and only the rest is fetched.")
    assert unfinished(dest) == []
    hub.cuts = 0
    hub.seen.clear()
    assert download(hub, dest)["fetched"] == ["model.safetensors"]
    assert content(dest) == FILES
    assert hub.gets("config.json") == []


def test_a_run_that_is_killed_goes_on_and_leaves_no_process(hub: LocalHub, dest: Path) -> None:
    hub.wait_within = 60
    module = subprocess.Popen(
        [sys.executable, "-m", "ansible_collections.sparks.hy3.plugins.modules.checkpoint_download"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    stdin = t.cast("t.IO[bytes]", module.stdin)
    stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": arguments(hub, dest)}).encode())
    stdin.close()
    await_true(lambda: bool(hub.gets("model.safetensors")) and (dest / "notes/read me [1].md").exists())
    await_true((dest / PROGRESS).exists)
    company = download(hub, dest)["msg"]
    assert company.startswith(f"Another run is filling {dest} (process {module.pid}, "), company
    children = Path(f"/proc/{module.pid}/task/{module.pid}/children").read_text().split()
    assert children
    module.send_signal(signal.SIGKILL)
    module.wait()
    await_true(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert unfinished(dest)
    hub.wait_within = 0
    hub.seen.clear()
    assert download(hub, dest)["fetched"] == ["model.safetensors"]
    assert content(dest) == FILES
    assert (unfinished(dest), hub.gets("config.json")) == ([], [])
    assert not (dest / PROGRESS).exists()


def await_true(condition: t.Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_bytes_that_are_not_the_hub_s(hub: LocalHub, dest: Path) -> None:
    """The client compares sizes only."""
    hub.damage = {"model.safetensors"}
    answer = download(hub, dest)
    sha256 = hashlib.sha256(shard(1)).hexdigest()
    assert answer["msg"].startswith("1 of 3 files did not arrive as the hub has them (model.safetensors has sha256 ")
    assert answer["msg"].endswith(f" and the hub recorded {sha256}); run again, and these are fetched again.")
    problems = run_module("checkpoint_info", path=str(dest), level="sha256")["problems"]
    assert any(sha256 in problem for problem in problems), problems
    hub.damage = set()
    assert download(hub, dest)["fetched"] == ["model.safetensors"]
    assert content(dest) == FILES


def test_a_slow_hub_is_waited_for(hub: LocalHub, dest: Path) -> None:
    hub.delay = 0.5
    assert download(hub, dest)["changed"]


def test_a_hub_that_is_silent_is_given_up(hub: LocalHub, dest: Path) -> None:
    hub.delay = 3
    assert f"{hub.endpoint} cannot be reached (" in download(hub, dest, timeout=1)["msg"]


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(hub: LocalHub, dest: Path) -> None:
    hub.claimed = {"model.safetensors": 10**18}
    answer = download(hub, dest)
    assert answer["msg"].startswith(f"{dest} needs 10000000000000000")
    assert "bytes for 3 files and has" in answer["msg"]
    assert not dest.exists()


def test_leftovers_of_killed_clients_are_cleared(hub: LocalHub, dest: Path) -> None:
    """Nobody goes on with the first kind; an older client would with the second, until all is whole."""
    place = dest / LOCAL_DOWNLOADS
    place.mkdir(parents=True)
    new, old = place / "abc=.1234.0a1b2c3d.incomplete", place / f"abc=.{'a' * 64}.incomplete"
    new.write_bytes(b"half")
    old.write_bytes(b"half")
    hub.cuts = 100
    assert (download(hub, dest)["failed"], unfinished(dest)) == (True, [old])
    hub.cuts = 0
    download(hub, dest)
    assert unfinished(dest) == []


def test_somebody_s_own_download_is_not_disturbed(hub: LocalHub, dest: Path) -> None:
    place = dest / LOCAL_DOWNLOADS
    place.mkdir(parents=True)
    with (place / "model.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert download(hub, dest)["msg"] == (
            f"Something else is fetching model.safetensors into {dest}; wait for it, or stop it, and run again."
        )


# ---- Tokens


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def test_a_private_repository(hub: LocalHub, dest: Path, token_file: Path) -> None:
    hub.token = TOKEN
    assert download(hub, dest)["msg"] == (
        f"{hub.endpoint} has no repository {REPOSITORY} that a stranger without a token may read; correct the name, or "
        "if it is private name a file with a token in token_file."
    )
    answer = download(hub, dest, token_file=str(token_file))
    assert answer["changed"]
    assert content(dest) == FILES
    kept = [path for path in dest.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert (TOKEN in json.dumps(answer), kept) == (False, [])


def test_a_token_that_the_hub_does_not_take(hub: LocalHub, dest: Path, token_file: Path) -> None:
    hub.token = "hf_another"
    assert download(hub, dest, token_file=str(token_file))["msg"] == (
        f"{hub.endpoint} refuses the token in {token_file} (HTTP 401); write a token that may read {REPOSITORY} in "
        "token_file."
    )


@pytest.mark.parametrize("check", [False, True])
def test_a_gated_repository(hub: LocalHub, dest: Path, token_file: Path, check: bool) -> None:
    hub.gated = True
    answer = download(hub, dest, token_file=str(token_file), _ansible_check_mode=check)
    assert answer["msg"] == (
        f"{REPOSITORY} is gated, and the token in {token_file} may not read it; accept its terms at "
        f"{hub.endpoint}/{REPOSITORY}, and name a file with a token of that account in token_file."
    )


def test_the_environment_s_token_and_offline_mode_are_not_used(
    hub: LocalHub, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert download(hub, dest)["changed"]
    assert {one.authorization for one in hub.seen} == {None}


# ---- What cannot be


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        ({"revision": "v9"}, f"{REPOSITORY} has no revision 'v9'; write a commit of 40 hexadecimal digits, or"),
        ({"revision": NEW}, f"{REPOSITORY} has no revision '{NEW}'; write a commit"),
        ({"repository": "example/none"}, "has no repository example/none that a stranger without a token may read;"),
        ({"repository": "none"}, "repository is 'none', which is none; write OWNER/NAME."),
        ({"endpoint": "hub"}, "endpoint is 'hub', which is no address of a hub; write https://HOST"),
        ({"endpoint": "http://127.0.0.1:{port}"}, "cannot be reached ("),
        ({"venv": "/nonexistent"}, "/nonexistent/bin/python cannot be run (No such file or directory), and it"),
        ({"token_file": "/nonexistent"}, "token_file /nonexistent cannot be read (No such file or directory);"),
        ({"allow_patterns": ["*.gguf"]}, "No file of the repository passes allow_patterns and ignore_patterns;"),
        ({"max_workers": 0}, "max_workers is 0, and it must be at least 1;"),
        ({"user": "nobody-at-all"}, "user is 'nobody-at-all', which this node does not have;"),
    ],
)
def test_one_sentence(hub: LocalHub, dest: Path, others: dict[str, t.Any], sentence: str) -> None:
    others = {name: v.format(port=free_port()) if isinstance(v, str) else v for name, v in others.items()}
    answer = download(hub, dest, **others)
    assert sentence in answer["msg"]
    assert (answer["msg"][-1], "Traceback" in answer["msg"]) == (".", False)
    assert not dest.exists()


def test_something_else_than_a_hub(hub: LocalHub, dest: Path) -> None:
    hub.html = True
    assert f"{hub.endpoint} does not answer as a hub does (" in download(hub, dest)["msg"]


def test_a_venv_without_the_client(hub: LocalHub, dest: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(os.path.realpath(sys.executable))
    answer = download(hub, dest, venv=str(tmp_path))
    assert answer["msg"] == (
        f"{tmp_path}/bin/python has no huggingface_hub that works (No module named 'huggingface_hub'), which fetches "
        "the checkpoint; install it there, or name the venv of the engine, which has it."
    )


def test_directories_that_are_not_to_be_filled(hub: LocalHub, dest: Path, tmp_path: Path) -> None:
    dest.mkdir()
    (dest / ".hy3-padding").write_text("{}")
    assert f"{dest} holds a padded checkpoint, which the original would overwrite;" in download(hub, dest)["msg"]
    assert "lies in a cache of huggingface_hub" in download(hub, tmp_path / "snapshots" / OLD)["msg"]
    (dest / ".hy3-padding").unlink()
    (dest / RECORD).parent.mkdir(parents=True)
    (dest / RECORD).write_text(json.dumps({"repository": "example/other", "files": {}}))
    assert f"{dest} holds example/other, not {REPOSITORY}" in download(hub, dest)["msg"]
    (tmp_path / "file").touch()
    assert download(hub, tmp_path / "file")["msg"] == f"{tmp_path}/file is no directory; name another, or remove it."


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_directory_of_another_user_s(hub: LocalHub, tmp_path: Path) -> None:
    """pytest's own directory is closed to others, so that not even the last part can be looked at."""
    answer = download(hub, tmp_path / "closed", user="nobody")
    assert answer["msg"].endswith(" cannot be used (Permission denied); give it to the user that fetches.")


def test_large_files_are_large() -> None:
    assert len(FILES["model.safetensors"]) >= LARGE_BYTES > len(FILES["config.json"])
