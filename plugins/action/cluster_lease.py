# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action of module ``cluster_lease``: knows which play this is, and whether another one here still runs."""

from __future__ import annotations

import getpass
import os
import re
import socket
import typing as t
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display


def started(pid: int, proc: str = "/proc") -> str | None:
    """Start time of a process in clock ticks since boot (field 22 of ``/proc/PID/stat``), or None if it is gone."""
    try:
        # The second field is a name in parentheses and may hold anything.
        return Path(proc, str(pid), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


def machine(proc: str = "/proc") -> str:
    """What tells this controller from all others, or nothing where that cannot be told.

    Two machines may have one name, and copies of one machine its machine-id, too. A process is one of this boot and of
    this PID namespace, because containers on one machine share the boot.
    """
    try:
        boot = Path(proc, "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(Path(proc, 'self/ns/pid'))}"
    except OSError:
        return ""


def identity(place: str, pid: int) -> str:
    """``PLACE:PID:START``: a pid that was used again is another play."""
    return f"{place}:{pid}:{started(pid)}"


def exists(pid: int) -> bool:
    """Whether there is such a process. It may be one whose ``/proc`` is hidden from us."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def has_ended(holder: str, place: str) -> bool:
    """Whether the holder is a play of this controller that no longer runs.

    Only what is certain counts: a holder without a machine, as older releases wrote it, may be anywhere.
    """
    match = re.fullmatch(r"(.+):(\d{1,9}):(\w+)", holder)
    if not match or match[1] != place:
        return False
    start = started(int(match[2]))
    return start != match[3] if start else not exists(int(match[2]))


class ActionModule(ActionBase):
    """Runs the module with this play's identity, and once more over the body of a play that has ended."""

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        # A task runs in a process that ansible-playbook forked for it.
        host, known, pid = socket.gethostname(), machine(), os.getppid()
        place = f"{host}/{known}"
        arguments = {
            **self._task.args,
            "holder": identity(place, pid),
            "who": f"{getpass.getuser()}@{host}, process {pid}",
        }
        result = self._module(arguments, task_vars)
        held_by = result.get("held_by")
        if held_by and known and has_ended(held_by, place):
            result = self._module({**arguments, "dead": held_by}, task_vars)
        if result.get("taken_over"):
            Display().display(result["msg"])
        return result

    def _module(self, arguments: dict[str, t.Any], task_vars: dict[str, t.Any] | None) -> dict[str, t.Any]:
        result: dict[str, t.Any] = self._execute_module("sparks.hy3.cluster_lease", arguments, task_vars=task_vars)
        return result
