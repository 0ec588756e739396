# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's checkpoint under the real vLLM: known answers, drafts, and logprobs that show a misplaced slice.

Needs the lab (`make lab-up`) and a cluster that serves on it (`make demo`), to which one rank alone is compared.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import read_header
from ansible_collections.sparks.hy3.tests.integration.server import WEATHER, Logprobs, Server, cluster, serving

SCRIPT = Path(__file__).parents[2] / "roles/lab/files/make_tiny_hy3.py"
spec = importlib.util.spec_from_file_location("make_tiny_hy3", SCRIPT)
assert spec is not None
assert spec.loader is not None
tiny = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tiny
spec.loader.exec_module(tiny)

# The limits that the collection promises between tensor parallel 1 and 2: bfloat16 rounding, and nothing else.
MEAN_LIMIT, MAX_LIMIT = 0.03, 0.15


def make(out: Path, *options: str) -> Path:
    assert tiny.main([str(out), *options]) == 0
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("engine") / "hy3")


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> Iterator[Server]:
    with serving(checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def one_logprobs(one: Server) -> Logprobs:
    return one.logprobs()


def differences(before: Logprobs, after: Logprobs) -> list[float]:
    return [abs(before[key] - after[key]) for key in before.keys() & after.keys()]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def test_answer(one: Server) -> None:
    choice = one.chat()
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Paris.", "stop")


def test_reasoning(one: Server) -> None:
    message = one.chat(reasoning_effort="high")["message"]
    assert (message["reasoning"], message["content"]) == (" France has one capital", "Paris.")


def test_tool_call(one: Server) -> None:
    choice = one.chat(tools=[WEATHER])
    call = choice["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Tokyo"})
    assert choice["finish_reason"] == "tool_calls"


def test_long_text(one: Server) -> None:
    assert one.complete(" w000", 600)["text"] == tiny.expected_text(600, " w000")


def test_drafts(one: Server) -> None:
    assert one.acceptance() > 0.9


def test_logprobs_are_finite(one_logprobs: Logprobs) -> None:
    assert len(one_logprobs) > 1000
    assert all(map(math.isfinite, one_logprobs.values()))


def test_two_nodes_agree_with_one(one_logprobs: Logprobs) -> None:
    with cluster() as server:
        assert server.chat()["message"]["content"] == "Paris."
        assert server.acceptance() > 0.9
        found = differences(one_logprobs, server.logprobs())
    print(f"tensor parallel 2 over Ray: {len(found)} logprobs, mean {mean(found):.4f}, max {max(found):.3f}")
    assert len(found) > 0.9 * len(one_logprobs)
    assert 0 < mean(found) <= MEAN_LIMIT
    assert max(found) <= MAX_LIMIT


def test_a_lost_slice_shows(checkpoint: Path, one_logprobs: Logprobs) -> None:
    """The last eighth of one o_proj, one head, zeroed: the text stays right and the logprobs tell."""
    broken = shutil.copytree(checkpoint, checkpoint.with_name("broken"))
    name = "model.layers.1.self_attn.o_proj.weight"
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    path = broken / index["weight_map"][name]
    header = read_header(path)
    tensor = header.tensors[name]
    rows, row_bytes = tensor.shape[0], 2 * tensor.shape[1]
    content = bytearray(path.read_bytes())
    for row in range(rows):
        end = 8 + len(header.raw) + tensor.start + (row + 1) * row_bytes
        content[end - row_bytes // 8 : end] = bytes(row_bytes // 8)
    path.write_bytes(content)
    with serving(broken) as server:
        assert server.chat()["message"]["content"] == "Paris."
        found = differences(one_logprobs, server.logprobs())
    print(f"one head lost: mean {mean(found):.4f}, max {max(found):.3f}")
    assert mean(found) > MEAN_LIMIT
    assert max(found) > MAX_LIMIT


def test_acceptance_can_be_chosen(tmp_path: Path) -> None:
    with serving(make(tmp_path / "hy3", "--acceptance", "0.6")) as server:
        share = server.acceptance()
        assert server.chat()["message"]["content"] == "Paris."
    print(f"acceptance asked for 0.6: {share:.3f}")
    assert 0.5 < share < 0.7
