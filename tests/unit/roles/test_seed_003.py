# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What inventories/sparks-sglang would run, against vroomfondel's model card, flag by flag.

The card's command is for SGLang 0.5.14. Which of its flags 0.5.23 takes is run in tests/sglang.
"""

from __future__ import annotations

from ansible_collections.sparks.hy3.tests.unit.roles.golden import (
    COMPILERS,
    NCCL_LOG,
    SERVE,
    UNIT,
    Comparison,
    Differences,
    GoldenRanks,
    Node,
    Ours,
    Port,
    Table,
)

# ---- The card

ADDRESSES = {f"spark-{n}": f"192.168.100.{n}" for n in (1, 2, 3, 4)}
HEAD = ADDRESSES["spark-1"]
HCA, NETDEV = "rocep1s0f1", "enp1s0f1np1"
MODEL = "/opt/hy3/models/Hy3-NVFP4-W4A4"


def card(rank: int) -> Table:
    return {
        "model-path": "vroomfondel/Hy3-NVFP4-W4A4",
        "quantization": "modelopt_fp4",
        "trust-remote-code": "",
        "tp-size": "4",
        "nnodes": "4",
        "node-rank": str(rank),
        "nccl-init-addr": "<head-ip>:<port>",
        "moe-runner-backend": "flashinfer_cutlass",
        "fp4-gemm-backend": "flashinfer_cutlass",
        "attention-backend": "triton",
        "kv-cache-dtype": "fp8_e4m3",
        "context-length": "262144",
        "mem-fraction-static": "0.70",
        "reasoning-parser": "hunyuan",
        "tool-call-parser": "hunyuan",
        "cuda-graph-max-bs": "32",
        "disable-piecewise-cuda-graph": "",
        "served-model-name": "hy3",
    }


CARD_EAGLE: Table = {
    "speculative-algorithm": "EAGLE",
    "speculative-num-steps": "<n>",
    "speculative-eagle-topk": "1",
    "speculative-num-draft-tokens": "<k>",
}

# ---- Where we differ

ENDED = "the card's name for it ended with SGLang 0.5.19; this is its successor"
LONG = "the long name of the same option, by which the plan counts ranks for both engines"
ARGUMENTS: Differences = {
    "model-path": Ours(MODEL, "a directory: nothing is fetched at a start, and all nodes have the same"),
    "tp-size": Ours(None, LONG),
    "tensor-parallel-size": Ours("4", LONG),
    "pipeline-parallel-size": Ours("1", "SGLang's default, which the plan multiplies with the ranks"),
    "nccl-init-addr": Ours(None, "an alias of dist-init-addr"),
    "dist-init-addr": Ours(f"{HEAD}:29501", "the name that it has in --help; one port, for the firewall to know"),
    "mem-fraction-static": Ours("0.7", "the same number, as YAML writes it"),
    "cuda-graph-max-bs": Ours(None, ENDED),
    "cuda-graph-max-bs-decode": Ours("32", ENDED),
    "disable-piecewise-cuda-graph": Ours(None, ENDED),
    "disable-prefill-cuda-graph": Ours("", ENDED),
    "host": Ours("127.0.0.1", "SGLang's default, said because its API has no key here (decision 7)"),
    "port": Ours("8000", "the same port whichever engine serves; SGLang's default is 30000"),
}
STEPS = "the card's controller went between 1 and 3, at an acceptance of 1.6 tokens a step"
EAGLE: Differences = {
    "speculative-num-steps": Ours("1", STEPS),
    "speculative-num-draft-tokens": Ours("2", "what one step and topk 1 make; the card's controller went from 2 to 4"),
}


def environment_of(node: str) -> Differences:
    return {
        **NCCL_LOG,
        "NCCL_DEBUG_FILE": Ours("/run/hy3-serve/nccl.%p.log", "where verify reads that log"),
        "HY3_DIGEST": Ours("SHA256", "restart by digest (decision 1)"),
        "HY3_CHECKPOINT": Ours("SHA256", "another checkpoint at the same path means a restart (decision 1)"),
        "PATH": Ours(
            "/opt/hy3/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "a container's image has its own; JIT compilers need nvcc and ninja",
        ),
        "SGLANG_HOST_IP": Ours(ADDRESSES[node], "else its message queue may advertise the Wi-Fi's address (case B93)"),
        "MAX_JOBS": Ours("2", COMPILERS),
        "NCCL_IB_DISABLE": Ours("0", "LibertAI's, seed 000"),
        "NCCL_IB_GID_INDEX": Ours("3", "found at each start (decision 4)"),
        "NCCL_IB_HCA": Ours(f"={HCA}", "exact; without = NCCL takes every HCA whose name begins so"),
        "NCCL_SOCKET_IFNAME": Ours(f"={NETDEV}", "exact; without = NCCL takes a VLAN of this device too"),
        "GLOO_SOCKET_IFNAME": Ours(NETDEV, "LibertAI's, seed 000"),
    }


CAP = "the card has no limits; 0.70 of the memory is 85 GiB, and a rank takes more beside it"
RANK_UNIT: Differences = UNIT | {
    "Service.RuntimeDirectory": Ours(SERVE, "holds this start's GID index and NCCL's log"),
    "Unit.BindsTo": Ours("hy3-firewall.service", "what a rank listens on runs code for whoever reaches it"),
    "Unit.After": Ours("network-online.target multi-user.target hy3-firewall.service", "as Wants and BindsTo"),
    "Service.EnvironmentFile": Ours(f"-/run/{SERVE}/fabric.env", "the index drifts: found at each start (decision 4)"),
    "Service.MemoryMax": Ours("108G", CAP),
    "Service.MemorySwapMax": Ours("0", "LibertAI's, seed 000: a kill, no thrashing"),
}


class TestSeed(GoldenRanks):
    inventory = "sparks-sglang"
    profile = "vroomfondel_w4a4_tp4"
    nodes = {name: Node(address, (Port(NETDEV, HCA, address, 3),)) for name, address in ADDRESSES.items()}
    program = ["/opt/hy3/venv/bin/python", "-m", "sglang.launch_server"]
    checkpoint = "/opt/hy3/models/Hy3-NVFP4-W4A4"
    memory = ["--floor", "100G"]
    environment = {node: ({}, environment_of(node)) for node in ADDRESSES}
    units = {(node, SERVE): ({}, RANK_UNIT) for node in ADDRESSES}
    slices = dict.fromkeys(ADDRESSES, 108)
    arguments: dict[str, Comparison] = {node: (card(rank), ARGUMENTS) for rank, node in enumerate(ADDRESSES)}
    stated = {
        "engine": "sglang",
        "nodes": 4,
        "checkpoint": {"repository": "vroomfondel/Hy3-NVFP4-W4A4", "directory": "Hy3-NVFP4-W4A4"},
        "patches": ["P4", "P5", "P6"],
        "notice": "The checkpoint is work in progress: an intermediate, experimental export by its card, "
        "not a finished release and not for production.",
        "expected": {
            "decode_tokens_per_s": 21.2,
            "aggregate_streams": 4,
            "aggregate_tokens_per_s": 40,
            "workload": "one_1024",
            "aggregate_workload": "four_1024",
            "conditions": "1024 tokens, one stream and four, speculation off, SGLang 0.5.14 built for sm_121",
        },
    }


class TestSpeculation(TestSeed):
    """The card's second command: the same with EAGLE, by one variable."""

    variables = {"hy3_speculative": True}
    arguments = {node: (card(rank) | CARD_EAGLE, ARGUMENTS | EAGLE) for rank, node in enumerate(ADDRESSES)}
