# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role run for real: nodes that are this machine with a stand-in for systemctl, and one whose SSH says nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import typing as t
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
# systemd 252 in the parts that count, with a file for each unit that says its state; it keeps what it was asked.
SYSTEMCTL = """\
#!{python}
import sys
import time
from pathlib import Path
home = Path({home!r})
while (home / "hangs").exists():
    time.sleep(0.2)
asked = [word for word in sys.argv[1:] if not word.startswith("-")]
units = [word for word in asked if word.endswith(".service")]
with (home / "asked").open("a") as log:
    log.write(" ".join(asked) + "\\n")
def state(unit):
    file = home / unit
    return file.read_text().strip() if file.exists() else ""
if "show" in asked:
    blocks = []
    for unit in units:
        loaded = "loaded" if state(unit) else "not-found"
        block = ["Id=x", "Description=Hy3: x of cluster cluster", f"LoadState={{loaded}}", "MainPID=0"]
        block += ["Result=success", f"ActiveState={{state(unit) or 'inactive'}}", "SubState=running", "NRestarts=0"]
        block += ["ExecMainStatus=0", "UnitFileState=static", "InvocationID=", "InactiveExitTimestamp="]
        block += ["ActiveEnterTimestamp="]
        blocks.append("\\n".join(block))
    print("\\n\\n".join(blocks))
elif "stop" in asked:
    for unit in units:
        (home / unit).write_text("inactive")
elif "is-active" in asked:
    print(state(units[0]) or "inactive")
"""
UNITS = ("hy3-serve.service", "hy3-ray.service")


@pytest.fixture
def silent() -> Iterator[int]:
    """A port of an SSH server that takes connections and says nothing, at each address of this machine."""
    kept: list[socket.socket] = []

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                kept.append(server.accept()[0])

    with socket.create_server(("", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


class Cluster:
    """Two nodes, of which one or both are this machine; what the role printed and left, run by run."""

    def __init__(self, home: Path, *, port: int | None = None, **units: str) -> None:
        self.home = home
        (home / "bin").mkdir()
        for name, state in units.items():
            (home / f"hy3-{name}.service").write_text(state)
        program = home / "bin/systemctl"
        program.write_text(SYSTEMCTL.format(python=sys.executable, home=str(home)))
        program.chmod(0o755)
        local = {"ansible_connection": "local"}
        other = {"ansible_host": "127.0.0.2", "ansible_port": port} if port else local
        hosts = {
            "spark-1": {**local, "hy3_fabric_address": "127.0.0.1"},
            "spark-2": {**other, "hy3_fabric_address": "127.0.0.2"},
        }
        variables = {
            "ansible_python_interpreter": sys.executable,
            "ansible_timeout": 2,
            "hy3_profile": "libertai_nvfp4_tp2",
            "hy3_venv": str(home / "venv"),
            "hy3_reports_dir": str(home / "reports"),
            "hy3_recover_timeout": 3,
            # A share of this machine's memory that is there, whatever runs on it.
            "hy3_engine_args": {"gpu-memory-utilization": 0.01},
            "hy3_api_port": 9,
            "__hy3_recover_probe_seconds": 1,
            "__hy3_preflight_patience": 0,
            "recover_lease": str(home / "lease.json"),
        }
        (home / "cluster").mkdir()
        (home / "cluster/hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": hosts}}))
        (home / "variables.json").write_text(json.dumps(variables))

    def recover(self, *options: str) -> tuple[int, str]:
        """The exit status and what was printed, in one line."""
        command = [sys.executable, "-m", "ansible", "playbook", "tests/unit/roles/recover.yml"]
        command += ["-i", str(self.home / "cluster"), "-e", f"@{self.home / 'variables.json'}", *options]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "PATH": f"{self.home}/bin:{os.environ['PATH']}",
                "PYTHONPATH": "",
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_HOME": str(self.home / "ansible"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def report(self) -> dict[str, t.Any]:
        newest = max((self.home / "reports/cluster").glob("*-recover.json"), key=lambda path: path.stat().st_mtime_ns)
        return t.cast("dict[str, t.Any]", json.loads(newest.read_text()))

    def stopped(self) -> list[str]:
        """The units that were stopped, in order, each time it was asked."""
        asked = (self.home / "asked").read_text().splitlines() if (self.home / "asked").exists() else []
        return [line.split()[-1] for line in asked if line.startswith("stop ")]


def changes(output: str) -> set[str]:
    return set(re.findall(r"changed=(\d+)", output))


