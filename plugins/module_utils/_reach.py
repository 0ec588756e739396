# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""How far a host answers: its kernel (an echo, a TCP handshake), and a program behind it (the banner of SSH).

A machine without memory to give keeps its kernel: it answers ping and accepts TCP connections for a server that never
gets to say a word. So neither proves that it can be logged in to, and what hangs must end at a deadline of ours.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._path import (
    ECHO_REPLY,
    ICMP_HEADER,
    IP_HEADER,
    SMALL_BYTES,
    echo_request,
)

# What a connection to a port of SSH came to.
BANNER, SILENT, CLOSED, OTHER = "banner", "silent", "closed", "other"
REFUSED, TIMEOUT, UNREACHABLE, UNRESOLVED, ERROR = "refused", "timeout", "unreachable", "unresolved", "error"
ANSWERS = (BANNER, SILENT, CLOSED, OTHER, REFUSED, TIMEOUT, UNREACHABLE, UNRESOLVED, ERROR)
# Those that only a living kernel at the other end gives.
ALIVE = (BANNER, SILENT, CLOSED, OTHER, REFUSED)

# RFC 4253, 4.2: lines may come before the version, and no line of the version is longer than 255 bytes.
MAX_BANNER, MAX_BYTES = 255, 8192
ECHO_SECONDS, ECHOES = 1.0, 3
# For a resolver or a kernel that does not keep to a deadline, after which nobody waits any more.
SLACK_SECONDS = 1.0
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class Target(t.TypedDict):
    """A host by a name for messages, its address or host name, and the port of its SSH server."""

    name: str
    address: str
    port: int


class View(t.TypedDict):
    """How far a host answered: C(tcp) is one of C(ANSWERS), C(ping) is None where no echo could be sent.

    C(banner) is the first line that came, made printable, and C(seconds) is how long it took to know.
    """

    name: str
    address: str
    port: int
    tcp: str
    ping: bool | None
    banner: str
    seconds: float
    error: str


class Answer(t.NamedTuple):
    """What one connection came to: one of C(ANSWERS), the first line, and the system's words for an error."""

    tcp: str
    banner: str = ""
    error: str = ""


def port_number(name: str, given: object) -> int:
    """The port of a host's SSH server, 22 if none is given; raises for what is no TCP port."""
    text = str(22 if given is None else given)
    if not text.isdecimal() or not 0 < int(text[:9]) < 65536:
        raise Hy3Error(f"The port of {name} is {given!r}, and a TCP port is a number from 1 to 65535; write that.")
    return int(text)


def first_line(data: bytes) -> str:
    """The first line, or the version of SSH where there is one, printable and no longer than it may be."""
    lines = data.split(b"\n")
    line = next((line for line in lines if line.startswith(b"SSH-")), lines[0])
    text = line[:MAX_BANNER].decode("ascii", errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text.rstrip("\r"))


def has_version(data: bytes) -> bool:
    """Whether a whole line with the version of SSH is among what came."""
    return any(line.startswith(b"SSH-") for line in data.split(b"\n")[:-1])


def read_banner(connection: socket.socket, *, deadline: float) -> Answer:
    """Read until the version of SSH came, the other side ended, or C(deadline) (of the monotonic clock) passed."""
    data = b""
    while not has_version(data):
        left = deadline - time.monotonic()
        if left <= 0:
            return Answer(OTHER, first_line(data)) if data else Answer(SILENT)
        connection.settimeout(left)
        try:
            more = connection.recv(MAX_BYTES)
        except TimeoutError:
            continue
        except OSError as exc:  # a reset, for one
            return Answer(CLOSED, first_line(data), exc.strerror or str(exc))
        data += more
        if not more or len(data) > MAX_BYTES:
            return Answer(OTHER if data else CLOSED, first_line(data))
    return Answer(BANNER, first_line(data))


def _failed(exc: OSError) -> Answer:
    said = exc.strerror or str(exc)
    if isinstance(exc, TimeoutError) or exc.errno == errno.ETIMEDOUT:
        return Answer(TIMEOUT, error="no answer")
    if isinstance(exc, ConnectionRefusedError):
        return Answer(REFUSED, error=said)
    return Answer(UNREACHABLE if exc.errno in _NO_WAY else ERROR, error=said)


