# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What inventories/sparks-tp3 would run, against the card of marianbusoi/Hy3-NVFP4-FP8-TP3, flag by flag.

The card has one command (quick start B, one host with three GPUs) and a file for sparkrun that it does not print.
"""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._topology import RING_ENVIRONMENT
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

# ---- The card

SEED_SERVE: Table = {
    "tensor-parallel-size": "3",
    "tool-call-parser": "hy_v3",
    "reasoning-parser": "hy_v3",
    "enable-auto-tool-choice": "",
    "speculative-config": '{"method":"mtp","num_speculative_tokens":2}',
}

# ---- Where we differ

LIBERTAI = "seed 000 has it, and its Sparks are these Sparks"
DEFAULT = "vLLM's default, said"
SERVE_ARGUMENTS: Differences = API | {
    "speculative-config": Ours(
        '{"method":"mtp","num_speculative_tokens":1,"moe_backend":"triton"}',
        "seed 001 measured that the second token costs 30 % on GB10; Marlin does not take the BF16 MTP layer",
    ),
    "served-model-name": Ours("hy3-nvfp4-fp8", "a name that does not change with the path"),
    "distributed-executor-backend": Ours("ray", "three hosts, where the card's command has one"),
    "pipeline-parallel-size": Ours("1", f"{DEFAULT} because the plan multiplies it with the ranks"),
    "moe-backend": Ours("marlin", f"{LIBERTAI}: the only backend for NVFP4 experts that ran on sm_121"),
    "enforce-eager": Ours("", f"{LIBERTAI}: graph capture is the largest transient allocation"),
    "max-model-len": Ours("262144", f"{DEFAULT} so that the preflight holds it against the pool"),
    "max-num-seqs": Ours("6", "seed 001 has it; vLLM's default is for hundreds of users"),
    "max-num-batched-tokens": Ours("8192", f"{DEFAULT} because the counted overhead of a rank is for it"),
    "gpu-memory-utilization": Ours("0.85", f"{LIBERTAI}; vLLM's 0.92 is more than a Spark has free after boot"),
    "port": Ours("8000", f"{DEFAULT} because the firewall names it"),
}

ADDRESSES = {"spark-1": "192.168.1.11", "spark-2": "192.168.1.12", "spark-3": "192.168.1.13"}
HEAD = ADDRESSES["spark-1"]
LEFT, RIGHT = ("enp1s0f0np0", "rocep1s0f0"), ("enp1s0f1np1", "rocep1s0f1")
# As inventories/sparks-tp3 has them; the indexes differ, as on nodes whose links came up one after the other.
LINKS = {
    "spark-1": (Port(*LEFT, "192.168.12.1", 3), Port(*RIGHT, "192.168.31.1", 5)),
    "spark-2": (Port(*LEFT, "192.168.23.2", 3), Port(*RIGHT, "192.168.12.2", 3)),
    "spark-3": (Port(*LEFT, "192.168.31.3", 7), Port(*RIGHT, "192.168.23.3", 5)),
}
MANAGEMENT = "enP7s7"

COMMON: Differences = {
    "RAY_memory_monitor_refresh_ms": Ours("0", f"{LIBERTAI}; Ray kills at 95 % of a memory that weights fill"),
    "MALLOC_MMAP_THRESHOLD_": Ours("65536", LIBERTAI),
    **{
        name: Ours(value, "a ring without a switch, which the card leaves to sparkrun")
        for name, value in RING_ENVIRONMENT.items()
    },
}


def environment_of(node: str) -> Differences:
    """No GID index: the one of a port is another subnet's on the next."""
    return {
        **environment_of_both("sparks-tp3"),
        **NCCL_LOG,
        **COMMON,
        "VLLM_HOST_IP": Ours(ADDRESSES[node], "in a ring the one address that every node reaches"),
        "NCCL_IB_DISABLE": Ours("0", LIBERTAI),
        "NCCL_IB_HCA": Ours("=rocep1s0f0,rocep1s0f1", "both ports of the ring, by exact name"),
        "NCCL_SOCKET_IFNAME": Ours(f"={MANAGEMENT}", "where the ranks find each other"),
        "GLOO_SOCKET_IFNAME": Ours(MANAGEMENT, "as NCCL_SOCKET_IFNAME"),
    }


STARTED = "the card leaves that to sparkrun"
RAY_OF: dict[str, Differences] = {
    node: {**RAY_WORKER, "address": Ours(f"{HEAD}:6379", STARTED)} for node in ("spark-2", "spark-3")
} | {"spark-1": {**RAY_HEAD, "head": Ours("", STARTED), "port": Ours("6379", STARTED)}}
STORE: Differences = {"object-store-memory": Ours("2000000000", f"{LIBERTAI}; Ray's default is 30 % of the memory")}


def capped(cap: str, differences: Differences) -> tuple[Table, Differences]:
    caps = {"Service.MemoryMax": Ours(cap, LIBERTAI), "Service.MemorySwapMax": Ours("0", LIBERTAI)}
    return {}, differences | caps


class TestSeed(GoldenRay):
    inventory = "sparks-tp3"
    profile = "marianbusoi_nvfp4_fp8_tp3"
    checkpoint = "/opt/hy3/models/Hy3-NVFP4-FP8-TP3"
    memory = ["--share", "0.85"]
    nodes = {name: Node(address, LINKS[name], MANAGEMENT) for name, address in ADDRESSES.items()}
    nccl = "2.30.7"  # of torch 2.14.0, of vLLM 0.33.0
    ray = {
        node: ({}, RAY_OF[node] | STORE | {"node-ip-address": Ours(address, STARTED)})
        for node, address in ADDRESSES.items()
    }
    environment = {node: ({}, environment_of(node)) for node in ADDRESSES}
    units = {
        ("spark-1", RAY): capped("104G", RAY_UNIT),
        ("spark-2", RAY): capped("110G", RAY_UNIT),
        ("spark-3", RAY): capped("110G", RAY_UNIT),
        ("spark-1", SERVE): capped("8G", SERVE_UNIT),
    }
    slices = {"spark-1": 104 + 8, "spark-2": 110, "spark-3": 110}
    vllm = (SEED_SERVE, SERVE_ARGUMENTS)
    driver = (
        {},
        environment_of_driver("sparks-tp3", HEAD) | COMMON | {"VLLM_HOST_IP": Ours(HEAD, "as the raylet's")},
    )
    stated = {
        "engine": "vllm",
        "nodes": 3,
        "checkpoint": {"repository": "marianbusoi/Hy3-NVFP4-FP8-TP3", "directory": "Hy3-NVFP4-FP8-TP3"},
        # The card's own patch bumps pad_vocab_size to lcm(64, 3).
        "patches": ["P3"],
        "packages": ["vllm==0.33.0", "ray==2.60.0"],
        "expected": {"conditions": "nothing to compare with, the card has no figures"},
    }
