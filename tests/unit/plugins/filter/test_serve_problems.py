# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.serve_problems import serve_problems

Status = dict[str, t.Any]
FABRIC_ENV = {"NCCL_IB_GID_INDEX": "6", "NCCL_IB_HCA": "=rocep1s0f1"}
ENGINE_ARGS = {
    "max-model-len": 163840,
    "enforce-eager": True,
    "moe-backend": None,
    "speculative-config": {"method": "mtp", "num_speculative_tokens": 1},
    "tensor-parallel-size": 2,
}
PLAN: dict[str, t.Any] = {
    "engine": "vllm",
    "executor": "ray",
    "hosts": ["spark-1", "spark-2"],
    "node": {"is_head": True},
    "readback": {"quantization": "modelopt_fp4"},
    "engine_args": ENGINE_ARGS,
}
WORKER_PLAN = PLAN | {"node": {"is_head": False}}


def process(pid: int, title: str, environment: dict[str, str] | None) -> dict[str, t.Any]:
    return {"pid": pid, "title": title, "user": 998, "environment": environment}


def healthy() -> Status:
    """A head as engine_status returns it, in the parts that count."""
    ray = [
        process(10, "/opt/hy3/venv/bin/python", dict(FABRIC_ENV)),
        process(11, "raylet", dict(FABRIC_ENV)),
        process(12, "VLLM::Worker_TP0", dict(FABRIC_ENV)),
    ]
    return {
        "units": {
            "hy3-ray.service": {"main_pid": 10, "processes": ray},
            "hy3-serve.service": {
                "processes": [process(20, "/opt/hy3/venv/bin/python", {}), process(21, "VLLM::EngineCore", {})]
            },
        },
        "log": {
            "config": {
                "quantization": "modelopt_fp4",
                "max_seq_len": 163840,
                "enforce_eager": True,
                "moe_backend": "auto",
                "speculative_method": "mtp",
                "speculative_tokens": 1,
                "tensor_parallel_size": 2,
            }
        },
        "metrics": {"drafted": 1000, "accepted": 613},
    }


def ray_processes(status: Status) -> list[dict[str, t.Any]]:
    return t.cast(list[dict[str, t.Any]], status["units"]["hy3-ray.service"]["processes"])


def test_healthy_head() -> None:
    assert serve_problems(healthy(), PLAN, FABRIC_ENV) == []


@pytest.mark.parametrize("title", ["VLLM::Worker_TP1", "ray::RayWorkerProc", "ray::RayWorkerWrapper.execute_method"])
def test_healthy_worker_has_neither_log_nor_metrics_nor_driver(title: str) -> None:
    status = healthy()
    ray_processes(status)[2]["title"] = title
    status["units"]["hy3-serve.service"]["processes"] = []
    status |= {"log": None, "metrics": None}
    assert serve_problems(status, WORKER_PLAN, FABRIC_ENV) == []


def test_a_title_written_over_the_environment_is_no_problem() -> None:
    status = healthy()
    ray_processes(status)[2]["environment"] = None
    for found in status["units"]["hy3-serve.service"]["processes"]:
        found["environment"] = None
    assert serve_problems(status, PLAN, FABRIC_ENV) == []


def other_index(status: Status) -> None:
    ray_processes(status)[1]["environment"]["NCCL_IB_GID_INDEX"] = "3"


def no_rank(status: Status) -> None:
    ray_processes(status).pop()


def two_ranks(status: Status) -> None:
    ray_processes(status).append(process(13, "VLLM::Worker_TP1", dict(FABRIC_ENV)))


def started_without_index(status: Status) -> None:
    del ray_processes(status)[0]["environment"]["NCCL_IB_GID_INDEX"]


def started_without_anything(status: Status) -> None:
    ray_processes(status)[0]["environment"] = None


def ray_not_running(status: Status) -> None:
    ray_processes(status).clear()


def leaking_driver(status: Status) -> None:
    for found in status["units"]["hy3-serve.service"]["processes"]:
        found["environment"] = {"NCCL_IB_HCA": "=rocep1s0f1", "GLOO_SOCKET_IFNAME": "enp1s0f1np1"}


def shorter_context(status: Status) -> None:
    status["log"]["config"]["max_seq_len"] = 32768


def no_quantization(status: Status) -> None:
    status["log"]["config"]["quantization"] = None


def nothing_drafted(status: Status) -> None:
    status["metrics"]["drafted"] = 0


def no_metrics(status: Status) -> None:
    status["metrics"] = None


