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
# The killer, whether sshd is protected, its unit: units that get a file.
FOUND: dict[str, tuple[str, bool, str, list[str]]] = {
    "systemd-oomd": ("oomd", True, SSH, ["hy3.slice", "system.slice", SSH]),
    "systemd-oomd, where the unit has another name": ("oomd", True, SSHD, ["hy3.slice", "system.slice", SSHD]),
    "systemd-oomd, and another way in": ("oomd", False, "", ["hy3.slice"]),
    "earlyoom": ("earlyoom", True, SSH, ["system.slice", SSH]),
    "nobody, with cgroup v2": ("none", True, SSH, ["system.slice", SSH]),
    "nobody": ("none", False, SSH, []),
}


def found(killer: str, protect: bool, unit: str, refused: list[str] | None = None) -> dict[str, t.Any]:
    return {
        "__hy3_guard_found": {
            "killer": killer,
            "protect": protect,
            "refused": refused or [],
            "says": [f"Guard: {killer}."],
            "sshd": {"unit": unit},
        }
    }


@pytest.mark.parametrize(("killer", "protect", "unit", "units"), FOUND.values(), ids=FOUND)
def test_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killer: str, protect: bool, unit: str, units: list[str]
) -> None:
    install(tmp_path, monkeypatch, "active")
    done = run_playbook("guard", tmp_path, found(killer, protect, unit), "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    for node in ("spark-1", "spark-2"):
        # A directory that is not there yet is one change, the file in it another.
        assert re.findall(rf"^changed: \[{node}\] => \(item=(\S+)\)$", done.stdout, re.MULTILINE) == units * 2
    assert f"Guard: {killer}." in done.stdout


def test_a_guard_that_cannot_be_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "active")
    done = run_playbook("guard", tmp_path, found("none", True, SSH, ["This is wrong", "So is that"]), "--check")
    assert done.returncode == 2
    assert "spark-1: This is wrong; So is that." in done.stdout
    assert "changed: [" not in done.stdout


def read(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # as its manual says
    parser.read(FILES / name)
    return parser


def test_what_sshd_keeps_its_slice_keeps_too() -> None:
    """Of what the groups above do not keep, the kernel keeps nothing for a group in them."""
    kept = {name: parse_size(read(f"{name}.conf")[section]["MemoryMin"]) for name, section in SECTIONS.items()}
    assert 0 < (kept["sshd"] or 0) <= (kept["system"] or 0)


SECTIONS = {"sshd": "Service", "system": "Slice"}


def test_sessions_inherit_no_score() -> None:
    assert "OOMScoreAdjust" not in read("sshd.conf")["Service"]
