# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module on the machine that runs the tests, with a stand-in for systemctl; what it decides is _guard's to test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

UNIT = "Id=x\nLoadState={}\nActiveState=inactive\nMainPID=0\nControlGroup=\nNeedDaemonReload=no\n"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that comes before the real one and prints the file beside it."""
    program = tmp_path / "systemctl"
    program.write_text('#!/bin/sh\ncat "$(dirname "$0")/prints"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "prints"


def test_without_a_package_nobody_guards(systemctl: Path) -> None:
    systemctl.write_text("\n".join(UNIT.format("not-found") for _unit in range(5)))
    found = run_module("guard_info", _ansible_check_mode=True)
    assert (found["changed"], found["killer"], found["refused"]) == (False, "none", [])
    (said,) = [sentence for sentence in found["says"] if "limits of its units" in sentence]
    assert "systemd-oomd is not installed" in said
    assert (found["unapplied"], found["reload"], found["monitored"]) == ([], False, None)
    assert found["sshd"] == {"unit": "", "oom_score_adj": None, "memory_min": None}


def test_what_is_wanted_by_name_is_refused(systemctl: Path) -> None:
    systemctl.write_text("\n".join(UNIT.format("not-found") for _unit in range(5)))
    found = run_module("guard_info", wanted="oomd", spare=1)
    assert (found["killer"], len(found["refused"])) == ("none", 1)
    assert found["refused"][0].startswith("hy3_guard is oomd, and this node cannot have it because ")


def test_a_node_without_systemd_is_one_sentence(systemctl: Path) -> None:
    systemctl.write_text("System has not been booted with systemd as init system (PID 1).\n")
    found = run_module("guard_info")
    assert found["failed"]
    assert found["msg"].startswith("`systemctl show` says 'System has not been booted")
