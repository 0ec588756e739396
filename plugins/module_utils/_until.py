# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Patience before a start: a check is run until it succeeds, however long that takes.

The file is a node-side program: ``until.py -- COMMAND`` runs as ``ExecStartPre=`` of a unit. What it waits for is no
failure of the unit and costs no memory, so there is no deadline; the journal and ``systemctl status`` say what it is.
It imports nothing but the standard library.
"""
# pylint: disable=ansible-bad-function  # a node runs this file as a program, without Ansible

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import typing as t
from collections.abc import Callable, Mapping, Sequence

RETRY_SECONDS = 5.0
# A check that hangs for longer is ended and counts as one that failed.
CHECK_SECONDS = 120.0
# A reason is written to the journal when it changes, but at most so often, and again after the longer time.
QUIET_SECONDS, REMIND_SECONDS = 60.0, 600.0
# argparse's exit status for a command line that is wrong: waiting does not mend it.
MISUSE = 2


class Outcome(t.NamedTuple):
    """Exit status of a check, and all that it printed."""

    status: int
    text: str

    @property
    def reason(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}"


def wait(
    check: Callable[[], Outcome],
    *,
    tell: Callable[[str], None],
    show: Callable[[str], None],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> Outcome:
    """Run ``check`` until it succeeds or its command line is wrong, and return that outcome.

    Args:
        check: One attempt.
        tell: Writes a line to the journal.
        show: Sets the unit's status, an empty text for none.
        sleep: Pauses for seconds.
        clock: Seconds that only grow.
    """
    told, told_at = "", float("-inf")
    while True:
        outcome = check()
        if outcome.status in (0, MISUSE):
            if told:
                show("")
            return outcome
        reason = outcome.reason
        show(f"waits: {reason}")
        silence = clock() - told_at
        if silence >= (QUIET_SECONDS if reason != told else REMIND_SECONDS):
            tell(f"waits: {reason}")
            told, told_at = reason, clock()
        sleep(RETRY_SECONDS)


def run_check(command: Sequence[str], *, seconds: float = CHECK_SECONDS) -> Outcome:
    """One attempt of a command, with what it printed."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(1, f"{command[0]} gave no answer within {seconds:g} s")
    except OSError as exc:
        return Outcome(1, f"{command[0]} cannot be run: {exc.strerror}")
    return Outcome(done.returncode, done.stdout)


def show_status(text: str, environ: Mapping[str, str]) -> None:
    """Tell systemd what a unit does, where it listens (sd_notify(3)). A status that does not arrive is no error."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # of the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.sendto(f"STATUS={text}".encode(), address)
    except OSError:
        pass


def main(arguments: Sequence[str]) -> int:
    """Wait for a command to succeed; 0 once it does, 2 if a command line is wrong."""
    if len(arguments) < 2 or arguments[0] != "--":
        print("usage: until.py -- COMMAND [ARGUMENT ...]", file=sys.stderr)
        return MISUSE
    outcome = wait(
        lambda: run_check(arguments[1:]),
        tell=lambda line: print(line, flush=True),
        show=lambda text: show_status(text, os.environ),
        sleep=time.sleep,
        clock=time.monotonic,
    )
    print(outcome.text, end="", flush=True)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
