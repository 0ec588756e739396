# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""recover-hy3 on the lab: a healthy cluster, orphans, a node without SSH, and a node that is frozen and thaws.

Needs a lab (`make lab-up`). The order matters: each goes on with the cluster that the one before has left.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import typing as t

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import (
    LAB,
    NODES,
    ROOT,
    changed_nothing,
    command_of,
    freeze,
    on,
    play,
    thaw,
)

HEAD, WORKER = NODES
MAIN = "systemctl show hy3-ray hy3-serve -p MainPID,InvocationID"
ASKS = "systemctl show hy3-ray hy3-serve -p ActiveState --value"
PROGRAM = LAB / "venv/bin/hy3-test-sleep"
# As an engine core whose API server was killed: in the control group of a unit that has ended, adopted by systemd.
LEAVE = (
    "systemd-run --quiet --wait --uid={user} --property=KillMode=process bash -c '(exec -a {title} {program} 9999) &'"
)


def recover(*options: str) -> tuple[int, str]:
    """Exit status and output of the play."""
    done = subprocess.run(
        command_of("recover-hy3", *options),
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def report() -> dict[str, t.Any]:
    path = max((ROOT / "reports/lab").glob("*-recover.json"), key=lambda path: path.stat().st_mtime_ns)
    return t.cast("dict[str, t.Any]", json.loads(path.read_text()))


def changes(output: str) -> set[str]:
    return set(re.findall(r"changed=(\d+)", output))


@pytest.fixture(scope="module", autouse=True)
def served() -> t.Iterator[None]:
    """Begin with a cluster that serves, and leave one."""
    play("serve-hy3")
    yield
    thaw(WORKER)
    play("serve-hy3")


def test_a_healthy_cluster_is_left_as_it_is() -> None:
    before = {node: on(node, MAIN) for node in NODES}
    output = play("recover-hy3")
    assert "Healthy: the engine answers, and nothing is to be done." in output
    assert changed_nothing(output)
    assert {node: on(node, MAIN) for node in NODES} == before
    recovery = report()["recovery"]
    assert {name: node["state"] for name, node in recovery["nodes"].items()} == dict.fromkeys(NODES, "healthy")
    assert (recovery["healthy"], recovery["actions"], recovery["done"]) == (True, [], [])


def pids(title: str) -> list[str]:
    return on(WORKER, f"pgrep -f '^{title} 9999' || true").split()


def test_orphans_of_ours_are_ended_and_nothing_else() -> None:
    before = {node: on(node, MAIN) for node in NODES}
    on(WORKER, f"cp /bin/sleep {PROGRAM}")
    try:
        on(WORKER, LEAVE.format(user="hy3", title="VLLM::EngineCore", program=PROGRAM))
        # Of another venv, of another user, and under a title of somebody's own.
        on(WORKER, LEAVE.format(user="hy3", title="VLLM::Worker_TP0", program="/bin/sleep"))
        on(WORKER, LEAVE.format(user="lab", title="VLLM::Worker_TP1", program=PROGRAM))
        on(WORKER, LEAVE.format(user="hy3", title="mine", program=PROGRAM))
        [orphan] = pids("VLLM::EngineCore")
        others = [pids(title) for title in ("VLLM::Worker_TP0", "VLLM::Worker_TP1", "mine")]
        assert all(others)
        status, output = recover("--check")
        assert status == 0
        assert f"1. end the orphans on {WORKER}: VLLM::EngineCore (process {orphan}) outlived its engine" in output
        assert pids("VLLM::EngineCore") == [orphan]
        output = play("recover-hy3")
        assert "Healthy: the engine answers" in output
        assert pids("VLLM::EngineCore") == []
        assert [pids(title) for title in ("VLLM::Worker_TP0", "VLLM::Worker_TP1", "mine")] == others
        assert {node: on(node, MAIN) for node in NODES} == before
        assert changed_nothing(play("recover-hy3"))
    finally:
        on(WORKER, f"pkill -f '^(VLLM::[A-Za-z0-9_]+|mine) 9999' || true; rm -f {PROGRAM}")


def test_an_engine_that_answers_is_not_stopped_for_a_node_without_ssh() -> None:
    before = on(HEAD, MAIN)
    # It comes back by itself; nobody could log in to start it.
    on(WORKER, "systemd-run --quiet --on-active=240 systemctl start ssh && systemctl stop ssh.socket ssh || true")
    status, output = recover()
    assert status != 0
    assert f"{WORKER} ssh down: its kernel answers, and no SSH server does" in output
    assert f"Leave {WORKER} until nobody needs the engine" in output
    assert changes(output) == {"0"}
    assert on(HEAD, MAIN) == before
    deadline = time.monotonic() + 400
    while True:
        try:
            on(WORKER, "true")
            break
        except AssertionError:
            assert time.monotonic() < deadline
            time.sleep(5)


@pytest.fixture(scope="module")
def frozen() -> t.Iterator[None]:
    freeze(WORKER)
    yield
    thaw(WORKER)


def test_check_mode_prints_the_plan_for_a_frozen_node(frozen: None) -> None:
    # The engine may have noticed, and end by itself.
    ray = "systemctl show hy3-ray -p MainPID,InvocationID"
    before = on(HEAD, ray)
    status, output = recover("--check")
    assert status == 0
    assert f"{WORKER} wedged: its kernel takes connections to SSH, and no program there gets to say a word" in output
    assert "from the controller, 198.18.10.2:22 takes the connection and gives no banner" in output
    assert f"from {HEAD}, 198.18.20.2:22 takes the connection and gives no banner" in output
    assert "Plan, which check mode does not carry out:" in output
    assert f"1. stop hy3-serve.service on {HEAD}" in output
    assert f"2. stop hy3-ray.service on {HEAD}" in output
    assert f"3. wait up to 300 s for the SSH server of {WORKER}" in output
    assert changes(output) == {"0"}
    assert on(HEAD, ray) == before


def test_a_frozen_node_frees_its_peer_and_then_a_person_is_told(frozen: None) -> None:
    status, output = recover("-e", "hy3_recover_timeout=10")
    assert status != 0
    assert f"Power cycle {WORKER}: hold its power button until it is off" in output
    assert "waited for, up to 10 s after stopping hy3-serve.service" in output
    assert set(on(HEAD, ASKS).split()) == {"inactive"}
    found = report()
    assert (found["play"], found["ok"]) == ("recover", False)
    assert found["recovery"]["before"][WORKER]["state"] == "wedged"
    assert [one["do"] for one in found["recovery"]["done"]] == ["stop", "stop", "wait"]
    # What can be done was done.
    status, output = recover("-e", "hy3_recover_timeout=10")
    assert status != 0
    assert changes(output) == {"0"}


def test_a_node_that_thaws_while_it_is_waited_for(frozen: None) -> None:
    process = subprocess.Popen(
        command_of("recover-hy3", "-e", "hy3_recover_timeout=300"),
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f"{WORKER}: SSH says silent, waited" in line:
            thaw(WORKER)
    output = " ".join("".join(lines).split())
    assert process.wait() == 0, output[-4000:]
    assert f"{WORKER} had starved and is back: before the next start lower" in output
    assert "Run serve-hy3: nothing is in its way" in output
    assert "-> Paris." in play("serve-hy3")
    assert changed_nothing(play("recover-hy3"))
