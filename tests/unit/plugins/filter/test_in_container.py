# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the filter adds to module_utils/_container, whose tests have the rest."""

from __future__ import annotations

import typing as t

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.sparks.hy3.plugins.filter.in_container import in_container

PLAN = {"cluster": "sparks", "user": "hy3", "executor": "mp", "checkpoint_path": "/models/Hy3", "paths": {}}
CONTAINER = {"program": "/usr/bin/docker", "image": "hy3", "site": "/site", "copies": "/copies"}


def unit(cap: str) -> dict[str, t.Any]:
    return in_container(
        {"name": "hy3-serve", "cap": cap, "argv": ["/v/bin/vllm", "serve"]},
        plan=PLAN,
        container=CONTAINER,
        owner="1:2",
        environment={},
    )


def test_a_unit() -> None:
    assert unit("8G")["argv"][-2:] == ["hy3", "serve"]


def test_a_cap_that_is_no_size() -> None:
    with pytest.raises(AnsibleFilterError, match=r"The cap of hy3-serve in hy3_memory is wrong: Size '8 GB' is not"):
        unit("8 GB")
