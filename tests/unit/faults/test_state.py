# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the fault suite makes of units, files and processes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from ansible_collections.sparks.hy3.tests.faults import state
from ansible_collections.sparks.hy3.tests.unit.faults.said import SOURCE, running, whole

SHOWN = """\
Id=hy3-ray.service
ActiveState=active
SubState=running
Result=success
InvocationID=0f2f
NRestarts=0
Job=0
ActiveExitTimestampMonotonic=0

Id=hy3-serve.service
ActiveState=activating
SubState=auto-restart
Result=signal
InvocationID=77ab
NRestarts=2
ActiveExitTimestampMonotonic=104250000
"""
READ = state.units(SHOWN)
ray, serve = (READ[name] for name in state.UNITS)
DEAD = dataclasses.replace(serve, active="failed", sub="failed")
Nodes = dict[str, dict[str, state.Unit]]


def nodes(*of_head: state.Unit, worker: state.Unit | None = ray) -> Nodes:
    found = {"spark-1": {unit.name: unit for unit in of_head}}
    return found | ({"spark-2": {worker.name: worker}} if worker else {})


def test_units() -> None:
    assert serve == state.Unit(
        "hy3-serve.service", "activating", "auto-restart", "signal", "77ab", restarts=2, waits=False, left_s=104.25
    )
    assert state.units("") == {}
    assert state.units("Id=hy3-ray.service\nActiveState=inactive\nJob=417\n")["hy3-ray.service"].waits


def test_the_property_list_is_what_is_read() -> None:
    assert set(re.findall(r"^(\w+)=", SHOWN, re.MULTILINE)) == set(state.PROPERTIES)


def test_first_end() -> None:
    both = nodes(ray, serve, worker=dataclasses.replace(ray, left_s=103.5))
    assert state.first_end(both, 100.0) == (103.5, "hy3-ray.service of spark-2")
    assert state.first_end(both, 103.9) == (104.25, "hy3-serve.service of spark-1")
    assert state.first_end(both, 105.0) is None


@pytest.mark.parametrize(
    ("found", "down"),
    [
        (nodes(ray, DEAD), True),
        (nodes(ray, serve), False),  # systemd waits before it restarts
        (nodes(ray, dataclasses.replace(DEAD, waits=True)), False),
        (nodes(ray, DEAD, worker=dataclasses.replace(ray, active="activating")), False),
        (nodes(ray, DEAD, worker=dataclasses.replace(ray, active="failed")), True),
        (nodes(ray, DEAD, worker=None), True),
        (nodes(ray, dataclasses.replace(serve, active="active")), False),  # it starts, or hangs
        ({"spark-2": {ray.name: ray}}, False),  # the head cannot be asked
        (nodes(ray), False),
    ],
)
def test_is_down(found: Nodes, down: bool) -> None:
    assert state.is_down(found, "spark-1") is down


# ---- What was lost


def file_gone(after: dict[str, state.Node]) -> None:
    after["spark-1"].kept.clear()


def file_changed(after: dict[str, state.Node]) -> None:
    after["spark-2"].kept["home/lab/mine"] = "bb"


def shard_cut(after: dict[str, state.Node]) -> None:
    after["spark-2"].checkpoint["model-1.safetensors"] = "f2"


def half(after: dict[str, state.Node]) -> None:
    after["spark-2"].unfinished.append("srv/hy3/models/Hy3-tiny/.hy3-pull")


def two_engines(after: dict[str, state.Node]) -> None:
    after["spark-1"].processes += running({"core": 1})


def stray(after: dict[str, state.Node]) -> None:
    after["spark-2"].processes[0]["unit"] = "session-3.scope"


LOST: dict[str, tuple[Callable[[dict[str, state.Node]], None], str]] = {
    "a file": (file_gone, "spark-1: home/lab/mine is gone."),
    "its content": (file_changed, "spark-2: home/lab/mine is changed."),
    "a shard": (shard_cut, "spark-2: model-1.safetensors of the checkpoint is not what it was."),
    "half a copy": (half, "spark-2: srv/hy3/models/Hy3-tiny/.hy3-pull was left of a copy."),
    "two engines": (two_engines, "spark-1: the engine's processes are {"),
    "a stray": (stray, "spark-2: processes 10 of an engine are in none of its units."),
}


@pytest.mark.parametrize(("lose", "sentence"), LOST.values(), ids=LOST)
def test_lost(lose: Callable[[dict[str, state.Node]], None], sentence: str) -> None:
    after = whole()
    assert state.lost(whole(), after, SOURCE, "spark-1") == []
    lose(after)
    (said,) = state.lost(whole(), after, SOURCE, "spark-1")
    assert said.startswith(sentence)
