# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every rule holds where it must and nowhere else: a healthy pair, the seeds as published, the field cases."""

from __future__ import annotations

import copy
import typing as t
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._rules import IDS, RULES, judge, refuse_unknown_ids
from ansible_collections.sparks.hy3.plugins.module_utils._rules_moe import BACKENDS, NVFP4_BACKENDS
from ansible_collections.sparks.hy3.plugins.module_utils._situation import SEVERITIES
from ansible_collections.sparks.hy3.plugins.module_utils._topology import RING_ENVIRONMENT
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[4]
Facts = dict[str, t.Any]

# Hy3 as LibertAI publishes it, on a Spark that is in order.
SPARK: Facts = {
    "engine": "vllm",
    "version": "0.24.0",
    "packages": {
        **{"vllm": "0.24.0", "torch": "2.11.0", "ray": "2.60.0", "flashinfer-python": "0.6.1", "triton": "3.6.0"},
    },
    "torch_cuda": "13.0",
    "wheel": "aarch64",
    "toolkits": {"torch": "13.0"},
    "arguments": {
        "distributed-executor-backend": "ray",
        "host": "127.0.0.1",
        "tensor-parallel-size": 2,
        "pipeline-parallel-size": 1,
        "moe-backend": "marlin",
        "enforce-eager": True,
        "kv-cache-dtype": "fp8",
        "max-model-len": 163840,
        "gpu-memory-utilization": 0.85,
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 1},
    },
    "environment": {"VLLM_CONFIG_ROOT": "/etc/hy3/vllm", "VLLM_ENGINE_READY_TIMEOUT_S": "3600"},
    "ray_arguments": {"object-store-memory": 2000000000, "node-ip-address": "10.77.0.1"},
    "ray_environment": {
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_AUTH_MODE": "token",
        "VLLM_HOST_IP": "10.77.0.1",
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_IB_GID_INDEX": "3",
    },
    "nodes": 2,
    "patches": ["P1"],
    "processes": [
        {"kind": "raylet", "pid": 9, "user": 1001, "memlock": None, "memory_limit": 1 << 36, "unit": "hy3-ray.service"}
    ],
    "checkpoint": {
        "scheme": "nvfp4",
        "method": "modelopt",
        "block_fp8": False,
        "lm_head_excluded": True,
        "lm_head_plain": True,
        "layer_wildcards": False,
        "missing_keys": [],
        "total_size": 169 * 10**9,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 13312,
        "moe_intermediate_size": 1536,
        "vocab_size": 120832,
        "max_position_embeddings": 262144,
        "mtp_layer": True,
        "mtp_quantized": True,
        "shared_experts_names": False,
        "shared_by_name_only": False,
        "vocab_suffix": ":opensource",
        "token_suffix": ":opensource",
        "top_k": 1,
    },
    "node": {
        "machine": "aarch64",
        "driver": "580.95.05",
        "driver_cuda": "13.0",
        "capability": [12, 1],
        "gpus": 1,
        "remove_ipc": True,
        "user": "hy3",
        "user_exists": True,
        "uid": 1001,
        "linger": True,
        "guards": ["systemd-oomd"],
        "cma_total": 0,
        "cma_free": 0,
        "ptxas": {"path": "", "run": False},
        "carry_over": {"path": "/etc/hy3/vllm/ray_non_carry_over_env_vars.json", "exists": True, "names": ["HF_TOKEN"]},
    },
}
# The same Spark with SGLang as seed 003 runs it, on a version that has its flags.
SGLANG: dict[str, t.Any] = {
    "engine": "sglang",
    "version": "0.5.23",
    "arguments": {
        "tensor-parallel-size": 2,
        "nnodes": 2,
        "dist-init-addr": "10.77.0.1:25000",
        "moe-runner-backend": "flashinfer_cutlass",
        "attention-backend": "triton",
        "tool-call-parser": "hunyuan",
    },
    "environment": {"SGLANG_HOST_IP": "10.77.0.1", "GLOO_SOCKET_IFNAME": "enp1s0f1np1"},
    "patches": ["P4", "P5", "P8"],
}
DRAFT = {"speculative-algorithm": "EAGLE"}
W4A16 = {"scheme": "w4a16", "method": "compressed-tensors"}
REMOVED = object()


def laid(base: t.Mapping[str, t.Any], over: t.Mapping[str, t.Any]) -> Facts:
    """``over`` laid on a copy of ``base`` at every depth; REMOVED takes a key away."""
    merged = copy.deepcopy(dict(base))
    for name, value in over.items():
        if value is REMOVED:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = laid(merged[name], value)
        else:
            merged[name] = value
    return merged


def args(**options: t.Any) -> Facts:
    return {"arguments": {name.replace("_", "-"): value for name, value in options.items()}}


def sglang(over: t.Mapping[str, t.Any]) -> Facts:
    return laid({**SGLANG, "arguments": dict(SGLANG["arguments"])}, over)


def held(facts: Facts) -> list[str]:
    return [finding.rule.id for finding in judge(facts).findings]


def test_a_healthy_spark_has_nothing_but_the_note_of_its_version() -> None:
    verdict = judge(SPARK)
    assert [finding.rule.id for finding in verdict.findings] == ["expert-bias-bf16"]
    assert verdict.unjudged == {}
    assert held(laid(SPARK, {"version": "0.33.0"})) == []


def test_a_healthy_sglang_spark() -> None:
    facts = {**laid(SPARK, {}), **copy.deepcopy(SGLANG)}
    assert judge(facts).findings == []


