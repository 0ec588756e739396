# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import subprocess
import sys
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._image import (
    _PROGRAM,
    Image,
    directory_of,
    engine_files,
    place_of_copies,
    read_content,
    read_image,
    server_problem,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.docker_double import INFO

DOCKER, PODMAN = INFO["docker"], INFO["podman"]
NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
NOT_ALLOWED = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"


def rootless(rootless: bool) -> dict[str, t.Any]:
    return {"host": {**PODMAN["host"], "security": {"rootless": rootless}}}


# (id, program, exit status, answer, error, beginning of the sentence and its way out)
TEST_SERVERS: list[tuple[str, str, int, t.Any, str, tuple[str, str] | None]] = [
    ("docker", "docker", 0, DOCKER, "WARNING: a warning", None),
    ("podman", "podman", 0, PODMAN, "", None),
    (
        "no daemon",
        "docker",
        1,
        {"ServerVersion": ""},
        NO_DAEMON,
        (f"docker does not answer ({NO_DAEMON})", "start its daemon"),
    ),
    (
        "not allowed",
        "docker",
        1,
        "",
        f"{NOT_ALLOWED}: Get ...\n{NOT_ALLOWED}",
        (f"docker does not let this user in ({NOT_ALLOWED})", "run the play as root (become)"),
    ),
    (
        "groups by docker itself",
        "docker",
        0,
        DOCKER | {"CgroupDriver": "cgroupfs"},
        "",
        ("docker manages control groups of version 2 by cgroupfs", "native.cgroupdriver=systemd"),
    ),
    (
        "version 1",
        "docker",
        0,
        DOCKER | {"CgroupVersion": "1"},
        "",
        ("docker manages control groups of version 1 by systemd", "boot with cgroup v2"),
    ),
    (
        "rootless docker",
        "docker",
        0,
        DOCKER | {"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]},
        "",
        ("docker runs rootless", "use the daemon of root"),
    ),
    ("rootless podman", "podman", 0, rootless(True), "", ("podman runs rootless", "use the daemon of root")),
    ("docker without options", "docker", 0, DOCKER | {"SecurityOptions": None}, "", None),
    ("no JSON", "docker", 0, "What?", "", ("docker answers '\"What?\"', which is no description", "update it")),
    ("another JSON", "podman", 0, {}, "", ("podman answers '{}', which is no description", "update it")),
]


@pytest.mark.parametrize(
    ("program", "rc", "answer", "stderr", "expected"),
    [row[1:] for row in TEST_SERVERS],
    ids=[row[0] for row in TEST_SERVERS],
)
def test_servers(program: str, rc: int, answer: t.Any, stderr: str, expected: tuple[str, str] | None) -> None:
    problem = server_problem(program, rc, json.dumps(answer), stderr)
    if expected is None:
        assert problem is None
    else:
        assert problem
        assert problem.startswith(expected[0])
        assert expected[1] in problem


ID, DIGEST, OTHER = "5" * 64, "sha256:" + "d" * 64, "sha256:" + "e" * 64
# (id, name asked for, what was printed, reference)
TEST_IMAGES: list[tuple[str, str, t.Any, str]] = [
    ("by tag", "vllm/vllm-openai:hy3", {"RepoDigests": [f"vllm/vllm-openai@{DIGEST}"]}, f"vllm/vllm-openai@{DIGEST}"),
    (
        "podman's names are long",
        "vllm/vllm-openai:hy3",
        {"RepoDigests": [f"docker.io/vllm/vllm-openai@{DIGEST}"]},
        f"docker.io/vllm/vllm-openai@{DIGEST}",
    ),
    ("of a mirror, too", "a/b:1", {"RepoDigests": [f"m:5000/x@{OTHER}", f"a/b@{DIGEST}"]}, f"a/b@{DIGEST}"),
    (
        "by one of two digests",
        f"a/b@{DIGEST}",
        {"RepoDigests": [f"a/b@{OTHER}", f"a/b@{DIGEST}"]},
        f"a/b@{DIGEST}",
    ),
    ("of a registry with a port", "m:5000/x", {"RepoDigests": [f"m:5000/x@{DIGEST}"]}, f"m:5000/x@{DIGEST}"),
    ("built here", "hy3:1", {"RepoDigests": []}, f"sha256:{ID}"),
    ("built here, by podman", "hy3:1", {"Id": ID, "RepoDigests": None}, f"sha256:{ID}"),
    ("by id", f"sha256:{ID}", {}, f"sha256:{ID}"),
]


@pytest.mark.parametrize(
    ("wanted", "printed", "reference"), [row[1:] for row in TEST_IMAGES], ids=[row[0] for row in TEST_IMAGES]
)
def test_images(wanted: str, printed: t.Any, reference: str) -> None:
    one = {"Id": f"sha256:{ID}", **printed}
    assert read_image(wanted, json.dumps([one])) == Image(reference, f"sha256:{ID}")
    assert read_image(wanted, json.dumps(one)).reference == reference


def test_the_program_runs_and_is_read() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", _PROGRAM, "yaml"], capture_output=True, text=True, check=True)
    content = read_content(f"a banner\n{done.stdout}")
    assert content.python == ".".join(map(str, sys.version_info[:3]))
    assert content.package
    assert content.package.endswith("/yaml")
    assert content.infos["pyyaml"].endswith(f"-{content.packages['pyyaml']}.dist-info")
    done = subprocess.run([sys.executable, "-I", "-c", _PROGRAM, "no_such"], capture_output=True, text=True, check=True)
    assert read_content(done.stdout).package is None


def test_names_are_normal_and_the_first_counts() -> None:
    infos = [
        "/a/nvidia_nccl_cu13-2.28.9.dist-info",
        "/b/nvidia-nccl-cu13-2.21.dist-info",
        "/a/torch-2.11.0+cu130.dist-info",
    ]
    content = read_content(json.dumps({"python": "3.12.1", "package": None, "infos": [*infos, "/a/odd.dist-info"]}))
    assert content.packages == {"nvidia-nccl-cu13": "2.28.9", "torch": "2.11.0+cu130"}
    assert content.infos["nvidia-nccl-cu13"] == infos[0]
    assert place_of_copies(content) == "lib/python3.12/site-packages"


def test_a_patch_for_another_file_means_other_copies() -> None:
    image = Image("x", f"sha256:{ID}")
    assert directory_of(image, "vllm").startswith(f"{ID[:12]}-")
    assert directory_of(image, "vllm") != directory_of(image, "sglang")
    assert "vllm/model_executor/models/hy_v3_mtp.py" in engine_files("vllm")
    assert engine_files("sglang")[0] == "sglang/__init__.py"
