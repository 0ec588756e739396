# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module with a stand-in for docker, and what is then done with the copies: patches, rules, NCCL's version."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._node_facts import read_venv
from ansible_collections.sparks.hy3.plugins.module_utils._roce import nccl_of
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.docker_double import (
    DIGEST,
    ID,
    MTP,
    NAME,
    SITE,
    Docker,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

FILE = "vllm/model_executor/models/hy_v3_mtp.py"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Docker(tmp_path)


def look(**arguments: t.Any) -> dict[str, t.Any]:
    return run_module("container_image", image=NAME, user="1001:1002", **arguments)


def test_a_look_changes_nothing(docker: Docker) -> None:
    done = look()
    assert (done["changed"], done["copied"], done["prefix"], done["package_path"]) == (False, False, None, None)
    assert (done["program_path"], done["reference"]) == (str(docker.path), f"registry.example/hy3@{DIGEST}")
    assert (done["digest"], done["python"], done["site"]) == (DIGEST, "3.12.11", SITE)
    assert (done["packages"]["vllm"], done["packages"]["nvidia-nccl-cu13"]) == ("0.24.0", "2.28.9")
    assert [words[0] for words in docker.asked()] == ["info", "image", "run"]
    # As the engine will run.
    asked = docker.asked()[-1]
    assert asked[asked.index("--user") + 1] == "1001:1002"
    assert asked[asked.index("--gpus") + 1] == "all"
    assert asked[asked.index("--network") + 1] == "none"


def test_copies_are_made_once_and_look_like_a_venv(docker: Docker, tmp_path: Path) -> None:
    dest = tmp_path / "var/images"
    done = look(dest=str(dest), _ansible_check_mode=True)
    assert (done["changed"], done["copied"], dest.exists()) == (True, False, False)
    done = look(dest=str(dest))
    assert (done["changed"], done["copied"]) == (True, True)
    prefix = Path(done["prefix"])
    assert prefix.parent == dest
    assert prefix.name.startswith(ID.partition(":")[2][:12])
    copy = Path(done["copies"]) / FILE
    assert copy.read_text() == MTP
    assert not (Path(done["copies"]) / "other-1.dist-info").exists()
    assert {path.stat().st_mode & 0o777 for path in prefix.rglob("*") if path.is_dir()} == {0o755}
    # The container that they came from is gone, and nothing else was made.
    assert [words for words in docker.asked() if words[0] == "rm"] == [["rm", "b" * 64]]
    assert [path.name for path in dest.iterdir()] == [prefix.name]

    assert nccl_of(str(prefix)) == "2.28.9"
    assert read_venv(prefix, "vllm")["version"] == "0.24.0"
    assert read_venv(prefix, "vllm")["torch_cuda"] == "13.0"

    patched = run_module("engine_patch", package_path=done["package_path"], patches=["P1"])
    assert patched["changed"]
    assert [one["state"] for one in patched["patches"]] == ["applied"]
    again = look(dest=str(dest))
    assert (again["changed"], copy.read_text() == MTP) == (False, False)
    assert len([words for words in docker.asked() if words[0] == "create"]) == 1


def test_a_killed_copy_is_no_copy(docker: Docker, tmp_path: Path) -> None:
    docker.fails = {"cp": "write /x: no space left on device"}
    docker.save()
    done = look(dest=str(tmp_path / "images"))
    assert "docker cannot copy " in done["msg"]
    assert "(write /x: no space left on device); make room" in done["msg"]
    assert list((tmp_path / "images").iterdir()) == []
    assert docker.asked()[-1][0] == "rm"
    docker.fails = {}
    docker.save()
    assert look(dest=str(tmp_path / "images"))["copied"]


def test_code_that_has_moved_is_copied_from_where_it_is(docker: Docker, tmp_path: Path) -> None:
    docker.file(
        "vllm/reasoning/hy_v3_reasoning_parser.py",
        "import sys\nimport vllm.new.place as place\nsys.modules[__name__] = place\n",
    )
    docker.file("vllm/new/place.py", "NEW = 1\n")
    done = look(dest=str(tmp_path / "images"))
    assert (Path(done["copies"]) / "vllm/new/place.py").read_text() == "NEW = 1\n"


# (id, what fails with which words, sentence)
TEST_REFUSED: list[tuple[str, dict[str, str], str]] = [
    (
        "no image",
        {"image": "Error response from daemon: No such image: registry.example/hy3:1"},
        f"hy3_image is {NAME}, which docker does not have here (Error response from daemon: No such image: {NAME}); "
        f"fetch it on every node with `sudo docker pull {NAME}`.",
    ),
    (
        "no GPUs",
        {"run": 'could not select device driver "" with capabilities: [[gpu]]'},
        f"docker cannot run python3 of registry.example/hy3@{DIGEST} with the GPUs as user 1001:1002 (could not "
        'select device driver "" with capabilities: [[gpu]]); see that the NVIDIA container toolkit is set up and the '
        "image is one of vllm for this machine.",
    ),
    (
        "no daemon",
        {"info": "Cannot connect to the Docker daemon"},
        "docker does not answer (Cannot connect to the Docker daemon), and hy3_launch is docker; start its daemon "
        "(`systemctl enable --now docker`), or set hy3_launch to venv.",
    ),
]


@pytest.mark.parametrize(("fails", "sentence"), [row[1:] for row in TEST_REFUSED], ids=[row[0] for row in TEST_REFUSED])
def test_refused(docker: Docker, fails: dict[str, str], sentence: str) -> None:
    docker.fails = fails
    docker.save()
    assert look()["msg"] == sentence


def test_an_image_without_the_engine_is_no_error_here(docker: Docker, tmp_path: Path) -> None:
    done = look(engine="sglang", dest=str(tmp_path / "images"))
    assert (done["site"], done["package_path"]) == (None, None)


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look(program="podman")["msg"] == (
        "This node has no podman, and hy3_launch is podman; install it, or set hy3_launch to venv."
    )


def test_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    podman = Docker(tmp_path, "podman")
    assert look(program="podman")["program_path"] == str(podman.path)
    asked = podman.asked()[-1]
    assert asked[asked.index("--device") + 1] == "nvidia.com/gpu=all"
