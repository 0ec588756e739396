# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.filter.launch_problems import launch_problems

DIGEST = "sha256:" + "a" * 64
PLAN: dict[str, t.Any] = {"profile": "libertai_nvfp4_tp2", "engine": "vllm", "launch": "docker"}

# What an image may be called.
FINE = [
    *("vllm/vllm-openai:hy3-arm64-cu130", f"vllm/vllm-openai@{DIGEST}", f"vllm/vllm-openai:hy3@{DIGEST}", DIGEST),
    *("localhost:5000/hy3", "hy3", "registry.example/a/b_c:1.0"),
]


@pytest.mark.parametrize("image", FINE)
def test_fine(image: str) -> None:
    assert launch_problems(PLAN | {"image": image}, image=image, packages=[]) == []


def test_a_venv_may_have_packages_and_a_profiles_image() -> None:
    plan = PLAN | {"launch": "venv", "image": "of the profile"}
    assert launch_problems(plan, image="", packages=["vllm==0.24.0"]) == []


PACKAGES = (
    "hy3_engine_packages is vllm==0.24.0, ray==2.60.0, and hy3_launch is docker, whose image pip leaves alone; leave "
    "it empty, and make an image that has them, as docs/container.md says."
)
# (id, plan's changes, hy3_image, hy3_engine_packages, sentences)
TEST_PROBLEMS: list[tuple[str, dict[str, str], str, list[str], list[str]]] = [
    ("packages", {"image": "hy3"}, "hy3", ["vllm==0.24.0", "ray==2.60.0"], [PACKAGES]),
    (
        "no image",
        {"image": "", "launch": "podman"},
        "",
        [],
        [
            "hy3_launch is podman, and profile libertai_nvfp4_tp2 names no image; set hy3_image to one of vllm that "
            "every node has."
        ],
    ),
    (
        "an image without a container",
        {"launch": "venv", "image": "hy3"},
        "hy3",
        [],
        [
            "hy3_image is hy3, and hy3_launch is venv, which has no image; take it out, or set hy3_launch to docker or "
            "podman."
        ],
    ),
    *[
        (
            f"image {image!r}",
            {"image": image},
            image,
            [],
            [f"hy3_image is {image!r}, which names no image; write NAME:TAG or NAME@sha256:DIGEST."],
        )
        for image in ("--privileged", "a b", f"hy3@{DIGEST[:-1]}", "hy3@latest", "hy3;id", "hy3\n")
    ],
]


@pytest.mark.parametrize(
    ("changes", "image", "packages", "sentences"),
    [row[1:] for row in TEST_PROBLEMS],
    ids=[row[0] for row in TEST_PROBLEMS],
)
def test_problems(changes: dict[str, str], image: str, packages: list[str], sentences: list[str]) -> None:
    assert launch_problems(PLAN | changes, image=image, packages=packages) == sentences
