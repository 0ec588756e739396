# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a node's SSH server answers the controller, without logging in. Documented as a module."""

from __future__ import annotations

import logging
import socket
import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.sparks.hy3.plugins.module_utils._reach import BANNER, Target, View, look_at_all
from ansible_collections.sparks.hy3.plugins.module_utils._wait import duration

try:
    import paramiko
except ImportError:  # without it only the key exchange is not looked at
    paramiko = None

ARGUMENTS: dict[str, dict[str, t.Any]] = {
    "timeout": {"type": "float", "default": 10.0},
    "wait": {"type": "float", "default": 0.0},
    "interval": {"type": "float", "default": 5.0},
}
# Other ways to a node have no SSH server to ask.
TRANSPORTS = ("ssh", "smart", "paramiko", "paramiko_ssh")
DONE = "done"
STALLED = "stalled"
FAILED = "failed"
# Seconds after which the same state is shown again.
SILENCE = 30.0


def key_exchange(address: str, port: int, *, timeout: float) -> tuple[str | None, str]:
    """How the key exchange with an SSH server ends, and why it failed; None without paramiko.

    It is the first thing that needs packets of full size: where a link loses those, a banner comes and nothing after.
    Nobody is logged in.
    """
    if paramiko is None:
        return None, ""
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    deadline = time.monotonic() + timeout
    transport = None
    try:
        transport = paramiko.Transport(socket.create_connection((address, port), timeout=timeout))
        transport.banner_timeout = transport.handshake_timeout = timeout
        transport.start_client(timeout=max(0.1, deadline - time.monotonic()))
        # It also returns at the timeout, and then there is no key.
        return (DONE, "") if transport.initial_kex_done else (STALLED, "")
    except (paramiko.SSHException, OSError, EOFError) as exc:
        # Its own timeouts end a moment early.
        return STALLED if time.monotonic() >= deadline - 0.2 else FAILED, str(exc)
    finally:
        if transport is not None:
            transport.close()


class Shown:
    """What was said of a node while it is waited for: a line at each change, else one every half minute."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._last = ("", 0.0)

    def line(self, view: View, elapsed: float, wait: float) -> str | None:
        """The line to print now, or None."""
        state = view["tcp"] if view["ping"] else f"{view['tcp']}, no ping"
        if state == self._last[0] and elapsed - self._last[1] < SILENCE:
            return None
        self._last = (state, elapsed)
        return f"{self._host}: SSH says {state}, waited {duration(elapsed)} of {duration(wait)}"


class ActionModule(ActionBase):
    """Asks the node's SSH server itself, so that a node on which Ansible would hang is known before it does."""

    _requires_connection = True
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _validation, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        host = (task_vars or {}).get("inventory_hostname", "node")
        if self._connection.transport not in TRANSPORTS:
            return {"changed": False, "tcp": "not_asked", "transport": self._connection.transport}
        address = self._connection.get_option("host") or self._play_context.remote_addr
        target = Target(name=host, address=address, port=int(self._connection.get_option("port") or 22))
        wait = 0.0 if self._task.check_mode else arguments["wait"]
        view, waited = self._look(target, arguments, wait)
        kex: str | None = None
        why = view["error"]
        if view["tcp"] == BANNER:
            kex, why = key_exchange(target["address"], target["port"], timeout=arguments["timeout"])
        return {"changed": False, **view, "error": why, "key_exchange": kex, "waited_s": round(waited, 1)}

    @staticmethod
    def _look(target: Target, arguments: dict[str, t.Any], wait: float) -> tuple[View, float]:
        started, shown = time.monotonic(), Shown(target["name"])
        while True:
            [view] = look_at_all([target], timeout=arguments["timeout"])
            elapsed = time.monotonic() - started
            if view["tcp"] == BANNER or elapsed >= wait:
                return view, elapsed if wait else 0.0
            if line := shown.line(view, elapsed, wait):
                Display().display(line)
            time.sleep(min(arguments["interval"], max(0.0, wait - elapsed)))
