# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint from one node to three others over links that are all capped alike, on the lab.

Role checkpoint against the copy to one node only, and against the command of seed 000 as a star. Starts four nodes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
import typing as t

from ansible_collections.sparks.hy3.tests.bench.figures import show
from ansible_collections.sparks.hy3.tests.integration.lab import LAB, on, play, run
from ansible_collections.sparks.hy3.tests.integration.tree import make_checkpoint

INVENTORY = "inventories/lab4"
HEAD, *OTHERS = NODES = [f"spark-{number}" for number in (1, 2, 3, 4)]
# So slow that two cores send four times as much: the links decide.
RATE = "300mbit"
SHARDS, SHARD_BYTES = 99, 12 * 1024**2  # as many as the real one has
TREE, STAR = "/srv/hy3/models/fanout", "/srv/fanout-star"


def remove(nodes: t.Iterable[str], *trees: str) -> None:
    for node in nodes:
        on(node, f"rm -rf {' '.join(trees)}")


class Seconds(t.NamedTuple):
    """Wall time of a play, and of the slowest of its copies."""

    play: float
    copy: float


def pull() -> Seconds:
    """Give the tree to those that lack it."""
    arguments = {"tensor-parallel-size": len(NODES), "speculative-config": None}
    variables = json.dumps({"hy3_checkpoint_dir": TREE, "hy3_engine_args": arguments, "copied_shards": SHARDS})
    os.sync()
    began = time.perf_counter()
    said = " ".join(run("ansible-playbook", "tests/integration/copy.yml", "-i", INVENTORY, "-e", variables).split())
    taken = time.perf_counter() - began
    return Seconds(taken, max(map(float, re.findall(r" files, \S+ \S+ in (\S+) s ", said)), default=0))


def star() -> float:
    """Seconds of seed 000's command to all others at once; who logs in, and with which key, is added."""
    for node in OTHERS:
        on(node, f"install -d -o lab {STAR}")
    login = f"-i {LAB}/ssh/id -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    ssh = f"ssh -c aes128-gcm@openssh.com -o Compression=no {login}"
    copies = [
        f"rsync -a --partial --inplace -e {shlex.quote(ssh)} {TREE}/ lab@198.18.20.{node[-1]}:{STAR}/ & pids+=($!)"
        for node in OTHERS
    ]
    os.sync()
    began = time.perf_counter()
    on(HEAD, "\n".join([*copies, 'for pid in "${pids[@]}"; do wait "$pid" || exit 1; done']))
    return time.perf_counter() - began


def check_equal(tree: str) -> None:
    """Every byte, so that no figure is of half a copy."""
    sums = {on(node, f"cd {place} && cat $(ls *.safetensors *.json) | sha256sum") for node, place in
            [(HEAD, TREE), *((node, tree) for node in OTHERS)]}  # fmt: skip
    assert len(sums) == 1, tree


def bench() -> None:
    play("lab_up", "-e", f"hy3_lab_link_rate={RATE}", inventory=INVENTORY)
    try:
        remove(NODES, TREE, STAR)
        make_checkpoint(LAB / f"nodes/{HEAD}/root{TREE}", SHARDS, SHARD_BYTES)
        chain = pull()
        check_equal(TREE)
        nothing = pull()
        remove(OTHERS[:1], TREE)
        one = pull()
        remove(OTHERS, TREE)
        fanned = star()
        check_equal(STAR)
    finally:
        remove(NODES, TREE, STAR)
        play("lab_up", inventory=INVENTORY)
    what = f"{SHARDS * SHARD_BYTES / 1e9:.1f} GB at {RATE}"
    show(f"role checkpoint, {what}, nothing to copy, whole play", nothing.play, "s", "-")
    show("role checkpoint, to one node, whole play", one.play, "s", "-")
    show("role checkpoint, to three nodes, whole play", chain.play, "s", "-")
    show("role checkpoint, to one node, copy", one.copy, "s", "-")
    show("role checkpoint, to three nodes, slowest copy", chain.copy, "s", "-")
    show("seed 000's rsync over ssh, star to three nodes", fanned, "s", "-")
    show("chain to three nodes / copy to one", chain.copy / one.copy, "ratio", "aim 1.25")
    show("seed 000's star to three nodes / copy to one", fanned / one.copy, "ratio", "about 3")
