# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Waiting for an engine: the next step and the line to show, as pure functions of what ``engine_status`` returned."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._units import restarts_itself

_PHASE_WORDS = {
    "starting": "starting the engine",
    "engine_init": "initializing the engine",
    "loading": "loading weights",
    "drafter": "loading the drafter",
    "kv_cache": "measuring memory for the KV pool",
    "warmup": "warming up",
    "ready": "starting the API",
    "failed": "failed",
}

# Seconds without a change after which the same line is shown again.
_SILENCE = 10


@dataclass(frozen=True)
class Wait:
    """Ask again later."""


@dataclass(frozen=True)
class Ready:
    """The API is healthy and lists the model."""


@dataclass(frozen=True)
class Failed:
    """The engine will not come up; C(reason) says why, in sentences.

    C(ended) is whether it never will: one that was not waited for long enough may.
    """

    reason: str
    ended: bool = True


@dataclass(frozen=True)
class Goal:
    """What is waited for: C(model) in the API's list (any if None) within C(timeout) seconds.

    C(restarts) is the unit's restart count when the wait began.
    """

    unit: str
    timeout: float
    restarts: int
    model: str | None = None


class Progress:
    """What was seen and shown so far of one node's boot; C(phases) keeps the seconds of each phase's first sight."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._shown = ""
        self._shown_at = 0.0
        self.phases: list[dict[str, t.Any]] = []

    def line(self, log: t.Mapping[str, t.Any] | None, elapsed: float) -> str | None:
        """The line to print now, or None: one for each change, else one every ten seconds."""
        phase = log["phase"] if log else "starting"
        if all(seen["phase"] != phase for seen in self.phases):
            self.phases.append({"phase": phase, "at_s": round(elapsed, 1)})
        words = describe(log)
        if words == self._shown and elapsed - self._shown_at < _SILENCE:
            return None
        self._shown, self._shown_at = words, elapsed
        return f"{self._host}: {words}, {duration(elapsed)}"


def next_step(status: t.Mapping[str, t.Any], elapsed: float, goal: Goal) -> Wait | Ready | Failed:
    """Decide from one result of C(engine_status), C(elapsed) seconds after the wait began."""
    if status["units"][goal.unit]["active_state"] == "active" and _healthy(status["health"], goal.model):
        return Ready()
    if reason := _end(status, goal):
        return Failed(reason)
    if elapsed < goal.timeout:
        return Wait()
    return Failed(
        f"{goal.unit} is not ready after {duration(elapsed)}, still {describe(status['log'])}; "
        f"the last log lines are: {' | '.join(_tail(status['log'])) or 'none'}",
        ended=False,
    )


def explain(failure: t.Mapping[str, t.Any]) -> str:
    """A diagnosis as text: cause, way out, and the log line that it stands on."""
    return f"{failure['cause']}. {failure['fix']}. Log line: {failure['line']}"


def describe(log: t.Mapping[str, t.Any] | None) -> str:
    """The phase in words, with the shards while they load: V(loading weights 12/99 shards)."""
    if not log:
        return _PHASE_WORDS["starting"]
    words = _PHASE_WORDS[log["phase"]]
    shards = log["shards"].get({"loading": "target", "drafter": "drafter"}.get(log["phase"], ""))
    return f"{words} {shards['loaded']}/{shards['total']} shards" if shards else words


def duration(seconds: float) -> str:
    """Seconds as V(8s), V(1m10s) or V(1h02m)."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _end(status: t.Mapping[str, t.Any], goal: Goal) -> str | None:
    unit, failure = status["units"][goal.unit], status["failure"]
    if unit["load_state"] != "loaded":
        return f"{goal.unit} is {unit['load_state']} on this node: deploy it before waiting for it"
    if failure and failure["fatal"]:
        return explain(failure)
    # Waiting for other nodes comes before the start and is none: only a grown count tells.
    restarts = unit["n_restarts"] - goal.restarts
    if restarts > 0:
        before = next(iter(status.get("failures_before") or []), None)
        return f"{goal.unit} ended and was restarted {_times(restarts)}{_why(failure or before)}"
    restarts_soon = restarts_itself(unit["sub_state"])
    if unit["active_state"] in ("failed", "inactive") or restarts_soon:
        result = f"result {unit['result']}, exit status {unit['exec_main_status']}"
        ended = "has ended" if restarts_soon else f"is {unit['active_state']}"
        return f"{goal.unit} {ended} ({result}){_why(failure)}"
    return None


def _healthy(health: t.Mapping[str, t.Any] | None, model: str | None) -> bool:
    if not health or not health["ok"]:
        return False
    return model in health["models"] if model else bool(health["models"])


def _why(failure: t.Mapping[str, t.Any] | None) -> str:
    return f". {explain(failure)}" if failure else "; its log names no known reason"


def _tail(log: t.Mapping[str, t.Any] | None) -> list[str]:
    return log["tail"] if log else []


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
