# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each patch of SGLang in the running SGLang 0.5.23: the fault without it, and the right answers with it.

The checkpoint is the lab's, with known answers, named as ModelOpt names what it exports from transformers: the layers
are all BF16 and excluded from NVFP4, which has no kernels for a CPU. Operators for the CPU are stand-ins, see ``cpu``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny
from ansible_collections.sparks.hy3.tests.sglang.engine import Server, copied, install, serving
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from ansible_collections.sparks.hy3.tests.wheels.released import RELEASES

LAYERS = 3
NAMES = {
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
    ".mlp.router.gate.": ".mlp.gate.",
    ".mlp.expert_bias": ".mlp.e_score_correction_bias",
}
QUESTION = "capital of France? one word"
PROMPT, COUNT = " w000", 40
NEXTN = "srt/models/hunyuan_v3_nextn.py"


@pytest.fixture(scope="module")
def original() -> Path:
    """The package as it was released."""
    return install()


@pytest.fixture
def package(original: Path) -> Iterator[Path]:
    with copied(original) as package:
        yield package


def exported(tensor: tiny.Tensor) -> tiny.Tensor:
    name = tensor.name
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return tensor._replace(name=name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint")
    weights = tiny.Weights(seed=0, layers=LAYERS, acceptance=1.0)
    tensors = sorted(map(exported, weights.tensors()), key=lambda tensor: tensor.dtype != "F32")
    (place / "model.safetensors").write_bytes(tiny.shard(tensors))
    for name, text in tiny.small_files(LAYERS).items():
        (place / name).write_text(text)
    excluded = ["lm_head", *(f"model.layers.{number}*" for number in range(LAYERS + 1))]
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    config = tiny.config(LAYERS)
    config["quantization_config"] = {"quant_method": "modelopt", **quantization, "ignore": excluded}
    (place / "config.json").write_text(json.dumps(config))
    legacy = {"producer": {"name": "modelopt"}, "quantization": {**quantization, "exclude_modules": excluded}}
    (place / "hf_quant_config.json").write_text(json.dumps(legacy))
    return place


def patch(package: Path, *patches: str) -> None:
    done = run_module("engine_patch", engine="sglang", package_path=str(package), patches=list(patches))
    assert {entry["state"] for entry in done["patches"]} == {"applied"}


def says_right(server: Server) -> bool:
    """The known answer and the known text, with a likelihood for each token."""
    text, logprobs = server.complete(PROMPT, COUNT)
    finite = all(logprob is not None and math.isfinite(logprob) for logprob in logprobs)
    assert server.chat(QUESTION) == "Paris."
    return finite and text == tiny.expected_text(COUNT, PROMPT)


def test_what_the_checkpoint_needs(package: Path, checkpoint: Path) -> None:
    done = run_module("engine_patch", engine="sglang", package_path=str(package), checkpoint=str(checkpoint))
    states = {(entry["id"], entry["file"].rpartition("/")[2], entry["state"]) for entry in done["patches"]}
    assert states == {
        ("P4", "hunyuan_v3.py", "applied"),
        ("P4", "hunyuan_v3_nextn.py", "applied"),
        ("P5", "hunyuan_v3_nextn.py", "applied"),
        ("P6", "hunyuan_v3_nextn.py", "upstream_fixed"),
        ("P8", "hunyuan_v3.py", "applied"),
    }
    with serving(package, checkpoint) as server:
        assert says_right(server)
        assert server.acceptance() > 0.9


def test_without_p4(package: Path, checkpoint: Path) -> None:
    """Every sign of health, and no answer."""
    patch(package, "P5", "P8")
    with serving(package, checkpoint) as server:
        assert server.get("/health") == ""
        assert server.chat(QUESTION) == ""
        text, logprobs = server.complete(PROMPT, COUNT)
        assert text == ""
        assert not any(logprobs), "NaN comes as null"


def test_without_p4_in_the_drafter(package: Path, checkpoint: Path, original: Path) -> None:
    patch(package, "P4", "P8")
    (package / NEXTN).unlink()
    shutil.copy(original / NEXTN, package / NEXTN)
    patch(package, "P5")
    with serving(package, checkpoint) as server:
        assert says_right(server)
        assert server.acceptance() < 0.1


def test_without_p5(package: Path, checkpoint: Path) -> None:
    patch(package, "P4", "P8")
    with serving(package, checkpoint) as server:
        log = server.log.read_text()
    assert "hunyuan_v3_nextn.py" in log
    assert "The size of tensor a (256) must match the size of tensor b (512)" in log
    assert "ready to roll" not in log


@pytest.mark.parametrize("repaired", [False, True], ids=["without", "with"])
def test_p6(package: Path, checkpoint: Path, repaired: bool) -> None:
    """SGLang 0.5.23 has the repair. The drafter's file of 0.5.15.post1, which has not, runs in it, too."""
    (older,) = (release for release in RELEASES if release.name == "sglang-0.5.15.post1")
    (package / NEXTN).unlink()
    (package / NEXTN).write_bytes(older.files()[f"sglang/{NEXTN}"])
    patch(package, "P4", "P5", "P8", *(["P6"] if repaired else []))
    with serving(package, checkpoint) as server:
        assert says_right(server)
        assert (server.acceptance() > 0.9) is repaired


def test_without_p8(package: Path, checkpoint: Path) -> None:
    patch(package, "P4", "P5")
    with serving(package, checkpoint) as server:
        log = server.log.read_text()
    assert "ready to roll" not in log
    assert "in load_merged_column_weight" in log
