# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab as the integration tests use it: plays, plays that are killed, and commands on its nodes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

from ansible_collections.sparks.hy3.roles.lab.files.lab_node import members

ROOT = Path(__file__).parents[2]
LAB = Path("/var/lib/hy3-lab")
INVENTORY = "inventories/lab"
NODES = ("spark-1", "spark-2")


def run(*command: str) -> str:
    """Output of a command in the checkout, which must succeed."""
    # ssh would make an inherited stdin non-blocking, with which Ansible does not start.
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


def command_of(playbook: str, *options: str, inventory: str = INVENTORY) -> list[str]:
    return ["ansible-playbook", f"playbooks/{playbook}.yml", "-i", inventory, *options]


def play(playbook: str, *options: str, inventory: str = INVENTORY) -> str:
    """Output of a playbook, which must succeed."""
    return run(*command_of(playbook, *options, inventory=inventory))


def changed_nothing(output: str) -> bool:
    """Whether the recap of a play says ``changed=0`` for every host."""
    return set(re.findall(r"changed=(\d+)", output)) == {"0"}


def attempt(playbook: str, *options: str, inventory: str = INVENTORY) -> subprocess.CompletedProcess[str]:
    """A playbook that may fail."""
    command = command_of(playbook, *options, inventory=inventory)
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def module(node: str, name: str, arguments: str, *options: str, inventory: str = INVENTORY) -> str:
    """Output of one module on a node, as root."""
    return run("ansible", node, "-i", inventory, "-b", "-m", name, "-a", arguments, *options)


def on(node: str, script: str) -> str:
    """Output of a shell script on a node, as root."""
    return run("ssh", "-F", str(LAB / "ssh/config"), node, f"sudo -n bash -c {shlex.quote(script)}")


def reached(node: str, script: str, seconds: float) -> str | None:
    """Output of a shell script on a node, as root, or None where that fails or takes longer.

    Over a connection of its own: one that is kept open waits for a node that is gone.
    """
    alone = ["-o", "ControlPath=none", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={int(seconds)}"]
    command = ["ssh", "-F", str(LAB / "ssh/config"), *alone, node, f"sudo -n bash -c {shlex.quote(script)}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def plug(node: str, *, into: bool) -> None:
    """Plug a node's fabric cable in, or out."""
    run("ip", "link", "set", f"hy3lab-{node[-1]}", "up" if into else "down")


def cut_power(node: str) -> None:
    """End a node as if its power failed. `lab_up` boots it."""
    run("python3", str(LAB / "files/lab_node.py"), "stop", node)


def switch_off(node: str, seconds: float = 40.0) -> None:
    """Shut a node down in order; after so long its power is cut. `lab_up` boots it."""
    reached(node, "systemctl poweroff", 10.0)
    deadline = time.monotonic() + seconds
    while members(node) and time.monotonic() < deadline:
        time.sleep(0.2)
    cut_power(node)


def freeze(node: str) -> None:
    """Stop every process of a node. Its kernel goes on: it answers ping and completes handshakes, and no more."""
    stopped: set[int] = set()
    # Until none is left that was forked meanwhile.
    while rest := members(node) - stopped:
        _signal(rest, signal.SIGSTOP)
        stopped |= rest


def thaw(node: str) -> None:
    """Let a node's processes go on."""
    _signal(members(node), signal.SIGCONT)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def power_off(node: str) -> None:
    """Cut a node's power: everything on it is killed, and its peers hear nothing. Its disk stays."""
    run("/usr/bin/python3", str(LAB / "files/lab_node.py"), "stop", node)
    # Connections that lost their peer keep a dead node's network alive for minutes, and with it the names of its links.
    for link in (f"hy3lab-{node[-1]}", f"vb-hy3lab-{node}"):
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)


def power_on() -> None:
    """Start the nodes that do not run."""
    play("lab_up")


def kill(command: list[str], *, at: str | float) -> None:
    """Run a command and kill its whole session when a line of output matches ``at``, or after ``at`` seconds."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    if isinstance(at, float):
        time.sleep(at)
    else:
        assert any(re.search(at, line) for line in process.stdout), f"it ended without a line like {at!r}"
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
