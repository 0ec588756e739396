# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Piped to a node's own Python, as root: its user's files, its checkpoint and the processes of the engine's user.

Standard library only, and nothing of the collection: it looks from outside.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
from pathlib import Path
from typing import Any

USER = "hy3"
CHECKPOINT = "srv/hy3/models/Hy3-tiny"
# What somebody who works on the node may have there: in both homes, beside the models, and in the log directory.
KEPT = ("home/lab/mine", "home/hy3/mine", "srv/hy3/mine", "var/log/mine")
# By the whole command; a process that renamed itself has its title there.
KINDS = {
    "core": r"VLLM::EngineCore",
    "rank": r"ray::RayWorker|VLLM::Worker",
    "raylet": r"\S*/raylet/raylet ",
    "gcs": r"\S*/gcs_server ",
    "api": r"\S*python\S* \S*/bin/vllm serve ",
}


def kind(command: str) -> str:
    """The kind of a process of an engine, or nothing for any other."""
    return next((name for name, pattern in KINDS.items() if re.match(pattern, command)), "")


def unit(cgroup: str) -> str:
    """The innermost service or scope on systemd's own path in ``/proc/PID/cgroup``; other controllers may lack it."""
    paths = [line.split(":", 2)[-1] for line in cgroup.splitlines() if line.split(":")[1] in ("", "name=systemd")]
    parts = [part for path in paths for part in path.split("/")]
    return next((part for part in reversed(parts) if part.endswith((".service", ".scope"))), "")


def processes(proc: Path, user: int) -> list[dict[str, Any]]:
    found = []
    for entry in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if entry.stat().st_uid == user and command:
                place = unit((entry / "cgroup").read_text())
                found.append({"pid": int(entry.name), "unit": place, "kind": kind(command), "command": command[:200]})
        except OSError:  # it ended while we looked
            continue
    return found


def digests(paths: list[Path], below: Path) -> dict[str, str]:
    return {
        str(path.relative_to(below)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
        if path.is_file()
    }


def look(root: Path, user: int) -> dict[str, Any]:
    tree = root / CHECKPOINT
    halves = [path for path in tree.rglob("*") if path.name.endswith(".incomplete") or path.name == ".hy3-pull"]
    return {
        "kept": digests([root / name for name in KEPT], root),
        "checkpoint": digests([path for path in tree.glob("*") if path.is_file()], tree),
        "unfinished": sorted(str(path.relative_to(root)) for path in halves),
        "processes": processes(root / "proc", user),
    }


if __name__ == "__main__":
    print(json.dumps(look(Path(os.sep), pwd.getpwnam(USER).pw_uid)))
