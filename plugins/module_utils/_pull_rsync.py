# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""rsync as a client of its daemon: what it is asked, and what it says.

Flags, exit codes and messages are those of rsync 3.2.7 (``errcode.h``, ``log.c``, ``main.c``).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import typing as t
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

# The user and the module in the daemons' configuration.
USER, MODULE = "hy3", "checkpoint"
CONNECT_SECONDS = 10
_ESCAPED = re.compile(rb"\\#([0-7]{3})")
# Start of the protocol, socket, protocol stream, two for a signal, timeout of data and of connecting.
_SOURCE_CODES = (5, 10, 12, 19, 20, 30, 35)
_FULL = ("No space left on device", "Disk quota exceeded")


class Said(t.NamedTuple):
    """What a run of rsync came to.

    ``kind``: ``done``; ``source`` (it does not answer) or ``denied`` (it does not let us in); ``file`` (the source has
    not got it, or cannot read it); ``full`` (our disk); ``local`` (any other error here). ``text`` is rsync's own line.
    """

    kind: t.Literal["done", "source", "denied", "file", "full", "local"]
    text: str = ""


def parse_listing(text: str) -> dict[str, int]:
    """Bytes by name, from ``--out-format=%l %n`` or ``%b %n``, without directories.

    What rsync escapes (``\\#012``) is as it was.
    """
    listed: dict[str, int] = {}
    for line in text.split("\n"):
        size, _space, shown = line.partition(" ")
        if size.isdecimal() and shown and not shown.endswith("/"):
            raw = shown.encode("utf-8", errors="surrogateescape")
            raw = _ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), raw)
            listed[raw.decode("utf-8", errors="surrogateescape")] = int(size)
    return listed


def judge(returncode: int, stderr: str) -> Said:
    """What rsync's exit code (negative: a signal) and messages mean to the end that receives."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = lines[0] if lines else f"rsync ended with {returncode}"
    if returncode == 0:
        return Said("done")
    for line in lines:
        if any(full in line for full in _FULL):
            return Said("full", line)
    if "@ERROR" in stderr:
        denied = "auth failed" in stderr or "Unknown module" in stderr or "access denied" in stderr
        return Said("denied" if denied else "source", text)
    if returncode < 0 or returncode in _SOURCE_CODES:
        return Said("source", text)
    here = [line for line in lines if re.match(r"rsync: \[(receiver|generator|Receiver)\]", line)]
    if here:
        return Said("local", here[0])
    return Said("file", text) if returncode in (23, 24) else Said("local", text)


@dataclass(frozen=True)
class Source:
    """A node with a daemon; ``name`` is for messages, ``address`` is IPv4 as this node reaches it."""

    name: str
    address: str
    port: int


def command(source: Source, dest: str, *, timeout: int, dry: bool) -> list[str]:
    """A command that pulls the files named on its input, each ended by a zero byte; if ``dry`` it only lists them.

    Links give what they lead to. Files that are not there are no error. What is there is not trusted by its time. It
    ends with the process that starts it, also if that is killed.
    """
    how = (
        ["--dry-run", "--out-format=%l %n"]
        if dry
        else ["--times", "--omit-dir-times", "--partial", "--out-format=%b %n"]
    )
    return [
        *("setpriv", "--pdeathsig", "TERM", "rsync", "--from0", "--files-from=-", "--ignore-missing-args"),
        *("--copy-links", "--ignore-times", f"--timeout={timeout}", f"--contimeout={min(CONNECT_SECONDS, timeout)}"),
        *(*how, f"rsync://{USER}@{source.address}:{source.port}/{MODULE}/", f"{dest}/"),
    ]


class Transfer:
    """A running rsync."""

    def __init__(
        self,
        arguments: list[str],
        names: Iterable[str],
        *,
        password: str,
        lock: int,
        spawn: Callable[..., subprocess.Popen[bytes]],
    ) -> None:
        """Start it; ``lock`` is a descriptor that it keeps open as long as it writes."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RSYNC_")}
        environment |= {"RSYNC_PASSWORD": password, "LC_ALL": "C.UTF-8"}
        # Not pipes: nobody reads them before the end.
        self._stdout: t.IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as rsync runs
        self._stderr: t.IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as rsync runs
        with tempfile.TemporaryFile() as stdin:
            stdin.write(b"".join(os.fsencode(name) + b"\0" for name in names))
            stdin.seek(0)
            try:
                self._process = spawn(
                    arguments,
                    stdin=stdin,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    env=environment,
                    pass_fds=(lock,),
                )
            except FileNotFoundError as error:
                raise Hy3Error(f"{arguments[0]} is not on this node; install util-linux and rsync.") from error

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> tuple[str, Said]:
        """Its output, once it has ended, and what it came to."""
        found = []
        for stream in (self._stdout, self._stderr):
            stream.seek(0)
            found.append(stream.read().decode("utf-8", errors="surrogateescape"))
            stream.close()
        return found[0], judge(self._process.returncode, found[1])

    def end(self) -> None:
        """Stop it; what has come of its file stays."""
        self._process.terminate()
        self._process.wait()
        self.result()
