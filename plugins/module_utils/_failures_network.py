# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Failures between the nodes: NCCL over RoCE and sockets, Gloo, and torch's rendezvous."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._failure import (
    CONSEQUENCE,
    RECIPE,
    SYMPTOM,
    Rule,
    rule,
)

_GID = "Compare NCCL_IB_GID_INDEX and NCCL_IB_HCA of the workers with each node's GID table (sparks.hy3.roce_gid)"
_GLOO = (
    "Set GLOO_SOCKET_IFNAME to the fabric interface and VLLM_HOST_IP (SGLANG_HOST_IP) to the node's fabric address on "
    "every node"
)
_DOCTOR = "Run doctor_hy3, which compares the links of all nodes"
_LOOK = "Look at the other nodes: memory, unit and log of the rank that is missing"
_NCCL = "NCCL 2.28.9, strings of the library"
# Connections of clients, of web pages and of NCCL's monitor, which end as they like.
_OTHERS = r"RAS |HTTP|https?://|h11|uvicorn|[Cc]lient ?[Dd]isconnect"
_NET: dict[str, t.Any] = {"family": "network"}
_LOST: dict[str, t.Any] = {"family": "network", "kind": CONSEQUENCE, "peers": True}

NETWORK_RULES: tuple[Rule, ...] = (
    rule(
        "memlock",
        r"ibv_(?:reg_mr\w*|reg_dmabuf_mr|create_qp|create_cq|alloc_pd) failed with error (?:Cannot allocate memory|"
        r"Operation not permitted)|ibv_reg_mr\w* .*Cannot allocate memory",
        "RDMA could not lock its memory",
        "See that LimitMEMLOCK is infinity for the running raylet or engine (/proc/PID/limits; limits.conf does not "
        "reach "
        "services); if it is and CmaFree is above CmaTotal in /proc/meminfo, boot with kho=off or kernel 6.17",
        "NCCL; field cases B33 and B34",
        **_NET,
    ),
    rule(
        "qp-timeout",
        r"ibv_modify_qp failed with (?:error )?(?:110 |Connection timed out)"
        r"(?:.*(?P<legs>local GID [0-9a-f:.]+, remote GID [0-9a-f:.]+))?",
        "A RoCE port did not reach its counterpart ({legs}): they are on legs that no cable "
        "connects, or "
        "the index names another network",
        "In a ring set NCCL_IB_SUBNET_AWARE_ROUTING=1 with NCCL 2.30 or newer (docs/preflight.md); else "
        + _GID[0].lower()
        + _GID[1:],
        "NCCL; eugr/spark-vllm-docker issue 252; field case B25",
        **_NET,
    ),
    rule(
        "qp-refused",
        r"ibv_modify_qp failed with (?:error )?(?P<why>(?:\d+ )?[A-Z][\w ]*)",
        "NCCL could not connect a RoCE queue ({why}); a GID index that is not this node's RoCE v2 row is the usual "
        "reason",
        _GID,
        "NCCL; field cases B01 and B14",
        unless=r"retrying \d+/\d+",
        **_NET,
    ),
    rule(
        "gid-read",
        r"ibv_query_gid failed|failed to (?:read|query) gid|Failed to get gid",
        "The GID index that NCCL was given is no row of this node's table",
        _GID,
        _NCCL,
        **_NET,
    ),
    rule(
        "roce-retries",
        r"Got completion (?:from peer (?P<peer>\S+) )?with (?:status=(?:IBV_WC_RETRY_EXC_ERR\()?12|error 12)\b"
        r"|IBV_WC_(?:RNR_)?RETRY_EXC_ERR",
        "RoCE packets were not acknowledged: the other node is gone or hangs, or the path loses them (a link that went "
        "down, an MTU that differs, a wrong GID index)",
        _LOOK + "; if they are well, " + _DOCTOR[0].lower() + _DOCTOR[1:],
        "NCCL; field case B20",
        kind=SYMPTOM,
        peers=True,
        **_NET,
    ),
    rule(
        "roce-completion",
        r"Got completion (?:from peer \S+ )?with (?:status=(?P<status>[\w()]+)|error (?P<error>\d+))",
        "RoCE reported a failed transfer (status {status}{error})",
        _LOOK + "; then " + _DOCTOR[0].lower() + _DOCTOR[1:],
        "NCCL",
        **_LOST,
    ),
    rule(
        "roce-event",
        r"NET/IB : \S+ (?:async fatal event(?: on \S+ \([^)]*\))?: (?P<event>[\w .]+)|Got async event : "
        r"(?P<older>[\w ]*"
        r"(?:port error|fatal)[\w ]*)|GID table changed)",
        "The RoCE port changed under the running engine ({event}{older}): its link went down, or an address came or "
        "went",
        "See that the link is up and the address is there, and start again: the GID index is resolved at every start",
        "NCCL",
        unless=r"non-fatal",
        **_NET,
    ),
    rule(
        "roce-none",
        r"NET/IB : No device found|NET/IB : Unable to open device|Failed to open libibverbs|No HCA available",
        "NCCL found no RoCE device of the name in NCCL_IB_HCA, and goes over sockets, many times slower",
        "Compare NCCL_IB_HCA with `ibdev2netdev` on that node, and see that rdma-core is installed",
        _NCCL,
        fatal=False,
        **_NET,
    ),
    rule(
        "no-interface",
        r"(?:Bootstrap|NET/Socket) : (?:no (?:socket )?interface found|No usable listening interface found)"
        r"|Unable to find (?:address|interface) for:? (?P<name>\S+)|makeDeviceFor\w+\(\): unsupported gloo device"
        r"|Unable to resolve hostname to a \(local\) address",
        "A rank found no network interface of the name that it was given ({name}), or it has no address",
        "Compare NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with `ip address` on that node; names differ from node to "
        "node",
        "NCCL and Gloo; field case B17",
        **_NET,
    ),
    rule(
        "gloo-loopback",
        r"(?:connectFullMesh|[Gg]loo).*127\.\d+\.\d+\.\d+|[Cc]onnect(?:ion)? .*refused.*remote=\[127\.",
        "Gloo of one node offered 127.0.0.1 to the others",
        _GLOO,
        RECIPE,
        **_NET,
    ),
    rule(
        "gloo-mesh",
        r"connectFullMesh failed",
        "The ranks did not reach each other over Gloo: one offered an address that the others cannot reach, a firewall "
        "stands between them, or one is gone",
        _GLOO + "; see that every node's rank is still there",
        RECIPE + "; gpustack issue 2125",
        kind=SYMPTOM,
        peers=True,
        vague=True,
        **_NET,
    ),
    rule(
        "duplicate-gpu",
        r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device",
        "Ranks {a} and {b} are on the same GPU",
        "See that each node has joined with its own GPU, and that no two ranks are placed on one node",
        _NCCL,
        **_NET,
    ),
    rule(
        "nccl-versions",
        r"(?:Mismatched NCCL version detected|NCCL version mismatch)(?: : | with )?(?P<which>.{0,80})",
        "The nodes run different releases of NCCL ({which})",
        "Install the same packages on every node (tag engine), and take LD_PRELOAD and VLLM_NCCL_SO_PATH out",
        _NCCL + "; field case B83",
        **_NET,
    ),
    rule(
        "nccl-truncated",
        r"[Mm]essage truncated : receiv(?:ed|ing) \d+",
        "Two ranks exchanged messages of different sizes: they run different code, patches or settings",
        "Compare packages, patches and variables of the nodes (doctor_hy3), and install the same on each",
        _NCCL + "; field case B83",
        **_NET,
    ),
    rule(
        "nccl-usage",
        r"ncclInvalidUsage|invalid usage \(run with NCCL_DEBUG",
        "NCCL was used wrongly: two ranks on one GPU, or an interface or HCA that this node does not have",
        "Compare NCCL_IB_HCA, NCCL_SOCKET_IFNAME and the rank's node with what is there (doctor_hy3)",
        "NCCL; field case B17",
        vague=True,
        **_NET,
    ),
    rule(
        "connection-refused",
        r"socketPollConnect.*(?:Connection refused|exceeded)|[Cc]onnect to (?P<to>\S+) .*failed ?: (?:Software caused|"
        r"Connection (?:refused|timed out)|No route to host|Network is unreachable)"
        r"|(?:\[Errno (?:111|113|101)\]|ConnectionRefusedError|No route to host|Network is unreachable|EHOSTUNREACH"
        r"|ENETUNREACH)",
        "A rank did not reach another one (No route, or nobody listens there)",
        "See that the link is up, that the other node's unit runs, and that no firewall stands between them "
        "(doctor_hy3)",
        "NCCL and torch",
        kind=SYMPTOM,
        fatal=False,
        peers=True,
        unless=r"https?://|INFO|retry(?:ing)?\b",
        **_NET,
    ),
    rule(
        "rank-missing",
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<joined>\d+/\d+) clients joined"
        r"|The client socket has (?:timed out after (?P<after>\S+)|failed to connect to any network address)",
        "Not all ranks came to the meeting point in time ({joined})",
        "See that every node's unit runs and reaches the head's address, and that firewall and rendezvous port are the "
        "same on all",
        "torch c10d",
        kind=SYMPTOM,
        peers=True,
        **_NET,
    ),
    rule(
        "rendezvous-port",
        r"server socket has failed to (?:listen|bind)(?:.*?(?:port: |\]:)(?P<port>\d+))?",
        "The rendezvous port ({port}) is taken on the head, most likely by an earlier engine",
        "End that process (`ss -ltnp` names it), or wait until its memory and ports are free",
        "torch c10d",
        **_NET,
    ),
    rule(
        "collective-timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\([^)]*OpType=(?P<op>\w+)"
        r"|(?:NCCL|collective) operations? (?:have|has) failed or timed out|Timeout\(ms\)=\d+\) ran for \d+ "
        r"milliseconds"
        r"|RPC call to (?P<method>\w+) timed out|[Tt]imed out waiting \d+ms for (?:recv|send) operation",
        "A rank waited for the others until its patience ended ({op}{method})",
        _LOOK + "; the one that did not come to the collective has the reason",
        "torch ProcessGroupNCCL, Gloo, vLLM",
        kind=SYMPTOM,
        peers=True,
        **_NET,
    ),
    rule(
        "remote-gone",
        r"Connection closed by (?:remote )?peer|remote process exited or there was a network error|ncclRemoteError"
        r"|Failed to recv, got 0 bytes|Did the remote server shutdown or crash|recvValue failed",
        "A rank lost its connection to another one",
        _LOOK,
        "NCCL, Gloo and torch; field case B114",
        unless=_OTHERS,
        **_LOST,
    ),
    rule(
        "connection-lost",
        r"Connection reset by peer|Socket closed|Read error \[|Broken pipe",
        "A rank lost its connection to another one",
        _LOOK,
        "NCCL, Gloo, torch and Ray; field case B114",
        unless=_OTHERS,
        fatal=False,
        **_LOST,
    ),
    rule(
        "nccl-cuda",
        r"unhandled cuda error",
        "NCCL met an error of CUDA, most often too little memory",
        "Read NCCL's debug log of that rank; lower gpu_memory_utilization if memory was short",
        "NCCL",
        vague=True,
        **_NET,
    ),
    rule(
        "nccl-system",
        r"unhandled system error|ncclSystemError",
        "NCCL could not open its RDMA connection; a GID index that is not this node's RoCE v2 row is the usual reason",
        _GID,
        RECIPE,
        kind=SYMPTOM,
        peers=True,
        vague=True,
        **_NET,
    ),
)
