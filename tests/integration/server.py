# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A running vLLM as the integration tests use it: the cluster on the lab, or one rank alone on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.sparks.hy3.tests.integration.lab import LAB, NODES

BOOT_SECONDS = 300
QUESTION = [{"role": "user", "content": "capital of France? one word"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PROMPTS = (" w000", "hello", " one capital of France", " w017 w100 w003 Paris. get_weather w050")

Logprobs = dict[tuple[str, int, str], float]


@dataclass(frozen=True)
class Server:
    """A running vLLM."""

    port: int
    model: str = "hy3"

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text: str = response.read().decode()
            return text

    def chat(self, **options: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": QUESTION, "max_tokens": 30, "temperature": 0, **options}
        choice: dict[str, Any] = json.loads(self.get("/v1/chat/completions", body))["choices"][0]
        return choice

    def complete(self, prompt: str, count: int, **options: Any) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **options,
        }
        choice: dict[str, Any] = json.loads(self.get("/v1/completions", body))["choices"][0]
        return choice

    def counter(self, name: str) -> float:
        return sum(float(line.split()[-1]) for line in self.get("/metrics").splitlines() if line.startswith(name + "{"))

    def acceptance(self) -> float:
        """Share of the drafted tokens that were right, after a long text."""
        self.complete(" w000", 600)
        drafted = self.counter("vllm:spec_decode_num_draft_tokens_total")
        assert drafted > 0
        return self.counter("vllm:spec_decode_num_accepted_tokens_total") / drafted

    def logprobs(self) -> Logprobs:
        """The top 20 at 24 positions after each prompt."""
        return {
            (prompt, position, token): logprob
            for prompt in PROMPTS
            for position, top in enumerate(self.complete(prompt, 24, logprobs=20)["logprobs"]["top_logprobs"])
            for token, logprob in top.items()
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster() -> Iterator[Server]:
    """The cluster on the lab, one rank on each node. Its API is reached through SSH."""
    port = free_port()
    forward = ["-L", f"{port}:127.0.0.1:8000"]
    options = ["-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes"]
    tunnel = subprocess.Popen(["ssh", "-F", str(LAB / "ssh/config"), *options, "-N", *forward, NODES[0]])
    try:
        server = Server(port, "hy3-tiny")
        wait_for(server, tunnel, Path("/dev/null"))
        yield server
    finally:
        tunnel.terminate()
        tunnel.wait(10)


@contextmanager
def serving(checkpoint: Path, dtype: str = "bfloat16") -> Iterator[Server]:
    """One rank alone, on this machine."""
    port = free_port()
    command = [str(LAB / "venv/bin/vllm"), "serve", str(checkpoint)]
    command += ["--served-model-name", "hy3", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "2048", "--dtype", dtype]
    command += ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}', "--enforce-eager"]
    command += ["--reasoning-parser", "hy_v3", "--tool-call-parser", "hy_v3", "--enable-auto-tool-choice"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    log = checkpoint.parent / f"{checkpoint.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        server = Server(port)
        wait_for(server, process, log)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + BOOT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            server.get("/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise AssertionError(f"vLLM did not become healthy:\n{log.read_text()[-4000:]}")
