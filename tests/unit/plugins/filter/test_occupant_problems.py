# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.occupant_problems import occupant_problems

Listener = dict[str, t.Any]

PLAN: dict[str, t.Any] = {
    "cluster": "sparks",
    "engine": "vllm",
    "executor": "ray",
    "node": {"is_head": True},
    "api": {"port": 8000},
    "ray_port": 6379,
    "ray_ports": {"node-manager-port": 6380, "object-manager-port": 6381},
    "rank_port": 29501,
}
Units = dict[str, dict[str, str]]


def units(ray: str = "", serve: str = "", *, state: str = "active") -> Units:
    """Our units with their descriptions; without one a unit was never deployed."""
    return {
        f"{name}.service": {
            "description": description or f"{name}.service",
            "active_state": state if description else "inactive",
        }
        for name, description in (("hy3-ray", ray), ("hy3-serve", serve))
    }


NOT_DEPLOYED = units()
OURS_RUNS = units("Hy3: Ray head of cluster sparks", "Hy3: vLLM with profile libertai_nvfp4_tp2 of cluster sparks")


def listener(port: int, name: str, unit: str = "", *, pid: int | None = 812) -> Listener:
    return {"port": port, "address": "0.0.0.0", "pid": pid, "name": name, "unit": unit}


OURS = [
    listener(6379, "gcs_server", "hy3-ray.service"),
    listener(6380, "raylet", "hy3-ray.service"),
    listener(8000, "vllm", "hy3-serve.service"),
    listener(22, "sshd", "ssh.service"),
]
HEAD_ONLY = [listener(6379, "redis-server", "redis.service"), listener(8000, "nginx", "nginx.service")]


def test_an_empty_node() -> None:
    assert occupant_problems([], PLAN, NOT_DEPLOYED) == []


def test_a_second_run_meets_its_own() -> None:
    assert occupant_problems(OURS, PLAN, OURS_RUNS) == []


def test_a_worker_needs_none_of_the_heads_ports() -> None:
    assert len(occupant_problems(HEAD_ONLY, PLAN, NOT_DEPLOYED)) == 2
    assert occupant_problems(HEAD_ONLY, PLAN | {"node": {"is_head": False}}, NOT_DEPLOYED) == []


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_a_cluster_that_was_stopped_is_in_nobodys_way(state: str) -> None:
    assert occupant_problems([], PLAN, units("Hy3: Ray worker of cluster home", state=state)) == []


# What the ranks need without Ray, by (engine, head): SGLang listens on the API's port on every node.
NEEDED: dict[tuple[str, bool], list[int]] = {
    ("vllm", True): [8000, 29501],
    ("vllm", False): [],
    ("sglang", True): [8000, 29501],
    ("sglang", False): [8000],
}


@pytest.mark.parametrize(("engine", "head"), NEEDED)
def test_ports_without_ray(engine: str, head: bool) -> None:
    plan = PLAN | {"engine": engine, "executor": "mp", "node": {"is_head": head}}
    strangers = [listener(port, "nginx", "nginx.service") for port in (6379, 6380, 8000, 29501)]
    problems = occupant_problems(strangers, plan, NOT_DEPLOYED)
    assert [int(problem.split()[1]) for problem in problems] == NEEDED[engine, head]


PROBLEMS: dict[str, tuple[list[Listener], Units, str]] = {
    "API port": (
        [listener(8000, "nginx", "nginx.service")],
        NOT_DEPLOYED,
        "Port 8000 (hy3_api_port) is in use by nginx (pid 812, nginx.service), and no two can listen on one; stop that "
        "process, or choose another hy3_api_port.",
    ),
    "head port, in two families": (
        [listener(6379, "redis-server", "redis.service"), listener(6379, "redis-server", "redis.service")],
        OURS_RUNS,
        "Port 6379 (Ray's head) is in use by redis-server (pid 812, redis.service), and no two can listen on one; stop "
        "that process.",
    ),
    "fixed port, no unit": (
        [listener(6381, "python3")],
        NOT_DEPLOYED,
        "Port 6381 (Ray's object-manager-port) is in use by python3 (pid 812, no unit), and no two can listen on one; "
        "stop that process.",
    ),
    "out of sight": (
        [listener(6380, "", pid=None)],
        NOT_DEPLOYED,
        "Port 6380 (Ray's node-manager-port) is in use by an unknown process on 0.0.0.0, and no two can listen on one; "
        "stop that process.",
    ),
    "a unit whose name is like ours": (
        [listener(8000, "vllm", "not-hy3-serve.service")],
        OURS_RUNS,
        "Port 8000 (hy3_api_port) is in use by vllm (pid 812, not-hy3-serve.service), and no two can listen on one; "
        "stop that process, or choose another hy3_api_port.",
    ),
    "head of another Ray": (
        [listener(6380, "raylet", "docker-1f.scope"), listener(6399, "gcs_server", "docker-1f.scope")],
        NOT_DEPLOYED,
        "This node is the head of another Ray cluster, by gcs_server (pid 812, docker-1f.scope) on port 6399, and two "
        "Rays would share its GPU and memory; end that one, or take the node out of the inventory.",
    ),
    "worker of another Ray beside ours": (
        [*OURS, listener(41000, "raylet", "session-3.scope")],
        OURS_RUNS,
        "This node is the worker of another Ray cluster, by raylet (pid 812, session-3.scope) on port 41000, and two "
        "Rays would share its GPU and memory; end that one, or take the node out of the inventory.",
    ),
    "our unit, another cluster": (
        OURS,
        units("Hy3: Ray worker of cluster home of cluster x", state="activating"),
        "hy3-ray.service runs here as 'Hy3: Ray worker' of cluster 'home of cluster x', and a node serves one cluster "
        "at a time, here 'sparks'; run stop_hy3 with that cluster's inventory, or set hy3_cluster if it is the same "
        "one.",
    ),
    "our engine, another cluster": (
        [],
        units(serve="Hy3: SGLang with profile vroomfondel_w4a4_tp4 of cluster home"),
        "hy3-serve.service runs here as 'Hy3: SGLang with profile vroomfondel_w4a4_tp4' of cluster 'home', and a node "
        "serves one cluster at a time, here 'sparks'; run stop_hy3 with that cluster's inventory, or set hy3_cluster "
        "if it is the same one.",
    ),
}


@pytest.mark.parametrize(("listeners", "own", "sentence"), PROBLEMS.values(), ids=PROBLEMS)
def test_one_sentence(listeners: list[Listener], own: Units, sentence: str) -> None:
    assert occupant_problems(listeners, PLAN, own) == [sentence]
