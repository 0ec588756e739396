# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The doctor's playbook, run for real on nodes that are this machine, one that cannot be reached, and no plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


def visit(home: Path, hosts: dict[str, dict[str, t.Any]], **variables: t.Any) -> tuple[str, dict[str, t.Any]]:
    """Run doctor-hy3.yml on ``hosts``; return what it prints and its report."""
    inventory = home / "cluster/hosts.yml"
    inventory.parent.mkdir(parents=True)
    common = {
        "ansible_python_interpreter": sys.executable,
        "ansible_become": False,
        "ansible_ssh_common_args": "-o ConnectTimeout=2 -o BatchMode=yes",
        "hy3_venv": str(home / "venv"),
        "hy3_reports_dir": str(home / "reports"),
        "hy3_firewall": False,
    }
    inventory.write_text(yaml.safe_dump({"sparks": {"hosts": hosts, "vars": {**common, **variables}}}))
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "playbooks/doctor-hy3.yml", "-i", str(inventory)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": "",
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_HOME": str(home / "ansible"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = (home / "reports/cluster").glob("*-doctor.json")
    return done.stdout, json.loads(report.read_text())


def rules_of(report: dict[str, t.Any], host: str) -> set[str]:
    return {fault["rule"] for fault in report["faults"] if fault["host"] == host and fault["severity"] == "error"}


def test_every_fault_of_every_node(tmp_path: Path) -> None:
    """One of three nodes is not reached, three are more than the profile has; the rest is looked at all the same."""
    hosts = {
        "spark-1": {"ansible_connection": "local", "hy3_fabric_address": "192.0.2.101"},
        "spark-2": {"ansible_host": "127.0.0.1", "ansible_port": 9, "hy3_fabric_address": "192.0.2.102"},
        "spark-3": {"ansible_connection": "local", "hy3_fabric_address": "192.0.2.103"},
    }
    printed, report = visit(
        tmp_path,
        hosts,
        hy3_profile="libertai_nvfp4_tp2",
        hy3_memory={"head": {"ray": "999999G"}, "worker": {"ray": "999999G"}},
    )
    assert (report["ok"], report["play"]) == (False, "doctor")
    refused = [fault["sentence"] for fault in report["faults"] if fault["rule"] == "inventory"]
    assert len(refused) == 1
    assert "The inventory has 3 node(s)" in refused[0]
    # More is found where an engine runs on this machine.
    assert rules_of(report, "spark-1") >= {"memory", "roce"}
    assert rules_of(report, "spark-2") == {"reach"}
    assert rules_of(report, "spark-3") >= {"memory", "roce"}
    assert report["nodes"]["spark-3"]["node"]["kernel"] == os.uname().release
    words = " ".join(printed.split())
    assert "spark-2 [reach] It cannot be reached over SSH" in words
    assert "spark-1 [inventory] The inventory has 3 node(s)" in words


@pytest.mark.parametrize("name", ["doctor_hy3", "doctor-hy3"])
def test_both_names_exist(name: str) -> None:
    assert (ROOT / f"playbooks/{name}.yml").is_file()
