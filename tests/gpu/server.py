# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starts what a unit would start, without systemd, and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import typing as t
import urllib.error
import urllib.request
from pathlib import Path

# What this kind of machine needs, on top of a unit's own environment or a shell's.
MACHINE = {
    "HOME": "/root",
    "HF_HUB_OFFLINE": "1",
    # Its name does not resolve.
    "GLOO_SOCKET_IFNAME": "lo",
    # Multicast over NVLink can take a GPU that others share out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# Where the machine's driver and CUDA are.
PASSED = ("LD_LIBRARY_PATH", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")


class Unit(t.TypedDict):
    """A program and its environment."""

    argv: list[str]
    environment: dict[str, str]


class Server:
    """A unit's program, whose output goes to a file."""

    def __init__(self, unit: Unit, log: Path, *, shell: bool = False) -> None:
        base = dict(os.environ) if shell else {name: os.environ[name] for name in PASSED if name in os.environ}
        environment = {**base, **MACHINE, **unit["environment"]}
        if shell:  # a person has activated the virtual environment
            environment["PATH"] = f"/opt/hy3/venv/bin:{environment['PATH']}"
            environment.pop("PYTHONPATH", None)
        self.argv, self.log = unit["argv"], log
        self.started = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
                executable="/opt/hy3/venv/bin/vllm" if shell else None,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.argv[self.argv.index('--port') + 1]}"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> float | None:
        """Seconds from the start until it is healthy; None if it ended instead, or is not healthy in time."""
        while time.monotonic() - self.started < seconds and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return time.monotonic() - self.started
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        return None

    def stop(self) -> None:
        """End it, and what is left of its own group of processes."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(self.process.pid, signal.SIGKILL)
                time.sleep(0.1)
                self.process.poll()
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()
