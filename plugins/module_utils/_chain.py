# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which node a checkpoint is pulled from, and by which addresses. Pure.

The nodes are a chain from the head: each pulls from the one before it, so that every link carries one copy.
"""

from __future__ import annotations

import typing as t
from collections.abc import Collection, Mapping

# By name, in the order of the chain. ``address`` is a node's on the fabric; ``links`` are those of a ring, each with
# the ``peer`` that it leads to and this node's own ``address`` on it.
Nodes = Mapping[str, Mapping[str, t.Any]]


def sources(me: str, nodes: Nodes) -> list[dict[str, str]]:
    """Name and address of the nodes before one, the nearest first and the head last."""
    names = list(nodes)
    return [{"name": name, "address": address_for(me, nodes[name])} for name in reversed(names[: names.index(me)])]


def address_for(me: str, source: Mapping[str, t.Any]) -> str:
    """The address at which node ``me`` reaches a source: the source's own on the link between them, if there is one."""
    for link in source.get("links") or ():
        if link.get("peer") == me:
            return str(link["address"])
    return str(source["address"])


def listening(me: str, nodes: Nodes, pullers: Collection[str]) -> list[str]:
    """The addresses at which the ``pullers`` after a node in the chain reach it."""
    names = list(nodes)
    return sorted({address_for(name, nodes[me]) for name in names[names.index(me) + 1 :] if name in pullers})


def addresses(nodes: Nodes) -> list[str]:
    """Every address from which a node of the chain may come."""
    own = {str(node["address"]) for node in nodes.values()}
    return sorted(own.union(*({str(link["address"]) for link in node.get("links") or ()} for node in nodes.values())))
