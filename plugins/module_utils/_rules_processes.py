# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Rules about a node's processes: their network environment, their limits, what ends them, who reaches them."""

from __future__ import annotations

import re

from ansible_collections.sparks.hy3.plugins.module_utils._rules_ray import RECIPE, several_nodes
from ansible_collections.sparks.hy3.plugins.module_utils._situation import (
    ERROR,
    NOTE,
    WARNING,
    Rule,
    Situation,
    release_of,
)


def no_gloo(s: Situation) -> str | None:
    environment = s.ray_variable if s.by_ray else s.variable
    if not several_nodes(s):
        return None
    value = environment("GLOO_SOCKET_IFNAME")
    if value and not value.startswith(("=", "^")):
        return None
    return f"GLOO_SOCKET_IFNAME is {value or 'not set'}"


def no_rdma(s: Situation) -> str | None:
    value = (s.ray_variable if s.by_ray else s.variable)("NCCL_IB_DISABLE")
    return f"NCCL_IB_DISABLE is {value}" if several_nodes(s) and value not in (None, "", "0") else None


def empty_index(s: Situation) -> str | None:
    value = (s.ray_variable if s.by_ray else s.variable)("NCCL_IB_GID_INDEX")
    return f"NCCL_IB_GID_INDEX is {value!r}" if value is not None and not re.fullmatch(r"0|[1-9]\d*", value) else None


def gdr_level(s: Situation) -> str | None:
    value = (s.ray_variable if s.by_ray else s.variable)("NCCL_NET_GDR_LEVEL")
    return f"NCCL_NET_GDR_LEVEL is {value}" if value and value.isdigit() and int(value) > 4 else None


def nccl_timeout(s: Situation) -> str | None:
    value = (s.ray_variable if s.by_ray else s.variable)("NCCL_TIMEOUT")
    return f"NCCL_TIMEOUT is {value}" if value else None


def preloaded(s: Situation) -> str | None:
    value = (s.ray_variable if s.by_ray else s.variable)("LD_PRELOAD")
    return f"LD_PRELOAD is {value}" if value and "nccl" in value.lower() else None


def ring_without_routing(s: Situation) -> str | None:
    variable = s.ray_variable if s.by_ray else s.variable
    if not several_nodes(s) or variable("NCCL_IB_SUBNET_AWARE_ROUTING") != "1":
        return None
    nccl = s.package("nvidia-nccl-cu13")
    # Of another library than the wheel's nothing is known.
    if not nccl or release_of(nccl) >= (2, 30) or variable("VLLM_NCCL_SO_PATH") or variable("LD_PRELOAD"):
        return None
    return f"NCCL_IB_SUBNET_AWARE_ROUTING is 1 and NCCL is {nccl}"


def open_api(s: Situation) -> str | None:
    host = s.text("host")
    if host is None and s.engine == "sglang":
        return None  # which listens on 127.0.0.1 then
    if host in ("127.0.0.1", "localhost", "::1") or s.argument("api-key") or s.variable("VLLM_API_KEY"):
        return None
    return f"The API listens on {host or 'all addresses'} without a key"


def small_memlock(s: Situation) -> str | None:
    small = [
        f"{one.get('kind')} {one.get('pid')} may lock {one['memlock']} bytes"
        for one in s.processes()
        # Those that register memory, and the raylet, whose limit its workers inherit.
        if one.get("kind") in ("raylet", "worker", "driver") and isinstance(one.get("memlock"), int)
    ]
    return ", ".join(small) or None


def no_cap(s: Situation) -> str | None:
    free = [
        f"{one.get('kind')} {one.get('pid')}"
        for one in s.processes()
        if one.get("kind") in ("raylet", "driver") and "memory_limit" in one and one["memory_limit"] is None
    ]
    return f"No memory limit applies to {', '.join(free)}" if free else None


def in_a_session(s: Situation) -> str | None:
    if s.node("linger", bool):
        return None
    held = [
        f"{one.get('kind')} {one.get('pid')} in {one.get('unit')}"
        for one in s.processes()
        if isinstance(one.get("unit"), str) and (one.get("user_unit") or str(one["unit"]).startswith("session-"))
    ]
    return f"{', '.join(held)} and its user does not linger" if held else None


def in_user_manager(s: Situation) -> str | None:
    if not s.node("linger", bool):
        return None  # session-without-linger says more
    held = [f"{one.get('kind')} {one.get('pid')} in {one.get('unit')}" for one in s.processes() if one.get("user_unit")]
    return f"{', '.join(held)} below a user's own systemd" if held else None


def as_root(s: Situation) -> str | None:
    held = [f"{one.get('kind')} {one.get('pid')}" for one in s.processes() if one.get("user") == 0]
    return f"Run as root: {', '.join(held)}" if held else None


def mixed_cluster(s: Situation) -> str | None:
    venvs = {str(one["venv"]) for one in s.processes() if one.get("venv")}
    return f"Processes of {len(venvs)} venvs run: {', '.join(sorted(venvs))}" if len(venvs) > 1 else None


