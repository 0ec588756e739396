# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What has outlived its engine: a table of processes that are nearly one, and real ones that are found and ended."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
import typing as t
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _orphans
from ansible_collections.sparks.hy3.plugins.module_utils._orphans import (
    Orphans,
    Seen,
    field_of,
    is_below,
    mapped_files,
    orphans_among,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from hypothesis import given, settings
from hypothesis import strategies as st

VENV = "/opt/hy3/venv"
USER = 1234
TORCH = f"{VENV}/lib/python3.12/site-packages/torch/_C.cpython-312-aarch64-linux-gnu.so"


def seen(pid: int = 900, **over: t.Any) -> Seen:
    """An engine core of ours that was handed to the system's manager."""
    found: Seen = {
        "pid": pid,
        "kind": "engine_core",
        "title": "VLLM::EngineCore",
        "user": USER,
        "unit": "",
        "parent": "systemd",
        "files": ["/usr/bin/python3.12", TORCH],
        "root": "",
        "started": 1,
        "resident": 1,
    }
    return t.cast(Seen, {**found, **over})


def front(kind: str = "driver", unit: str = "session-3.scope", **over: t.Any) -> Seen:
    return seen(1, kind=kind, unit=unit, title="", parent="", files=[], **over)


# What lies on the node, and whether 900 is an orphan of ours.
NEARLY: dict[str, tuple[list[Seen], bool]] = {
    "one": ([seen()], True),
    "a worker": ([seen(kind="worker")], True),
    "in the control group of a unit that ended": ([seen(unit="hy3-serve.service")], True),
    "in a session whose engine ended": ([seen(unit="session-3.scope")], True),
    "with the manager called init": ([seen(parent="init")], True),
    "its engine lives beside it": ([front(), seen(unit="session-3.scope")], False),
    "in the control group of a raylet": ([front("raylet", "hy3-ray.service"), seen(unit="hy3-ray.service")], False),
    "somebody else's engine in the same scope": ([front(user=0), seen(unit="session-3.scope")], False),
    "an engine in another scope": ([front(unit="session-4.scope"), seen(unit="session-3.scope")], True),
    "an engine without a unit": ([front(unit=""), seen()], True),
    "another user's": ([seen(user=1000)], False),
    "another venv's": ([seen(files=["/srv/other/venv/lib/torch/_C.so"])], False),
    "a venv with a longer name": ([seen(files=[f"{VENV}-2/lib/torch/_C.so"])], False),
    "nothing of it can be read": ([seen(files=[])], False),
    "in a container": ([seen(root="/proc/900/root")], False),
    "a program of somebody's started it": ([seen(parent="python3")], False),
    "below a shell": ([seen(parent="bash")], False),
    "its parent cannot be told": ([seen(parent="")], False),
    "an API server": ([seen(kind="driver")], False),
    "a raylet without its ray start": ([seen(kind="raylet")], False),
}  # fmt: skip


@pytest.mark.parametrize(("processes", "orphan"), NEARLY.values(), ids=NEARLY)
def test_nearly(processes: list[Seen], orphan: bool) -> None:
    found = [one["pid"] for one in orphans_among(processes, user=USER, venvs=[VENV])]
    assert found == ([900] if orphan else [])


ANY = st.builds(
    seen,
    st.integers(1, 9),
    kind=st.sampled_from(["engine_core", "worker", "driver", "raylet", "gcs", "ray_start"]),
    user=st.sampled_from([USER, 0]),
    unit=st.sampled_from(["", "hy3-ray.service", "session-3.scope"]),
    parent=st.sampled_from(["systemd", "bash", ""]),
    files=st.sampled_from([[], [TORCH], ["/usr/bin/python3"]]),
    root=st.sampled_from(["", "/proc/9/root"]),
)


@settings(max_examples=100, deadline=None)
@given(processes=st.lists(ANY, max_size=6))
def test_whatever_runs_nothing_of_another_is_an_orphan(processes: list[Seen]) -> None:
    for one in orphans_among(processes, user=USER, venvs=[VENV]):
        assert (one["user"], one["root"], one["parent"]) == (USER, "", "systemd")
        assert one["kind"] in ("engine_core", "worker")
        assert TORCH in one["files"]
        beside = [other["kind"] for other in processes if one["unit"] and other["unit"] == one["unit"]]
        assert not set(beside) & {"driver", "raylet", "gcs", "ray_start"}


@pytest.mark.parametrize("venvs", [[], [""], ["/"]])
def test_no_directory_has_nothing(venvs: list[str]) -> None:
    assert not is_below([TORCH], venvs)


MAPS = """\
55d0c2a00000-55d0c2a01000 r--p 00000000 fd:01 1311 /usr/bin/python3.12
7f0000000000-7f0000001000 r-xp 00000000 fd:01 77   /opt/hy3/venv/lib/a b.so
7f0000001000-7f0000002000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 rw-p 00000000 fd:01 77   /opt/hy3/venv/lib/a b.so
7f0000003000-7f0000004000 r-xp 00000000 fd:01 78   /opt/old/lib/c.so (deleted)
7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0    [vdso]
"""


def test_mapped_files() -> None:
    assert mapped_files(MAPS) == ["/usr/bin/python3.12", "/opt/hy3/venv/lib/a b.so", "/opt/old/lib/c.so"]


def test_field_of() -> None:
    assert field_of("Uid:\t1234\t0\t0\t0\nPPid:\t1\n", "Uid") == 1234
    assert field_of("Name:\tx\n", "VmRSS") is None


# ---- Real processes

# Starts a program of the venv under a title, as an orphan: its parent ends at once.
LAUNCH = """\
import os, sys
program, title, *arguments = sys.argv[1:]
if os.fork() == 0:
    os.setsid()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.execv(program, [title, *arguments])
    print(child, flush=True)
    os._exit(0)
os.wait()
"""


class Venv:
    """A directory with programs in it, and what was started from it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.pids: list[int] = []
        (place / "bin").mkdir(parents=True)
        for program in ("sleep", "bash"):
            shutil.copy2(t.cast(str, shutil.which(program)), place / "bin")

    def launch(self, program: str, title: str, *arguments: str) -> int:
        """The process id of an orphan, once it carries its title."""
        path = self.place / "bin" / program
        done = subprocess.run(
            [sys.executable, "-c", LAUNCH, str(path), title, *arguments], capture_output=True, text=True, check=True
        )
        pid = int(done.stdout)
        self.pids.append(pid)
        deadline = time.monotonic() + 60
        while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return pid

    def orphans(self) -> Orphans:
        return Orphans(user=os.getuid(), venv=str(self.place))


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Venv]:
    made = Venv(tmp_path / "venv")
    yield made
    for pid in made.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def adopter(pid: int) -> str:
    parent = field_of(Path(f"/proc/{pid}/status").read_text(), "PPid")
    return Path(f"/proc/{parent}/comm").read_text().strip()


def test_finds_and_ends_real_ones(venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    core = venv.launch("sleep", "VLLM::EngineCore", "100")
    stubborn = venv.launch("bash", "VLLM::Worker_TP0", "-c", "trap '' TERM; while :; do read -t 1 <> <(:); done")
    other = venv.launch(t.cast(str, shutil.which("sleep")), "VLLM::EngineCore", "100")
    named = venv.launch("sleep", "vim notes-on-VLLM::EngineCore", "100")
    # Whoever adopts orphans here is the manager.
    monkeypatch.setattr(_orphans, "MANAGERS", (adopter(core),))
    orphans = venv.orphans()
    found = orphans.find()
    assert [one["pid"] for one in found] == sorted([core, stubborn])
    assert {one["title"] for one in found} == {"VLLM::EngineCore", "VLLM::Worker_TP0"}
    assert all(one["resident"] for one in found)
    assert orphans.end(found, grace=1.0) == []
    assert orphans.find() == []
    for pid in (other, named):
        os.kill(pid, 0)


def test_a_child_of_a_living_program_is_none(venv: Venv) -> None:
    with subprocess.Popen(["VLLM::EngineCore", "100"], executable=str(venv.place / "bin/sleep")) as child:
        try:
            assert child.pid not in [one["pid"] for one in venv.orphans().find()]
        finally:
            child.kill()


def test_a_successor_under_its_id_is_not_hit(venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    core = venv.launch("sleep", "VLLM::EngineCore", "100")
    monkeypatch.setattr(_orphans, "MANAGERS", (adopter(core),))
    [found] = venv.orphans().find()
    earlier = t.cast(Seen, {**found, "started": t.cast(int, found["started"]) - 1})
    assert venv.orphans().end([earlier], grace=0.2) == []
    time.sleep(0.3)
    # One that has ended and that nobody has waited for has none.
    assert Path(f"/proc/{core}/cmdline").read_bytes()


# ---- The module


def test_the_module_finds_and_ends(venv: Venv) -> None:
    """Its own MANAGERS count: where none of these adopts orphans, as in some containers, it finds none."""
    core = venv.launch("sleep", "VLLM::EngineCore", "100")
    arguments = {"user": pwd.getpwuid(os.getuid()).pw_name, "venv": str(venv.place)}
    expected = [core] if adopter(core) in _orphans.MANAGERS else []
    found = run_module("engine_orphans", **arguments)
    assert [one["pid"] for one in found["orphans"]] == expected
    assert found["changed"] is False
    checked = run_module("engine_orphans", **arguments, state="absent", _ansible_check_mode=True)
    assert checked["changed"] is bool(expected)
    os.kill(core, 0)
    ended = run_module("engine_orphans", **arguments, state="absent", grace=5)
    assert (ended["changed"], ended["left"]) == (bool(expected), [])
    again = run_module("engine_orphans", **arguments, state="absent")
    assert (again["changed"], again["orphans"]) == (False, [])


def test_a_user_who_does_not_exist_has_none() -> None:
    result = run_module("engine_orphans", user="no-such-user-here", venv=VENV, state="absent")
    assert (result["changed"], result["orphans"], result["left"]) == (False, [], [])


@pytest.mark.parametrize("venv", ["/", "//", ""])
def test_the_whole_machine_is_no_venv(venv: str) -> None:
    assert "every program lies below that" in run_module("engine_orphans", user="root", venv=venv)["msg"]
