# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Live progress of a transfer that runs on a node as an asynchronous task; documented as a module."""

from __future__ import annotations

import shlex
import time
import typing as t

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.sparks.hy3.plugins.module_utils._progress import describe

ARGUMENTS: dict[str, dict[str, t.Any]] = {
    "job": {"type": "str", "required": True},
    "progress": {"type": "str", "required": True},
    "interval": {"type": "float", "default": 5.0},
}
# What Ansible says of the job, where the result of its module is wanted.
OF_THE_JOB = ("ansible_job_id", "results_file", "started", "finished", "stdout", "stderr")
# Seconds for which a node that cannot be reached is asked again.
PATIENCE = 300
LOST = (
    "The transfer ended without a result: its process was killed, or the node was restarted; "
    "run again, and only the rest is transferred."
)


class ActionModule(ActionBase):
    """Asks the node again and again, so no connection has to last as long as the transfer."""

    _requires_connection = True
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _validation, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        if self._task.check_mode:
            return {"changed": False}
        status = self._follow(arguments, task_vars or {})
        # Without a result of the module's own there is what Ansible's wrapper has to say, which is a traceback.
        if status.get("failed") and "cmd" in status and "data" in status:
            return {"failed": True, "msg": LOST}
        return {name: value for name, value in status.items() if name not in OF_THE_JOB}

    def _follow(self, arguments: dict[str, t.Any], task_vars: dict[str, t.Any]) -> dict[str, t.Any]:
        """What became of the job, once it has ended."""
        host, shown = task_vars.get("inventory_hostname", "node"), ""
        reached, missing = time.monotonic(), 0
        while True:
            try:
                status = self._ask(task_vars, jid=arguments["job"])
                if status.get("finished") or status.get("failed"):
                    self._ask(task_vars, jid=arguments["job"], mode="cleanup")
                    return status
                alive, text = self._look(arguments)
            except AnsibleConnectionFailure:
                if time.monotonic() - reached > PATIENCE:
                    raise
                self._connection.reset()
            else:
                reached = time.monotonic()
                # It may have ended between the two questions.
                missing = 0 if alive else missing + 1
                if missing > 1:
                    return {"failed": True, "msg": LOST}
                words = describe(text)
                if words and words != shown:
                    Display().display(f"{host}: {words}")
                    shown = words
            time.sleep(arguments["interval"])

    def _ask(self, task_vars: dict[str, t.Any], **arguments: str) -> dict[str, t.Any]:
        arguments["_async_dir"] = self.get_shell_option("async_dir", default="~/.ansible_async")
        return self._execute_module(
            module_name="ansible.builtin.async_status", module_args=arguments, task_vars=task_vars
        )

    def _look(self, arguments: dict[str, t.Any]) -> tuple[bool, str]:
        """Whether the job's process lives, and what the transfer wrote down last.

        The pattern is written so that it does not find the shell that looks for it.
        """
        job = arguments["job"].partition(".")[0]
        pattern = shlex.quote(f"{job[:-1]}[{job[-1]}]")
        found = self._low_level_execute_command(
            f"grep -lsa {pattern} /proc/[0-9]*/cmdline | wc -l; cat {shlex.quote(arguments['progress'])}"
        )
        count, _end, text = found["stdout"].partition("\n")
        return count.strip() != "0", text
