# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which files of ours role guard would write: the real role in check mode, for what guard_info may have found."""

from __future__ import annotations

import configparser
import re
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._memory import parse_size
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT, run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.systemctl import install

FILES = ROOT / "roles/guard/files"
SSH, SSHD = "ssh.service", "sshd.service"


class Case(t.NamedTuple):
    """What guard_info may find on a node, and the units that get a file then."""

    killer: str
    protect: bool
    unit: str
    units: list[str]


# By node: two at a time.
FOUND = {
    "systemd-oomd, with either name of the unit": {
        "spark-1": Case("oomd", True, SSH, ["hy3.slice", "system.slice", SSH]),
        "spark-2": Case("oomd", True, SSHD, ["hy3.slice", "system.slice", SSHD]),
    },
    "another way in, and earlyoom": {
        "spark-1": Case("oomd", False, "", ["hy3.slice"]),
        "spark-2": Case("earlyoom", True, SSH, ["system.slice", SSH]),
    },
    "nobody, with and without cgroup v2": {
        "spark-1": Case("none", True, SSH, ["system.slice", SSH]),
        "spark-2": Case("none", False, SSH, []),
    },
}


def variables(cases: t.Mapping[str, Case], refused: t.Sequence[str] = ()) -> dict[str, t.Any]:
    """Stronger than what the role registers."""
    found = {
        node: {
            "killer": case.killer,
            "protect": case.protect,
            "refused": refused,
            "says": [f"Guard: {case.killer}."],
            "sshd": {"unit": case.unit},
        }
        for node, case in cases.items()
    }
    return {"__hy3_guard_found": "{{ found_on[inventory_hostname] }}", "found_on": found}


@pytest.mark.parametrize("cases", FOUND.values(), ids=FOUND)
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: dict[str, Case]) -> None:
    install(tmp_path, monkeypatch, "active")
    done = run_playbook("guard", tmp_path, variables(cases), "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    for node, case in cases.items():
        # A directory that is not there yet is one change, the file in it another.
        assert re.findall(rf"^changed: \[{node}\] => \(item=(\S+)\)$", done.stdout, re.MULTILINE) == case.units * 2
        assert f"Guard: {case.killer}." in done.stdout


def test_a_guard_that_cannot_be_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "active")
    cases = dict.fromkeys(("spark-1", "spark-2"), Case("none", True, SSH, []))
    done = run_playbook("guard", tmp_path, variables(cases, ["This is wrong", "So is that"]), "--check")
    assert done.returncode == 2
    assert "spark-1: This is wrong; So is that." in done.stdout
    assert "changed: [" not in done.stdout


def read(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its manual says
    parser.read(FILES / name)
    return parser


def test_what_sshd_keeps_its_slice_keeps_too() -> None:
    """Of what the groups above do not keep, the kernel keeps nothing for a group in them."""
    sshd, system = (read("sshd.conf")["Service"]["MemoryMin"], read("system.conf")["Slice"]["MemoryMin"])
    assert 0 < (parse_size(sshd) or 0) <= (parse_size(system) or 0)


def test_sessions_inherit_no_score() -> None:
    assert "OOMScoreAdjust" not in read("sshd.conf")["Service"]
