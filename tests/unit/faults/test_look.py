# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the fault suite runs on a node."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.faults import look, state

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("VLLM::EngineCore ", "core"),
        ("ray::RayWorkerProc.run ", "rank"),
        ("VLLM::Worker_TP1 ", "rank"),
        ("/v/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet --node_ip_address=1.2.3.4 ", "raylet"),
        ("/v/lib/python3.11/site-packages/ray/core/src/ray/gcs/gcs_server --x ", "gcs"),
        ("/v/bin/python3 /v/bin/vllm serve /srv/model --port 8000 ", "api"),
        ("ray::IDLE ", ""),
        ("bash -c /v/bin/python /v/bin/vllm serve x ", ""),
    ],
)
def test_kind(command: str, kind: str) -> None:
    assert look.kind(command) == kind


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/hy3.slice/hy3-ray.service\n", "hy3-ray.service"),
        # Hybrid: other controllers may say where the whole machine's node runs.
        ("1:name=systemd:/hy3.slice/hy3-serve.service\n0::/../x\n4:memory:/outer.service\n", "hy3-serve.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
        ("0::/\n", ""),
    ],
)
def test_unit(cgroup: str, unit: str) -> None:
    assert look.unit(cgroup) == unit


def test_look(tmp_path: Path) -> None:
    tree = tmp_path / look.CHECKPOINT
    (tree / ".cache").mkdir(parents=True)
    (tree / "config.json").write_text("{}")
    (tree / ".cache/x.incomplete").touch()
    (tmp_path / "home/lab").mkdir(parents=True)
    (tmp_path / "home/lab/mine").write_text("mine")
    process = tmp_path / "proc/42"
    process.mkdir(parents=True)
    (process / "cmdline").write_bytes(b"VLLM::EngineCore\0")
    (process / "cgroup").write_text("0::/hy3.slice/hy3-serve.service\n")
    (tmp_path / "proc/43").mkdir()  # it has ended
    found = look.look(tmp_path, os.getuid())
    assert found == {
        "kept": {"home/lab/mine": hashlib.sha256(b"mine").hexdigest()},
        "checkpoint": {"config.json": hashlib.sha256(b"{}").hexdigest()},
        "unfinished": ["srv/hy3/models/Hy3-tiny/.cache/x.incomplete"],
        "processes": [{"pid": 42, "unit": "hy3-serve.service", "kind": "core", "command": "VLLM::EngineCore "}],
    }
    state.Node(**found)
    assert look.look(tmp_path, os.getuid() + 1)["processes"] == []


def test_it_is_piped_to_a_bare_interpreter() -> None:
    text = (ROOT / "tests/faults/look.py").read_text().replace('USER = "hy3"', 'USER = "root"')
    done = subprocess.run([sys.executable, "-I", "-"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.startswith('{"kept": ')
    assert "\nEND\n" not in text, "which ends the document that a shell pipes"
