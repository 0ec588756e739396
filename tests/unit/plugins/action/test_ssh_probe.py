# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action run by Ansible itself, against SSH servers that are real, half or none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import typing as t
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.action.ssh_probe import Shown, key_exchange
from ansible_collections.sparks.hy3.plugins.module_utils._reach import View

paramiko = pytest.importorskip("paramiko")

ROOT = Path(__file__).parents[4]
SECONDS = 2.0
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - {sparks.hy3.ssh_probe: {timeout: TIMEOUT, wait: "{{ wait | default(0) }}", interval: 0.2}, register: seen}
    - ansible.builtin.copy:
        content: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'seen'))) | to_json }}"
        dest: "{{ playbook_dir }}/seen.json"
        mode: "0600"
      delegate_to: localhost
      run_once: true
      check_mode: false
"""
Serve = Callable[[socket.socket], None]


@contextmanager
def listening(serve: Serve) -> Iterator[int]:
    """A server on 127.0.0.1 that does ``serve`` with each connection; its port."""
    kept: list[socket.socket] = []

    def speak(connection: socket.socket) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):  # the probe went away
            serve(connection)

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                threading.Thread(target=speak, args=(kept[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def nothing(_connection: socket.socket) -> None:
    pass


def banner_only(connection: socket.socket) -> None:
    """As over a link that loses packets of full size, and as a machine that cannot start a program."""
    connection.sendall(b"SSH-2.0-OpenSSH_9.6p1\r\n")


def banner_and_end(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6p1\r\n")
    connection.shutdown(socket.SHUT_WR)


KEY = paramiko.ECDSAKey.generate()


def ssh(connection: socket.socket) -> None:
    server = paramiko.Transport(connection)
    server.add_server_key(KEY)
    server.start_server(event=threading.Event(), server=paramiko.ServerInterface())


# Server, what SSH says, how the key exchange ends.
SERVERS: dict[str, tuple[Serve, str, str | None]] = {
    "healthy": (ssh, "banner", "done"),
    "no-memory": (nothing, "silent", None),
    "stalled": (banner_only, "banner", "stalled"),
    "ended": (banner_and_end, "banner", "failed"),
}


def play(directory: Path, hosts: dict[str, dict[str, t.Any]], *options: str) -> tuple[str, dict[str, dict[str, t.Any]]]:
    """What Ansible printed, and what the action returned for each host."""
    (directory / "play.yml").write_text(PLAY.replace("TIMEOUT", str(SECONDS)))
    (directory / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", str(directory / "play.yml"), "-i", str(directory / "hosts.json"),
         *options],
        cwd=ROOT,
        env={"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")}
        | os.environ  # ansible-test has its own
        | {"PYTHONPATH": "", "ANSIBLE_HOME": str(directory / "home"), "ANSIBLE_PYTHON_INTERPRETER": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout or "changed=1" in done.stdout
    return done.stdout, json.loads((directory / "seen.json").read_text())


def test_servers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts: dict[str, dict[str, t.Any]] = {
            # The variables that Ansible itself would connect by, a template among them.
            name: {
                "ansible_host": "{{ here }}",
                "here": "127.0.0.1",
                "ansible_port": stack.enter_context(listening(serve)),
            }
            for name, (serve, _tcp, _kex) in SERVERS.items()
        }
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        hosts["closed"] = {"ansible_host": "127.0.0.1", "ansible_port": closed.getsockname()[1]}
        hosts["no-name"] = {"ansible_host": "name.invalid"}
        hosts["here"] = {"ansible_connection": "local"}
        started = time.monotonic()
        _output, seen = play(tmp_path, hosts, "--forks", "8")
    assert time.monotonic() - started < 60
    for name, (_serve, tcp, kex) in SERVERS.items():
        assert (seen[name]["tcp"], seen[name]["key_exchange"]) == (tcp, kex), name
        assert (seen[name]["name"], seen[name]["port"]) == (name, hosts[name]["ansible_port"])
        assert not seen[name]["failed"]
    assert (seen["closed"]["tcp"], seen["closed"]["ping"]) == ("refused", True)
    assert seen["no-name"]["tcp"] == "unresolved"
    assert (seen["here"]["tcp"], seen["here"]["transport"]) == ("not_asked", "local")


def test_waits_until_it_answers_again(tmp_path: Path) -> None:
    """Of a machine that thaws, with what it meets meanwhile; in check mode it does not wait."""
    waits, thawed = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        if waits.is_set():  # however long a play takes to begin
            threading.Timer(6, thawed.set).start()
        if thawed.wait(30):
            banner_and_end(connection)

    with listening(serve) as port:
        hosts = {"spark-2": {"ansible_host": "127.0.0.1", "ansible_port": port}}
        _output, seen = play(tmp_path, hosts, "-e", "wait=600", "--check")
        assert (seen["spark-2"]["tcp"], seen["spark-2"]["waited_s"]) == ("silent", 0)
        waits.set()
        output, seen = play(tmp_path, hosts, "-e", "wait=600")
    assert seen["spark-2"]["tcp"] == "banner"
    assert 0 < seen["spark-2"]["waited_s"] < 60
    assert "spark-2: SSH says silent, waited 2s of 10m00s" in output


def test_lines_while_it_waits() -> None:
    shown = Shown("spark-2")
    view = View(name="spark-2", address="x", port=22, tcp="silent", ping=True, banner="", seconds=1.0, error="")
    gone = t.cast(View, {**view, "tcp": "timeout", "ping": False})
    lines = [shown.line(one, at, 300) for one, at in ((view, 10), (view, 20), (view, 41), (gone, 45), (gone, 50))]
    assert lines == [
        "spark-2: SSH says silent, waited 10s of 5m00s",
        None,
        "spark-2: SSH says silent, waited 41s of 5m00s",
        "spark-2: SSH says timeout, no ping, waited 45s of 5m00s",
        None,
    ]


def test_key_exchange_with_nobody() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert key_exchange("127.0.0.1", closed.getsockname()[1], timeout=1)[0] == "failed"
