# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start or stop one lab node: a systemd-nspawn machine in a control group of its own.

The control group is the node's only handle. Whatever runs in it belongs to the node and nothing else does, so a
stop needs no pid file and leaves no orphan, also after the starter was killed. Two nodes must not share one: each
node's systemd would manage the other's units.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path

STOP_SECONDS = 20.0


def hierarchies(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Where a process gets its control group: the unified tree, and systemd's own on a cgroup v1 host."""
    v1 = [root / name for name in ("systemd", "unified") if (root / name / "cgroup.procs").exists()]
    return v1 or [root]


def groups(name: str) -> list[Path]:
    """The node's control group in each hierarchy, whether it exists or not."""
    return [base / f"hy3lab-{name}" for base in hierarchies()]


def members(name: str) -> set[int]:
    """Process ids in the node's control groups, those of nested groups included."""
    found: set[int] = set()
    for group in groups(name):
        for procs in group.rglob("cgroup.procs"):
            try:
                found.update(int(pid) for pid in procs.read_text().split())
            except OSError:  # the group went away while we looked
                continue
    return found - {0}


def start(name: str, root: str, command: list[str]) -> bool:
    """Start ``command`` in the node's control groups, detached, with its console in ``<root>.console``."""
    if members(name):
        return False
    for group in groups(name):
        group.mkdir(exist_ok=True)

    def join() -> None:
        for group in groups(name):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    with open(f"{root}.console", "ab") as console:
        subprocess.Popen(  # noqa: S603 - the command is ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
            preexec_fn=join,  # noqa: PLW1509 - single-threaded, and the child must join before it forks
        )
    return True


def stop(name: str) -> bool:
    """Kill what runs in the node's control groups, then remove them."""
    existed = any(group.exists() for group in groups(name))
    deadline = time.monotonic() + STOP_SECONDS
    while pids := members(name):
        if time.monotonic() > deadline:
            raise SystemExit(f"lab node {name} still runs {sorted(pids)} {STOP_SECONDS:.0f} s after SIGKILL")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
    for group in groups(name):
        for directory in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
            directory.rmdir()
        if group.exists():
            group.rmdir()
    return existed


def main() -> None:
    """Command line: ``lab_node.py start|stop|list ...``; prints ``changed`` or ``unchanged``."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    starter = actions.add_parser("start")
    starter.add_argument("name")
    starter.add_argument("root")
    starter.add_argument("command", nargs=argparse.REMAINDER)
    stopper = actions.add_parser("stop")
    stopper.add_argument("name")
    actions.add_parser("list")
    args = parser.parse_args()
    if args.action == "list":
        names = {path.name.removeprefix("hy3lab-") for base in hierarchies() for path in base.glob("hy3lab-*")}
        for name in sorted(names):
            print(name)
        return
    changed = start(args.name, args.root, args.command) if args.action == "start" else stop(args.name)
    print("changed" if changed else "unchanged")


if __name__ == "__main__":
    main()
