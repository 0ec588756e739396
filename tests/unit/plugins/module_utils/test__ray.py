# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._ray import (
    membership_command,
    membership_environment,
    membership_error,
    parse_membership,
)

MEMBERS = [
    ["10.77.0.2", True, {"GPU": 1.0, "node:10.77.0.2": 1.0}],
    ["10.77.0.1", True, {"GPU": 1.0, "node:10.77.0.1": 1.0, "node:__internal_head__": 1.0}],
    ["10.77.0.3", False, {}],
]


def test_members_by_address() -> None:
    assert parse_membership("a warning of Ray\n" + json.dumps(MEMBERS) + "\n") == [
        {"address": "10.77.0.1", "alive": True, "gpus": 1, "head": True},
        {"address": "10.77.0.2", "alive": True, "gpus": 1, "head": False},
        {"address": "10.77.0.3", "alive": False, "gpus": 0, "head": False},
    ]


@pytest.mark.parametrize("stdout", ["", "no list", '{"a": 1}'])
def test_no_list_is_said(stdout: str) -> None:
    with pytest.raises(Hy3Error, match="printed no list of nodes"):
        parse_membership(stdout)


# Recorded from Ray 2.60.0.
NO_TOKEN = (
    "[2026-11-30 18:49:36,524 W 514 514] gcs_client.cc:210: Failed to get cluster ID from GCS server: Unauthenticated: "
    "RPC error: InvalidAuthToken: Authentication token is missing or incorrect\n"
)

TEST_ERRORS: list[tuple[str, int, str, str]] = [
    (
        "no-token",
        -14,
        NO_TOKEN,
        "Ray at 10.77.0.1:6379 gave no answer within 20 seconds: Failed to get cluster ID from GCS server: "
        "Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing or incorrect",
    ),
    ("silent", -14, "", "Ray at 10.77.0.1:6379 gave no answer within 20 seconds: exit status -14"),
    (
        "no-ray-in-the-venv",
        1,
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'ray'\n",
        "Ray at 10.77.0.1:6379 is not reachable: ModuleNotFoundError: No module named 'ray'",
    ),
]


@pytest.mark.parametrize(("rc", "stderr", "expected"), [row[1:] for row in TEST_ERRORS])
def test_membership_error(rc: int, stderr: str, expected: str) -> None:
    assert membership_error(rc, stderr=stderr, address="10.77.0.1:6379", timeout=20) == expected


def test_the_address_is_never_auto() -> None:
    command = membership_command("/venv/bin/python", address="10.77.0.1:6379", timeout=20)
    assert (command[:3], command[-2:]) == (["/venv/bin/python", "-I", "-c"], ["10.77.0.1:6379", "20"])
    assert "auto" not in " ".join(command)


def test_the_token_travels_as_a_file_name() -> None:
    assert membership_environment("/etc/hy3/token")["RAY_AUTH_TOKEN_PATH"] == "/etc/hy3/token"
    assert "RAY_AUTH_MODE" not in membership_environment(None)
