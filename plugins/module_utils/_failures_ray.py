# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Failures of Ray: the cluster that does not form, nodes and actors that are gone, placement."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._failure import CONSEQUENCE, SYMPTOM, Rule, rule

_PLACEMENT = "Check that every node has joined by its fabric address and that no earlier engine still holds its GPU"
_ADDRESS = "Start Ray with --node-ip-address and the engine with VLLM_HOST_IP, both the node's fabric address"
_LOOK = "Look at that node: memory, the kernel's log, hy3-ray.service and the logs of its workers"
_LOST: dict[str, t.Any] = {"kind": CONSEQUENCE, "peers": True}

RAY_RULES: tuple[Rule, ...] = (
    rule(
        "ray-versions",
        r"(?:RuntimeError|Exception): Version mismatch: The cluster was started with",
        "The nodes run different releases of Ray or Python",
        "Install the same Python and the same pinned packages on every node (tag engine)",
        "Ray check_version_info; field case B83",
    ),
    rule(
        "ray-missing",
        r"No module named 'ray'|Failed to import Ray|Ray is not installed|ray: command not found",
        "There is no Ray in the engine's venv on that node, and no vLLM wheel since 0.19.1 brings it",
        "Install ray in the venv of every node (hy3_engine_packages)",
        "vLLM wheels, read",
    ),
    rule(
        "ray-token",
        r"InvalidAuthToken|Invalid or missing authentication token|no authentication token was found"
        r"|authentication token is (?:missing|invalid|incorrect)|Token authentication is enabled but",
        "Ray's token of that process is missing or not the cluster's",
        "Run serve_hy3 again, which gives every node the head's token; start a driver of your own with "
        "RAY_AUTH_MODE=token "
        "and RAY_AUTH_TOKEN_PATH",
        "Ray 2.52 and newer",
    ),
    rule(
        "ray-gone",
        r"Could not find any running Ray instance|Unable to connect to GCS|Failed to connect to GCS|Failed to get GCS"
        r"|Timed out while waiting for GCS",
        "The engine could not reach the Ray cluster",
        "Check hy3-ray.service on the head and RAY_ADDRESS of the engine",
        "Ray",
        peers=True,
    ),
    rule(
        "ray-already",
        r"Ray is trying to start at \S+ but is already running at (?P<address>\S+?)\.?(?:\s|$)",
        "Another Ray runs already at {address}",
        "End it if it is yours (its unit, by name), or give this one another port",
        "Ray",
    ),
    rule(
        "ray-port",
        r"Failed to start the grpc server\. The specified port is (?P<port>\d{1,5})",
        "Ray's port {port} is taken on that node",
        "End what listens there (`ss -ltnp` names it); a Ray or Redis of somebody else is not ours to stop",
        "Ray, strings of 2.60.0",
    ),
    rule(
        "ray-socket-path",
        r"AF_UNIX path length cannot exceed|AF_UNIX path too long|socket path .{0,200} too long",
        "Ray's directory has so long a name that its sockets do not fit below it",
        "Start Ray with a short --temp-dir; ours is /var/lib/hy3/ray",
        "Ray",
    ),
    rule(
        "ray-session",
        r"does not match persisted value|Session name \S+ does not match",
        "This node still belongs to an earlier Ray cluster",
        "Stop Ray on that node and start it again when the new head is up (serve_hy3 does both)",
        "Ray",
    ),
    rule(
        "ray-node-start",
        r"The current node timed out during startup|Failed to get node info|Failed to register worker"
        r"|The agent (?:failed to start|is killed)",
        "A node did not join the Ray cluster in time",
        "See that it reaches the head's Ray port (firewall, link), that no other Ray runs there, and that its clock "
        "is right",
        "Ray",
        unless=r"- The agent|INFO",
        fatal=False,
        kind=SYMPTOM,
        peers=True,
    ),
    rule(
        "ray-process-exited",
        r"^\s*(?P<process>raylet|gcs_server|log_monitor|dashboard|ray_client_server)\w* \[exit code=(?P<code>-?\d+)\]",
        "Ray's {process} ended (exit code {code})",
        "Exit code -9 is a kill, most often for memory: " + _LOOK[0].lower() + _LOOK[1:],
        "Ray",
        message=True,
        **_LOST,
    ),
    rule(
        "ray-address-unique",
        r"Every node should have a unique IP address",
        "Two nodes have joined Ray by the same address",
        _ADDRESS,
        "vLLM ray_executor; field case B28",
    ),
    rule(
        "ray-address",
        r"(?:[Nn]o available node types can fulfill|cannot be scheduled right now|Cannot .*fulfill?|infeasible)"
        r".*?'node:(?P<address>[\w.:-]+)'",
        "vLLM asked Ray for the node {address}, which has joined by another address or not at all",
        _ADDRESS,
        "vLLM ray_utils; field case B28",
        kind=SYMPTOM,
        fatal=False,
    ),
    rule(
        "ray-driver-node",
        r"driver node id \S+ is not included in a placement group",
        "Ray placed all ranks on other nodes than the driver's, or the head has no free GPU",
        _PLACEMENT,
        "vLLM ray_utils",
    ),
    rule(
        "ray-placement",
        r"Cannot provide a placement group|Required number of devices: |Current node has no \w+ available",
        "Ray has fewer GPUs to give than the tensor parallel size asks for",
        _PLACEMENT,
        "vLLM ray_utils",
        peers=True,
    ),
    rule(
        "ray-waits",
        r"The number of required \w+ exceeds the total number of available|Waiting for creating a placement group"
        r"|Tensor parallel size \(\d+\) exceeds available GPUs",
        "Ray has fewer free GPUs than the tensor parallel size asks for, and vLLM waits for them",
        _PLACEMENT,
        "vLLM ray_utils; field case B28",
        fatal=False,
        # vLLM goes on when the node joins late, so a later line tells more.
        **_LOST,
    ),
    rule(
        "world-size",
        r"World size \((?P<ranks>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\) in this node",
        "{ranks} ranks are to run on one node with {gpus} GPU: vLLM was not told that there are more nodes",
        "Set distributed-executor-backend to ray, or nnodes, node-rank and master-addr for mp",
        "seed 001; vLLM ParallelConfig",
    ),
    rule(
        "ray-disk",
        r"OutOfDiskError|Out of disk|Local disk is full|System running out of disk|no capacity, object creation will "
        r"fail",
        "The disk below Ray's directory is full",
        "Free disk space there (Ray's sessions of earlier starts lie in its temp-dir)",
        "Ray",
    ),
    rule(
        "ray-node-dead",
        r"The node with node id: \S+(?: and address: (?P<address>[\w.:-]+))?.*has been marked dead",
        "Ray has lost node {address}: no sign of life",
        _LOOK + "; a node that answers ping and no SSH swaps: end Ray on the other nodes first",
        "Ray gcs_server",
        **_LOST,
    ),
    rule(
        "ray-actor-dead",
        r"ActorDiedError|RayActorError|NodeDiedError|LocalRayletDiedError|WorkerCrashedError|[Aa]ctor (?:is dead|died)",
        "A worker of Ray ended, and its owner noticed",
        _LOOK,
        "Ray",
        **_LOST,
    ),
    rule(
        "ray-worker-dead",
        r"ActorUnavailableError|OwnerDiedError|RaySystemError: System error: (?:Broken|Socket)|RayChannelError"
        r"|ObjectLostError|A worker died or was killed while executing|Worker unexpectedly exits"
        r"|[Ww]orker (?:node |process )?(?:has )?died\b|[Ww]orker (?:node|process) (?:has )?died|Raylet is terminated"
        r"|(?<!\d)[1-9]\d* Workers crashed due to other reasons",
        "A worker of Ray ended, and the rest noticed",
        _LOOK,
        "Ray",
        fatal=False,
        **_LOST,
    ),
)
