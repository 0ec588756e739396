# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lease between real plays of this controller."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.action.cluster_lease import exists, has_ended, identity, machine

ROOT = Path(__file__).parents[4]
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - sparks.hy3.cluster_lease: {path: "{{ lease }}"}
    - ansible.builtin.wait_for: {path: "{{ lease }}.go", timeout: 60}
    - sparks.hy3.cluster_lease: {path: "{{ lease }}"}
    - sparks.hy3.cluster_lease: {path: "{{ lease }}", state: free}
"""


def start(directory: Path) -> subprocess.Popen[str]:
    playbook, lease = directory / "play.yml", directory / "lease.json"
    playbook.write_text(PLAY)
    variables = f"lease={lease} ansible_python_interpreter={sys.executable}"
    command = ["ansible-playbook", str(playbook), "-i", "localhost,", "-c", "local", "-e", variables]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.1)


def test_second_play_refuses_and_first_goes_on(tmp_path: Path) -> None:
    first = start(tmp_path)
    wait_for(tmp_path / "lease.json")
    second, _none = start(tmp_path).communicate(timeout=60)
    assert f"process {first.pid} has worked on this cluster since" in second
    (tmp_path / "lease.json.go").touch()
    output, _none = first.communicate(timeout=60)
    assert first.returncode == 0, output
    assert "changed=0" in output
    assert not (tmp_path / "lease.json").exists()


def test_a_killed_play_is_taken_over_at_once_and_said(tmp_path: Path) -> None:
    first = start(tmp_path)
    wait_for(tmp_path / "lease.json")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    (tmp_path / "lease.json.go").touch()
    second = start(tmp_path)
    output, _none = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert f"process {first.pid}, which ended without giving it back" in output


def test_an_expired_lease_is_taken_over_and_nothing_is_claimed(tmp_path: Path) -> None:
    expired = {"holder": "desk:1:1", "who": "ann@desk, process 1", "since": 1000, "until": 2000}
    (tmp_path / "lease.json").write_text(json.dumps(expired))
    (tmp_path / "lease.json.go").touch()
    play = start(tmp_path)
    output, _none = play.communicate(timeout=60)
    assert play.returncode == 0, output
    assert output.count("Took the cluster over from ann@desk, process 1, which has worked on it since 1970") == 1
    assert "ended without" not in output


def test_a_living_lease_of_a_machine_with_this_name_is_not_taken_over(tmp_path: Path) -> None:
    """As older releases wrote it, and as another machine would: this one has no such process, and may not know."""
    for place in (socket.gethostname(), f"{socket.gethostname()}/another-boot/pid:[4026531836]"):
        living = {"holder": f"{place}:999999999:5", "who": "ann@desk, process 1", "since": 1000, "until": 2**33}
        (tmp_path / "lease.json").write_text(json.dumps(living))
        play = start(tmp_path)
        output, _none = play.communicate(timeout=60)
        assert play.returncode != 0
        assert "ann@desk, process 1 has worked on this cluster since 1970" in output
        assert json.loads((tmp_path / "lease.json").read_text()) == living


HERE = "here/boot/pid:[1]"
# Holder, place of this controller: whether it has certainly ended.
ENDED: dict[str, tuple[str, str, bool]] = {
    "this play": (identity(HERE, os.getpid()), HERE, False),
    "its pid was used again": (f"{HERE}:{os.getpid()}:1", HERE, True),
    "no such process": (f"{HERE}:999999999:5", HERE, True),
    "another controller": ("elsewhere/boot/pid:[1]:999999999:5", HERE, False),
    "another of this name": ("here/other/pid:[1]:999999999:5", HERE, False),
    "another container": ("here/boot/pid:[2]:999999999:5", HERE, False),
    "of an older release": ("here:999999999:5", HERE, False),
    "broken": ("here", HERE, False),
    "no number": (f"{HERE}:x:5", HERE, False),
}


@pytest.mark.parametrize(("holder", "place", "expected"), ENDED.values(), ids=ENDED)
def test_has_ended(holder: str, place: str, expected: bool) -> None:
    assert has_ended(holder, place) == expected


def test_machine(tmp_path: Path) -> None:
    assert machine() == machine()
    assert "/pid:[" in machine()
    assert machine(str(tmp_path)) == ""


def test_a_process_exists() -> None:
    assert exists(os.getpid())
    assert not exists(999999999)
