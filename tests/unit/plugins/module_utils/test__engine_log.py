# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import (
    clean_lines,
    read_acceptance,
    read_facts,
    without_repeat,
)

# vLLM 0.24.0 on two GPUs over Ray, recorded; paths and the long tail of the configuration are shortened.
ENGINE_0_24 = """\
(EngineCore pid=7) INFO 11-30 17:11:40 [core.py:112] Initializing a V1 LLM engine (v0.24.0) with config: \
model='/ck', speculative_config=SpeculativeConfig(method='mtp', model='/ck', num_spec_tokens=1), tokenizer='/ck', \
tokenizer_mode=auto, dtype=torch.bfloat16, max_seq_len=163840, download_dir=None, tensor_parallel_size=2, \
pipeline_parallel_size=1, quantization=modelopt_fp4, quantization_config=None, enforce_eager=True, \
kv_cache_dtype=fp8, device_config=cuda, kernel_config=KernelConfig(enable_flashinfer_autotune=True, \
moe_backend='marlin', linear_backend='auto')
(EngineCore pid=7) (RayWorkerProc pid=12) INFO 11-30 17:11:50 [parallel_state.py:1588] world_size=2 rank=0 \
local_rank=0 distributed_init_method=tcp://192.0.2.2:35499 backend=nccl
(EngineCore pid=7) (RayWorkerProc pid=9, ip=10.77.0.2) INFO 11-30 17:11:50 [parallel_state.py:1588] world_size=2 \
rank=1 local_rank=0 distributed_init_method=tcp://192.0.2.2:35499 backend=nccl
(EngineCore pid=7) (RayWorkerProc pid=12) (Worker_TP0 pid=12) INFO 11-30 17:11:55 [nvfp4.py:224] Using 'MARLIN' NvFp4 \
MoE backend out of potential backends: ['FLASHINFER_TRTLLM', 'MARLIN', 'EMULATION'].
Loading safetensors checkpoint shards:  12% Completed | 12/99 [00:10<01:20,  1.1it/s]
Loading safetensors checkpoint shards: 100% Completed | 99/99 [01:30<00:00,  1.1it/s]
[default_loader.py:430] Loading weights took 90.02 seconds
[gpu_model_runner.py:5184] Loading drafter model...
Loading safetensors checkpoint shards:  50% Completed | 49/99 [00:10<01:20,  1.1it/s]
[gpu_model_runner.py:5255] Model loading took 84.07 GiB memory and 140.440556 seconds
[gpu_model_runner.py:5255] Model loading took 84.11 GiB memory and 139.2 seconds [repeated 2x across cluster]
[kv_cache_utils.py:2146] GPU KV cache size: 176,784 tokens
[kv_cache_utils.py:2147] Maximum concurrency for 163,840 tokens per request: 1.08x
[gpu_worker.py:508] Available KV cache memory: 14.06 GiB
[core.py:344] init engine (profile, create kv cache, warmup model) took 6.05 s
(APIServer pid=1) INFO 11-30 17:13:55 [api_server.py:100] Starting vLLM server on http://127.0.0.1:8000
[metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.33, Accepted throughput: 30.99 tokens/s, \
Drafted throughput: 93.97 tokens/s, Accepted: 62 tokens, Drafted: 188 tokens, Per-position acceptance rate: 0.330, \
Avg Draft acceptance rate: 33.0%
"""

CONFIG_0_24 = {
    "quantization": "modelopt_fp4",
    "moe_backend": "marlin",
    "kv_cache_dtype": "fp8",
    "max_seq_len": 163840,
    "tensor_parallel_size": 2,
    "enforce_eager": True,
    "speculative_method": "mtp",
    "speculative_tokens": 1,
}

