# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The executor mp: what LibertAI's profile becomes on two nodes without Ray, and on one host with two GPUs."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.golden import SERVE, Rendered, Table
from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import read_options

HEAD = "192.168.100.1"
UNIT = f"{SERVE}.service"
FABRIC = {"spark-1": {"NCCL_IB_GID_INDEX": "3"}, "spark-2": {"NCCL_IB_GID_INDEX": "6"}}
BESIDE_THE_PROFILE = {"served-model-name": "hy3-nvfp4", "distributed-executor-backend": "mp"}
API = {"host": "127.0.0.1", "port": "8000", "disable-fastapi-docs": ""}


def render(root: Path, *options: str, **variables: t.Any) -> Rendered:
    facts = {
        "hy3_node": {name: {"fabric_env": found} for name, found in FABRIC.items()},
        "hy3_checkpoint": {"digest": "0" * 64},
        "hy3_engine": {"vllm": "0.24.0"},
        "hy3_patches": {"digest": "1" * 64},
    }
    given = {"render_dir": str(root), "render_facts": facts, "hy3_executor": "mp", **variables}
    done = run_playbook("render", root, given, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return Rendered(root)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(tmp_path_factory.mktemp("host"), "--limit", "spark-1", hy3_fabric_address="")


def written(rendered: Rendered) -> set[str]:
    return {str(path.relative_to(rendered.root)) for path in rendered.root.glob("spark-*/*.service")}


def engine_argv(rendered: Rendered, node: str) -> list[str]:
    """Without what ties it to the ranks of the other nodes."""
    argv = rendered.argv(node, UNIT)
    return argv[argv.index("--") + 1 :] if "--" in argv else argv


def beside_the_profile(rendered: Rendered, node: str) -> Table:
    """Options but for those of the profile, which test_seed_000 knows."""
    argv = engine_argv(rendered, node)
    assert argv[:3] == ["/opt/hy3/venv/bin/vllm", "serve", "/opt/hy3/models/Hy3-NVFP4"]
    options = read_options(argv[3:])
    profile = {"tensor-parallel-size": "2", "moe-backend": "marlin", "enforce-eager": "", "kv-cache-dtype": "fp8"}
    profile |= {"max-model-len": "163840", "max-num-seqs": "2", "max-num-batched-tokens": "8192"}
    profile |= {"gpu-memory-utilization": "0.85", "pipeline-parallel-size": "1", "trust-remote-code": ""}
    profile |= {"speculative-config": '{"method":"mtp","num_speculative_tokens":1}'}
    assert profile.items() <= options.items()
    return {name: value for name, value in options.items() if name not in profile}


def test_each_of_two_nodes_starts_its_own_rank(two: Rendered) -> None:
    assert written(two) == {f"{node}/{UNIT}" for node in FABRIC}
    meeting = {"nnodes": "2", "master-addr": HEAD, "master-port": "29501"}
    assert beside_the_profile(two, "spark-1") == BESIDE_THE_PROFILE | meeting | {"node-rank": "0"} | API
    assert beside_the_profile(two, "spark-2") == BESIDE_THE_PROFILE | meeting | {"node-rank": "1", "headless": ""}


@pytest.mark.parametrize(("node", "gib"), [("spark-1", 104 + 8), ("spark-2", 110)])
def test_one_unit_may_use_what_two_would(two: Rendered, node: str, gib: int) -> None:
    settings = two.settings(node, UNIT)
    assert settings["Service.MemoryMax"] == str(gib * 1024**3)
    assert settings["Unit.BindsTo"] == "hy3-firewall.service"
    assert settings["Service.EnvironmentFile"] == "-/run/hy3-serve/fabric.env"


def test_a_rank_has_its_nodes_environment_and_nothing_of_ray(two: Rendered) -> None:
    for node, number in (("spark-1", 1), ("spark-2", 2)):
        environment = two.environment(node, UNIT)
        assert environment["VLLM_HOST_IP"] == f"192.168.100.{number}"
        assert environment["NCCL_DEBUG_FILE"] == "/run/hy3-serve/nccl.%p.log"
        assert [name for name in environment if name.startswith(("RAY_AUTH", "RAY_ADDRESS"))] == []
        assert "/run/hy3-serve/fabric.env" in two.before(node, UNIT)[-1]


def test_two_nodes_run_their_ranks_together(two: Rendered) -> None:
    for node, rank in (("spark-1", "0"), ("spark-2", "1")):
        tie = ["--rank", rank, "--of", "2", "--at", f"{HEAD}:29490", "--"]
        assert two.argv(node, UNIT)[:10] == ["/usr/bin/python3", "-I", "/usr/local/lib/hy3/ranks.py", *tie]


def test_one_host_needs_neither_fabric_nor_ray(host: Rendered) -> None:
    assert written(host) == {f"spark-1/{UNIT}"}
    assert beside_the_profile(host, "spark-1") == BESIDE_THE_PROFILE | API
    assert [command[2:] for command in host.before("spark-1", UNIT)] == [
        ["/usr/local/lib/hy3/page_cache.py", "/opt/hy3/models/Hy3-NVFP4"]
    ], "its GPUs have memory of their own"
    assert "/usr/local/lib/hy3/ranks.py" not in host.argv("spark-1", UNIT)
    assert "Service.EnvironmentFile" not in host.settings("spark-1", UNIT)
    environment = host.environment("spark-1", UNIT)
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert [name for name in environment if name.startswith("NCCL")] == []


def test_one_host_with_a_fabric_address_is_held_to_it(tmp_path: Path) -> None:
    host = render(tmp_path, "--limit", "spark-1")
    assert host.environment("spark-1", UNIT)["VLLM_HOST_IP"] == HEAD
    assert "/run/hy3-serve/fabric.env" in host.before("spark-1", UNIT)[-1]
