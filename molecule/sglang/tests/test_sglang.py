# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang itself on two nodes, each with its own packages: run by `molecule verify` on each node.

The operators that drafts need on a CPU are stand-ins (tests/sglang/cpu); models, loaders, scheduler and API are
SGLang's own.
"""

from __future__ import annotations

import json
import re
import typing as t
from pathlib import Path

import pytest

API = "http://127.0.0.1:8000"
LAB = Path("/var/lib/hy3-lab/sglang")
MODELS = "srt/models"
# P4 is in both, P5 in the drafter's, P8 in the target's.
PATCHED = ("hunyuan_v3.py", "hunyuan_v3_nextn.py")
RANKS = {"spark-1": "0", "spark-2": "1"}
# In the fourth place they agreed where both ran on one machine.
LIMIT = 0.001
PROMPT, COUNT = " w000", 40


@pytest.fixture
def name(host: t.Any) -> str:
    return str(host.check_output("hostname"))


def package(host: t.Any) -> str:
    return str(host.check_output(f"echo {LAB}/venv/lib/python3*/site-packages/sglang"))


def complete(host: t.Any, prompt: str, count: int) -> dict[str, t.Any]:
    body = {"model": "hy3-tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 1}
    request = json.dumps({**body, "ignore_eos": True})
    out = host.check_output(f"curl -s {API}/v1/completions -H 'Content-Type: application/json' -d '{request}'")
    choice: dict[str, t.Any] = json.loads(out)["choices"][0]
    return choice


def test_each_node_has_its_rank(host: t.Any, name: str) -> None:
    assert host.service("hy3-serve").is_running
    command = host.check_output("systemctl show hy3-serve -p ExecStart --value")
    assert f"--nnodes 2 --node-rank {RANKS[name]} --dist-init-addr 198.18.20.1:29501" in command
    schedulers = host.check_output(
        "for d in /proc/[0-9]*; do grep -qs '/hy3-serve.service$' $d/cgroup && "
        "grep -qsa '^sglang::scheduler' $d/cmdline && echo ${d#/proc/}; done; true"
    )
    assert len(schedulers.split()) == 1


def test_no_ray_runs(host: t.Any) -> None:
    assert not host.service("hy3-ray").is_running


def test_each_node_has_patched_its_own_packages(host: t.Any) -> None:
    place = package(host)
    for file in PATCHED:
        original = Path(f"{place}/{MODELS}/{file}").read_text()  # of this machine, on which no node writes
        patched = host.file(f"{place}/{MODELS}/{file}").content_string
        assert "shared_experts." in patched and patched != original
        compile(patched, file, "exec")


def test_answer(host: t.Any, name: str) -> None:
    if name != "spark-1":
        return
    messages = [{"role": "user", "content": "capital of France? one word"}]
    body = json.dumps({"model": "hy3-tiny", "messages": messages, "temperature": 0, "max_tokens": 8})
    out = host.check_output(f"curl -s {API}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    assert json.loads(out)["choices"][0]["message"]["content"] == "Paris."


def test_names_change_no_answer(host: t.Any, name: str) -> None:
    """Text and logprobs are those of the checkpoint with Tencent's names, which needs no P4."""
    if name != "spark-1":
        return
    native = json.loads((LAB / "native.json").read_text())
    found = complete(host, PROMPT, COUNT)
    assert found["text"] == native["text"] != ""
    pairs = list(zip(native["logprobs"]["token_logprobs"], found["logprobs"]["token_logprobs"], strict=True))
    assert None not in {value for pair in pairs for value in pair}
    assert max(abs(old - new) for old, new in pairs) <= LIMIT


def test_every_draft_is_accepted(host: t.Any, name: str) -> None:
    if name != "spark-1":
        return
    complete(host, PROMPT, 100)
    invocation = host.check_output("systemctl show hy3-serve -P InvocationID")
    log = host.check_output(f"journalctl -q --output=cat _SYSTEMD_INVOCATION_ID={invocation}")
    assert float(re.findall(r"accept rate: ([\d.]+)", log)[-1]) == 1.0


def test_health_of_rank_1_proves_nothing(host: t.Any, name: str) -> None:
    if name != "spark-2":
        return
    said = {
        path: host.check_output(f"curl -s -o /dev/null -w '%{{http_code}}' {API}{path}")
        for path in ("/health", "/v1/models")
    }
    assert said == {"/health": "200", "/v1/models": "404"}
