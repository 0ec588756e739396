# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Live progress while an engine boots. The decisions are in ``module_utils/_wait.py``; documented as a module."""

from __future__ import annotations

import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.sparks.hy3.plugins.module_utils._wait import (
    Failed,
    Goal,
    Progress,
    Ready,
    next_step,
)

ARGUMENTS: dict[str, dict[str, t.Any]] = {
    "unit": {"type": "str", "required": True},
    "log_unit": {"type": "str"},
    "url": {"type": "str", "required": True},
    "model": {"type": "str"},
    "api_key": {"type": "str", "no_log": True},
    "timeout": {"type": "int", "default": 1800},
    "interval": {"type": "float", "default": 2.0},
}


class ActionModule(ActionBase):
    """Asks the node again and again; each look is a module run of its own, so a lost connection is not hidden."""

    _requires_connection = True
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _validation, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        task_vars = task_vars or {}
        if self._task.check_mode:
            return {"changed": False, "elapsed_s": 0.0, "phases": [], "log": None, "failure": None, "ended": False}
        started = time.monotonic()
        progress = Progress(task_vars.get("inventory_hostname", "node"))
        goal: Goal | None = None
        while True:
            status = self._look(arguments, task_vars)
            if status.get("failed"):
                return status
            elapsed = time.monotonic() - started
            goal = goal or Goal(
                unit=arguments["unit"],
                model=arguments["model"],
                timeout=arguments["timeout"],
                restarts=status["units"][arguments["unit"]]["n_restarts"] or 0,
            )
            if line := progress.line(status["log"], elapsed):
                Display().display(line)
            step = next_step(status, elapsed, goal)
            if isinstance(step, (Ready, Failed)):
                return self._result(step, status, progress, elapsed)
            time.sleep(arguments["interval"])

    def _look(self, arguments: dict[str, t.Any], task_vars: dict[str, t.Any]) -> dict[str, t.Any]:
        log_unit = arguments["log_unit"] or arguments["unit"]
        return self._execute_module(
            module_name="sparks.hy3.engine_status",
            module_args={
                "units": sorted({arguments["unit"], log_unit}),
                "log_unit": log_unit,
                "api_url": arguments["url"],
                "api_key": arguments["api_key"],
            },
            task_vars=task_vars,
        )

    @staticmethod
    def _result(step: Ready | Failed, status: dict[str, t.Any], progress: Progress, elapsed: float) -> dict[str, t.Any]:
        result = {
            "changed": False,
            "elapsed_s": round(elapsed, 1),
            "phases": progress.phases,
            "log": status["log"],
            "failure": status["failure"],
            "ended": isinstance(step, Failed) and step.ended,
        }
        return result | ({"failed": True, "msg": step.reason} if isinstance(step, Failed) else {})
