# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster whose nodes reboot answers again without a play, and one that was stopped stays down.

Needs a lab (`make lab-up`). A reboot is a cut of the power: the peers hear nothing, and the fabric's link comes after
the node, as it is plugged in when the node runs.
"""

from __future__ import annotations

import json
import subprocess
import time
import typing as t
from collections.abc import Callable

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import (
    LAB,
    NODES,
    changed_nothing,
    on,
    play,
    power_off,
    power_on,
)

HEAD, WORKER = NODES
UNITS = "hy3-ray hy3-serve hy3-firewall"
# Ray notices a dead peer after a minute, the engine's restart waits for another, and its start takes two on two cores.
PATIENCE = 900


def until(what: str, true: Callable[[], object], seconds: float = PATIENCE) -> float:
    """Wait for something; how many seconds that took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, f"not within {seconds:.0f} s: {what}; {states()}"
        time.sleep(3)
    took = time.monotonic() - began
    print(f"{what}: {took:.0f} s")
    return took


def look(node: str, script: str) -> str:
    """Output of a script on a node, which may be down."""
    command = ["ssh", "-F", str(LAB / "ssh/config"), "-o", "ConnectTimeout=5", node, f"sudo -n {script}"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout


def states() -> dict[str, str]:
    show = f"systemctl show {UNITS} -p Id,ActiveState,SubState,Result,NRestarts,StatusText"
    return {node: " ".join(look(node, show).split()) for node in NODES}


def invocation(node: str, unit: str) -> str:
    return on(node, f"systemctl show {unit} -P InvocationID").strip()


def enabled(node: str, unit: str) -> bool:
    return on(node, f"systemctl is-enabled {unit} 2>/dev/null || true").strip() == "enabled"


def answer() -> str:
    """What the endpoint says to the smoke question, empty if it says nothing."""
    body = json.dumps(
        {
            "model": "hy3-tiny",
            "temperature": 0,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "capital of France? one word"}],
        }
    )
    url = "http://127.0.0.1:8000/v1/chat/completions"
    said = look(HEAD, f"curl -s --max-time 20 {url} -H 'Content-Type: application/json' -d '{body}'")
    try:
        found: dict[str, t.Any] = json.loads(said)
        return str(found["choices"][0]["message"]["content"])
    except (ValueError, KeyError):
        return ""


@pytest.fixture(scope="module", autouse=True)
def served() -> t.Iterator[None]:
    """Begin and end with a cluster that serves."""
    play("serve-hy3")
    yield
    play("serve-hy3")


def test_units_come_back_with_the_node() -> None:
    assert {unit: enabled(HEAD, unit) for unit in UNITS.split()} == {
        "hy3-ray": True,
        "hy3-serve": True,
        "hy3-firewall": False,  # Ray's unit brings it
    }
    assert (enabled(WORKER, "hy3-ray"), enabled(WORKER, "hy3-serve")) == (True, False)


def test_the_worker_reboots() -> None:
    before = invocation(HEAD, "hy3-serve")
    raylet = invocation(HEAD, "hy3-ray")
    power_off(WORKER)

    def waits() -> bool:
        shown = on(HEAD, "systemctl show hy3-serve -p SubState,StatusText")
        return "SubState=start-pre" in shown and "StatusText=waits: 198.18.20.2:6380 did not accept" in shown

    until("the driver has noticed and waits for the worker", waits)
    # For as long as it takes.
    assert "hy3-serve.service waits: 198.18.20.2:6380 did not accept a connection" in play("status-hy3")
    power_on()
    until("the endpoint answers after the worker's reboot", lambda: answer() == "Paris.")
    assert invocation(HEAD, "hy3-serve") != before
    assert invocation(HEAD, "hy3-ray") == raylet, "the head's Ray had no reason to restart"
    assert "hy3-serve.service has ended by itself and was started again" in play("status-hy3")
    assert changed_nothing(play("serve-hy3"))


