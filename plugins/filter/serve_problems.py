# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``serve_problems``: what a serving node does other than planned."""

from __future__ import annotations

import json
import typing as t

DOCUMENTATION = r"""
name: serve_problems
short_description: What a serving node does other than planned
version_added: 0.1.0
description:
  - Compares what M(sparks.hy3.engine_status) read on one node with the plan of role P(sparks.hy3.profile#role).
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The result of M(sparks.hy3.engine_status) for the units C(hy3-ray.service) and C(hy3-serve.service).
  plan:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  fabric_env:
    type: dict
    required: true
    description: The node's own NCCL and Gloo settings by name, from M(sparks.hy3.roce_gid).
  restarted:
    type: bool
    default: true
    description:
      - Whether the engine has just been started, so that its log must say what it runs with. Of an older start the log
        may have lost its beginning, and then that is no problem.
"""

EXAMPLES = r"""
- name: Nothing may differ
  ansible.builtin.assert:
    that: status | sparks.hy3.serve_problems(plan=hy3_plan, fabric_env=hy3_node.fabric_env) | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

Facts = t.Mapping[str, t.Any]
# How a rank's process calls itself: vLLM's own title, Ray's name of the actor before vLLM sets one, SGLang's.
RANK_TITLES = ("VLLM::Worker", "ray::RayWorkerProc", "ray::RayWorkerWrapper", "sglang::scheduler")

# Engine options that the engine's log repeats, and the names there (see engine_status).
READ_BACK = {
    "enforce-eager": "enforce_eager",
    "kv-cache-dtype": "kv_cache_dtype",
    "max-model-len": "max_seq_len",
    "context-length": "max_seq_len",
    "moe-backend": "moe_backend",
    "moe-runner-backend": "moe_backend",
    "tensor-parallel-size": "tensor_parallel_size",
    "speculative-algorithm": "speculative_method",
    "speculative-num-draft-tokens": "speculative_tokens",
}


def rank_unit(plan: Facts) -> str:
    """The unit that the ranks of a node live in."""
    return "hy3-ray.service" if plan["executor"] == "ray" else "hy3-serve.service"


def _rank_problems(unit: Facts, plan: Facts, fabric_env: Facts) -> list[str]:
    """The unit that holds this node's ranks: processes with other fabric values than the node's, ranks elsewhere."""
    name = rank_unit(plan)
    if not unit["processes"]:
        return [f"{name} does not run on this node; read `journalctl -u {name.removesuffix('.service')}` there."]
    # Without Ray a rank that restarts alone meets nobody.
    way = f"restart {name} on this node" if plan["executor"] == "ray" else "run stop_hy3 and then serve_hy3"
    # A process that renamed itself may have written its title over its environment, which then reads as null.
    for process in unit["processes"]:
        for variable, value in (process["environment"] or {}).items():
            if value != fabric_env.get(variable):
                return [
                    f"process {process['pid']} ({process['title']}) of {name} was started with {variable}={value} "
                    f"and this node's is {fabric_env.get(variable)}; {way}."
                ]
    if count := _count_problem(unit, plan):
        return [count]
    first: Facts = next((process for process in unit["processes"] if process["pid"] == unit["main_pid"]), {})
    lacking = sorted(set(fabric_env) - set(first.get("environment") or {}))
    if lacking:
        harm = "an executor may fill in the head's" if plan["executor"] == "ray" else "NCCL chooses by itself"
        return [f"process {unit['main_pid']} of {name} was started without {', '.join(lacking)}, so {harm}; {way}."]
    return []


def _count_problem(unit: Facts, plan: Facts) -> str | None:
    ranks = [process for process in unit["processes"] if process["title"].startswith(RANK_TITLES)]
    args = plan["engine_args"]
    wanted = args.get("tensor-parallel-size", 1) * args.get("pipeline-parallel-size", 1) // len(plan["hosts"])
    if len(ranks) == wanted:
        return None
    if plan["executor"] == "ray":
        return (
            f"{len(ranks)} engine ranks run on this node and {wanted} must run on each; Ray placed them elsewhere, so "
            "check the GPUs that each node brought."
        )
    return f"{len(ranks)} engine ranks run on this node and {wanted} must; read `journalctl -u hy3-serve` there."


def _driver_problems(serve: Facts) -> list[str]:
    leaked = sorted({name for process in serve["processes"] for name in process["environment"] or {}})
    if not leaked:
        return []
    return [
        f"the driver was started with {', '.join(leaked)}, which an executor may copy over the other nodes' values; "
        "take it out of hy3_engine_env."
    ]


def _asked_for(plan: Facts) -> dict[str, t.Any]:
    """What the engine's own words must be: from the arguments in force, and what only the checkpoint decides."""
    args = plan["engine_args"]
    asked = {name: args[option] for option, name in READ_BACK.items() if args.get(option) is not None}
    speculative = args.get("speculative-config")
    if isinstance(speculative, str):
        speculative = json.loads(speculative)
    if speculative:
        asked |= {"speculative_method": speculative["method"]}
        asked |= {"speculative_tokens": speculative["num_speculative_tokens"]}
    return asked | plan["readback"]


def _read_back_problems(config: Facts, wanted: Facts) -> list[str]:
    """Engine settings that the engine's own log states otherwise."""
    return [
        f"the engine runs with {name} {config.get(name)!r} and was asked for {value!r}; read the top of "
        "`journalctl -u hy3-serve` for why it changed it."
        for name, value in wanted.items()
        if str(config.get(name)).lower() != str(value).lower()
    ]


def serve_problems(status: Facts, plan: Facts, fabric_env: Facts, restarted: bool = True) -> list[str]:
    """One sentence for each way in which the node does not do what ``plan`` says; empty is good."""
    problems = _rank_problems(status["units"][rank_unit(plan)], plan, fabric_env)
    if not plan["node"]["is_head"]:
        return problems
    if plan["executor"] == "ray":
        problems += _driver_problems(status["units"]["hy3-serve.service"])
    config = (status["log"] or {}).get("config")
    # The journal drops the beginning of a long run, which was read when it was new.
    if config is not None or restarted or not status["log"]:
        problems += _read_back_problems(config or {}, _asked_for(plan))
    # SGLang counts drafts in its log only, after some dozens of tokens.
    if plan["engine_args"].get("speculative-config") and not (status["metrics"] or {}).get("drafted"):
        problems.append(
            "speculative decoding is on and no token was drafted; look for the drafter in the engine's log."
        )
    return problems


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"serve_problems": serve_problems}
