# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``launch_problems``: settings that exclude each other in a virtual environment or in a container."""

from __future__ import annotations

import re
import typing as t

DOCUMENTATION = r"""
name: launch_problems
short_description: Settings that exclude each other in a virtual environment or in a container
version_added: 0.1.0
description:
  - Finds in the plan of role P(sparks.hy3.profile#role) what contradicts C(hy3_launch), before a node is contacted.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  image:
    type: str
    required: true
    description: The variable C(hy3_image).
  packages:
    type: list
    elements: str
    required: true
    description: The variable C(hy3_engine_packages).
"""

EXAMPLES = r"""
- name: Refuse packages for an image
  ansible.builtin.assert:
    that: hy3_plan | sparks.hy3.launch_problems(image=hy3_image, packages=hy3_engine_packages) | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

# https://pkg.go.dev/github.com/distribution/reference, but for what is lower case there and would only not be found.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?")


def launch_problems(plan: t.Mapping[str, t.Any], image: str, packages: t.Sequence[str]) -> list[str]:
    """One sentence for each setting that the plan's ``launch`` contradicts; empty is good."""
    launch = plan["launch"]
    if launch == "venv":
        way = "take it out, or set hy3_launch to docker or podman"
        return [f"hy3_image is {image}, and hy3_launch is venv, which has no image; {way}."] if image else []
    problems = []
    if not plan["image"]:
        problems.append(
            f"hy3_launch is {launch}, and profile {plan['profile']} names no image; set hy3_image to one of "
            f"{plan['engine']} that every node has."
        )
    elif not _IMAGE.fullmatch(plan["image"]):
        problems.append(f"hy3_image is {plan['image']!r}, which names no image; write NAME:TAG or NAME@sha256:DIGEST.")
    if packages:
        problems.append(
            f"hy3_engine_packages is {', '.join(packages)}, and hy3_launch is {launch}, whose image pip leaves alone;"
            " leave it empty, and make an image that has them, as docs/container.md says."
        )
    return problems


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"launch_problems": launch_problems}
