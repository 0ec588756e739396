# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.filter.other_cluster import other_cluster

# Description, state (enabled too, or not): whether the inventory of cluster `west` leaves it alone.
UNITS: dict[str, tuple[str, str, bool]] = {
    "its own": ("Hy3: vLLM with profile tiny_lab of cluster west", "active", False),
    "another's": ("Hy3: vLLM with profile tiny_lab of cluster east", "active", True),
    "another's that starts": ("Hy3: Ray head of cluster east", "activating", True),
    "another's firewall": ("Hy3: who may reach the ports of cluster east", "active", True),
    "a name that begins like its own": ("Hy3: Ray head of cluster west-2", "active", True),
    "another's that was stopped": ("Hy3: Ray head of cluster east", "inactive", False),
    "another's that failed": ("Hy3: Ray head of cluster east", "failed", False),
    "another's that failed and would start with the node": ("Hy3: Ray head of cluster east", "failed enabled", True),
    "another's that would start with the node": ("Hy3: Ray head of cluster east", "inactive enabled", True),
    "its own that would": ("Hy3: Ray head of cluster west", "inactive enabled", False),
    "names no cluster": ("hy3-serve.service", "active", False),
}


@pytest.mark.parametrize(("description", "state", "expected"), UNITS.values(), ids=UNITS)
def test_left_alone(description: str, state: str, expected: bool) -> None:
    active, _space, enabled = state.partition(" ")
    units = {"hy3-serve.service": {"description": description, "active_state": active, "enabled": bool(enabled)}}
    assert len(other_cluster(units, "west")) == expected


def test_one_sentence() -> None:
    unit = {"description": "Hy3: Ray head of cluster east", "active_state": "active", "enabled": True}
    assert other_cluster({"hy3-ray.service": unit | {"active_state": "failed"}}, "west")[0].startswith(
        "hy3-ray.service would start with the node as 'Hy3: Ray head' of cluster 'east', and this inventory is that of "
    )
    assert other_cluster({"hy3-ray.service": unit}, "west") == [
        "hy3-ray.service runs here as 'Hy3: Ray head' of cluster 'east', and this inventory is that of 'west', so it "
        "is left alone; run stop_hy3 with the inventory of 'east', or with `-e hy3_cluster=east` if it is the same "
        "cluster under another name."
    ]
