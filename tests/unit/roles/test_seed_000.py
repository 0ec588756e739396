# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What inventories/sparks would run, against LibertAI's published recipe, flag by flag.

First what the recipe says in its steps 2 (Ray) and 3 (vLLM), then where we differ beside what ``golden`` has for all.
"""

from __future__ import annotations

from ansible_collections.sparks.hy3.tests.unit.roles.golden import (
    API,
    NCCL_LOG,
    NOT_THE_DRIVERS,
    RAY,
    RAY_HEAD,
    RAY_UNIT,
    RAY_WORKER,
    SERVE,
    SERVE_UNIT,
    Comparison,
    Differences,
    GoldenRay,
    Node,
    Ours,
    Port,
    Table,
    environment_of_both,
    environment_of_driver,
)

# ---- The recipe

HEAD, WORKER = "192.168.100.1", "192.168.100.2"
ADDRESSES = {"spark-1": HEAD, "spark-2": WORKER}
GID_INDEXES = {"spark-1": 3, "spark-2": 6}
HCA, NETDEV = "rocep1s0f1", "enp1s0f1np1"

SEED_NETWORK = {
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_HCA": HCA,
    "NCCL_SOCKET_IFNAME": NETDEV,
    "GLOO_SOCKET_IFNAME": NETDEV,
}
SEED_MEMORY = {"RAY_memory_monitor_refresh_ms": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
SEED_ENVIRONMENT: dict[str, Table] = {
    node: SEED_NETWORK | SEED_MEMORY | {"VLLM_HOST_IP": address, "NCCL_IB_GID_INDEX": str(GID_INDEXES[node])}
    for node, address in ADDRESSES.items()
}
# Step 3 exports on the head what step 2 gives its raylet.
SEED_DRIVER_ENVIRONMENT = SEED_ENVIRONMENT["spark-1"]

SEED_RAY: dict[str, Table] = {
    "spark-1": {"head": "", "node-ip-address": HEAD, "port": "6379", "object-store-memory": "2000000000"},
    "spark-2": {"address": f"{HEAD}:6379", "node-ip-address": WORKER, "object-store-memory": "2000000000"},
}
SEED_SERVE: Table = {
    "served-model-name": "hy3-nvfp4",
    "trust-remote-code": "",
    "distributed-executor-backend": "ray",
    "tensor-parallel-size": "2",
    "pipeline-parallel-size": "1",
    "moe-backend": "marlin",
    "enforce-eager": "",
    "kv-cache-dtype": "fp8",
    "max-model-len": "163840",
    "max-num-seqs": "2",
    "max-num-batched-tokens": "8192",
    "gpu-memory-utilization": "0.85",
    "speculative-config": '{"method":"mtp","num_speculative_tokens":1}',
    "host": "0.0.0.0",
    "port": "8000",
}

# systemd-run's own options and properties, as settings of a unit.
SEED_SCOPE: Table = {"--user": "", "--scope": "", "--collect": "", "Service.MemorySwapMax": "0"}


# ---- Where we differ

ENVIRONMENT: Differences = (
    environment_of_both("sparks")
    | NCCL_LOG
    | {
        "NCCL_IB_HCA": Ours(f"={HCA}", "exact; without = NCCL takes every HCA whose name begins so"),
        "NCCL_SOCKET_IFNAME": Ours(f"={NETDEV}", "exact; without = NCCL takes a VLAN of this device too"),
    }
)
DRIVER_ENVIRONMENT: Differences = environment_of_driver("sparks", HEAD) | {
    name: Ours(None, NOT_THE_DRIVERS) for name in (*SEED_NETWORK, "NCCL_IB_GID_INDEX")
}
SCOPE: Differences = {
    "--user": Ours(None, "a system unit outlives the login that started it (decision 2)"),
    "--scope": Ours(None, "a service, so that systemd starts, stops and reports it (decision 2)"),
    "--collect": Ours(None, "a unit that failed stays, so that status can say why"),
}


def capped(cap: str, differences: Differences) -> Comparison:
    return SEED_SCOPE | {"Service.MemoryMax": cap}, SCOPE | differences


class TestSeed(GoldenRay):
    inventory = "sparks"
    profile = "libertai_nvfp4_tp2"
    checkpoint = "/opt/hy3/models/Hy3-NVFP4"
    memory = ["--share", "0.85"]
    nodes = {
        name: Node(address, (Port(NETDEV, HCA, address, GID_INDEXES[name]),)) for name, address in ADDRESSES.items()
    }
    ray = {"spark-1": (SEED_RAY["spark-1"], RAY_HEAD), "spark-2": (SEED_RAY["spark-2"], RAY_WORKER)}
    environment = {node: (SEED_ENVIRONMENT[node], ENVIRONMENT) for node in ADDRESSES}
    units = {
        ("spark-1", RAY): capped("104G", RAY_UNIT),
        ("spark-2", RAY): capped("110G", RAY_UNIT),
        ("spark-1", SERVE): capped("8G", SERVE_UNIT),
    }
    slices = {"spark-1": 104 + 8, "spark-2": 110}
    vllm = (SEED_SERVE, API)
    driver = (SEED_DRIVER_ENVIRONMENT, DRIVER_ENVIRONMENT)
    # What the profile states beside flags: the checkpoint, budget, patch, and what the author measured.
    stated = {
        "engine": "vllm",
        "nodes": 2,
        "checkpoint": {"repository": "LibertAIDAI/Hy3-NVFP4", "directory": "Hy3-NVFP4", "shards": 99, "size_gb": 169},
        "patches": ["P1"],
        "memory": {"os_reserve": "4G", "head": {"ray": "104G", "serve": "8G"}, "worker": {"ray": "110G"}},
        "smoke": {"question": "capital of France? one word", "expect": "Paris"},
        "readback": {"quantization": "modelopt_fp4"},
        "expected": {
            "kv_cache_tokens": 176784,
            "max_concurrency": 1.08,
            "draft_acceptance": 0.613,
            "decode_tokens_per_s": 19.5,
            "ttft_ms": 252,
            "start_minutes": 11,
            "workload": "one_256",
            "conditions": "single stream, 256 tokens, temperature 0, MTP k=1, after two warm-up generations",
        },
    }
