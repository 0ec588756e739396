# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The field cases of recovery, by their ids, and where those of the Ansible platform have their tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.filter.secret_problems import secret_problems
from ansible_collections.sparks.hy3.plugins.module_utils._budget import Engine
from ansible_collections.sparks.hy3.plugins.module_utils._budget import judge as budget
from ansible_collections.sparks.hy3.plugins.module_utils._engine_processes import kind_of
from ansible_collections.sparks.hy3.plugins.module_utils._orphans import Seen, orphans_among
from ansible_collections.sparks.hy3.plugins.module_utils._recovery import Plan, recovery_plan
from ansible_collections.sparks.hy3.plugins.module_utils._recovery_states import HEALTHY, STARTING, WEDGED
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils import test__budget, test__rules
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.sick_cluster import (
    HEAD,
    NO_ROUTE,
    NOW,
    PLAN,
    SILENT,
    WORKER,
    Facts,
    laid,
    peers,
    unit,
    units,
    view,
)

ROOT = Path(__file__).parents[4]
GIB = 1024**3
SPARK = int(121.69 * GIB)
# Of another file, with the test that has it.
ELSEWHERE = {
    "B123": (test__rules, "test_field_cases"),
    "B128": (test__rules, "test_field_cases"),
}
NOT_OURS = {
    "B114 which rank failed first": "a reader of logs decides that, _engine_failures; here its answer is shown",
}


def judge(evidence: Facts, *, done: list[Facts] | None = None, start_timeout: int = 2400) -> Plan:
    return recovery_plan(evidence, PLAN, done=done or [], now=NOW, start_timeout=start_timeout, wait=300)


# pid, parent, title, program: whether it is ended. The parent of 901 is the user's manager.
B113 = [
    (900, "systemd", "VLLM::EngineCore", "/opt/hy3/venv/bin/python3", True),
    (901, "systemd", "VLLM::Worker_TP0", "/opt/hy3/venv/bin/python3", True),
    (950, "systemd", "VLLM::EngineCore", "/srv/other/venv/bin/python3", False),
    (960, "systemd", "vim notes-on-VLLM::EngineCore", "/usr/bin/vim", False),
]


def test_b113_what_survived_the_api_server() -> None:
    processes = [
        Seen(
            pid=pid,
            kind=(kind_of([title]) or ("",))[0],
            title=title,
            user=1234,
            unit="",
            parent=parent,
            files=[program],
            root="",
            started=1,
            resident=None,
        )
        for pid, parent, title, program, _ended in B113
    ]
    found = [one["pid"] for one in orphans_among(processes, user=1234, venvs=["/opt/hy3/venv"])]
    assert found == [pid for pid, *_more, ended in B113 if ended]


def missing(available: float, *, floor: int) -> int:
    """What a start lacks with so much available, in bytes, as role preflight asks before each."""
    engine = Engine(gpu_memory_utilization=0.30)
    return budget(
        mem_total=SPARK, reserve=4 * GIB, engine=engine, available=int(available * GIB), floor=floor * GIB
    ).missing


def test_b114_each_further_start_is_gated_on_memory() -> None:
    """112.3, 112.1 and 111.8 GiB are free before three tries, and the floor is 112: two may start."""
    allowed = [free for free in (112.3, 112.1, 111.8) if not missing(free, floor=112)]
    assert len(allowed) == 2


POLLS = [(0, 14.2), (15, 14.4), (30, 61.0), (60, 113.9), (75, 114.0)]


@pytest.mark.parametrize(("deadline", "expected"), [(120, 60), (45, None)])
def test_b116_memory_that_comes_back_later(deadline: int, expected: int | None) -> None:
    back = [at for at, free in POLLS if at <= deadline and not missing(free, floor=112)]
    assert next(iter(back), None) == expected


def test_b116_a_recovery_waits_two_minutes_for_it() -> None:
    """It asks as the preflight does, and what is still missing then is said."""
    [task] = [
        task for task in yaml.safe_load((ROOT / "roles/preflight/tasks/look_memory.yml").read_text()) if "until" in task
    ]
    patience = yaml.safe_load((ROOT / "roles/preflight/vars/main.yml").read_text())["__hy3_preflight_patience"]
    assert patience * task["delay"] == 120
    assert "tasks_from: look_memory" in (ROOT / "roles/recover/tasks/look.yml").read_text()
    evidence = laid(
        SILENT,
        {
            HEAD: {"status": units("inactive", "inactive"), "memory": {"missing": 51 * GIB, "owners": []}},
            WORKER: {"status": units("inactive", "")},
        },
    )
    assert "51.00 GiB of its memory are missing for a start" in judge(evidence)["advice"][0]["sentence"]