NO_DRAFT = "speculative decoding is on and no token was drafted; look for the drafter in the engine's log."
PROBLEMS: dict[str, tuple[t.Callable[[Status], None], str]] = {
    "another node's index": (
        other_index,
        "process 11 (raylet) of hy3-ray.service was started with NCCL_IB_GID_INDEX=3 and this node's is 6; "
        "restart hy3-ray.service on this node.",
    ),
    "no rank": (
        no_rank,
        "0 engine ranks run on this node and 1 must run on each; Ray placed them elsewhere, so check the GPUs that "
        "each node brought.",
    ),
    "two ranks": (
        two_ranks,
        "2 engine ranks run on this node and 1 must run on each; Ray placed them elsewhere, so check the GPUs that "
        "each node brought.",
    ),
    "ray does not run": (
        ray_not_running,
        "hy3-ray.service does not run on this node; read `journalctl -u hy3-ray` there.",
    ),
    "ray without its index": (
        started_without_index,
        "process 10 of hy3-ray.service was started without NCCL_IB_GID_INDEX, so an executor may fill in the head's; "
        "restart hy3-ray.service on this node.",
    ),
    "ray without any": (
        started_without_anything,
        "process 10 of hy3-ray.service was started without NCCL_IB_GID_INDEX, NCCL_IB_HCA, so an executor may fill in "
        "the head's; restart hy3-ray.service on this node.",
    ),
    "driver with fabric values": (
        leaking_driver,
        "the driver was started with GLOO_SOCKET_IFNAME, NCCL_IB_HCA, which an executor may copy over the other nodes' "
        "values; take it out of hy3_engine_env.",
    ),
    "another length": (
        shorter_context,
        "the engine runs with max_seq_len 32768 and was asked for 163840; read the top of "
        "`journalctl -u hy3-serve` for why it changed it.",
    ),
    "another quantization": (
        no_quantization,
        "the engine runs with quantization None and was asked for 'modelopt_fp4'; read the top of "
        "`journalctl -u hy3-serve` for why it changed it.",
    ),
    "nothing drafted": (nothing_drafted, NO_DRAFT),
    "no metrics": (no_metrics, NO_DRAFT),
}


@pytest.mark.parametrize(("break_it", "sentence"), PROBLEMS.values(), ids=PROBLEMS)
def test_one_sentence(break_it: t.Callable[[Status], None], sentence: str) -> None:
    status = healthy()
    break_it(status)
    assert serve_problems(status, PLAN, FABRIC_ENV) == [sentence]


def test_without_a_log_every_setting_is_a_problem() -> None:
    status = healthy() | {"log": None}
    settings = [line.split()[4] for line in serve_problems(status, PLAN, FABRIC_ENV)]
    assert settings == [
        *("enforce_eager", "max_seq_len", "tensor_parallel_size"),
        *("speculative_method", "speculative_tokens", "quantization"),
    ]


@pytest.mark.parametrize(
    ("log", "restarted", "settings"),
    [
        ({"config": None}, True, 6),
        ({"config": None}, False, 0),  # rotated away
        (None, False, 6),
    ],
)
def test_an_older_start_may_have_lost_the_beginning_of_its_log(
    log: Status | None, restarted: bool, settings: int
) -> None:
    assert len(serve_problems(healthy() | {"log": log}, PLAN, FABRIC_ENV, restarted=restarted)) == settings


def test_what_an_older_start_says_counts() -> None:
    status = healthy()
    shorter_context(status)
    assert len(serve_problems(status, PLAN, FABRIC_ENV, restarted=False)) == 1


def test_an_option_that_the_inventory_changed_is_what_is_asked_for() -> None:
    plan = PLAN | {"engine_args": ENGINE_ARGS | {"max-model-len": 32768, "speculative-config": None}}
    status = healthy()
    status["log"]["config"]["max_seq_len"] = 32768
    assert serve_problems(status, plan, FABRIC_ENV) == []
    assert "was asked for 32768" in serve_problems(healthy(), plan, FABRIC_ENV)[0]


def test_speculative_config_may_be_text() -> None:
    text = '{"method": "mtp", "num_speculative_tokens": 2}'
    plan = PLAN | {"engine_args": ENGINE_ARGS | {"speculative-config": text}}
    assert "speculative_tokens 1 and was asked for 2" in serve_problems(healthy(), plan, FABRIC_ENV)[0]


