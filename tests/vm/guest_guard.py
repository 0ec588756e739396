# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs inside the machine as root: sshd and systemd-oomd under the files of role guard, and engines that want too much.

There is no systemd here. What it does with those files - write them into control groups, tell systemd-oomd which to
watch - is done by hand; the kernel, its pressure figures, sshd and systemd-oomd are real. One JSON object a line for
each scenario; ``test_guard.py`` knows what they should say.
"""

from __future__ import annotations

import configparser
import ctypes
import json
import mmap
import os
import random
import re
import signal
import socket
import threading
import time
import traceback
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._memory import parse_size
from ansible_collections.sparks.hy3.tests.vm.guest import CGROUPS, MIB, Answer, end, hold, start_in, until

FILES = Path("/guard")
SLICE = CGROUPS / "hy3.slice"
RAY, SERVE = SLICE / "hy3-ray.service", SLICE / "hy3-serve.service"
SYSTEM = CGROUPS / "system.slice"
CAP = 96 * MIB  # of the slice
WORKING_SET = 56 * MIB
PAGE = 4096
# A disk of its own, slow at single pages as any is beside memory.
DISK, SWAP = "/dev/vdb", "/dev/vdc"
OOMD_LOG = Path("/tmp/oomd.log")
ANSWER_SECONDS = 20.0
# Where systemd listens for systemd-oomd: until release 252, and since 253.
SOCKETS = ("/run/systemd/io.system.ManagedOOM", "/run/systemd/io.systemd.ManagedOOM")


def setting(file: str, name: str) -> str:
    """What a file of role guard says."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its manual says
    parser.read(FILES / file)
    return next(section[name] for section in parser.values() if name in section)


# --- what systemd does


def make_groups() -> None:
    for group, part in ((SYSTEM, "system.conf"), (SYSTEM / "ssh.service", "sshd.conf")):
        group.mkdir()
        (group / "memory.min").write_text(str(parse_size(setting(part, "MemoryMin"))))
        if group == SYSTEM:
            (group / "cgroup.subtree_control").write_text("+memory")
    (SYSTEM / "systemd-oomd.service").mkdir()
    SLICE.mkdir()
    (SLICE / "memory.max").write_text(str(CAP))
    (SLICE / "memory.swap.max").write_text("0")
    (SLICE / "cgroup.subtree_control").write_text("+memory")
    RAY.mkdir()
    SERVE.mkdir()


def start_service(name: str, *command: str, log: Path) -> int:
    """Start a program in its control group; return its process id."""

    def become() -> None:
        be_anybody()
        with log.open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.environ["SYSTEMD_LOG_TARGET"] = "console"
        os.execv(command[0], command)

    return start_in(SYSTEM / name, become)


def speak_for_systemd() -> None:
    """Tell systemd-oomd what it asks systemd for; a message of varlink is JSON that ends with a zero byte."""
    share = float(setting("slice.conf", "ManagedOOMMemoryPressureLimit").rstrip("%")) / 100
    watch = {"path": "/hy3.slice", "property": "ManagedOOMMemoryPressure"}
    watch |= {"mode": setting("slice.conf", "ManagedOOMMemoryPressure"), "limit": int(share * (2**32 - 1))}
    reply = json.dumps({"parameters": {"cgroups": [watch]}, "continues": True}).encode() + b"\0"
    links = []

    def serve(server: socket.socket) -> None:
        while True:
            link, _peer = server.accept()
            asked = b""
            while not asked.endswith(b"\0"):
                asked += link.recv(4096)
            link.sendall(reply)
            links.append(link)

    for path in SOCKETS:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        threading.Thread(target=serve, args=(server,), daemon=True).start()


# --- what is seen


def pressure() -> float:
    """What systemd-oomd reads: for how much of ten seconds all of the slice's tasks waited for memory, in percent."""
    return float(re.findall(r"^full avg10=([\d.]+)", (SLICE / "memory.pressure").read_text(), re.MULTILINE)[0])


