# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real SGLang on a CPU: its virtual environment, copies of its package to patch, and a server that runs one.

What is not SGLang's is in ``cpu``: stand-ins for operators that were released for CUDA only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CACHE = HERE.parents[1] / ".cache/sglang"
VENV = CACHE / "venv"
PYTHON = VENV / "bin/python"
BOOT_SECONDS = 300


def pinned(text: str) -> set[str]:
    """The lines ``name==version``, spelt as pip compares them."""
    return {re.sub(r"[-_.]+(?=.*==)", "-", line.lower()) for line in text.split() if "==" in line}


def installed() -> bool:
    """Whether the virtual environment has everything in the version that is asked for."""
    if not PYTHON.exists():
        return False
    command = [PYTHON, "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return pinned(REQUIREMENTS.read_text()) <= pinned(listed.stdout)


def install() -> Path:
    """The directory of the package in the virtual environment, which is made if it is not there (3 GB, 5 minutes)."""
    if not installed():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        command = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "-r", REQUIREMENTS]
        subprocess.run(command, check=True)
    (package,) = VENV.glob("lib/python*/site-packages/sglang")
    # 1.2 GB of CUDA that cannot be loaded.
    for library in package.with_name("sgl_kernel").rglob("*.so"):
        library.unlink()
    return package


@contextmanager
def copied(package: Path) -> Iterator[Path]:
    """A copy of the package whose files are the same ones until they are replaced, as engine_patch does."""
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        yield Path(shutil.copytree(package, Path(place) / package.name, copy_function=os.link))


@dataclass(frozen=True)
class Server:
    """A running SGLang, or one that died."""

    port: int
    log: Path

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text: str = response.read().decode()
            return text

    def complete(self, prompt: str, count: int) -> tuple[str, list[float | None]]:
        """The text of ``count`` tokens, the most likely ones, and the logprob of each."""
        body = {"model": "hy3", "prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 1}
        choice = json.loads(self.get("/v1/completions", {**body, "ignore_eos": True}))["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def chat(self, question: str) -> str | None:
        body = {"model": "hy3", "messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
        content: str | None = json.loads(self.get("/v1/chat/completions", body))["choices"][0]["message"]["content"]
        return content

    def acceptance(self) -> float:
        """Share of right drafts by the newest line about them in the log."""
        return float(re.findall(r"accept rate: ([\d.]+)", self.log.read_text())[-1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_of(checkpoint: Path, port: int) -> list[str]:
    command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--served-model-name", "hy3"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--context-length", "512"]
    command += ["--max-total-tokens", "4096", "--mem-fraction-static", "0.3", "--decode-log-interval", "4"]
    # torch_native, the usual choice on such a CPU, has no drafts.
    command += ["--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx"]
    command += ["--quantization", "modelopt_fp4", "--moe-runner-backend", "marlin"]
    command += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"]
    return [*command, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]


def environment_of(package: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (package.parent, HERE / "cpu"))),
        "HF_HUB_OFFLINE": "1",
        # Memory that nobody has written to is full of 0x7f, large numbers, instead of zeros on a lucky day.
        "MALLOC_PERTURB_": "128",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "SGLANG_USE_CPU_ENGINE": "1",
        # 20 seconds of compiling C++ in the first answer.
        "TORCHDYNAMO_DISABLE": "1",
    }


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    # Dies with the test, too. A session of its own, so that all its processes can be ended together.
    command = ["setpriv", "--pdeathsig=KILL", *command]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


@contextmanager
def serving(package: Path, checkpoint: Path) -> Iterator[Server]:
    """One rank with drafts, once it is healthy or has ended. Nothing of it is left afterwards."""
    server = Server(free_port(), package.with_name("server.log"))
    process = start(command_of(checkpoint, server.port), environment_of(package), server.log)
    try:
        wait_for(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            end_group(process.pid)


@contextmanager
def ranks(
    package: Path, units: list[tuple[list[str], dict[str, str]]]
) -> Iterator[list[tuple[Server, subprocess.Popen[bytes]]]]:
    """A rank for each argument list and environment, once rank 0 is healthy. Nothing of them is left afterwards."""
    running = []
    try:
        for number, (command, own) in enumerate(units):
            server = Server(int(command[command.index("--port") + 1]), package.with_name(f"rank-{number}.log"))
            environment = environment_of(package) | own | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
            running.append((server, start(command, environment, server.log)))
        wait_for(*running[0])
        yield running
    finally:
        for _server, process in running:
            process.terminate()
        for _server, process in running:
            end_group(process.pid)
            process.wait()


def wait_for(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + BOOT_SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline, f"SGLang is not healthy yet:\n{server.log.read_text()[-4000:]}"
        try:
            server.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
        else:
            return


def end_group(group: int) -> None:
    """SIGKILL what is left of a group of processes, until none is."""
    try:
        while True:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.1)
    except ProcessLookupError:
        return
