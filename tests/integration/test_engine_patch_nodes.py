# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""P1 on each node of the lab by itself: every node has its own site-packages. Needs `make lab-up`."""

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import module, on

VENV = "/var/lib/hy3-lab/venv"
TARGET = "$(echo /var/lib/hy3-lab/venv/lib/python3*/site-packages/vllm/model_executor/models/hy_v3_mtp.py)"


def patch(node: str, state: str, *options: str) -> str:
    return module(node, "sparks.hy3.engine_patch", f"venv={VENV} patches=P1 state={state}", *options)


def sha256(node: str) -> str:
    return on(node, f"sha256sum {TARGET}").split()[0]


@pytest.mark.parametrize(("node", "other"), [("spark-1", "spark-2"), ("spark-2", "spark-1")])
def test_apply_and_revert_on_one_node(node: str, other: str) -> None:
    patch(node, "absent")
    patch(other, "absent")
    original = sha256(node)
    assert original == sha256(other)

    checked = patch(node, "present", "--check", "--diff")
    added = [line[1:] for line in checked.splitlines() if line.startswith("+") and not line.startswith("+++")]
    removed = [line[1:] for line in checked.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert f"{node} | CHANGED" in checked
    assert len(added) == 1, "the edit is one line"
    assert 'prefix="lm_head", ' in added[0]
    assert [line.replace('prefix="lm_head", ', "") for line in added] == removed
    assert sha256(node) == original, "check mode writes nothing"

    assert f"{node} | CHANGED" in patch(node, "present")
    assert f"{node} | SUCCESS" in patch(node, "present")
    assert sha256(node) != original
    assert sha256(other) == original, "the other node has its own file"

    assert f"{node} | CHANGED" in patch(node, "absent")
    assert sha256(node) == original
    patch(node, "present")
    patch(other, "present")