def ask_ssh(address: str, port: int, *, timeout: float) -> Answer:
    """What a connection to a port of SSH comes to within C(timeout) seconds, of all its addresses the best.

    Nothing is sent, so nobody is logged in.
    """
    deadline = time.monotonic() + timeout
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as exc:
        return Answer(UNRESOLVED, error=str(getattr(exc, "strerror", None) or exc))
    answers = []
    for index, (family, _kind, _protocol, _name, place) in enumerate(places):
        share = (deadline - time.monotonic()) / (len(places) - index)
        if share <= 0:
            break
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(share)
            try:
                connection.connect(place)
            except OSError as exc:
                answers.append(_failed(exc))
                continue
            answers.append(read_banner(connection, deadline=deadline))
            break
    return min(answers, key=lambda answer: ANSWERS.index(answer.tcp), default=Answer(TIMEOUT, error="no answer"))


def is_echo(packet: bytes, request: bytes, *, raw: bool) -> bool:
    """Whether a packet is the echo of C(request). A raw socket has the IP header too, any other its own identifier."""
    start = (packet[0] & 0x0F) * 4 if raw and packet else 0
    message = packet[start:]
    same = message[4:] == request[4:] if raw else message[6:] == request[6:]
    return len(message) >= ICMP_HEADER and message[:2] == bytes([ECHO_REPLY, 0]) and same


def ping(address: str, *, timeout: float = ECHO_SECONDS * ECHOES) -> bool | None:
    """Whether an ICMP echo comes back within C(timeout) seconds; None where none may or can be sent.

    Root may open a raw socket, anybody else one of a kind that most systems allow (C(net.ipv4.ping_group_range)).
    """
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
        try:
            with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as sender:
                return _echoes(sender, address, raw=kind == socket.SOCK_RAW, timeout=timeout)
        except PermissionError:
            continue
        except OSError as exc:
            return False if exc.errno in _NO_WAY else None
    return None


def _echoes(sender: socket.socket, address: str, *, raw: bool, timeout: float) -> bool:
    end = time.monotonic() + timeout
    for sequence in range(1, ECHOES + 1):
        request = echo_request(identifier=os.getpid() & 0xFFFF, sequence=sequence, size=SMALL_BYTES)
        sender.sendto(request, (address, 0))
        until = min(end, time.monotonic() + timeout / ECHOES)
        while (left := until - time.monotonic()) > 0:
            sender.settimeout(left)
            try:
                packet = sender.recv(IP_HEADER + MAX_BYTES)
            except TimeoutError:
                break
            if is_echo(packet, request, raw=raw):
                return True
    return False


def look(target: Target, *, timeout: float) -> View:
    """Ask a host for an echo and for the banner of its SSH server, both within C(timeout) seconds."""
    started = time.monotonic()
    answer = ask_ssh(target["address"], target["port"], timeout=timeout)
    # Whoever took the connection is alive.
    alive = answer.tcp in ALIVE
    pinged = True if alive else ping(target["address"], timeout=min(timeout, ECHO_SECONDS * ECHOES))
    seconds = round(time.monotonic() - started, 2)
    return View(**target, tcp=answer.tcp, ping=pinged, banner=answer.banner, seconds=seconds, error=answer.error)


def look_at_all(targets: t.Sequence[Target], *, timeout: float) -> list[View]:
    """Look at all of them at once, in their order; who has not answered when all must have is a timeout.

    A resolver keeps no deadline of ours, so it is left behind where it hangs.
    """
    found: dict[int, View] = {}

    def one(index: int, target: Target) -> None:
        found[index] = look(target, timeout=timeout)

    threads = [threading.Thread(target=one, args=row, daemon=True) for row in enumerate(targets)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout + ECHO_SECONDS * ECHOES + SLACK_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = {"tcp": TIMEOUT, "ping": None, "banner": "", "seconds": timeout, "error": "no answer"}
    return [found.get(index) or t.cast(View, {**target, **late}) for index, target in enumerate(targets)]
