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
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INVENTORY = "inventories/lab"
SEED = int(os.environ.get("HY3_KILL_SEED", random.SystemRandom().randrange(2**32)))
RANDOM_KILLS = 5


def play(*arguments: str) -> list[str]:
    return ["ansible-playbook", "playbooks/serve-hy3.yml", "-i", INVENTORY, *arguments]


def overlay(**engine_args: object) -> str:
    """Extra variables that make the engine's digest another one, so that there is work to do."""
    note = {"hf-overrides": {"hy3_lab_note": "a \"b\" 'c' $HOME %h \\ d"}}
    return json.dumps({"hy3_engine_args": note | engine_args})


def ansible(pattern: str, command: str) -> str:
    done = subprocess.run(
        ["ansible", pattern, "-i", INVENTORY, "-b", "-m", "ansible.builtin.shell", "-a", command],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def killed(command: list[str], *, at: str | float) -> str:
    """Run ``command`` and kill its whole session when a line matches ``at``, or after ``at`` seconds; its output."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    seen = []
    if isinstance(at, float):
        time.sleep(at)
    else:
        for line in process.stdout:
            seen.append(line)
            if re.search(at, line):
                break
        else:
            pytest.fail(f"the play ended before {at!r}:\n{''.join(seen)[-2000:]}")
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return "".join(seen)


def converge(*arguments: str) -> str:
    """Run the play to its end and see that it serves; its output."""
    done = subprocess.run(play(*arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "-> Paris." in done.stdout
    return done.stdout


def unchanged(output: str) -> bool:
    return set(re.findall(r"changed=(\d+)", output)) == {"0"}


@pytest.fixture(scope="module", autouse=True)
def served() -> None:
    """Begin with a cluster that serves."""
    converge()


ROLES = ["profile", "preflight", "engine", "verify", "report"]


@pytest.mark.parametrize("role", ROLES)
def test_killed_in_a_role_that_only_reads(role: str) -> None:
    killed(play(), at=rf"^TASK \[sparks\.hy3\.{role} :")
    assert unchanged(converge())


def test_killed_while_copying_the_checkpoint() -> None:
    ansible("spark-2", "rm -rf /srv/hy3/models/Hy3-tiny")
    killed(play(), at=r"^TASK \[sparks\.hy3\.checkpoint : Copy \| Pull")
    converge()
    assert "hy3-checkpoint" not in ansible("spark-1", "systemctl list-units --all --no-legend")
    assert unchanged(converge())


def test_killed_while_patching() -> None:
    site = "/var/lib/hy3-lab/venv"
    for node in ("spark-1", "spark-2"):
        subprocess.run(
            ["ansible", node, "-i", INVENTORY, "-b", "-m", "sparks.hy3.engine_patch",
             "-a", f"venv={site} patches=P1 state=absent"],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
    killed(play(), at=r"^TASK \[sparks\.hy3\.engine_patch : Patch the engine")
    converge()
    assert unchanged(converge())


def test_killed_between_writing_the_unit_and_restarting() -> None:
    changed = overlay(**{"max-num-seqs": 3})
    killed(play("-e", changed), at=r"^TASK \[sparks\.hy3\.vllm_serve : Purge")
    argv = ansible("spark-1", "tr '\\0' ' ' </proc/$(systemctl show -p MainPID --value hy3-serve)/cmdline")
    assert "--max-num-seqs 2" in argv, "the kill came too late to prove anything"
    converge("-e", changed)
    argv = ansible("spark-1", "tr '\\0' ' ' </proc/$(systemctl show -p MainPID --value hy3-serve)/cmdline")
    assert "--max-num-seqs 3" in argv
    assert unchanged(converge("-e", changed))


def test_killed_while_ray_restarts() -> None:
    changed = json.dumps({"hy3_ray_args": {"num-gpus": 1, "object-store-memory": 190_000_000}})
    killed(play("-e", changed), at=r"^TASK \[sparks\.hy3\.systemd_unit : Unit \| Restart hy3-ray")
    converge()
    assert unchanged(converge())


def test_killed_at_random_moments() -> None:
    print(f"HY3_KILL_SEED={SEED}")
    dice = random.Random(SEED)
    for number in range(RANDOM_KILLS):
        changed = overlay(**{"max-num-seqs": 2 + number % 2})
        killed(play("-e", changed), at=dice.uniform(1.0, 60.0))
        converge("-e", changed)
        assert unchanged(converge("-e", changed)), f"kill {number} of seed {SEED}"