# Each rule: what breaks it, laid over the healthy Spark. SGLang's own begin with "sglang".
BROKEN: dict[str, list[Facts]] = {
    "vllm-too-old": [{"version": "0.19.1"}],
    "moe-backend-unknown": [
        args(moe_backend="b12x"),
        args(moe_backend="cutlas"),
        args(moe_backend="humming") | {"version": "0.21.0"},
    ],
    "moe-not-for-nvfp4": [
        args(moe_backend="flashinfer_b12x") | {"version": "0.23.0"},
        args(moe_backend="b12x") | {"version": "0.29.0"},
        args(moe_backend="triton"),
        args(moe_backend="deep-gemm"),
    ],
    "moe-family-100": [
        args(moe_backend=name) for name in ("flashinfer_cutedsl", "flashinfer-trtllm", "FlashInfer_TRTLLM")
    ],
    "moe-flashinfer-cutlass": [args(moe_backend="flashinfer_cutlass"), args(moe_backend="cutlass")],
    "moe-auto": [args(moe_backend=REMOVED), args(moe_backend="auto"), args(moe_backend=None)],
    "moe-w4a16-not-marlin": [args(moe_backend="flashinfer_cutlass") | {"checkpoint": W4A16}],
    "moe-b12x-cuda-12": [args(moe_backend="flashinfer_b12x") | {"torch_cuda": "12.9"}],
    "moe-b12x-cutlass-dsl": [args(moe_backend="flashinfer_b12x") | {"packages": {"nvidia-cutlass-dsl": "4.5.2"}}],
    "moe-b12x": [args(moe_backend="b12x") | {"version": "0.30.0"}],
    "moe-marlin-bf16": [{"checkpoint": {"scheme": "none", "method": "none"}}],
    "mtp-marlin-bf16": [{"checkpoint": {"mtp_quantized": False}}],
    "mtp-many-tokens": [
        args(speculative_config={"method": "mtp", "num_speculative_tokens": 2}),
        args(speculative_config='{"method": "hy_v3_mtp", "num_speculative_tokens": 3}'),
    ],
    "mtp-pipeline": [args(pipeline_parallel_size=2)],
    "speculative-not-json": [args(speculative_config="{'method': 'mtp'}")],
    "graphs-marlin-w4a16": [args(enforce_eager=False) | {"version": "0.23.1", "checkpoint": W4A16}],
    "graphs-memory": [
        args(enforce_eager=REMOVED),
        args(enforce_eager=False) | {"version": "0.33.0", "checkpoint": W4A16},
    ],
    "graphs-nccl": [args(enforce_eager=False) | {"packages": {"nvidia-nccl-cu13": "2.28.9"}}],
    "util-over-free": [args(gpu_memory_utilization=0.92), args(gpu_memory_utilization="0.95")],
    "util-not-set": [args(gpu_memory_utilization=REMOVED)],
    "kv-by-hand": [args(kv_cache_memory_bytes=24 << 30)],
    "engine-ready-timeout": [
        {"environment": {"VLLM_ENGINE_READY_TIMEOUT_S": REMOVED}},
        {"environment": {"VLLM_ENGINE_READY_TIMEOUT_S": "600"}},
    ],
    "parser-vllm": [
        args(reasoning_parser="deepseek_r1", tool_call_parser="hy_v3"),
        *(args(tool_call_parser=name) for name in ("hunyuan", "hy-v3", "HY_V3", "hy_v3 ")),
    ],
    "parser-suffix-old": [args(tool_call_parser="hy_v3"), args(reasoning_parser="hy_v3") | {"version": "0.20.0"}],
    "parser-suffix-unsaid": [
        args(tool_call_parser="hy_v3") | {"version": "0.25.0", "checkpoint": {"token_suffix": ""}},
        args(tool_call_parser="hy_v3") | {"version": "0.32.0+cpu", "checkpoint": {"vocab_suffix": ""}},
    ],
    "parser-missing": [args(enable_auto_tool_choice=True)],
    "flashinfer-missing": [{"packages": {"flashinfer-python": REMOVED}}],
    "tp-heads": [args(tensor_parallel_size=3)],
    "tp-kv-heads": [
        args(tensor_parallel_size=3),
        args(tensor_parallel_size=12),
        args(tensor_parallel_size="4") | {"checkpoint": {"num_key_value_heads": 9}},
    ],
    "tp-intermediate": [args(tensor_parallel_size=3)],
    "tp-expert-size": [args(tensor_parallel_size=5)],
    "tp-vocab": [args(tensor_parallel_size=3)],
    "tp-block-fp8": [args(tensor_parallel_size=16) | {"checkpoint": {"block_fp8": True}}],
    "context-too-long": [args(max_model_len=262145)],
    "ignore-without-lm-head": [{"checkpoint": {"lm_head_excluded": False}}],
    "ignore-shared-mlp": [{"checkpoint": {"shared_by_name_only": True}}],
    "mtp-head-quantized": [{"patches": []}, {"patches": [], "version": "0.33.0"}],
    "mtp-no-layer": [{"checkpoint": {"mtp_layer": False}}],
    "config-keys": [{"version": "0.32.0", "checkpoint": {"missing_keys": ["route_norm"]}}],
    "shared-experts-vllm": [{"checkpoint": {"shared_experts_names": True}}],
    "expert-bias-bf16": [{}],
    "executor-not-ray": [
        args(distributed_executor_backend=REMOVED),
        args(distributed_executor_backend="mp"),
        args(distributed_executor_backend="Ray"),
    ],
    "ray-not-installed": [{"packages": {"ray": REMOVED}}],
    "ray-too-old": [{"version": "0.20.2", "packages": {"ray": "2.42.1"}}],
    "ray-plasma-default": [
        {"ray_arguments": {"object-store-memory": REMOVED}},
        {"ray_arguments": {"object-store-memory": "36000000000"}},
    ],
    "ray-memory-monitor": [{"ray_environment": {"RAY_memory_monitor_refresh_ms": name}} for name in (REMOVED, "250")],
    "ray-node-address": [
        *({"ray_arguments": {"node-ip-address": name}} for name in (REMOVED, "spark-1", "192.168.50.20")),
        {"ray_environment": {"VLLM_HOST_IP": REMOVED}},
    ],
    "ray-no-token": [{"ray_environment": {"RAY_AUTH_MODE": REMOVED}}],
    "ray-executor-removed": [{"version": "0.33.0", "environment": {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}}],
    "carry-over-overwrites": [
        {"version": "0.20.2", "environment": {"NCCL_IB_GID_INDEX": "3"}},
        {"environment": {"NCCL_IB_HCA": "=rocep1s0f1", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}},
    ],
    "carry-over-fills": [{"environment": {"NCCL_IB_HCA": "rocep1s0f1"}}],
    "carry-over-malformed": [{"node": {"carry_over": {"names": None}}}],
    "carry-over-stale": [
        {"node": {"carry_over": {"names": ["HF_HUB_OFFLINE"]}}, "environment": {"HF_HUB_OFFLINE": "1"}}
    ],
    "gloo-interface": [
        {"ray_environment": {"GLOO_SOCKET_IFNAME": name}} for name in (REMOVED, "", "=enp1s0f1np1", "^lo")
    ],
    "nccl-without-rdma": [{"ray_environment": {"NCCL_IB_DISABLE": "1"}}],
    "nccl-gid-index-empty": [
        {"ray_environment": {"NCCL_IB_GID_INDEX": value}} for value in ("", "auto", "None", "010")
    ],
    "nccl-gdr-level": [{"ray_environment": {"NCCL_NET_GDR_LEVEL": "5"}}],
    "nccl-timeout": [{"ray_environment": {"NCCL_TIMEOUT": "600"}}],
    "nccl-too-old-for-ring": [{"ray_environment": RING_ENVIRONMENT, "packages": {"nvidia-nccl-cu13": "2.29.7"}}],
    "nccl-preloaded": [{"ray_environment": {"LD_PRELOAD": "/opt/nccl/libnccl.so.2"}}],
    "api-open": [args(host="0.0.0.0"), args(host=REMOVED)],
    "memlock-limited": [{"processes": [{"kind": "raylet", "pid": 7, "memlock": 8388608}]}],
    "cap-not-enforced": [{"processes": [{"kind": "raylet", "pid": 7, "memory_limit": None}]}],
    "session-without-linger": [
        {
            "node": {"linger": False, "uid": 900},
            "processes": [{"kind": "raylet", "unit": "run-1.scope", "user_unit": True}],
        },
        {"node": {"linger": False}, "processes": [{"kind": "driver", "unit": "session-3.scope", "user_unit": False}]},
    ],
    "user-manager": [{"processes": [{"kind": "raylet", "unit": "run-1.scope", "user_unit": True}]}],
    "engine-as-root": [{"processes": [{"kind": "raylet", "pid": 7, "user": 0}]}],
    "several-venvs": [{"processes": [{"venv": "/opt/a"}, {"venv": "/opt/b"}]}],
    "wrong-arch": [{"node": {"machine": "x86_64"}}],
    "wheel-arch": [{"wheel": "x86_64"}],
    "no-gpu": [{"node": {"driver": "", "driver_cuda": "", "capability": []}}],
    "gpus-too-few": [{"nodes": 1}, args(tensor_parallel_size=4)],
    "driver-too-old": [{"node": {"driver": "570.86.10"}}],
    "cpu-torch": [{"torch_cuda": "", "packages": {"torch": "2.13.0+cpu"}}],
    "fp4-without-gpu": [{"node": {"driver": "", "driver_cuda": "", "capability": []}}],
    "cuda-12-build": [{"torch_cuda": "12.9", "toolkits": {"torch": "12.9"}}],
    "toolkit-newer-than-driver": [{"toolkits": {"/usr/local/cuda": "13.2"}}],
    "toolkit-without-sm121": [{"toolkits": {"nvidia-cuda-nvcc-cu12": "12.8.93"}}],
    "arch-list": [{"environment": {"TORCH_CUDA_ARCH_LIST": "9.0;10.0"}}],
    "triton-ptxas": [
        {"packages": {"triton": "3.5.1"}},
        {"packages": {"triton": "3.5.0+git7416ffcb"}, "node": {"ptxas": {"path": "/gone/ptxas", "run": False}}},
    ],
    "remove-ipc": [{"node": {"linger": False}}],
    "no-user": [{"node": {"user_exists": False, "uid": None}}],
    "two-oom-guards": [{"node": {"guards": ["earlyoom", "systemd-oomd"]}}],
    "loader-parallel": [args(load_format="fastsafetensors"), args(load_format="runai_streamer")],
    "kexec-handover": [{"node": {"cma_total": 0, "cma_free": 9742336 * 1024}}],
    "sglang-too-old": [{"version": "0.5.10"}],
    "sglang-removed-flags": [
        args(cuda_graph_max_bs=32),
        args(disable_piecewise_cuda_graph=True) | {"version": "0.5.20"},
    ],
    "sglang-draft-unquant": [args(speculative_draft_model_quantization="unquant")],
    "sglang-family-100": [
        args(fp4_gemm_backend="flashinfer_cutedsl"),
        *(
            args(moe_runner_backend=name)
            for name in ("flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm", "lora_cutedsl")
        ),
    ],
    "sglang-cutlass-runner": [args(moe_runner_backend="cutlass") | {"version": "0.5.14"}],
    "sglang-cutlass-on-cpu": [args(device="cpu")],
    "sglang-attention-flashinfer": [args(attention_backend="flashinfer")],
    "sglang-attention-fa3": [args(attention_backend="fa3"), args(decode_attention_backend="fa3")],
    "sglang-attention-trtllm": [
        args(attention_backend="trtllm_mha") | {"version": "0.5.14"},
        args(prefill_attention_backend="trtllm_mha") | {"version": "0.5.14"},
    ],
    "sglang-one-node": [
        args(nnodes=REMOVED),
        args(nnodes=1),
        args(nnodes=REMOVED, dist_init_addr=REMOVED),
        args(dist_init_addr=REMOVED),
    ],
    "sglang-parser": [
        *(args(tool_call_parser=name) for name in ("hy_v3", "Hunyuan")),
        args(reasoning_parser="auto") | {"version": "0.5.14"},
    ],
    "sglang-parser-suffix": [{"version": "0.5.14"}],
    "sglang-shared-experts": [{"patches": [], "checkpoint": {"shared_experts_names": True}}],
    "sglang-nextn-quantized": [{"arguments": DRAFT, "patches": [], "checkpoint": {"mtp_quantized": False}}],
    "sglang-nextn-norm": [{"arguments": DRAFT, "version": "0.5.15.post1"}],
    "sglang-wildcards": [{"patches": [], "checkpoint": {"layer_wildcards": True}}],
    "sglang-w4a16": [{"version": "0.5.21", "checkpoint": W4A16}],
    "sglang-speculation-loss": [{"arguments": DRAFT}],
    "sglang-host-address": [{"environment": {"SGLANG_HOST_IP": REMOVED}}],
    "sglang-top-k": [{"checkpoint": {"top_k": 0}}],
}
CASES = [(rule, number, over) for rule, overs in BROKEN.items() for number, over in enumerate(overs)]


