# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for systemctl, and what a play in check mode would have done with units."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

# What systemd 252 prints of a unit, in the parts that count. Whoever carries no digest is stale.
PROGRAM = """\
#!{python}
import sys
state, enabled = {state!r}, {enabled!r}
loaded = "loaded" if state else "not-found"
units = [word for word in sys.argv if word.endswith((".service", ".slice"))]
block = ["Id=x", "Description={description}", f"LoadState={{loaded}}", f"ActiveState={{state or 'inactive'}}"]
block += ["SubState=running", "MainPID=0", "Result=success", "NRestarts=0", "ExecMainStatus=0"]
block += ["InvocationID=", f"UnitFileState={{enabled}}"]
if "show" in sys.argv:
    print("\\n\\n".join("\\n".join(block) for _unit in units))
elif "is-active" in sys.argv:
    print(state or "inactive")
elif "is-enabled" in sys.argv:
    print(enabled)
    sys.exit(enabled == "disabled")
"""
Tasks = list[tuple[str, set[str]]]


def install(
    root: Path, monkeypatch: pytest.MonkeyPatch, state: str, *, description: str = "x", enabled: str = "enabled"
) -> None:
    """Come before the real one, with every unit in one state (unknown if empty), and enabled, disabled or static."""
    (root / "bin").mkdir()
    program = root / "bin/systemctl"
    program.write_text(PROGRAM.format(python=sys.executable, state=state, description=description, enabled=enabled))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{root}/bin:{os.environ['PATH']}")


def changes(output: str) -> Tasks:
    """Each task that ran, in order, with the hosts on which it would change something."""
    tasks: Tasks = []
    for line in output.splitlines():
        if match := re.match(r"TASK \[(?:[\w.]+ : )?(.*?)\]", line):
            tasks.append((match[1], set()))
        elif match := re.match(r"changed: \[([\w-]+)\]", line):
            tasks[-1][1].add(match[1])
    return tasks


def moved(tasks: Tasks) -> Tasks:
    """What stops and starts units."""
    words = ("Unit | Of", "Unit | Restart")
    return [(name, hosts) for name, hosts in tasks if name.startswith(words) and hosts]
