# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start or stop one lab node, a systemd-nspawn machine in a control group of its own, or cap its link.

The control group is the node's only handle. Whatever runs in it belongs to the node and nothing else does, so a
stop needs no pid file and leaves no orphan, also after the starter was killed. Two nodes must not share one: each
node's systemd would manage the other's units.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path

STOP_SECONDS = 20.0
# A bucket of so much time, so that segments of 64 KiB pass whole, and a queue of so much that TCP fills the link.
BURST_SECONDS, QUEUE = 0.01, "50ms"
SMALLEST_BURST = 128 * 1024


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


def is_init(status: str) -> bool:
    """Whether ``/proc/PID/status`` is that of a process which is number 1 in a namespace of its own."""
    ids = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    return len(ids) > 1 and ids[-1] == "1"


def init_of(name: str) -> int:
    """The node's first process. Not just any: some services have a network namespace of their own."""
    for pid in sorted(members(name)):
        try:
            if is_init(Path(f"/proc/{pid}/status").read_text()):
                return pid
        except OSError:  # it ended while we looked
            continue
    raise SystemExit(f"lab node {name} does not run, so its link cannot be capped; start it first")


def bytes_per_second(rate: str) -> int:
    """``rate`` in the spelling of tc, such as ``400mbit``; 0 for an empty one."""
    return int(rate[:-4]) * {"k": 10**3, "m": 10**6, "g": 10**9}[rate[-4]] // 8 if rate else 0


def capped_at(qdiscs: str) -> int:
    """Bytes a second of the token bucket in what ``tc -json qdisc show dev … root`` prints; 0 without one."""
    return next((int(qdisc["options"]["rate"]) for qdisc in json.loads(qdiscs) if qdisc["kind"] == "tbf"), 0)


def cap_end(tc: list[str], device: str, rate: str) -> bool:
    """Let one end of a link send at most ``rate``, all it can if that is empty. ``tc`` is the command of its side."""
    shown = subprocess.run(  # noqa: S603 - the command is ours
        [*tc, "-json", "qdisc", "show", "dev", device, "root"], capture_output=True, text=True, check=True
    ).stdout
    wanted = bytes_per_second(rate)
    if capped_at(shown) == wanted:
        return False
    change = ["qdisc", "replace" if wanted else "del", "dev", device, "root"]
    if wanted:
        burst = max(int(wanted * BURST_SECONDS), SMALLEST_BURST)
        change += ["tbf", "rate", rate, "burst", str(burst), "latency", QUEUE]
    subprocess.run([*tc, *change], check=True)  # noqa: S603 - the command is ours
    return True


def cap(name: str, link: str, device: str, rate: str) -> bool:
    """Cap a node's link: its end ``link`` here sends what the node receives, ``device`` in the node what it sends."""
    inside = ["nsenter", f"--net=/proc/{init_of(name)}/ns/net", "tc"]
    ends = ((["tc"], link), (inside, device))
    changed = [cap_end(tc, end, rate) for tc, end in ends]
    return True in changed


def main() -> None:
    """Command line: ``lab_node.py start|stop|cap|list ...``; prints ``changed`` or ``unchanged``."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    starter = actions.add_parser("start")
    starter.add_argument("name")
    starter.add_argument("root")
    starter.add_argument("command", nargs=argparse.REMAINDER)
    stopper = actions.add_parser("stop")
    stopper.add_argument("name")
    capper = actions.add_parser("cap")
    for argument in ("name", "link", "device", "rate"):
        capper.add_argument(argument)
    actions.add_parser("list")
    args = parser.parse_args()
    if args.action == "list":
        names = {path.name.removeprefix("hy3lab-") for base in hierarchies() for path in base.glob("hy3lab-*")}
        for name in sorted(names):
            print(name)
        return
    if args.action == "start":
        changed = start(args.name, args.root, args.command)
    elif args.action == "stop":
        changed = stop(args.name)
    else:
        changed = cap(args.name, args.link, args.device, args.rate)
    print("changed" if changed else "unchanged")


if __name__ == "__main__":
    main()
