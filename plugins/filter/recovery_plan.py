# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``recovery_plan``: what to do about a sick cluster, from what was seen of its nodes."""

from __future__ import annotations

import time
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._recovery import recovery_plan as plan_of

DOCUMENTATION = r"""
name: recovery_plan
short_description: What to do about a sick cluster, from what was seen of its nodes
version_added: 0.1.0
description:
  - Judges the state of each node, plans what the evidence supports in its order, and says what only a person can do.
  - An engine that answers is never stopped. Nothing is planned twice, so that one may act, look again and ask again
    until there is nothing left.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - Registered results by node, and of each by what it is. C(view) is of M(sparks.hy3.ssh_probe), C(login) of
        M(ansible.builtin.ping), C(peers) of M(sparks.hy3.reach_info), C(status) of M(sparks.hy3.engine_status),
        C(smoke) of M(sparks.hy3.chat_smoke), C(orphans) of M(sparks.hy3.engine_orphans) and C(memory) of
        M(sparks.hy3.memory_budget).
      - C(wreck) is the kernel's log of the boot before this one.
      - Any of it may be missing or have failed.
  plan:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  done:
    type: list
    elements: dict
    default: []
    description: The C(actions) of earlier answers that were done.
  start_timeout:
    type: int
    required: true
    description: How long the engine may take to start, in seconds.
  wait:
    type: int
    required: true
    description: How long a node that does not answer is waited for, in seconds. V(0) for not at all.
"""

EXAMPLES = r"""
- name: Say what is to be done
  ansible.builtin.debug:
    msg: "{{ {'spark-1': {'login': ping}} | sparks.hy3.recovery_plan(plan=hy3_plan, start_timeout=2400, wait=300) }}"
"""

RETURN = r"""
_value:
  description:
    - C(nodes) has of each node its C(state), C(why), what is C(also) the matter, the C(evidence), and whether it was
      C(reached). The states are V(wedged), V(unreachable), V(ssh_down), V(no_login), V(cut_off), V(other_cluster),
      V(blind), V(orphans), V(engine_dead), V(worker_lost), V(leftover), V(memory_held), V(engine_wrong),
      V(engine_silent), V(starting), V(stopped) and V(healthy); docs/recover.md says what each of them is.
    - C(actions) are dictionaries of C(do) (V(stop), V(end) or V(wait)), C(node), C(what), C(why) and the node's
      C(state).
    - C(advice) are dictionaries of C(node) (empty for all), C(sentence) and whether only a C(person) can do it.
    - C(answers) is whether the engine answers, C(healthy) whether every node is, too, and C(person) whether any advice
      needs one.
  type: dict
"""


def recovery_plan(
    evidence: t.Mapping[str, t.Any],
    plan: t.Mapping[str, t.Any],
    start_timeout: int,
    wait: int,
    done: t.Sequence[t.Mapping[str, t.Any]] = (),
) -> dict[str, t.Any]:
    """The plan as plain data."""
    found = plan_of(evidence, plan, done=list(done), now=time.time(), start_timeout=start_timeout, wait=wait)
    return t.cast("dict[str, t.Any]", found)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"recovery_plan": recovery_plan}