PROCESS_RULES: tuple[Rule, ...] = (
    Rule(
        "gloo-interface",
        ERROR,
        no_gloo,
        about="several nodes; GLOO_SOCKET_IFNAME is not set where the ranks start, or begins with NCCL's = or ^",
        what="Gloo may offer 127.0.0.1 to the other nodes (connectFullMesh, connection refused), or looks for an "
        "interface of that very name",
        fix="set it to the plain name of each node's fabric interface",
        source=RECIPE,
    ),
    Rule(
        "nccl-without-rdma",
        WARNING,
        no_rdma,
        about="several nodes; NCCL_IB_DISABLE is set",
        what="NCCL then uses TCP sockets, several times slower than RoCE",
        fix="take it out, or set it to 0",
        source="dgxarley and cylon measurements",
    ),
    Rule(
        "nccl-gid-index-empty",
        ERROR,
        empty_index,
        about="NCCL_IB_GID_INDEX is set and no decimal number without leading zeros",
        what="NCCL makes a number of text: row 0, which is link-local, of auto, None and perhaps an empty one, 8 "
        "of 010",
        fix="set the index that sparks.hy3.roce_gid finds on this node, or take the variable out",
        source="tonyd2wild pull request 40; field case B14",
    ),
    Rule(
        "nccl-gdr-level",
        WARNING,
        gdr_level,
        about="NCCL_NET_GDR_LEVEL above 4",
        what="that is out of its range",
        fix="take it out",
        source="spark-pulse, cluster-evidence.md",
    ),
    Rule(
        "nccl-timeout",
        NOTE,
        nccl_timeout,
        about="NCCL_TIMEOUT is set",
        what="NCCL has no such variable: the ten minutes are PyTorch's",
        fix="take it out and use the engine's own dist-timeout",
        source="spark-pulse, cluster-evidence.md",
    ),
    Rule(
        "nccl-preloaded",
        WARNING,
        preloaded,
        about="LD_PRELOAD names an NCCL library",
        what="it hides the one that torch brings, and what torch says of its version is not what runs",
        fix="take it out, or name the library in VLLM_NCCL_SO_PATH",
        source="tonyd2wild, MiniMax-M3 TP3 README",
    ),
    Rule(
        "nccl-too-old-for-ring",
        ERROR,
        ring_without_routing,
        about="several nodes; NCCL_IB_SUBNET_AWARE_ROUTING is 1, as a ring needs; NCCL older than 2.30",
        what="that NCCL does not know the variable and connects through ports that are cabled to another node, so the "
        "start times out",
        fix="install vLLM 0.33.0, whose torch brings NCCL 2.30.7, or use a switch",
        source="nvidia-nccl-cu13 2.29.7 (without the name) and 2.30.7 (with it), read; field case B25",
    ),
    Rule(
        "api-open",
        WARNING,
        open_api,
        about="the API listens on another address than a loopback one; no api-key",
        what="whoever reaches it may use it",
        fix="set host to 127.0.0.1, or set a key (hy3_api_key_file)",
        source="docs/secrets.md",
    ),
    Rule(
        "memlock-limited",
        ERROR,
        small_memlock,
        about="a running raylet, worker or driver has a limit of locked memory",
        what="RDMA registers its buffers as locked memory (limits.conf does not reach services)",
        fix="set LimitMEMLOCK=infinity in its unit, and restart it",
        source="field case B33",
    ),
    Rule(
        "cap-not-enforced",
        ERROR,
        no_cap,
        about="no memory limit applies to a running raylet or driver",
        what="nothing stops it before the node swaps and answers ping only",
        fix="set MemoryMax and MemorySwapMax=0 in its unit, and enable the memory controller of cgroup v2",
        source=RECIPE,
    ),
    Rule(
        "session-without-linger",
        ERROR,
        in_a_session,
        about="a process of the engine runs in a login session or a unit of the user manager; the user does not linger",
        what="it ends with the last session of its user",
        fix="run it as a system unit with User=, or `loginctl enable-linger` that user",
        source="lab, run; field case B119; against seed 000",
    ),
    Rule(
        "user-manager",
        WARNING,
        in_user_manager,
        about="a process of the engine runs in a unit of the user manager; the user lingers",
        what="systemd 255 (DGX OS 7) may stop that manager at logout in spite of lingering",
        fix="run it as a system unit with User=",
        source="systemd issue 43361; field case B119",
    ),
    Rule(
        "engine-as-root",
        WARNING,
        as_root,
        about="a process of the engine runs as root",
        what="a checkpoint may bring code of its own (trust-remote-code), and Ray runs what it is sent",
        fix="run it as an unprivileged user",
        source="docs/preflight.md",
    ),
    Rule(
        "several-venvs",
        WARNING,
        mixed_cluster,
        about="processes of several venvs run on one node",
        what="an earlier engine may be left over, and Ray and vLLM of two venvs rarely fit",
        fix="stop the one that should not run",
        source="sparkrun issue 208",
    ),
)
