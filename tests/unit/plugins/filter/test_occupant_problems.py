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
    "api": {"host": "127.0.0.1", "port": 8000},
    "ray_port": 6379,
    "ray_ports": {
        "node-manager-port": 6380,
        "object-manager-port": 6381,
        "min-worker-port": 10100,
        "max-worker-port": 10299,
    },
    "ray_head_ports": {"ray-client-server-port": 10001, "autoscaler-metrics-port": 44217},
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


def listener(port: int, name: str, unit: str = "", *, pid: int | None = 812, address: str = "0.0.0.0") -> Listener:
    return {"port": port, "address": address, "pid": pid, "name": name, "unit": unit}


OURS = [
    listener(6379, "gcs_server", "hy3-ray.service"),
    listener(6380, "raylet", "hy3-ray.service"),
    listener(8000, "vllm", "hy3-serve.service"),
    listener(22, "sshd", "ssh.service"),
]
HEAD_ONLY = [listener(port, "nginx", "nginx.service") for port in (6379, 8000, 10001, 44217)]


def test_an_empty_node() -> None:
    assert occupant_problems([], PLAN, NOT_DEPLOYED) == []


def test_a_second_run_meets_its_own() -> None:
    assert occupant_problems(OURS, PLAN, OURS_RUNS) == []


def test_a_second_run_meets_its_own_in_containers() -> None:
    """Whose processes are in scopes of the daemon's. Another container's are a stranger's."""
    scopes = {"hy3-ray.service": "docker-1.scope", "hy3-serve.service": None}
    running = {name: unit | {"scope": scopes[name]} for name, unit in OURS_RUNS.items()}
    inside = [one | {"unit": "docker-1.scope"} for one in OURS[:2]]
    assert occupant_problems(inside, PLAN, running) == []
    (problem,) = occupant_problems([*inside, listener(8000, "vllm", "docker-2.scope")], PLAN, running)
    assert problem.startswith("Port 8000 (hy3_api_port) is in use by vllm (pid 812, docker-2.scope)")


def test_a_worker_needs_none_of_the_heads_ports() -> None:
    assert len(occupant_problems(HEAD_ONLY, PLAN, NOT_DEPLOYED)) == len(HEAD_ONLY)
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


# (engine, head, our address of the API, the stranger's address): whether they are in each other's way.
ADDRESSES: dict[str, tuple[str, bool, str, str, bool]] = {
    "same": ("vllm", True, "127.0.0.1", "127.0.0.1", True),
    "another": ("vllm", True, "127.0.0.1", "10.0.0.5", False),
    "all of IPv4": ("vllm", True, "127.0.0.1", "0.0.0.0", True),
    "all of both": ("vllm", True, "127.0.0.1", "::", True),
    "the same in IPv6": ("vllm", True, "127.0.0.1", "::ffff:127.0.0.1", True),
    "another in IPv6": ("vllm", True, "127.0.0.1", "::1", False),
    "we want all": ("vllm", True, "0.0.0.0", "10.0.0.5", True),
    "we want a name": ("vllm", True, "localhost", "10.0.0.5", True),
    "SGLang's other rank is on loopback": ("sglang", False, "10.0.0.5", "10.0.0.5", False),
    "SGLang's other rank meets somebody": ("sglang", False, "10.0.0.5", "127.0.0.1", True),
}


@pytest.mark.parametrize(("engine", "head", "ours", "theirs", "expected"), ADDRESSES.values(), ids=ADDRESSES)
def test_addresses(engine: str, head: bool, ours: str, theirs: str, expected: bool) -> None:
    plan = PLAN | {"engine": engine, "executor": "mp", "node": {"is_head": head}, "api": {"host": ours, "port": 8000}}
    problems = occupant_problems([listener(8000, "nginx", address=theirs)], plan, NOT_DEPLOYED)
    assert len(problems) == expected


def test_of_several_that_who_is_in_the_way_is_named() -> None:
    strangers = [listener(8000, "web", address="10.0.0.5"), listener(8000, "nginx", address="127.0.0.1")]
    assert [problem.split()[7] for problem in occupant_problems(strangers, PLAN, NOT_DEPLOYED)] == ["nginx"]


def test_ray_listens_on_all_addresses() -> None:
    assert len(occupant_problems([listener(6380, "nginx", address="10.0.0.5")], PLAN, NOT_DEPLOYED)) == 1


@pytest.mark.parametrize(("port", "expected"), [(10099, 0), (10100, 1), (10299, 1), (10300, 0)])
def test_range_of_the_workers(port: int, expected: int) -> None:
    plan = PLAN | {"node": {"is_head": False}}
    assert len(occupant_problems([listener(port, "nginx")], plan, NOT_DEPLOYED)) == expected


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
    "within the workers' range": (
        [listener(10150, "java", "app.service")],
        NOT_DEPLOYED,
        "Port 10150 (Ray's workers) is in use by java (pid 812, app.service), and no two can listen on one; stop that "
        "process.",
    ),
    "Ray's clients": (
        [listener(10001, "java", "app.service")],
        NOT_DEPLOYED,
        "Port 10001 (Ray's ray-client-server-port) is in use by java (pid 812, app.service), and no two can listen on "
        "one; stop that process.",
    ),
    "Ray's autoscaler": (
        [listener(44217, "java", "app.service")],
        NOT_DEPLOYED,
        "Port 44217 (Ray's autoscaler-metrics-port) is in use by java (pid 812, app.service), and no two can listen on "
        "one; stop that process.",
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
