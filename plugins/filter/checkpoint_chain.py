# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``checkpoint_chain``: which nodes a node pulls a checkpoint from, and where it serves it."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._chain import Nodes, addresses, listening, sources

DOCUMENTATION = r"""
name: checkpoint_chain
short_description: Which nodes a node pulls a checkpoint from, and where it serves it
version_added: 0.1.0
description:
  - The nodes are a chain from the head. Each pulls from the one before it, or else from those before that.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - C(hy3_plan.node) of each node by its name, the head first. Of it, C(address) and C(links) are read.
  node:
    type: str
    required: true
    description: Name of the node.
  pullers:
    type: list
    elements: str
    required: true
    description: The nodes that will pull.
  port:
    type: int
    required: true
    description: TCP port of the daemons.
"""

EXAMPLES = r"""
- name: Say where the second node pulls from
  ansible.builtin.debug:
    msg: "{{ nodes | sparks.hy3.checkpoint_chain(node='spark-2', pullers=['spark-2'], port=8730) }}"
  vars:
    nodes:
      spark-1: {address: 192.168.100.1}
      spark-2: {address: 192.168.100.2}
"""

RETURN = r"""
_value:
  description:
    - C(sources) for M(sparks.hy3.checkpoint_pull), the best first; C(listen), the addresses at which a node that pulls
      reaches this one; and C(allowed), every address from which a node may come.
  type: dict
"""


def checkpoint_chain(nodes: Nodes, node: str, pullers: list[str], port: int) -> dict[str, t.Any]:
    """Where one node of a chain pulls from, and where it serves."""
    return {
        "sources": [{**source, "port": port} for source in sources(node, nodes)],
        "listen": listening(node, nodes, pullers),
        "allowed": addresses(nodes),
    }


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"checkpoint_chain": checkpoint_chain}