def broken(rule: str, over: Facts) -> Facts:
    base = {**SPARK, **SGLANG} if rule.startswith("sglang-") else SPARK
    return laid(base, over)


@pytest.mark.parametrize(
    ("rule", "over"), [(rule, over) for rule, _n, over in CASES], ids=[f"{r}-{n}" for r, n, _o in CASES]
)
def test_a_rule_holds(rule: str, over: Facts) -> None:
    assert rule in held(broken(rule, over))


def test_every_rule_is_tried() -> None:
    assert set(BROKEN) == set(IDS)


# What must not hold, by the rule that is near.
FINE: list[tuple[str, str, Facts]] = [
    ("the default loader", "loader-parallel", args(load_format="safetensors")),
    ("marlin is right for W4A16", "moe-w4a16-not-marlin", {"checkpoint": W4A16}),
    ("auto lands on marlin for W4A16", "moe-auto", args(moe_backend="auto") | {"checkpoint": W4A16}),
    (
        "cutedsl on a datacenter chip",
        "moe-family-100",
        args(moe_backend="flashinfer_cutedsl") | {"node": {"capability": [10, 0]}},
    ),
    (
        "the drafter has its own backend",
        "mtp-marlin-bf16",
        args(speculative_config={"moe_backend": "triton"}) | {"checkpoint": {"mtp_quantized": False}},
    ),
    (
        "cutlass-dsl 4.6 is another compiler",
        "moe-b12x-cutlass-dsl",
        args(moe_backend="flashinfer_b12x") | {"packages": {"nvidia-cutlass-dsl": "4.6.0"}},
    ),
    (
        "graphs on a later version are disputed",
        "graphs-marlin-w4a16",
        args(enforce_eager=False) | {"checkpoint": W4A16},
    ),
    ("four GPUs in one host", "gpus-too-few", args(tensor_parallel_size=4) | {"nodes": 1, "node": {"gpus": 4}}),
    ("0.90 is what the forum runs", "util-over-free", args(gpu_memory_utilization=0.9)),
    ("0.92 elsewhere", "util-over-free", args(gpu_memory_utilization=0.92) | {"node": {"capability": [9, 0]}}),
    ("before ModelOpt quantized heads", "mtp-head-quantized", {"version": "0.22.1", "patches": []}),
    ("compressed-tensors does not match an empty prefix", "mtp-head-quantized", {"patches": [], "checkpoint": W4A16}),
    ("fixed in 0.29", "ignore-shared-mlp", {"version": "0.29.0", "checkpoint": {"shared_by_name_only": True}}),
    ("0.25 reads the suffix", "parser-suffix-old", args(tool_call_parser="hy_v3") | {"version": "0.25.0"}),
    ("the patch knows the suffix", "parser-suffix-old", args(tool_call_parser="hy_v3") | {"patches": ["P1", "P2"]}),
    (
        "a preview checkpoint",
        "parser-suffix-old",
        args(tool_call_parser="hy_v3") | {"checkpoint": {"vocab_suffix": "", "token_suffix": ""}},
    ),
    ("mp over nodes", "executor-not-ray", args(distributed_executor_backend="mp", nnodes=2)),
    ("one node", "executor-not-ray", args(distributed_executor_backend=REMOVED) | {"nodes": 1}),
    ("V2 keeps the node's own value", "carry-over-fills", {"environment": {"NCCL_IB_GID_INDEX": "6"}}),
    (
        "the file withholds it",
        "carry-over-overwrites",
        {
            "version": "0.20.2",
            "environment": {"NCCL_IB_GID_INDEX": "3"},
            "node": {"carry_over": {"names": ["NCCL_IB_GID_INDEX"]}},
        },
    ),
    (
        "the first executor does not copy Gloo's",
        "carry-over-overwrites",
        {"version": "0.20.2", "environment": {"GLOO_SOCKET_IFNAME": "x"}},
    ),
    ("0.21 has V2", "carry-over-overwrites", {"version": "0.21.0", "environment": {"NCCL_IB_GID_INDEX": "3"}}),
    (
        "nothing is quantized",
        "mtp-marlin-bf16",
        {"checkpoint": {"scheme": "none", "method": "none", "mtp_quantized": False}},
    ),
    ("a key", "api-open", args(host="0.0.0.0", api_key="********")),
    ("a system user keeps its IPC objects", "remove-ipc", {"node": {"linger": False, "uid": 900}}),
    (
        "the system's ptxas",
        "triton-ptxas",
        {"packages": {"triton": "3.5.1"}, "node": {"ptxas": {"path": "/usr/local/cuda/bin/ptxas", "run": True}}},
    ),
    ("a ptxas for Blackwell", "triton-ptxas", {"packages": {"triton": "3.6.0"}}),
    ("no Triton", "triton-ptxas", {"packages": {"triton": REMOVED}}),
    ("another GPU", "triton-ptxas", {"packages": {"triton": "3.5.1"}, "node": {"capability": [9, 0]}}),
    ("several interfaces", "gloo-interface", {"ray_environment": {"GLOO_SOCKET_IFNAME": "enp1s0f1np1,enP7s7"}}),
    ("one node needs no Gloo", "gloo-interface", {"nodes": 1, "ray_environment": {"GLOO_SOCKET_IFNAME": "=x"}}),
    ("no parser", "parser-vllm", args(tool_call_parser="")),
    ("one guard", "two-oom-guards", {"node": {"guards": ["earlyoom"]}}),
    (
        "a newer driver's CUDA",
        "toolkit-newer-than-driver",
        {"toolkits": {"torch": "13.2"}, "node": {"driver_cuda": "13.2"}},
    ),
    ("padded for three", "tp-heads", args(tensor_parallel_size=3) | {"checkpoint": {"num_attention_heads": 72}}),
    (
        "a ring with a newer NCCL",
        "nccl-too-old-for-ring",
        {"ray_environment": RING_ENVIRONMENT, "packages": {"nvidia-nccl-cu13": "2.30.7"}},
    ),
    (
        "an NCCL of one's own",
        "nccl-too-old-for-ring",
        {
            "ray_environment": RING_ENVIRONMENT | {"VLLM_NCCL_SO_PATH": "/opt/nccl/libnccl.so.2"},
            "packages": {"nvidia-nccl-cu13": "2.29.7"},
        },
    ),
    ("no ring", "nccl-too-old-for-ring", {"packages": {"nvidia-nccl-cu13": "2.29.7"}}),
    ("the vocabulary patch", "tp-vocab", args(tensor_parallel_size=3) | {"patches": ["P3"]}),
]


