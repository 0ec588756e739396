# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Real ranks on the loopback, with a shell for an engine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import typing as t
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _ranks
from ansible_collections.sparks.hy3.plugins.module_utils._ranks import parse_hello

HELLOS: list[tuple[bytes, int | None]] = [
    (b"hy3 rank 1 of 3\n", 1),
    (b"hy3 rank 2 of 3\n", 2),
    (b"hy3 rank 3 of 3\n", None),  # ranks count from zero
    (b"hy3 rank 0 of 3\n", None),  # that is who listens
    (b"hy3 rank 1 of 2\n", None),  # of another plan
    (b"hy3 rank 1 of 3", None),
    (b"GET / HTTP/1.1\n", None),
    (b"", None),
]


@pytest.mark.parametrize(("line", "rank"), HELLOS)
def test_hello(line: bytes, rank: int | None) -> None:
    assert parse_hello(line, 3) == rank


def until(true: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Rank:
    """A rank's process, with what it printed; its engine is a shell that says its process id first."""

    def __init__(self, cluster: Cluster, rank: int, script: str) -> None:
        self.out = cluster.directory / f"{rank}-{len(list(cluster.directory.iterdir()))}.out"
        command = [*cluster.program, "--rank", str(rank), "--of", str(cluster.count), "--at", cluster.place]
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--", "sh", "-c", f"echo engine $$; {script}"], stdout=out, stderr=out
            )

    @property
    def said(self) -> str:
        return self.out.read_text()

    @property
    def engine(self) -> int:
        """Process id of its engine, once it has one."""
        until(lambda: re.search(r"engine (\d+)\n", self.said))
        return int(t.cast("re.Match[str]", re.search(r"engine (\d+)\n", self.said))[1])

    def ended(self) -> int:
        return self.process.wait(timeout=30)


