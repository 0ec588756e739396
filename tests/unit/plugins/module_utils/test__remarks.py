# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An engine that has not failed, and is worth a word."""

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import read_facts
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import Line
from ansible_collections.sparks.hy3.plugins.module_utils._remarks import find_remarks, silence

READY = "Starting vLLM server on http://127.0.0.1:8000"
SGLANG = "Decode batch, #running-req: 1, #token: 234, accept len: 1.02, accept rate: {}, gen throughput (token/s): 17.1"
SPEC = (
    "SpecDecoding metrics: Mean acceptance length: 1.61, Accepted: {} tokens, Drafted: 1000 tokens, Per-position "
    "acceptance rate: 0.613, Avg Draft acceptance rate: {}%"
)

# (id, lines, seconds since the last, rules)
TEST_REMARKS: list[tuple[str, list[str], float, list[str]]] = [
    ("nothing to say", ["Initializing a V1 LLM engine (v0.24.0) with config: x"], 5, []),
    (
        "B31: waits while another rank loads",
        ["Starting to load model", "No available shared memory broadcast block found in 60 seconds. This typically"],
        5,
        ["waits-for-rank"],
    ),
    (
        "a rank that waited and is ready",
        ["No available shared memory broadcast block found in 60 seconds", READY],
        900,
        [],
    ),
    (
        "B28: waits for a node",
        ["Waiting for creating a placement group of specs for 10 seconds."],
        5,
        ["waits-for-gpus"],
    ),
    ("the seed: the first requests are slow", [READY], 60, ["cold"]),
    ("not any more", [READY], 900, []),
    (
        "the seed: b12x livelocks",
        ["Using 'FLASHINFER_B12X' NvFp4 MoE backend out of potential backends: ['x'].", "Starting to load model"],
        400,
        ["b12x-livelock"],
    ),
    ("b12x compiles", ["Using 'FLASHINFER_B12X' NvFp4 MoE backend out of potential backends: ['x']."], 60, []),
    (
        "B93: SGLang's queue at another address",
        ["[2026-11-30 17:11:55 TP0] Init torch distributed begin.", "[x TP0] CustomAllreduce is disabled because this"],
        200,
        ["queue-address"],
    ),
    ("ranks that do not meet", ["vLLM is using nccl==2.28.9"], 200, ["rendezvous-stall"]),
    (
        "B30: the load stands still",
        ["Loading safetensors checkpoint shards:  61% Completed | 60/99 [10:00<01:20, 1.1it/s]"],
        700,
        ["load-stall"],
    ),
    ("a slow disk", ["Loading safetensors checkpoint shards:  61% Completed | 60/99 [10:00<01:20]"], 300, []),
    ("B91: P6 is missing", [READY, *[SGLANG.format("0.06")] * 3], 900, ["acceptance"]),
    ("one moment of SGLang", [READY, SGLANG.format("0.00")], 900, []),
    ("seed 003: drafts in vain", [READY, *[SGLANG.format("0.20")] * 5], 900, ["acceptance"]),
    ("as published", [READY, SPEC.format(613, "61.3")], 900, []),
    ("vLLM drafts in vain", [READY, SPEC.format(9, "0.9")], 900, ["acceptance"]),
    (
        "answers that are wrong",
        [READY, "NaN detected in next_token_logits; values were sanitized before sampling. This usually"],
        900,
        ["nan-sanitized"],
    ),
    (
        "B27, and sockets",
        [READY, "Overwriting environment variable NCCL_IB_GID_INDEX from '6' to '3'", "NCCL INFO Using network Socket"],
        900,
        ["overwritten", "sockets"],
    ),
    ("plasma", [READY, "WARNING: The object store is using /tmp instead of /dev/shm because"], 900, ["plasma-on-disk"]),
    ("RoCE", [READY, "NCCL INFO Using network IB"], 900, []),
]


@pytest.mark.parametrize(
    ("texts", "ago", "rules"), [row[1:] for row in TEST_REMARKS], ids=[row[0] for row in TEST_REMARKS]
)
def test_remarks(texts: list[str], ago: float, rules: list[str]) -> None:
    lines = [Line(text, 1000.0) for text in texts]
    found = find_remarks(lines, read_facts(texts), now=1000.0 + ago, running=True)
    assert [one["rule"] for one in found] == rules
    assert all(one["cause"] and one["fix"] and one["source"] and one["line"] for one in found)


def test_one_that_has_ended_is_not_stalled() -> None:
    texts = ["vLLM is using nccl==2.28.9"]
    assert find_remarks([Line(texts[0], 0.0)], read_facts(texts), now=9999, running=False) == []


def test_silence() -> None:
    assert silence([Line("a", 5.0), Line("b", None)], 8.0) == 3.0
    assert silence([Line("a", None)], 8.0) is None
    assert silence([Line("a", 9.0)], 8.0) == 0.0