@pytest.mark.parametrize(("rule", "over"), [row[1:] for row in FINE], ids=[row[0] for row in FINE])
def test_a_rule_does_not_hold(rule: str, over: Facts) -> None:
    verdict = judge(laid(SPARK, over))
    assert rule not in [finding.rule.id for finding in verdict.findings]
    assert rule not in verdict.unjudged


SGLANG_FINE: list[tuple[str, str, Facts]] = [
    ("flashinfer_cutlass", "sglang-family-100", {}),
    ("marlin", "sglang-family-100", args(moe_runner_backend="marlin", fp4_gemm_backend="flashinfer_cudnn")),
    (
        "cutedsl on a datacenter chip",
        "sglang-family-100",
        args(moe_runner_backend="flashinfer_cutedsl") | {"node": {"capability": [10, 0]}},
    ),
    ("fa3 on Hopper", "sglang-attention-fa3", args(attention_backend="fa3") | {"node": {"capability": [9, 0]}}),
    ("triton", "sglang-attention-fa3", {}),
    ("a later trtllm_mha", "sglang-attention-trtllm", args(attention_backend="trtllm_mha")),
    (
        "trtllm_mha for the decoding only",
        "sglang-attention-trtllm",
        args(decode_attention_backend="trtllm_mha") | {"version": "0.5.14"},
    ),
    ("one node with all ranks", "sglang-one-node", args(nnodes=REMOVED, dist_init_addr=REMOVED) | {"nodes": 1}),
    ("a rank of its own on each", "sglang-one-node", args(nnodes=REMOVED, tensor_parallel_size=1)),
    ("the older name", "sglang-one-node", args(dist_init_addr=REMOVED, nccl_init_addr="10.77.0.1:25000")),
    ("both parsers", "sglang-parser", args(reasoning_parser="hunyuan")),
    ("auto finds it", "sglang-parser", args(reasoning_parser="auto", tool_call_parser="auto")),
]


