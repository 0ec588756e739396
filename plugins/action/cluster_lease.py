# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action of module ``cluster_lease``: knows which play this is, and whether another one here still runs."""

from __future__ import annotations

import getpass
import os
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


def identity(host: str, pid: int) -> str:
    """``HOST:PID:START``: a pid that was used again is another play."""
    return f"{host}:{pid}:{started(pid)}"


def has_ended(holder: str, host: str) -> bool:
    """Whether the holder is a play of this controller that no longer runs."""
    where, pid, _ticks = holder.rsplit(":", 2)
    return where == host and identity(host, int(pid)) != holder


class ActionModule(ActionBase):
    """Runs the module with this play's identity, and once more over the body of a play that has ended."""

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        # A task runs in a process that ansible-playbook forked for it.
        host, pid = socket.gethostname(), os.getppid()
        arguments = {
            **self._task.args,
            "holder": identity(host, pid),
            "who": f"{getpass.getuser()}@{host}, process {pid}",
        }
        result = self._module(arguments, task_vars)
        held_by = result.get("held_by")
        if held_by and has_ended(held_by, host):
            result = self._module({**arguments, "dead": held_by}, task_vars)
        if result.get("taken_over"):
            Display().display(f"Took the cluster over from {result['taken_over']}, which ended without giving it back.")
        return result

    def _module(self, arguments: dict[str, t.Any], task_vars: dict[str, t.Any] | None) -> dict[str, t.Any]:
        result: dict[str, t.Any] = self._execute_module("sparks.hy3.cluster_lease", arguments, task_vars=task_vars)
        return result
