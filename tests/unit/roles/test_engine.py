# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Role engine by the real Ansible: a real venv, the real pip, and wheels of one line each instead of an index."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import time
import typing as t
import zipfile
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._rules import IDS
from ansible_collections.sparks.hy3.tests.unit.roles.render import playbook_command, run_playbook

PINS = ["vllm==0.24.0", "ray[default]==2.60", "torch==2.11.0"]
WHEELS = [("vllm", "0.24.0"), ("vllm", "0.25.1"), ("ray", "2.60.0"), ("ray", "2.51.0"), ("torch", "2.11.0")]
MISSING = "vllm==0.24.0, ray[default]==2.60, torch==2.11.0"


def wheel(directory: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", f"__version__ = '{version}'\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        lines = (f"{name}/__init__.py,,", f"{info}/METADATA,,", f"{info}/WHEEL,,", f"{info}/RECORD,,")
        file.writestr(f"{info}/RECORD", "\n".join(lines))


class Node:
    """A venv that role engine makes, and where its pip finds wheels."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.venv, self._monkeypatch = root, root / "node/venv", monkeypatch
        self.mark, self.made = self.venv / ".hy3-installing", self.venv / ".hy3-made"
        wheels = root / "wheels"
        wheels.mkdir()
        for name, version in WHEELS:
            wheel(wheels, name, version)
        # Whoever runs the test may become nobody else, and need not.
        (root / "bin").mkdir()
        (root / "bin/runuser").write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
        (root / "bin/runuser").chmod(0o755)
        monkeypatch.setenv("PATH", f"{root}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        self.index(wheels)

    def index(self, wheels: Path) -> None:
        self._monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def variables(self, packages: list[str], **variables: t.Any) -> dict[str, t.Any]:
        # For the rules of the preflight, of which this machine may break any.
        check = {"engine": "vllm", "nodes": 1, "venv": "{{ __hy3_preflight_venv }}", "allow": sorted(IDS)}
        own = {"engine_venv": str(self.venv), "hy3_engine_packages": packages, "__hy3_preflight_check": check}
        return {**own, **variables}

    def play(self, packages: list[str], *options: str, **variables: t.Any) -> subprocess.CompletedProcess[str]:
        return run_playbook("engine", self.root, self.variables(packages, **variables), *options)

    def module(self, name: str) -> Path:
        (file,) = self.venv.glob(f"lib/python3*/site-packages/{name}/__init__.py")
        return file


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def changed(done: subprocess.CompletedProcess[str]) -> bool:
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"changed=(\d+)", done.stdout) != ["0"]


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a play that refused, on one line."""
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_make_keep_and_upgrade(node: Node) -> None:
    done = node.play(PINS, "--check")
    assert changed(done)
    assert f"{MISSING} would be installed" in " ".join(done.stdout.split())
    assert "vllm would be installed first, and then patched" in " ".join(done.stdout.split())
    assert not node.venv.exists()

    done = node.play(PINS)
    assert changed(done)
    assert "rules judged vllm 0.24.0" in done.stdout
    # What is installed here has a name and a version and no parser.
    assert "The parser of vllm on spark-1 could not be asked about options: ModuleNotFoundError" in " ".join(
        done.stdout.split()
    )
    assert node.module("vllm").read_text() == "__version__ = '0.24.0'\n"
    assert not node.mark.exists()
    assert node.made.exists()

    # Any pip call fails now.
    wheels = Path(os.environ["PIP_FIND_LINKS"])
    node.index(node.root / "nowhere")
    for options in ([], ["--check"]):
        assert not changed(node.play(PINS, *options))
    done = node.play([])
    assert not changed(done)
    assert "rules judged" not in done.stdout

    node.index(wheels)
    newer = ["vllm==0.25.1", *PINS[1:]]
    done = node.play(newer, "--check")
    assert changed(done)
    assert "vllm==0.25.1 would be installed" in " ".join(done.stdout.split())
    assert node.module("vllm").read_text() == "__version__ = '0.24.0'\n"
    assert changed(node.play(newer))
    assert node.module("vllm").read_text() == "__version__ = '0.25.1'\n"
    assert not changed(node.play(newer))


def test_an_install_that_was_killed_is_completed(node: Node) -> None:
    play = subprocess.Popen(
        **playbook_command("engine", node.root, node.variables(PINS)), start_new_session=True, stdout=subprocess.DEVNULL
    )
    while not (node.venv / "bin").exists():
        assert play.poll() is None
        time.sleep(0.01)
    os.killpg(play.pid, signal.SIGKILL)
    play.wait()
    assert node.mark.exists()
    assert changed(node.play(PINS))
    assert not node.mark.exists()
    assert not changed(node.play(PINS))

    # Later, within a package: its metadata is whole and its code is not.
    node.mark.mkdir()
    (node.mark / "pip-unpack-left").mkdir()
    node.module("ray").unlink()
    done = node.play(PINS, "--check")
    assert changed(done)
    assert changed(node.play(PINS))
    assert node.module("ray").read_text() == "__version__ = '2.60.0'\n"
    assert not node.mark.exists()


def test_what_torch_brings_is_compared(node: Node) -> None:
    """Field case B83: CUDA and NCCL, too. Without them, as in a CPU build, nothing is lacking."""
    done = node.play(PINS)
    assert changed(done)
    assert re.search(r'"?nccl"?: null', done.stdout), done.stdout
    info = node.module("torch").parents[1] / "nvidia_nccl_cu13-2.28.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.28.9\n")
    done = node.play([])
    assert re.search(r'"?nccl"?: "?nvidia-nccl-cu13 2.28.9', done.stdout), done.stdout


