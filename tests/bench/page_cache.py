# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Purging a tree of 2 GiB, against ``vmtouch -e``, which neither measures nor writes dirty pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._page_cache import purge
from ansible_collections.sparks.hy3.tests.bench.figures import show

PACKAGE = "vmtouch"  # of Debian
MIB = 1024**2
FILES, FILE_MIB = 16, 128
TURNS = 12


def make_tree(directory: Path) -> None:
    block = os.urandom(MIB)
    for number in range(FILES):
        with (directory / f"model-{number:05d}.safetensors").open("wb") as file:
            for _block in range(FILE_MIB):
                file.write(block)
            os.fsync(file.fileno())


def resident(directory: Path) -> int:
    return purge([str(directory)], measure_only=True).resident_before


def seconds(work: t.Callable[[], object], directory: Path) -> float:
    """Wall time of a purge of the tree, all of which is in the page cache before and none after."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            while file.read(8 * MIB):
                pass
    assert resident(directory) > 0.99 * FILES * FILE_MIB * MIB
    began = time.perf_counter()
    work()
    taken = time.perf_counter() - began
    assert resident(directory) == 0
    return taken


def bench() -> None:
    if shutil.which("vmtouch") is None:
        subprocess.run(["apt-get", "update", "--quiet"], check=True, capture_output=True)
        subprocess.run(["apt-get", "install", "--quiet", "--yes", PACKAGE], check=True, capture_output=True)
    # On a disk: /tmp may be a tmpfs, which has nothing but page cache.
    output = Path(__file__).parents[1] / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as name:
        directory = Path(name)
        make_tree(directory)
        turns = []
        for _turn in range(TURNS):
            ours = seconds(lambda: purge([name]), directory)
            theirs = seconds(lambda: subprocess.run(["vmtouch", "-q", "-e", name], check=True), directory)
            turns.append((ours, theirs))
    # The least disturbed turn of each: a purge takes hundredths of a second, and this machine does other things.
    ours, theirs = (min(taken) for taken in zip(*turns, strict=True))
    show("page_cache, 2 GiB in 16 files", ours, "s", "-")
    show("vmtouch -e, the same", theirs, "s", "-")
    show("page_cache / vmtouch -e", ours / theirs, "ratio", "aim 1")
