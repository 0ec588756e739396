# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A lab of any size that died anywhere goes down without a trace, and comes up again.

Runs first: it ends what others start.
"""

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


FOUR = "inventories/lab4"
FETCH_BYTES = 10_000_000


def boots() -> dict[str, str]:
    """When each running node started."""
    names = sorted(path.name.removeprefix("hy3lab-") for path in Path("/sys/fs/cgroup/").glob("**/hy3lab-spark-*"))
    return {name: on(name, "ps -o lstart= -p 1") for name in names}


def megabits(sender: str, receiver: str) -> float:
    """The rate of a short transfer over the fabric, in Mbit/s."""
    address = f"198.18.20.{sender[-1]}"
    on(sender, f"head -c {FETCH_BYTES} /dev/zero >/srv/zeros")
    on(sender, f"systemd-run -q --unit=zeros python3 -m http.server 8099 --bind {address} --directory /srv")
    fetch = "curl -s --retry 9 --retry-connrefused --retry-delay 1 -o /dev/null -w '%{speed_download}'"
    rate = float(on(receiver, f"{fetch} http://{address}:8099/zeros")) * 8 / 1e6
    on(sender, "systemctl stop zeros; rm /srv/zeros")
    return rate


def test_two_more_nodes_start_beside_two() -> None:
    before = boots()
    assert set(before) == set(NODES)
    play("lab_up", inventory=FOUR)
    after = boots()
    assert set(after) == {*NODES, "spark-3", "spark-4"}
    assert {node: after[node] for node in NODES} == before
    play("lab_up")
    assert boots() == after, "none is stopped, and each can be logged in to"


def test_links_are_capped_and_freed() -> None:
    before = boots()
    for changed in (4, 0):
        output = play("lab_up", "-e", "hy3_lab_link_rate=80mbit", inventory=FOUR)
        assert f" changed={changed} " in output
    play("lab_up")
    assert megabits("spark-1", "spark-2") > 200
    assert 40 < megabits("spark-1", "spark-4") < 90, "what a capped node receives"
    assert 40 < megabits("spark-4", "spark-1") < 90, "what it sends"
    play("lab_up", inventory=FOUR)
    assert megabits("spark-1", "spark-4") > 200
    assert boots() == before


def test_any_inventory_ends_all_nodes() -> None:
    play("lab_down")
    assert traces() == []
    play("lab_up")
