# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.filter.other_cluster import other_cluster

# Description, state (enabled too, or not): whether the inventory of cluster `west` does not stop it, and whether it
# does not remove it.
UNITS: dict[str, tuple[str, str, bool, bool]] = {
    "its own": ("Hy3: vLLM with profile tiny_lab of cluster west", "active", False, False),
    "another's": ("Hy3: vLLM with profile tiny_lab of cluster east", "active", True, True),
    "another's that starts": ("Hy3: Ray head of cluster east", "activating", True, True),
    "another's firewall": ("Hy3: who may reach the ports of cluster east", "active", True, True),
    "a name that begins like its own": ("Hy3: Ray head of cluster west-2", "active", True, True),
    "its own that was stopped": ("Hy3: Ray head of cluster west", "inactive", False, False),
    "its own that would start": ("Hy3: Ray head of cluster west", "inactive enabled", False, False),
    "another's that was stopped": ("Hy3: Ray head of cluster east", "inactive", False, True),
    "another's that failed": ("Hy3: Ray head of cluster east", "failed", False, True),
    "another's that failed and would start": ("Hy3: Ray head of cluster east", "failed enabled", True, True),
    "another's that would start with the node": ("Hy3: Ray head of cluster east", "inactive enabled", True, True),
    "names no cluster": ("hy3-serve.service", "active", False, False),
    "is not there": ("hy3-serve.service", "inactive", False, False),
}


@pytest.mark.parametrize(("description", "state", "runs", "installed"), UNITS.values(), ids=UNITS)
def test_left_alone(description: str, state: str, runs: bool, installed: bool) -> None:
    active, _space, enabled = state.partition(" ")
    units = {"hy3-serve.service": {"description": description, "active_state": active, "enabled": bool(enabled)}}
    assert len(other_cluster(units, "west")) == runs
    assert len(other_cluster(units, "west", installed=True)) == installed


# What the units of a node are here for and do: whether cluster `west` may remove them.
MIXED: dict[str, tuple[dict[str, tuple[str, str]], bool]] = {
    "only another's, stopped": ({"hy3-ray": ("east", "inactive"), "hy3-serve": ("east", "inactive")}, False),
    "taken over without Ray": ({"hy3-ray": ("east", "inactive"), "hy3-serve": ("west", "active")}, True),
    "taken over and stopped": ({"hy3-ray": ("east", "inactive"), "hy3-serve": ("west", "inactive")}, True),
    "taken over by another": ({"hy3-ray": ("west", "inactive"), "hy3-serve": ("east", "active")}, False),
}


@pytest.mark.parametrize(("units", "may"), MIXED.values(), ids=MIXED)
def test_a_node_is_one_clusters(units: dict[str, tuple[str, str]], may: bool) -> None:
    shown = {
        f"{name}.service": {
            "description": f"Hy3: a unit of cluster {cluster}",
            "active_state": state,
            "enabled": True,
        }
        for name, (cluster, state) in units.items()
    }
    assert (other_cluster(shown, "west", installed=True) == []) is may


EAST = {"hy3-ray.service": {"description": "Hy3: Ray head of cluster east", "active_state": "active", "enabled": True}}


def test_one_that_rests() -> None:
    rests = {"hy3-ray.service": EAST["hy3-ray.service"] | {"active_state": "failed"}}
    assert other_cluster(rests, "west")[0].startswith(
        "hy3-ray.service would start with the node as 'Hy3: Ray head' of cluster 'east', and this inventory is that of "
    )


def test_one_sentence() -> None:
    assert other_cluster(EAST, "west") == [
        "hy3-ray.service runs here as 'Hy3: Ray head' of cluster 'east', and this inventory is that of 'west', so it "
        "is left alone; run stop_hy3 with the inventory of 'east', or with `-e hy3_cluster=east` if it is the same "
        "cluster under another name."
    ]


def test_one_sentence_where_it_would_be_removed() -> None:
    assert other_cluster(EAST, "west", installed=True) == [
        "hy3-ray.service is installed here as 'Hy3: Ray head' of cluster 'east', and this inventory is that of 'west', "
        "so the node is left alone; run remove_hy3 with the inventory of 'east', or with `-e hy3_cluster=east` if it "
        "is the same cluster under another name."
    ]
