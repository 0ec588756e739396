# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for systemd that runs what unit files say: real processes, one directory of this machine for each node.

A play says with ``NODE`` in its environment which node a module is on. ``ROOT/NODE/system`` has the unit files,
``ROOT/log`` what was started and stopped, in order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

SYSTEMCTL = """\
#!{python}
import os, re, signal, subprocess, sys, time
from pathlib import Path

ROOT, NODE = Path({root!r}), os.environ["NODE"]


def file_of(unit):
    return ROOT / NODE / "system" / unit


def pid_of(unit):
    path = ROOT / NODE / (unit + ".pid")
    pid = int(path.read_text()) if path.exists() else 0
    try:
        alive = pid and Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        alive = False
    return pid if alive else 0


def show(unit):
    pid, loaded = pid_of(unit), file_of(unit).exists()
    asked = [word.partition("=")[2] for word in sys.argv if word.startswith("--property=")]
    values = dict.fromkeys(",".join(asked).split(",") if asked else [], "")
    values.update(Id=unit, Description="x", SubState="x", Result="success", ExecMainStatus=0, MainPID=pid, NRestarts=0)
    values.update(LoadState="loaded" if loaded else "not-found", ActiveState="active" if pid else "inactive")
    values.update(InvocationID="0" * 32 * bool(pid), UnitFileState="static")
    return "\\n".join(f"{{name}}={{value}}" for name, value in values.items())


def stop(unit):
    pid = pid_of(unit)
    if pid:
        os.kill(pid, signal.SIGKILL)
        while pid_of(unit):
            time.sleep(0.01)
        note("stop", unit)


def start(unit):
    text = file_of(unit).read_text()
    environment = dict(pair.split("=", 1) for pair in re.findall("^Environment=(.*)$", text, re.MULTILINE))
    command = re.search("^ExecStart=(.*)$", text, re.MULTILINE)[1].split()
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
    except OSError as error:
        sys.exit(f"Job for {{unit}} failed: {{error}}")
    (ROOT / NODE / (unit + ".pid")).write_text(str(process.pid))
    note("start", unit)


def note(what, unit):
    with (ROOT / "log").open("a") as log:
        log.write(f"{{what}} {{unit.removesuffix('.service')}} on {{NODE}}\\n")


words = [word for word in sys.argv[1:] if not word.startswith("-")]
if words[0] == "show":
    print("\\n\\n".join(show(unit) for unit in words[1:]))
elif words[0] == "is-active":
    print("active" if pid_of(words[1]) else "inactive")
elif words[0] in ("start", "stop", "restart"):
    if words[0] != "start":
        stop(words[1])
    if words[0] != "stop":
        start(words[1])
"""
# The log of a start.
JOURNALCTL = '#!/bin/sh\necho "Initializing a V1 LLM engine (v0.24.0) with config: enforce_eager=True"\n'
# For whom may become nobody else, and need not.
RUNUSER = '#!/bin/sh\nshift 3\nexec "$@"\n'


class Systemd:
    """Programs named as systemd's that come first in the path, and the processes that they start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bin = root / "bin"
        self._bin.mkdir(parents=True)
        programs = {"systemctl": SYSTEMCTL.format(python=sys.executable, root=str(root))}
        programs |= {"journalctl": JOURNALCTL, "runuser": RUNUSER}
        for name, text in programs.items():
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)
        self.path = f"{self._bin}:{os.environ['PATH']}"

    def write(self, node: str, unit: str, text: str) -> None:
        path = self.root / node / "system" / unit
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self, node: str, unit: str) -> str:
        return (self.root / node / "system" / unit).read_text()

    def start(self, node: str, unit: str) -> None:
        subprocess.run([self._bin / "systemctl", "start", unit], env={**os.environ, "NODE": node}, check=True)

    def digest(self, node: str, unit: str) -> str:
        """What the unit's process carries, or an empty text if there is none."""
        try:
            pid = (self.root / node / f"{unit}.pid").read_text()
            match = re.search(r"HY3_DIGEST=(\w*)", Path(f"/proc/{pid}/environ").read_text())
        except OSError:
            return ""
        return match[1] if match else ""

    def moved(self) -> list[str]:
        """What was started and stopped since this was asked last."""
        log = self.root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def end(self) -> None:
        """End each process that it started."""
        for path in self.root.glob("*/*.pid"):
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
