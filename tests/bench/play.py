# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The play on a healthy lab, which it starts, against the least that Ansible does there."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ansible_collections.sparks.hy3.tests.bench.figures import median_seconds, show


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])


def bench() -> None:
    inventory = ("-i", "inventories/lab")
    command = ("ansible-playbook", "playbooks/serve-hy3.yml", *inventory)
    run("ansible-playbook", "playbooks/lab_up.yml", *inventory)
    play = median_seconds(lambda: run(*command))
    preflight = median_seconds(lambda: run(*command, "--tags", "preflight"))
    ping = median_seconds(lambda: run("ansible", "sparks", *inventory, "-m", "ansible.builtin.ping"))
    show("serve-hy3 on a healthy cluster", play, "s", "aim 45")
    show("preflight of a healthy cluster, with lease and report", preflight, "s", "aim 8")
    show("serve-hy3 on a healthy cluster / ansible -m ping", play / ping, "ratio", "-")
