# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What patches of vLLM change in the real vLLM 0.32 of the lab. Needs the lab's engine (`make lab-up`), and no node.

Only a package of links to it is patched.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny
from ansible_collections.sparks.hy3.tests.integration.lab import LAB
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from ansible_collections.sparks.hy3.tests.wheels.released import RELEASES

HERE = Path(__file__).parent
DRAFTER = "model_executor/models/hy_v3_mtp.py"
VOCABULARY = "model_executor/layers/vocab_parallel_embedding.py"
PARSERS = ("vllm/reasoning/hy_v3_reasoning_parser.py", "vllm/tool_parsers/hy_v3_tool_parser.py")
SIZE = 120832
TOKENS = [0, 40319, 40320, 80639, 80640, SIZE - 1]
THOUGHT = "<think> France has one capital</think>Paris."
CALL = (
    "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Tokyo</arg_value>"
    "</tool_call></tool_calls>"
)
PARSED = {"thought": [" France has one capital", "Paris."], "calls": [["get_weather", {"city": "Tokyo"}]]}
SUFFIX = ":opensource"


def linked(place: Path, file: str) -> Path:
    """A package of links to the lab's vLLM, whose ``file`` alone can be replaced."""
    (original,) = LAB.glob("venv/lib/python3*/site-packages/vllm")
    package = directory = place / "vllm"
    for part in (*Path(file).parts, ""):
        directory.mkdir()
        for entry in original.iterdir():
            if entry.name not in (part, "__pycache__"):
                (directory / entry.name).symlink_to(entry)
        original, directory = original / part, directory / part
        if original.is_file():
            directory.write_bytes(original.read_bytes())
            break
    return package


def run_in_engine(script: str, *arguments: str, paths: str = "") -> list[Any]:
    """The JSON values that a script prints behind a word in capitals."""
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [str(LAB / "venv/bin/python"), str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line[:6].isupper()]


def test_p1(tmp_path: Path) -> None:
    package = linked(tmp_path, DRAFTER)
    (before,) = run_in_engine("engine_head.py", paths=str(tmp_path))
    assert before["shape"] == [128, 256], "packed, two weights in a byte"
    assert "The size of tensor a (256) must match the size of tensor b (512)" in before["error"]
    assert run_module("engine_patch", package_path=str(package), patches=["P1"])["changed"]
    assert run_in_engine("engine_head.py", paths=str(tmp_path)) == [{"shape": [128, 512]}]


def vocabulary(package: Path, ranks: int) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = run_in_engine("engine_vocabulary.py", str(ranks), str(port), paths=str(package.parent))
    return sorted(found, key=lambda one: -one.get("own_rows", 0))


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked(tmp_path_factory.mktemp("unpatched"), VOCABULARY)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = linked(tmp_path_factory.mktemp("patched"), VOCABULARY)
    assert run_module("engine_patch", package_path=str(package), patches=["P3"])["changed"]
    return package


def test_three_ranks_without_p3(unpatched: Path) -> None:
    assert vocabulary(unpatched, 3) == 3 * [{"error": f"{SIZE} is not divisible by 3"}]


def test_three_ranks_with_p3(patched: Path) -> None:
    found = vocabulary(patched, 3)
    assert [one["own_rows"] for one in found] == [40320, 40320, 40192]
    assert {(one["padded"], one["rows"]) for one in found} == {(120960, 40320)}
    assert all(one["padding_is_zero"] for one in found)
    assert all(one["embedded"] == TOKENS for one in found)
    assert [SIZE, True] in [one["logits"][1:] for one in found if one["logits"]], "no logits for the padding"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_p3_changes_nothing_for_others(patched: Path, ranks: int) -> None:
    for one in vocabulary(patched, ranks):
        assert (one["padded"], one["rows"], one["own_rows"]) == (SIZE, SIZE // ranks, SIZE // ranks)
        assert one["embedded"] == TOKENS


def with_suffix(text: str) -> str:
    for marker in tiny.MARKERS:
        text = text.replace(marker, f"{marker[:-1]}{SUFFIX}>")
    return text


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One whose special tokens have the suffix that the published ones have, and whose tokenizer does not say so."""
    place = tmp_path / "checkpoint"
    place.mkdir()
    for name, text in tiny.small_files(3).items():
        (place / name).write_text(with_suffix(text))
    (place / "model.safetensors").write_bytes(tiny.shard([]))
    return place


def parsed(checkpoint: Path, *files: str) -> Any:
    (found,) = run_in_engine("engine_parsers.py", str(checkpoint), with_suffix(THOUGHT), with_suffix(CALL), *files)
    return found


def test_token_suffix(checkpoint: Path, unpatched: Path) -> None:
    """vLLM 0.25 and newer need no patch, but the key in the tokenizer's file."""
    before = parsed(checkpoint)
    assert "could not locate think start/end tokens" in before["thought"]
    assert "could not locate tool call" in before["calls"]
    options = {"package_path": str(unpatched), "checkpoint": str(checkpoint), "repair_token_suffix": True}
    assert run_module("engine_patch", **options)["changed"]
    assert parsed(checkpoint) == PARSED


def test_p2(checkpoint: Path, tmp_path: Path) -> None:
    """The parsers of vLLM 0.24.0 on the classes that 0.32 has beneath them."""
    (release,) = (release for release in RELEASES if release.name == "vllm-0.24.0")
    for file in PARSERS:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_bytes(release.files()[file])
    (tmp_path / "vllm/__init__.py").touch()
    files = [str(tmp_path / file) for file in PARSERS]
    before = parsed(checkpoint, *files)
    assert "could not locate think start/end tokens" in before["thought"]
    assert "could not locate tool call" in before["calls"]
    assert run_module("engine_patch", package_path=str(tmp_path / "vllm"), patches=["P2"])["changed"]
    assert parsed(checkpoint, *files) == PARSED
