# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The probe on real sockets: whatever the other end does, it ends in time and says what it met."""

from __future__ import annotations

import socket
import struct
import threading
import time
import typing as t
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _reach
from ansible_collections.sparks.hy3.plugins.module_utils._path import echo_request
from ansible_collections.sparks.hy3.plugins.module_utils._reach import (
    ALIVE,
    ANSWERS,
    Target,
    ask_ssh,
    first_line,
    has_version,
    is_echo,
    look,
    look_at_all,
    ping,
)
from hypothesis import given, settings
from hypothesis import strategies as st

Serve = Callable[[socket.socket], None]
SECONDS = 0.4
BANNER = b"SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13\r\n"


@contextmanager
def listening(serve: Serve) -> Iterator[int]:
    """A server on 127.0.0.1 that does ``serve`` with each connection; its port."""
    kept: list[socket.socket] = []

    def speak(connection: socket.socket) -> None:
        with suppress(OSError):  # the probe went away
            serve(connection)

    def accept(server: socket.socket) -> None:
        while True:
            try:
                connection, _peer = server.accept()
            except OSError:
                return
            kept.append(connection)
            threading.Thread(target=speak, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def nothing(connection: socket.socket) -> None:
    """As a machine in a swap wedge does: the kernel took the connection, and no program speaks."""


def close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def say(*parts: bytes, end: bool = False) -> Serve:
    def serve(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)
        if end:
            close(connection)

    return serve


def drip(connection: socket.socket) -> None:
    """One byte at a time never ends, and must not hold the probe."""
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


# What the server does, what the probe must say, and the first line.
SERVERS: dict[str, tuple[Serve, str, str]] = {
    "a banner": (say(BANNER), "banner", BANNER.decode().strip()),
    "a banner in parts": (say(BANNER[:5], BANNER[5:]), "banner", BANNER.decode().strip()),
    "lines before it": (say(b"Hello\r\n", BANNER), "banner", BANNER.decode().strip()),
    "nothing": (nothing, "silent", ""),
    "half a banner, and then nothing": (say(BANNER[:7]), "other", "SSH-2.0"),
    "an end": (close, "closed", ""),
    "a reset": (reset, "closed", ""),
    "a sentence": (say(b"Exceeded MaxStartups\r\n", end=True), "other", "Exceeded MaxStartups"),
    "a web server": (say(b"HTTP/1.1 400 Bad Request\r\n\r\n", end=True), "other", "HTTP/1.1 400 Bad Request"),
    "an escape sequence": (say(b"\x1b[2J\xff\r\n", end=True), "other", "?[2J\ufffd"),
    "a byte at a time": (drip, "other", "x"),
    "more than anybody reads": (say(b"y" * 20_000, end=True), "other", "y" * 255),
}


@pytest.mark.parametrize(("serve", "tcp", "line"), SERVERS.values(), ids=SERVERS)
def test_server(serve: Serve, tcp: str, line: str) -> None:
    started = time.monotonic()
    with listening(serve) as port:
        answer = ask_ssh("127.0.0.1", port, timeout=SECONDS)
    assert time.monotonic() - started < SECONDS + 2
    if tcp == "other" and line == "x":  # how many bytes dripped is a matter of time
        assert (answer.tcp, set(answer.banner)) == ("other", {"x"})
    else:
        assert (answer.tcp, answer.banner) == (tcp, line)


def test_a_flood_is_not_read_to_its_end() -> None:
    def flood(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"y" * 4096)

    started = time.monotonic()
    with listening(flood) as port:
        assert ask_ssh("127.0.0.1", port, timeout=30).tcp == "other"
    assert time.monotonic() - started < 20


def test_a_closed_port() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        answer = ask_ssh("127.0.0.1", bound.getsockname()[1], timeout=SECONDS)
    assert (answer.tcp, answer.error) == ("refused", "Connection refused")


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port whose queue is full, so that the kernel drops what comes: no answer of any kind."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        place, waiting = server.getsockname(), []
        for _number in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(place)
            waiting.append(client)
        time.sleep(0.1)
        yield place[1]
        for client in waiting:
            client.close()


def test_a_black_hole_ends_at_the_deadline(black_hole: int) -> None:
    started = time.monotonic()
    answer = ask_ssh("127.0.0.1", black_hole, timeout=SECONDS)
    assert answer.tcp == "timeout"
    assert SECONDS * 0.9 < time.monotonic() - started < SECONDS + 1


@pytest.mark.parametrize("name", ["name.invalid", "a" * 70 + ".example", "", "\0"])
def test_a_name_that_is_none(name: str) -> None:
    # An empty name is this machine itself.
    expected = {"unresolved"} if name else {"unresolved", "refused", "banner"}
    assert ask_ssh(name, 9, timeout=SECONDS).tcp in expected


def test_a_host_that_nobody_has() -> None:
    """TEST-NET-1 is no one's: no route, no answer, or a refusal of this machine's own, and always in time."""
    started = time.monotonic()
    view = look(Target(name="x", address="192.0.2.1", port=22), timeout=SECONDS)
    assert view["tcp"] in ("timeout", "unreachable", "refused", "error")
    assert time.monotonic() - started < 2 * SECONDS + 1


def test_the_best_of_several_addresses_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name with a dead address and a living one."""
    with listening(say(BANNER)) as port, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        places = [("127.0.0.1", bound.getsockname()[1]), ("127.0.0.1", port)]
        rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: rows)
        assert ask_ssh("two", 22, timeout=SECONDS).tcp == "banner"


def test_all_at_once() -> None:
    """Four that hang take no longer than one, and the order is that of the question."""
    with listening(nothing) as port, listening(say(BANNER)) as good:
        targets = [Target(name=f"n{number}", address="127.0.0.1", port=port) for number in range(4)]
        targets.insert(2, Target(name="good", address="127.0.0.1", port=good))
        started = time.monotonic()
        views = look_at_all(targets, timeout=SECONDS)
    assert time.monotonic() - started < 3 * SECONDS
    assert [view["name"] for view in views] == [target["name"] for target in targets]
    assert [view["tcp"] for view in views] == ["silent", "silent", "banner", "silent", "silent"]
    assert all(view["ping"] for view in views)


def test_a_resolver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reach, "SLACK_SECONDS", 0.1)
    monkeypatch.setattr(_reach, "ECHO_SECONDS", 0.0)
    gate = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: gate.wait(20) and [])
    started = time.monotonic()
    [view] = look_at_all([Target(name="slow", address="slow.example", port=22)], timeout=SECONDS)
    gate.set()
    assert (view["tcp"], view["ping"]) == ("timeout", None)
    assert time.monotonic() - started < SECONDS + 2


def test_echo() -> None:
    """Of this machine, where it may send one at all."""
    assert ping("127.0.0.1", timeout=2) in (True, None)
    assert ping("name.invalid", timeout=1) is None


REQUEST = echo_request(identifier=7, sequence=1, size=84)
REPLY = b"\0\0" + REQUEST[2:]
HEADER = bytes([0x45]) + bytes(19)
# Packet, whether it has the IP header, and whether it is our echo.
ECHOES: dict[str, tuple[bytes, bool, bool]] = {
    "raw": (HEADER + REPLY, True, True),
    "another's": (HEADER + b"\0\0" + echo_request(identifier=8, sequence=1, size=84)[2:], True, False),
    "our own request": (HEADER + REQUEST, True, False),
    "of a socket with an identifier of its own": (REPLY[:4] + b"\x12\x34" + REPLY[6:], False, True),
    "an earlier one": (b"\0\0" + echo_request(identifier=7, sequence=2, size=84)[2:], False, False),
    "cut off": (HEADER + REPLY[:6], True, False),
    "nothing": (b"", True, False),
}


@pytest.mark.parametrize(("packet", "raw", "expected"), ECHOES.values(), ids=ECHOES)
def test_is_echo(packet: bytes, raw: bool, expected: bool) -> None:
    assert is_echo(packet, REQUEST, raw=raw) is expected


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=600))
def test_any_bytes_make_a_line_that_can_be_printed(data: bytes) -> None:
    line = first_line(data)
    assert line.isprintable()
    assert len(line) <= 255
    assert not has_version(data) or line.startswith("SSH-")


def test_words() -> None:
    assert set(ALIVE) < set(ANSWERS)
    documented = t.get_type_hints(_reach.View)
    assert {"tcp", "ping", "banner", "seconds", "error", "name", "address", "port"} == set(documented)
