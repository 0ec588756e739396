# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pulling 4 GiB over loopback, checked and synced, against the seed's rsync over ssh and against ``cp -r``.

All ends share one machine's cores and disk, so the figures are for comparison only. Needs root, for sshd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import typing as t
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._manifest import hash_all, list_files
from ansible_collections.sparks.hy3.tests.bench.figures import show
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.pull_nodes import (
    Daemon,
    arguments,
    free_port,
    start_module,
)

MIB, GIB = 1024**2, 1024**3
SHARDS = 16
TURNS = 3


def make_tree(directory: Path) -> None:
    directory.mkdir()
    block = os.urandom(MIB)
    for number in range(SHARDS):
        with (directory / f"model-{number:05d}.safetensors").open("wb") as file:
            for _block in range(4 * GIB // SHARDS // MIB):
                file.write(block)
    (directory / "config.json").write_text("{}")


def seconds(work: t.Callable[[], object], target: Path) -> float:
    """Wall time of making the target, which is removed before; nothing else is left to be written back."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def pull(values: dict[str, t.Any]) -> None:
    process = start_module(values)
    process.stdin = None  # closed already
    stdout, _stderr = process.communicate()
    assert process.returncode == 0, stdout


@contextmanager
def ssh_server(place: Path) -> Iterator[list[str]]:
    """An sshd of the bench's own; gives the options that ssh needs to get in."""
    port, key = free_port(), place / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "HostKey": key,
        "AuthorizedKeysFile": f"{key}.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "PermitRootLogin": "prohibit-password",
        "ListenAddress": "127.0.0.1",
    }
    (place / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    with (place / "sshd.log").open("wb") as log:
        server = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", str(place / "sshd_config"), "-p", str(port)], stderr=log
        )
    time.sleep(1)
    try:
        yield ["-p", str(port), "-i", str(key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    finally:
        server.terminate()
        server.wait()


def seed(source: Path, target: Path, options: list[str]) -> None:
    """The command of seed 000, but for where it goes."""
    shell = f"ssh -c aes128-gcm@openssh.com -o Compression=no {' '.join(options)}"
    subprocess.run(
        ["rsync", "-a", "--partial", "--inplace", "-e", shell, f"{source}/", f"127.0.0.1:{target}/"],
        check=True,
        capture_output=True,
    )


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", "--file-system", str(target)], check=True)


def bench() -> None:
    # On a disk: /tmp may be a tmpfs.
    output = Path(__file__).parents[1] / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as name:
        place = Path(name)
        source, target = place / "source", place / "target"
        make_tree(source)
        sizes, _unread = list_files(source)
        files = [asdict(hashed.file) for hashed in hash_all(source, sizes, references={})]
        size = sum(file["size"] for file in files)
        daemon = Daemon("head", source, place)
        try:
            with ssh_server(place) as options:
                ways: dict[str, t.Callable[[], object]] = {
                    "checkpoint_pull, 4 streams, checked and synced": lambda: pull(
                        arguments(target, files, daemon.source)
                    ),
                    "checkpoint_pull, 1 stream, checked and synced": lambda: pull(
                        arguments(target, files, daemon.source, streams=1)
                    ),
                    "seed 000's rsync over ssh, unchecked": lambda: seed(source, target, options),
                    "cp -r and sync, unchecked": lambda: copy(source, target),
                }
                # By turns, so that what else this machine does meets all; the least disturbed turn of each.
                taken = [{way: seconds(work, target) for way, work in ways.items()} for _turn in range(TURNS)]
        finally:
            daemon.kill()
    best = {way: min(turn[way] for turn in taken) for way in ways}
    for way, least in best.items():
        show(way, size / least / 1e9, "GB/s", "-")
    ours, _one, theirs, plain = best.values()
    show("seed 000's rsync over ssh / checkpoint_pull", theirs / ours, "ratio", "aim 3")
    show("checkpoint_pull / cp -r and sync", ours / plain, "ratio", "-")
