# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""All ranks of an engine run together or not at all, where no Ray knows who is in.

A rank that starts again alone meets nobody, and one that lost another may wait for it for ever with all its memory. So
the file is a node-side program, the main process of a unit: ``ranks.py --rank R --of N --at ADDRESS:PORT -- COMMAND``.
Rank 0 listens there and the others connect. Once all are there, each starts its command; once one has ended, or its
node is gone, each ends its own, and systemd starts all again. It imports nothing but the standard library.
"""
# pylint: disable=ansible-bad-function  # a node runs this file as a program, without Ansible

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import typing as t
from collections.abc import Callable, Iterator, Mapping, Sequence

GO = b"go\n"
HELLO = re.compile(rb"hy3 rank ([0-9]{1,4}) of ([0-9]{1,4})\n")
HELLO_SECONDS = 10.0
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 1.0
# A command that ignores SIGTERM is killed after so long; another rank of SGLang does, until rank 0 tells it to end.
END_SECONDS = 15.0
# A silent peer is given up after 15 + 6 * 5 = 45 seconds: a link that is down for ten is no reason to load for minutes.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 6))

Say = Callable[[str], None]
Links = Mapping[int, socket.socket]


def parse_place(text: str) -> tuple[str, int]:
    """Host and port of ``ADDRESS:PORT``; argparse says the rest."""
    host, _colon, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not ADDRESS:PORT")
    return host, int(port)


def parse_hello(line: bytes, count: int) -> int | None:
    """The rank that introduces itself, or None for a stranger or a rank of another number of ranks."""
    match = HELLO.fullmatch(line)
    if not match or int(match[2]) != count or not 0 < int(match[1]) < count:
        return None
    return int(match[1])


def greet(listener: socket.socket, count: int) -> tuple[int, socket.socket] | None:
    """Accept one connection; None if who connects is no rank of ours."""
    link, _address = listener.accept()
    link.settimeout(HELLO_SECONDS)
    line = b""
    with contextlib.suppress(OSError):
        while len(line) < 64 and not line.endswith(b"\n"):
            part = link.recv(64)
            if not part:
                break
            line += part
    rank = parse_hello(line, count)
    if rank is None:
        link.close()
        return None
    _keep_alive(link)
    return rank, link


def gather(listener: socket.socket, count: int, say: Say) -> dict[int, socket.socket]:
    """Of rank 0: wait until all others have connected, and tell them to go. One that leaves meanwhile is forgotten."""
    links: dict[int, socket.socket] = {}
    while True:
        missing = [rank for rank in range(1, count) if rank not in links]
        if not missing:
            with contextlib.suppress(OSError):  # the next look finds who has just left
                for link in links.values():
                    link.sendall(GO)
            return links
        say(f"waits for rank {', '.join(map(str, missing))}")
        ready = _readable([listener, *links.values()])
        for rank in [rank for rank, link in links.items() if link in ready]:
            links.pop(rank).close()
        if listener in ready and (greeted := greet(listener, count)):
            rank, link = greeted
            if rank in links:  # it has started again, and its old connection does not know
                links.pop(rank).close()
            links[rank] = link


def join(place: tuple[str, int], rank: int, count: int, say: Say) -> dict[int, socket.socket]:
    """Of another rank: connect to rank 0 until that says go."""
    while True:
        say(f"waits for rank 0 at {place[0]}:{place[1]}")
        with contextlib.suppress(OSError):
            link = socket.create_connection(place, timeout=CONNECT_SECONDS)
            try:
                link.sendall(f"hy3 rank {rank} of {count}\n".encode())
                _keep_alive(link)
                if link.recv(len(GO)) == GO:
                    return {0: link}
            except OSError:
                pass
            link.close()
        time.sleep(RETRY_SECONDS)


def watch(child: int, links: Links, listener: socket.socket | None, count: int) -> str | None:
    """Wait until the command ends (None), or say which rank has ended.

    Args:
        child: A descriptor that becomes readable when the command has ended.
        links: Connections to the other ranks by rank, which say nothing more until they end.
        listener: Of rank 0, where one that has started again, with its old connection still open, tells of it.
        count: How many ranks there are.
    """
    while True:
        ready = _readable([child, *links.values(), *([listener] if listener else [])])
        if child in ready:
            return None
        for rank, link in links.items():
            if link in ready:
                return f"rank {rank} has ended or cannot be reached"
        if listener and listener in ready and (greeted := greet(listener, count)):
            greeted[1].close()
            return f"rank {greeted[0]} has started again"


class Command:
    """The engine's own rank, and what systemd asks of it meanwhile."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, _signal: int, _frame: object) -> None:
        self.stopping = True
        if self._process is None:
            raise SystemExit(0)
        self._process.terminate()

    @contextlib.contextmanager
    def start(self, command: Sequence[str]) -> Iterator[int]:
        """Start it; the descriptor becomes readable when it has ended."""
        self._process = subprocess.Popen(command)
        descriptor = os.pidfd_open(self._process.pid)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """End it because another rank has ended."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def status(self) -> int:
        """Its exit status as a shell would say it, 0 if it ended because it was stopped."""
        assert self._process is not None
        code = self._process.wait()
        if self.stopping and code == -signal.SIGTERM:
            return 0
        return code if code >= 0 else 128 - code


def run(command: Sequence[str], *, rank: int, count: int, place: tuple[str, int], say: Say) -> int:
    """Be one rank from the first connection to the end; the exit status."""
    child = Command()
    listener = None
    if rank == 0:
        listener = socket.create_server(place)
        links = gather(listener, count, say)
    else:
        links = join(place, rank, count, say)
    say("all ranks are there")
    with child.start(command) as descriptor:
        gone = watch(descriptor, links, listener, count)
        # Rank 0 is stopped first and the others follow it, so while this one stops it waits for its own command only.
        if gone and not child.stopping:
            say(f"{gone}, so this one ends, too")
            child.end()
            return 1
        return child.status()


def _readable(watched: Sequence[t.Any]) -> list[t.Any]:
    return select.select(watched, [], [])[0]


def _keep_alive(link: socket.socket) -> None:
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def _teller() -> Say:
    """Print what is not the same as before: some of it is said again and again."""
    last = ""

    def say(text: str) -> None:
        nonlocal last
        if text != last:
            print(text, flush=True)
        last = text

    return say


def main(arguments: Sequence[str]) -> int:
    """Run a rank's command while all ranks run; its exit status, or 1 because another rank has ended."""
    parser = argparse.ArgumentParser(description="Run a rank of an engine while all ranks run.")
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--of", required=True, type=int, dest="count", help="ranks in all")
    parser.add_argument("--at", required=True, type=parse_place, dest="place", help="where rank 0 listens")
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:end]), words[end + 1 :]
    if not command or not 0 <= options.rank < options.count:
        parser.error(
            f"rank {options.rank} of {options.count} needs -- and a command, and a rank is less than their number"
        )
    try:
        return run(command, rank=options.rank, count=options.count, place=options.place, say=_teller())
    except OSError as exc:
        print(f"Rank {options.rank} cannot run at {':'.join(map(str, options.place))}: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
