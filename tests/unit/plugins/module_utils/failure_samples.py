# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log text for each rule, in the words of the recipes and of several releases: (rule, text) and words that are no failure.

The last line of each text is the one that the rule is about, unless a mark says so.
"""

from __future__ import annotations

SHAPES = "RuntimeError: The size of tensor a (2048) must match the size of tensor b (4096) at non-singleton dimension 1"
OOMD = (
    "systemd-oomd[840]: Killed /user.slice/user-1000.slice/user@1000.service/app.slice/{} due to memory pressure for "
    "/user.slice/user-1000.slice/user@1000.service being 61.10% > 50.00% for > 20s with reclaim activity"
)
EARLYOOM = 'earlyoom[611]: sending SIG{} to process 4242 uid 1000 "{}": oom_score 1213, VmRSS 91120 MiB, cmdline "{}"'
KERNEL = "kernel: oom-kill:constraint=CONSTRAINT_{}cpuset=/,mems_allowed=0,{}task_memcg={},task={},pid=7,uid=1000"
MEMCG = KERNEL.format("MEMCG,", "oom_memcg=/hy3.slice,", "/hy3.slice/hy3-ray.service", "ray::RayWorkerW")
GLOBAL = KERNEL.format("NONE,", "global_oom,", "/system.slice/hy3-serve.service", "VLLM::EngineCor")
NVRM = (
    "kernel: NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from "
    "_memdescAllocInternal(pMemDesc) @ mem_desc.c:1359"
)
CORE = "(EngineCore pid=7) ERROR 11-30 17:11:55 [core.py:1231] "
NEXTN = """\
[2026-07-11 10:02:03] server_args=ServerArgs(model_path='vroomfondel/Hy3-NVFP4-W4A4', quantization='modelopt_fp4')
[2026-07-11 10:05:03 TP2] Scheduler hit an exception: Traceback (most recent call last):
  File "/v/sglang/srt/models/hunyuan_v3_nextn.py", line 268, in load_weights
  File "/v/sglang/srt/layers/moe/fused_moe_triton/layer.py", line 512, in _load_w13
    expert_data.copy_(loaded_weight)
