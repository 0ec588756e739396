# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""P1 on the released CUDA wheel of vLLM 0.24.0, without a GPU: the drafter cannot be loaded, and patched it can.

The wheel's code builds both models as on a GPU and loads the tiny checkpoint with NVFP4 experts: make test-cuda-wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny
from ansible_collections.sparks.hy3.tests.gpu import checkpoint
from ansible_collections.sparks.hy3.tests.gpu.pack import CACHE, HERE, unpack
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

PYTHON = os.environ.get("PYTHON312", "python3.12")
REQUIREMENTS = HERE / "requirements-cpu.txt"
# What the wheel's libraries want of a driver, which is not here; none of it is called.
DRIVER = (
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuDriverGetVersion"),
    *("cuGetErrorString", "cuGetProcAddress_v2", "cuInit", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate"),
    *("cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap"),
    *("cuPointerGetAttribute", "cuTensorMapEncodeTiled"),
)
MISMATCH = "The size of tensor a (256) must match the size of tensor b (512) at non-singleton dimension 1"


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter with PyTorch, which is fetched once (2.5 GB)."""
    venv, done = CACHE / "venv", CACHE / "venv" / "complete"
    if not done.is_file() or done.read_text() != REQUIREMENTS.read_text():
        subprocess.run([PYTHON, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "--quiet", "install", "--no-cache-dir"]
        # PyTorch brings CUDA's libraries, and the rest is in the list.
        torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([*pip, torch], check=True)
        subprocess.run([*pip, "--no-deps", f"--requirement={REQUIREMENTS}"], check=True)
        done.write_text(REQUIREMENTS.read_text())
    return venv / "bin/python"


@pytest.fixture(scope="module")
def package() -> Path:
    site = CACHE / "site"
    return (site if (site / "vllm/__init__.py").is_file() else unpack(90)) / "vllm"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("driver")
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(place / "libcuda.so.1"), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "hy3"
    tiny.write(out, checkpoint.checkpoint("NVFP4", acceptance=1.0))
    return out


def test_the_drafter_loads_with_p1_and_only_with_it(
    python: Path, package: Path, driver: Path, model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(package, tmp_path / "site/vllm", copy_function=os.link))

    def loaded() -> list[str]:
        own = {"PYTHONPATH": f"{copy.parent}:{package.parent}", "LD_LIBRARY_PATH": str(driver)}
        own |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(
            [str(python), "-B", str(HERE / "load_on_cpu.py"), str(model)],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [line for line in done.stdout.splitlines() if line.startswith(("target ", "drafter "))]

    def patch(state: str) -> dict[str, Any]:
        return run_module("engine_patch", package_path=str(copy), patches=["P1"], state=state)

    assert loaded() == ["target loaded", f"drafter {MISMATCH}"]
    assert patch("present")["changed"]
    assert loaded() == ["target loaded", "drafter loaded"]
    assert patch("absent")["changed"]
    assert loaded() == ["target loaded", f"drafter {MISMATCH}"]
