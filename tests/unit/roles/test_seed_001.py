# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What inventories/sparks-w4a16 would run, against the post "Hy3 is up on 2x DGX Spark", flag by flag.

The post is short: it names flags and findings and leaves the rest to its repository and to LibertAI's recipe.
"""

from __future__ import annotations

from ansible_collections.sparks.hy3.tests.unit.roles.golden import (
    API,
    NCCL_LOG,
    RAY,
    RAY_HEAD,
    RAY_UNIT,
    RAY_WORKER,
    SERVE,
    SERVE_UNIT,
    Differences,
    GoldenRay,
    Node,
    Ours,
    Port,
    Table,
    environment_of_both,
    environment_of_driver,
)

# ---- The post

SEED_SERVE: Table = {
    "distributed-executor-backend": "ray",
    "tensor-parallel-size": "2",
    "moe-backend": "marlin",
    "enforce-eager": "",
    "kv-cache-dtype": "fp8",
    "max-model-len": "131072",
    "max-num-seqs": "6",
    "gpu-memory-utilization": "0.90",
    "speculative-config": '{"method":"mtp","num_speculative_tokens":1}',
    "tool-call-parser": "hy_v3",
    "reasoning-parser": "hy_v3",
}

# ---- Where we differ: the post is silent, so each is what we add

HEAD, WORKER = "192.168.100.1", "192.168.100.2"
ADDRESSES = {"spark-1": HEAD, "spark-2": WORKER}
HCA, NETDEV = "rocep1s0f1", "enp1s0f1np1"

REPOSITORY = "the command in the repository that the post links has it"
SERVE_ARGUMENTS: Differences = API | {
    "served-model-name": Ours("hy3", REPOSITORY),
    "trust-remote-code": Ours("", REPOSITORY),
    "enable-auto-tool-choice": Ours("", f"{REPOSITORY}, and without it the tool parser is not asked"),
    "gpu-memory-utilization": Ours("0.9", "the same number, as YAML writes it"),
    "pipeline-parallel-size": Ours("1", "vLLM's default, which the plan multiplies with the ranks"),
    "max-num-batched-tokens": Ours("8192", "vLLM's default there, and what the counted overhead of a rank is for"),
    "port": Ours("8000", "vLLM's default, said because the firewall names it"),
}

LIBERTAI = "seed 000 has it, whose flags the post builds on"
COMMON: Differences = {
    "RAY_memory_monitor_refresh_ms": Ours("0", f"{LIBERTAI}; Ray kills at 95 % of a memory that weights fill"),
    "MALLOC_MMAP_THRESHOLD_": Ours("65536", LIBERTAI),
}


def environment_of(node: str) -> Differences:
    return {
        **environment_of_both("sparks-w4a16"),
        **NCCL_LOG,
        **COMMON,
        "VLLM_HOST_IP": Ours(ADDRESSES[node], LIBERTAI),
        "NCCL_IB_DISABLE": Ours("0", LIBERTAI),
        "NCCL_IB_GID_INDEX": Ours("3", "found at each start, where the post's containers have one number"),
        "NCCL_IB_HCA": Ours(f"={HCA}", "exact; without = NCCL takes every HCA whose name begins so"),
        "NCCL_SOCKET_IFNAME": Ours(f"={NETDEV}", "exact; without = NCCL takes a VLAN of this device too"),
        "GLOO_SOCKET_IFNAME": Ours(NETDEV, LIBERTAI),
    }


RAY_OF: dict[str, Differences] = {
    "spark-1": {**RAY_HEAD, "head": Ours("", LIBERTAI), "port": Ours("6379", LIBERTAI)},
    "spark-2": {**RAY_WORKER, "address": Ours(f"{HEAD}:6379", LIBERTAI)},
}
STORE: Differences = {"object-store-memory": Ours("2000000000", f"{LIBERTAI}; Ray's default is 30 % of the memory")}
CAP = "the post has no limits; 0.90 of the memory is more than LibertAI's cap of the raylet"


def capped(cap: str, differences: Differences) -> tuple[Table, Differences]:
    caps = {
        "Service.MemoryMax": Ours(cap, CAP),
        "Service.MemorySwapMax": Ours("0", f"{LIBERTAI}: a kill, no thrashing"),
    }
    return {}, differences | caps


class TestSeed(GoldenRay):
    inventory = "sparks-w4a16"
    profile = "kodelow_w4a16_tp2"
    checkpoint = "/opt/hy3/models/Hy3-NVFP4-W4A16"
    memory = ["--share", "0.9"]
    nodes = {name: Node(address, (Port(NETDEV, HCA, address, 3),)) for name, address in ADDRESSES.items()}
    ray = {
        node: ({}, RAY_OF[node] | STORE | {"node-ip-address": Ours(address, LIBERTAI)})
        for node, address in ADDRESSES.items()
    }
    environment = {node: ({}, environment_of(node)) for node in ADDRESSES}
    units = {
        ("spark-1", RAY): capped("111G", RAY_UNIT),
        ("spark-2", RAY): capped("117G", RAY_UNIT),
        ("spark-1", SERVE): capped("6G", SERVE_UNIT),
    }
    slices = {"spark-1": 111 + 6, "spark-2": 117}
    vllm = (SEED_SERVE, SERVE_ARGUMENTS)
    driver = (
        {},
        environment_of_driver("sparks-w4a16", HEAD) | COMMON | {"VLLM_HOST_IP": Ours(HEAD, LIBERTAI)},
    )
    stated = {
        "engine": "vllm",
        "nodes": 2,
        "checkpoint": {"repository": "kodelow/Hy3-NVFP4-W4A16", "directory": "Hy3-NVFP4-W4A16", "size_gb": 181},
        # The post mends the parsers' names of the special tokens with sed.
        "patches": ["P2"],
        # The post ran 0.23.1, which was never released.
        "packages": ["vllm==0.24.0", "ray==2.60.0"],
        "expected": {
            "kv_cache_tokens": 180000,
            "draft_acceptance": [0.62, 0.76],
            "decode_tokens_per_s": 21.8,
            "aggregate_tokens_per_s": 59.7,
            "workload": "one_512",
            "aggregate_workload": "six_512",
            "conditions": "512 tokens, temperature 0.9, top_p 1.0, MTP k=1, one stream and six, vLLM 0.23.1",
        },
    }
