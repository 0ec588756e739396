#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_bench
short_description: Run the engine's own load generator once
version_added: 0.1.0
description:
  - Runs C(vllm bench serve), or C(sglang.bench_serving), of the engine's virtual environment against a served model and
    returns the times of each request, with the engine's counters before and after.
  - Every answer has the same length, whatever the model would do. Judging it is left to filter
    P(sparks.hy3.bench_summary#filter).
  - The load generator takes about 0.6 GiB of memory beside the engine (measured with vLLM 0.32.0).
  - C(sglang.bench_serving) of SGLang 0.5.23 was run with these options against vLLM's API, and not against SGLang's.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
    details: Sends nothing then and returns RV(run) as null.
  diff_mode:
    support: N/A
    details: The module changes nothing.
  idempotent:
    support: full
    details: The module changes nothing.
options:
  engine:
    description: Whose load generator it is.
    type: str
    choices: [vllm, sglang]
    default: vllm
  venv:
    description: The engine's virtual environment.
    type: path
    required: true
  user:
    description: The user who runs the load generator. Needs root, unless it is the user who runs the module.
    type: str
  url:
    description: Base URL of the API, for example V(http://127.0.0.1:8000).
    type: str
    required: true
  api_key:
    description: Key of the API, if it has one. The load generator gets it in its environment.
    type: str
  model:
    description: Name of the served model.
    type: str
    required: true
  tokenizer:
    description: Directory with the model's tokenizer, as a rule the checkpoint.
    type: path
    required: true
  trust_remote_code:
    description: Whether code in O(tokenizer) may run, as for the engine. SGLang's load generator always allows it.
    type: bool
    default: false
  prompts:
    description: What to ask. Request after request takes the next one.
    type: list
    elements: str
    required: true
  output_tokens:
    description: Length of each answer in tokens.
    type: int
    required: true
  streams:
    description: How many requests are under way at a time.
    type: int
    default: 1
  requests:
    description: How many requests to send.
    type: int
    default: 1
  temperature:
    description: Sampling temperature.
    type: float
    default: 0.0
  top_p:
    description: Share of the probability that is sampled from. The engine's own default if left out.
    type: float
  timeout:
    description: Seconds for the whole run.
    type: int
    default: 1800
"""

EXAMPLES = r"""
---
- name: Measure one stream of a server that has answered before
  sparks.hy3.engine_bench:
    venv: /opt/hy3/venv
    user: hy3
    url: http://127.0.0.1:8000
    model: hy3-nvfp4
    tokenizer: /opt/hy3/models/Hy3-NVFP4
    prompts: [Explain paged attention in detail.]
    output_tokens: 256
    requests: 1
  register: measured
"""

RETURN = r"""
run:
  description: What was measured; null in check mode.
  returned: success
  type: dict
  contains:
    duration_s:
      description: Seconds from the first request to the last answer.
      type: float
      returned: always
    total_tps:
      description: Generated tokens of all requests per second of RV(run.duration_s).
      type: float
      returned: always
      sample: 19.1
    accept_length:
      description: SGLang's tokens per step since the server's start, or null.
      type: float
      returned: always
    requests:
      description:
        - Each request with its C(tokens), C(ttft_s) (seconds to the first text), C(decode_tps) (tokens after the first
          one per second from the first text to the last) and C(error), which is null where it succeeded.
        - C(ttft_s) and C(decode_tps) are null where something held the text back until the end.
      type: list
      elements: dict
      returned: always
      sample: [{tokens: 256, ttft_s: 0.252, decode_tps: 19.5, error: null}]
metrics_before:
  description: The engine's counters before, as C(metrics) of M(sparks.hy3.engine_status), or null.
  returned: success
  type: dict
metrics_after:
  description: The engine's counters after, or null.
  returned: success
  type: dict
command:
  description: The load generator's command line.
  returned: success
  type: list
  elements: str
"""

import os
import pwd
import shutil
import tempfile
import typing as t
from dataclasses import fields
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._bench import (
    Load,
    Run,
    command,
    prompts_file,
    read_result,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._metrics import Metrics, read_metrics
from ansible_collections.sparks.hy3.plugins.module_utils._openai import Client

# Exit status of coreutils' timeout when it has ended the command.
TIMED_OUT = (124, 137)


class Bench:
    """Runs the load generator in a directory of its own, which is also its home, and reads what it leaves there."""

    def __init__(self, module: AnsibleModule, load: Load) -> None:
        self.module, self.load = module, load
        self.params: dict[str, t.Any] = module.params

    def argv(self, directory: Path) -> list[str]:
        return command(self.load, prompts=str(directory / "prompts.json"), result=str(directory / "result.json"))

    def metrics(self) -> Metrics | None:
        client = Client(self.load.url, key=self.params["api_key"], timeout=20)
        status, page = client.get("/metrics")
        return read_metrics(page.decode(errors="replace")) if status == 200 else None

    def run(self) -> Run:
        directory = Path(tempfile.mkdtemp(prefix="hy3-bench-"))
        try:
            (directory / "prompts.json").write_text(
                prompts_file(self.params["prompts"], self.load.requests), encoding="utf-8"
            )
            self._hand_over(directory)
            self._generate(directory)
            result = directory / "result.json"
            return read_result(result.read_text(encoding="utf-8") if result.exists() else "")
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _other_user(self) -> str | None:
        user = self.params["user"]
        return user if user and pwd.getpwuid(os.geteuid()).pw_name != user else None

    def _hand_over(self, directory: Path) -> None:
        user = self._other_user()
        if user is None:
            return
        try:
            owner = pwd.getpwnam(user).pw_uid
        except KeyError as error:
            raise Hy3Error(f"The user {user!r} does not exist on this node: create it, or name another user") from error
        for path in (directory, *directory.iterdir()):
            os.chown(path, owner, -1)

    def _generate(self, directory: Path) -> None:
        """The key goes by the environment, as others can read arguments; no proxy is asked for this node's own API."""
        user, seconds = self._other_user(), self.params["timeout"]
        key = {"OPENAI_API_KEY": self.params["api_key"]} if self.params["api_key"] else {}
        argv = self.argv(directory)
        rc, stdout, stderr = self.module.run_command(
            ["timeout", "--kill-after=10", str(seconds), *(["runuser", "-u", user, "--"] if user else []), *argv],
            environ_update={
                **key,
                "HOME": str(directory),
                # Another Python's modules are none for the venv's.
                "PYTHONPATH": "",
                "HF_HUB_OFFLINE": "1",
                "no_proxy": "*",
                "VLLM_NO_USAGE_STATS": "1",
            },
            cwd=str(directory),
            expand_user_and_vars=False,
            errors="surrogateescape",
        )
        if rc in TIMED_OUT:
            raise Hy3Error(f"The load generator was not done after {seconds} seconds: give it more with timeout")
        if rc != 0:
            raise Hy3Error(f"{' '.join(argv[:3])} failed with exit status {rc}: {_cause(stderr) or _cause(stdout)}")


def _cause(output: str) -> str:
    """The last line that looks like an error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or [""])[-1][:400]


def checked(params: dict[str, t.Any]) -> Load:
    """The load, with numbers that mean something."""
    for name in ("output_tokens", "streams", "requests", "timeout"):
        if params[name] < 1:
            raise Hy3Error(f"{name} is {params[name]}, and it must be at least 1")
    if not params["prompts"]:
        raise Hy3Error("prompts is empty, and the model must be asked something: give at least one")
    return Load(**{field.name: params[field.name] for field in fields(Load)})


def measure(module: AnsibleModule) -> dict[str, t.Any]:
    bench = Bench(module, checked(module.params))
    shown = bench.argv(Path("hy3-bench"))
    program = Path(shown[0])
    if not program.exists():
        raise Hy3Error(f"{program} does not exist: venv must be the virtual environment of {bench.load.engine}")
    if module.check_mode:
        return {"run": None, "metrics_before": None, "metrics_after": None, "command": shown}
    before = bench.metrics()
    run = bench.run()
    return {"run": run, "metrics_before": before, "metrics_after": bench.metrics(), "command": shown}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["vllm", "sglang"], "default": "vllm"},
            "venv": {"type": "path", "required": True},
            "user": {"type": "str"},
            "url": {"type": "str", "required": True},
            "api_key": {"type": "str", "no_log": True},
            "model": {"type": "str", "required": True},
            "tokenizer": {"type": "path", "required": True},
            "trust_remote_code": {"type": "bool", "default": False},
            "prompts": {"type": "list", "elements": "str", "required": True},
            "output_tokens": {"type": "int", "required": True, "no_log": False},
            "streams": {"type": "int", "default": 1},
            "requests": {"type": "int", "default": 1},
            "temperature": {"type": "float", "default": 0.0},
            "top_p": {"type": "float"},
            "timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    try:
        result = measure(module)
    except Hy3Error as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
