# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import (
    find_failure,
    find_kills,
    guards_command,
    kills_of_engines,
)
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.failure_samples import (
    EARLYOOM,
    GLOBAL,
    MEMCG,
    OOMD,
    SHAPES,
)

READY = "Starting vLLM server on http://127.0.0.1:8000"
RAY = "Memory on the node (IP: 10.77.0.2, ID: 3f) where the task ran was 113.50GB / 119.70GB (0.948204), which exceeds"

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
    (
        "B30",
        "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. Memory on the "
        "node (IP: 10.77.0.2) was 113.50GB / 119.70GB (0.948204)",
        "Ray's memory monitor killed a worker on 10.77.0.2 at 113.50GB of 119.70GB",
        "RAY_memory_monitor_refresh_ms=0 in the environment of every `ray start`",
    ),
    ("ray-monitor-second-line", RAY, "a worker on 10.77.0.2 at 113.50GB", "RAY_memory_monitor_refresh_ms"),
    (
        "ray-monitor-first-line",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "the GPU did not run out",
        "RAY_memory_monitor_refresh_ms",
    ),
    (
        "out-of-memory-in-a-ray-task",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper torch.OutOfMemoryError: CUDA out of",
        "A rank ran out of GPU memory",
        "max_model_len",
    ),
    ("B41", OOMD.format("ray-head.scope"), "systemd-oomd killed ray-head.scope (memory pressure)", "system unit"),
    (
        "oomd-swap",
        "systemd-oomd[1]: Killed /system.slice/hy3-ray.service due to memory used (1) / total (2) and swap used (3)",
        "systemd-oomd killed hy3-ray.service (memory used)",
        "system unit",
    ),
    (
        "earlyoom",
        EARLYOOM.format("TERM", "VLLM::Worker", "VLLM::Worker"),
        "killed VLLM::Worker (process 4242)",
        "Lower",
    ),
    (
        "kernel-cap",
        MEMCG,
        "killed ray::RayWorkerW in hy3-ray.service, which had reached its memory limit",
        "hy3_memory",
    ),
    ("kernel-node", GLOBAL, "killed VLLM::EngineCor in hy3-serve.service, because the node had no", "Lower"),
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
    (
        "B114: an error that no rule is about, before the connections that it cost",
        "NCCL WARN Connection closed by remote peer\nValueError: heads not divisible\nray.exceptions.ActorDiedError: x",
        "heads not divisible",
    ),
    (
        "an error raised while another was handled is an echo",
        "RuntimeError: cancelled\nDuring handling of the above exception, another exception occurred:\n"
        'Traceback (most recent call last):\n  File "x.py", line 1, in shutdown\nAttributeError: no such thing',
        "cancelled",
    ),
    (
        "what NCCL says beside its general word",
        "torch.distributed.DistBackendError: NCCL error in: x, unhandled system error (run with NCCL_DEBUG=INFO)\n"
        "Last error:\nsocketProgress: Connection closed by remote peer spark-2<41877>",
        "closed by remote peer",
    ),
    (
        "the reason of a refused queue beside the general word",
        "NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev rocep1s0f1:1\n"
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)",
        "ibv_modify_qp",
    ),
    (
        "a wait that ended, then the loss, then the generic word",
        "RuntimeError: Engine core initialization failed.\nRuntimeError: cancelled\n"
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)",
        "Watchdog",
    ),
    (
        "a killed rank before what NCCL and the head say of it",
        "RuntimeError: cancelled\nWatchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)\n"
        + MEMCG,
        "oom-kill",
    ),
    ("repeat-note-is-cut", SHAPES + " [repeated 2x across cluster]", "non-singleton dimension 1"),
]


@pytest.mark.parametrize(("log", "line"), [row[1:] for row in TEST_ROOT_CAUSE], ids=[row[0] for row in TEST_ROOT_CAUSE])
def test_root_cause(log: str, line: str) -> None:
    failure = find_failure(clean_lines(log), stopped=True)
    assert failure is not None
    assert line in failure["line"]
    assert "repeated" not in failure["line"]


# ---- Who killed it

# (id, lines of the guards, causes for the doctor, how many are of an engine by name)
TEST_KILLS: list[tuple[str, list[str], list[str], int]] = [
    ("B41", [OOMD.format("ray-head.scope")], ["systemd-oomd killed ray-head.scope (memory pressure)"], 1),
    (
        "a scope that says nothing may be an engine's",
        [OOMD.format("run-r25ac.scope")],
        ["systemd-oomd killed run-r25ac.scope (memory pressure)"],
        0,
    ),
    (
        "both signals of earlyoom are one kill",
        [EARLYOOM.format(signal, "VLLM::Worker", "VLLM::Worker") for signal in ("TERM", "KILL")],
        ["earlyoom killed VLLM::Worker (process 4242), because the node was short of memory"],
        2,
    ),
    (
        "an engine by its command line",
        [EARLYOOM.format("TERM", "python3", "/opt/hy3/venv/bin/python3 -m vllm.entrypoints")],
        ["earlyoom killed python3 (process 4242), because the node was short of memory"],
        1,
    ),
    ("somebody's browser", [EARLYOOM.format("TERM", "firefox", "/usr/bin/firefox")], [], 0),
    ("earlyoom's test of itself", [EARLYOOM.format("0", "vllm", "vllm").replace("SIG0", "0 (no-op signal)")], [], 0),
    (
        "the cap of a unit, said once",
        [MEMCG, "kernel: Memory cgroup out of memory: Killed process 7 (ray::RayWorkerW) total-vm:1kB"],
        ["The kernel killed ray::RayWorkerW in hy3-ray.service, which had reached its memory limit"],
        1,
    ),
    ("nothing", ["systemd-oomd[840]: Swap is currently not detected", ""], [], 0),
]


@pytest.mark.parametrize(
    ("lines", "causes", "named"), [row[1:] for row in TEST_KILLS], ids=[row[0] for row in TEST_KILLS]
)
def test_kills(lines: list[str], causes: list[str], named: int) -> None:
    assert [one["cause"] for one in find_kills(lines)] == causes
    assert len(kills_of_engines(lines)) == named


def test_a_kill_is_nearer_to_the_root_than_its_echo() -> None:
    log = ["ray.exceptions.ActorDiedError: The actor died", "RuntimeError: Engine core initialization failed."]
    failure = find_failure([*kills_of_engines([OOMD.format("ray-head.scope")]), *log], stopped=False)
    assert failure is not None
    assert failure["cause"].startswith("systemd-oomd killed ray-head.scope")


def test_guards_are_asked_in_one_command() -> None:
    command = guards_command(5)
    assert command[-8:-1] == [
        *(
            "--lines=5000",
            "SYSLOG_IDENTIFIER=systemd-oomd",
            "+",
            "SYSLOG_IDENTIFIER=earlyoom",
            "+",
            "_TRANSPORT=kernel",
            "+",
        )
    ]
    assert command[-1].startswith("MESSAGE_ID=")
    assert "--since=@5" in command


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
