# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Failures for lack of memory: the KV pool, the check at the start, the GPU, Ray's monitor, shared memory."""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._failure import RECIPE, SUSPECT, SYMPTOM, Rule, rule

_DOCS = "https://docs.vllm.ai/en/latest/configuration/conserving_memory/"
_FIELD_KV = "field case B107"
_RAY_MONITOR = "Ray's memory monitor; field case B30"
_RAY_MONITOR_FIX = (
    "Set RAY_memory_monitor_refresh_ms=0 in the environment of every `ray start` (hy3_engine_env; the raylet reads it, "
    "not the driver), and start again"
)
_GPU = "Lower gpu_memory_utilization, max_model_len or max_num_batched_tokens, or free memory on that node"
_NEEDS = r"max seq len \((?P<length>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed.*?\((?P<have>[\d.]+) GiB\)"

MEMORY_RULES: tuple[Rule, ...] = (
    rule(
        "free-memory",
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than .*?"
        r"(?P<want>[\d.]+) GiB",
        "Only {free} of {all} GiB are free on a node, and gpu_memory_utilization asks for {want} GiB",
        "End what else uses memory there (a worker of an earlier start?), or lower gpu_memory_utilization below "
        "{free}/{all}",
        "vLLM request_memory; on a Spark it compares with MemAvailable; seed 001",
    ),
    rule(
        "free-memory-cpu",
        r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than .*?"
        r"(?P<want>[\d.]+) GiB",
        "Only {free} of {all} GiB are free on a node, and gpu_memory_utilization asks for {want} GiB",
        "End what else uses memory there, lower gpu_memory_utilization, or set VLLM_CPU_KVCACHE_SPACE",
        "vLLM CPU worker",
    ),
    rule(
        "memory-profiling",
        r"Error in memory profiling\. Initial free memory (?P<before>[\d.]+)[^,]*, current free memory (?P<now>[\d.]+)",
        "Another process gave memory back while the engine measured it (from {before} to {now} GiB free)",
        "Wait until the memory of the earlier engine has come back (it may take minutes), and start again",
        "vLLM gpu_worker, 0.20 to 0.32; field case B116",
    ),
    rule(
        "kv-max-len-estimate",
        _NEEDS + r"\..*estimated maximum model length is (?P<fits>\d+)",
        "One request of {length} tokens needs {need} GiB of KV cache and {have} GiB are left for it",
        "Set max_model_len to at most {fits} (the engine's estimate) or free memory on the nodes",
        f"{_DOCS}; {_FIELD_KV}",
    ),
    rule(
        "kv-max-len",
        _NEEDS,
        "One request of {length} tokens needs {need} GiB of KV cache and {have} GiB are left for it",
        "Lower max_model_len or free memory on the nodes",
        f"{_DOCS}; {_FIELD_KV}",
    ),
    rule(
        "kv-tokens",
        r"max seq len \((?P<length>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache "
        r"\((?P<fits>\d+)\)",
        "The KV pool holds {fits} tokens and one request may have {length}",
        "Set max_model_len to at most {fits} or free memory on the nodes",
        f"{_DOCS}; {_FIELD_KV}",
    ),
    rule(
        "kv-none",
        r"No available memory for the cache blocks|Available KV cache memory: (?P<have>-[\d.]+) GiB",
        "Weights and activations leave no memory for the KV pool",
        "Free memory on the nodes or lower max_num_batched_tokens; a higher gpu_memory_utilization only helps if the "
        "node's memory budget allows it",
        f"{_DOCS}; {_FIELD_KV}",
    ),
    rule(
        "sglang-kv-none",
        r"Not enough memory\. Please try to increase --mem-fraction-static|"
        r"weights? .*leave.{0,80}--mem-fraction-static",
        "The weights leave no memory for SGLang's KV pool at this mem-fraction-static",
        "Free memory on the nodes; raise mem-fraction-static only if the node's memory budget allows it, else use more "
        "nodes",
        "SGLang 0.5.11 to 0.5.23",
    ),
    rule(
        "sglang-unbalanced",
        r"The memory capacity is unbalanced\."
        r"(?:.*?(?:pre_model_load_memory|min_per_gpu_memory)=(?P<least>[\d.]+), local_gpu_memory=(?P<here>[\d.]+))?",
        "A node has much less free memory than the others ({least} GB against {here} GB): an earlier engine's has not "
        "come back, or another process has it",
        "Wait until it is back, end what holds it there, or reboot that node",
        "SGLang's check before the load; field case B94",
        peers=True,
    ),
    # Ray's word for what its monitor did is the same class name as torch's.
    rule(
        "ray-monitor-node",
        r"Memory on the node \(IP: (?P<node>[^,)\s]+)[^)]*\).*?was (?P<used>[\d.]+ ?GB) / (?P<all>[\d.]+ ?GB)",
        "Ray's memory monitor killed a worker on {node} at {used} of {all}, page cache and GPU memory counted; the GPU "
        "did not run out",
        _RAY_MONITOR_FIX,
        _RAY_MONITOR,
    ),
    rule(
        "ray-monitor",
        r"ray\.exceptions\.OutOfMemoryError|killed due to (?:the )?node running (?:low on|out of) memory"
        r"|(?<!\d)[1-9]\d* Workers \(tasks / actors\) killed due to memory pressure \(OOM\)"
        r"|(?:Task|Actor|Worker) was killed due to memory pressure",
        "Ray's memory monitor killed a worker, because the node's memory with page cache and GPU memory passed its "
        "threshold; the GPU did not run out",
        _RAY_MONITOR_FIX,
        _RAY_MONITOR,
    ),
    rule(
        "cuda-graph-memory",
        r"Capture (?:cuda|CUDA) graph failed: (?P<why>.{1,160})",
        "The capture of CUDA graphs failed ({why}); it is the largest transient allocation of a start",
        "Lower mem-fraction-static (SGLang) or gpu_memory_utilization (vLLM), capture fewer sizes, or go without "
        "graphs",
        "SGLang's own advice; " + RECIPE,
        fatal=False,
    ),
    rule(
        "gpu-memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation"
        r"|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|ncclUnhandledCudaError.*out of memory"
        r"|Failed to CUDA (?:calloc|malloc)",
        "A rank ran out of GPU memory",
        _GPU,
        _DOCS,
    ),
    rule(
        "shared-memory",
        r"Insufficient space in /dev/shm(?: for [^:]*)?: (?P<need>\d+) MiB required, (?P<free>\d+) MiB free",
        "/dev/shm has {free} MiB free and the engine needs {need} MiB there",
        "Enlarge /dev/shm (in a container --shm-size or --ipc=host) or remove what earlier engines left there",
        "vLLM 0.32 shm_broadcast",
    ),
    rule(
        "shared-memory-full",
        r"(?:[Uu]nable to (?:open|write|allocate|mmap)|[Ff]ailed to).{0,60}shared memory.*No space left|"
        r"[Ee]rror while creating shared memory segment|/dev/shm/\S+.*No space left|posix_fallocate.*No space left",
        "/dev/shm is full",
        "Enlarge it (in a container --shm-size or --ipc=host) or remove what earlier engines left there",
        "NCCL and torch",
        fatal=False,
    ),
    rule(
        "host-memory",
        r"std::bad_alloc|\[Errno 12\]|Cannot allocate memory|"
        r"(?:^|[\s.])MemoryError\b|DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "A process got no memory from the node",
        "Lower what the engine or its loader may take (load_format, MAX_JOBS, hy3_memory), or what else runs there",
        "Linux",
        unless=r"ibv_|NET/IB|skip",
        peers=True,
        fatal=False,
    ),
    rule(
        "killed",
        r"line \d+:\s+\d+ Killed\b|^Killed\s*$",
        "A process was killed (SIGKILL), most often by the kernel for memory",
        "Look at the kernel's log of that node",
        "a shell",
        kind=SUSPECT,
        fatal=False,
        peers=True,
    ),
    rule(
        "ray-spill",
        r"is over (?P<share>[\d.]+)% full, available space: (?P<free>[\d.]+ ?\w+)",
        "Ray's directory is on a disk that is {share} % full ({free} left), so Ray may stop creating objects",
        "Free disk space there",
        "Ray file_system_monitor",
        fatal=False,
        kind=SYMPTOM,
    ),
)