TEST_FACTS: list[tuple[str, t.Any]] = [
    ("phase", "ready"),
    ("version", "0.24.0"),
    ("config", CONFIG_0_24),
    ("moe_backends", [{"kind": "NvFp4", "backend": "MARLIN"}]),
    ("shards", {"target": {"loaded": 99, "total": 99}, "drafter": {"loaded": 49, "total": 99}}),
    ("kv", {"tokens": 176784, "derived": False, "max_concurrency": 1.08, "request_tokens": 163840}),
    ("available_kv_gib", 14.06),
    ("weights_gib", 84.11),
    ("acceptance", {"rate": 0.33, "accepted": 62, "drafted": 188, "mean_length": 1.33, "per_position": [0.33]}),
    ("ranks", [{"rank": 0, "ip": None}, {"rank": 1, "ip": "10.77.0.2"}]),
    ("timings", {"read_weights_s": 90.02, "load_model_s": 140.440556, "init_engine_s": 6.05}),
]


@pytest.mark.parametrize(("fact", "expected"), TEST_FACTS, ids=[row[0] for row in TEST_FACTS])
def test_facts_of_a_whole_start(fact: str, expected: t.Any) -> None:
    assert read_facts(clean_lines(ENGINE_0_24))[fact] == expected  # type: ignore[literal-required]  # a table's word


# How far the recorded log had come after so many of its lines.
TEST_PHASES: list[tuple[int, str]] = [
    (0, "starting"),
    (1, "engine_init"),
    (4, "engine_init"),
    (5, "loading"),
    (7, "loading"),
    (8, "drafter"),
    (9, "drafter"),
    (10, "kv_cache"),
    (12, "warmup"),
    (16, "ready"),
]


@pytest.mark.parametrize(("lines", "expected"), TEST_PHASES)
def test_phase(lines: int, expected: str) -> None:
    assert read_facts(clean_lines(ENGINE_0_24)[:lines])["phase"] == expected


def test_phase_never_goes_back() -> None:
    lines = ["GPU KV cache size: 90,112 tokens", "Loading drafter model...", "Starting to load model /ck..."]
    assert read_facts(lines)["phase"] == "warmup"


# Field case B104, B105, B110, B111: (log, tokens, derived, request_tokens, max_concurrency)
TEST_KV: list[tuple[str, str, int | None, bool, int | None, float | None]] = [
    ("v0-cuda-blocks", "# cuda blocks: 2000, # CPU blocks: 2048", 32000, True, None, None),
    ("v0-concurrency", "Maximum concurrency for 4096 tokens per request: 7.81x", None, False, 4096, 7.81),
    ("v0-gpu-blocks", "# GPU blocks: 1400", 22400, True, None, None),
    ("v0-gpu-and-cpu-blocks", "GPU blocks: 1500, # CPU blocks: 2048", 24000, True, None, None),
    ("0.24-tokens", "GPU KV cache size: 180,224 tokens", 180224, False, None, None),
    (
        "0.28-one-line",
        "GPU KV cache size: 180,224 tokens, Maximum concurrency for 163,840 tokens per request: 1.10x",
        180224,
        False,
        163840,
        1.1,
    ),
    (
        "0.32-cpu",
        "CPU KV cache size: 1,048,576 tokens, Maximum concurrency for 2,048 tokens per request: 512.00x",
        1048576,
        False,
        2048,
        512.0,
    ),
    ("0.32-host", "GPU + host KV cache size: 90,112 tokens", 90112, False, None, None),
    (
        "not-the-quotient",
        "GPU KV cache size: 262,144 tokens\nMaximum concurrency for 32,768 tokens per request: 30.00x",
        262144,
        False,
        32768,
        30.0,
    ),
    (
        "journald-german-coloured",
        "Mär 03 11:02:09 spark-a hy3[4242]: \x1b[36m(EngineCore_DP0 pid=7)\x1b[0;0m INFO 03-03 11:02:09 "
        "[kv_cache_utils.py:868] GPU KV cache size: 90,112 tokens",
        90112,
        False,
        None,
        None,
    ),
    (
        "carriage-returns",
        "Loading:  50%|##   |\rLoading: 100%|####|\rGPU KV cache size: 90,112 tokens",
        90112,
        False,
        None,
        None,
    ),
    (
        "sglang",
        "max_total_num_tokens=314572, chunked_prefill_size=8192, max_running_requests=8, context_len=262144",
        314572,
        False,
        262144,
        1.2,
    ),
]


