# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module with a venv whose engine is a few lines: a double of vLLM by the names of the real one's modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

PARSER = """\
import argparse, os
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
"""
SERVER = """\
import os
print("INFO importing")
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--dtype", choices=[os.environ.get("ENGINE_DTYPE", "auto")])
    return parser
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec {sys.executable} "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    for name, text in (("utils/argparse_utils", PARSER), ("entrypoints/openai/cli_args", SERVER)):
        path = tmp_path / "site/vllm" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def problems(venv: Path, *arguments: str, **environment: str) -> list[str]:
    done = run_module("engine_options", engine="vllm", venv=str(venv), arguments=arguments, environment=environment)
    assert (done["changed"], done["unknown"]) == (False, None)
    assert done["seconds"] >= 0
    found: list[str] = done["problems"]
    return found


def test_it_asks_with_the_servers_environment(venv: Path) -> None:
    assert problems(venv, "--enforce-eager", "--dtype", "auto") == []
    assert problems(venv, "--dtype", "half", ENGINE_DTYPE="half") == []
    (problem,) = problems(venv, "--dtype", "half")
    assert "invalid choice: 'half'" in problem


def test_it_names_the_nearest(venv: Path) -> None:
    (problem,) = problems(venv, "--enforce_eagr")
    assert "write --enforce-eager instead" in problem


def test_a_parser_that_cannot_be_made_is_no_failure(venv: Path) -> None:
    (venv / "site/vllm/utils/argparse_utils.py").unlink()
    done = run_module("engine_options", engine="vllm", venv=str(venv), arguments=["--x"])
    assert done["problems"] == []
    assert done["unknown"] == "ModuleNotFoundError: No module named 'vllm.utils.argparse_utils'"


def test_it_asks_in_a_container(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for docker, which shows what the container would have: the environment, the user, no network."""
    docker = venv / "bin/docker"
    docker.write_text(
        '#!/bin/sh\ncase "$*" in *"--network none"*"--user 1:2"*|*"--user 1:2"*"--network none"*) ;; *) exit 9;; esac\n'
        'while [ "$1" != --entrypoint ]; do if [ "$1" = --env ]; then export "$2"; fi; shift; done\n'
        f'[ "$2 $3" = "python3 hy3:1" ] || exit 8\nshift 3\nexec {venv}/bin/python "$@"\n'
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{venv}/bin:{os.environ['PATH']}")
    container = {"program": "docker", "image": "hy3:1", "owner": "1:2"}
    asked = {"engine": "vllm", "container": container, "environment": {"ENGINE_DTYPE": "half"}, "user": "nobody"}
    done = run_module("engine_options", arguments=["--dtype", "half"], **asked)
    assert (done["problems"], done["unknown"]) == ([], None)
    done = run_module("engine_options", arguments=["--dtype", "auto"], **asked)
    assert "invalid choice: 'auto'" in done["problems"][0]


def test_no_interpreter(tmp_path: Path) -> None:
    done = run_module("engine_options", engine="sglang", venv=str(tmp_path), arguments=[])
    assert done["unknown"] == f"{tmp_path}/bin/python cannot be run: No such file or directory"


def test_an_import_that_hangs_is_ended(venv: Path) -> None:
    (venv / "site/vllm/utils/argparse_utils.py").write_text("import time; time.sleep(60)")
    done = run_module("engine_options", engine="vllm", venv=str(venv), arguments=[], timeout=1)
    assert done["unknown"] == "the engine's parser gave no answer"
    assert done["seconds"] < 30
