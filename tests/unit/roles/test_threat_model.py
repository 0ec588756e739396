# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/threat_model.md names every port of the roles and every route that the guard leaves open, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._api_guard import OPEN

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/threat_model.md").read_text()
# Not ours, and the default of a variable.
OTHERS = {22, yaml.safe_load((ROOT / "roles/profile/defaults/main.yml").read_text())["hy3_api_port"]}


def first_cells(heading: str) -> list[str]:
    """What stands first in each row of the first table below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


def ports(cells: list[str]) -> set[int]:
    found: set[int] = set()
    for cell in cells:
        for first, last in re.findall(r"\b(\d+)(?:-(\d+))?", cell):
            found |= set(range(int(first), int(last or first) + 1))
    return found


def test_the_ports_are_those_of_the_roles() -> None:
    plan = yaml.safe_load((ROOT / "roles/profile/vars/main.yml").read_text())["__hy3_profile_derived"]
    ray = dict(plan["ray_ports"])
    ours = set(range(ray.pop("min-worker-port"), ray.pop("max-worker-port") + 1))
    ours |= {*ray.values(), *plan["ray_head_ports"].values(), plan["ray_port"], plan["rank_port"], plan["tie_port"]}
    ours.add(yaml.safe_load((ROOT / "roles/checkpoint/vars/main.yml").read_text())["__hy3_checkpoint_port"])
    assert ports(first_cells("Ports")) == ours | OTHERS


def test_the_open_routes_are_those_of_the_guard() -> None:
    paths = set(re.findall(r"`(/\w+)`", " ".join(first_cells("Routes without a key"))))
    assert paths == set(OPEN)


def test_profiles_that_run_a_checkpoints_code_are_named() -> None:
    section = PAGE.partition("\n## What a checkpoint can do\n")[2].partition("\n## ")[0]
    trusting = {
        path.stem
        for path in (ROOT / "roles/profile/files/profiles").glob("*.yml")
        if yaml.safe_load(path.read_text())["engine_args"].get("trust-remote-code")
    }
    assert trusting
    assert {name for name in re.findall(r"`(\w+_tp\d)`", section)} == trusting
