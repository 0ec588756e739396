# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two ranks of vLLM's own executor on two nodes: run by `molecule verify` on each node."""

from __future__ import annotations

import json
import typing as t

import pytest

API = "http://127.0.0.1:8000"
QUESTION = {"role": "user", "content": "capital of France? one word"}
RANKS = {"spark-1": "--node-rank 0", "spark-2": "--node-rank 1"}


@pytest.fixture
def name(host: t.Any) -> str:
    return str(host.check_output("hostname"))


def test_each_node_has_its_rank(host: t.Any, name: str) -> None:
    assert host.service("hy3-serve").is_running
    command = host.check_output("systemctl show hy3-serve -p ExecStart --value")
    assert RANKS[name] in command
    assert ("--headless" in command) == (name == "spark-2")


def test_no_ray_runs(host: t.Any) -> None:
    assert not host.service("hy3-ray").is_running
    assert host.run("pgrep -u hy3 -f raylet").rc == 1


def test_both_ranks_answer_as_one(host: t.Any, name: str) -> None:
    if name != "spark-1":
        return
    body = json.dumps({"model": "hy3-tiny", "messages": [QUESTION], "temperature": 0, "max_tokens": 8})
    out = host.check_output(f"curl -s {API}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    assert json.loads(out)["choices"][0]["message"]["content"] == "Paris."