@pytest.mark.parametrize(("rule", "over"), [row[1:] for row in SGLANG_FINE], ids=[row[0] for row in SGLANG_FINE])
def test_a_rule_of_sglang_does_not_hold(rule: str, over: Facts) -> None:
    verdict = judge(laid({**SPARK, **SGLANG}, over))
    assert rule not in [finding.rule.id for finding in verdict.findings]
    assert rule not in verdict.unjudged


def test_what_auto_finds_in_between_is_not_known() -> None:
    facts = laid({**SPARK, **SGLANG}, args(reasoning_parser="auto") | {"version": "0.5.18"})
    assert "sglang-parser" in judge(facts).unjudged


# ---- The seeds as published


SEEDS: list[tuple[str, Facts, set[str]]] = [
    (
        "000: the fabric variables of the driver are the raylet's, too, so V2 keeps each node's own",
        {
            "environment": {
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_IB_HCA": "rocep1s0f1",
                "VLLM_ENGINE_READY_TIMEOUT_S": REMOVED,
            },
            "ray_environment": {"NCCL_IB_HCA": "rocep1s0f1", "RAY_AUTH_MODE": REMOVED},
            **args(host="0.0.0.0"),
        },
        set(),
    ),
    (
        "001: W4A16 on 0.23.1 with parsers on and without their patch",
        {
            "version": "0.23.1",
            "checkpoint": W4A16,
            **args(gpu_memory_utilization=0.90, max_model_len=131072, tool_call_parser="hy_v3"),
        },
        {"parser-suffix-old"},
    ),
    (
        "002: 72/9 heads at TP 3 with the vocabulary patch",
        {
            "version": "0.26.0",
            "nodes": 3,
            "patches": ["P1", "P3"],
            "checkpoint": {"num_attention_heads": 72, "num_key_value_heads": 9, "intermediate_size": 13824},
            **args(tensor_parallel_size=3),
        },
        set(),
    ),
    (
        "002: the same at TP 2, as its card says",
        {
            "version": "0.26.0",
            "checkpoint": {"num_attention_heads": 72, "num_key_value_heads": 9, "intermediate_size": 13824},
        },
        {"tp-kv-heads"},
    ),
    (
        "002: and at TP 4",
        {
            "version": "0.26.0",
            "nodes": 4,
            "checkpoint": {"num_attention_heads": 72, "num_key_value_heads": 9, "intermediate_size": 13824},
            **args(tensor_parallel_size=4),
        },
        {"tp-kv-heads"},
    ),
    (
        "003: SGLang 0.5.14 without its patches",
        {
            **SGLANG,
            "version": "0.5.14",
            "nodes": 4,
            "patches": [],
            "arguments": {
                **SGLANG["arguments"],
                **DRAFT,
                "tensor-parallel-size": 4,
                "nnodes": 4,
                "cuda-graph-max-bs": 32,
                "disable-piecewise-cuda-graph": True,
            },
            "checkpoint": {"shared_experts_names": True, "mtp_quantized": False, "vocab_suffix": ""},
        },
        {"sglang-shared-experts", "sglang-nextn-quantized"},
    ),
]