def test_a_wedged_node(tmp_path: Path, silent: int) -> None:
    """Its peer is stopped, it is waited for, and then a person is told; the second run changes nothing."""
    cluster = Cluster(tmp_path, port=silent, serve="active", ray="active")
    status, output = cluster.recover()
    assert status != 0
    assert cluster.stopped() == list(UNITS)
    assert "spark-2 wedged: its kernel takes connections to SSH" in output
    assert f"from the controller, 127.0.0.2:{silent} takes the connection and gives no banner" in output
    assert f"from spark-1, 127.0.0.2:{silent} takes the connection and gives no banner" in output
    assert "1. stop hy3-serve.service on spark-1" in output
    assert "3. wait up to 3 s for the SSH server of spark-2" in output
    assert "spark-2: SSH says silent, waited" in output
    assert "Power cycle spark-2: hold its power button until it is off" in output
    assert "waited for, up to 3 s after stopping hy3-serve.service on spark-1 and hy3-ray.service on spark-1" in output
    assert not (tmp_path / "lease.json").exists()
    report = cluster.report()
    recovery = report["recovery"]
    assert (report["play"], report["ok"]) == ("recover", False)
    assert report["failures"][0]["msg"].startswith("Power cycle spark-2")
    assert [recovery[when]["spark-2"]["state"] for when in ("before", "nodes")] == ["wedged", "wedged"]
    assert [recovery[when]["spark-1"]["state"] for when in ("before", "nodes")] == ["engine_silent", "stopped"]
    assert [(one["do"], one["node"], one["what"]) for one in recovery["done"]] == [
        ("stop", "spark-1", "hy3-serve.service"),
        ("stop", "spark-1", "hy3-ray.service"),
        ("wait", "spark-2", "ssh"),
    ]
    status, output = cluster.recover()
    assert status != 0
    assert cluster.stopped() == list(UNITS)
    assert changes(output) == {"0"}


def test_check_mode_prints_the_plan_and_does_nothing(tmp_path: Path, silent: int) -> None:
    cluster = Cluster(tmp_path, port=silent, serve="active", ray="active")
    status, output = cluster.recover("--check")
    assert status == 0
    assert cluster.stopped() == []
    assert changes(output) == {"0"}
    assert "Plan, which check mode does not carry out:" in output
    assert "1. stop hy3-serve.service on spark-1: spark-2 starves" in output
    assert "What is done now:" not in output
    assert not (tmp_path / "reports").exists()
    assert not (tmp_path / "lease.json").exists()


def test_a_stopped_cluster_needs_serve_only(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, serve="inactive", ray="inactive")
    status, output = cluster.recover()
    assert status == 0, output
    assert "spark-1 stopped: " in output
    assert "Run serve-hy3: nothing is in its way" in output
    assert changes(output) == {"0"}
    assert cluster.stopped() == []
    assert not cluster.report()["recovery"]["person"]


def test_a_node_that_hangs_while_it_is_looked_at(tmp_path: Path) -> None:
    """Logged in to, and then nothing: each task ends at its own deadline."""
    cluster = Cluster(tmp_path, serve="active", ray="active")
    (tmp_path / "hangs").touch()
    try:
        status, output = cluster.recover("--check", "-e", "__hy3_recover_look_seconds=8")
    finally:
        (tmp_path / "hangs").unlink()
    assert status == 0
    assert "spark-1 wedged: a login works, and a look at its units does not end in time" in output


def test_a_play_that_works_on_the_cluster_is_not_disturbed(tmp_path: Path, silent: int) -> None:
    cluster = Cluster(tmp_path, port=silent, serve="active", ray="active")
    lease = {"holder": "desk:1:1", "who": "ann@desk, process 1", "since": 1000, "until": 2**33}
    (tmp_path / "lease.json").write_text(json.dumps(lease))
    status, output = cluster.recover()
    assert status != 0
    assert "ann@desk, process 1 has worked on this cluster since" in output
    assert cluster.stopped() == []
    assert json.loads((tmp_path / "lease.json").read_text()) == lease


@pytest.mark.parametrize("name", ["recover_hy3", "recover-hy3"])
def test_both_names_exist(name: str) -> None:
    assert (ROOT / f"playbooks/{name}.yml").is_file()


def test_the_playbook_has_what_is_tested_here() -> None:
    [_check, play] = yaml.safe_load((ROOT / "playbooks/recover_hy3.yml").read_text())
    [tested] = yaml.safe_load((ROOT / "tests/unit/roles/recover.yml").read_text())
    [block], [tested_block] = play["tasks"], tested["tasks"]
    inventory = block["block"].pop(0)
    assert inventory["ansible.builtin.import_role"]["tasks_from"] == "inventory"
    assert block == tested_block
    for name in ("hosts", "gather_facts", "any_errors_fatal", "vars"):
        assert play[name] == tested[name]