def test_b117_hard_wedge() -> None:
    """Stop Ray on the peers, through the fabric; without a banner after the deadline power cycle; lower the budget."""
    seen = {"view": view("silent", ping=True), "login": NO_ROUTE}
    first = judge(laid(SILENT, {HEAD: {"peers": peers("silent")}, WORKER: seen}))
    assert first["nodes"][WORKER]["state"] == WEDGED
    assert "unified-memory wedge" in first["nodes"][WORKER]["why"]
    assert [(one["do"], one["node"]) for one in first["actions"]] == [("stop", HEAD), ("stop", HEAD), ("wait", WORKER)]
    done: list[Facts] = [dict(one) for one in first["actions"]]
    status = units("inactive", "inactive")
    after = judge(laid(SILENT, {HEAD: {"peers": peers("silent"), "status": status}, WORKER: seen}), done=done)
    [advice] = after["advice"]
    assert advice["sentence"].startswith("Power cycle spark-2")
    assert "before the next start lower what the engine takes" in advice["sentence"]
    assert "retry" not in advice["sentence"]


@pytest.mark.parametrize("line", ["NVRM: nvAssertOk: NV_ERR_NO_MEMORY ... _memdescAllocInternal", "swap_free 0 kB"])
def test_b117_what_the_boot_before_left_in_the_journal(line: str) -> None:
    evidence = laid(
        SILENT,
        {
            HEAD: {"status": units("inactive", "inactive")},
            WORKER: {"status": units("inactive", ""), "wreck": {"stdout_lines": ["usb 1-1: new device", line]}},
        },
    )
    [lower, serve] = judge(evidence)["advice"]
    assert lower["sentence"].startswith("The boot of spark-2 before this one ended without memory")
    assert "lower what the engine takes" in lower["sentence"]
    assert serve["sentence"].startswith("Run serve-hy3")


def test_b119_units_are_the_systems_with_a_user() -> None:
    """The rule user-manager warns of any other; test__rules has it."""
    template = (ROOT / "roles/systemd_unit/templates/unit.service.j2").read_text()
    assert "\nUser={{ hy3_plan.user }}\n" in template
    assert "\nLimitMEMLOCK=infinity\n" in template
    assert "user-manager" in test__rules.IDS


def test_b120_a_load_takes_longer_than_a_health_timeout() -> None:
    """90 GB at 150 MB/s and 300 s of compilation are 900 s: with 600 it would be called overdue."""
    needed = 90_000_000_000 // 150_000_000 + 300
    assert needed == 900
    default = yaml.safe_load((ROOT / "roles/profile/defaults/main.yml").read_text())["hy3_start_timeout"]
    assert default >= 1800
    loads = {
        "units": {"hy3-ray.service": unit(), "hy3-serve.service": unit(active_since=NOW - needed)},
        "log": {"phase": "loading"},
        "health": {"ok": False, "status": None},
    }
    evidence = laid(SILENT, {HEAD: {"status": loads}})
    state = judge(evidence, start_timeout=default)["nodes"][HEAD]["state"]
    assert state == STARTING
    early = judge(evidence, start_timeout=600)
    assert early["nodes"][HEAD]["state"] not in (STARTING, HEALTHY)
    # Overdue is said, and nothing is stopped for it.
    assert early["actions"] == []


def all_tasks() -> str:
    paths = [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("playbooks/*.yml")]
    text = "\n".join(path.read_text() for path in sorted(paths))
    assert "systemd_service" in text
    return text


def test_b122_no_user_manager_is_asked() -> None:
    assert not re.search(r"scope: *user|systemctl\W+--user", all_tasks())


def test_b125_nobody_becomes_an_unprivileged_user() -> None:
    """That needs setfacl or files that all can read; a task becomes root, or asks runuser to."""
    assert "become_user" not in all_tasks()


@pytest.mark.parametrize("prefix", ["\ufeff", "export KEY=", '"'], ids=["BOM", "export", "quote"])
def test_b126_a_file_of_a_users_is_refused_if_it_is_not_plain(prefix: str, tmp_path: Path) -> None:
    """The one that becomes a line of an EnvironmentFile. All others we write ourselves."""
    key = f"{prefix}0123456789abcdef01234567"
    file = tmp_path / "key"
    file.write_text(key)
    file.chmod(0o600)
    plan = {
        "api": {"host": "127.0.0.1", "port": 8000, "key_file": str(file), "sources": []},
        "engine": "vllm",
        "firewall": True,
        "engine_args": {},
        "engine_env": {},
    }
    [problem] = secret_problems(plan, key)
    assert "and it must be" in problem


def test_all_field_cases_have_their_place() -> None:
    here = {match[1].upper() for match in re.finditer(r"^def test_(b\d+)_", Path(__file__).read_text(), re.MULTILINE)}
    recovery = {"B113", "B114", "B116", "B117", "B119", "B120"}
    platform = {"B122", "B123", "B125", "B126", "B128"}
    assert here | set(ELSEWHERE) == recovery | platform
    for case, (module, name) in ELSEWHERE.items():
        assert hasattr(module, name)
        assert case in Path(str(module.__file__)).read_text()
    assert "B116" in Path(str(test__budget.__file__)).read_text()
