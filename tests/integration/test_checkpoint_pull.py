# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults in the middle of a pull, on this machine alone: real daemons on its loopback are the nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.pull_nodes import (
    Daemon,
    arguments,
    content,
    free_port,
    manifest,
    start_module,
    write_tree,
)

Files = list[dict[str, t.Any]]
SHARDS, SIZE = 12, 4_000_000
SLOW = 6_000  # KiB a second: the whole takes about eight seconds


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "head", shards=SHARDS, size=SIZE)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[t.Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def start(name: str, directory: Path, **others: t.Any) -> Daemon:
        daemons.append(Daemon(name, directory, tmp_path, **others))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.kill()


Serve = t.Callable[..., Daemon]


def finish(process: subprocess.Popen[str], *, within: float = 60) -> dict[str, t.Any]:
    process.stdin = None  # closed already
    stdout, stderr = process.communicate(timeout=within)
    assert stdout, stderr
    return dict(json.loads(stdout))


def wait_for(what: t.Callable[[], object], *, within: float = 30) -> None:
    deadline = time.monotonic() + within
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shards(dest: Path) -> set[str]:
    return {path.name for path in dest.glob("*.safetensors")}


def served(daemon: Daemon) -> list[int]:
    """The processes of a daemon, its own first."""
    found = subprocess.run(["pgrep", "-P", str(daemon.process.pid)], capture_output=True, text=True, check=False)
    children = [int(pid) for pid in found.stdout.split()]
    return [daemon.process.pid, *children]


def rsyncs(dest: Path) -> list[str]:
    """The command lines of what still writes to a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found += [line] if f"{dest}/.hy3-pull" in line else []
    return found


def test_puller_is_killed(head: Path, tmp_path: Path, serve: Serve) -> None:
    """Nothing goes on without it, what came stays, and the next run pulls only the rest."""
    dest, files, daemon = tmp_path / "dest", manifest(head), serve("head", head, bwlimit=SLOW)
    process = start_module(arguments(dest, files, daemon.source))
    wait_for(lambda: len(shards(dest)) > 3)
    told = dest / ".hy3-pull/progress.json"
    # It is told once a second, first before anything came.
    wait_for(lambda: json.loads(told.read_bytes())["bytes"] > 0)
    progress = json.loads(told.read_bytes())
    process.kill()
    process.wait()
    wait_for(lambda: not rsyncs(dest))
    whole = shards(dest)
    assert 3 < len(whole) < SHARDS
    assert all((dest / name).read_bytes() == (head / name).read_bytes() for name in whole)
    assert not (dest / "config.json").exists()
    came = [path.stat().st_size for path in (dest / ".hy3-pull/files").iterdir()]
    # Without anybody to tell it, rsync would have gone on to the end of its file.
    assert min(came) < SIZE
    halves = sum(came)
    assert 0 < progress["bytes"] < progress["bytes_total"] == sum(file["size"] for file in files)
    assert progress["files_total"] == len(files)
    done = run_module("checkpoint_pull", **arguments(dest, files, daemon.source))
    assert set(done["pulled"]) == {file["name"] for file in files} - whole
    assert done["received"] < done["pulled_bytes"] - halves * 0.8
    assert content(dest) == content(head)
    assert not run_module("checkpoint_pull", **arguments(dest, files, daemon.source))["changed"]


def test_second_run_waits_for_the_first(head: Path, tmp_path: Path, serve: Serve) -> None:
    dest, files, daemon = tmp_path / "dest", manifest(head), serve("head", head, bwlimit=SLOW)
    first = start_module(arguments(dest, files, daemon.source))
    wait_for((dest / ".hy3-pull").exists)
    hasty = run_module("checkpoint_pull", **arguments(dest, files, daemon.source, timeout=1))
    assert "Another run is writing" in hasty["msg"]
    second = run_module("checkpoint_pull", **arguments(dest, files, daemon.source))
    assert finish(first)["changed"]
    assert not second["changed"]


def test_chain_flows_while_the_head_is_slow(head: Path, tmp_path: Path, serve: Serve) -> None:
    """Three nodes behind one slow head take about as long as one: each takes what the one before has."""
    files, slow = manifest(head), serve("head", head, bwlimit=SLOW // 2)
    places = [tmp_path / name for name in ("one", "two", "three")]
    for place in places:
        place.mkdir()
    daemons = [serve(place.name, place) for place in places[:2]]
    began = time.monotonic()
    pullers = []
    for number, place in enumerate(places):
        sources = [daemon.source for daemon in reversed(daemons[:number])] + [slow.source]
        pullers.append(start_module(arguments(place, files, *sources, streams=1)))
    results = []
    for puller in pullers:
        results.append((finish(puller, within=120), time.monotonic() - began))
    assert all(content(place) == content(head) for place in places)
    assert results[0][0]["given"] == {"head": len(files)}
    assert results[1][0]["given"] == {"one": len(files)}
    assert results[2][0]["given"] == {"two": len(files)}
    # A star would take thrice as long.
    assert results[2][1] < 1.6 * results[0][1]


def test_middle_dies_on_the_way(head: Path, tmp_path: Path, serve: Serve) -> None:
    files, slow = manifest(head), serve("head", head, bwlimit=SLOW)
    middle, dest = tmp_path / "middle", tmp_path / "dest"
    shutil.copytree(head, middle)
    daemon = serve("middle", middle, bwlimit=SLOW)
    process = start_module(arguments(dest, files, daemon.source, slow.source))
    wait_for(lambda: len(shards(dest)) > 2)
    daemon.kill()
    done = finish(process)
    assert content(dest) == content(head)
    assert done["given"]["middle"] > 2
    assert done["given"]["head"] > 2
    assert [source["name"] for source in done["passed_over"]] == ["middle"]


def test_middle_hangs(head: Path, tmp_path: Path, serve: Serve) -> None:
    """It takes connections and says nothing, as when its link is down."""
    files, slow = manifest(head), serve("head", head)
    daemon = serve("middle", head)
    daemon.process.send_signal(signal.SIGSTOP)
    dest = tmp_path / "dest"
    done = run_module("checkpoint_pull", **arguments(dest, files, daemon.source, slow.source, timeout=2))
    daemon.process.send_signal(signal.SIGCONT)
    assert content(dest) == content(head)
    assert done["given"] == {"head": len(files)}
    assert [source["name"] for source in done["passed_over"]] == ["middle"]


def test_daemon_is_killed_and_comes_back(head: Path, tmp_path: Path, serve: Serve) -> None:
    dest, files = tmp_path / "dest", manifest(head)
    first = serve("head", head, bwlimit=SLOW)
    process = start_module(arguments(dest, files, first.source, timeout=30))
    wait_for(lambda: len(shards(dest)) > 2)
    first.kill()
    time.sleep(1)
    serve("again", head, port=first.port)
    done = finish(process)
    assert content(dest) == content(head)
    assert done["passed_over"] == []


def test_daemon_is_killed_for_good(head: Path, tmp_path: Path, serve: Serve) -> None:
    dest, files = tmp_path / "dest", manifest(head)
    daemon = serve("head", head, bwlimit=SLOW)
    process = start_module(arguments(dest, files, daemon.source, timeout=2))
    wait_for(lambda: len(shards(dest)) > 2)
    daemon.kill()
    message = finish(process)["msg"]
    assert message.startswith("No source can be pulled from (head: ")
    assert message.endswith("and run again: only the rest is pulled.")
    whole = shards(dest)
    done = run_module("checkpoint_pull", **arguments(dest, files, serve("again", head).source))
    assert set(done["pulled"]) == {file["name"] for file in files} - whole
    assert content(dest) == content(head)


@pytest.mark.parametrize(("seconds", "survives"), [(3, True), (15, False)])
def test_link_is_down(head: Path, tmp_path: Path, serve: Serve, *, seconds: int, survives: bool) -> None:
    """The head's processes are stopped, so that nothing comes and nothing ends."""
    dest, files, daemon = tmp_path / "dest", manifest(head), serve("head", head, bwlimit=SLOW)
    process = start_module(arguments(dest, files, daemon.source, timeout=5))
    wait_for(lambda: len(shards(dest)) > 2)
    stopped = served(daemon)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    done = finish(process)
    if survives:
        assert content(dest) == content(head)
    else:
        assert done["msg"].startswith("No source can be pulled from (head: ")
        run_module("checkpoint_pull", **arguments(dest, files, serve("again", head).source))
        assert content(dest) == content(head)


def test_shard_is_replaced_under_the_transfer(head: Path, tmp_path: Path, serve: Serve) -> None:
    dest, files = tmp_path / "dest", manifest(head)
    process = start_module(arguments(dest, files, serve("head", head, bwlimit=SLOW).source, streams=1))
    wait_for(lambda: len(shards(dest)) > 2)
    # They come in this order, so this one is under way or still to come.
    last = "model-0.safetensors"
    (head / "new").write_bytes(os.urandom(SIZE))
    (head / "new").rename(head / last)
    message = finish(process)["msg"]
    assert message.startswith(f"{last} on head is not the manifest's (its sha256 is ")
    assert last not in shards(dest)


def test_shard_is_written_to_under_the_transfer(head: Path, tmp_path: Path, serve: Serve) -> None:
    dest, files = tmp_path / "dest", manifest(head)
    process = start_module(arguments(dest, files, serve("head", head, bwlimit=SLOW).source, streams=1))
    wait_for(lambda: any(path.stat().st_size for path in dest.glob(".hy3-pull/files/.model-11*")))
    with (head / "model-11.safetensors").open("r+b") as shard:
        shard.seek(SIZE - 1000)
        shard.write(os.urandom(900))
    message = finish(process)["msg"]
    assert message.startswith("model-11.safetensors on head is not the manifest's (")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for the tree and a little more."""
    place = tmp_path / "disk"
    place.mkdir()
    size = SHARDS * SIZE + 8_000_000
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_runs_full_on_the_way(head: Path, tmp_path: Path, small_disk: Path, serve: Serve) -> None:
    dest, files, daemon = small_disk / "dest", manifest(head), serve("head", head, bwlimit=SLOW)
    process = start_module(arguments(dest, files, daemon.source))
    wait_for(lambda: len(shards(dest)) > 1)
    # Somebody else's file takes what is free but for a little.
    left = shutil.disk_usage(small_disk).free
    with (small_disk / "other").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, left - 6_000_000)
    message = finish(process)["msg"]
    assert message.startswith(f"The disk of {dest} ran full while model-"), message
    assert "\n" not in message
    whole = shards(dest)
    assert 1 < len(whole) < SHARDS
    before = run_module("checkpoint_pull", **arguments(dest, files, daemon.source))["msg"]
    assert "make room, or name a directory on a larger disk." in before
    (small_disk / "other").unlink()
    done = run_module("checkpoint_pull", **arguments(dest, files, daemon.source))
    assert set(done["pulled"]) == {file["name"] for file in files} - whole
    assert content(dest) == content(head)


def test_more_files_than_one_look_can_print(tmp_path: Path, serve: Serve) -> None:
    """A listing longer than a pipe holds, and a neighbour without a daemon."""
    head = write_tree(tmp_path / "head", shards=320, size=100)
    dead = {"name": "middle", "address": "127.0.0.1", "port": free_port()}
    long = "x" * 200
    for path in head.glob("*.safetensors"):
        path.rename(path.with_name(long + path.name))
    run_module("checkpoint_pull", **arguments(tmp_path / "dest", manifest(head), dead, serve("head", head).source))
    assert content(tmp_path / "dest") == content(head)
