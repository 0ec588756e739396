# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What units, files and processes say about a fault. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNITS = ("hy3-ray.service", "hy3-serve.service")
PROPERTIES = (
    "Id",
    "ActiveState",
    "SubState",
    "Result",
    "InvocationID",
    "NRestarts",
    "Job",
    "ActiveExitTimestampMonotonic",
)
SHOW = f"systemctl show -p {','.join(PROPERTIES)} {' '.join(UNITS)}"

# What runs where it serves with tensor parallel 2, by the head and the other node.
HEAD = {"api": 1, "core": 1, "rank": 1, "raylet": 1, "gcs": 1}
WORKER = {"rank": 1, "raylet": 1}


@dataclass(frozen=True)
class Unit:
    """A unit of one node; ``left_s`` is when it last ceased to be active, by the clock of ``time.monotonic``."""

    name: str
    active: str
    sub: str = ""
    result: str = ""
    invocation: str = ""
    restarts: int = 0
    waits: bool = False
    left_s: float = 0.0

    @property
    def moves(self) -> bool:
        """Whether systemd is about to do something with it, such as a restart."""
        return self.waits or self.active not in ("active", "inactive", "failed")


@dataclass
class Node:
    """A node as it was found: SHA-256 of files, what an interrupted copy left, and processes of the engine's user."""

    kept: dict[str, str] = field(default_factory=dict)
    checkpoint: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    processes: list[dict[str, Any]] = field(default_factory=list)


def units(shown: str) -> dict[str, Unit]:
    """Units by name from the output of :data:`SHOW`. What a version of systemd does not print is empty."""
    found = {}
    for block in re.split(r"\n\s*\n", shown.strip()):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" not in values:
            continue
        found[values["Id"]] = Unit(
            name=values["Id"],
            active=values.get("ActiveState", ""),
            sub=values.get("SubState", ""),
            result=values.get("Result", ""),
            invocation=values.get("InvocationID", ""),
            restarts=int(values.get("NRestarts") or 0),
            waits=values.get("Job", "") not in ("", "0"),
            left_s=int(values.get("ActiveExitTimestampMonotonic") or 0) / 1e6,
        )
    return found


def first_end(nodes: Mapping[str, Mapping[str, Unit]], since: float) -> tuple[float, str] | None:
    """When the first unit ended after ``since``, and which; None if none did."""
    ends = [
        (unit.left_s, f"{name} of {node}")
        for node, found in nodes.items()
        for name, unit in found.items()
        if unit.left_s > since
    ]
    return min(ends, default=None)


def is_down(nodes: Mapping[str, Mapping[str, Unit]], head: str) -> bool:
    """Whether nothing is under way that would answer again: the engine's unit rests and no unit of any node moves.

    A node that could not be asked is not known, so it may.
    """
    serve = nodes.get(head, {}).get("hy3-serve.service")
    every = [unit for found in nodes.values() for unit in found.values()]
    return serve is not None and serve.active in ("inactive", "failed") and not any(unit.moves for unit in every)


def counts(processes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Processes of an engine by kind."""
    found: dict[str, int] = {}
    for process in processes:
        if process["kind"]:
            found[process["kind"]] = found.get(process["kind"], 0) + 1
    return found


def lost(before: Mapping[str, Node], after: Mapping[str, Node], source: Mapping[str, str], head: str) -> list[str]:
    """A sentence for each thing that is not as it must be after a fault and the next run.

    ``before`` is how the nodes were found at first, ``source`` the checkpoint's files with their hashes.
    """
    said = []
    for name, node in after.items():
        for path, digest in before[name].kept.items():
            if node.kept.get(path) != digest:
                said.append(f"{name}: {path} is {'changed' if path in node.kept else 'gone'}.")
        wrong = sorted(path for path, digest in source.items() if node.checkpoint.get(path) != digest)
        said += [f"{name}: {', '.join(wrong)} of the checkpoint is not what it was."] if wrong else []
        said += [f"{name}: {', '.join(node.unfinished)} was left of a copy."] if node.unfinished else []
        wanted = HEAD if name == head else WORKER
        if counts(node.processes) != wanted:
            said.append(f"{name}: the engine's processes are {counts(node.processes)} instead of {wanted}.")
        strays = [str(one["pid"]) for one in node.processes if one["kind"] and one["unit"] not in UNITS]
        said += [f"{name}: processes {', '.join(strays)} of an engine are in none of its units."] if strays else []
    return said
