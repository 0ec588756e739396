# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``fabric_problems``: how the nodes are cabled, and what is wrong with it."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._topology import judge

DOCUMENTATION = r"""
name: fabric_problems
short_description: How the nodes of a cluster are cabled, and what is wrong with it
version_added: 0.1.0
description:
  - Judges the fabric as a whole from what M(sparks.hy3.fabric_info) found on each node. Two ports are on one link when
    the address of each lies in the subnet of the other.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The result of M(sparks.hy3.fabric_info) of each node, by the name of the node.
  environment:
    type: dict
    default: {}
    description: What the processes of the engine will have in their environment on all nodes.
"""

EXAMPLES = r"""
- name: Refuse links that cannot carry the cluster
  ansible.builtin.assert:
    that: (facts_by_node | sparks.hy3.fabric_problems(environment=hy3_plan.engine_env)).problems | length == 0
"""

RETURN = r"""
_value:
  description: The judgement.
  type: dict
  contains:
    topology:
      description:
        - V(pair) is two nodes, V(switch) more of them in one subnet, V(ring) more of them with a link of its own for
          each two neighbours.
        - V(broken) is any other set of links.
      type: str
      choices: [single, pair, switch, ring, broken]
    rails:
      description: The subnets on which every node is. A pair with two rails has two.
      type: list
      elements: str
      sample: [192.168.100.0/24]
    reach:
      description: For each node, the address at which it reaches each other node.
      type: dict
      sample: {spark-1: {spark-2: 192.168.100.2}, spark-2: {spark-1: 192.168.100.1}}
    other_rails:
      description: For each node, the addresses in use of the others besides their fabric addresses.
      type: dict
      sample: {spark-1: [192.168.200.2], spark-2: [192.168.200.1]}
    problems:
      description: What keeps the ranks from talking over RoCE, one sentence each, that of a node with its name.
      type: list
      elements: str
    warnings:
      description: What works but is slow or not known, one sentence each.
      type: list
      elements: str
    nccl:
      description: What NCCL will do, in sentences.
      type: list
      elements: str
    set:
      description: By node, the variables that NCCL and Gloo need there, without the GID index.
      type: dict
      sample: {spark-1: {NCCL_IB_HCA: =rocep1s0f1, NCCL_SOCKET_IFNAME: =enp1s0f1np1, GLOO_SOCKET_IFNAME: enp1s0f1np1}}
    unset:
      description: Variables that must not be set on any node.
      type: list
      elements: str
      sample: [NCCL_IB_GID_INDEX]
"""


def fabric_problems(
    nodes: t.Mapping[str, t.Mapping[str, t.Any]], environment: t.Mapping[str, t.Any] | None = None
) -> dict[str, t.Any]:
    """The judgement of ``_topology.judge``."""
    return judge(nodes, environment or {})


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"fabric_problems": fabric_problems}