@pytest.mark.parametrize(("over", "errors"), [row[1:] for row in SEEDS], ids=[row[0] for row in SEEDS])
def test_seeds(over: Facts, errors: set[str]) -> None:
    findings = judge(laid(SPARK, over)).findings
    assert {finding.rule.id for finding in findings if finding.rule.severity == "error"} == errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_padded_checkpoint_is_refused_with_the_way_out(ranks: int) -> None:
    """The numbers of seed 002, whose card says that 72/9 heads run at both."""
    facts = laid(SPARK, args(tensor_parallel_size=ranks) | {"checkpoint": {"num_key_value_heads": 9}})
    assert [sentence for sentence in judge(facts).sentences("error") if "kv" in sentence] == [
        f"num_key_value_heads is 9 at tensor-parallel-size {ranks}, and KV heads are split evenly, or copied evenly "
        "when there are more ranks (a checkpoint padded to 72/9 heads runs at 3, and not at 2 or 4 as its card says); "
        "serve a padded checkpoint with the ranks that it is padded for, and the original with 1, 2, 4 or 8 "
        "(rule tp-kv-heads; hy3_allow can accept it)."
    ]


# RedHatAI's checkpoint, and the same padded for three ranks: compressed-tensors with a BF16 MTP layer.
MIXED = {"method": "compressed-tensors", "scheme": "nvfp4", "mtp_quantized": False, "total_size": 178 * 10**9}
PADDED = MIXED | {"num_attention_heads": 72, "num_key_value_heads": 9, "intermediate_size": 13344}
RING = {
    "nodes": 3,
    "packages": {"nvidia-nccl-cu13": "2.30.7"},
    "ray_environment": RING_ENVIRONMENT | {"NCCL_IB_GID_INDEX": REMOVED},
}
# Layer 80 is BF16, and shared experts are named as transformers names them.
EXPORTED = {"mtp_quantized": False, "shared_experts_names": True}
FOUR = {"engine": "sglang", "nodes": 4, "environment": SGLANG["environment"], "checkpoint": EXPORTED}
INTENDED = {
    "vroomfondel_w4a4_tp4": [
        {**FOUR, "version": "0.5.23"},
        {**FOUR, "version": "0.5.23", "arguments": DRAFT},
    ],
    "kodelow_w4a16_tp2": [
        {"version": version, "checkpoint": W4A16} for version in ("0.23.0", "0.24.0", "0.25.1", "0.33.0")
    ],
    "marianbusoi_nvfp4_fp8_tp3": [{**RING, "version": "0.33.0", "checkpoint": PADDED}],
    "redhatai_nvfp4_fp8_tp2": [
        {"version": version, "checkpoint": MIXED, **ranks}
        for version in ("0.26.0", "0.33.0")
        for ranks in ({}, {"nodes": 4, **args(tensor_parallel_size=4)})
    ],
    "libertai_nvfp4_tp2": [{"version": version} for version in ("0.23.0", "0.24.0", "0.28.0", "0.33.0")],
    "tiny_lab": [
        {
            "version": "0.32.0+cpu",
            "torch_cuda": "",
            "toolkits": {},
            "wheel": "x86_64",
            "packages": {"flashinfer-python": REMOVED, "torch": "2.13.0+cpu"},
            "checkpoint": {
                **{"scheme": "none", "method": "none", "lm_head_excluded": False, "mtp_quantized": False},
                **{"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 448},
                **{"moe_intermediate_size": 256, "num_hidden_layers": 3, "total_size": 10**7},
                **{"vocab_suffix": None, "token_suffix": ""},
            },
            "node": {"machine": "x86_64", "driver": "", "driver_cuda": "", "capability": []},
            "processes": [{"kind": "raylet", "pid": 7, "memlock": 8388608, "memory_limit": None}],
        }
    ],
}
INTENDED["tiny_lab_tp1"] = [{**INTENDED["tiny_lab"][0], "nodes": 1}]
PADDED = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 1056, "moe_intermediate_size": 288}
INTENDED["tiny_lab_tp3"] = [
    {**lab, "nodes": 3, "checkpoint": {**lab["checkpoint"], **PADDED}} for lab in INTENDED["tiny_lab"]
]
INTENDED["tiny_lab_sglang"] = [
    {
        **{"engine": "sglang", "version": "0.5.23", "nodes": 2, "environment": SGLANG["environment"]},
        **{key: value for key, value in INTENDED["tiny_lab"][0].items() if key != "version"},
        "packages": {"torch": "2.13.0+cpu"},
        "checkpoint": {
            **{**INTENDED["tiny_lab"][0]["checkpoint"], "scheme": "nvfp4", "method": "modelopt"},
            **{"lm_head_excluded": True, "shared_experts_names": True, "layer_wildcards": True},
        },
        "patches": ["P4", "P5", "P8"],  # as read from the checkpoint
    }
]
PROFILES = sorted((ROOT / "roles/profile/files/profiles").glob("*.yml"))


def test_every_profile_has_an_intended_engine() -> None:
    assert {path.stem for path in PROFILES} == set(INTENDED)


