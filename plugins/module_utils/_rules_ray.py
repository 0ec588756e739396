# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Rules about Ray, vLLM's executors and what these hand from the driver to the workers."""

from __future__ import annotations

import ipaddress
import re

from ansible_collections.sparks.hy3.plugins.module_utils._situation import (
    ERROR,
    WARNING,
    Rule,
    Situation,
    release_of,
)

RECIPE = "seed 000 (LibertAI, vLLM 0.24.0, two Sparks)"
# Bytes; the recipes give the store 1 to 2 GB, and the default on a Spark is 36 GB.
LARGE_STORE = 16e9
# Values that belong to one node; the head's are wrong on another.
PER_NODE = ("NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES")
# Prefixes that vLLM's first Ray executor copies over the workers' own values, and RayExecutorV2 where they have none.
COPIED = ("VLLM_", "LMCACHE_", "NCCL_", "UCX_", "HF_", "HUGGING_FACE_")
# Never copied, whatever the file says.
NEVER_COPIED = ("VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_NIXL_SIDE_CHANNEL_HOST")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)


def several_nodes(s: Situation) -> bool:
    return s.nodes > 1 and s.tensor_parallel * s.count("pipeline-parallel-size", "pp-size") > 1


def first_executor(s: Situation) -> bool:
    """Whether vLLM's first Ray executor runs, which overwrites the workers' values."""
    if s.version >= (0, 33):
        return False
    wanted = s.variable("VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    return wanted == "0" if s.version >= (0, 21) else wanted != "1"


def withheld(s: Situation) -> set[str]:
    """Names in the file that keeps variables of the driver from the workers."""
    names = s.node("carry_over", dict).get("names")
    return {str(name) for name in names} if isinstance(names, list) else set()


def of_the_driver(s: Situation) -> list[str]:
    kept = withheld(s)
    return [name for name in PER_NODE if s.variable(name) is not None and name not in kept]


def no_executor(s: Situation) -> str | None:
    executor = s.exact("distributed-executor-backend")
    if not several_nodes(s) or executor in ("ray", "external_launcher") or s.number("nnodes"):
        return None
    return f"distributed-executor-backend is {executor or 'not set'} on {s.nodes} nodes"


def no_ray(s: Situation) -> str | None:
    return "ray is not in the venv" if s.by_ray and s.package("ray") is None else None


def plasma(s: Situation) -> str | None:
    if not s.by_ray:
        return None
    size = s.ray_argument("object-store-memory")
    if size is None:
        return "object-store-memory is not set"
    # Of a raylet that runs the size is known, and not who chose it.
    large = re.fullmatch(r"\d{1,18}(\.0*)?", str(size)) and float(str(size)) > LARGE_STORE
    return f"object-store-memory is {size} bytes" if large else None


def memory_monitor(s: Situation) -> str | None:
    if not s.by_ray:
        return None
    value = s.ray_variable("RAY_memory_monitor_refresh_ms")
    return None if value == "0" else f"RAY_memory_monitor_refresh_ms of the raylet is {value or 'not set'}"


def ray_address(s: Situation) -> str | None:
    if not s.by_ray or s.nodes < 2:
        return None
    given = s.ray_argument("node-ip-address")
    if given is None:
        return "node-ip-address is not set"
    try:
        ipaddress.ip_address(str(given))
    except ValueError:
        return f"node-ip-address is {given}, which is a name"
    wanted = s.ray_variable("VLLM_HOST_IP")
    return None if wanted == str(given) else f"node-ip-address is {given} and VLLM_HOST_IP {wanted or 'is not set'}"


def no_token(s: Situation) -> str | None:
    if not s.by_ray or s.ray_variable("RAY_AUTH_MODE") == "token":
        return None
    return f"RAY_AUTH_MODE of the raylet is {s.ray_variable('RAY_AUTH_MODE') or 'not set'}"


def overwritten(s: Situation) -> str | None:
    if not s.by_ray or s.nodes < 2 or not first_executor(s):
        return None
    # It copies NCCL_ and UCX_, never GLOO_.
    names = [name for name in of_the_driver(s) if name.startswith(COPIED)]
    return f"The driver has {', '.join(names)} ({s.named} with its first Ray executor)" if names else None


def filled_in(s: Situation) -> str | None:
    if not s.by_ray or s.nodes < 2 or first_executor(s):
        return None
    names = [name for name in of_the_driver(s) if s.ray_variable(name) is None]
    return f"The driver has {', '.join(names)} and the raylet has not" if names else None


def broken_file(s: Situation) -> str | None:
    file = s.node("carry_over", dict)
    if not s.by_ray or not file.get("exists") or isinstance(file.get("names"), list):
        return None
    return f"{file.get('path')} is no JSON list of names"


def stale_file(s: Situation) -> str | None:
    if not s.by_ray:
        return None
    kept = [
        name
        for name in sorted(withheld(s))
        if name not in (*PER_NODE, *NEVER_COPIED)
        and not _SECRET.search(name)
        and s.variable(name) is not None
        and s.ray_variable(name) != s.variable(name)
    ]
    return f"{s.node('carry_over', dict).get('path')} withholds {', '.join(kept)}" if kept else None


def executor_gone(s: Situation) -> str | None:
    value = s.variable("VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    return f"VLLM_USE_RAY_V2_EXECUTOR_BACKEND is {value} ({s.named})" if value == "0" else None


def old_ray(s: Situation) -> str | None:
    ray = s.package("ray")
    if not s.by_ray or not ray or not first_executor(s) or release_of(ray) >= (2, 43):
        return None
    return f"ray is {ray}"


RAY_RULES: tuple[Rule, ...] = (
    Rule(
        "executor-not-ray",
        ERROR,
        no_executor,
        about="several nodes; neither distributed-executor-backend ray nor nnodes is set",
        what="vLLM then looks for all ranks' GPUs on one node",
        fix="set distributed-executor-backend to ray, or nnodes, node-rank and master-addr for mp",
        source="seed 001; vLLM wheels 0.20.0 to 0.33.0, read",
        engine="vllm",
    ),
    Rule(
        "ray-not-installed",
        ERROR,
        no_ray,
        about="executor ray; no ray in the venv",
        what="no vLLM wheel since 0.19.1 brings it",
        fix="install ray in the venv of every node",
        source="vLLM wheels, read; dgx-spark-playbooks issues 75 and 109",
        engine="vllm",
    ),
    Rule(
        "ray-too-old",
        ERROR,
        old_ray,
        about="vLLM's first Ray executor; ray older than 2.43.0",
        what="that executor refuses it",
        fix="install ray 2.43.0 or newer",
        source="vLLM wheels 0.20.0 to 0.32.0, read",
        engine="vllm",
    ),
    Rule(
        "ray-plasma-default",
        ERROR,
        plasma,
        about="executor ray; object-store-memory is not set, or above 16 GB",
        what="Ray's default is 30 % of the memory, for a store that the engine hardly uses, which ran heads out of "
        "memory at load",
        fix="set object-store-memory to 2000000000 in hy3_ray_args",
        source=f"{RECIPE}; MiniMax-M3 TP3 README",
    ),
    Rule(
        "ray-memory-monitor",
        ERROR,
        memory_monitor,
        about="executor ray; RAY_memory_monitor_refresh_ms of the raylet is not 0",
        what="Ray counts weights and page cache as used and kills the worker at 95 %",
        fix='set RAY_memory_monitor_refresh_ms to "0" for every `ray start` (hy3_engine_env)',
        source=f"{RECIPE}; field case B30",
    ),
    Rule(
        "ray-node-address",
        ERROR,
        ray_address,
        about="executor ray; several nodes; node-ip-address is missing, a name, or not VLLM_HOST_IP",
        what="what is not told takes the address of the default route, so Ray registers one and vLLM asks for another",
        fix="set node-ip-address and VLLM_HOST_IP to the node's own fabric address",
        source="field case B28",
    ),
    Rule(
        "ray-no-token",
        WARNING,
        no_token,
        about="executor ray; RAY_AUTH_MODE of the raylet is not token",
        what="Ray listens on all addresses, and whoever reaches its ports runs code on the node",
        fix="set RAY_AUTH_MODE to token on every node (Ray 2.52.0 and newer), or close its ports to others",
        source="ray 2.60.0, run",
    ),
    Rule(
        "ray-executor-removed",
        WARNING,
        executor_gone,
        about="VLLM_USE_RAY_V2_EXECUTOR_BACKEND is 0",
        what="the first Ray executor is gone in 0.33.0, so this changes nothing",
        fix="take it out",
        source="vLLM wheel 0.33.0, read",
        engine="vllm",
        since="0.33",
    ),
    Rule(
        "carry-over-overwrites",
        ERROR,
        overwritten,
        about="vLLM's first Ray executor (0.20, or switched on up to 0.32); several nodes; the driver has NCCL's "
        "per-node variables",
        what="it copies them over each worker's own, so another node uses the head's GID index",
        fix="keep them out of the driver's environment, or list them in ray_non_carry_over_env_vars.json below "
        "VLLM_CONFIG_ROOT",
        source="field case B27; vllm/ray/ray_env.py; against seed 000",
        engine="vllm",
        since="0.20",
    ),
    Rule(
        "carry-over-fills",
        ERROR,
        filled_in,
        about="RayExecutorV2 (default from 0.21); several nodes; the driver has per-node variables and a raylet not",
        what="it hands the driver's values to every worker that has none of its own",
        fix="give them to the raylet of each node and keep them out of the driver's environment",
        source="vLLM wheels 0.21.0 to 0.33.0, read; against seed 000",
        engine="vllm",
        since="0.20",
    ),
    Rule(
        "carry-over-malformed",
        ERROR,
        broken_file,
        about="ray_non_carry_over_env_vars.json cannot be read as a list",
        what="vLLM takes that as an empty list and says nothing",
        fix="write a JSON list of names there, or remove the file",
        source="field case B27",
        engine="vllm",
    ),
    Rule(
        "carry-over-stale",
        WARNING,
        stale_file,
        about="ray_non_carry_over_env_vars.json withholds a variable of the driver that is neither per-node nor a "
        "secret and that the raylet lacks",
        what="the workers run without it; such a file is often left by another tool",
        fix="take the names out of the file, or give the variables to the raylets",
        source="vllm/ray/ray_env.py",
        engine="vllm",
    ),
)