@pytest.mark.parametrize(
    ("log", "tokens", "derived", "request_tokens", "concurrency"),
    [row[1:] for row in TEST_KV],
    ids=[row[0] for row in TEST_KV],
)
def test_kv(log: str, tokens: int | None, derived: bool, request_tokens: int | None, concurrency: float | None) -> None:
    assert read_facts(clean_lines(log))["kv"] == {
        "tokens": tokens,
        "derived": derived,
        "request_tokens": request_tokens,
        "max_concurrency": concurrency,
    }


# Field case B108 and B110: (line, rate, drafted, per_position)
TEST_ACCEPTANCE: list[tuple[str, float, int | None, list[float] | None]] = [
    (
        "Speculative metrics: Draft acceptance rate: 0.642, System efficiency: 0.598, Number of speculative tokens: 3, "
        "Number of accepted tokens: 6420, Number of draft tokens: 10000, Number of emitted tokens: 8000",
        0.642,
        10000,
        None,
    ),
    (
        "Speculative metrics: Draft acceptance rate: 1.000, Number of accepted tokens: 66, Number of draft tokens: "
        "66, ",
        1.0,
        66,
        None,
    ),
    (
        "Speculative metrics: Draft acceptance rate: 0.000, System efficiency: 0.059, Number of speculative tokens: "
        "16, Number of accepted tokens: 0, Number of draft tokens tokens: 40000, Number of emitted tokens tokens: "
        "2500.",
        0.0,
        40000,
        None,
    ),
    (
        "SpecDecoding metrics: Draft acceptance rate: 61.3%, Accepted: 613 tokens, Drafted: 1000 tokens",
        0.613,
        1000,
        None,
    ),
    ("SpecDecoding metrics: Draft acceptance rate: 0.9%, Accepted: 9 tokens, Drafted: 1000 tokens", 0.009, 1000, None),
    (
        "SpecDecoding metrics: Mean acceptance length: 1.61, Accepted throughput: 6.13 tokens/s, Drafted throughput: "
        "10.00 tokens/s, Accepted: 613 tokens, Drafted: 1000 tokens, Per-position acceptance rate: 0.613, 0.201, "
        "Avg Draft acceptance rate: 61.3%",
        0.613,
        1000,
        [0.613, 0.201],
    ),
    (
        "Decode batch, #running-req: 1, #token: 234, token usage: 0.00, accept len: 1.60, accept rate: 0.20, cuda "
        "graph: True, gen throughput (token/s): 17.1, #queue-req: 0,",
        0.2,
        None,
        None,
    ),
]


@pytest.mark.parametrize(("line", "rate", "drafted", "per_position"), TEST_ACCEPTANCE)
def test_acceptance(line: str, rate: float, drafted: int | None, per_position: list[float] | None) -> None:
    acceptance = read_acceptance(line)
    assert acceptance is not None
    assert (acceptance["rate"], acceptance["drafted"], acceptance["per_position"]) == (rate, drafted, per_position)


def test_no_acceptance() -> None:
    assert read_acceptance("Decode batch. #running-req: 1, gen throughput (token/s): 12.3") is None


TEST_MOE: list[tuple[str, list[dict[str, str]]]] = [
    ("Using TRITON Unquantized MoE backend out of potential backends", [{"kind": "Unquantized", "backend": "TRITON"}]),
    (
        "Using 'MARLIN' NvFp4 MoE backend out of x\nUsing 'MARLIN' NvFp4 MoE backend out of x",
        [{"kind": "NvFp4", "backend": "MARLIN"}],
    ),
]