# (id, package)
TEST_LOOSE: list[tuple[str, str]] = [
    ("no version", "vllm"),
    ("lower bound", "vllm>=0.24.0"),
    ("any patch", "vllm==0.24.*"),
    ("two bounds", "vllm==0.24.0,<1"),
    ("address", "vllm @ file:///vllm.whl"),
    ("option", "--upgrade"),
    ("marker", "vllm==0.24.0; python_version > '3'"),
]


@pytest.mark.parametrize("package", [row[1] for row in TEST_LOOSE], ids=[row[0] for row in TEST_LOOSE])
def test_every_package_has_its_version(node: Node, package: str) -> None:
    sentence = (
        f"hy3_engine_packages has '{package}', which is no package with one exact version, and every node must get the "
        "same; write it like vllm==0.24.0."
    )
    assert sentence in said(node.play([*PINS[1:], package]))
    assert not node.venv.exists()


@pytest.mark.parametrize("options", [[], ["--check"]], ids=["run", "check"])
def test_a_full_disk_is_refused_first(node: Node, options: list[str]) -> None:
    room = 2**60
    text = said(node.play(PINS, *options, __hy3_engine_room=room))
    assert re.search(
        rf"spark-1 has [\d.]+ GiB free where {node.venv} lies, and installing {re.escape(MISSING)} needs", text
    )
    assert not node.venv.exists()


def test_a_version_that_does_not_exist(node: Node) -> None:
    text = said(node.play(["vllm==9.9.9", *PINS[1:]]))
    assert "pip could not install vllm==9.9.9, " in text
    assert "(ERROR: No matching distribution found for vllm==9.9.9); see that" in text
    assert changed(node.play(PINS))
    assert not node.mark.exists()


# (id, packages, what is said of the venv that has only these)
TEST_LACKING: list[tuple[str, list[str], str]] = [
    (
        "no ray",
        ["vllm==0.24.0", "torch==2.11.0"],
        "hy3_venv is {venv}, which on spark-1 has no ray; install vllm and ray there (hy3_engine_packages can), or "
        "name the venv that has them.",
    ),
    (
        "no vllm",
        ["ray==2.60.0", "torch==2.11.0"],
        "hy3_venv is {venv}, which on spark-1 has no vllm; install vllm and ray there (hy3_engine_packages can), or "
        "name the venv that has them.",
    ),
    (
        "a Ray without token authentication",
        ["vllm==0.24.0", "ray==2.51.0", "torch==2.11.0"],
        "spark-1 has ray 2.51.0, and without token authentication, which began with 2.52.0, whoever reaches Ray's "
        "ports runs code as {user}; install ray 2.52.0 or newer in {venv}.",
    ),
]


@pytest.mark.parametrize(
    ("packages", "sentence"), [row[1:] for row in TEST_LACKING], ids=[row[0] for row in TEST_LACKING]
)
def test_a_venv_without_the_engine(node: Node, packages: list[str], sentence: str) -> None:
    wanted = sentence.format(venv=node.venv, user=getpass.getuser())
    assert wanted in said(node.play(packages))


def test_a_venv_of_somebody_without_pip(node: Node) -> None:
    subprocess.run(["python3", "-m", "venv", "--without-pip", node.venv], check=True)
    assert f"hy3_venv is {node.venv}, which on spark-1 has no pip" in said(node.play(PINS))


def test_a_venv_where_somebody_had_a_directory_is_not_marked_as_ours(node: Node) -> None:
    """Else remove_hy3 would remove it."""
    node.venv.mkdir(parents=True)
    assert changed(node.play(PINS))
    assert node.module("vllm").exists()
    assert not node.made.exists()


def test_an_own_venv_is_not_touched(node: Node) -> None:
    text = said(node.play([]))
    assert f"hy3_venv is {node.venv}, which on spark-1 has no bin/python that user" in text
    assert not node.venv.exists()


def test_never_into_what_an_upgrade_goes_back_to(node: Node) -> None:
    text = said(node.play(PINS, hy3_upgrade={"from": str(node.venv)}))
    assert (
        f"hy3_venv is {node.venv}, from which the engine on spark-1 was started, and installing {MISSING} there would "
        f"leave nothing to go back to; set hy3_venv to another path, for instance {node.venv}-vllm-0.24.0."
    ) in text
    assert not node.venv.exists()
