# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A lab that died anywhere goes down without a trace, and comes up again. Runs first: it ends what others start."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import LAB, NODES, command_of, kill, on, play, run


def traces() -> list[str]:
    """Processes, mounts, links and files that a lab leaves on this machine while it runs."""
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob("**/hy3lab-*")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "hy3lab" in line or str(LAB) in line]
    links = [path.name for path in Path("/sys/class/net").glob("*hy3lab*")]
    commands = run("ps", "-eo", "pid,args").splitlines()
    processes = [line for line in commands if "systemd-nspawn" in line or "hy3lab" in line]
    return groups + mounts + links + processes + [str(path) for path in (LAB / "nodes").glob("*")]


def test_down_twice() -> None:
    play("lab_down")
    assert traces() == []
    play("lab_down")
    assert traces() == []


@pytest.mark.parametrize("task", [r"Disk \| Users", r"Disk \| Checkpoint", r"Node \| Boot", r"Node \| Plug it"])
def test_killed_while_it_comes_up(task: str) -> None:
    play("lab_down")
    kill(command_of("lab_up"), at=rf"^TASK \[sparks\.hy3\.lab : {task}")
    play("lab_down")
    assert traces() == []


def test_half_made_lab_is_completed() -> None:
    play("lab_down")
    kill(command_of("lab_up"), at=r"^TASK \[sparks\.hy3\.lab : Disk \| Services")
    play("lab_up")
    for node in NODES:
        assert on(node, "hostname; systemctl is-system-running --wait").split() == [node, "running"]
    play("lab_down")
    assert traces() == []
    play("lab_up")
    assert traces() != []
