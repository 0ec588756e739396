# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import socket
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._units import innermost_unit
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module


def test_names_the_holder_of_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run_module("port_info", _ansible_check_mode=True)
    assert result["changed"] is False
    assert [found for found in result["listeners"] if found["port"] == port] == [
        {
            "port": port,
            "address": "127.0.0.1",
            "pid": os.getpid(),
            "name": Path("/proc/self/comm").read_text().strip(),
            "unit": innermost_unit(Path("/proc/self/cgroup").read_text()),
        }
    ]
    assert port not in [found["port"] for found in run_module("port_info")["listeners"]]
