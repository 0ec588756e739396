# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the playbooks of this directory with the real Ansible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

ROOT = Path(__file__).parents[3]


def playbook_command(
    name: str, home: Path, variables: t.Mapping[str, t.Any], *options: str, inventory: str = "sparks"
) -> dict[str, t.Any]:
    """What :mod:`subprocess` is given to run ``tests/unit/roles/NAME.yml``, for whom :func:`run_playbook` waits."""
    file = home / "variables.json"
    file.write_text(json.dumps(variables))
    playbook = f"tests/unit/roles/{name}.yml"
    return {
        "args": [
            *(
                sys.executable,
                "-m",
                "ansible",
                "playbook",
                playbook,
                "-i",
                f"inventories/{inventory}",
                "-e",
                f"@{file}",
            ),
            *options,
        ],
        "cwd": ROOT,
        "env": {
            **os.environ,
            "PYTHONPATH": "",  # where ansible-test has an Ansible without commands
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_HOME": str(home / "ansible"),
        },
    }


def run_playbook(
    name: str, home: Path, variables: t.Mapping[str, t.Any], *options: str, inventory: str = "sparks"
) -> subprocess.CompletedProcess[str]:
    """Run ``tests/unit/roles/NAME.yml`` on an inventory of ours; files of Ansible's own go to ``home``."""
    command = playbook_command(name, home, variables, *options, inventory=inventory)
    return subprocess.run(**command, capture_output=True, text=True, check=False)


def render_units(
    root: Path,
    nodes: t.Mapping[str, t.Any],
    *,
    inventory: str = "sparks",
    more: t.Mapping[str, t.Any] | None = None,
    **variables: t.Any,
) -> subprocess.CompletedProcess[str]:
    """Write the units of each node to ``root/NODE``; ``nodes`` has the fact ``hy3_node`` of each, ``more`` others."""
    facts = {
        "hy3_node": nodes,
        "hy3_checkpoint": {"digest": "0" * 64},
        "hy3_engine": {"torch": "2.11.0"},  # part of the digest and of nothing else
        "hy3_patches": {"digest": "1" * 64},
        **(more or {}),
    }
    return run_playbook(
        "render", root, {"render_dir": str(root), "render_facts": facts, **variables}, inventory=inventory
    )
