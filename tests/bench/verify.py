# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hashing shards of 4 GiB in all, against ``sha256sum``; 1 GiB where the disk is short."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._manifest import hash_all
from ansible_collections.sparks.hy3.tests.bench.figures import show

MIB, GIB = 1024**2, 1024**3
FILES = 16
ROUNDS = 3
# What must stay free beside the shards.
SPARE_BYTES = 8 * GIB


def make_shards(directory: Path, size: int) -> list[str]:
    block = os.urandom(MIB)
    names = [f"model-{number:05d}.safetensors" for number in range(FILES)]
    for name in names:
        with (directory / name).open("wb") as file:
            for _block in range(size // FILES // MIB):
                file.write(block)
            os.fsync(file.fileno())
    return names


def ours(directory: Path, names: list[str]) -> dict[str, str | None]:
    sizes = {name: (directory / name).stat().st_size for name in names}
    return {hashed.file.name: hashed.file.sha256 for hashed in hash_all(directory, sizes, references={})}


def theirs(directory: Path, names: list[str]) -> dict[str, str | None]:
    done = subprocess.run(["sha256sum", *names], cwd=directory, capture_output=True, text=True, check=True)
    return {name: digest for digest, name in (line.split() for line in done.stdout.splitlines())}


def seconds(work: t.Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bench() -> None:
    # On a disk: /tmp may be a tmpfs of half the memory.
    output = Path(__file__).parents[1] / "output"
    output.mkdir(exist_ok=True)
    size = 4 * GIB if shutil.disk_usage(output).free > 4 * GIB + SPARE_BYTES else GIB
    with tempfile.TemporaryDirectory(dir=output) as name:
        directory = Path(name)
        names = make_shards(directory, size)
        assert ours(directory, names) == theirs(directory, names)
        # By turns, so that what else this machine does meets both; both read from the page cache if it holds all.
        turns = [
            (seconds(lambda: ours(directory, names)), seconds(lambda: theirs(directory, names)))
            for _round in range(ROUNDS)
        ]
    mine, other = (min(taken) for taken in zip(*turns, strict=True))
    cores = len(os.sched_getaffinity(0))
    show(f"checkpoint_info sha256, {size // GIB} GiB on {cores} cores", size / mine / 1e9, "GB/s", "-")
    show("sha256sum, the same", size / other / 1e9, "GB/s", "-")
    show("sha256sum / checkpoint_info", other / mine, "ratio", "aim 5")
