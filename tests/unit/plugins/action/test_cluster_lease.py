# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lease between real plays of this controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.action.cluster_lease import has_ended, identity

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


def test_has_ended() -> None:
    mine = identity("here", os.getpid())
    assert not has_ended(mine, "here")
    assert has_ended(f"here:{os.getpid()}:1", "here"), "the pid was used again"
    assert has_ended("here:999999999:5", "here")
    assert not has_ended("elsewhere:999999999:5", "here"), "another controller's play cannot be looked at"
