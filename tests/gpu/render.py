# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What our roles render for LibertAI's profile on one GPU, and the same flags as a person would type them.

    render.py OUT.json

Real Ansible renders the units. How the machine differs from two Sparks is said as a user would, in the inventory's
variables: DIFFERENCES.
"""

from __future__ import annotations

import json
import sys
import tempfile
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.tests.unit.roles.golden import RAY, SERVE, Rendered
from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.test_seed_000 import SEED_MEMORY, SEED_SERVE

MODELS = "/opt/hy3/models"
# As many blocks as give the recipe's 176,784 tokens: 11,049 of 16 tokens, each of 4 KiB in this checkpoint.
POOL_BYTES = 11_049 * 16 * 4096
ONE_GPU = {"tensor-parallel-size": 1}  # and half the ranks
NO_FLASHINFER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it is not among the packages, and the sampler asks for it
ONE_HOST = {"hy3_fabric_address": "", "hy3_executor": "mp"}  # no fabric, so the engine starts its own rank
LOOPBACK = {"hy3_fabric_address": "127.0.0.1", "hy3_executor": "ray"}
DIFFERENCES: dict[str, dict[str, t.Any]] = {
    # The profile as it is: the pool is what the share of the GPU leaves.
    "share": {**ONE_HOST},
    # A pool of a known size.
    "pool": {**ONE_HOST, "args": {"kv-cache-memory-bytes": POOL_BYTES}},
    # The same on the checkpoint that has no scales for the inputs.
    "w4a16": {
        **ONE_HOST,
        "args": {"kv-cache-memory-bytes": POOL_BYTES},
        "hy3_checkpoint_dir": f"{MODELS}/Hy3-W4A16",
        "hy3_api_port": 8002,
    },
    # With Ray, as the profile is on two Sparks.
    "ray": {**LOOPBACK, "args": {"kv-cache-memory-bytes": POOL_BYTES}, "hy3_api_port": 8003},
}
# By hand: the recipe's own words, on one GPU and without Ray, and with the same pool.
TYPED = {
    "tensor-parallel-size": "1",
    "distributed-executor-backend": "mp",
    "kv-cache-memory-bytes": str(POOL_BYTES),
    "port": "8001",
}


def unit(rendered: Rendered, name: str) -> dict[str, t.Any]:
    """The program and the environment of a unit of the one node."""
    return {
        "argv": rendered.argv("spark-1", f"{name}.service"),
        "environment": rendered.environment("spark-1", f"{name}.service"),
    }


def render(variables: dict[str, t.Any]) -> dict[str, dict[str, t.Any]]:
    """The units of the one node, by name."""
    facts = {
        "hy3_node": {"spark-1": {"fabric_env": {}}},
        "hy3_checkpoint": {"digest": "0" * 64},
        "hy3_engine": {"torch": "2.11.0"},
        "hy3_patches": {"digest": "1" * 64},
    }
    own = {name: value for name, value in variables.items() if name != "args"}
    own |= {"hy3_engine_args": ONE_GPU | variables.get("args", {}), "hy3_engine_env": NO_FLASHINFER}
    with tempfile.TemporaryDirectory() as place:
        given = {"render_dir": place, "render_facts": facts, **own}
        done = run_playbook("render", Path(place), given, "--limit", "spark-1")
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        names = [RAY, SERVE] if variables["hy3_executor"] == "ray" else [SERVE]
        return {name: unit(Rendered(Path(place)), name) for name in names}


def typed() -> dict[str, t.Any]:
    """The recipe's command line; its environment comes on top of the shell's."""
    words = [word for name, value in {**SEED_SERVE, **TYPED}.items() for word in (f"--{name}", value) if word]
    return {"argv": ["vllm", "serve", f"{MODELS}/Hy3-NVFP4", *words], "environment": {**SEED_MEMORY, **NO_FLASHINFER}}


def main() -> None:
    found: dict[str, t.Any] = {name: render(variables) for name, variables in DIFFERENCES.items()}
    Path(sys.argv[1]).write_text(json.dumps({**found, "typed": {SERVE: typed()}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
