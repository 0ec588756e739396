# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What happens to a copy along a chain of three nodes on the way, and that the next run completes only the rest.

The real role over capped links. Starts a third node, and leaves the lab without a cluster. Needs `make lab-up`.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import LAB, ROOT, cut_power, on, play, plug
from ansible_collections.sparks.hy3.tests.integration.tree import make_checkpoint

INVENTORY = "inventories/lab3"
HEAD, MIDDLE, END = NODES = ("spark-1", "spark-2", "spark-3")
TREE = "/srv/hy3/models/faults"
# Together as long as a look at the progress and a fault need.
SHARDS, SHARD_BYTES, RATE = 40, 2 * 1024**2, "25mbit"
FILES = SHARDS + 2
VARIABLES = {
    "hy3_profile": "tiny_lab",
    "hy3_checkpoint_dir": TREE,
    "hy3_engine_args": {"tensor-parallel-size": len(NODES), "speculative-config": None},
    "copied_shards": SHARDS,
}
COPY = ["ansible-playbook", "tests/integration/copy.yml", "-i", INVENTORY, "-e", json.dumps(VARIABLES)]


class Copy:
    """A run of role checkpoint in the background."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            COPY, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""

    def until(self, pattern: str) -> None:
        """Read on until a line says so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line like {pattern!r} in {self.output[-4000:]}")

    def end(self) -> str:
        """The whole output."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        self.process.wait(30)
        return " ".join(self.output.split())


def pulled(output: str) -> dict[str, int]:
    """Files that came to each node, as the play says at its end."""
    return {node: int(count) for node, count in re.findall(r"ok: \[(\S+)\] => msg: ['\"]?(\d+) files, ", output)}


def whole(*nodes: str) -> bool:
    sums = {on(node, f"cd {TREE} && ls | sort && cat $(ls | sort) | sha256sum") for node in nodes}
    return len(sums) == 1


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[None]:
    play("stop-hy3")
    play("lab_up", "-e", f"hy3_lab_link_rate={RATE}", inventory=INVENTORY)
    for node in NODES:
        on(node, f"rm -rf {TREE}")
    make_checkpoint(LAB / f"nodes/{HEAD}/root{TREE}", SHARDS, SHARD_BYTES)
    yield
    for node in NODES:
        on(node, f"rm -rf {TREE}")
    play("lab_down", inventory=INVENTORY)
    play("lab_up")


@pytest.fixture
def copy() -> Copy:
    """On the way, with some files there and some not."""
    for node in (MIDDLE, END):
        on(node, f"rm -rf {TREE}")
    copy = Copy()
    copy.until(rf"^{MIDDLE}: ([3-9]|1\d|2[0-5]) of {FILES} files, .* GB/s, \d+s left$")
    return copy


def test_link_is_down_for_five_seconds(copy: Copy) -> None:
    plug(MIDDLE, into=False)
    time.sleep(5)
    plug(MIDDLE, into=True)
    output = copy.end()
    assert copy.process.returncode == 0, output
    assert pulled(output) == {MIDDLE: FILES, END: FILES}
    assert whole(*NODES)


def test_link_is_down_for_good(copy: Copy) -> None:
    """The node behind it is passed over by the next one, and named."""
    plug(MIDDLE, into=False)
    output = copy.end()
    plug(MIDDLE, into=True)
    assert copy.process.returncode == 2
    assert re.search(
        rf"fatal: \[{MIDDLE}\].*No source can be pulled from \(.*\); see that the daemons there run and the fabric'+s "
        "links are up, and run again: only the rest is pulled.",
        output,
    ), output
    assert re.search(rf"{MIDDLE} was passed over: ", output)
    completes()


def test_node_restarts(copy: Copy) -> None:
    """As if its power failed."""
    cut_power(MIDDLE)
    play("lab_up", "-e", f"hy3_lab_link_rate={RATE}", inventory=INVENTORY)
    output = copy.end()
    assert copy.process.returncode == 2
    assert re.search(rf"fatal: \[{MIDDLE}\].*its process was killed, or the node was restarted; run again", output), (
        output
    )
    completes()


def completes() -> None:
    """The end of the chain had all the first time; the second run gives the middle what it lacks, and no more."""
    assert whole(HEAD, END)
    have = int(on(MIDDLE, f"ls {TREE} | wc -l"))
    assert 0 < have < FILES
    copy = Copy()
    output = copy.end()
    assert copy.process.returncode == 0, output
    came = pulled(output)
    # config.json and the halves are among the rest.
    assert came == {MIDDLE: FILES - have}
    assert whole(*NODES)
