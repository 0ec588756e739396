# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The same bytes, written again under a serving engine: it may run other code, so it restarts. Needs `make lab-up`."""

from __future__ import annotations

import re

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import changed_nothing, module, on, play

VENV = "/var/lib/hy3-lab/venv"
UNITS = (("spark-1", "hy3-ray"), ("spark-1", "hy3-serve"), ("spark-2", "hy3-ray"))
SAID = r"restart needed: hy3-ray\.service on spark-2, because \S+ \(process \d+\) started before vllm/\S+ was patched"


def starts() -> dict[tuple[str, str], str]:
    """The invocation id of each unit, another one after each start."""
    return {(node, unit): on(node, f"systemctl show {unit} -P InvocationID").strip() for node, unit in UNITS}


def entered(node: str, unit: str) -> int:
    """When the unit's main process started, in microseconds after the boot of the one machine of all nodes."""
    return int(on(node, f"systemctl show {unit} -P ExecMainStartTimestampMonotonic"))


def on_one_line(output: str) -> str:
    """Ansible breaks long messages."""
    return " ".join(output.split())


@pytest.fixture
def rewritten() -> dict[tuple[str, str], str]:
    """A cluster that serves, and on the second node the patch taken out and put back; the starts before."""
    play("serve-hy3")
    before = starts()
    for state in ("absent", "present"):
        assert "spark-2 | CHANGED" in module(
            "spark-2", "sparks.hy3.engine_patch", f"venv={VENV} patches=P1 state={state}"
        )
    return before


def test_restarts_in_order_and_once(rewritten: dict[tuple[str, str], str]) -> None:
    foreseen = on_one_line(play("serve-hy3", "--check"))
    assert re.search(SAID, foreseen)
    assert "hy3-ray.service on spark-1, because" not in foreseen
    assert starts() == rewritten, "check mode restarts nothing"

    assert re.search(SAID, on_one_line(play("serve-hy3")))
    after = starts()
    changed = {unit for unit in UNITS if after[unit] != rewritten[unit]}
    # The head's Ray runs what lies there; the engine has its workers in the raylet of the second node.
    assert changed == {("spark-1", "hy3-serve"), ("spark-2", "hy3-ray")}
    assert entered("spark-2", "hy3-ray") < entered("spark-1", "hy3-serve")

    output = play("serve-hy3")
    assert changed_nothing(output)
    assert "restart needed" not in output
    assert starts() == after
