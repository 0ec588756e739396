# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module as a node does: a process of its own, arguments and answer as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run_module(name: str, **arguments: Any) -> dict[str, Any]:
    """Return the answer without the invocation, and its warnings as plain sentences."""
    done = subprocess.run(
        [sys.executable, "-m", f"ansible_collections.sparks.hy3.plugins.modules.{name}"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    result = json.loads(done.stdout)
    assert done.returncode == int(result.get("failed", False)), done.stderr
    result.pop("invocation", None)  # ansible-core 2.20 and newer leave it out unless asked
    if "warnings" in result:
        result["warnings"] = [warning["event"]["msg"] for warning in result["warnings"]]
    return result
