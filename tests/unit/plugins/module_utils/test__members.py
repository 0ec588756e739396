# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _members
from ansible_collections.sparks.hy3.plugins.module_utils._members import (
    MembersError,
    lacking,
    membership_command,
    membership_environment,
    membership_error,
    parse_membership,
)

MEMBERS = [
    ["10.77.0.2", True, {"GPU": 1.0, "node:10.77.0.2": 1.0}],
    ["10.77.0.1", True, {"GPU": 1.0, "node:10.77.0.1": 1.0, "node:__internal_head__": 1.0}],
    ["10.77.0.3", False, {}],
]


def test_members_by_address() -> None:
    assert parse_membership("a warning of Ray\n" + json.dumps(MEMBERS) + "\n") == [
        {"address": "10.77.0.1", "alive": True, "gpus": 1, "head": True},
        {"address": "10.77.0.2", "alive": True, "gpus": 1, "head": False},
        {"address": "10.77.0.3", "alive": False, "gpus": 0, "head": False},
    ]


@pytest.mark.parametrize("stdout", ["", "no list", '{"a": 1}'])
def test_no_list_is_said(stdout: str) -> None:
    with pytest.raises(MembersError, match="printed no list of nodes"):
        parse_membership(stdout)


# Recorded from Ray 2.60.0.
NO_TOKEN = (
    "[2026-11-30 18:49:36,524 W 514 514] gcs_client.cc:210: Failed to get cluster ID from GCS server: Unauthenticated: "
    "RPC error: InvalidAuthToken: Authentication token is missing or incorrect\n"
)

TEST_ERRORS: list[tuple[str, int, str, str]] = [
    (
        "no-token",
        -14,
        NO_TOKEN,
        "Ray at 10.77.0.1:6379 gave no answer within 20 seconds: Failed to get cluster ID from GCS server: "
        "Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing or incorrect",
    ),
    ("silent", -14, "", "Ray at 10.77.0.1:6379 gave no answer within 20 seconds: exit status -14"),
    (
        "no-ray-in-the-venv",
        1,
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'ray'\n",
        "Ray at 10.77.0.1:6379 is not reachable: ModuleNotFoundError: No module named 'ray'",
    ),
]


@pytest.mark.parametrize(("rc", "stderr", "expected"), [row[1:] for row in TEST_ERRORS])
def test_membership_error(rc: int, stderr: str, expected: str) -> None:
    assert membership_error(rc, stderr=stderr, address="10.77.0.1:6379", timeout=20) == expected


def test_the_address_is_never_auto() -> None:
    command = membership_command("/venv/bin/python", address="10.77.0.1:6379", timeout=20)
    assert (command[:3], command[-2:]) == (["/venv/bin/python", "-I", "-c"], ["10.77.0.1:6379", "20"])
    assert "auto" not in " ".join(command)


def test_the_token_travels_as_a_file_name() -> None:
    assert membership_environment("/etc/hy3/token")["RAY_AUTH_TOKEN_PATH"] == "/etc/hy3/token"
    assert "RAY_AUTH_MODE" not in membership_environment(None)


HEAD, WORKER, OTHER = "10.77.0.1", "10.77.0.2", "10.77.0.9"


def node(address: str, *, alive: bool = True, gpus: int = 1) -> _members.Node:
    return {"address": address, "alive": alive, "gpus": gpus if alive else 0, "head": address == HEAD}


# Who is in, words of what is missing for two nodes with a GPU each.
LACKING: dict[str, tuple[list[_members.Node], str]] = {
    "all": ([node(HEAD), node(WORKER)], ""),
    "a worker": ([node(HEAD)], "does not list 10.77.0.2 (it lists 10.77.0.1), and every node must be in"),
    "a dead worker": ([node(HEAD), node(WORKER, alive=False)], "does not list 10.77.0.2 (it lists 10.77.0.1)"),
    "one that came back": ([node(HEAD), node(WORKER, alive=False), node(WORKER)], ""),
    "a stranger instead": ([node(HEAD), node(OTHER)], "does not list 10.77.0.2 (it lists 10.77.0.1, 10.77.0.9)"),
    "everybody": ([], "does not list 10.77.0.1, 10.77.0.2 (it lists nobody)"),
    "a GPU": ([node(HEAD), node(WORKER, gpus=0)], "counts 1 GPUs and the engine needs 2"),
}


@pytest.mark.parametrize(("nodes", "words"), LACKING.values(), ids=LACKING)
def test_lacking(nodes: list[_members.Node], words: str) -> None:
    found = lacking(nodes, address=f"{HEAD}:6379", wanted=[HEAD, WORKER], gpus=2)
    assert bool(found) == bool(words)
    assert words in (found or "")


class Program:
    """The file as a role puts it on a node, with a stand-in for the interpreter of the engine's venv."""

    def __init__(self, directory: Path) -> None:
        self._python = directory / "python"
        self._program = str(shutil.copy(_members.__file__, directory / "members.py"))

    def __call__(self, answer: str, *more: str) -> subprocess.CompletedProcess[str]:
        self._python.write_text(f"#!{sys.executable}\nimport json, os, signal, sys, time\n{answer}\n")
        self._python.chmod(0o755)
        command = ["/usr/bin/python3", "-I", self._program, "--python", str(self._python), "--address", f"{HEAD}:6379"]
        command += ["--member", HEAD, "--member", WORKER, "--gpus", "2", *more]
        environment = {**os.environ, "HY3_SEEN": "yes"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def rows(*nodes: t.Sequence[t.Any]) -> str:
    return f"print({json.dumps(json.dumps(nodes))})"


def test_program_sees_all(program: Program) -> None:
    answer = rows([HEAD, True, {"GPU": 1.0}], [WORKER, True, {"GPU": 1.0}])
    done = program(answer)
    assert (done.returncode, done.stdout) == (0, f"Ray at {HEAD}:6379 lists {HEAD}, {WORKER}\n")


def test_program_gives_the_token_as_a_file_name(program: Program) -> None:
    check = (
        "assert os.environ['RAY_AUTH_TOKEN_PATH'] == '/etc/hy3/t' and os.environ['RAY_AUTH_MODE'] == 'token'\n"
        "assert os.environ['HY3_SEEN'] == 'yes'\n"
        f"assert sys.argv[1:3] == ['-I', '-c'] and sys.argv[4:] == ['{HEAD}:6379', '30'], sys.argv\n"
    )
    done = program(check + rows([HEAD, True, {"GPU": 2.0}], [WORKER, True, {}]), "--token-file", "/etc/hy3/t")
    assert (done.returncode, done.stderr) == (0, "")


# What the engine's interpreter does, words of the one sentence.
SILENT: dict[str, tuple[str, str]] = {
    "one is missing": (rows([HEAD, True, {"GPU": 1.0}]), f"does not list {WORKER}"),
    "no Ray": ("sys.exit('No module named ray')", f"Ray at {HEAD}:6379 is not reachable: No module named ray"),
    "no list": ("print('hello')", "printed no list of nodes but 'hello'"),
    "hangs": ("signal.alarm(1); time.sleep(60)", f"Ray at {HEAD}:6379 gave no answer within 30 seconds"),
}


@pytest.mark.parametrize(("answer", "words"), SILENT.values(), ids=SILENT)
def test_program_says_what_is_missing(program: Program, answer: str, words: str) -> None:
    done = program(answer)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert words in done.stderr


def test_program_without_the_engines_interpreter(program: Program) -> None:
    done = program("", "--python", "/nowhere/python")
    assert (
        done.stderr
        == "/nowhere/python cannot be run (No such file or directory): it must be the engine's interpreter\n"
    )
