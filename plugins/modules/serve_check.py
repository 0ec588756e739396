#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: serve_check
short_description: Hold what is to be served against settings that are known to fail
version_added: 0.1.0
description:
  - Reads what a node has - engine and packages of the venv, driver, CUDA, GPU, logind, memory guards, the checkpoint's
    small files - and holds it and the given arguments against the rules that docs/rules.md lists.
  - Nothing of the venv is imported or run. A fact that cannot be read makes the rules that need it unjudged, which is
    returned, and never passed.
  - Does not fail on what it finds. What to refuse is the caller's to say, with RV(problems).
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options:
  engine:
    description: The engine that serves.
    type: str
    choices: [vllm, sglang]
    default: vllm
  arguments:
    description:
      - Options of the engine by name, without leading dashes, and C(-) or C(_) within. V(null) is an option that is not
        given. Left out, they are unknown.
      - The executor is the option C(distributed-executor-backend).
    type: dict
  environment:
    description: Variables that the engine's driver is started with. Left out, they are unknown.
    type: dict
  ray_arguments:
    description: Options of C(ray start) on this node, as O(arguments).
    type: dict
  ray_environment:
    description: Variables that Ray is started with on this node. Left out, they are unknown.
    type: dict
  nodes:
    description: How many nodes serve together.
    type: int
  patches:
    description: Ids of the engine patches that are in place, or will be. Left out, they are unknown.
    type: list
    elements: str
  with_needed_patches:
    description:
      - Whether the patches of O(engine) that O(checkpoint) needs will be put in place as well, as
        M(sparks.hy3.engine_patch) does with its option O(sparks.hy3.engine_patch#module:checkpoint).
    type: bool
    default: false
  processes:
    description: The engine's processes on this node, as RV(sparks.hy3.engine_status#module:engines) gives them.
    type: list
    elements: dict
  venv:
    description: The virtual environment of the engine.
    type: path
  checkpoint:
    description: Directory of the checkpoint.
    type: path
  user:
    description: The user that runs the engine, by name or number.
    type: str
  allow:
    description: Ids of rules whose findings are accepted. An id that no rule has is refused.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
---
- name: Hold a plan against what is known to fail
  sparks.hy3.serve_check:
    venv: /opt/hy3/venv
    checkpoint: /opt/hy3/models/Hy3-NVFP4
    user: hy3
    nodes: 2
    arguments:
      distributed-executor-backend: ray
      tensor-parallel-size: 2
      moe-backend: marlin
      enforce-eager: true
      gpu-memory-utilization: 0.85
      speculative-config: {method: mtp, num_speculative_tokens: 1}
    ray_arguments: {object-store-memory: 2000000000, node-ip-address: 192.168.100.1}
    environment: {VLLM_ENGINE_READY_TIMEOUT_S: "3600"}
    ray_environment:
      RAY_memory_monitor_refresh_ms: "0"
      RAY_AUTH_MODE: token
      VLLM_HOST_IP: 192.168.100.1
      GLOO_SOCKET_IFNAME: enp1s0f1np1
    patches: [P1]
    with_needed_patches: true
  register: checked

- name: Refuse what is known to fail
  ansible.builtin.assert:
    that: checked.problems | length == 0
    fail_msg: "{{ checked.problems | join(' ') }}"
"""

RETURN = r"""
findings:
  description: The rules that hold, worst first.
  returned: always
  type: list
  elements: dict
  contains:
    rule:
      description: Id of the rule, by which O(allow) accepts it.
      type: str
      sample: moe-family-100
    severity:
      description: V(error) fails or harms, V(warning) may, V(note) is worth knowing.
      type: str
      choices: [error, warning, note]
    found:
      description: The value found.
      type: str
      sample: moe-backend is flashinfer_cutedsl
    what:
      description: What happens.
      type: str
      sample: that kernel is gated to capability family 100, and GB10 is 12.1
    fix:
      description: The way out.
      type: str
      sample: set moe-backend to marlin
    source:
      description: Where this is known from.
      type: str
      sample: seed 000 (LibertAI, vLLM 0.24.0, two Sparks); field case B84
    allowed:
      description: Whether O(allow) accepts it.
      type: bool
problems:
  description: One sentence for each error that is not accepted; empty is good.
  returned: always
  type: list
  elements: str
  sample: []
warnings_found:
  description: One sentence for each warning that is not accepted.
  returned: always
  type: list
  elements: str
  sample: []
notes:
  description: One sentence for each note that is not accepted.
  returned: always
  type: list
  elements: str
  sample: []
unjudged:
  description: Rules that could not be judged, with the fact that each lacks.
  returned: always
  type: dict
  sample: {parser-suffix-unsaid: checkpoint vocab suffix}
engine_version:
  description: Version of the engine in the venv, or null.
  returned: always
  type: str
  sample: 0.24.0
packages:
  description: Versions of the venv's packages that a rule asks for, or null without a venv.
  returned: always
  type: dict
  sample: {vllm: 0.24.0, torch: 2.11.0, ray: 2.60.0}
toolkits:
  description: CUDA releases by where they are from, or null without a venv.
  returned: always
  type: dict
  sample: {torch: "13.0", /usr/local/cuda: "13.0"}
node:
  description:
    - What the node is. C(driver) is empty without one, C(capability) is the GPU's, C(cma_total) and C(cma_free) are
      bytes, C(ptxas) is the one that Triton is told to use and whether it can be run, C(carry_over) describes the file
      with which vLLM keeps variables from its workers. Null is unknown.
  returned: always
  type: dict
  sample:
    {machine: aarch64, kernel: 6.17.0-1014-nvidia, driver: 580.95.05, driver_cuda: "13.0", capability: [12, 1], gpus: 1,
     remove_ipc: true, user: hy3, user_exists: true, uid: 1001, linger: true, guards: [systemd-oomd], cma_total: 0,
     cma_free: 0, ptxas: {path: "", run: false},
     carry_over: {path: /etc/hy3/vllm/ray_non_carry_over_env_vars.json, exists: true, names: [NCCL_IB_GID_INDEX]}}
checkpoint:
  description: What the checkpoint's small files say, or null without a readable C(config.json).
  returned: always
  type: dict
  sample: {scheme: nvfp4, method: modelopt, num_attention_heads: 64, num_key_value_heads: 8, vocab_suffix: ""}
"""

import pwd
import re
import typing as t
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_facts import read_checkpoint
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._node_facts import Node, read_venv
from ansible_collections.sparks.hy3.plugins.module_utils._patch import _needs, needs_of
from ansible_collections.sparks.hy3.plugins.module_utils._rules import Verdict, judge, refuse_unknown_ids
from ansible_collections.sparks.hy3.plugins.module_utils._situation import SEVERITIES

GIVEN = ("engine", "environment", "ray_environment", "nodes", "patches", "processes")
VENV_FACTS = ("packages", "version", "torch_cuda", "wheel", "toolkits")


def dashed(options: t.Mapping[str, t.Any] | None) -> dict[str, t.Any] | None:
    return None if options is None else {name.replace("_", "-"): value for name, value in options.items()}


def is_number(user: str | None) -> bool:
    return user is not None and user.isdecimal() and len(user) < 11


def find_person(user: str | None) -> pwd.struct_passwd | None:
    try:
        return None if not user else pwd.getpwuid(int(user)) if is_number(user) else pwd.getpwnam(user)
    except (KeyError, OverflowError):
        return None


def with_needed(params: t.Mapping[str, t.Any]) -> list[str] | None:
    """The patches given and those that the checkpoint needs, as far as it is here."""
    given: list[str] | None = params["patches"]
    if given is None or not params["checkpoint"]:
        return given
    options = dashed(params["arguments"]) or {}
    ranks = str(options.get("tensor-parallel-size", options.get("tp-size", 1)))
    try:
        read = _needs.read_checkpoint(Path(params["checkpoint"]))
    except (OSError, Hy3Error):
        return given
    needs = needs_of(read, params["engine"], max(1, int(ranks)) if re.fullmatch("[0-9]{1,9}", ranks) else 1)
    return [*given, *(name for name, need in needs.items() if need.needed_by == "needed" and name not in given)]


class ServeCheck:
    """Gathers the facts of this node."""

    def __init__(self, module: AnsibleModule) -> None:
        self.params: dict[str, t.Any] = module.params
        self._module = module

    def _run(self, command: list[str]) -> str | None:
        path = self._module.get_bin_path(command[0])
        if not path:
            return None
        # Their exit status says more than whether they could answer (`systemctl is-active`).
        return t.cast(str, self._module.run_command([path, *command[1:]], errors="surrogateescape")[1])

    def facts(self) -> dict[str, t.Any]:
        params = self.params
        environment = {name: str(value) for name, value in (params["environment"] or {}).items()}
        venv = read_venv(Path(params["venv"]), params["engine"]) if params["venv"] else dict.fromkeys(VENV_FACTS)
        node = Node(self._run)
        arguments = dashed(params["arguments"])
        # Where Ray starts the ranks, they have its environment.
        by_ray = (arguments or {}).get("distributed-executor-backend") == "ray"
        ranks = params["ray_environment" if by_ray else "environment"]
        if venv["toolkits"] is not None:
            venv["toolkits"] |= node.toolkits(environment)
        person = find_person(params["user"])
        return {
            **{name: params[name] for name in GIVEN},
            "patches": with_needed(params) if params["with_needed_patches"] else params["patches"],
            **venv,
            "arguments": arguments,
            "ray_arguments": dashed(params["ray_arguments"]),
            "checkpoint": read_checkpoint(Path(params["checkpoint"])) if params["checkpoint"] else None,
            "node": {"ptxas": None if ranks is None else node.ptxas(ranks.get("TRITON_PTXAS_PATH"), params["venv"])}
            | node.facts(
                user=person.pw_name if person else params["user"],
                # A number needs no name: that of a container's user often has none here.
                uid=person.pw_uid if person else int(params["user"]) if is_number(params["user"]) else None,
                home=person.pw_dir if person else "/nonexistent",
                environment=environment,
            ),
        }


def describe(verdict: Verdict, facts: dict[str, t.Any]) -> dict[str, t.Any]:
    findings = sorted(verdict.findings, key=lambda one: SEVERITIES.index(one.rule.severity))
    return {
        "findings": [
            {
                "rule": one.rule.id,
                "severity": one.rule.severity,
                "found": one.found,
                "what": one.rule.what,
                "fix": one.rule.fix,
                "source": one.rule.source,
                "allowed": one.allowed,
            }
            for one in findings
        ],
        "problems": verdict.sentences("error"),
        "warnings_found": verdict.sentences("warning"),
        "notes": verdict.sentences("note"),
        "unjudged": verdict.unjudged,
        "engine_version": facts["version"],
        **{name: facts[name] for name in ("packages", "toolkits", "node", "checkpoint")},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["vllm", "sglang"], "default": "vllm"},
            **{name: {"type": "dict"} for name in ("arguments", "environment", "ray_arguments", "ray_environment")},
            "nodes": {"type": "int"},
            "patches": {"type": "list", "elements": "str"},
            "with_needed_patches": {"type": "bool", "default": False},
            "processes": {"type": "list", "elements": "dict"},
            "venv": {"type": "path"},
            "checkpoint": {"type": "path"},
            "user": {"type": "str"},
            "allow": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        refuse_unknown_ids(module.params["allow"])
        facts = ServeCheck(module).facts()
    except Hy3Error as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **describe(judge(facts, allow=module.params["allow"]), facts))


if __name__ == "__main__":
    main()
