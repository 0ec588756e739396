# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Who listens on the TCP ports of this node, and waiting until a port of another node answers.

The file is also a node-side program: a role copies it to the node, where ``port.py wait`` holds back the start of a
unit. So it imports nothing but the standard library.
"""
# pylint: disable=ansible-bad-function  # a node runs this file as a program, without Ansible

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
import sys
import time
import typing as t
from collections.abc import Iterator, Sequence
from pathlib import Path

LISTEN = "0A"  # include/net/tcp_states.h
RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5.0


class PortError(Exception):
    """Bad input or a silent port, said in one sentence: the value found, the rule it breaks, the way out."""


class Listener(t.NamedTuple):
    """A listening socket; ``pid`` is None if another user's process holds it and we may not look."""

    port: int
    address: str
    pid: int | None
    name: str


def parse_address(text: str) -> str:
    """Return the address of a hexadecimal field of ``/proc/net/tcp``: words of 32 bits in the machine's byte order."""
    words = re.findall("[0-9A-F]{8}", text)
    return str(ipaddress.ip_address(b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)))


def parse_listening(text: str) -> dict[int, tuple[int, str]]:
    """Return {socket inode: (port, address)} of the sockets in a ``/proc/net/tcp`` or ``tcp6`` that listen."""
    found = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        address, _colon, number = fields[1].partition(":")
        if fields[3] == LISTEN:
            found[int(fields[9])] = (int(number, 16), parse_address(address))
    return found


def listeners(*, proc: str = "/proc") -> list[Listener]:
    """Return who listens on the TCP ports of this network namespace, by port, then by process id."""
    inodes: dict[int, tuple[int, str]] = {}
    for table in ("tcp", "tcp6"):
        file = Path(proc, "net", table)
        if file.exists():  # no tcp6 where IPv6 is off
            inodes |= parse_listening(file.read_text(encoding="ascii"))
    holders: dict[int, tuple[int, str]] = {}
    for inode, pid, name in _sockets(Path(proc)) if inodes else ():
        # Forked servers share a socket; the lowest pid is usually the parent.
        holders[inode] = min(holders.get(inode, (pid, name)), (pid, name))
    return sorted(
        {Listener(*place, *holders.get(inode, (None, ""))) for inode, place in inodes.items()},
        key=lambda found: (found.port, found.pid or 0, found.address),
    )


def _sockets(proc: Path) -> Iterator[tuple[int, int, str]]:
    for process in proc.glob("[0-9]*"):
        try:
            for descriptor in (process / "fd").iterdir():
                match = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
                if match:
                    name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                    yield int(match[1]), int(process.name), name
        except OSError:  # gone meanwhile, or another user's
            continue


def wait_for(host: str, port: int, *, timeout: float) -> None:
    """Return once a TCP connection is accepted; refused, unreachable and unresolved are tried again.

    Args:
        host: Name or address.
        port: 1 to 65535.
        timeout: Seconds after which to give up; one attempt is made in any case.

    Raises:
        PortError: Nothing answered in time, or the port or timeout is none.
    """
    if not 0 < port < 65536:
        raise PortError(f"Port {port} is no TCP port: choose one from 1 to 65535")
    if not timeout >= 0:
        raise PortError(f"Timeout {timeout:g} is no number of seconds: choose 0 or more")
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(RETRY_SECONDS, min(CONNECT_SECONDS, left))).close()
            return
        except OSError as exc:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise PortError(
                    f"{host}:{port} did not accept a connection within {timeout:g} s ({exc.strerror or exc}): "
                    "check its service and the firewall"
                ) from exc
        time.sleep(RETRY_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Wait for a port of each host; 0 once all answer, else one sentence on stderr and 1."""
    parser = argparse.ArgumentParser(description="Wait until a TCP port accepts connections.")
    parser.add_argument("command", choices=["wait"])
    parser.add_argument("--host", required=True, action="append", help="once for each")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--timeout", required=True, type=float, help="seconds for each host")
    options = parser.parse_args(arguments)
    try:
        for host in options.host:
            wait_for(host, options.port, timeout=options.timeout)
    except PortError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
