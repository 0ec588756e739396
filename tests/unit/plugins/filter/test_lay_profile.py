# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import typing as t

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.sparks.hy3.plugins.filter.lay_profile import lay_profile
from ansible_collections.sparks.hy3.plugins.module_utils._topology import RING_ENVIRONMENT

PROFILE: dict[str, t.Any] = {
    "executor": "ray",
    "engine_args": {"max-model-len": 163840, "enforce-eager": True, "speculative-config": {"method": "mtp", "k": 1}},
    "engine_env": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    "memory": {"os_reserve": "4G", "head": {"ray": "104G", "serve": "8G"}, "worker": {"ray": "110G"}},
}

# key, what the inventory says of it, what comes out
LAID: dict[str, tuple[str, object, object]] = {
    "nothing": ("engine_args", {}, PROFILE["engine_args"]),
    "plain value": ("executor", "mp", "mp"),
    "one key of many": ("engine_args", {"max-model-len": 1}, PROFILE["engine_args"] | {"max-model-len": 1}),
    "underscores mean dashes": ("engine_args", {"max_model_len": 1}, PROFILE["engine_args"] | {"max-model-len": 1}),
    "underscores stay in a variable's name": (
        "engine_env",
        {"A_B": "1"},
        {"MALLOC_MMAP_THRESHOLD_": "65536", "A_B": "1"},
    ),
    "null takes away": (
        "engine_args",
        {"speculative-config": None},
        {"max-model-len": 163840, "enforce-eager": True},
    ),
    "null for what is not there": ("engine_env", {"NONE": None}, PROFILE["engine_env"]),
    "false stays, so that the option goes": (
        "engine_args",
        {"enforce-eager": False},
        PROFILE["engine_args"] | {"enforce-eager": False},
    ),
    "a JSON argument is replaced whole": (
        "engine_args",
        {"speculative_config": {"method": "ngram"}},
        PROFILE["engine_args"] | {"speculative-config": {"method": "ngram"}},
    ),
    "memory is laid at every depth": (
        "memory",
        {"head": {"ray": "100G"}},
        {"os_reserve": "4G", "head": {"ray": "100G", "serve": "8G"}, "worker": {"ray": "110G"}},
    ),
    "memory taken away": (
        "memory",
        {"head": {"serve": None}},
        {"os_reserve": "4G", "head": {"ray": "104G"}, "worker": {"ray": "110G"}},
    ),
    "what the profile lacks": ("ray_args", {"num_gpus": 1}, {"num-gpus": 1}),
}


@pytest.mark.parametrize(("key", "inventory", "laid"), LAID.values(), ids=LAID)
def test_lay_profile(key: str, inventory: object, laid: object) -> None:
    before = copy.deepcopy(PROFILE)
    assert lay_profile(PROFILE, {key: inventory}) == PROFILE | {key: laid}
    assert before == PROFILE, "the profile itself must stay"


# What the inventory says beside a ring, what the engine's environment is.
RINGS: dict[str, tuple[dict[str, t.Any], dict[str, str]]] = {
    "nothing": ({}, PROFILE["engine_env"] | RING_ENVIRONMENT),
    "of something else": ({"engine_args": {"seed": 0}}, PROFILE["engine_env"] | RING_ENVIRONMENT),
    "another value": (
        {"engine_env": {"NCCL_CROSS_NIC": "2"}},
        PROFILE["engine_env"] | RING_ENVIRONMENT | {"NCCL_CROSS_NIC": "2"},
    ),
    "null takes away, which the preflight then refuses": (
        {"engine_env": dict.fromkeys(RING_ENVIRONMENT)},
        PROFILE["engine_env"],
    ),
}


@pytest.mark.parametrize(("inventory", "environment"), RINGS.values(), ids=RINGS)
def test_a_ring_lies_between_profile_and_inventory(inventory: dict[str, t.Any], environment: dict[str, str]) -> None:
    assert lay_profile(PROFILE, inventory, ring=True)["engine_env"] == environment
    assert "NCCL_CROSS_NIC" not in PROFILE["engine_env"]


def test_order_is_the_profiles() -> None:
    laid = lay_profile(PROFILE, {"engine_args": {"seed": 0, "enforce-eager": False, "max-model-len": 1}})
    assert list(t.cast(dict[str, object], laid["engine_args"])) == [*PROFILE["engine_args"], "seed"]


REFUSED: dict[str, tuple[str, object]] = {
    "text for a dictionary": ("engine_args", "--seed 0"),
    "list for a dictionary": ("engine_env", ["A=1"]),
    "nothing for a dictionary": ("memory", None),
    "text for a dictionary that the profile lacks": ("ray_args", "--num-gpus=1"),
}


@pytest.mark.parametrize(("key", "inventory"), REFUSED.values(), ids=REFUSED)
def test_wrong_kind_is_refused(key: str, inventory: object) -> None:
    with pytest.raises(AnsibleFilterError, match=f"hy3_{key} is .* must be a dictionary; write `name: value` pairs"):
        lay_profile(PROFILE, {key: inventory})
