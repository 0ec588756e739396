# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _port
from ansible_collections.sparks.hy3.plugins.module_utils._port import (
    Listener,
    PortError,
    listeners,
    parse_address,
    parse_listening,
    wait_for,
)

# Recorded on Linux 6.18, x86-64: a listener on 127.0.0.1:8000, a connection to it, a listener on 0.0.0.0:22.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12345 1 0 100 0 0 10 0
   1: 0100007F:1F40 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 12346 1 0 20 4 30 10 -1
   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12347 1 0 100 0 0 10 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr
   0: 00000000000000000000000001000000:1F40 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 12348 1
"""

TEST_LISTENING: list[tuple[str, dict[int, tuple[int, str]]]] = [
    (TCP, {12345: (8000, "127.0.0.1"), 12347: (22, "0.0.0.0")}),
    (TCP6, {12348: (8000, "::1")}),
]


@pytest.mark.parametrize(("text", "expected"), TEST_LISTENING)
def test_parse_listening(text: str, expected: dict[int, tuple[int, str]]) -> None:
    assert parse_listening(text) == expected


def test_parse_address_of_a_mapped_one() -> None:
    assert parse_address("0000000000000000FFFF00000100007F") in ("::ffff:7f00:1", "::ffff:127.0.0.1")


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A bound socket that does not listen yet: connections are refused."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found


def listeners_of(bound: socket.socket) -> list[Listener]:
    return [found for found in listeners() if found.port == bound.getsockname()[1]]


def test_listeners(bound: socket.socket) -> None:
    assert listeners_of(bound) == []
    bound.listen()
    address, port = bound.getsockname()
    assert listeners_of(bound) == [Listener(port, address, os.getpid(), Path("/proc/self/comm").read_text().strip())]


def test_forked_holders_are_one_listener(bound: socket.socket) -> None:
    bound.listen()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[bound.fileno()]) as child:
        assert [found.pid for found in listeners_of(bound)] == [min(os.getpid(), child.pid)]
        child.communicate(b"\n")


def test_a_holder_out_of_sight(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP)
    expected = [Listener(22, "0.0.0.0", None, ""), Listener(8000, "127.0.0.1", None, "")]
    assert listeners(proc=str(tmp_path)) == expected


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_wait_for_refuses_a_port(port: int) -> None:
    with pytest.raises(PortError, match=f"Port {port} is no TCP port"):
        wait_for("127.0.0.1", port, timeout=0)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_wait_for_refuses_a_timeout(timeout: float) -> None:
    with pytest.raises(PortError, match="is no number of seconds"):
        wait_for("127.0.0.1", 1, timeout=timeout)


def test_wait_for_names_what_it_met() -> None:
    with pytest.raises(PortError, match="^name.invalid:8000 did not accept a connection within 0 s"):
        wait_for("name.invalid", 8000, timeout=0)


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The file as a role puts it on a node."""
    return [
        "/usr/bin/python3",
        "-I",
        str(shutil.copy(_port.__file__, tmp_path / "port.py")),
        "wait",
        "--host",
        "127.0.0.1",
    ]


def test_program_waits_for_the_port_of_each_host(program: list[str], bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    command = [*program, "--host", "127.0.0.2", "--port", str(port), "--timeout", "0"]
    bound.listen()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith(f"127.0.0.2:{port} did not accept")) == (1, True)
    with socket.create_server(("127.0.0.2", port)):
        assert subprocess.run(command, check=False).returncode == 0


def test_program_waits_through_refused_connections(program: list[str], bound: socket.socket) -> None:
    command = [*program, "--port", str(bound.getsockname()[1]), "--timeout", "20"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as waiting:
        time.sleep(0.7)
        assert waiting.poll() is None
        bound.listen()
        assert (waiting.communicate(timeout=10)[1], waiting.returncode) == (b"", 0)


def test_program_gives_up(program: list[str], bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    command = [*program, "--port", str(port), "--timeout", "0.6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"127.0.0.1:{port} did not accept a connection within 0.6 s (Connection refused): "
        "check its service and the firewall\n"
    )