def test_without_speculative_decoding_nothing_need_be_drafted() -> None:
    plan = copy.deepcopy(PLAN) | {"engine_args": {"tensor-parallel-size": 2}}
    assert serve_problems(healthy() | {"metrics": None}, plan, FABRIC_ENV) == []


def test_problems_of_different_parts_come_together() -> None:
    status = healthy()
    for break_it in (other_index, leaking_driver, shorter_context, nothing_drafted):
        break_it(status)
    assert len(serve_problems(status, PLAN, FABRIC_ENV)) == 4
    assert len(serve_problems(status, WORKER_PLAN, FABRIC_ENV)) == 1


# ---- Without Ray the ranks live in hy3-serve.service

SGLANG_ARGS = {
    "tensor-parallel-size": 2,
    "context-length": 512,
    "moe-runner-backend": "flashinfer_cutlass",
    "speculative-algorithm": "EAGLE",
    "speculative-num-draft-tokens": 2,
}
SGLANG = PLAN | {"engine": "sglang", "executor": "mp", "readback": {}, "engine_args": SGLANG_ARGS}


def sglang() -> Status:
    """A head of SGLang as engine_status returns it, in the parts that count."""
    ranks = [
        process(20, "/opt/hy3/venv/bin/python", dict(FABRIC_ENV)),
        process(21, "sglang::scheduler_TP0", None),
        process(22, "sglang::detokenizer", None),
    ]
    config = {
        "quantization": "modelopt_fp4",
        "moe_backend": "flashinfer_cutlass",
        "max_seq_len": 512,
        "tensor_parallel_size": 2,
        "speculative_method": "EAGLE",
        "speculative_tokens": 2,
    }
    units = {"hy3-serve.service": {"main_pid": 20, "processes": ranks}}
    return {"units": units, "log": {"config": config}, "metrics": None}


def serve_processes(status: Status) -> list[dict[str, t.Any]]:
    return t.cast(list[dict[str, t.Any]], status["units"]["hy3-serve.service"]["processes"])


def test_healthy_sglang() -> None:
    assert serve_problems(sglang(), SGLANG, FABRIC_ENV) == []
    assert serve_problems(sglang() | {"log": None}, SGLANG | {"node": {"is_head": False}}, FABRIC_ENV) == []


def test_one_host_has_all_ranks_and_no_fabric() -> None:
    status = sglang()
    serve_processes(status)[0]["environment"] = {}
    serve_processes(status).append(process(23, "sglang::scheduler_TP1", None))
    assert serve_problems(status, SGLANG | {"hosts": ["box"]}, {}) == []


def serve_not_running(status: Status) -> None:
    serve_processes(status).clear()


def serve_with_another_index(status: Status) -> None:
    serve_processes(status)[0]["environment"]["NCCL_IB_GID_INDEX"] = "3"


def serve_without_index(status: Status) -> None:
    del serve_processes(status)[0]["environment"]["NCCL_IB_GID_INDEX"]


def rank_gone(status: Status) -> None:
    del serve_processes(status)[1]


def other_backend(status: Status) -> None:
    status["log"]["config"]["moe_backend"] = "triton"


SGLANG_PROBLEMS: dict[str, tuple[t.Callable[[Status], None], str]] = {
    "not running": (
        serve_not_running,
        "hy3-serve.service does not run on this node; read `journalctl -u hy3-serve` there.",
    ),
    "another node's index": (
        serve_with_another_index,
        "process 20 (/opt/hy3/venv/bin/python) of hy3-serve.service was started with NCCL_IB_GID_INDEX=3 and this "
        "node's is 6; run stop_hy3 and then serve_hy3.",
    ),
    "without its index": (
        serve_without_index,
        "process 20 of hy3-serve.service was started without NCCL_IB_GID_INDEX, so NCCL chooses by itself; run "
        "stop_hy3 and then serve_hy3.",
    ),
    "a rank gone": (rank_gone, "0 engine ranks run on this node and 1 must; read `journalctl -u hy3-serve` there."),
    "another backend": (
        other_backend,
        "the engine runs with moe_backend 'triton' and was asked for 'flashinfer_cutlass'; read the top of "
        "`journalctl -u hy3-serve` for why it changed it.",
    ),
}


@pytest.mark.parametrize(("break_it", "sentence"), SGLANG_PROBLEMS.values(), ids=SGLANG_PROBLEMS)
def test_one_sentence_about_sglang(break_it: t.Callable[[Status], None], sentence: str) -> None:
    status = sglang()
    break_it(status)
    assert serve_problems(status, SGLANG, FABRIC_ENV) == [sentence]
