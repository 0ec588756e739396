# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._wait import (
    Failed,
    Goal,
    Progress,
    Ready,
    Wait,
    describe,
    duration,
    next_step,
)

UNIT = "hy3-serve.service"
GOAL = Goal(unit=UNIT, timeout=1800, restarts=2, model="hy3")
ACTIVE = {
    "load_state": "loaded",
    "active_state": "active",
    "sub_state": "running",
    "result": "success",
    "exec_main_status": 0,
    "n_restarts": 2,
}
HEALTHY = {"ok": True, "status": 200, "models": ["hy3"]}
DOWN = {"ok": False, "status": None, "models": []}
KNOWN = {"cause": "No room", "fix": "Make room", "source": "x", "line": "ValueError: none", "fatal": True}
SEEN = KNOWN | {"fatal": False}


def log(phase: str, loaded: int | None = None) -> dict[str, t.Any]:
    shards = {"loaded": loaded, "total": 99} if loaded is not None else None
    return {"phase": phase, "shards": {"target": shards, "drafter": None}, "tail": ["one", "two"]}


def status(*, unit: dict[str, t.Any] | None = None, **more: t.Any) -> dict[str, t.Any]:
    return {"units": {UNIT: ACTIVE | (unit or {})}, "health": DOWN, "failure": None, "log": log("loading", 12)} | more


FAILED = {"active_state": "failed", "sub_state": "failed", "result": "exit-code", "exec_main_status": 1}
RESTARTING = {"active_state": "activating", "sub_state": "auto-restart", "result": "exit-code", "exec_main_status": 1}
WAITING = {"active_state": "activating", "sub_state": "start-pre", "result": "success", "exec_main_status": 0}

# (id, status, elapsed, expected step, words of the reason)
TEST_STEPS: list[tuple[str, dict[str, t.Any], float, type, str]] = [
    ("boots", status(), 10, Wait, ""),
    ("no-log-yet", status(log=None), 10, Wait, ""),
    ("healthy", status(health=HEALTHY), 10, Ready, ""),
    ("healthy-after-the-timeout", status(health=HEALTHY), 9999, Ready, ""),
    ("healthy-before-the-model-is-listed", status(health=HEALTHY | {"models": []}), 10, Wait, ""),
    ("another-model-is-served", status(health=HEALTHY | {"models": ["other"]}), 10, Wait, ""),
    ("a-stranger-on-the-port", status(unit=FAILED, health=HEALTHY), 10, Failed, "is failed"),
    ("fatal-line-while-active", status(failure=KNOWN), 10, Failed, "No room. Make room. Log line: ValueError: none"),
    ("doubtful-line-while-active", status(failure=SEEN), 10, Wait, ""),
    ("fatal-line-in-auto-restart", status(unit=RESTARTING, failure=KNOWN), 10, Failed, "No room"),
    ("waits-for-its-head", status(unit=WAITING), 10, Wait, ""),
    ("will-be-restarted", status(unit=RESTARTING), 10, Failed, "has ended (result exit-code, exit status 1); its log"),
    (
        "will-be-restarted-by-255",
        status(unit=RESTARTING | {"sub_state": "auto-restart-queued"}),
        10,
        Failed,
        "has ended",
    ),
    ("doubtful-line-in-auto-restart", status(unit=RESTARTING, failure=SEEN), 10, Failed, "has ended (result exit-code"),
    ("restarted", status(unit={"n_restarts": 3}), 10, Failed, "restarted once; its log names no known reason"),
    ("restarted-twice", status(unit={"n_restarts": 4}, failure=SEEN), 10, Failed, "restarted 2 times. No room"),
    (
        "restarted-and-silent-since",
        status(unit={"n_restarts": 3}, failures_before=[SEEN]),
        10,
        Failed,
        "restarted once. No room",
    ),
    ("failed", status(unit=FAILED), 10, Failed, "is failed (result exit-code, exit status 1)"),
    ("failed-with-a-hint", status(unit=FAILED, failure=SEEN), 10, Failed, "exit status 1). No room"),
    ("stopped", status(unit={"active_state": "inactive"}), 10, Failed, "is inactive (result success"),
    ("starts", status(unit={"active_state": "activating"}), 10, Wait, ""),
    ("never-deployed", status(unit={"load_state": "not-found", "active_state": "inactive"}), 0, Failed, "not-found"),
    (
        "too-late",
        status(),
        1800,
        Failed,
        "not ready after 30m00s, still loading weights 12/99 shards; the last log lines are: one | two",
    ),
    ("too-late-without-a-log", status(log=None), 1800, Failed, "the last log lines are: none"),
]


@pytest.mark.parametrize(
    ("status_", "elapsed", "step", "reason"), [row[1:] for row in TEST_STEPS], ids=[row[0] for row in TEST_STEPS]
)
def test_next_step(status_: dict[str, t.Any], elapsed: float, step: type, reason: str) -> None:
    found = next_step(status_, elapsed, GOAL)
    assert isinstance(found, step)
    assert reason in (found.reason if isinstance(found, Failed) else "")
    # Whoever is not ready in time may be later.
    assert not isinstance(found, Failed) or found.ended is not found.reason.startswith(f"{UNIT} is not ready after")


def test_any_model_will_do_without_a_name() -> None:
    goal = Goal(unit=UNIT, timeout=1800, restarts=2)
    assert next_step(status(health=HEALTHY | {"models": ["other"]}), 0, goal) == Ready()


TEST_DURATIONS: list[tuple[float, str]] = [(0, "0s"), (8.9, "8s"), (70, "1m10s"), (3599, "59m59s"), (3720, "1h02m")]


@pytest.mark.parametrize(("seconds", "expected"), TEST_DURATIONS)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


TEST_WORDS: list[tuple[dict[str, t.Any] | None, str]] = [
    (None, "starting the engine"),
    (log("loading", 12), "loading weights 12/99 shards"),
    (log("loading"), "loading weights"),
    (log("drafter", 99), "loading the drafter"),
    (log("kv_cache", 99), "measuring memory for the KV pool"),
]


@pytest.mark.parametrize(("log_", "expected"), TEST_WORDS)
def test_describe(log_: dict[str, t.Any] | None, expected: str) -> None:
    assert describe(log_) == expected


def test_progress() -> None:
    progress = Progress("spark-1")
    looks = [
        (0, None),
        (2, None),
        (70, log("loading", 12)),
        (72, log("loading", 12)),
        (74, log("loading", 13)),
        (83, log("loading", 13)),
        (84, log("loading", 13)),
        (90, log("warmup", 99)),
    ]
    assert [progress.line(seen, elapsed) for elapsed, seen in looks] == [
        "spark-1: starting the engine, 0s",
        None,
        "spark-1: loading weights 12/99 shards, 1m10s",
        None,
        "spark-1: loading weights 13/99 shards, 1m14s",
        None,
        "spark-1: loading weights 13/99 shards, 1m24s",
        "spark-1: warming up, 1m30s",
    ]
    assert progress.phases == [
        {"phase": "starting", "at_s": 0},
        {"phase": "loading", "at_s": 70},
        {"phase": "warmup", "at_s": 90},
    ]
