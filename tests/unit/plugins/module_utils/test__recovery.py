# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From evidence to states, actions and advice: clusters that are sick in one way each, and any evidence at all."""

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._recovery import Plan, recovery_plan
from ansible_collections.sparks.hy3.plugins.module_utils._recovery_states import OUT_OF_REACH, RUNS, STATES
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.sick_cluster import (
    DENIED,
    FROZEN,
    GONE,
    HANGS,
    HEAD,
    LOGIN,
    NO_ROUTE,
    NOW,
    ORPHAN,
    PLAN,
    SERVING,
    SILENT,
    WITHOUT_RAY,
    WORKER,
    Facts,
    laid,
    members,
    peers,
    unit,
    units,
    view,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SERVE, RAY = "hy3-serve.service", "hy3-ray.service"
GIB = 1024**3


def judge(evidence: Facts, plan: Facts = PLAN, *, done: t.Sequence[Facts] = (), wait: int = 300) -> Plan:
    return recovery_plan(evidence, plan, done=list(done), now=NOW, start_timeout=2400, wait=wait)


def told(plan: Plan) -> list[tuple[str, str, str]]:
    return [(one["do"], one["node"], one["what"]) for one in plan["actions"]]


def sentences(plan: Plan) -> str:
    return " ".join(one["sentence"] for one in plan["advice"])


READY = {"phase": "ready"}
NO_ANSWER = {"ok": False, "status": None}
LOADS: Facts = {
    "units": {RAY: unit(), SERVE: unit(active_since=NOW - 100)},
    "log": {"phase": "loading"},
    "health": NO_ANSWER,
}
FAILURE = {"cause": "The head lost a worker", "fix": "x", "line": "RuntimeError: cancelled", "fatal": True}


def head(status: Facts, **more: t.Any) -> Facts:
    """A head that does not answer, with its status laid over one that serves."""
    return {HEAD: {"smoke": {"ok": False}, "status": SERVING[HEAD]["status"] | status, **more}}


ALL_STOPS = [("stop", HEAD, SERVE), ("stop", HEAD, RAY)]
WAIT = ("wait", WORKER, "ssh")

# What is wrong: evidence, state of the head and of the worker, actions in their order, and words of the advice.
CASES: dict[str, tuple[Facts, str, str, list[tuple[str, str, str]], str]] = {
    "nothing": (laid(), "healthy", "healthy", [], "Healthy: the engine answers"),
    # The swap wedge of the published recipe.
    "frozen, as here and its peer see it": (
        laid(SILENT, {HEAD: {"peers": peers("silent")}, WORKER: FROZEN}),
        "engine_silent",
        "wedged",
        [*ALL_STOPS, WAIT],
        "",
    ),
    "frozen while the engine starts": (
        laid(
            head(LOADS, peers=peers("silent")),
            {WORKER: {**FROZEN, "login": NO_ROUTE}},
        ),
        "starting",
        "wedged",
        [*ALL_STOPS, WAIT],
        "",
    ),
    "frozen, and the peer cannot look": (laid(SILENT, {HEAD: {"peers": {}}, WORKER: FROZEN}), "engine_silent", "wedged",
        [*ALL_STOPS, WAIT], ""),
    "silent over the fabric only": (
        laid(SILENT, {HEAD: {"peers": peers("silent")}, WORKER: GONE}),
        "engine_silent",
        "wedged",
        [*ALL_STOPS, WAIT],
        "",
    ),
    "a banner and no login": (
        laid(SILENT, {WORKER: {"login": HANGS, "view": view("banner", key_exchange="stalled")}}),
        "engine_silent",
        "wedged",
        [*ALL_STOPS, WAIT],
        "",
    ),
    "a login and no look": (
        laid(SILENT, {WORKER: {"status": {"failed": True, "timedout": True}}}),
        "engine_silent",
        "wedged",
        [*ALL_STOPS, WAIT],
        "",
    ),
    "a frozen head": (
        laid({HEAD: FROZEN, WORKER: {"peers": peers("silent", node=HEAD)}}),
        "wedged",
        "healthy",
        [("stop", WORKER, RAY), ("wait", HEAD, "ssh")],
        "",
    ),
    "frozen, and nothing runs on the other": (
        laid(SILENT, {HEAD: {"status": units("inactive", "inactive"), "peers": peers("silent")}, WORKER: FROZEN}),
        "stopped",
        "wedged",
        [WAIT],
        "serve",  # no advice yet for the worker; what is stopped needs none
    ),
    "an engine that answers is never stopped": (
        laid({HEAD: {"peers": peers("silent")}, WORKER: FROZEN}),
        "healthy",
        "wedged",
        [],
        "Leave spark-2 until nobody needs the engine",
    ),
    # SSH alone.
    "no SSH server": (
        laid(SILENT, {HEAD: {"peers": peers("refused")}, WORKER: {"view": view("refused"), "login": NO_ROUTE}}),
        "engine_silent",
        "ssh_down",
        [WAIT],
        "somebody uses the engine",
    ),
    "an overrun SSH server": (
        laid(SILENT, {HEAD: {"peers": peers("other")}, WORKER: {"view": view("closed"), "login": NO_ROUTE}}),
        "engine_silent",
        "ssh_down",
        [WAIT],
        "",
    ),
    "it answers ping and nothing else": (
        laid(SILENT, {HEAD: {"peers": peers("timeout", ping=True)}, WORKER: GONE}),
        "engine_silent",
        "ssh_down",
        [WAIT],
        "",
    ),
    "no SSH server while the engine answers": (
        laid({HEAD: {"peers": peers("refused")}, WORKER: {"view": view("refused"), "login": NO_ROUTE}}),
        "healthy",
        "ssh_down",
        [],
        "Leave spark-2",
    ),
    "a key that is not taken": (
        laid(SILENT, {WORKER: {"login": DENIED}}),
        "engine_silent",
        "no_login",
        [],
        "Let Ansible work on spark-2: its SSH server answers, and Ansible cannot work there (Failed to connect to the "
        "host via ssh: Permission denied (publickey))",
    ),
    "a password for sudo": (
        laid(
            SILENT,
            {WORKER: {"login": {"failed": True, "msg": "Timeout (12s) waiting for privilege escalation prompt: "}}},
        ),
        "engine_silent",
        "no_login",
        [],
        "privilege escalation",
    ),
    "the controller's way only": (
        laid(SILENT, {WORKER: GONE}),
        "engine_silent",
        "cut_off",
        [],
        "Mend the controller's way to spark-2, which lives: the controller does not reach it, and spark-1 gets the "
        "banner of its SSH server. Until then Ansible can go through spark-1, with ansible_host: 192.168.100.2",
    ),
    # Gone.
    "off": (
        laid(SILENT, {HEAD: {"peers": peers("unreachable", ping=False)}, WORKER: GONE}),
        "engine_silent",
        "unreachable",
        [("stop", HEAD, SERVE), WAIT],
        "",
    ),
    "off, and nobody else can look": (
        laid(SILENT, {HEAD: {"peers": {}}, WORKER: GONE}), "engine_silent", "unreachable", [WAIT], "",
    ),
    "off, and Ray knows": (
        laid(head({"ray": members(HEAD)}, peers={}), {WORKER: GONE}),
        "engine_silent",
        "unreachable",
        [("stop", HEAD, SERVE), WAIT],
        "",
    ),
    "a name that does not resolve": (
        laid(SILENT, {HEAD: {"peers": {}}, WORKER: {"view": view("unresolved", ping=None), "login": NO_ROUTE}}),
        "engine_silent",
        "unreachable",
        [WAIT],
        "",
    ),
    "both off": (
        laid({HEAD: GONE, WORKER: GONE}),
        "unreachable",
        "unreachable",
        [("wait", HEAD, "ssh"), WAIT],
        "",
    ),
    # The engine.
    "the engine failed": (
        laid(head({**units(of_serve="failed"), "failure": FAILURE, "log": {"phase": "failed"}, "health": NO_ANSWER})),
        "engine_dead",
        "healthy",
        [],
        "Run serve-hy3",
    ),
    "its log says that it is over": (
        laid(head({"failure": FAILURE, "log": {"phase": "failed"}, "health": NO_ANSWER})),
        "engine_dead",
        "healthy",
        [("stop", HEAD, SERVE)],
        "",
    ),
    "its core is dead": (
        laid(head({"health": {"ok": False, "status": 503}})),
        "engine_dead",
        "healthy",
        [("stop", HEAD, SERVE)],
        "",
    ),
    "busy or hanging": (laid(SILENT), "engine_silent", "healthy", [], "if nobody does, run stop-hy3 and serve-hy3"),
    "it answers wrongly": (
        laid({HEAD: {"smoke": {"ok": False, "text": "!!!!", "msg": "The logprobs are no numbers."}}, WORKER: FROZEN}),
        "engine_wrong",
        "cut_off",
        [],
        "Run doctor-hy3, which looks for the reason: it answers, and wrongly: The logprobs are no numbers.",
    ),
    "starting": (
        laid(head(LOADS)),
        "starting",
        "healthy",
        [],
        "Wait until status-hy3 says",
    ),
    "starting for too long": (
        laid(
            head({**LOADS, "units": {RAY: unit(), SERVE: unit(active_since=NOW - 2401)}}),
        ),
        "engine_silent",
        "healthy",
        [],
        "has been in its phase 'loading' for 40 min, longer than hy3_start_timeout (40 min)",
    ),
    "restarting by itself": (
        laid(head({**units(of_serve="activating"), "log": {"phase": "failed"}, "health": NO_ANSWER})),
        "starting",
        "healthy",
        [],
        "Wait until",
    ),
    "stopped": (
        laid(head(units("inactive", "inactive")), {WORKER: {"status": units("inactive", "")}}),
        "stopped",
        "stopped",
        [],
        "Run serve-hy3: nothing is in its way",
    ),
    "never there": (
        laid(head(units("", "")), {WORKER: {"status": units("", "")}}), "stopped", "stopped", [], "Run serve-hy3",
    ),
    "only Ray runs": (laid(head(units(of_serve="inactive"))), "stopped", "healthy", [], "Run serve-hy3"),
    # Ranks.
    "the worker's Ray failed": (
        laid(SILENT, {WORKER: {"status": units("failed", "")}}),
        "engine_silent",
        "worker_lost",
        [("stop", HEAD, SERVE)],
        "",
    ),
    "the worker's Ray is stopped": (
        laid(SILENT, {WORKER: {"status": units("inactive", "")}}),
        "engine_silent",
        "worker_lost",
        [("stop", HEAD, SERVE)],
        "",
    ),
    "the head's Ray does not count the worker": (
        laid(head({"ray": members(HEAD)})),
        "engine_silent",
        "worker_lost",
        [("stop", HEAD, SERVE)],
        "",
    ),
    "its Ray knows the worker by another address": (
        laid(head({"ray": {"nodes": [{"address": "10.0.0.9", "alive": True}, *members(HEAD)["nodes"]]}})),
        "engine_silent",
        "healthy",
        [],
        "",
    ),
    "a rank lost while the engine starts": (
        laid(head({**LOADS, "ray": members(HEAD)})),
        "starting",
        "worker_lost",
        [],
        "",
    ),
    "the worker's Ray waits for the head": (
        laid(head({**LOADS, "log": None}), {WORKER: {"status": units("activating", "")}}),
        "starting",
        "starting",
        [],
        "Wait until",
    ),
    "the worker's Ray waits for a head that was stopped": (
        laid(head(units("inactive", "inactive")), {WORKER: {"status": units("activating", "")}}),
        "stopped",
        "stopped",
        [],
        "Run serve-hy3",
    ),
    "Ray does not answer": (
        laid(head({**units(of_serve="inactive"), "ray": {"nodes": None, "error": "Ray at x gave no answer."}})),
        "engine_silent",
        "healthy",
        [],
        "Ray at x gave no answer",
    ),
    "the head's Ray failed": (
        laid(head({**units("failed", "failed"), "ray": {"nodes": None, "error": "x"}})),
        "engine_dead",
        "leftover",
        [("stop", WORKER, RAY)],
        "",
    ),
    "ranks without a driver": (
        laid(
            head({**units(of_serve="failed")}),
            {WORKER: {"status": {"units": {RAY: unit(processes=[{"title": "ray::RayWorkerProc"}, {"title": "x"}])}}}},
        ),
        "engine_dead",
        "leftover",
        [("stop", WORKER, RAY)],
        "",
    ),
    # What is left.
    "orphans": (
        laid(
            head(units("inactive", "failed"), orphans={"orphans": [ORPHAN]}),
            {WORKER: {"status": units("inactive", "")}},
        ),
        "orphans",
        "stopped",
        [("end", HEAD, "orphans")],
        "",
    ),
    "orphans beside an engine that answers": (
        laid({WORKER: {"orphans": {"orphans": [ORPHAN]}}}),
        "healthy",
        "orphans",
        [("end", WORKER, "orphans")],
        "",
    ),
    "orphans on the peer of a frozen node": (
        laid(head({}, peers=peers("silent"), orphans={"orphans": [ORPHAN]}), {WORKER: FROZEN}),
        "orphans",
        "wedged",
        [*ALL_STOPS, ("end", HEAD, "orphans"), WAIT],
        "",
    ),
    "memory that somebody holds": (
        laid(
            head(units("inactive", "inactive"), memory={"missing": 40 * GIB, "owners": [{"name": "python3"}]}),
            {WORKER: {"status": units("inactive", "")}},
        ),
        "memory_held",
        "stopped",
        [],
        "End what holds the memory of spark-1, which is not ours and was left alone: 40.00 GiB of its memory are "
        "missing for a start, held by python3",
    ),
    "memory that nobody holds": (
        laid(
            head(units("inactive", "inactive"), memory={"missing": 2 * GIB, "owners": []}),
            {WORKER: {"status": units("inactive", "")}},
        ),
        "memory_held",
        "stopped",
        [],
        "are missing for a start, and no process on the GPU holds it. If nothing there does, reboot it",
    ),
    "another cluster's": (
        laid(SILENT, {WORKER: {"status": {"units": {RAY: unit(cluster="east"), SERVE: unit("inactive")}}}}),
        "engine_silent",
        "other_cluster",
        [],
        "Take spark-2 out of this inventory, or run stop-hy3 with that cluster's: hy3-ray.service runs there for "
        "cluster 'east'",
    ),
    "another cluster's, beside a frozen node": (
        laid({HEAD: {"smoke": {}, "status": {"units": {RAY: unit(cluster="east"), SERVE: unit(cluster="east")}},
                     "peers": peers("silent")}, WORKER: FROZEN}),
        "other_cluster",
        "wedged",
        [WAIT],
        "",
    ),
    "a node without systemd": (
        laid(SILENT, {WORKER: {"status": {"failed": True, "msg": "systemctl cannot be run on this node."}}}),
        "engine_silent",
        "blind",
        [],
        "its units cannot be looked at (systemctl cannot be run on this node)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("evidence", "first", "second", "actions", "words"), CASES.values(), ids=CASES)
def test_case(evidence: Facts, first: str, second: str, actions: list[tuple[str, str, str]], words: str) -> None:
    plan = judge(evidence)
    assert [plan["nodes"][name]["state"] for name in (HEAD, WORKER)] == [first, second]
    assert told(plan) == actions
    assert words in sentences(plan) or (words == "serve" and not plan["advice"])
    assert plan["healthy"] == (first == second == "healthy")


def test_every_state_is_somewhere_in_the_table() -> None:
    assert {state for row in CASES.values() for state in row[1:3]} == set(STATES)


# Without Ray each node has its own unit, and SGLang's other ranks end when rank 0 tells them to.
MP = units("", "active")
WITHOUT: dict[str, tuple[Facts, str, str, list[tuple[str, str, str]]]] = {
    "the other rank failed": (
        laid(head(MP), {WORKER: {"status": units("", "failed")}}),
        "engine_silent",
        "worker_lost",
        [("stop", HEAD, SERVE)],
    ),
    "rank 0 failed": (
        laid(head(units("", "failed")), {WORKER: {"status": MP}}),
        "engine_dead",
        "leftover",
        [("stop", WORKER, SERVE)],
    ),
    "the core is dead": (
        laid(head({**MP, "health": {"ok": False, "status": 500}}), {WORKER: {"status": MP}}),
        "engine_dead",
        "healthy",
        [("stop", HEAD, SERVE), ("stop", WORKER, SERVE)],
    ),
    "both start": (
        laid(head({**units("", "activating"), "log": {"phase": "starting"}, "health": NO_ANSWER}),
             {WORKER: {"status": units("", "activating")}}),
        "starting",
        "starting",
        [],
    ),
    "the other rank waits for one that was stopped": (
        laid(head(units("", "inactive")), {WORKER: {"status": units("", "activating")}}), "stopped", "stopped", [],
    ),
    "stopped": (
        laid(head(units("", "inactive")), {WORKER: {"status": units("", "inactive")}}), "stopped", "stopped", [],
    ),
    "it answers": (laid({HEAD: {"status": MP}, WORKER: {"status": MP}}), "healthy", "healthy", []),
}  # fmt: skip


@pytest.mark.parametrize(("evidence", "first", "second", "actions"), WITHOUT.values(), ids=WITHOUT)
def test_without_ray(evidence: Facts, first: str, second: str, actions: list[tuple[str, str, str]]) -> None:
    plan = judge(evidence, WITHOUT_RAY)
    assert [plan["nodes"][name]["state"] for name in (HEAD, WORKER)] == [first, second]
    assert told(plan) == actions


def test_a_503_of_sglang_is_no_death() -> None:
    evidence = laid(head({**MP, "health": {"ok": False, "status": 503}}), {WORKER: {"status": MP}})
    plan = judge(evidence, {**WITHOUT_RAY, "engine": "sglang"})
    assert plan["nodes"][HEAD]["state"] == "engine_silent"
    assert told(plan) == []


def test_the_head_of_the_plan_comes_first() -> None:
    """Not the first of the inventory."""
    plan = {**WITHOUT_RAY, "hosts": [WORKER, HEAD]}
    evidence = laid(head({**MP, "failure": FAILURE}), {WORKER: {"status": MP}})
    assert told(judge(evidence, plan)) == [("stop", HEAD, SERVE), ("stop", WORKER, SERVE)]


THIRD = "spark-3"


def test_three_nodes() -> None:
    """One of three is frozen: both others are freed, rank 0 first."""
    addresses = {**PLAN["addresses"], THIRD: "192.168.100.3"}
    plan = {**PLAN, "hosts": [THIRD, WORKER, HEAD], "addresses": addresses}
    views = {"views": [*peers("silent")["views"], {**peers("banner")["views"][0], "name": THIRD}]}
    evidence = laid(SILENT, {HEAD: {"peers": views}, WORKER: FROZEN})
    evidence[THIRD] = {"login": LOGIN, "status": units(of_serve="")}
    assert told(judge(evidence, plan)) == [
        ("stop", HEAD, SERVE),
        ("stop", HEAD, RAY),
        ("stop", THIRD, RAY),
        WAIT,
    ]


def test_one_node() -> None:
    plan = {**WITHOUT_RAY, "hosts": [HEAD], "serve_hosts": [HEAD]}
    assert judge(laid(head(units("", "failed"))), plan)["advice"][0]["sentence"].startswith("Run serve-hy3")
    assert judge({}, plan)["nodes"][HEAD]["state"] == "unreachable"


# ---- Rounds

WEDGE = laid(SILENT, {HEAD: {"peers": peers("silent")}, WORKER: FROZEN})
FREED = laid(head(units("inactive", "inactive"), peers=peers("silent")), {WORKER: FROZEN})


def test_what_comes_after_the_wait_is_advice_with_its_reason() -> None:
    first = judge(WEDGE)
    assert first["advice"] == []
    assert "if it has not within 300 s, a person must power cycle" in first["actions"][-1]["why"]
    second = judge(FREED, done=t.cast("list[Facts]", first["actions"]))
    assert told(second) == []
    assert second["person"]
    [advice] = second["advice"]
    assert advice["sentence"].startswith("Power cycle spark-2: hold its power button until it is off, or unplug it")
    for words in (
        "takes connections to SSH, and no program there gets to say a word: on a Spark that is a unified-memory wedge",
        "It was waited for, up to 300 s after stopping hy3-serve.service on spark-1 and hy3-ray.service on spark-1",
        "before the next start lower what the engine takes of it: max-model-len",
    ):
        assert words in advice["sentence"]


def test_a_node_that_came_back_is_looked_at_anew() -> None:
    """Its Ray has lost its head, and its engine's worker is an orphan; after those nothing is in the way."""
    first = judge(WEDGE)
    back = laid(
        head(units("inactive", "inactive")), {WORKER: {"status": units(of_serve=""), "orphans": {"orphans": [ORPHAN]}}}
    )
    second = judge(back, done=t.cast("list[Facts]", first["actions"]))
    assert told(second) == [("stop", WORKER, RAY), ("end", WORKER, "orphans")]
    free = laid(head(units("inactive", "inactive")), {WORKER: {"status": units("inactive", "")}})
    third = judge(free, done=t.cast("list[Facts]", first["actions"] + second["actions"]))
    assert told(third) == []
    assert not third["person"]
    assert [one["sentence"].split(":")[0] for one in third["advice"]] == [
        "spark-2 had starved and is back",
        "Run serve-hy3",
    ]


def test_what_did_not_help_is_not_done_again() -> None:
    evidence = laid(head({"failure": FAILURE}, orphans={"orphans": [ORPHAN]}))
    first = judge(evidence)
    assert told(first) == [("stop", HEAD, SERVE), ("end", HEAD, "orphans")]
    second = judge(evidence, done=t.cast("list[Facts]", first["actions"]))
    assert told(second) == []
    assert second["person"]
    assert "Look at `systemctl status hy3-serve.service` on spark-1: it was stopped and runs again" in sentences(second)
    assert "Reboot spark-1 (`sudo systemctl reboot`): VLLM::EngineCore (process 900) outlived" in sentences(second)


@pytest.mark.parametrize("tcp", ["silent", "refused", "timeout"])
def test_nobody_is_waited_for_without_a_time(tcp: str) -> None:
    evidence = laid(SILENT, {HEAD: {"peers": peers(tcp)}, WORKER: {"view": view(tcp), "login": NO_ROUTE}})
    plan = judge(evidence, wait=0)
    assert "wait" not in {one["do"] for one in plan["actions"]}
    if not plan["actions"]:
        assert plan["person"]
        assert "waited" not in sentences(plan)


def test_a_boot_that_ended_without_memory_is_said_where_it_does_not_serve() -> None:
    wreck = {
        "wreck": {"stdout_lines": ["x", "NVRM: nvCheckOkFailed: NV_ERR_NO_MEMORY from _memdescAllocInternal", "y"]}
    }
    plan = judge(laid(head(units("inactive", "inactive")), {WORKER: {"status": units("inactive", ""), **wreck}}))
    assert "The boot of spark-2 before this one ended without memory ('NVRM: nvCheckOkFailed" in sentences(plan)
    assert not plan["person"]
    assert judge(laid({WORKER: wreck}))["advice"][0]["sentence"].startswith("Healthy")


def test_evidence_names_what_was_seen() -> None:
    plan = judge(WEDGE)
    assert plan["nodes"][WORKER]["evidence"] == [
        "from the controller, 10.0.0.2:22 takes the connection and gives no banner",
        "from spark-1, 192.168.100.2:22 takes the connection and gives no banner",
        "Ansible: Task failed: Timed out after 60 second(s)",
    ]
    gone = judge(
        laid(SILENT, {HEAD: {"peers": peers("unreachable", ping=False, error="No route to host")}, WORKER: GONE})
    )
    assert "from spark-1, 192.168.100.2:22 cannot be reached (No route to host), nor to ping" in "\n".join(
        gone["nodes"][WORKER]["evidence"]
    )


# ---- Any evidence

NOISE = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
        st.sampled_from(["active", "failed", "pong", "banner", "silent", "timeout", "ready", WORKER, RAY]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
UNIT = st.builds(
    unit,
    st.sampled_from([*RUNS, "inactive", "failed", "maintenance", ""]),
    cluster=st.sampled_from(["sparks", "east"]),
    processes=st.sampled_from([[], [{"title": "VLLM::Worker_TP1"}], None, [None]]),
)
STATUS = st.fixed_dictionaries(
    {"units": st.dictionaries(st.sampled_from([SERVE, RAY, "ssh.service"]), UNIT)},
    optional={
        "log": st.sampled_from([None, READY, {"phase": "loading"}]),
        "failure": st.sampled_from([None, FAILURE, {**FAILURE, "fatal": False}]),
        "health": st.sampled_from([None, NO_ANSWER, {"ok": True, "status": 200}, {"ok": False, "status": 503}]),
        "ray": st.sampled_from([None, members(HEAD), members(HEAD, WORKER), {"nodes": None, "error": "x"}]),
    },
)
VIEW = st.builds(
    view,
    st.sampled_from(["banner", "silent", "closed", "other", "refused", "timeout", "unreachable", "error", "not_asked"]),
    ping=st.sampled_from([True, False, None]),
)
NODE = st.fixed_dictionaries(
    {},
    optional={
        "view": VIEW | NOISE,
        "login": st.sampled_from([LOGIN, LOGIN, DENIED, HANGS, NO_ROUTE, {}]) | NOISE,
        "peers": st.builds(lambda tcp, node: peers(tcp, node=node), st.sampled_from(["banner", "silent", "timeout"]),
                           st.sampled_from([HEAD, WORKER])) | NOISE,
        "status": STATUS | STATUS | NOISE,
        "smoke": st.sampled_from([{"ok": True}, {"ok": False}, {"ok": False, "text": "!"}, {}]) | NOISE,
        "orphans": st.sampled_from([{"orphans": []}, {"orphans": [ORPHAN]}]) | NOISE,
        "memory": st.sampled_from([{"missing": 0}, {"missing": GIB, "owners": []}]) | NOISE,
        "wreck": NOISE,
    },
)  # fmt: skip


def running(evidence: Facts, node: str, name: str) -> bool:
    """Whether the evidence has a unit of this cluster running there, read in the plainest way."""
    found = evidence[node]["status"]["units"][name]
    return found["active_state"] in RUNS and found["description"].endswith(" of cluster sparks")


@settings(max_examples=200, deadline=None)
@given(
    evidence=st.fixed_dictionaries({HEAD: NODE, WORKER: NODE}),
    plan=st.sampled_from([PLAN, WITHOUT_RAY, {**WITHOUT_RAY, "engine": "sglang"}]),
    wait=st.sampled_from([0, 300]),
)
def test_any_evidence_gives_a_plan_that_ends_and_touches_only_what_is_ours(
    evidence: Facts, plan: Facts, wait: int
) -> None:
    done: list[Facts] = []
    for _round in range(3):
        found = judge(evidence, plan, done=done, wait=wait)
        assert set(found["nodes"]) == {HEAD, WORKER}
        for one in found["actions"]:
            node = one["node"]
            reached = found["nodes"][node]["reached"]
            if one["do"] == "stop":
                assert reached
                assert not found["answers"]
                assert one["what"] in (SERVE, RAY)
                assert running(evidence, node, one["what"])
            elif one["do"] == "end":
                assert reached
                assert evidence[node]["orphans"]["orphans"]
            else:
                assert wait
                assert not found["answers"]
                assert one["state"] in (*OUT_OF_REACH, "wedged")
        # An engine before its Ray, and all that frees memory before anybody waits.
        order = [("stop", SERVE), ("stop", RAY), ("end", "orphans"), ("wait", "ssh")]
        ranks = [order.index((one["do"], one["what"])) for one in found["actions"]]
        assert ranks == sorted(ranks)
        assert all(one["why"] for one in found["actions"])
        done += t.cast("list[Facts]", found["actions"])
    # The evidence never changed, and yet nothing is left to do but to tell a person.
    assert found["actions"] == []
    assert found["advice"] or all(node["state"] == "healthy" for node in found["nodes"].values())


@settings(max_examples=50, deadline=None)
@given(evidence=NOISE)
def test_what_is_no_evidence_gives_a_plan(evidence: t.Any) -> None:
    found = judge(evidence if isinstance(evidence, dict) else {})
    assert {node["state"] for node in found["nodes"].values()} == {"unreachable"}
