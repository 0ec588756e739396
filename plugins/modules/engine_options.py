#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_options
short_description: Ask the installed engine's own parser about options
version_added: 0.1.0
description:
  - Runs the interpreter of the engine's virtual environment or image once, has it make the parser of its server and
    parse the options, and names what to write instead of those that it does not have.
  - That imports torch, so it takes 6 to 8 seconds (vLLM 0.32.0 and SGLang 0.5.23 on two CPU cores). Nothing is loaded.
  - A parser that cannot be made (no driver, a broken build) is RV(unknown) and no failure.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options:
  engine:
    description: Whose parser it is.
    type: str
    choices: [vllm, sglang]
    required: true
  version:
    description: The engine's version, for messages.
    type: str
    default: ''
  venv:
    description: The virtual environment of the engine. Exactly one of O(venv) and O(container) is needed.
    type: path
  container:
    description: The container image with the engine, instead of O(venv). O(user) is not used then.
    type: dict
    suboptions:
      program:
        description: What runs containers.
        type: str
        choices: [docker, podman]
        required: true
      image:
        description: The image.
        type: str
        required: true
      owner:
        description: Numeric ids of the user that runs the engine and of that user's group, for instance V(1000:1000).
        type: str
        required: true
  arguments:
    description: The options as the server gets them, without the model.
    type: list
    elements: str
    required: true
  environment:
    description: Variables that the server is started with.
    type: dict
    default: {}
  user:
    description: The user that runs the engine. The interpreter runs as this user, or as the module's if left out.
    type: str
  timeout:
    description: Seconds after which to give up.
    type: int
    default: 120
"""

EXAMPLES = r"""
---
- name: Ask SGLang about two options that are gone since 0.5.20
  sparks.hy3.engine_options:
    engine: sglang
    venv: /opt/hy3/venv
    user: hy3
    arguments: [--cuda-graph-max-bs, "32", --disable-piecewise-cuda-graph]
  register: asked

- name: Refuse what it does not have
  ansible.builtin.assert:
    that: asked.problems | length == 0
    fail_msg: "{{ asked.problems | join(' ') }}"
"""

RETURN = r"""
problems:
  description: One sentence per problem; empty is good.
  returned: always
  type: list
  elements: str
  sample:
    - >-
      hy3_engine_args or the profile has --cuda-graph-max-bs 32, and the parser of sglang 0.5.23 does not have it; write
      --cuda-graph-max-bs-decode 32 instead (null in hy3_engine_args takes an option of the profile out).
unknown:
  description: Why the parser could not be asked, or null.
  returned: always
  type: str
  sample: "ModuleNotFoundError: No module named 'triton'"
seconds:
  description: How long that took.
  returned: always
  type: float
  sample: 6.4
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._container import inspecting_argv
from ansible_collections.sparks.hy3.plugins.module_utils._engine_options import command, parse_answer, problems_of
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error


def ask(module: AnsibleModule) -> dict[str, t.Any]:
    params, container = module.params, module.params["container"]
    given = {name: str(value) for name, value in params["environment"].items()}
    python = "python3" if container else f"{params['venv']}/bin/python"
    asking = command(params["engine"], python, params["arguments"], timeout=params["timeout"])
    # What Ansible's own interpreter finds is not the engine's.
    environment = {"PYTHONPATH": "", **({} if container else given)}
    if container:
        asking = inspecting_argv(
            asking, container["program"], image=container["image"], user=container["owner"], environment=given
        )
    elif params["user"]:
        # runuser leaves the environment as it is, but for what says who one is.
        asking = ["runuser", "-u", params["user"], "--", *asking]
    begin = time.monotonic()
    try:
        _rc, stdout, stderr = module.run_command(
            asking,
            environ_update=environment,
            cwd="/",
            errors="replace",
            expand_user_and_vars=False,
            handle_exceptions=False,
        )
    except OSError as error:
        return {"problems": [], "unknown": f"{asking[0]} cannot be run: {error.strerror}", "seconds": 0.0}
    seconds = round(time.monotonic() - begin, 1)
    try:
        answer = parse_answer(stdout)
    except Hy3Error as error:
        last = next((line for line in reversed(stderr.splitlines()) if line.strip()), str(error))
        return {"problems": [], "unknown": last.strip(), "seconds": seconds}
    problems = problems_of(params["engine"], params["version"], params["arguments"], answer)
    return {"problems": problems, "unknown": None, "seconds": seconds}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["vllm", "sglang"], "required": True},
            "version": {"type": "str", "default": ""},
            "venv": {"type": "path"},
            "container": {
                "type": "dict",
                "options": {
                    "program": {"type": "str", "choices": ["docker", "podman"], "required": True},
                    "image": {"type": "str", "required": True},
                    "owner": {"type": "str", "required": True},
                },
            },
            "arguments": {"type": "list", "elements": "str", "required": True},
            "environment": {"type": "dict", "default": {}},
            "user": {"type": "str"},
            "timeout": {"type": "int", "default": 120},
        },
        mutually_exclusive=[("venv", "container")],
        required_one_of=[("venv", "container")],
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **ask(module))


if __name__ == "__main__":
    main()
