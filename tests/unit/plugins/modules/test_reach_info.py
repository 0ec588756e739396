# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import socket
import typing as t

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module


def test_sees_who_is_silent_and_who_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        result = run_module(
            "reach_info",
            addresses={"spark-2": "127.0.0.1", "spark-3": "127.0.0.1"},
            ports={"spark-2": server.getsockname()[1], "spark-3": str(closed.getsockname()[1])},
            timeout=0.3,
            _ansible_check_mode=True,
        )
    assert result["changed"] is False
    assert [(view["name"], view["tcp"], view["ping"]) for view in result["views"]] == [
        ("spark-2", "silent", True),
        ("spark-3", "refused", True),
    ]


# Arguments, words of the refusal.
BAD: dict[str, tuple[dict[str, t.Any], str]] = {
    "no number": ({"ports": {"a": "ssh"}}, "The port of a is 'ssh', and a TCP port is a number from 1 to 65535"),
    "too large": ({"ports": {"a": 65536}}, "The port of a is 65536"),
    "zero": ({"ports": {"a": 0}}, "The port of a is 0"),
    "no time": ({"timeout": 0}, "timeout is 0, and each host needs some seconds"),
    "not a time": ({"timeout": "nan"}, "timeout is nan"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input(arguments: dict[str, t.Any], words: str) -> None:
    assert words in run_module("reach_info", addresses={"a": "127.0.0.1"}, **arguments)["msg"]


def test_nobody_to_ask() -> None:
    assert run_module("reach_info", addresses={})["views"] == []
