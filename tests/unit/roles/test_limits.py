# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role systemd_unit says about limits that the kernel does not have as asked: the real task, on made-up units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT

CAP = 104 * 1024**3
UNIT = {"memory_max": CAP, "memory_limit": CAP, "memory_delegated": True, "swap_limit": 0, "memlock": None}
CASES: dict[str, dict[str, t.Any]] = {
    "as asked": {},
    "not delegated": {"memory_limit": None, "memory_delegated": False, "swap_limit": None},
    "a slice's limit instead": {"memory_limit": 5, "memory_delegated": False},
    "smaller": {"memory_limit": CAP - 4096},
    "may be swapped": {"swap_limit": None},
    "8 MiB": {"memlock": 8388608},
}
ASKED = f"hy3-ray.service asks for MemoryMax {CAP} bytes and no swap, and the kernel enforces a limit of "
NOT_DELEGATED = " (its control group has no memory controller: it is not delegated)"
ERRORS = {
    "as asked": [],
    "not delegated": [f"{ASKED}none{NOT_DELEGATED} and swap of any size"],
    "a slice's limit instead": [f"{ASKED}5{NOT_DELEGATED} and swap of 0 bytes"],
    "smaller": [f"{ASKED}{CAP - 4096} and swap of 0 bytes"],
    "may be swapped": [f"{ASKED}{CAP} and swap of any size"],
    "8 MiB": ["hy3-ray.service asks for unlimited locked memory and its process got 8388608 bytes"],
}


def judge(home: Path, allow: list[str]) -> dict[str, list[str]]:
    """The sentences of each case, from the last task of the role's entry point ``run``."""
    task = yaml.safe_load((ROOT / "roles/systemd_unit/tasks/run.yml").read_text())[-1]["block"][-1]
    keep = {"ansible.builtin.copy": {"content": "{{ seen.results | to_json }}", "dest": f"{home}/{{{{ case.key }}}}"}}
    (home / "case.yml").write_text(yaml.safe_dump([task | {"register": "seen", "ignore_errors": True}, keep]))
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "vars": {
            "hy3_allow": allow,
            "cases": CASES,
            "unit": UNIT,
            "__hy3_systemd_unit": {"name": "hy3-ray"},
            "__hy3_systemd_unit_now": "{{ unit | combine(case.value) }}",
            "ansible_python_interpreter": sys.executable,
        },
        "tasks": [
            {
                "ansible.builtin.include_tasks": "case.yml",
                "loop": "{{ cases | dict2items }}",
                "loop_control": {"loop_var": "case"},
            }
        ],
    }
    (home / "play.yml").write_text(yaml.safe_dump([play]))
    command = [sys.executable, "-m", "ansible", "playbook", str(home / "play.yml"), "-i", "localhost,", "-c", "local"]
    environment = {**os.environ, "PYTHONPATH": "", "ANSIBLE_HOME": str(home / "ansible")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    results = {name: json.loads((home / name).read_text()) for name in CASES}
    return {name: [part["msg"] for part in parts if part.get("failed")] for name, parts in results.items()}


@pytest.mark.parametrize(("inventory", "allowed"), [("sparks", False), ("lab", True)])
def test_a_limit_that_is_not_enforced_is_an_error_but_in_the_lab(tmp_path: Path, inventory: str, allowed: bool) -> None:
    variables = yaml.safe_load((ROOT / "inventories" / inventory / "group_vars/sparks.yml").read_text())
    said = judge(tmp_path, variables.get("hy3_allow", []))
    for name, beginnings in ERRORS.items():
        assert len(said[name]) == (0 if allowed else len(beginnings))
        for message, beginning in zip(said[name], beginnings, strict=not allowed):
            assert message.startswith(f"localhost: {beginning}")
