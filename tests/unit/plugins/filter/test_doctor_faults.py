# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.doctor_faults import doctor_faults
from hypothesis import given, settings
from hypothesis import strategies as st

Seen = dict[str, t.Any]
UNIT = {"load_state": "loaded", "active_state": "active", "result": "success", "n_restarts": 0, "remarks": []}
RAYLET: Seen = {
    "kind": "raylet",
    "pid": 9,
    "unit": "hy3-ray.service",
    "arguments": {"node-ip-address": "10.77.0.1"},
    "environment": {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_HCA": "rocep1s0f1", "GLOO_SOCKET_IFNAME": "enp1s0f1np1"},
    "changes": [],
    "failure": None,
    "log": "/l",
}
HEALTHY: Seen = {
    "reach": {"ping": "pong"},
    "status": {"units": {"hy3-ray.service": UNIT}, "failure": None, "ray": None},
    "found": {"engines": [RAYLET]},
    "smoke": {"ok": True},
    "strangers": [],
    "firewall": {"rc": 0},
    "roce": {"gid_index": 3, "hca": "=rocep1s0f1", "interface": "enp1s0f1np1", "address": "10.77.0.1"},
    "interfaces": ["lo", "enp1s0f1np1"],
    "memory": {"fits": True, "problems": []},
    "rules": {"findings": [], "unjudged": {}},
}
FINDING = {"rule": "tp-heads", "severity": "error", "found": "num_attention_heads is 64", "what": "each", "fix": "use"}


def engines(**over: t.Any) -> Seen:
    return {"found": {"engines": [{**RAYLET, **over}]}}


def test_a_healthy_node() -> None:
    assert doctor_faults(HEALTHY, "spark-1", "10.77.0.1") == []


def test_a_unit_that_an_earlier_plan_left_may_rest() -> None:
    """Its node served alone before; the driver runs on the head now."""
    units = {"hy3-ray.service": UNIT, "hy3-serve.service": {**UNIT, "active_state": "inactive"}}
    left = {**HEALTHY, "status": {**HEALTHY["status"], "units": units}}
    assert [fault["rule"] for fault in doctor_faults(left, "spark-2", "10.77.0.1")] == ["unit"]
    assert doctor_faults({**left, "elsewhere": ["hy3-serve.service"]}, "spark-2", "10.77.0.1") == []
    units["hy3-serve.service"]["active_state"] = "failed"
    assert doctor_faults({**left, "elsewhere": ["hy3-serve.service"]}, "spark-2", "10.77.0.1") != []


# (what, laid over the healthy node, severity, rule, words of the sentence)
FAULTS: list[tuple[str, Seen, str, str, str]] = [
    (
        "unreachable",
        {"reach": {"unreachable": True, "msg": "No route to host"}},
        "error",
        "reach",
        "(No route to host)",
    ),
    ("no Python", {"reach": {"failed": True, "msg": "not found"}}, "error", "reach", "(not found)"),
    ("no plan", {"plan": {"msg": "hy3_profile is 'x'."}}, "error", "inventory", "hy3_profile is 'x'."),
    ("a module that could not look", {"roce": {"msg": "No interface"}}, "error", "roce", "No interface."),
    (
        "a unit that restarts",
        {
            "status": {
                "units": {
                    "hy3-serve.service": {**UNIT, "active_state": "activating", "result": "exit-code", "n_restarts": 5}
                }
            }
        },
        "error",
        "unit",
        "hy3-serve.service is activating (exit-code, 5 restarts)",
    ),
    (
        "a unit that waits",
        {"status": {"units": {"hy3-ray.service": {**UNIT, "active_state": "activating", "remarks": ["It waits: x."]}}}},
        "error",
        "unit",
        "and it must be active; read `journalctl -u hy3-ray.service` there. It waits: x.",
    ),
    (
        "a unit that ended and runs again",
        {"status": {"units": {"hy3-ray.service": {**UNIT, "remarks": ["It was started again."]}}}},
        "warning",
        "unit",
        "It was started again.",
    ),
    (
        "Ray on the LAN",
        engines(arguments={"node-ip-address": "192.168.50.20"}),
        "error",
        "ray-node-address",
        "joined as 192.168.50.20",
    ),
    (
        "an overwritten index",
        engines(changes=[{"variable": "NCCL_IB_GID_INDEX", "before": "6", "after": "3", "log": "w.out"}]),
        "error",
        "carry-over-overwrites",
        "NCCL_IB_GID_INDEX was overwritten from '6' to '3'",
    ),
    (
        "another node's index",
        engines(environment={"NCCL_IB_GID_INDEX": "6"}),
        "error",
        "fabric",
        "NCCL_IB_GID_INDEX=6, which is no RoCE v2 row",
    ),
    (
        "an HCA that is not here, in raylet and worker",
        {
            "found": {
                "engines": [
                    {**RAYLET, "environment": {"NCCL_IB_HCA": "=mlx5_0"}},
                    {**RAYLET, "kind": "worker", "pid": 12, "environment": {"NCCL_IB_HCA": "=mlx5_0"}},
                ]
            }
        },
        "error",
        "fabric",
        "(raylet 9, worker 12).",
    ),
    (
        "an interface that is not here",
        engines(environment={"NCCL_SOCKET_IFNAME": "enp9s9"}),
        "error",
        "fabric",
        "NCCL_SOCKET_IFNAME=enp9s9",
    ),
    (
        "SGLang's server has the ranks",
        engines(kind="driver", arguments={}, environment={"NCCL_IB_GID_INDEX": "6"}),
        "error",
        "fabric",
        "(driver 9).",
    ),
    (
        "a failed start",
        engines(failure={"line": "KeyError: x", "cause": "C", "fix": "F"}),
        "error",
        "log",
        "'KeyError: x': C; F.",
    ),
    ("memory", {"memory": {"fits": False, "problems": ["The caps add up to 118 GiB."]}}, "error", "memory", "118 GiB"),
    ("a stranger", {"strangers": ["Port 8000 is in use."]}, "error", "occupied", "Port 8000"),
    ("no nftables", {"firewall": {"rc": 2, "msg": "No such file"}}, "error", "firewall", "(No such file)"),
    ("no answer", {"smoke": {"ok": False, "msg": "refused"}}, "error", "smoke", "refused."),
    ("a rule", {"rules": {"findings": [{**FINDING, "allowed": False}]}}, "error", "tp-heads", "is 64, and each; use."),
    (
        "a warning",
        {"rules": {"findings": [{**FINDING, "severity": "warning", "allowed": False}]}},
        "warning",
        "tp-heads",
        "",
    ),
    (
        "a fact that is not known",
        {"rules": {"findings": [], "unjudged": {"a": "node", "b": "node"}}},
        "unknown",
        "a, b",
        "without node.",
    ),
    ("a log that is not known", engines(changes=None, log=None), "unknown", "log", "a terminal or a pipe"),
    ("a title over the environment", engines(environment=None), "unknown", "environment", "raylet 9"),
]


@pytest.mark.parametrize(
    ("over", "severity", "rule", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_fault(over: Seen, severity: str, rule: str, words: str) -> None:
    [fault] = doctor_faults({**HEALTHY, **over}, "spark-1", "10.77.0.1")
    assert (fault["host"], fault["severity"], fault["rule"]) == ("spark-1", severity, rule)
    assert words in fault["sentence"]


TROUBLE = {
    "rule": "link-down",
    "line": "kernel: enp1s0f1np1: Link is Down",
    "cause": "The link went down",
    "fix": "Look",
}


def test_what_the_kernel_saw_is_a_warning_and_a_kill_an_error_said_once() -> None:
    kill = TROUBLE | {"rule": "oom-node", "line": "kernel: oom-kill", "cause": "The kernel killed it"}
    status = {**HEALTHY["status"], "troubles": [TROUBLE, kill]}
    seen = {**HEALTHY, "status": status, "found": {"engines": [RAYLET], "kills": [kill]}}
    faults = doctor_faults(seen, "spark-1", "10.77.0.1")
    assert [(fault["severity"], fault["rule"]) for fault in faults] == [("error", "log"), ("warning", "link-down")]
    assert faults[1]["sentence"] == "The link went down ('kernel: enp1s0f1np1: Link is Down'); Look."


def test_what_is_allowed_is_no_fault() -> None:
    assert doctor_faults({**HEALTHY, "rules": {"findings": [{**FINDING, "allowed": True}]}}, "spark-1", "") == []


def test_the_driver_beside_a_raylet_has_no_ranks() -> None:
    """What of it reaches the ranks is the business of the rules carry-over-*."""
    driver = {**RAYLET, "kind": "driver", "arguments": {}, "environment": {"NCCL_SOCKET_IFNAME": "enp9s9"}}
    assert doctor_faults({**HEALTHY, "found": {"engines": [RAYLET, driver]}}, "spark-1", "10.77.0.1") == []


def test_what_was_skipped_is_no_fault() -> None:
    assert (
        doctor_faults(dict.fromkeys(HEALTHY, {"skipped": True}) | {"strangers": [], "interfaces": []}, "spark-1", "")
        == []
    )


def test_the_worst_comes_first() -> None:
    seen = {
        **HEALTHY,
        "smoke": {"ok": False},
        "rules": {"findings": [{**FINDING, "severity": "note", "allowed": False}], "unjudged": {"a": "b"}},
    }
    assert [fault["severity"] for fault in doctor_faults(seen, "spark-1", "")] == ["error", "note", "unknown"]


@settings(max_examples=100, deadline=None)
@given(
    seen=st.dictionaries(
        st.sampled_from(sorted(HEALTHY)),
        st.fixed_dictionaries({}, optional={"msg": st.text(), "skipped": st.booleans()}),
    )
)
def test_results_without_their_keys_are_faults_and_no_traceback(seen: Seen) -> None:
    for name in ("strangers", "interfaces"):
        seen.pop(name, None)
    doctor_faults(seen, "spark-1", "10.77.0.1")