RuntimeError: The size of tensor a (2048) must match the size of tensor b (4096) at dimension 1"""

# ---- Node

NODE: list[tuple[str, str]] = [
    ("oomd-kill", OOMD.format("ray-head.scope")),
    (
        "oomd-kill",
        "systemd-oomd[1]: Killed /hy3.slice/hy3-ray.service due to memory used (1) / total (2) and swap used (3)",
    ),
    ("earlyoom-kill", EARLYOOM.format("TERM", "VLLM::Worker", "VLLM::Worker")),
    ("oom-cap", MEMCG),
    ("oom-node", GLOBAL),
    ("oom-unit", "systemd[1]: ray-head.scope: A process of this unit has been killed by the OOM killer."),
    ("oom-unit", "systemd[1]: hy3-ray.service: Failed with result 'oom-kill'."),
    (
        "oom-process",
        "kernel: Memory cgroup out of memory: Killed process 4242 (ray::RayWorkerW) total-vm:1kB, anon-rss:1kB",
    ),
    ("oom-process", "kernel: Out of memory: Kill process 4242 (VLLM::Worker_TP) score 912 or sacrifice child"),
    ("gpu-memory-wedge", NVRM),
    ("gpu-memory-wedge", "NVRM: ... NV_ERR_NO_MEMORY ... _memdescAllocInternal"),
    ("gpu-lost", "kernel: NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0x51:1941)"),
    ("gpu-lost", "kernel: NVRM: Xid (PCI:000f:01:00): 79, pid=4242, name=python3, GPU has fallen off the bus."),
    ("gpu-xid", "kernel: NVRM: Xid (PCI:000f:01:00): 31, pid=4242, name=VLLM::Worker, Ch 00000008, MMU Fault"),
    ("link-down", "kernel: mlx5_core 0000:01:00.1 enp1s0f1np1: Link down"),
    ("link-down", "kernel: enP2p1s0f1np1: Link is Down"),
    (
        "nic-cable",
        "kernel: mlx5_core 0000:01:00.0: Port module event[error]: module 0, Cable error, High Temperature",
    ),
    (
        "nic-error",
        "kernel: mlx5_core 0000:01:00.1: mlx5_health_try_recover: device's health compromised - reached miss count",
    ),
    ("disk-error", "kernel: I/O error, dev nvme0n1, sector 1234 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2"),
    ("disk-error", "kernel: EXT4-fs error (device nvme0n1p2): ext4_find_entry:1683: inode #2: comm python3: reading"),
    ("disk-error", "kernel: EXT4-fs (nvme0n1p2): Remounting filesystem read-only"),
    (
        "process-crashed",
        "kernel: VLLM::EngineCor[4242]: segfault at 10 ip 00007f sp 00007f error 4 in libnccl.so.2[7f00]",
    ),
    (
        "process-crashed",
        "kernel: python3[4242]: unhandled level 2 translation fault (11) at 0x10, esr 0x92000006, in libc.so",
    ),
    ("illegal-instruction", "kernel: traps: python3[4242] trap invalid opcode ip:7f2 sp:7ff error:0 in vllm_C.so[7f]"),
    ("illegal-instruction", "kernel: python3[4242]: undefined instruction: pc=0000ffff"),
    ("hung-task", "kernel: INFO: task VLLM::Worker_TP:4242 blocked for more than 122 seconds."),
    ("cpu-stall", "kernel: watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [python3:4242]"),
    ("cpu-stall", "kernel: rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"),
    ("overheated", "kernel: thermal thermal_zone0: critical temperature reached, shutting down"),
]

# ---- Load

LOAD: list[tuple[str, str]] = [
    ("drafter-packed", f"Loading drafter model...\n{SHAPES}"),
    (
        "drafter-packed",
        f'{CORE}  File "/v/vllm/model_executor/models/hy_v3_mtp.py", line 332, in load_weights\n{CORE}{SHAPES}',
    ),
    ("layer-packed", SHAPES),
    ("layer-packed", f"Drafter fails to load: {SHAPES}"),
    ("target-packed", f"Starting to load model /ck...\n{SHAPES}"),
    ("sglang-nextn-packed", NEXTN),
    (
        "shapes",
        "RuntimeError: The size of tensor a (3072) must match the size of tensor b (4096) at non-singleton dimension 0",
    ),
    (
        "shapes",
        "AssertionError: Attempted to load weight (torch.Size([72, 128])) into parameter (torch.Size([64, 128]))",
    ),
    (
        "shared-mlp-assertion",
        f'{CORE}  File "/v/vllm/model_executor/layers/linear.py", line 1, in weight_loader\n{CORE}AssertionError',
    ),
    (
        "shared-mlp-assertion",
        '[2026-11-30 17:11:55 TP0] Scheduler hit an exception: Traceback (most recent call last):\n  File "/v/sglang/srt/layers/'
        'parameter.py", line 1, in load_merged_column_weight\n    assert param.shape == loaded.shape\nAssertionError',
    ),
    ("shared-expert-name", "KeyError: 'layers.1.mlp.shared_experts.down_proj.weight'"),
    ("shared-expert-name", f"{CORE}KeyError: 'layers.5.mlp.shared_mlp.down_proj.weight'"),
    ("tensor-name", "KeyError: 'model.layers.3.mlp.experts.w13_weight_scale_2'"),
    (
        "mtp-missing",
        "ValueError: Following weights were not initialized from checkpoint: {'model.layers.80.eh_proj.weight'}",
    ),
    ("weights-missing", "ValueError: Following weights were not initialized from checkpoint: {'model.norm.weight'}"),
    ("nan", "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"),
    ("nan", "NaN detected! sampler: next_token_logits"),
    (
        "nan",
        "[2026-11-30 17:11:55 TP0] NaN detected in next_token_logits; values were sanitized before sampling. This usually",
    ),
    ("heads", "Value error, Total number of attention heads (64) must be divisible by tensor parallel size (3)."),
    ("vocabulary", "AssertionError: 120832 is not divisible by 3"),
    (
        "divisibility",
        "ValueError: moe_intermediate_size 1536 must be divisible by moe_tp_size (7) which is tp_size (7)",
    ),
    ("divisibility", "AssertionError: tp_size must be divisible by number of nodes"),
    ("shard-damaged", "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ("shard-damaged", "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered"),
    ("shard-damaged", "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    (
        "shard-missing",
        "FileNotFoundError: [Errno 2] No such file or directory: '/opt/hy3/models/Hy3-NVFP4/model-00042-of-00099.safetensors'",
    ),
    ("shard-missing", "RuntimeError: Cannot find any model weights with `/opt/hy3/models/Hy3-NVFP4`"),
    ("checkpoint-path", "ValueError: Invalid repository ID or local directory specified: '/opt/hy3/models/Hy3'."),
    ("checkpoint-path", "OSError: /opt/hy3/models/Hy3 does not appear to have a file named config.json."),
    (
        "checkpoint-path",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/m/x'.",
    ),
    ("hub", "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url"),
    (
        "trust-remote-code",
        "ValueError: Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
    ),
    (
        "parser-tokens",
        "RuntimeError: HYV3ReasoningParser reasoning parser could not locate think start/end tokens in the tokenizer!",
    ),
    (
        "parser-tokens",
        "RuntimeError: HYV3 Tool parser could not locate tool call start/end tokens in the tokenizer!",
    ),
    ("model-file-import", "Ignore import error when loading sglang.srt.models.hunyuan_v3: invalid syntax"),
    ("architecture", "ValueError: Model architectures ['HYV3ForCausalLM'] are not supported for now."),
    (
        "architecture",
        "ValueError: The checkpoint you are trying to load has model type `hy_v3` but Transformers does not recognize this",
    ),
    ("config-key", "AttributeError: 'HYV3Config' object has no attribute 'expert_hidden_dim'"),
    (
        "quantization-mismatch",
        "Value error, Quantization method specified in the model config (modelopt_fp4) does not match the quantization method "
        "specified in the `quantization` argument (fp8).",
    ),
    ("quantization-unknown", "Value error, Unknown quantization method: modelopt_mixed. Must be one of ['awq']."),
    (
        "context",
        "Value error, User-specified max_model_len (300000) is greater than the derived max_model_len "
        "(max_position_embeddings=262144 or model_max_length=None in model's config.json).",
    ),
    ("drafter-steps", "Value error, num_speculative_tokens=3 must be divisible by n_predict=2"),
]

# ---- GPU

GPU: list[tuple[str, str]] = [
    ("no-kernel-image", "CUDA error: cudaErrorNoKernelImageForDevice"),
    ("no-kernel-image", "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"),
    ("no-kernel-image", "RuntimeError: CUDA error: named symbol not found"),
    (
        "cutlass-arch",
        "ERROR : Arch conditional MMA instruction used without targeting appropriate compute capability. Aborting.",
    ),
    (
        "cutlass-fp4",
        "RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: Failed to initialize cutlass TMA WS grouped gemm. Error: Error "
        "Internal (/workspace/flashinfer/csrc/cutlass_kernel_file_gemm_grouped_sm120_M256_BS_group0.generated.cu:60)",
    ),
    ("cutlass-fp4", "RuntimeError: [FP4 gemm Runner] Failed to run cutlass FP4 gemm on sm120. Error: Error Internal"),
    (
        "cute-dsl-arch",
        "cutlass.cute.nvgpu.common.OpError: OpError: expects arch to be one of ['sm_120a'], but got Arch.sm_121a",
    ),
    ("flashinfer-arch", "RuntimeError: No supported CUDA architectures found for major versions [10]."),
    (
        "flashinfer-backend",
        "flashinfer.utils.BackendSupportedError: mm_fp4 does not support backend 'trtllm' with capability 121",
    ),
    (
        "flashinfer-backend",
        "flashinfer.utils.BackendSupportedError: mm_fp4 does not support backend 'cute-dsl' with capability 121",
    ),
    ("b12x-cuda-12", "ValueError: b12x fused MoE requires CUDA 13 or later"),
    ("b12x-cuda-12", "RuntimeError: FlashInfer b12x MoE kernels requires CUDA 13.0 or newer"),
    ("b12x-ptx", "ptxas /tmp/x.ptx, line 612; error   : Not a name of any known instruction: '_mma.block_scale'"),
    ("unsupported-ptx", "torch.AcceleratorError: cudaErrorUnsupportedPtxVersion"),
    ("unsupported-ptx", "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."),
    (
        "ptxas-arch",
        "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
        "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
    ),
    ("ptxas-arch", "ptxas-blackwell fatal : Value 'sm_107a' is not defined for option"),
    ("nvcc-arch", "nvcc fatal   : Unsupported gpu architecture 'compute_121a'"),
    ("ptxas-path", "RuntimeError: Cannot find ptxas"),
    ("ptxas-path", "PermissionError: ptxas: Permission denied: '/usr/local/cuda/bin'"),
    ("no-nvcc", "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
    ("no-compiler", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable"),
    ("no-compiler", "/tmp/main.c:5:10: fatal error: Python.h: No such file or directory"),
    ("no-compiler", "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"),
    (
        "moe-unquantized",
        "ValueError: moe_backend='marlin' is not supported for unquantized MoE. Expected one of ['triton'].",
    ),
    ("moe-kind", "ValueError: moe_backend='triton' is not supported for NvFP4 MoE. Expected one of ['marlin']."),
    ("moe-none", "NotImplementedError: No NvFp4 MoE backend supports the deployment configuration."),
    (
        "moe-refused",
        "ValueError: NvFp4 MoE backend 'FLASHINFER_CUTEDSL' does not support the deployment configuration since kernel "
        "does not support current device cuda.",
    ),
    ("attention-fa3", "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use another"),
    (
        "attention-flashinfer",
        "RuntimeError: BatchPrefillWithPagedKVCache failed with error code invalid configuration argument",
    ),
    (
        "nvfp4-platform",
        "ValueError: Current platform does not support NVFP4 quantization. Please use Blackwell and above.",
    ),
    ("no-scheme", "NotImplementedError: No compressed-tensors compatible scheme was found."),
    (
        "quantization-capability",
        "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. Minimum capability: 75. "
        "Current capability: 70.",
    ),
    ("driver-old", "RuntimeError: The NVIDIA driver on your system is too old (found version 12080)."),
    ("driver-old", "CUDA error: CUDA driver version is insufficient for CUDA runtime version"),
    ("driver-mismatch", "Failed to initialize NVML: Driver/library version mismatch"),
    ("no-driver", "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    ("no-driver", "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"),
    ("no-gpu", "RuntimeError: No CUDA GPUs are available"),
    ("no-gpu", "CUDA error: no CUDA-capable device is detected"),
    (
        "gpu-not-ready",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    ),
    ("cpu-torch", "AssertionError: Torch not compiled with CUDA enabled"),
    ("gpu-memory-fault", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("gpu-kernel-failed", "RuntimeError: CUDA error: unspecified launch failure"),
    ("gpu-kernel-failed", "RuntimeError: CUDA error: device-side assert triggered"),
    ("gpu-system-call", "RuntimeError: CUDA error: OS call failed or operation not supported on this OS"),
    ("illegal-instruction-text", "/bin/sh: line 1:  4242 Illegal instruction     (core dumped) vllm serve"),
]

# ---- Memory

MEMORY: list[tuple[str, str]] = [
    (
        "free-memory",
        "ValueError: Free memory on device cuda:0 (8.88/121.69 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 111.95 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    (
        "free-memory",
        "ValueError: Free memory on device cuda:0 (8.88/121.69 GiB) on startup is less than the engine's budget after "
        "excluding external process's weights (0.92, 30.5 GiB). Decrease GPU memory utilization",
    ),
    (
        "free-memory-cpu",
        "ValueError: Available memory on node 0 (3.1/24.0 GiB) on startup is less than desired CPU memory utilization "
        "(0.92, 22.1 GiB).",
    ),
    (
        "memory-profiling",
        "AssertionError: Error in memory profiling. Initial free memory 80.1 GiB, current free memory 101.3 GiB. This happens",
    ),
    (
        "kv-max-len-estimate",
        "To serve at least one request with the models's max seq len (262144), (20.0 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (7.5 GiB). Based on the available memory, the estimated maximum "
        "model length is 98304.",
    ),
    (
        "kv-max-len",
        "ValueError: To serve at least one request with the model's max seq len (262144), (20.0 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (0.01 GiB). Try increasing `gpu_memory_utilization`",
    ),
    (
        "kv-tokens",
        "The model's max seq len (8192) is larger than the maximum number of tokens that can be stored in KV "
        "cache (5120)",
    ),
    ("kv-none", "(EngineCore pid=1) INFO 11-30 17:11:55 [gpu_worker.py:508] Available KV cache memory: -1.75 GiB"),
    ("kv-none", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ("sglang-kv-none", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    (
        "sglang-kv-none",
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7. Raise "
        "--mem-fraction-static above 0.801",
    ),
    (
        "sglang-unbalanced",
        "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
        "pre_model_load_memory=81.0, local_gpu_memory=114.2, local_gpu_memory * 0.9=102.78",
    ),
    (
        "sglang-unbalanced",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
    ),
    (
        "ray-monitor-node",
        "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. Memory on the "
        "node (IP: 10.77.0.2) was 113.50GB / 119.70GB (0.948204)",
    ),
    (
        "ray-monitor-node",
        "Memory on the node (IP: 10.77.0.2, ID: 3f) where the task ran was 113.50GB / 119.70GB (0.948204), which exceeds",
    ),
    ("ray-monitor", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."),
    (
        "ray-monitor",
        "(raylet) [2026-08-25 19:21:02,241 E 1111 1111] (raylet) node_manager.cc:3064: 1 Workers (tasks / actors) killed due to "
        "memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: b8, IP: 10.77.0.2) over the last time",
    ),
    ("cuda-graph-memory", "Exception: Capture cuda graph failed: CUDA error: invalid argument"),
    ("gpu-memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    (
        "gpu-memory",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::RayWorkerWrapper torch.OutOfMemoryError: CUDA out of",
    ),
    ("gpu-memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (
        "shared-memory",
        "RuntimeError: Insufficient space in /dev/shm for shm broadcast: 160 MiB required, 64 MiB free. Increase /dev/shm",
    ),
    (
        "shared-memory-full",
        "NCCL WARN Error: failed to extend /dev/shm/nccl-aZ to 33030532 bytes, error: No space left on device (28)",
    ),
    ("host-memory", "OSError: [Errno 12] Cannot allocate memory"),
    ("host-memory", "terminate called after throwing an instance of 'std::bad_alloc'"),
    (
        "host-memory",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
    ),
    (
        "ray-spill",
        "(raylet) file_system_monitor.cc:116: /var/lib/hy3/ray/session_1 is over 95% full, available space: 21.71 GB; capacity:",
    ),
]

# ---- Network

NET = "spark-1:4242:4301 [0] "
NETWORK: list[tuple[str, str]] = [
    (
        "memlock",
        NET + "misc/ibvwrap.cc:193 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    ),
    ("memlock", NET + "misc/ibvwrap.cc:193 NCCL WARN Call to ibv_create_qp failed with error Cannot allocate memory"),
    (
        "qp-timeout",
        "[2026-03-13 22:26:02] spark-1:1:1 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed "
        "out, on dev rocep1s0f0:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:10.77.0.1, remote GID "
        "::ffff:10.78.0.2",
    ),
    ("qp-timeout", NET + "misc/ibvwrap.cc:160 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out"),
    (
        "qp-refused",
        NET + "misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable",
    ),
    (
        "qp-refused",
        NET + "misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_0:1",
    ),
    (
        "gid-read",
        NET + "misc/ibvwrap.cc:111 NCCL WARN Call to ibv_query_gid failed with error Invalid argument errno 22",
    ),
    (
        "roce-retries",
        NET
        + "transport/net_ib.cc:2244 NCCL WARN NET/IB: Got completion from peer 10.77.0.2<53908> with status=12 opcode=129 "
        "len=1048576 vendor err 129 (Recv) localGid ::ffff:10.77.0.1 remoteGids::ffff:10.77.0.2 hca rocep1s0f1",
    ),
    (
        "roce-retries",
        NET + "transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor",
    ),
    (
        "roce-retries",
        NET
        + "NCCL WARN NET/IB: Got completion from peer spark-2<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0)",
    ),
    (
        "roce-completion",
        NET + "NCCL WARN NET/IB: Got completion from peer 10.77.0.2<53908> with status=5 opcode=32552 len=0",
    ),
    ("roce-event", NET + "transport/net_ib.cc:96 NCCL WARN NET/IB : rocep1s0f1:1 async fatal event: port error"),
    ("roce-event", NET + "transport/net_ib.cc:99 NCCL WARN NET/IB : rocep1s0f1:1 Got async event : port error"),
    ("roce-event", NET + "NCCL WARN NET/IB : rocep1s0f1:1 GID table changed"),
    ("roce-none", NET + "NCCL INFO NET/IB : No device found."),
    ("no-interface", NET + "bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found"),
    ("no-interface", "RuntimeError: Unable to find address for: enp1s0f1np1"),
    ("gloo-loopback", "RuntimeError: Gloo connectFullMesh failed with Connection refused, remote=[127.0.0.1]:41000"),
    ("gloo-loopback", "Gloo connectFullMesh Connection refused, remote=[127.0.0.1]"),
    (
        "gloo-loopback",
        "[rank1]:[E1201 08:52:46.164295950 ProcessGroupGloo.cpp:145] Gloo connectFullMesh failed with [/pytorch/third_party/gloo/"
        "gloo/transport/tcp/pair.cc:144] connect [127.0.1.1]:52110: Connection refused",
    ),
    (
        "gloo-mesh",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    ),
    (
        "duplicate-gpu",
        NET + "init.cc:1021 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device f01000",
    ),
    ("nccl-versions", NET + "NCCL WARN Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 23007"),
    ("nccl-truncated", NET + "misc/socket.cc:49 NCCL WARN Message truncated : received 1024 bytes instead of 256"),
    ("nccl-usage", "RuntimeError: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"),
    (
        "connection-refused",
        NET
        + "misc/socket.cc:567 NCCL WARN socketPollConnect: connect to 10.77.0.2<43211> returned Connection refused, exceeded "
        "error",
    ),
    ("connection-refused", "OSError: [Errno 113] No route to host"),
    (
        "rank-missing",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ),
    (
        "rank-missing",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
        "(10.77.0.1, 29500).",
    ),
    (
        "rendezvous-port",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    (
        "collective-timeout",
        "[rank0]:[E519 18:16:21.560 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600021 milliseconds "
        "before timing out.",
    ),
    ("collective-timeout", "TimeoutError: RPC call to sample_tokens timed out."),
    (
        "remote-gone",
        NET + "misc/socket.cc:64 NCCL WARN socketProgress: Connection closed by remote peer spark-2.local<43211>",
    ),
    ("remote-gone", "NCCL WARN Connection closed by remote peer"),
    ("remote-gone", "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.77.0.2]:41877"),
    (
        "remote-gone",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:3, remote process exited or there was a network error",
    ),
    (
        "remote-gone",
        '[rank1]:[W519 18:16:21.560000017 ProcessGroupNCCL.cpp:1826] [PG ID 0 Rank 1] Failed to check the "should dump" flag, with '
        "error: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ),
    (
        "connection-lost",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Read error [10.77.0.2]:41877: Connection reset by peer",
    ),
    ("nccl-cuda", "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    ("nccl-system", "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)"),
]

# ---- Ray

RAY: list[tuple[str, str]] = [
    (
        "ray-versions",
        "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.3\nThis process on "
        "node 10.77.0.2 was started with:\n    Ray: 2.52.0\n    Python: 3.12.3",
    ),
    ("ray-missing", "ModuleNotFoundError: No module named 'ray'"),
    (
        "ray-missing",
        "ValueError: Failed to import Ray: No module named 'ray'.Please install Ray with `pip install ray`.",
    ),
    ("ray-token", "InvalidAuthToken: Authentication token is missing or incorrect"),
    (
        "ray-token",
        "ray.exceptions.AuthenticationError: Token authentication is enabled but no authentication token was found",
    ),
    ("ray-gone", "ConnectionError: Could not find any running Ray instance. Please specify the one to connect to"),
    (
        "ray-gone",
        "[2026-11-30 18:49:36,524 E 514 514] gcs_rpc_client.h:179: Failed to connect to GCS at address 10.77.0.1:6379 within 60 s",
    ),
    (
        "ray-already",
        "ConnectionError: Ray is trying to start at 10.77.0.1:6379, but is already running at 10.77.0.1:6379.",
    ),
    ("ray-session", "AssertionError: Session name session_2 does not match persisted value b'session_1'. Perhaps"),
    (
        "ray-node-start",
        "Exception: The current node timed out during startup. This could happen because some of the raylet failed",
    ),
    ("ray-process-exited", "Some Ray subprocesses exited unexpectedly:\n  raylet [exit code=-9]"),
    (
        "ray-address-unique",
        "RuntimeError: Every node should have a unique IP address. Got 2 nodes with node ids ['a', 'b']",
    ),
    (
        "ray-address",
        "(autoscaler +25s) Error: No available node types can fulfill resource request {'node:10.77.0.1': 0.001, 'GPU': 1.0}.",
    ),
    (
        "ray-driver-node",
        "RuntimeError: driver node id 3f is not included in a placement group x. Node id -> bundles {}.",
    ),
    (
        "ray-placement",
        "ValueError: Cannot provide a placement group requiring 2.0 GPUs (placement_group_specs=[]) within 1800 "
        "seconds.",
    ),
    ("ray-placement", "ValueError: Current node has no GPU available. current_node_resource={}."),
    ("ray-waits", "Waiting for creating a placement group of specs for 10 seconds. specs=[{'node:10.77.0.1': 0.001}]."),
    (
        "world-size",
        "Value error, World size (2) is larger than the number of available GPUs (1) in this node. If this is intentional and",
    ),
    ("ray-disk", "ray.exceptions.OutOfDiskError: Local disk is full"),
    (
        "ray-node-dead",
        "(raylet) The node with node id: 0f2197 and address: 10.77.0.2 and node name: 10.77.0.2 has been marked dead because the "
        "detector has missed too many heartbeats from it. This can happen when a \t(1) raylet crashes unexpectedly (OOM, etc.)",
    ),
    (
        "ray-actor-dead",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: RayWorkerWrapper\n"
        "\tactor_id: a1\n\tpid: 9\n\tip: 10.77.0.2\nThe actor is dead because its worker process has died. Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some "
        "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage.",
    ),
    ("ray-actor-dead", "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task."),
    (
        "ray-worker-dead",
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, "
        "check the logs for the dead worker. Worker IP address: 10.77.0.2 Worker port: 10074 Worker PID: 27499",
    ),
    ("ray-worker-dead", "worker node died unexpectedly"),
]

# ---- Settings

SETTINGS: list[tuple[str, str]] = [
    (
        "sglang-graph-flag",
        "launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, "
        "--cuda-graph-max-bs-prefill",
    ),
    ("sglang-graph-flag", "sglang serve: error: unrecognized arguments: --disable-piecewise-cuda-graph"),
    (
        "json-argument",
        "vllm serve: error: argument --speculative-config/-sc: Value {'method': 'mtp'} cannot be converted to <function loads>.",
    ),
    ("argument", "vllm: error: unrecognized arguments: --moe-backendd marlin"),
    ("argument", "vllm serve: error: argument --moe-backend: invalid choice: 'b13x' (choose from 'auto', 'triton')"),
    ("config-refused", "  Value error, max_num_batched_tokens (2048) is smaller than max_model_len (163840)."),
    ("port", "OSError: [Errno 98] Address already in use"),
    (
        "port",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use",
    ),
    ("port", "RuntimeError: nccl_port at 29500 is not available in 30 seconds. It is used by a process already"),
    ("address", "OSError: [Errno 99] Cannot assign requested address"),
    ("name", "socket.gaierror: [Errno -2] Name or service not known"),
    ("no-flashinfer", "ModuleNotFoundError: No module named 'flashinfer'"),
    ("no-module", "ModuleNotFoundError: No module named 'vllm'"),
    ("library", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ("library", "ImportError: /v/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab"),
    ("torch-operator", "RuntimeError: operator torchvision::nms does not exist"),
    ("pickle", "AttributeError: Can't get attribute 'RayWorkerProc' on <module 'vllm.v1.executor' from '/v/x.py'>"),
    ("disk-full", "OSError: [Errno 28] No space left on device"),
    ("read-only", "OSError: [Errno 30] Read-only file system: '/home'"),
    ("open-files", "OSError: [Errno 24] Too many open files"),
    ("threads", "RuntimeError: can't start new thread"),
    (
        "threads",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 20: Resource temporarily unavailable",
    ),
    ("permission", "PermissionError: [Errno 13] Permission denied: '/opt/hy3/.cache/vllm'"),
    (
        "fabric",
        "No RoCE v2 GID for 10.77.0.1 on rocep1s0f1:1: usable are none, so correct hy3_fabric_address or hy3_hca",
    ),
    (
        "fabric",
        "This node has no interface 'enp1s0f1np1' with an IPv4 address: it has 10.0.0.1 on eth0, so correct",
    ),
    (
        "peer-silent",
        "10.77.0.1:6379 did not accept a connection within 600 s (Connection refused): check its service and the firewall",
    ),
    (
        "ready-timeout",
        "TimeoutError: Timed out waiting for engine core processes to start. This is often caused by slow weight loading for "
        "large models. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S).",
    ),
    ("ready-timeout", "TimeoutError: Timed out waiting for engines to send initial message on input socket."),
]

# ---- Echoes

ECHOES: list[tuple[str, str]] = [
    ("cancelled", "RuntimeError: cancelled"),
    ("cancelled", f'{CORE}  File "/v/vllm/shm_broadcast.py", line 867, in acquire_read\n{CORE}RuntimeError: cancelled'),
    (
        "engine-died",
        "(EngineCore pid=7) ERROR 04-02 06:21:53 [multiproc_executor.py:273] Worker proc VllmWorker-0 died unexpectedly",
    ),
    (
        "engine-died",
        "(EngineCore pid=7) ERROR 04-02 06:21:53 [multiproc_executor.py:316] Worker proc VllmWorker-1 died unexpectedly (exit "
        "code: -9), shutting down executor.",
    ),
    ("engine-died", "RayWorkerProc rank=[1] died unexpectedly, shutting down executor."),
    (
        "engine-died",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
    ),
    (
        "engine-died",
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a",
    ),
    ("engine-died", "Subprocess scheduler_0 (pid=4242) crashed with exit code -6. Triggering SIGQUIT for cleanup..."),
    ("sglang-watchdog", "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"),
    ("engine-failed", "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    ("engine-failed", "Received sigquit from a child process. It usually means the child failed."),
    ("engine-failing", "(EngineCore pid=7) ERROR 12-01 07:32:58 [core.py:1231] EngineCore failed to start."),
    ("unknown", f"{CORE}ZeroDivisionError: division by zero"),
    ("unknown", "ValueError: heads not divisible"),
]

SAMPLES = [*NODE, *LOAD, *GPU, *MEMORY, *NETWORK, *RAY, *SETTINGS, *ECHOES]

# What has the same words and another meaning: nobody failed, whether the unit has ended or not.
NEAR_MISSES: dict[str, str] = {
    "a rank waits": "No available shared memory broadcast block found in 60 seconds. This typically happens when some "
    "processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).",
    "a port that is tried again": "Address already in use. Retrying with a new port.",
    "an optional module": "WARNING [x.py:1] Failed to import from vllm._C with ImportError('libcuda.so.1')",
    "a prompt": "(APIServer pid=1) INFO 11-30 17:11:55 [logger.py:40] Received request chatcmpl-1: prompt: 'why RuntimeError: "
    "cancelled and cudaErrorNoKernelImageForDevice?', params: SamplingParams(n=1)",
    "an access": '(APIServer pid=1) INFO:     127.0.0.1:1 - "GET /health?x=cudaErrorUnsupportedPtxVersion HTTP/1.1" 200 OK',
    "arguments": "(APIServer pid=1) INFO 11-30 17:11:55 [api_utils.py:273] non-default args: {'model_tag': '/m/OutOfMemoryError'}",
    "SGLang's arguments": "[2026-11-30 17:11:55] server_args=ServerArgs(model_path='/m/NaN detected! x', trust_remote_code=True)",
    "tactics that a tuner skips": "(Worker_PP0 pid=38385) 2025-11-11 06:41:27,319 - WARNING - autotuner.py:485 - flashinfer.jit: "
    "[Autotuner]: Skipping tactic <x> 15, due to failure while profiling: [TensorRT-LLM][ERROR] Assertion failed: Failed to "
    "initialize cutlass TMA WS grouped gemm. Error: Error Internal",
    "Ray killed none": "(raylet) node_manager.cc:3064: 0 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers "
    "crashed due to other reasons at node (ID: b8, IP: 10.77.0.2) over the last time period.",
    "NCCL's monitor": "spark-1:1:1 [0] NCCL WARN RAS socket connection with 10.77.0.2<28028> closed by peer on receive",
    "a client that left": "INFO:     h11: Connection closed by peer, client disconnected",
    "a GPU process that ended": "kernel: NVRM: Xid (PCI:000f:01:00): 45, pid=4242, name=VLLM::Worker, Ch 00000010",
    "a slot's power": "kernel: mlx5_core 0000:01:00.0: mlx5_pcie_event:301:(pid 9): Detected insufficient power on the PCIe slot (27W).",
    "a link that came up": "kernel: mlx5_core 0000:01:00.1 enp1s0f1np1: Link up",
    "a retry of NCCL": "spark-1:1:1 [0] misc/ibvwrap.cc:1 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev "
    "rocep1s0f1:1, retrying 1/2 after 100 msec of sleep",
    "an event of no weight": "spark-1:1:1 [0] NCCL INFO NET/IB : rocep1s0f1:1 Got non-fatal async event: port active(9)",
    "shards": "Loading safetensors checkpoint shards:  61% Completed | 60/99 [10:00<01:20, 1.1it/s]",
    "free KV memory": "(EngineCore pid=1) INFO 11-30 17:11:55 [gpu_worker.py:508] Available KV cache memory: 7.75 GiB",
    "a pool": "GPU KV cache size: 176,784 tokens, Maximum concurrency for 163,840 tokens per request: 1.08x",
    "Ray's own news": "[2026-11-30 18:49:36,524 I 514 514] (raylet) worker_pool.cc:1: Worker unexpectedly exits: none",
    "somebody's browser": EARLYOOM.format("TERM", "firefox", "/usr/bin/firefox").replace(
        "sending SIGTERM to", "would kill"
    ),
    "an earlyoom that tests itself": EARLYOOM.format("0", "vllm", "vllm").replace("SIG0", "0 (no-op signal)"),
}