def stalled() -> int:
    """How long all of the slice's tasks have waited for memory, in microseconds."""
    return int(re.findall(r"^full .*total=(\d+)", (SLICE / "memory.pressure").read_text(), re.MULTILINE)[0])


def events() -> dict[str, int]:
    """How often the slice or a group in it met its limit (``max``), and lost a process to the kernel (``oom_kill``)."""
    found = dict(line.split() for line in (SLICE / "memory.events").read_text().splitlines())
    return {name: int(found[name]) for name in ("max", "oom_kill")}


def banner() -> float | None:
    """How long sshd takes until it says who it is, in seconds; None if it does not."""
    began = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", 22), ANSWER_SECONDS) as link:
            said = link.recv(64)
    except OSError:
        return None
    return time.monotonic() - began if said.startswith(b"SSH-") else None


def oomd_says() -> list[str]:
    return re.findall(r"^.*(?:Killed|Marked).*$", OOMD_LOG.read_text(errors="replace"), re.MULTILINE)


class Watch:
    """Follows an engine: pressure of the slice, events in it, and how sshd answers meanwhile."""

    def __init__(self, sshd: int) -> None:
        self._sshd = sshd
        self._said = len(oomd_says())
        self._events = events()
        self._began = time.monotonic()
        self.limit = float(setting("slice.conf", "ManagedOOMMemoryPressureLimit").rstrip("%"))

    def until_end(self, pid: int, seconds: float) -> Answer:
        """What was seen until the process ended, or for so many seconds, after which it is ended."""
        peak, waits, over, ended = 0.0, [], None, None
        while ended is None and time.monotonic() - self._began < seconds:
            now = pressure()
            peak = max(peak, now)
            over = self._since() if over is None and now > self.limit else over
            waits.append(banner())
            time.sleep(0.5)
            gone, status = os.waitpid(pid, os.WNOHANG)
            ended = (self._since(), os.WTERMSIG(status)) if gone else None
        if ended is None:
            end(pid)
        found = events()
        return {
            "peak": peak,
            "over_limit_after": over,
            "ended_after": ended[0] if ended else None,
            "signal": ended[1] if ended else None,
            "slowest_banner": None if None in waits else max(t.cast("list[float]", waits)),
            "sshd_lives": Path(f"/proc/{self._sshd}/exe").exists(),
            "oomd": oomd_says()[self._said :],
            **{name: found[name] - self._events[name] for name in found},
        }

    def _since(self) -> float:
        return time.monotonic() - self._began


# --- engines


