# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Who is in a Ray cluster, by address: a small program for the engine's own interpreter, and what it prints.

The file is also a node-side program: a role copies it to the head, where ``members.py`` says before each start of the
driver who is missing. So it imports nothing but the standard library.
"""
# pylint: disable=ansible-bad-function  # a node runs this file as a program, without Ansible

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import typing as t
from collections.abc import Sequence

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
# Seconds beyond the program's own alarm, for an interpreter that does not even begin.
GRACE_SECONDS = 30

# "[2026-11-30 18:49:36,524 W 514 514] gcs_client.cc:210: "
_LOG_PREFIX = re.compile(r"^\[[^\]]*\] \S+:\d+: ")


class MembersError(Exception):
    """A cluster that does not answer, said in one sentence: the value found, the rule it breaks, the way out."""


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
        raise MembersError(f"The Ray membership program printed no list of nodes but {stdout.strip()[-200:]!r}")
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


def lacking(nodes: Sequence[Node], *, address: str, wanted: Sequence[str], gpus: int) -> str | None:
    """What the cluster lacks before an engine can start on it, in one sentence, or None.

    Args:
        nodes: Who is in, the dead included.
        address: Where the cluster answers.
        wanted: Addresses of all nodes.
        gpus: How many GPUs the engine needs in all, one for each rank.
    """
    alive = [node for node in nodes if node["alive"]]
    missing = [one for one in wanted if one not in {node["address"] for node in alive}]
    if missing:
        listed = ", ".join(node["address"] for node in alive) or "nobody"
        return (
            f"Ray at {address} does not list {', '.join(missing)} (it lists {listed}), and every node must be in: see "
            "that hy3-ray.service runs there"
        )
    counted = sum(node["gpus"] for node in alive)
    if counted < gpus:
        return f"Ray at {address} counts {counted} GPUs and the engine needs {gpus}: check `nvidia-smi` on each node"
    return None


def ask(python: str, *, address: str, token_file: str | None, timeout: int) -> list[Node]:
    """Ask the cluster who is in, with the interpreter of the engine's venv.

    Raises:
        MembersError: It does not answer within C(timeout) seconds, or the interpreter cannot be run.
    """
    try:
        done = subprocess.run(
            membership_command(python, address=address, timeout=timeout),
            env=os.environ | membership_environment(token_file),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout + GRACE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise MembersError(f"Ray at {address} gave no answer within {timeout + GRACE_SECONDS} seconds") from exc
    except OSError as exc:
        raise MembersError(f"{python} cannot be run ({exc.strerror}): it must be the engine's interpreter") from exc
    if done.returncode:
        raise MembersError(membership_error(done.returncode, stderr=done.stderr, address=address, timeout=timeout))
    return parse_membership(done.stdout)


def main(arguments: Sequence[str]) -> int:
    """0 if all members are in, else one sentence on stderr and 1."""
    parser = argparse.ArgumentParser(description="Say who is missing in a Ray cluster.")
    parser.add_argument("--python", required=True, help="interpreter of the engine's virtual environment")
    parser.add_argument("--address", required=True, help="host:port of the head")
    parser.add_argument("--token-file", help="file with the cluster's token")
    parser.add_argument("--member", action="append", default=[], help="address of a node, once for each")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs in all")
    parser.add_argument("--timeout", type=int, default=30, help="seconds")
    options = parser.parse_args(arguments)
    try:
        nodes = ask(options.python, address=options.address, token_file=options.token_file, timeout=options.timeout)
        problem = lacking(nodes, address=options.address, wanted=options.member, gpus=options.gpus)
    except MembersError as exc:
        problem = str(exc)
    if problem:
        print(problem, file=sys.stderr)
        return 1
    print(f"Ray at {options.address} lists {', '.join(options.member)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
