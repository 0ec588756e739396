# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _port, _until
from ansible_collections.sparks.hy3.plugins.module_utils._until import Outcome, run_check, show_status, wait

A, B, GOOD, MISUSED = (
    Outcome(1, "a is missing\n"),
    Outcome(1, "b is missing\n"),
    Outcome(0, "fine\n"),
    Outcome(2, "usage"),
)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def patience(*outcomes: Outcome) -> tuple[Outcome, list[str], list[str]]:
    """What comes of checks with these outcomes, what the journal and what the unit's status got."""
    clock, told, shown, coming = Clock(), list[str](), list[str](), iter(outcomes)
    got = wait(lambda: next(coming), tell=told.append, show=shown.append, sleep=clock.sleep, clock=lambda: clock.now)
    return got, told, shown


MINUTE = [A] * 12
# Checks every five seconds, what the journal says.
TOLD: dict[str, tuple[list[Outcome], list[str]]] = {
    "at once": ([GOOD], []),
    "once": ([A, A, A, GOOD], ["waits: a is missing"]),
    "another reason soon": ([A, B, B, GOOD], ["waits: a is missing"]),
    "another reason after a minute": ([*MINUTE, B, GOOD], ["waits: a is missing", "waits: b is missing"]),
    "the same after nine minutes": (MINUTE * 9 + [GOOD], ["waits: a is missing"]),
    "the same after ten minutes": (MINUTE * 10 + [A, GOOD], ["waits: a is missing"] * 2),
}


@pytest.mark.parametrize(("outcomes", "expected"), TOLD.values(), ids=TOLD)
def test_waits_and_says_why(outcomes: list[Outcome], expected: list[str]) -> None:
    got, told, _shown = patience(*outcomes)
    assert (got, told) == (GOOD, expected)


def test_the_status_follows_at_once_and_goes() -> None:
    assert patience(A, B, GOOD)[2] == ["waits: a is missing", "waits: b is missing", ""]
    assert patience(GOOD)[2] == []


def test_a_wrong_command_line_is_not_waited_for() -> None:
    assert patience(MISUSED) == (MISUSED, [], [])
    assert patience(A, MISUSED)[0] == MISUSED


REASONS: list[tuple[Outcome, str]] = [
    (Outcome(1, "warning\nthe reason \n\n"), "the reason"),
    (Outcome(1, ""), "exit status 1"),
    (Outcome(-9, "\n"), "exit status -9"),
]


@pytest.mark.parametrize(("outcome", "reason"), REASONS)
def test_reason(outcome: Outcome, reason: str) -> None:
    assert outcome.reason == reason


def test_a_check_that_hangs_or_is_not_there() -> None:
    assert run_check(["sleep", "60"], seconds=0.2) == Outcome(1, "sleep gave no answer within 0.2 s")
    assert run_check(["/nowhere/x"]) == Outcome(1, "/nowhere/x cannot be run: No such file or directory")


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_the_status(tmp_path: Path, abstract: bool) -> None:
    place = f"@hy3-until-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + place[1:] if abstract else place)
        show_status("waits: ä", {"NOTIFY_SOCKET": place})
        assert systemd.recv(100).decode() == "STATUS=waits: ä"
    show_status("nobody listens", {"NOTIFY_SOCKET": place})
    show_status("nobody is there", {})


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The file as a role puts it on a node."""
    return ["/usr/bin/python3", "-I", str(shutil.copy(_until.__file__, tmp_path / "until.py"))]


def test_program_waits_for_a_port_like_a_worker(program: list[str], tmp_path: Path) -> None:
    check = ["/usr/bin/python3", "-I", str(shutil.copy(_port.__file__, tmp_path / "port.py")), "wait"]
    with socket.socket() as head, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        head.bind(("127.0.0.1", 0))
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        port = head.getsockname()[1]
        check += ["--host", "127.0.0.1", "--port", str(port), "--timeout", "0.2"]
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        with subprocess.Popen([*program, "--", *check], stdout=subprocess.PIPE, env=environment) as waiting:
            said = f"waits: 127.0.0.1:{port} did not accept a connection within 0.2 s (Connection refused)"
            assert systemd.recv(1000).decode().startswith(f"STATUS={said}")
            assert waiting.poll() is None
            head.listen()
            assert waiting.communicate(timeout=20)[0].decode().startswith(said)
            assert waiting.returncode == 0
        assert systemd.recv(1000) == b"STATUS="


def test_program_hands_on_what_the_check_says(program: list[str]) -> None:
    done = subprocess.run([*program, "--", "echo", "a", "b"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a b\n", "")


@pytest.mark.parametrize("arguments", [[], ["--"], ["echo", "x"]])
def test_program_needs_a_command(program: list[str], arguments: list[str]) -> None:
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage: until.py -- COMMAND")) == (2, True)


def test_program_can_be_stopped(program: list[str]) -> None:
    with subprocess.Popen([*program, "--", "false"], stdout=subprocess.PIPE) as waiting:
        assert t.cast("t.IO[bytes]", waiting.stdout).readline() == b"waits: exit status 1\n"
        began = time.monotonic()
        waiting.terminate()
        waiting.wait(timeout=10)
        assert time.monotonic() - began < 3
