# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The main job, killed with SIGKILL in each role and at random moments, converges when it is run again.

Needs a lab (`make lab-up`). The order matters, since each kill leaves its mess to the next run.
"""

from __future__ import annotations

import json
import os
import random

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import (
    NODES,
    changed_nothing,
    command_of,
    kill,
    module,
    on,
    play,
)

SEED = int(os.environ.get("HY3_KILL_SEED", random.SystemRandom().randrange(2**32)))
RANDOM_KILLS = 5
ARGV = "tr '\\0' ' ' </proc/$(systemctl show -p MainPID --value hy3-serve)/cmdline"


def overlay(**engine_args: object) -> str:
    """Extra variables that make the engine's digest another one, so that there is work to do."""
    return json.dumps({"hy3_engine_args": engine_args})


def kill_serve(*options: str, at: str | float) -> None:
    kill(command_of("serve-hy3", *options), at=at)


def converge(*options: str) -> str:
    """Run the play to its end and see that it serves; its output."""
    output = play("serve-hy3", *options)
    assert "-> Paris." in output
    return output


@pytest.fixture(scope="module", autouse=True)
def served() -> None:
    """Begin with a cluster that serves."""
    converge()


ROLES = ["profile", "preflight", "engine", "verify", "report"]


@pytest.mark.parametrize("role", ROLES)
def test_killed_in_a_role_that_only_reads(role: str) -> None:
    kill_serve(at=rf"^TASK \[sparks\.hy3\.{role} :")
    assert changed_nothing(converge())


def test_killed_while_copying_the_checkpoint() -> None:
    on("spark-2", "rm -rf /srv/hy3/models/Hy3-tiny")
    kill_serve(at=r"^TASK \[sparks\.hy3\.checkpoint : Copy \| Pull")
    converge()
    assert "hy3-checkpoint" not in on("spark-1", "systemctl list-units --all --no-legend")
    assert changed_nothing(converge())


def test_killed_while_patching() -> None:
    for node in NODES:
        module(node, "sparks.hy3.engine_patch", "venv=/var/lib/hy3-lab/venv patches=P1 state=absent")
    kill_serve(at=r"^TASK \[sparks\.hy3\.engine_patch : Patch the engine")
    converge()
    assert changed_nothing(converge())


def test_killed_between_writing_the_unit_and_restarting() -> None:
    changed = overlay(**{"max-num-seqs": 3})
    kill_serve("-e", changed, at=r"^TASK \[sparks\.hy3\.serve_unit : Purge")
    argv = on("spark-1", ARGV)
    assert "--max-num-seqs 2" in argv, "the kill came too late to prove anything"
    converge("-e", changed)
    argv = on("spark-1", ARGV)
    assert "--max-num-seqs 3" in argv
    assert changed_nothing(converge("-e", changed))


def test_killed_while_ray_restarts() -> None:
    changed = json.dumps({"hy3_ray_args": {"num-gpus": 1, "object-store-memory": 190_000_000}})
    kill_serve("-e", changed, at=r"^TASK \[sparks\.hy3\.systemd_unit : Unit \| Restart hy3-ray")
    converge()
    assert changed_nothing(converge())


def test_killed_at_random_moments() -> None:
    print(f"HY3_KILL_SEED={SEED}")
    dice = random.Random(SEED)
    for number in range(RANDOM_KILLS):
        changed = overlay(**{"max-num-seqs": 2 + number % 2})
        kill_serve("-e", changed, at=dice.uniform(1.0, 60.0))
        converge("-e", changed)
        assert changed_nothing(converge("-e", changed)), f"kill {number} of seed {SEED}"