def engine(mebibytes: float, growth: float) -> None:
    """Touch a working set at random, with memory of one's own beside it that grows by so much a second."""
    be_anybody()
    held: list[bytes] = []
    began = time.monotonic()
    with open(DISK, "rb", buffering=0) as disk, mmap.mmap(disk.fileno(), WORKING_SET, access=mmap.ACCESS_READ) as pages:
        for offset in range(0, WORKING_SET, MIB):
            os.pread(disk.fileno(), MIB, offset)
        pages.madvise(mmap.MADV_RANDOM)
        while True:
            while len(held) < mebibytes + growth * (time.monotonic() - began):
                held.append(b"x" * MIB)
            for _touch in range(100):
                pages[random.randrange(WORKING_SET // PAGE) * PAGE]


def load() -> None:
    """Read a checkpoint that is larger than what the slice may keep, again and again, as fast as the disk is."""
    be_anybody()
    with open(DISK, "rb", buffering=0) as disk:
        while True:
            if not disk.read(MIB):
                disk.seek(0)


def spin() -> None:
    """Wait for a GPU or a peer as engines do."""
    be_anybody()
    while True:
        pass


def take_outside() -> None:
    """Pin memory that no group is charged for, as a GB10's driver does, until the slice stalls; keep it."""
    be_anybody()
    ctypes.CDLL(None).mlockall(3)
    held: list[bytes] = []
    while True:
        before = stalled()
        time.sleep(0.25)
        if stalled() - before < 100_000:
            held.append(b"x" * (2 * MIB))
        elif len(held) > 4:
            break
    while held:
        signal.pause()


def be_anybody() -> None:
    """Not spared by the kernel, as this program is."""
    Path("/proc/self/oom_score_adj").write_text("0")


# --- scenarios


def over_cap(sshd: int) -> Answer:
    """Take at once more than the slice may have."""
    watch = Watch(sshd)
    return watch.until_end(start_in(SERVE, lambda: hold(160)), 30)


def loading(sshd: int) -> Answer:
    """A start: nothing may end it."""
    watch = Watch(sshd)
    return watch.until_end(start_in(SERVE, load), 40)


def under_cap(sshd: int) -> Answer:
    """Grow until the working set does not fit; two minutes after the start the cap would be met."""
    watch = Watch(sshd)
    return watch.until_end(start_in(SERVE, lambda: engine(36, 0.5)), 150)


def uncharged(sshd: int) -> Answer:
    """The slice is far below its cap, and the node is short of memory that nobody is charged for."""
    (SLICE / "memory.max").write_text("max")
    try:
        watch = Watch(sshd)
        pid = start_in(SERVE, lambda: engine(8, 0))
        time.sleep(5)
        taker = start_in(CGROUPS, take_outside)
        answer = watch.until_end(pid, 180)
        answer["taker_lives"] = os.waitpid(taker, os.WNOHANG)[0] == 0
        if answer["taker_lives"]:
            end(taker)
        return answer
    finally:
        (SLICE / "memory.max").write_text(str(CAP))


def beside_spinner(sshd: int) -> Answer:
    """The working set does not fit, and another process of the slice computes all the time."""
    spinner = start_in(RAY, spin)
    watch = Watch(sshd)
    try:
        return watch.until_end(start_in(SERVE, lambda: engine(44, 0)), 80)
    finally:
        if not os.waitpid(spinner, os.WNOHANG)[0]:
            end(spinner)


def scores(sshd: int) -> Answer:
    """What sshd gives itself, and the process that it makes for a connection."""
    with socket.create_connection(("127.0.0.1", 22), ANSWER_SECONDS) as link:
        link.recv(64)
        parents = {path.parent.name: path.read_text().rpartition(")")[2].split()[1] for path in stats()}
        children = [pid for pid, parent in parents.items() if parent == str(sshd)]
        found = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in [str(sshd), *children]]
    return {"own": found[0], "children": found[1:], "kept": int((SYSTEM / "ssh.service/memory.min").read_text())}


def stats() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]


def main() -> None:
    Path("/proc/self/oom_score_adj").write_text("-1000")
    (CGROUPS / "cgroup.subtree_control").write_text("+memory")
    if ctypes.CDLL(None, use_errno=True).swapon(SWAP.encode(), 0):
        raise OSError(ctypes.get_errno(), f"swapon {SWAP}")
    make_groups()
    speak_for_systemd()
    sshd = start_service("ssh.service", "/usr/sbin/sshd", "-D", "-e", log=Path("/tmp/sshd.log"))
    oomd = start_service("systemd-oomd.service", "/oomd", log=OOMD_LOG)
    until(lambda: banner() is not None, 60)
    for scenario in (scores, over_cap, loading, under_cap, uncharged, beside_spinner):
        began = time.monotonic()
        try:
            answer = scenario(sshd)
        except Exception:  # noqa: BLE001  # a test shows it
            answer = {"error": traceback.format_exc()}
        lives = Path(f"/proc/{oomd}/exe").exists()
        # systemd-oomd does nothing for 15 seconds after a kill, and an average of ten seconds has to fall.
        until(lambda: pressure() < 5, 60)
        time.sleep(16 if answer.get("oomd") else 1)
        answer |= {"oomd_lives": lives, "took": time.monotonic() - began}
        print(json.dumps({"name": scenario.__name__, **answer}), flush=True)
    logs = {file.stem: file.read_text(errors="replace") for file in (OOMD_LOG, Path("/tmp/sshd.log"))}
    print(json.dumps({"name": "end", **logs}), flush=True)


if __name__ == "__main__":
    main()
