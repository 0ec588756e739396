# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Ray's ports, and its membership by address: a small program for the engine's own interpreter, and what it prints."""

from __future__ import annotations

import json
import re
import signal
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

# Runs in the engine's venv, where this collection is not importable. The alarm ends it even when Ray's own code
# hangs on a cluster that accepts the connection and never answers. Never address="auto": it may join a stranger.
MEMBERSHIP_PROGRAM = """\
import json, signal, sys
signal.alarm(int(sys.argv[2]))
import ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
nodes = ray.nodes()
ray.shutdown()
print(json.dumps([[n["NodeManagerAddress"], n["Alive"], n["Resources"]] for n in nodes]))
"""


# "[2026-11-30 18:49:36,524 W 514 514] gcs_client.cc:210: "
_LOG_PREFIX = re.compile(r"^\[[^\]]*\] \S+:\d+: ")


def ports(plan: t.Mapping[str, t.Any], *, head: bool) -> dict[str, range]:
    """The ports that Ray needs on a node, by what they are for: a range for the workers, one for each other thing.

    ``plan`` is the fact ``hy3_plan``, which has them all.
    """
    named = dict(plan["ray_ports"])
    workers = range(named.pop("min-worker-port"), named.pop("max-worker-port") + 1)
    if head:
        named |= {"head": plan["ray_port"], **plan["ray_head_ports"]}
    return {f"Ray's {name}": range(port, port + 1) for name, port in named.items()} | {"Ray's workers": workers}


class Node(t.TypedDict):
    """A member of the cluster; C(gpus) is what it registered, 0 for a dead one."""

    address: str
    alive: bool
    gpus: int
    head: bool


def membership_command(python: str, *, address: str, timeout: int) -> list[str]:
    """The argument list that prints the membership of the cluster at C(address) within C(timeout) seconds."""
    return [python, "-I", "-c", MEMBERSHIP_PROGRAM, address, str(timeout)]


def membership_environment(token_file: str | None) -> dict[str, str]:
    """What the program needs in its environment: no usage report to the outside, and the token where there is one."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    if token_file:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file}
    return environment


def parse_membership(stdout: str) -> list[Node]:
    """The members in the order of their addresses, from the program's last line (Ray may print before it)."""
    lines = stdout.strip().splitlines()
    try:
        rows = json.loads(lines[-1]) if lines else None
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        raise Hy3Error(f"The Ray membership program printed no list of nodes but {stdout.strip()[-200:]!r}")
    nodes = [
        Node(
            address=address,
            alive=alive,
            gpus=int(resources.get("GPU", 0)),
            head="node:__internal_head__" in resources,
        )
        for address, alive, resources in rows
    ]
    return sorted(nodes, key=lambda node: node["address"])


def membership_error(rc: int, *, stderr: str, address: str, timeout: int) -> str:
    """One sentence for a program that did not print the members (C(rc) as C(run_command) returns it).

    Ray's last message goes with it: a wrong token, for one, shows only there, and Ray tries on until the timeout.
    """
    lines = [_LOG_PREFIX.sub("", line).strip() for line in stderr.splitlines() if line.strip()]
    ended = f"gave no answer within {timeout} seconds" if rc == -signal.SIGALRM else "is not reachable"
    return f"Ray at {address} {ended}: {lines[-1] if lines else f'exit status {rc}'}"
