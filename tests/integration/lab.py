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


def module(node: str, name: str, arguments: str, *options: str, inventory: str = INVENTORY) -> str:
    """Output of one module on a node, as root."""
    return run("ansible", node, "-i", inventory, "-b", "-m", name, "-a", arguments, *options)


def on(node: str, script: str) -> str:
    """Output of a shell script on a node, as root."""
    return run("ssh", "-F", str(LAB / "ssh/config"), node, f"sudo -n bash -c {shlex.quote(script)}")


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
