# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Three ranks and a checkpoint that was padded for them: run by `molecule verify` on each node.

That each answer and its logprobs are the unpadded checkpoint's is tests/integration/test_tp3.py.
"""

from __future__ import annotations

import json
import re
import typing as t

import pytest

API = "http://127.0.0.1:8000"
TREE = "/srv/hy3/models/Hy3-tiny-TP3"
FABRIC = {"spark-1": ("198.18.20.1", "3"), "spark-2": ("198.18.20.2", "6"), "spark-3": ("198.18.20.3", "4")}


@pytest.fixture
def name(host: t.Any) -> str:
    return str(host.check_output("hostname"))


def post(host: t.Any, path: str, **body: t.Any) -> dict[str, t.Any]:
    """The first choice of an answer of the API."""
    request = json.dumps({"model": "hy3-tiny", "temperature": 0, **body})
    out = host.check_output(f"curl -s {API}{path} -H 'Content-Type: application/json' -d '{request}'")
    choice: dict[str, t.Any] = json.loads(out)["choices"][0]
    return choice


def ranks(host: t.Any) -> list[str]:
    """Process ids of the ranks in the unit that holds them."""
    found = host.check_output(
        "for d in /proc/[0-9]*; do grep -qs '/hy3-ray.service$' $d/cgroup && "
        "grep -qsa '^ray::RayWorkerProc' $d/cmdline && echo ${d#/proc/}; done; true"
    )
    return str(found).split()


def test_one_rank_on_each_node_with_its_own_fabric(host: t.Any, name: str) -> None:
    (pid,) = ranks(host)
    seen = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ").splitlines()
    address, index = FABRIC[name]
    assert f"NCCL_IB_GID_INDEX={index}" in seen
    assert f"VLLM_HOST_IP={address}" in seen


def test_the_engine_runs_on_the_head_only(host: t.Any, name: str) -> None:
    assert host.service("hy3-ray").is_running
    assert host.service("hy3-serve").is_running == (name == "spark-1")


def test_three_ranks_are_asked_for(host: t.Any, name: str) -> None:
    if name != "spark-1":
        return
    argv = host.check_output("systemctl show hy3-serve -p ExecStart --value")
    assert "--tensor-parallel-size 3" in argv
    assert TREE in argv


def test_every_node_has_the_padded_checkpoint(host: t.Any) -> None:
    config = json.loads(host.file(f"{TREE}/config.json").content_string)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (12, 6)
    assert host.check_output(f"find {TREE} -name '*.incomplete' -o -name '.hy3-pull'") == ""


def test_the_vocabulary_is_padded_by_p3(host: t.Any) -> None:
    """448 is a multiple of 64 that three do not divide."""
    site = host.check_output("echo /var/lib/hy3-lab/venv/lib/python3*/site-packages")
    records = host.check_output(f"find {site} -path '*/.hy3-patch/*' -name '*vocab_parallel_embedding*'").split()
    assert any("sha256_original" in json.loads(host.file(record).content_string) for record in records), records


def test_three_ranks_answer_as_one(host: t.Any, name: str) -> None:
    if name != "spark-1":
        return
    messages = [{"role": "user", "content": "capital of France? one word"}]
    answer = post(host, "/v1/chat/completions", messages=messages, max_tokens=8)
    assert answer["message"]["content"] == "Paris."


def test_drafts_are_accepted(host: t.Any, name: str) -> None:
    if name != "spark-1":
        return
    post(host, "/v1/completions", prompt=" w000", max_tokens=200, ignore_eos=True)
    text = host.check_output(f"curl -s {API}/metrics")
    counters = dict(re.findall(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total\{.*?\} ([\d.e+]+)$", text, re.M))
    assert float(counters["accepted"]) / float(counters["draft"]) > 0.9
