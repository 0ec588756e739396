# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import RULES, find_failure
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines

SHAPES = "RuntimeError: The size of tensor a (2048) must match the size of tensor b (4096) at non-singleton dimension 1"

# (id, log, words of the cause, words of the way out)
TEST_FATAL: list[tuple[str, str, str, str]] = [
    ("p1-drafter-load", f"Loading drafter model...\n{SHAPES}", "MTP head", "patch P1"),
    ("shapes-in-the-target", f"Starting to load model /ck...\n{SHAPES}", "lacks lm_head", "P1 cannot cure"),
    (
        "free-memory",
        "ValueError: Free memory on device cuda:0 (8.88/121.69 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 111.95 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "Only 8.88 of 121.69 GiB are free on a node, and gpu_memory_utilization asks for 111.95 GiB",
        "below 8.88/121.69",
    ),
    (
        "free-memory-cpu",
        "ValueError: Available memory on node 0 (3.1/24.0 GiB) on startup is less than desired CPU memory utilization "
        "(0.92, 22.1 GiB).",
        "Only 3.1 of 24.0 GiB",
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    ("kv-negative", "Available KV cache memory: -1.75 GiB", "no memory for the KV pool", "Free memory"),
    (
        "kv-none",
        "ValueError: No available memory for the cache blocks. Try",
        "no memory for the KV pool",
        "Free memory",
    ),
    (
        "kv-with-estimate",
        "To serve at least one request with the models's max seq len (262144), (20.0 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (7.5 GiB). Based on the available memory, the estimated maximum "
        "model length is 98304.",
        "One request of 262144 tokens needs 20.0 GiB of KV cache and 7.5 GiB are left",
        "at most 98304",
    ),
    (
        "kv-without-estimate",
        "To serve at least one request with the model's max seq len (262144), (20.0 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.01 GiB). Try increasing `gpu_memory_utilization`",
        "0.01 GiB are left",
        "Lower max_model_len",
    ),
    (
        "kv-tokens",
        "The model's max seq len (8192) is larger than the maximum number of tokens that can be stored in KV "
        "cache (5120)",
        "holds 5120 tokens",
        "at most 5120",
    ),
    ("no-kernel", "CUDA error: cudaErrorNoKernelImageForDevice", "sm_121", "marlin"),
    (
        "ptxas",
        "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
        "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
        "does not know sm_121a",
        "TRITON_PTXAS_PATH",
    ),
    ("ptxas-blackwell", "ptxas-blackwell fatal : Value 'sm_107a' is not defined for option", "sm_107a", "Triton 3.6"),
    ("ptx", "torch.AcceleratorError: cudaErrorUnsupportedPtxVersion", "newer than the driver", "CUDA 13.0"),
    (
        "flashinfer-refused",
        "ValueError: NvFp4 MoE backend 'FLASHINFER_CUTEDSL' does not support the deployment configuration since kernel "
        "does not support current device cuda.",
        "FLASHINFER_CUTEDSL",
        "marlin",
    ),
    ("b12x", "ValueError: b12x fused MoE requires CUDA 13 or later", "b12x", "marlin"),
    (
        "marlin-on-a-bf16-drafter",
        "ValueError: moe_backend='marlin' is not supported for unquantized MoE. Expected one of ['triton'].",
        "marlin was applied",
        '{"method": "mtp", "num_speculative_tokens": 1, "moe_backend": "triton"}',
    ),
    (
        "gloo-loopback",
        "RuntimeError: Gloo connectFullMesh failed with Connection refused, remote=[127.0.0.1]:41000",
        "127.0.0.1",
        "GLOO_SOCKET_IFNAME",
    ),
    ("cancelled", "RuntimeError: cancelled", "lost a worker", "memory"),
    (
        "nccl",
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)",
        "RDMA",
        "NCCL_IB_GID_INDEX",
    ),
    (
        "placement-group",
        "ValueError: Cannot provide a placement group requiring 2.0 GPUs (placement_group_specs=[]) within 1800 "
        "seconds.",
        "fewer GPUs",
        "joined",
    ),
    (
        "heads",
        "Value error, Total number of attention heads (64) must be divisible by tensor parallel size (3).",
        "64 attention heads cannot be divided by 3",
        "padded for 3",
    ),
    ("vocabulary", "AssertionError: 120832 is not divisible by 3", "120832", "patch P3"),
    ("port", "OSError: [Errno 98] Address already in use", "port is taken", "hy3_api_port"),
    (
        "reasoning-parser",
        "RuntimeError: HYV3ReasoningParser reasoning parser could not locate think start/end tokens in the tokenizer!",
        "not in the tokenizer",
        "token_suffix",
    ),
    (
        "tool-parser",
        "RuntimeError: HYV3 Tool parser could not locate tool call start/end tokens in the tokenizer!",
        "not in the tokenizer",
        "P2",
    ),
    (
        "shared-experts",
        "KeyError: 'layers.1.mlp.shared_experts.down_proj.weight'",
        "layers.1.mlp.shared_experts.down_proj.weight",
        "rename",
    ),
    (
        "hidden-import-error",
        "Ignore import error when loading sglang.srt.models.hunyuan_v3: invalid syntax",
        "invalid syntax",
        "Revert the patches",
    ),
    (
        "old-engine",
        "Model architectures ['HYV3ForCausalLM'] are not supported for now. Supported architectures: []",
        "does not know Hy3",
        "0.20.0",
    ),
    ("flashinfer-missing", "ModuleNotFoundError: No module named 'flashinfer'", "flashinfer", "FLASHINFER_SAMPLER=0"),
    ("out-of-memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "ran out", "max_model_len"),
    ("ray-gone", "ConnectionError: Could not find any running Ray instance.", "Ray cluster", "hy3-ray.service"),
    (
        "generic",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "names no reason",
        "first error",
    ),
]


@pytest.mark.parametrize(("log", "cause", "fix"), [row[1:] for row in TEST_FATAL], ids=[row[0] for row in TEST_FATAL])
def test_fatal_while_the_unit_still_runs(log: str, cause: str, fix: str) -> None:
    failure = find_failure(clean_lines(log), stopped=False)
    assert failure is not None
    assert failure["fatal"]
    assert cause in failure["cause"]
    assert fix in failure["fix"]


def test_every_fatal_rule_has_a_case() -> None:
    logs = [clean_lines(row[1])[-1] for row in TEST_FATAL]
    assert [rule.pattern.pattern for rule in RULES if rule.fatal and not any(map(rule.pattern.search, logs))] == [
        # Only ever seen as an echo of another failure; see test_root_cause.
        r"Connection closed by (?:remote )?peer|ActorDiedError|EngineDeadError|EngineCore died"
    ]


# (id, log, words of the line that must be chosen)
TEST_ROOT_CAUSE: list[tuple[str, str, str]] = [
    (
        "generic-loses",
        "(EngineCore pid=1) ERROR 11-30 17:11:55 [core.py:1231] ValueError: No available memory for the cache blocks.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "cache blocks",
    ),
    (
        "peer-is-louder-and-earlier",
        "NCCL WARN Connection closed by remote peer\n"
        "Value error, Total number of attention heads (64) must be divisible by tensor parallel size (3).\n"
        "ray.exceptions.ActorDiedError: The actor died",
        "attention heads",
    ),
    (
        "unknown-beats-generic",
        "(EngineCore pid=1) ERROR 11-30 17:11:55 [core.py:1231] ZeroDivisionError: division by zero\n"
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.",
        "division by zero",
    ),
    (
        "cancelled-then-generic",
        "RuntimeError: cancelled\nRuntimeError: Engine core initialization failed. See root cause above.",
        "cancelled",
    ),
    (
        "waited-for-a-node-then-failed",
        "Waiting for creating a placement group of specs for 10 seconds.\n" + SHAPES,
        "2048",
    ),
    ("repeat-note-is-cut", SHAPES + " [repeated 2x across cluster]", "non-singleton dimension 1"),
]


@pytest.mark.parametrize(("log", "line"), [row[1:] for row in TEST_ROOT_CAUSE], ids=[row[0] for row in TEST_ROOT_CAUSE])
def test_root_cause(log: str, line: str) -> None:
    failure = find_failure(clean_lines(log), stopped=True)
    assert failure is not None
    assert line in failure["line"]
    assert "repeated" not in failure["line"]


NEUTRAL = [
    "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are "
    "hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).",
    "Address already in use. Retrying with a new port.",
    "WARNING [x.py:1] Failed to import from vllm._C with ImportError('libcuda.so.1')",
    "Waiting for creating a placement group of specs for 10 seconds.",
    "(EngineCore pid=1) ERROR 11-30 17:11:55 [core.py:1] ValueError: something that may be handled",
]


@pytest.mark.parametrize("line", NEUTRAL)
def test_neutral_while_running(line: str) -> None:
    assert find_failure([line], stopped=False) is None


READY = "Starting vLLM server on http://127.0.0.1:8000"

# (id, log, stopped, is there a failure)
TEST_READY: list[tuple[str, str, bool, bool]] = [
    ("a-request-fails", f"{READY}\nRuntimeError: cancelled", False, False),
    ("dies-while-serving", f"{READY}\nRuntimeError: cancelled", True, True),
    ("stopped-without-a-word", READY, True, False),
]


@pytest.mark.parametrize(
    ("log", "stopped", "found"), [row[1:] for row in TEST_READY], ids=[row[0] for row in TEST_READY]
)
def test_after_ready(log: str, stopped: bool, found: bool) -> None:
    assert (find_failure(clean_lines(log), stopped=stopped) is not None) is found
