# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import copy
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.plan_problems import plan_problems

PLAN: dict[str, t.Any] = {
    "profile": "libertai_nvfp4_tp2",
    "nodes": 2,
    "cluster": "sparks",
    "memory": {"os_reserve": "4G", "head": {"ray": "104G", "serve": "8G"}, "worker": {"ray": "110G"}},
    "hosts": ["spark-1", "spark-2"],
    "engine": "vllm",
    "executor": "ray",
    "speculative": False,
    "engine_args": {"tensor-parallel-size": 2, "pipeline-parallel-size": 1},
    "ray_args": {"object-store-memory": 2000000000},
    "api": {"port": 8000},
    "rank_port": 29501,
    "tie_port": 29490,
    "ray_port": 6379,
    "ray_ports": {"node-manager-port": 6380, "min-worker-port": 10100, "max-worker-port": 10299},
    "ray_head_ports": {"ray-client-server-port": 10001, "autoscaler-metrics-port": 44217},
}
ADDRESSES = {"spark-1": "192.168.100.1", "spark-2": "192.168.100.2"}


def plan_with(changes: dict[str, t.Any]) -> dict[str, t.Any]:
    """The good plan with values replaced by their dotted path."""
    plan = copy.deepcopy(PLAN)
    for path, value in changes.items():
        *parts, last = path.split(".")
        place = plan
        for part in parts:
            place = place[part]
        place[last] = value
    return plan


FITS: dict[str, dict[str, t.Any]] = {
    "the profile": {},
    "pipeline instead": {"engine_args.tensor-parallel-size": 1, "engine_args.pipeline-parallel-size": 2},
    "pipeline left out": {"engine_args": {"tensor-parallel-size": 2}},
    "two GPUs in each node": {"engine_args.tensor-parallel-size": 4, "ray_args.num-gpus": 2},
    "four nodes for a profile of two": {
        "hosts": ["spark-1", "spark-2", "spark-3", "spark-4"],
        "engine_args.tensor-parallel-size": 4,
    },
    "one node with all GPUs": {"hosts": ["spark-1"], "ray_args.num-gpus": 2},
    "a cluster's name with all that it may have": {"cluster": "Rack-2_b.1"},
    "no caps for workers": {"memory": {"os_reserve": "4G", "head": {"ray": "104G"}}},
    "port beside Ray's": {"api.port": 10300},
    "other settings of NCCL": {"engine_env": {"NCCL_DEBUG": "INFO", "NCCL_CROSS_NIC": "0"}},
    "one node without a fabric": {
        "hosts": ["spark-1"],
        "ray_args.num-gpus": 2,
        "fabric": False,
        "engine_env": {"GLOO_SOCKET_IFNAME": "lo"},
    },
    "without Ray": {"executor": "mp"},
    "without Ray, a port of Ray's": {"executor": "mp", "api.port": 6380},
    "one host with all GPUs, without Ray": {"executor": "mp", "hosts": ["spark-1"]},
    "one host with four GPUs, without Ray": {
        "executor": "mp",
        "hosts": ["spark-1"],
        "engine_args.tensor-parallel-size": 4,
    },
    "SGLang": {"engine": "sglang", "executor": "mp"},
    "speculation that the profile knows": {"speculative": True, "speculative_args": {"speculative-algorithm": "EAGLE"}},
}


@pytest.mark.parametrize("changes", FITS.values(), ids=FITS)
def test_fits(changes: dict[str, t.Any]) -> None:
    assert plan_problems(plan_with(changes), ADDRESSES) == []