class Cluster:
    """Starts ranks that meet at a free port of the loopback."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.count = directory / "out", 2
        self.directory.mkdir()
        self.program = ["/usr/bin/python3", "-I", str(shutil.copy(_ranks.__file__, directory / "ranks.py"))]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.place = f"127.0.0.1:{self.port}"
        self.ranks: list[Rank] = []

    def start(self, *ranks: int, script: str = "exec sleep 60") -> list[Rank]:
        started = [Rank(self, rank, script) for rank in ranks]
        self.ranks += started
        return started


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for rank in made.ranks:
        for pid in re.findall(r"engine (\d+)\n", rank.said):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        rank.process.kill()
        rank.process.wait()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_none_starts_before_all_are_there(cluster: Cluster) -> None:
    cluster.count = 3
    zero, one = cluster.start(0, 1)
    until(lambda: "waits for rank 2\n" in zero.said)
    time.sleep(0.3)
    assert "engine" not in zero.said + one.said
    (two,) = cluster.start(2)
    for rank in (zero, one, two):
        assert alive(rank.engine)
        assert rank.said.count("all ranks are there") == 1


def test_the_others_may_be_early(cluster: Cluster) -> None:
    (one,) = cluster.start(1)
    until(lambda: f"waits for rank 0 at {cluster.place}\n" in one.said)
    time.sleep(1.2)
    (zero,) = cluster.start(0)
    assert alive(zero.engine) and alive(one.engine)
    assert one.said.count("waits for rank 0") == 1


@pytest.mark.parametrize("dying", [0, 1])
def test_all_end_with_one_whose_engine_died(cluster: Cluster, dying: int) -> None:
    ranks = cluster.start(0, 1)
    engines = [rank.engine for rank in ranks]
    os.kill(engines[dying], signal.SIGKILL)
    assert ranks[dying].ended() == 128 + 9
    other = 1 - dying
    assert ranks[other].ended() == 1
    assert f"rank {dying} has ended or cannot be reached, so this one ends, too" in ranks[other].said
    assert not any(map(alive, engines))


def test_all_end_with_one_that_was_killed_itself(cluster: Cluster) -> None:
    zero, one = cluster.start(0, 1)
    engines = [zero.engine, one.engine]
    one.process.kill()
    assert zero.ended() == 1
    assert not alive(engines[0])


def test_one_that_starts_again_before_its_end_was_noticed(cluster: Cluster) -> None:
    """Its node was cut off: nothing closed the old connection."""
    zero, old = cluster.start(0, 1)
    assert zero.engine and old.engine
    os.kill(old.process.pid, signal.SIGSTOP)
    cluster.start(1)
    assert zero.ended() == 1
    assert "rank 1 has started again, so this one ends, too" in zero.said


def test_all_meet_again_after_their_end(cluster: Cluster) -> None:
    zero, one = cluster.start(0, 1)
    os.kill(one.engine, signal.SIGKILL)
    assert (zero.ended(), one.ended()) == (1, 128 + 9)
    one, zero = cluster.start(1, 0)
    assert alive(zero.engine) and alive(one.engine)


def test_the_engines_status_is_the_ranks(cluster: Cluster) -> None:
    zero, _one = cluster.start(0, 1, script="sleep 0.5; exit 3")
    assert zero.ended() in (1, 3)  # whichever ended first
    cluster.count = 1
    (alone,) = cluster.start(0, script="exit 7")
    assert alone.ended() == 7


def test_a_stop_reaches_the_engine_and_is_no_failure(cluster: Cluster) -> None:
    zero, one = cluster.start(0, 1)
    engine = zero.engine
    assert one.engine
    zero.process.terminate()
    assert zero.ended() == 0
    assert not alive(engine)
    assert one.ended() == 1


def test_one_that_stops_waits_for_its_own_engine_only(cluster: Cluster) -> None:
    """Another rank of SGLang answers SIGTERM when rank 0 tells it to end, and not before."""
    zero, one = cluster.start(0, 1, script="trap 'sleep 1; echo done; exit 0' TERM; while :; do sleep 0.05; done")
    assert zero.engine and one.engine
    one.process.terminate()
    zero.process.terminate()
    assert (zero.ended(), one.ended()) == (0, 0)
    assert "done" in zero.said and "done" in one.said


def test_a_stop_before_all_are_there(cluster: Cluster) -> None:
    zero, one = cluster.start(0)[0], None
    until(lambda: "waits for rank 1" in zero.said)
    zero.process.terminate()
    assert zero.ended() == 0
    (one,) = cluster.start(1)
    until(lambda: "waits for rank 0" in one.said)
    one.process.terminate()
    assert one.ended() == 0


def test_strangers_do_not_count(cluster: Cluster) -> None:
    (zero,) = cluster.start(0)
    until(lambda: "waits for rank 1" in zero.said)
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"hy3 rank 1 of 4\n", b"x" * 100, b""):
        with socket.create_connection(("127.0.0.1", cluster.port)) as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    assert "engine" not in zero.said
    (one,) = cluster.start(1)
    assert alive(zero.engine) and alive(one.engine)
    with socket.create_connection(("127.0.0.1", cluster.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    time.sleep(0.3)
    assert alive(zero.engine), "a stranger ends nothing"


def test_an_address_that_is_not_ours(cluster: Cluster) -> None:
    cluster.place = f"192.0.2.1:{cluster.port}"
    (zero,) = cluster.start(0)
    assert zero.ended() == 1
    assert zero.said.startswith(f"Rank 0 cannot run at 192.0.2.1:{cluster.port}: ")


WRONG: list[list[str]] = [
    ["--rank", "2", "--of", "2", "--at", "127.0.0.1:1", "--", "true"],
    ["--rank", "0", "--of", "2", "--at", "127.0.0.1:1"],
    ["--rank", "0", "--of", "2", "--at", "127.0.0.1:1", "--"],
    ["--rank", "0", "--of", "2", "--at", "127.0.0.1", "--", "true"],
    ["--rank", "0", "--of", "2", "--at", "127.0.0.1:65536", "--", "true"],
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments(cluster: Cluster, arguments: list[str]) -> None:
    done = subprocess.run([*cluster.program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
