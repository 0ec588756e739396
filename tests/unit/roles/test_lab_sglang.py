# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the lab with SGLang would be started with: vLLM's settings of the inventory below it must not get there."""

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.golden import Rendered
from ansible_collections.sparks.hy3.tests.unit.roles.render import render_units
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import read_environment

NODES = ("spark-1", "spark-2")
LAB = "/var/lib/hy3-lab/sglang"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    home = tmp_path_factory.mktemp("units")
    done = render_units(home, {node: {"fabric_env": {}} for node in NODES}, inventory="lab-sglang")
    assert done.returncode == 0, done.stdout + done.stderr
    return Rendered(home)


@pytest.mark.parametrize(("rank", "node"), list(enumerate(NODES)))
def test_arguments(rendered: Rendered, rank: int, node: str) -> None:
    argv = rendered.argv(node, "hy3-serve.service")
    argv = argv[argv.index("--") + 1 :]  # what ties the ranks comes before it
    assert argv[:3] == [f"{LAB}/venv/bin/python", "-m", "sglang.launch_server"]
    said = " ".join(argv)
    assert f"--nnodes 2 --node-rank {rank} --dist-init-addr 198.18.20.1:29501 " in said
    assert "--model-path /srv/hy3/models/Hy3-tiny-exported --served-model-name hy3-tiny " in said
    assert "--speculative-algorithm EAGLE --speculative-num-steps 1 " in said
    assert said.endswith(" --host 127.0.0.1 --port 8000")
    assert "hf-overrides" not in said


@pytest.mark.parametrize(("rank", "node"), list(enumerate(NODES)))
def test_environment(rendered: Rendered, rank: int, node: str) -> None:
    environment = read_environment(rendered.unit(node, "hy3-serve.service")["Service.Environment"])
    assert environment["PYTHONPATH"] == f"{LAB}/cpu"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment["SGLANG_HOST_IP"] == f"198.18.20.{rank + 1}"
    assert environment["MALLOC_PERTURB_"] == "128"
    assert not [name for name in environment if name.startswith(("VLLM_", "RAY_"))]