@pytest.mark.parametrize("name", INTENDED)
def test_profiles_pass_on_their_engines(name: str) -> None:
    profile = yaml.safe_load((ROOT / f"roles/profile/files/profiles/{name}.yml").read_text())
    lab = yaml.safe_load((ROOT / "inventories/lab/group_vars/sparks.yml").read_text())
    if name == "tiny_lab_sglang":
        lab |= yaml.safe_load((ROOT / "inventories/lab-sglang/group_vars/sparks/2-sglang.yml").read_text())
    # As role sglang_serve starts it.
    meeting = {"nnodes": 4, "dist-init-addr": "10.77.0.1:25000"} if profile["executor"] == "mp" else {}
    plan = {
        "arguments": {
            "distributed-executor-backend": profile["executor"],
            "host": "127.0.0.1",
            **meeting,
            **profile["engine_args"],
        },
        "environment": profile["engine_env"],
        "patches": profile["patches"],
    }
    pins = dict(pin.split("==") for pin in profile.get("packages", []))
    assert pins.get("vllm") in [None, *(over.get("version") for over in INTENDED[name])]
    for over in INTENDED[name]:
        facts = laid({**SPARK, **plan}, over) | {
            "ray_arguments": profile["ray_args"] | {"node-ip-address": "10.77.0.1"}
        }
        verdict = judge(facts, allow=lab["hy3_allow"] if name.startswith("tiny") else [])
        assert verdict.sentences("error") == []
        assert name.startswith("tiny") or verdict.sentences("warning") == []


# ---- Field cases

HY3 = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 13312}
TP = {"tp-heads", "tp-kv-heads", "tp-intermediate", "tp-vocab", "tp-expert-size", "tp-block-fp8"}

