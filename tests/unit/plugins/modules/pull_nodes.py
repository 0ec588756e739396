# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes for pulling: trees that stand for checkpoints, and real rsync daemons with the role's own configuration."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import jinja2

SECRET = "of-this-run"
CONFIGURATION = Path(__file__).parents[4] / "roles/checkpoint/templates/rsyncd.conf.j2"
SHARDS = 6
ODD_NAMES = ("sp ace.json", "sub/deep er/#a.txt", "-dash.md", "new\nline.py", 'ü:*?[x]"\\#012.txt')


def write_tree(directory: Path, *, shards: int = SHARDS, size: int = 300_000, seed: int = 0) -> Path:
    """A tree of pseudo-random shards and small files with odd names."""
    directory.mkdir(parents=True)
    for number in range(shards):
        block = hashlib.sha256(f"{seed} {number}".encode()).digest()
        (directory / f"model-{number}.safetensors").write_bytes((block * (size // len(block) + 1))[: size + number])
    for name in ODD_NAMES:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} {seed}")
    (directory / "config.json").write_text(json.dumps({"seed": seed}))
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory that is not hidden."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    }


def manifest(directory: Path) -> list[dict[str, t.Any]]:
    return [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "source": "read"}
        for name, data in content(directory).items()
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Daemon:
    """rsync's daemon over a directory, as the role starts it; ``bwlimit`` in KiB/s makes it slow."""

    def __init__(self, name: str, directory: Path, place: Path, *, bwlimit: int = 0, port: int = 0) -> None:
        self.name = name
        self.port = port or free_port()
        self.log = place / f"{name}.log"
        run = place / f"run-{name}"
        run.mkdir(exist_ok=True)
        values = {
            "hy3_plan": {"checkpoint_path": str(directory), "user": "root"},
            "__hy3_checkpoint_run": str(run),
            "__hy3_checkpoint_chain": {"allowed": ["127.0.0.1"]},
        }
        (run / "rsyncd.conf").write_text(
            jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701 - no HTML
            .from_string(CONFIGURATION.read_text())
            .render(values)
        )
        (run / "secrets").write_text(f"hy3:{SECRET}\n")
        (run / "secrets").chmod(0o600)
        command = ["rsync", "--daemon", "--no-detach", f"--config={run}/rsyncd.conf", "--address=127.0.0.1"]
        command += [f"--port={self.port}", f"--log-file={self.log}"] + ([f"--bwlimit={bwlimit}"] if bwlimit else [])
        self.process = subprocess.Popen(command, start_new_session=True)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    @property
    def source(self) -> dict[str, t.Any]:
        return {"name": self.name, "address": "127.0.0.1", "port": self.port}

    def kill(self) -> None:
        """End it and the processes that it serves with, each of a session of its own."""
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        self.process.kill()
        self.process.wait()
        for pid in children.stdout.split():
            subprocess.run(["kill", "-KILL", pid], check=False, capture_output=True)


def arguments(
    dest: Path, files: list[dict[str, t.Any]], *sources: dict[str, t.Any], **others: t.Any
) -> dict[str, t.Any]:
    """The module's arguments, to pull from the sources."""
    return {"dest": str(dest), "manifest": files, "sources": list(sources), "password": SECRET, **others}


def start_module(values: dict[str, t.Any]) -> subprocess.Popen[str]:
    """The module in a process of its own, that a test may kill."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ansible_collections.sparks.hy3.plugins.modules.checkpoint_pull"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": ":".join(sys.path)},
        text=True,
    )
    assert process.stdin
    process.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": values}))
    process.stdin.close()
    return process
