# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Processes of an engine that have outlived it: which are ours, and how they are ended.

An engine core and its workers are children of the API server. When that is killed they are handed to the system's or
the user's manager, keep the memory of the GPU, and no unit knows them any more. Ours are found by what cannot be
mistaken: their user, the virtual environment that their code is mapped from, their control group, and their parent.
"""

from __future__ import annotations

import os
import re
import signal
import time
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._engine_processes import EngineProcesses, kind_of
from ansible_collections.sparks.hy3.plugins.module_utils._units import Processes, ticks_since_boot

# What holds memory for an engine, and what starts, keeps and ends those.
HOLDERS = ("engine_core", "worker")
FRONT_ENDS = ("driver", "ray_start", "raylet", "gcs")
# To whom a process goes that has lost its parent: number 1, or a user's own manager.
MANAGERS = ("systemd", "init")
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.1


class Seen(t.TypedDict):
    """A process of an engine, as the kernel shows it.

    C(parent) is the name of its nearest ancestor that is none of an engine's HOLDERS, C(files) its program and what is
    mapped into it, C(root) is not empty for one in a container, C(started) is in clock ticks since the boot, and
    C(resident) is in bytes.
    """

    pid: int
    kind: str
    title: str
    user: int
    unit: str
    parent: str
    files: list[str]
    root: str
    started: int | None
    resident: int | None


def is_below(files: t.Iterable[str], places: t.Iterable[str]) -> bool:
    """Whether one of the files lies in one of the directories."""
    prefixes = tuple(f"{place.rstrip('/')}/" for place in places if place.strip("/"))
    return bool(prefixes) and any(file.startswith(prefixes) for file in files)


def orphans_among(seen: t.Sequence[Seen], *, user: int, venvs: t.Collection[str]) -> list[Seen]:
    """Those that are ours, have outlived their engine and hold its memory.

    One in whose control group a front end lives belongs to that, whoever started it; so does one whose parent is any
    other program. One in a container is its keeper's business.
    """
    kept = {one["unit"] for one in seen if one["kind"] in FRONT_ENDS and one["unit"]}
    return [
        one
        for one in seen
        if one["kind"] in HOLDERS
        and one["user"] == user
        and not one["root"]
        and one["unit"] not in kept
        and one["parent"] in MANAGERS
        and is_below(one["files"], venvs)
    ]


def mapped_files(maps: str) -> list[str]:
    """The files that C(/proc/PID/maps) names, each once, without the mark of a deleted one."""
    found = re.findall(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ +(/.*)$", maps, re.MULTILINE)
    return list(dict.fromkeys(file.removesuffix(" (deleted)") for file in found))


def field_of(status: str, name: str) -> int | None:
    """A number of C(/proc/PID/status); None if it is not there, as VmRSS of a process that is ending."""
    match = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else None


class Orphans:
    """Finds and ends them on this machine, below ``proc``."""

    def __init__(self, *, user: int, venv: str, proc: str = "/proc") -> None:
        self._user = user
        # What is mapped is named by its real path.
        self._venvs = sorted({venv, os.path.realpath(venv)})
        self._proc = Path(proc)
        self._processes = Processes(proc)

    def find(self) -> list[Seen]:
        """All of them in the order of their ids."""
        pids = sorted(int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit())
        seen = [one for pid in pids if (one := self._describe(pid))]
        return orphans_among(seen, user=self._user, venvs=self._venvs)

    def end(self, found: t.Sequence[Seen], *, grace: float = GRACE_SECONDS) -> list[int]:
        """End them, by force after ``grace`` seconds, and return the ids of those that are still there after as long.

        A process that waits within the driver ends when the driver lets it.
        """
        left = list(found)
        for how in (signal.SIGTERM, signal.SIGKILL):
            for one in left:
                self._signal(one, how)
            end = time.monotonic() + grace
            while (left := [one for one in left if self._is(one)]) and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
        return [one["pid"] for one in left]

    def _signal(self, one: Seen, how: signal.Signals) -> None:
        """To this very process: its descriptor is taken before it is recognised, so that no successor is hit."""
        try:
            descriptor = os.pidfd_open(one["pid"])
        except OSError:
            return
        try:
            if self._is(one):
                signal.pidfd_send_signal(descriptor, how)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)

    def _is(self, one: Seen) -> bool:
        """Whether the process still runs under its id. One that has ended and was not waited for holds nothing."""
        status = self._text(one["pid"], "status")
        same = self._started(one["pid"]) == one["started"] and field_of(status, "Uid") == one["user"]
        return same and not re.search(r"^State:\s+[ZX]", status, re.MULTILINE)

    def _describe(self, pid: int) -> Seen | None:
        kind = self._kind(pid)
        user = field_of(self._text(pid, "status"), "Uid")
        if not kind or user is None:
            return None
        ours = kind in HOLDERS and user == self._user
        return Seen(
            pid=pid,
            kind=kind,
            title=self._processes.argv(pid)[0].strip() if ours else "",
            user=user,
            unit=self._processes.unit(pid),
            parent=self._parent(pid) if ours else "",
            files=self._files(pid) if ours else [],
            root=EngineProcesses(str(self._proc)).root_of(pid),
            started=self._started(pid),
            resident=self._resident(pid) if ours else None,
        )

    def _kind(self, pid: int) -> str:
        argv = self._processes.argv(pid)
        found = kind_of([argv[0].strip(), *argv[1:]]) if argv else None
        return found[0] if found else ""

    def _parent(self, pid: int) -> str:
        """The name of the nearest ancestor that is no holder itself; empty if that cannot be told."""
        above = field_of(self._text(pid, "status"), "PPid")
        for _step in range(64):
            if not above:
                return ""
            if self._kind(above) not in HOLDERS:
                return self._text(above, "comm").strip()
            above = field_of(self._text(above, "status"), "PPid")
        return ""

    def _files(self, pid: int) -> list[str]:
        try:
            program = [os.readlink(self._proc / str(pid) / "exe")]
        except OSError:
            program = []
        return program + mapped_files(self._text(pid, "maps"))

    def _resident(self, pid: int) -> int | None:
        kib = field_of(self._text(pid, "status"), "VmRSS")
        return None if kib is None else kib * 1024

    def _started(self, pid: int) -> int | None:
        return ticks_since_boot(self._text(pid, "stat"))

    def _text(self, pid: int, name: str) -> str:
        try:
            return (self._proc / str(pid) / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