@pytest.mark.parametrize(("log", "expected"), TEST_MOE)
def test_moe_backends(log: str, expected: list[dict[str, str]]) -> None:
    assert read_facts(clean_lines(log))["moe_backends"] == expected


def test_config_of_a_plain_engine() -> None:
    log = (
        "Initializing a V1 LLM engine (v0.32.0+cpu) with config: model='/ck', speculative_config=None, "
        "max_seq_len=2048, tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, "
        "kernel_config=KernelConfig(moe_backend='auto')"
    )
    assert read_facts([log])["config"] == {
        "quantization": None,
        "moe_backend": "auto",
        "kv_cache_dtype": "auto",
        "max_seq_len": 2048,
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "speculative_method": None,
        "speculative_tokens": None,
    }


def test_weights_without_the_usual_words() -> None:
    facts = read_facts(
        ["(RayWorkerWrapper pid=9, ip=10.77.0.2) INFO Model loading took 84.1 GiB [repeated 2x across cluster]"]
    )
    assert (facts["weights_gib"], facts["timings"]["load_model_s"]) == (84.1, None)


def test_negative_memory_is_kept() -> None:
    assert read_facts(["Available KV cache memory: -1.75 GiB"])["available_kv_gib"] == -1.75


def test_tail_is_short() -> None:
    tail = read_facts([f"line {number} " + "x" * 1000 for number in range(20)])["tail"]
    assert (len(tail), tail[-1][:7], max(map(len, tail))) == (5, "line 19", 300)


def test_without_repeat() -> None:
    assert without_repeat("error [repeated 2x across cluster] (Ray deduplicates logs by default.)") == "error"


def test_clean_lines() -> None:
    assert clean_lines("\x1b[36m(a)\x1b[0;0m one\r\n50%\r100%\r\n\n  \nlast") == ["(a) one", "50%", "100%", "last"]


# As SGLang 0.5.23 writes it, with most of its names left out (tests/sglang reads a real log), and as older ones do.
SGLANG_DICT = (
    "[2026-12-01 01:55:10] server_args={'model_path': '/ck', 'quantization': 'modelopt_fp4', 'context_length': 512, "
    "'kv_cache_dtype': 'auto', 'tp_size': 2, 'moe_runner_backend': 'marlin', 'speculative_algorithm': 'EAGLE', "
    "'speculative_num_steps': 1, 'speculative_num_draft_tokens': 2, 'nnodes': 2}"
)
SGLANG_RECORD = (
    "[2026-07-10 10:00:00] server_args=ServerArgs(model_path='/ck', quantization='modelopt_fp4', "
    "context_length=262144, kv_cache_dtype='fp8_e4m3', tp_size=4, moe_runner_backend='flashinfer_cutlass', "
    "speculative_algorithm=None, speculative_num_draft_tokens=None)"
)
SGLANG_CONFIGS: list[tuple[str, dict[str, t.Any]]] = [
    (
        SGLANG_DICT,
        {
            "quantization": "modelopt_fp4",
            "moe_backend": "marlin",
            "kv_cache_dtype": "auto",
            "max_seq_len": 512,
            "tensor_parallel_size": 2,
            "enforce_eager": None,
            "speculative_method": "EAGLE",
            "speculative_tokens": 2,
        },
    ),
    (
        SGLANG_RECORD,
        {
            "quantization": "modelopt_fp4",
            "moe_backend": "flashinfer_cutlass",
            "kv_cache_dtype": "fp8_e4m3",
            "max_seq_len": 262144,
            "tensor_parallel_size": 4,
            "enforce_eager": None,
            "speculative_method": None,
            "speculative_tokens": None,
        },
    ),
]


@pytest.mark.parametrize(("line", "config"), SGLANG_CONFIGS, ids=["0.5.23", "0.5.14"])
def test_sglang_says_what_it_runs_with(line: str, config: dict[str, t.Any]) -> None:
    facts = read_facts([line])
    assert facts["phase"] == "engine_init"
    assert facts["config"] == config