PROBLEMS: dict[str, tuple[dict[str, t.Any], str]] = {
    "a cluster's name with a space": (
        {"cluster": "my sparks"},
        "hy3_cluster is 'my sparks' (the inventory directory's name if it is not set), and it names files and a "
        "firewall table; use letters, digits, '-', '_' and '.' only.",
    ),
    "a cap that is no dictionary": (
        {"memory.head": "104G"},
        "hy3_memory has head '104G', and it must be a dictionary of caps by unit; write "
        "`head: {ray: 104G}`, for instance.",
    ),
    "a node too few": (
        {"hosts": ["spark-1"]},
        "The inventory has 1 node(s) and profile libertai_nvfp4_tp2 wants 2 (tensor parallel 2); add or remove hosts, "
        "set tensor-parallel-size in hy3_engine_args, or choose another profile.",
    ),
    "nodes too many": (
        {"hosts": ["spark-1", "spark-2", "spark-3", "spark-4"]},
        "The inventory has 4 node(s) and profile libertai_nvfp4_tp2 wants 2 (tensor parallel 2); add or remove hosts, "
        "set tensor-parallel-size in hy3_engine_args, or choose another profile.",
    ),
    "more ranks than GPUs": (
        {"engine_args.tensor-parallel-size": 4},
        "tensor-parallel-size 4 x pipeline-parallel-size 1 needs 4 GPU(s) and 2 node(s) x 1 GPU(s) have 2; correct "
        "hy3_engine_args, or choose another profile.",
    ),
    "both kinds of parallel": (
        {"engine_args.pipeline-parallel-size": 2},
        "tensor-parallel-size 2 x pipeline-parallel-size 2 needs 4 GPU(s) and 2 node(s) x 1 GPU(s) have 2; correct "
        "hy3_engine_args, or choose another profile.",
    ),
    "fewer ranks than GPUs": (
        {"ray_args.num-gpus": 2},
        "tensor-parallel-size 2 x pipeline-parallel-size 1 needs 2 GPU(s) and 2 node(s) x 2 GPU(s) have 4; correct "
        "hy3_engine_args, or choose another profile.",
    ),
    "text": (
        {"engine_args.tensor-parallel-size": "2"},
        "hy3_engine_args has tensor-parallel-size '2', and it must be a whole number above 0; write one, "
        "without quotes.",
    ),
    "truth": (
        {"engine_args.pipeline-parallel-size": True},
        "hy3_engine_args has pipeline-parallel-size True, and it must be a whole number above 0; write one, without "
        "quotes.",
    ),
    "zero": (
        {"engine_args.tensor-parallel-size": 0},
        "hy3_engine_args has tensor-parallel-size 0, and it must be a whole number above 0; write one, without quotes.",
    ),
    "half a GPU": (
        {"ray_args.num-gpus": 0.5},
        "hy3_ray_args has num-gpus 0.5, and it must be a whole number above 0; write one, without quotes.",
    ),
    "no port": (
        {"api.port": 80000},
        "hy3_api_port is 80000, which is no TCP port; choose one from 1024 to 65535.",
    ),
    "a port of Ray's": (
        {"api.port": 6380},
        "hy3_api_port is 6380, which Ray needs for itself; choose another, for instance 8000.",
    ),
    "Ray's head": (
        {"api.port": 6379},
        "hy3_api_port is 6379, which Ray needs for itself; choose another, for instance 8000.",
    ),
    "a port of Ray's workers": (
        {"api.port": 10299},
        "hy3_api_port is 10299, which Ray needs for itself; choose another, for instance 8000.",
    ),
    "the first port of Ray's workers": (
        {"api.port": 10100},
        "hy3_api_port is 10100, which Ray needs for itself; choose another, for instance 8000.",
    ),
    "Ray's clients": (
        {"api.port": 10001},
        "hy3_api_port is 10001, which Ray needs for itself; choose another, for instance 8000.",
    ),
    "Ray's autoscaler": (
        {"api.port": 44217},
        "hy3_api_port is 44217, which Ray needs for itself; choose another, for instance 8000.",
    ),
    "another executor": (
        {"executor": "uni"},
        "hy3_executor is 'uni', and vllm is served with ray or mp only; leave it out.",
    ),
    "Ray for SGLang": (
        {"engine": "sglang", "executor": "ray"},
        "hy3_executor is 'ray', and sglang is served with mp only; leave it out.",
    ),
    "several GPUs in several nodes, without Ray": (
        {"executor": "mp", "engine_args.tensor-parallel-size": 4},
        "tensor-parallel-size 4 x pipeline-parallel-size 1 needs 4 GPU(s) and 2 node(s) x 1 GPU(s) have 2; correct "
        "hy3_engine_args, or choose another profile.",
    ),
    "where the ranks meet": (
        {"executor": "mp", "api.port": 29501},
        "hy3_api_port is 29501, where the ranks meet; choose another, for instance 8000.",
    ),
    "where the ranks say that they are there": (
        {"executor": "mp", "api.port": 29490},
        "hy3_api_port is 29490, where the ranks meet; choose another, for instance 8000.",
    ),
    "what belongs to a node": (
        {"engine_env": {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "rocep1s0f0", "NCCL_IB_GID_INDEX": 3}},
        "hy3_engine_env has NCCL_IB_GID_INDEX=3, NCCL_IB_HCA=rocep1s0f0, and such a value belongs to one node, which "
        "finds its own at each start; take it out, and set hy3_hca or hy3_fabric_interface for a node that is to use "
        "another port.",
    ),
    "speculation that the profile does not know": (
        {"speculative": True},
        "hy3_speculative is true, and profile libertai_nvfp4_tp2 has nothing that it switches on; leave it out (a "
        "profile that speculates by itself says so in its engine_args).",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), PROBLEMS.values(), ids=PROBLEMS)
def test_one_sentence(changes: dict[str, t.Any], sentence: str) -> None:
    assert plan_problems(plan_with(changes), ADDRESSES) == [sentence]


def test_two_nodes_with_one_address() -> None:
    assert plan_problems(PLAN, dict.fromkeys(ADDRESSES, "192.168.100.1")) == [
        "hy3_fabric_address 192.168.100.1 is that of spark-1 and spark-2, and each node has its own; correct the "
        "others."
    ]


def test_problems_of_different_parts_come_together() -> None:
    plan = plan_with({"hosts": ["spark-1"], "api.port": 0, "executor": "uni"})
    assert len(plan_problems(plan, ADDRESSES)) == 3
