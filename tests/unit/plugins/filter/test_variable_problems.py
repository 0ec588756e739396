# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.filter.variable_problems import variable_problems

PROFILE = str(Path(__file__).parents[4] / "roles/profile")
GIVEN: dict[str, object] = {"hy3_profile": "tiny_lab", "hy3_fabric_address": "192.168.100.1"}

FINE: dict[str, dict[str, object]] = {
    "only what is required": {},
    "a number from the command line": {"hy3_api_port": "8000"},
    "a user by number": {"hy3_user": 1000},
    "a truth": {"hy3_firewall": False},
    "a truth from the command line": {"hy3_firewall": "false"},
    "rules": {"hy3_allow": ["memlock-limited"]},
    "facts of an earlier play": dict.fromkeys(["hy3_plan", "hy3_node", "hy3_checkpoint", "hy3_report"], {}),
    "variables of another role": {"hy3_lab_dir": "/srv", "hy3_lab_gid_index": 3},
}


@pytest.mark.parametrize("more", FINE.values(), ids=FINE)
def test_fine(more: dict[str, object]) -> None:
    assert variable_problems(GIVEN | more, PROFILE) == []


PROBLEMS: dict[str, tuple[dict[str, object], str]] = {
    "misspelt": (
        {"hy3_api_prot": 8000},
        "hy3_api_prot is a name that no role knows; write hy3_api_port, or take it out.",
    ),
    "near a fact and a variable": (
        {"hy3_checkpoint_path": "/srv"},
        "hy3_checkpoint_path is a name that no role knows; write hy3_checkpoint_dir, or take it out.",
    ),
    "near another role's": (
        {"hy3_lab_netdevs": "eth0"},
        "hy3_lab_netdevs is a name that no role knows; write hy3_lab_netdev, or take it out.",
    ),
    "near nothing": (
        {"hy3_xxxxxxxxxxxxxxxx": 1},
        "hy3_xxxxxxxxxxxxxxxx is a name that no role knows; take it out, or see the names in README.md.",
    ),
    "words for a number": (
        {"hy3_api_port": "eighty"},
        "hy3_api_port is 'eighty', and it must be a whole number; write its digits.",
    ),
    "neither true nor false": (
        {"hy3_firewall": "maybe"},
        "hy3_firewall is 'maybe', and it must be true or false; write one of them.",
    ),
    "a word that is none of a few": (
        {"hy3_launch": "dockr"},
        "hy3_launch has 'dockr', and it knows venv, docker, podman only; write docker.",
    ),
    "half a number": (
        {"hy3_start_timeout": 1.5},
        "hy3_start_timeout is 1.5, and it must be a whole number; write its digits.",
    ),
    "truth for a number": (
        {"hy3_api_port": True},
        "hy3_api_port is True, and it must be a whole number; write its digits.",
    ),
    "text for a dictionary": (
        {"hy3_engine_args": "--seed 0"},
        "hy3_engine_args is '--seed 0', and it must be a dictionary; write `name: value` pairs.",
    ),
    "text for a list": (
        {"hy3_nodes": "spark-1,spark-2"},
        "hy3_nodes is 'spark-1,spark-2', and it must be a list; write `[a, b]`.",
    ),
    "a list for text": (
        {"hy3_hca": ["rocep1s0f1"]},
        "hy3_hca is ['rocep1s0f1'], and it must be text; write some, or leave the line out.",
    ),
    "nothing for a path": (
        {"hy3_venv": None},
        "hy3_venv is None, and it must be a path; write one, or leave the line out.",
    ),
    "a rule that does not exist": (
        {"hy3_allow": ["memlock-limited", "cap-not-enforce"]},
        "hy3_allow has 'cap-not-enforce', which it does not know; write cap-not-enforced.",
    ),
    "a rule near none": (
        {"hy3_allow": ["xyz"]},
        "hy3_allow has 'xyz', which it does not know; take it out.",
    ),
}


@pytest.mark.parametrize(("more", "sentence"), PROBLEMS.values(), ids=PROBLEMS)
def test_one_sentence(more: dict[str, object], sentence: str) -> None:
    assert variable_problems(GIVEN | more, PROFILE) == [sentence]


def test_missing() -> None:
    assert variable_problems({"hy3_fabric_address": "192.168.100.1"}, PROFILE) == [
        "hy3_profile is not set, and it is required; set it in the inventory."
    ]


def test_a_required_name_that_is_misspelt_is_not_missing_as_well() -> None:
    assert variable_problems({"hy3_profle": "x", "hy3_fabric_address": "192.168.100.1"}, PROFILE) == [
        "hy3_profle is a name that no role knows; write hy3_profile, or take it out."
    ]


def test_a_value_under_an_unknown_name_may_be_a_secret() -> None:
    assert "sesame" not in variable_problems(GIVEN | {"hy3_api_kye": "sesame"}, PROFILE)[0]
