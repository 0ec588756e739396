# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Roles engine and engine_patch with an image, by the real Ansible and a stand-in for docker on each of two nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._rules import IDS
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.docker_double import DIGEST, MTP, NAME, Docker
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT, run_playbook

NODES = ("spark-1", "spark-2")
FILE = "vllm/model_executor/models/hy_v3_mtp.py"
PINNED = f"registry.example/hy3@{DIGEST}"


class Nodes:
    """Two directories that stand for nodes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.docker: dict[str, Docker] = {}
        for name in NODES:
            (root / name).mkdir()
            self.docker[name] = Docker(root / name)

    def play(self, *options: str, **variables: t.Any) -> subprocess.CompletedProcess[str]:
        given = {
            "image_paths": {name: f"{self.root}/{name}/bin:{os.environ['PATH']}" for name in NODES},
            "image_dir": str(self.root / "images"),
            "image_answer": str(self.root / "answer"),
            "image_name": NAME,
            "__hy3_preflight_check": {
                **{"engine": "vllm", "nodes": 2, "venv": "{{ __hy3_preflight_venv }}", "allow": sorted(IDS)}
            },
            **variables,
        }
        return run_playbook("image", self.root, given, *options)

    def answer(self, node: str) -> dict[str, t.Any]:
        found: dict[str, t.Any] = json.loads((self.root / f"answer.{node}").read_text())
        return found


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def changed(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(count) for count in re.findall(r"changed=(\d+)", done.stdout)]


def test_check_first_and_second_run(nodes: Nodes) -> None:
    done = nodes.play("--check")
    assert changed(done) == [1, 1]
    words = " ".join(done.stdout.split())
    assert "vllm would be copied out of the image first, and then patched" in words
    assert (
        f"hy3_image is {NAME}, a tag, which may name another image tomorrow; to keep today's, write {PINNED}" in words
    )
    assert not (nodes.root / "images").exists()

    done = nodes.play()
    assert changed(done) == [2, 2]
    for name in NODES:
        answer = nodes.answer(name)
        assert answer["node"] == {"owner": f"{os.getuid()}:{os.getgid()}", "nccl": "2.28.9"}
        versions = {"vllm": "0.24.0", "torch": "2.11.0+cu130", "ray": "2.60.0", "python": "3.12.11"}
        assert answer["engine"] == versions | {"image": DIGEST}
        assert (answer["container"]["image"], answer["judged"]) == (PINNED, "0.24.0")
        assert answer["container"]["program"] == str(nodes.docker[name].path)
        (patch,) = answer["patches"]["patches"]
        assert (patch["file"], patch["state"]) == (FILE, "applied")
        assert (Path(answer["container"]["copies"]) / FILE).read_text() != MTP
    # The stand-in's parser says nothing, which refuses nothing.
    assert "The parser of vllm on spark-1 could not be asked about options" in " ".join(done.stdout.split())
    asked = [words for words in nodes.docker["spark-1"].asked() if "-c" in words][-1]
    assert asked[asked.index("--entrypoint") + 1 :][:2] == ["python3", PINNED]

    for options in ([], ["--check"]):
        assert changed(nodes.play(*options)) == [0, 0]


def test_nodes_with_different_images(nodes: Nodes) -> None:
    other = DIGEST.replace("d", "e")
    nodes.docker["spark-2"].image["RepoDigests"] = [f"registry.example/hy3@{other}"]
    nodes.docker["spark-2"].save()
    done = nodes.play()
    assert done.returncode == 2
    words = " ".join(done.stdout.split())
    assert "spark-2 has {" in words
    assert other in words
    assert "and all ranks need the same image; fetch the head's." in words


def test_an_image_without_ray(nodes: Nodes) -> None:
    """As vLLM's own images are."""
    for docker in nodes.docker.values():
        (docker.file("ray-2.60.0.dist-info/METADATA", "")).unlink()
        (docker.file("x", "").parent / "ray-2.60.0.dist-info").rmdir()
    done = nodes.play()
    assert done.returncode == 2
    assert (
        f"hy3_image is {NAME}, which on spark-1 has no ray; make one from it that has, as docs/container.md says, or "
        "name another, or set hy3_executor to mp."
    ) in " ".join(done.stdout.split())


# ---- The Containerfile


def build_steps() -> list[str]:
    """The commands of its RUN lines, with the lines that continue them."""
    text = (ROOT / "roles/engine/files/Containerfile").read_text()
    return re.findall(r"^RUN (.*)$", text.replace("\\\n", ""), re.MULTILINE)


def build(root: Path, **arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the last step as a builder would, in a virtual environment that stands for the image."""
    step = build_steps()[-1].replace("/tmp/hy3", str(root / "hy3"))
    (root / "hy3/ansible_collections/sparks/hy3/plugins").mkdir(parents=True, exist_ok=True)
    target = root / "hy3/ansible_collections/sparks/hy3/plugins/module_utils"
    if not target.exists():
        target.symlink_to(ROOT / "plugins/module_utils")
    given = {"ENGINE": "vllm", "PACKAGES": "", "PATCHES": "", **arguments}
    environment = {**os.environ, **given, "PATH": f"{root}/venv/bin:{os.environ['PATH']}"}
    return subprocess.run(["/bin/sh", "-c", step], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    (site / FILE).parent.mkdir(parents=True)
    (site / FILE).write_text(MTP)
    (site / "vllm/__init__.py").touch()
    return site


def test_the_containerfile_patches(image: Path, tmp_path: Path) -> None:
    done = build(tmp_path, PATCHES="P1")
    assert done.returncode == 0, done.stderr
    assert f"+++ b/{FILE}" in done.stdout
    assert 'prefix="lm_head"' in (image / FILE).read_text()
    assert not (tmp_path / "hy3").exists()


def test_a_build_without_patches_changes_nothing(image: Path, tmp_path: Path) -> None:
    assert build(tmp_path).returncode == 0
    assert (image / FILE).read_text() == MTP


def test_a_build_that_cannot_patch_fails_in_one_sentence(image: Path, tmp_path: Path) -> None:
    (image / FILE).write_text("class HYV3SharedHead:\n    pass\n")
    done = build(tmp_path, PATCHES="P1")
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert "does not have the code that patch P1 knows" in done.stderr


def test_packages_are_installed_only_if_there_are_some(tmp_path: Path) -> None:
    install = build_steps()[0]
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for packages, words in (("", ""), ("ray==2.60.0 x==1", "-m pip install --no-cache-dir ray==2.60.0 x==1\n")):
        done = subprocess.run(
            ["/bin/sh", "-c", install], env={**path, "PACKAGES": packages}, capture_output=True, text=True, check=True
        )
        assert done.stdout == words
