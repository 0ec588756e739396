# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.bench_summary import FilterModule
from ansible_collections.sparks.hy3.plugins.module_utils._metrics import read_metrics

Facts = dict[str, t.Any]

summarise = FilterModule().filters()["bench_summary"]
WORKLOAD: Facts = {"id": "one_256", "output_tokens": 256, "streams": 1, "temperature": 0.0, "sized": []}
PROFILE: Facts = {"engine_args": {"max-num-seqs": 2}, "executor": "ray"}
PLAN: Facts = PROFILE | {"expected": {"decode_tokens_per_s": 20.0, "workload": "one_256"}}
OK: Facts = {"tokens": 256, "ttft_s": 0.25, "decode_tps": 20.0, "error": None}
HELD_BACK: Facts = {"tokens": 256, "ttft_s": None, "decode_tps": None, "error": None}
FAILED: Facts = {"tokens": 0, "ttft_s": None, "decode_tps": None, "error": "ClientError: refused"}


def result(number: int, *requests: Facts, running: int = 0, workload: Facts | None = None) -> Facts:
    metrics = read_metrics(f"vllm:num_requests_running {running}")
    run = {"duration_s": 13.0, "total_tps": 19.0, "accept_length": None, "requests": list(requests)}
    return {"item": [workload or WORKLOAD, number], "run": run, "metrics_before": metrics, "metrics_after": metrics}


def test_the_warm_up_does_not_count() -> None:
    slow = OK | {"decode_tps": 0.1}
    (found,) = summarise([result(0, slow), result(1, OK), result(2, OK)], plan=PLAN, profile=PROFILE)["workloads"]
    assert (len(found["runs"]), found["decode_tps"]) == (2, {"median": 20.0, "min": 20.0, "max": 20.0})


def test_workloads_keep_their_order() -> None:
    longer = WORKLOAD | {"id": "a_later_one", "output_tokens": 512}
    found = summarise([result(1, OK), result(1, OK, workload=longer)], plan=PLAN, profile=PROFILE)["workloads"]
    assert [(one["id"], one["shape"]) for one in found] == [
        ("one_256", "256 tokens, temperature 0"),
        ("a_later_one", "512 tokens, temperature 0"),
    ]
    assert json.loads(json.dumps(found)) == found  # as a report needs it


TEST_REMARKS: list[tuple[str, Facts, list[str], str]] = [
    ("none", result(1, OK), [], "within"),
    ("failed", result(1, OK, FAILED, FAILED), ["ClientError: refused"], "not comparable"),
    (
        "held-back",
        result(1, OK, HELD_BACK),
        ["1 of 2 requests have no times, as their text did not come bit by bit"],
        "within",
    ),
    ("others", result(1, OK, running=3), ["3 requests of others ran meanwhile"], "not comparable"),
    ("sized", result(1, OK, workload=WORKLOAD | {"sized": ["smaller"]}), ["smaller"], "not comparable"),
    ("ended-early", result(1, OK | {"tokens": 9}), [], "not comparable"),
]


@pytest.mark.parametrize(
    ("one", "remarks", "verdict"), [row[1:] for row in TEST_REMARKS], ids=[row[0] for row in TEST_REMARKS]
)
def test_remarks_and_verdict(one: Facts, remarks: list[str], verdict: str) -> None:
    found = summarise([one], plan=PLAN, profile=PROFILE)
    assert (found["workloads"][0]["remarks"], found["verdicts"][0]["verdict"]) == (remarks, verdict)


def test_another_executor_is_not_compared() -> None:
    found = summarise([result(1, OK)], plan=PLAN | {"executor": "mp"}, profile=PROFILE)
    assert found["verdicts"][0]["why"] == "executor is mp and not ray"


def test_check_mode_measured_nothing() -> None:
    nothing = {"item": [WORKLOAD, 1], "run": None, "metrics_before": None, "metrics_after": None}
    assert summarise([nothing], plan=PLAN, profile=PROFILE) == {"workloads": [], "verdicts": []}
