# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The action run by ansible itself, on asynchronous tasks of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FACTS = {"files": 3, "files_total": 7, "bytes": 2**30, "bytes_total": 2**32, "rate": 10**8, "eta_s": 32}
LINE = "localhost: 3 of 7 files, 1.00 of 4.00 GiB, 0.1 GB/s, 32s left"


class Runner:
    """Runs a task as a job, something beside it, and then the action."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.progress = directory / "progress.json"

    def __call__(
        self, script: str, *beside: str, job: str = "{{ begun.ansible_job_id }}"
    ) -> tuple[str, dict[str, t.Any]]:
        """Output of the run, and what the action returned."""
        result = self.directory / "result.json"
        wait = {"job": job, "progress": str(self.progress), "interval": 0.1}
        tasks: list[dict[str, t.Any]] = [
            {"ansible.builtin.shell": script, "async": 60, "poll": 0, "register": "begun"},
            *({"ansible.builtin.shell": command} for command in beside),
            {"sparks.hy3.transfer_wait": wait, "register": "ended", "ignore_errors": True},
            {"ansible.builtin.copy": {"content": "{{ ended | to_json }}", "dest": str(result)}},
        ]
        play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}]
        (self.directory / "play.yml").write_text(json.dumps(play))
        environment = {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")} | os.environ  # ansible-test has its own
        environment |= {
            "PYTHONPATH": "",  # where ansible-test has an Ansible without commands
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_HOME": str(self.directory / "home"),
            "ANSIBLE_ASYNC_DIR": str(self.directory / "jobs"),
            "ANSIBLE_NOCOLOR": "true",
        }
        done = subprocess.run(  # noqa: S603 - the command is ours
            [sys.executable, "-m", "ansible", "playbook", "play.yml"],
            env=environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.exists(), done.stdout + done.stderr
        return done.stdout, json.loads(result.read_text())

    def jobs(self) -> list[str]:
        return [path.name for path in (self.directory / "jobs").iterdir() if path.is_file()]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_shows_how_far_it_is_and_returns_what_it_gave(runner: Runner) -> None:
    facts = json.dumps(FACTS)
    shown, result = runner(f"echo '{facts}' > {runner.progress}; sleep 3; echo all there")
    assert shown.count(LINE) == 1, "the same line is not said twice"
    assert (result["changed"], result["failed"], result["rc"]) == (True, False, 0)
    assert runner.jobs() == [], "the job's record is gone"


def test_fails_as_the_job_did(runner: Runner) -> None:
    _shown, result = runner("sleep 1; exit 7")
    assert (result["failed"], result["rc"], result["msg"]) == (True, 7, "non-zero return code")


# Its module, of which Ansible's wrapper has then only a traceback; and all, the wrapper too, as when the node restarts.
@pytest.mark.parametrize("generations", [1, 9])
def test_killed_on_the_way(runner: Runner, generations: int) -> None:
    parents = f"for one in $(seq {generations}); do p=$(ps -o ppid= -p $p); [ $p -gt 1 ] || break; echo $p; done"
    kill = f"sleep 1; p=$(cat {runner.directory}/pid); kill -9 $({parents}) $p"
    _shown, result = runner(f"echo $$ > {runner.directory}/pid; sleep 20", kill)
    assert result["failed"]
    assert result["msg"] == (
        "The transfer ended without a result: its process was killed, or the node was restarted; "
        "run again, and only the rest is transferred."
    )


def test_a_job_that_is_unknown(runner: Runner) -> None:
    _shown, result = runner("true", job="j1.2")
    assert (result["failed"], result["msg"]) == (True, "could not find job")