def test_the_head_reboots() -> None:
    before = invocation(WORKER, "hy3-ray")
    power_off(HEAD)
    power_on()
    # The engine, which waits for the worker, is no part of it.
    until("the boot is done", lambda: look(HEAD, "systemctl is-active multi-user.target").strip() == "active", 60)
    until("the endpoint answers after the head's reboot", lambda: answer() == "Paris.")
    assert invocation(WORKER, "hy3-ray") != before, "the worker's raylet belonged to the head that is gone"
    output = play("serve-hy3")
    assert "-> Paris." in output
    assert changed_nothing(output)


def test_both_reboot() -> None:
    for node in NODES:
        power_off(node)
    power_on()
    until("the endpoint answers after the reboot of both", lambda: answer() == "Paris.")
    for node in NODES:
        # Before Ray listened.
        loaded, started = (
            int(on(node, f"systemctl show {unit} -P {which}"))
            for unit, which in (
                ("hy3-firewall", "ActiveEnterTimestampMonotonic"),
                ("hy3-ray", "ExecMainStartTimestampMonotonic"),
            )
        )
        assert 0 < loaded <= started
        assert "table inet hy3_lab" in on(node, "nft list tables")
    assert changed_nothing(play("serve-hy3"))


@pytest.mark.parametrize(("unit", "process"), [("hy3-ray", "-x raylet"), ("hy3-serve", "-f ^VLLM::EngineCore")])
def test_a_process_of_the_head_is_killed(unit: str, process: str) -> None:
    before = {name: invocation(HEAD, name) for name in ("hy3-ray", "hy3-serve")}
    on(HEAD, f"kill -KILL $(pgrep -u hy3 {process})")
    until(f"the engine has ended with {process}", lambda: invocation(HEAD, "hy3-serve") != before["hy3-serve"])
    until(f"the endpoint answers after the end of {process}", lambda: answer() == "Paris.")
    assert (invocation(HEAD, "hy3-ray") != before["hy3-ray"]) == (unit == "hy3-ray")
    assert changed_nothing(play("serve-hy3"))


def test_one_that_ends_again_and_again_stays_down() -> None:
    """Counted from a play's start; each end here is the main process's own."""
    try:
        on(HEAD, "mkdir -p /run/systemd/system/hy3-serve.service.d")
        # Only so that the test need not wait for minutes.
        quick = "[Service]\\nRestartSec=1\\nExecStartPre=\\nExecStart=\\nExecStart=/bin/false\\n"
        on(HEAD, f"printf '{quick}' >/run/systemd/system/hy3-serve.service.d/quick.conf; systemctl daemon-reload")
        on(HEAD, "systemctl reset-failed hy3-serve; systemctl restart hy3-serve")
        failed = "systemctl show hy3-serve -P Result"
        until("the limit is reached", lambda: on(HEAD, failed).strip() == "start-limit-hit", 60)
        assert on(HEAD, "systemctl show hy3-serve -P NRestarts").strip() in ("4", "5")
        output = play("status-hy3")
        assert "hy3-serve.service stays down after 5 starts within 4h, as many as it may have" in output
    finally:
        on(HEAD, "rm -r /run/systemd/system/hy3-serve.service.d; systemctl daemon-reload")
    # The way out that it names.
    assert "-> Paris." in play("serve-hy3")
    assert changed_nothing(play("serve-hy3"))


def test_stopped_means_stopped() -> None:
    play("stop-hy3")
    for node in NODES:
        power_off(node)
    power_on()
    for node in NODES:
        assert on(node, "systemctl is-system-running --wait || true").strip() == "running"
        assert not any(enabled(node, unit) for unit in UNITS.split())
        shown = on(node, "systemctl show hy3-ray hy3-serve hy3-firewall -P ActiveState").split()
        assert set(shown) == {"inactive"}
        assert on(node, "pgrep -u hy3 -f 'raylet|gcs_server|vllm|VLLM' || true").strip() == ""
    assert changed_nothing(play("stop-hy3"))
    assert "-> Paris." in play("serve-hy3")
    assert changed_nothing(play("serve-hy3"))
