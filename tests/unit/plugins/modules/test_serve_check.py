# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._patch._needs import Checkpoint
from ansible_collections.sparks.hy3.plugins.module_utils._rules import RULES
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils._patch import published
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

USER = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def spark(tmp_path: Path) -> dict[str, Any]:
    """Arguments for a venv and a checkpoint that are there, on whatever machine this is."""
    site = tmp_path / "venv/lib/python3.12/site-packages"
    for name in ("vllm-0.24.0", "ray-2.60.0", "torch-2.11.0+cpu"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 64, "num_key_value_heads": 8}))
    return {
        "venv": str(tmp_path / "venv"),
        "checkpoint": str(model),
        "user": USER,
        "nodes": 3,
        "arguments": {"tensor_parallel_size": 3, "distributed-executor-backend": "ray", "host": "127.0.0.1"},
        "environment": {},
        "ray_environment": {"VLLM_HOST_IP": "10.77.0.1"},
        "ray_arguments": {"object_store_memory": 2000000000, "node_ip_address": "10.77.0.1"},
        "patches": [],
    }


def rules_of(result: dict[str, Any]) -> set[str]:
    return {finding["rule"] for finding in result["findings"]}


def test_a_plan_that_cannot_work(spark: dict[str, Any]) -> None:
    result = run_module("serve_check", **spark)
    assert rules_of(result) >= {"tp-heads", "tp-kv-heads", "cpu-torch", "ray-memory-monitor"}
    assert not rules_of(result) & {"ray-node-address", "ray-plasma-default", "no-user"}
    assert (result["engine_version"], result["changed"]) == ("0.24.0", False)
    assert "num_attention_heads is 64 at tensor-parallel-size 3" in " ".join(result["problems"])
    assert result["checkpoint"]["scheme"] == "none"
    severities = [finding["severity"] for finding in result["findings"]]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


def test_what_is_accepted_is_no_problem(spark: dict[str, Any]) -> None:
    result = run_module("serve_check", **spark, allow=["tp-heads"])
    assert [finding["allowed"] for finding in result["findings"] if finding["rule"] == "tp-heads"] == [True]
    assert "num_attention_heads" not in " ".join(result["problems"])


def test_an_unknown_rule_is_refused() -> None:
    result = run_module("serve_check", allow=["tp-head"])
    assert result["failed"]
    assert "hy3_allow has 'tp-head', and no rule has that name; write tp-heads" in result["msg"]


def test_a_user_that_does_not_exist(spark: dict[str, Any]) -> None:
    result = run_module("serve_check", **{**spark, "user": "nobody-of-that-name"})
    assert "This node does not know user 'nobody-of-that-name'" in " ".join(result["problems"])


def test_nothing_given_is_nothing_judged() -> None:
    """Only the node itself can be looked at."""
    result = run_module("serve_check")
    assert not result.get("failed")
    assert (result["packages"], result["checkpoint"]) == (None, None)
    assert {"util-over-free", "tp-heads", "ray-memory-monitor"} <= set(result["unjudged"])
    assert rules_of(result) | set(result["unjudged"]) <= {rule.id for rule in RULES}


# The rules that ask whether a patch is in place.
PATCH_RULES = {
    *("ignore-shared-mlp", "mtp-head-quantized", "tp-vocab", "parser-suffix-old", "sglang-shared-experts"),
    *("sglang-nextn-quantized", "sglang-nextn-norm", "sglang-wildcards", "sglang-parser-suffix"),
}
PROFILES = Path(__file__).parents[4] / "roles/profile/files/profiles"
# What, checkpoint in miniature, profile, version, further arguments, whether what the checkpoint needs will be patched,
# the rules about patches that hold.
TEST_PATCHED: list[tuple[str, Checkpoint, str, str, dict[str, Any], bool, set[str]]] = [
    ("libertai", published.LIBERTAI, "libertai_nvfp4_tp2", "0.24.0", {}, True, set()),
    ("kodelow", published.KODELOW, "kodelow_w4a16_tp2", "0.24.0", {}, True, set()),
    ("vroomfondel", published.VROOMFONDEL, "vroomfondel_w4a4_tp4", "0.5.23", {}, True, set()),
    ("vroomfondel-old", published.VROOMFONDEL, "vroomfondel_w4a4_tp4", "0.5.14", {}, True, set()),
    ("vroomfondel-own", published.VROOMFONDEL, "vroomfondel_w4a4_tp4", "0.5.14", {}, False, set()),
    ("angelslim", published.ANGELSLIM, "libertai_nvfp4_tp2", "0.24.0", {}, True, set()),
    ("angelslim-own", published.ANGELSLIM, "libertai_nvfp4_tp2", "0.24.0", {}, False, {"ignore-shared-mlp"}),
    ("angelslim-sglang", published.ANGELSLIM, "vroomfondel_w4a4_tp4", "0.5.23", {}, True, set()),
    ("angelslim-sglang-own", published.ANGELSLIM, "vroomfondel_w4a4_tp4", "0.5.23", {}, False, {"sglang-wildcards"}),
    ("three-ranks", published.LIBERTAI, "libertai_nvfp4_tp2", "0.24.0", {"tp_size": 3}, True, set()),
    ("three-ranks-own", published.LIBERTAI, "libertai_nvfp4_tp2", "0.24.0", {"tp_size": 3}, False, {"tp-vocab"}),
    ("odd-ranks", published.LIBERTAI, "libertai_nvfp4_tp2", "0.24.0", {"tp_size": "x"}, True, set()),
]


@pytest.mark.parametrize(
    ("given", "profile", "version", "more", "with_needed", "expected"),
    [row[1:] for row in TEST_PATCHED],
    ids=[row[0] for row in TEST_PATCHED],
)
def test_what_the_checkpoint_needs_will_be_patched(  # noqa: PLR0917 (a row)
    tmp_path: Path,
    given: Checkpoint,
    profile: str,
    version: str,
    more: dict[str, Any],
    with_needed: bool,
    expected: set[str],
) -> None:
    plan = yaml.safe_load((PROFILES / f"{profile}.yml").read_text())
    arguments = {**plan["engine_args"], **plan.get("speculative_args", {})}
    if more:
        arguments = {name: value for name, value in arguments.items() if name != "tensor-parallel-size"} | more
    (tmp_path / f"venv/lib/python3.12/site-packages/{plan['engine']}-{version}.dist-info").mkdir(parents=True)
    published.store(given, tmp_path / "model")
    result = run_module(
        "serve_check",
        engine=plan["engine"],
        venv=str(tmp_path / "venv"),
        checkpoint=str(tmp_path / "model"),
        arguments=arguments,
        patches=plan["patches"],
        with_needed_patches=with_needed,
    )
    assert rules_of(result) & PATCH_RULES == expected


@pytest.mark.parametrize("user", ["0", str(os.getuid()), "99999999999999999999"])
def test_a_user_by_number(user: str) -> None:
    assert "traceback" not in repr(run_module("serve_check", user=user)).lower()