# (id and what of it, facts, rules that matter, those of them that hold)
FIELD: list[tuple[str, Facts, set[str], set[str]]] = [
    (
        "B27 first executor",
        {
            "version": "0.20.0",
            "environment": {
                "NCCL_IB_GID_INDEX": "3",
                "NCCL_IB_HCA": "=rocep1s0f1",
                "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
                "VLLM_HOST_IP": "10.77.0.1",
            },
            "ray_environment": {"NCCL_IB_GID_INDEX": "6", "NCCL_IB_HCA": "=rocep1s0f0"},
        },
        {"carry-over-overwrites", "carry-over-fills"},
        {"carry-over-overwrites"},
    ),
    (
        "B27 with the file that it expects",
        {
            "version": "0.20.0",
            "environment": {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_HCA": "=rocep1s0f1"},
            "node": {
                "carry_over": {"names": ["NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"]}
            },
        },
        {"carry-over-overwrites", "carry-over-stale"},
        set(),
    ),
    ("B27 malformed", {"node": {"carry_over": {"names": None}}}, {"carry-over-malformed"}, {"carry-over-malformed"}),
    (
        "B28 LAN address",
        {"ray_arguments": {"node-ip-address": "192.168.50.20"}},
        {"ray-node-address"},
        {"ray-node-address"},
    ),
    (
        "B30 no variable",
        {"ray_environment": {"RAY_memory_monitor_refresh_ms": REMOVED}},
        {"ray-memory-monitor"},
        {"ray-memory-monitor"},
    ),
    (
        "B33 raylet",
        {"processes": [{"kind": "raylet", "pid": 1, "memlock": 8388608}]},
        {"memlock-limited"},
        {"memlock-limited"},
    ),
    (
        "B34 KHO",
        {"node": {"cma_total": 0, "cma_free": 9742336 * 1024}, "processes": [{"kind": "raylet", "memlock": None}]},
        {"kexec-handover", "memlock-limited"},
        {"kexec-handover"},
    ),
    *(
        (f"B84 {backend}", args(moe_backend=backend), {rule.id for rule in RULES if rule.id.startswith("moe-")}, rules)
        for backend, rules in {
            "marlin": set(),
            "flashinfer_cutlass": {"moe-flashinfer-cutlass"},
            "flashinfer_cutedsl": {"moe-family-100"},
            "flashinfer_trtllm": {"moe-family-100"},
            "flashinfer_b12x": {"moe-b12x"},
        }.items()
    ),
    ("B85 no layer 80", {"checkpoint": {"mtp_layer": False}}, {"mtp-no-layer"}, {"mtp-no-layer"}),
    *(
        (
            f"B87 TP {ranks}",
            args(tensor_parallel_size=ranks) | {"checkpoint": {**HY3, "block_fp8": ranks == 16}},
            TP,
            rules,
        )
        for ranks, rules in {
            1: set(),
            2: set(),
            3: {"tp-heads", "tp-kv-heads", "tp-intermediate", "tp-vocab"},
            4: set(),
            8: set(),
            16: {"tp-block-fp8"},
        }.items()
    ),
    *(
        (
            f"B88 {name}",
            args(reasoning_parser="hy_v3", tool_call_parser="hy_v3")
            | {"version": version, "checkpoint": {"vocab_suffix": vocab, "token_suffix": said}},
            {"parser-suffix-old", "parser-suffix-unsaid"},
            rules,
        )
        for name, version, vocab, said, rules in (
            ("no patch", "0.25.0", ":opensource", ":opensource", set()),
            ("patch", "0.24.0", ":opensource", ":opensource", {"parser-suffix-old"}),
            ("preview", "0.24.0", "", "", set()),
            ("no token_suffix", "0.25.0", ":opensource", "", {"parser-suffix-unsaid"}),
        )
    ),
    (
        "B90 mixed names",
        {**SGLANG, "patches": [], "checkpoint": {"shared_experts_names": True}},
        {"sglang-shared-experts"},
        {"sglang-shared-experts"},
    ),
    (
        "B91 two patches",
        {
            **SGLANG,
            "patches": [],
            "arguments": {**SGLANG["arguments"], **DRAFT},
            "checkpoint": {"mtp_quantized": False},
        },
        {"sglang-nextn-quantized", "sglang-nextn-norm"},
        {"sglang-nextn-quantized"},
    ),
    (
        "B93 no SGLANG_HOST_IP",
        {**SGLANG, "environment": {"NCCL_SOCKET_IFNAME": "x", "GLOO_SOCKET_IFNAME": "x"}},
        {"sglang-host-address"},
        {"sglang-host-address"},
    ),
    *(
        (f"B123 {name}", args(speculative_config=value), {"speculative-not-json"}, rules)
        for name, value, rules in (
            ("dictionary", {"method": "mtp", "num_speculative_tokens": 1}, set()),
            ("JSON", '{"method": "mtp", "num_speculative_tokens": 1}', set()),
            ("repr", "{'method': 'mtp'}", {"speculative-not-json"}),
        )
    ),
    *(
        (
            f"B128 {toolkit}",
            {"toolkits": {"torch": REMOVED, "nvcc": toolkit}},
            {"toolkit-newer-than-driver", "toolkit-without-sm121"},
            rules,
        )
        for toolkit, rules in {
            "13.0": set(),
            "13.1": {"toolkit-newer-than-driver"},
            "12.9": set(),
            "12.8": {"toolkit-without-sm121"},
        }.items()
    ),
    (
        "B128 Triton's own ptxas",
        {"packages": {"triton": "3.5.1"}},
        {"triton-ptxas"},
        {"triton-ptxas"},
    ),
]
NOT_OURS = {
    "B31": "a log of a start, read by _engine_log",
    "B94": "free memory is no setting: a floor and the nodes against one another, in test__budget",
    "B122": "no unit of a user manager is used: hy3-ray and hy3-serve are system units with User=",
    "B125": "become and pipelining of the controller, before any module runs",
    "B126": "environment files are written by the roles and read by nobody else",
}


@pytest.mark.parametrize(("over", "rules", "expected"), [row[1:] for row in FIELD], ids=[row[0] for row in FIELD])
def test_field_cases(over: Facts, rules: set[str], expected: set[str]) -> None:
    facts = laid(SPARK, over)
    if "arguments" in over and over.get("engine") == "sglang":
        facts["arguments"] = over["arguments"]
    assert set(held(facts)) & rules == expected


def test_every_field_case_of_these_areas_is_tried() -> None:
    areas = {
        f"B{number}" for number in (27, 28, 30, 31, 33, 34, 84, 85, 87, 88, 90, 91, 93, 94, 122, 123, 125, 126, 128)
    }
    assert {row[0].split()[0] for row in FIELD} | set(NOT_OURS) == areas


# ---- Rules as data


def test_ids_are_unique_and_can_be_written() -> None:
    assert len(set(IDS)) == len(IDS)
    assert [rule for rule in IDS if not rule.replace("-", "").isalnum() or rule != rule.lower()] == []


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_a_rule_can_be_read(rule: t.Any) -> None:
    assert rule.severity in SEVERITIES
    assert all(text and text == text.strip() for text in (rule.about, rule.what, rule.fix, rule.source))
    assert not rule.what.endswith(".")
    assert not rule.fix.endswith(".")
    assert rule.what[0].islower() or not rule.what.split()[0].isalpha() or rule.what.split()[0] in NAMES


NAMES = {"HYV3ForCausalLM", "HYV3MTP", "CUDA", "NCCL", "NVFP4", "KV", "RDMA", "Ray", "Gloo", "SGLang", "Hy3"}


def test_the_sentence_has_value_rule_and_way_out() -> None:
    [sentence] = judge(laid(SPARK, args(gpu_memory_utilization=0.92))).sentences("error")
    assert sentence == (
        "gpu-memory-utilization is 0.92, and a GB10 has about 111.4 of its 121.69 GiB free after boot, so vLLM's own "
        "check refuses to start; set gpu-memory-utilization to 0.90 or less (rule util-over-free; hy3_allow can accept "
        "it)."
    )


def test_an_allowed_rule_is_found_and_no_problem() -> None:
    verdict = judge(laid(SPARK, args(gpu_memory_utilization=0.92)), allow=["util-over-free"])
    assert [finding.rule.id for finding in verdict.findings if finding.allowed] == ["util-over-free"]
    assert verdict.sentences("error") == []


def test_an_unknown_id_is_refused_with_the_nearest() -> None:
    refuse_unknown_ids(IDS)
    with pytest.raises(Hy3Error, match="'mtp-many-token'.*write mtp-many-tokens"):
        refuse_unknown_ids(["mtp-many-token"])
    with pytest.raises(Hy3Error, match=r"'xyzzy'.*take it out"):
        refuse_unknown_ids(["xyzzy"])


def test_what_is_not_known_is_not_passed() -> None:
    verdict = judge({"engine": "vllm"})
    assert verdict.findings == []
    assert {
        "util-over-free": "arguments",
        "driver-too-old": "node",
        "tp-heads": "checkpoint",
    }.items() <= verdict.unjudged.items()
    assert set(verdict.unjudged) == {rule.id for rule in RULES if rule.engine != "sglang"}


def test_a_file_of_arguments_is_not_known() -> None:
    verdict = judge(laid(SPARK, args(config="/etc/vllm.yml", moe_backend=REMOVED)))
    assert "moe-backend, which may stand in the file of --config" in verdict.unjudged["moe-auto"]


def test_one_false_part_settles_a_rule() -> None:
    """A worker without its copy of the checkpoint still knows that these do not hold."""
    unjudged = judge(laid(SPARK, {"checkpoint": None})).unjudged
    assert {"moe-not-for-nvfp4", "moe-auto", "graphs-memory", "cuda-12-build"} & set(unjudged) == set()


def test_backends_are_read_as_vllm_spells_them() -> None:
    assert all(name == name.lower().replace("-", "_") for name in BACKENDS)
    assert NVFP4_BACKENDS.keys() <= BACKENDS.keys()


# ---- Any facts

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["ray", "marlin", "0.24.0", "{}", "[]", "12.1", "auto"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(facts: t.Mapping[str, t.Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in facts.items():
        found.append((*above, name))
        if isinstance(value, dict):
            found += paths(value, (*above, name))
    return found


@pytest.mark.parametrize("base", [SPARK, {**SPARK, **SGLANG}], ids=["vllm", "sglang"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_facts_give_a_verdict(base: Facts, data: st.DataObject) -> None:
    facts = copy.deepcopy(base)
    for path in data.draw(st.lists(st.sampled_from(paths(facts)), max_size=6)):
        place: t.Any = facts
        for name in path[:-1]:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[path[-1]] = data.draw(VALUES)
    verdict = judge(facts)
    assert {finding.rule.id for finding in verdict.findings} & set(verdict.unjudged) == set()
