# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``checkpoint_problems``: why a whole checkpoint cannot be served as planned."""

from __future__ import annotations

import json
import typing as t

DOCUMENTATION = r"""
name: checkpoint_problems
short_description: Why a whole checkpoint cannot be served as planned
version_added: 0.1.0
description:
  - Compares what M(sparks.hy3.checkpoint_info) read with the plan of role P(sparks.hy3.profile#role). The engine finds
    the same minutes later, or drafts at random.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The result of M(sparks.hy3.checkpoint_info).
  plan:
    type: dict
    required: true
    description: The fact C(hy3_plan).
"""

EXAMPLES = r"""
- name: Refuse a checkpoint that cannot be served as planned
  ansible.builtin.assert:
    that: checkpoint | sparks.hy3.checkpoint_problems(plan=hy3_plan) | length == 0
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

Facts = t.Mapping[str, t.Any]
MOST_RANKS = 8  # what a way out may name; more Sparks than these nobody has reported


def _shard_problems(checkpoint: Facts, plan: Facts) -> list[str]:
    """Where the profile knows how many its author published; that they are whole is the index's to say."""
    found, wanted = len(checkpoint["shards"]), plan["checkpoint"].get("shards")
    if wanted in (None, found):
        return []
    return [
        f"{plan['checkpoint_path']} has {found} shards and profile {plan['profile']} wants {wanted}; it is another "
        "checkpoint, or half of one."
    ]


def _odd_heads(heads: int | None, kv_heads: int | None, ranks: int) -> list[str]:
    odd = [f"{heads} attention heads"] if heads and heads % ranks else []
    return odd + ([f"{kv_heads} KV heads"] if kv_heads and kv_heads % ranks and ranks % kv_heads else [])


def _head_problems(model: Facts, plan: Facts) -> list[str]:
    """Heads are split among the ranks; KV heads are copied once there are more ranks than those."""
    ranks = plan["engine_args"].get("tensor-parallel-size", 1)
    heads, kv_heads = model.get("heads"), model.get("kv_heads")
    odd = _odd_heads(heads, kv_heads, ranks)
    if not odd:
        return []
    sizes = ", ".join(str(size) for size in range(1, MOST_RANKS + 1) if not _odd_heads(heads, kv_heads, size))
    return [
        f"tensor-parallel-size is {ranks}, which does not divide the model's {' and '.join(odd)}; serve it with "
        f"{' or '.join(sizes.rsplit(', ', 1))} ranks, or for {ranks} take another checkpoint: the original if this one "
        "is padded, else a copy padded by playbook pad_hy3."
    ]


def _drafter_problems(checkpoint: Facts, plan: Facts) -> list[str]:
    """MTP needs the layer after the last; some conversions lose it and leave the configuration as it was."""
    speculative = plan["engine_args"].get("speculative-config") or {}
    if isinstance(speculative, str):
        try:
            speculative = json.loads(speculative) or {}
        except (ValueError, RecursionError):
            return [f"speculative-config is {speculative!r}, which is no JSON; write it as a dictionary."]
    if not isinstance(speculative, dict):
        return [f"speculative-config is {speculative!r}, which is no dictionary; write it as one."]
    if checkpoint["mtp"] or speculative.get("model") or not str(speculative.get("method", "")).endswith("mtp"):
        return []
    return [
        f"speculative-config asks for MTP and {plan['checkpoint_path']} has no tensors for "
        f"model.layers.{checkpoint['model'].get('layers')}, so it cannot draft; set speculative-config to null in "
        "hy3_engine_args, or use a conversion that kept them."
    ]


def checkpoint_problems(checkpoint: Facts, plan: Facts) -> list[str]:
    """One sentence for each way in which ``checkpoint`` cannot be served by ``plan``; empty is good."""
    return (
        _shard_problems(checkpoint, plan)
        + _head_problems(checkpoint["model"], plan)
        + _drafter_problems(checkpoint, plan)
    )


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"checkpoint_problems": checkpoint_problems}
