# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules as role preflight asks for them, run by the real Ansible on this machine."""

from __future__ import annotations

import getpass
import json
import subprocess
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook

# What this machine may lack that a Spark has.
MACHINE = ["wrong-arch", "no-gpu", "cpu-torch", "wheel-arch", "fp4-without-gpu", "driver-too-old", "remove-ipc"]


@pytest.fixture
def check(tmp_path: Path) -> t.Callable[..., subprocess.CompletedProcess[str]]:
    site = tmp_path / "venv/lib/python3.12/site-packages"
    for name in ("vllm-0.24.0", "ray-2.60.0", "torch-2.11.0", "flashinfer_python-0.6.1"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    config = {
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 13312, "num_hidden_layers": 80},
        **{"moe_intermediate_size": 1536, "vocab_size": 120832, "max_position_embeddings": 262144},
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def run(**variables: t.Any) -> subprocess.CompletedProcess[str]:
        given = {"rules_checkpoint": str(tmp_path), "rules_venv": str(tmp_path / "venv"), "hy3_user": getpass.getuser()}
        return run_playbook("preflight_rules", tmp_path, {**given, "hy3_allow": MACHINE, **variables})

    return run


def test_the_recipe_passes(check: t.Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = check()
    assert done.returncode == 0, done.stdout
    # It is said, and does not stop.
    assert "(rule expert-bias-bf16)" in " ".join(done.stdout.split())


def test_what_is_known_to_fail_is_refused(check: t.Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = check(hy3_engine_args={"max-model-len": 300000}, hy3_ray_args={"object-store-memory": None})
    assert done.returncode != 0
    words = " ".join(done.stdout.split())
    assert "spark-1: The longest request is 300000 tokens and the model knows 262144" in words
    assert "(rule ray-plasma-default; hy3_allow can accept it)" in words


def test_a_venv_that_is_filled_later_is_not_judged(
    tmp_path: Path, check: t.Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "venv/lib/python3.12/site-packages/ray-2.60.0.dist-info").rmdir()
    done = check()
    assert done.returncode != 0
    assert "ray is not in the venv" in " ".join(done.stdout.split())
    done = check(hy3_engine_packages=["vllm==0.24.0", "ray==2.60.0"])
    assert done.returncode == 0, done.stdout
