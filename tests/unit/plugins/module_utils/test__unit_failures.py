# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB
from ansible_collections.sparks.hy3.plugins.module_utils._unit_failures import memory_failure, unit_failure

# (id, how the unit ended, rule, words of the cause)
TEST_UNITS: list[tuple[str, dict[str, t.Any], str, str]] = [
    ("kill by the kernel", {"result": "oom-kill", "exec_main_status": 9}, "unit-oom-kill", "killed it for memory"),
    ("kill of a child", {"result": "success", "oom_kills": 2}, "unit-oom-kill", "2 processes of x.service"),
    ("venv removed", {"result": "exit-code", "exec_main_status": 203}, "unit-exit", "cannot be run"),
    ("user removed", {"result": "exit-code", "exec_main_status": 217}, "unit-exit", "user does not exist"),
    ("log on a full disk", {"result": "exit-code", "exec_main_status": 209}, "unit-exit", "log cannot be opened"),
    ("limits of a container", {"result": "exit-code", "exec_main_status": 205}, "unit-exit", "limits"),
    ("killed", {"result": "signal", "exec_main_status": 9}, "unit-signal", "SIGKILL"),
    ("killed, said by a shell", {"result": "exit-code", "exec_main_status": 137}, "unit-signal", "SIGKILL"),
    ("crashed", {"result": "core-dump", "exec_main_status": 11}, "unit-signal", "SIGSEGV"),
    ("NCCL's watchdog", {"result": "core-dump", "exec_main_status": 6}, "unit-signal", "SIGABRT"),
    ("another processor", {"result": "core-dump", "exec_main_status": 4}, "unit-signal", "processor"),
    ("a loop that ended", {"result": "start-limit-hit", "exec_main_status": 1}, "unit-start-limit-hit", "too often"),
    ("waits for its head", {"result": "timeout", "exec_main_status": 0}, "unit-timeout", "in time"),
    ("a secret's file is gone", {"result": "resources", "exec_main_status": 0}, "unit-resources", "not there"),
]


@pytest.mark.parametrize(
    ("ended", "rule", "words"), [row[1:] for row in TEST_UNITS], ids=[row[0] for row in TEST_UNITS]
)
def test_how_a_unit_ended(ended: dict[str, t.Any], rule: str, words: str) -> None:
    found = unit_failure("x.service", ended)
    assert found is not None
    assert found["rule"] == rule
    assert words in found["cause"]


@pytest.mark.parametrize(
    "ended",
    [
        {},
        {"result": None, "exec_main_status": None},
        {"result": "success", "exec_main_status": 0, "oom_kills": 0},
        # What the program means by it stands in its log.
        {"result": "exit-code", "exec_main_status": 1},
        {"result": "exit-code", "exec_main_status": 2},
        {"result": "signal", "exec_main_status": 15},
        {"result": "a new word", "exec_main_status": 9},
    ],
)
def test_what_systemd_does_not_know(ended: dict[str, t.Any]) -> None:
    assert unit_failure("x.service", ended) is None


# (id, memory, is it short)
TEST_MEMORY: list[tuple[str, dict[str, t.Any], bool]] = [
    ("enough", {"total": 122 * GIB, "available": 12 * GIB}, False),
    ("the seed's: 120 used, 1 free", {"total": 121 * GIB, "available": GIB}, True),
    ("stalls", {"total": 122 * GIB, "available": 12 * GIB, "pressure": 40.0}, True),
    ("swaps", {"total": 122 * GIB, "available": 3 * GIB, "swap_total": 16 * GIB, "swap_free": 2 * GIB}, True),
    (
        "swapped long ago",
        {"total": 122 * GIB, "available": 90 * GIB, "swap_total": 16 * GIB, "swap_free": 2 * GIB},
        False,
    ),
    ("unknown", {}, False),
    ("unknown in part", {"total": 122 * GIB}, False),
]


@pytest.mark.parametrize(("memory", "short"), [row[1:] for row in TEST_MEMORY], ids=[row[0] for row in TEST_MEMORY])
def test_memory(memory: dict[str, t.Any], short: bool) -> None:
    assert (memory_failure(memory) is not None) is short
