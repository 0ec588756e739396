# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What molecule/sglang puts into the lab's directory, without SGLang itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.sglang import lab
from ansible_collections.sparks.hy3.tests.sglang.checkpoint import NAMES, write


def tensors(tree: Path) -> dict[str, bytes]:
    """The bytes of each tensor of the only shard."""
    data = (tree / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    places = {name: slice(*(8 + size + end for end in at["data_offsets"])) for name, at in header.items()}
    return {name: data[place] for name, place in places.items()}


def test_names_are_all_that_differs(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "exported").mkdir()
    native = tensors(write(tmp_path / "native", native=True))
    exported = tensors(write(tmp_path / "exported"))
    for name, data in native.items():
        renamed = name
        for old, new in NAMES.items():
            renamed = renamed.replace(old, new)
        assert exported.pop(renamed) == data
    assert exported == {}
    assert all(any(old in name for name in native) for old in NAMES)
    for name in ("config.json", "hf_quant_config.json", "tokenizer.json"):
        assert (tmp_path / "native" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The packages of an environment of the nodes' Python, and nothing but a module in them."""
    lab.subprocess.run([lab.PYTHON, "-m", "venv", "--without-pip", tmp_path / "own"], check=True)
    (site,) = (tmp_path / "own").glob("lib/python*/site-packages")
    (site / "sglang").mkdir()
    (site / "sglang/__init__.py").write_text("VERSION = 1\n")
    return site


def test_put(packages: Path, tmp_path: Path) -> None:
    place = tmp_path / "lab/sglang"
    assert lab.put(packages, place)
    (module,) = place.glob("venv/lib/python*/site-packages/sglang/__init__.py")
    assert module.samefile(packages / "sglang/__init__.py")
    assert (place / "cpu/common_ops.py").exists()
    assert {path.name for path in (place / "models").iterdir()} == set(lab.CHECKPOINTS)
    assert not lab.put(packages, place)
    (place / "installed").unlink()  # it was interrupted
    (place / "models/Hy3-tiny-native/config.json").unlink()
    assert lab.put(packages, place)
    assert (place / "models/Hy3-tiny-native/config.json").exists()


def test_packages_of_another_python(packages: Path, tmp_path: Path) -> None:
    other = packages.parent.with_name("python3.0") / "site-packages"
    other.mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"is python3\.\d+ and tests/sglang was installed for python3\.0"):
        lab.put(other, tmp_path / "sglang")
