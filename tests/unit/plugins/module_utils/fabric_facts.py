# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts of nodes as module ``fabric_info`` returns them, written short."""

from __future__ import annotations

import typing as t
from collections.abc import Sequence

Facts = dict[str, t.Any]


def port(netdev: str, place: str | None, *, hca: str = "", index: int = 3, **other: t.Any) -> tuple[Facts, Facts]:
    """A netdev with an address (and prefix length) or None, and its HCA, healthy but for what ``other`` says.

    ``other`` belongs to the netdev, but for ``active``, ``link_layer``, ``gids`` and ``rate``, which are the HCA's.
    """
    name = hca or netdev.replace("en", "roce", 1).partition("np")[0]
    gids = [{"index": index, "address": place.partition("/")[0], "netdev": netdev}] if place else []
    facts = {
        "name": netdev,
        "mtu": 9000,
        "carrier": True,
        "parent": None,
        "addresses": [place] if place else [],
        "speed": 200.0,
        "hcas": [name],
        "pci": None,
        "twin": None,
    }
    behind = {
        "name": name,
        "port": 1,
        "active": other.pop("active", True),
        "link_layer": other.pop("link_layer", "Ethernet"),
        "speed": other.pop("rate", 200.0),
        "gids": other.pop("gids", gids),
        "error": "",
    }
    return {**facts, **other}, behind


def node(*ports: tuple[Facts, Facts], selected: Sequence[str] = (), **other: t.Any) -> Facts:
    """A node whose fabric address is that of its first port; ``selected`` HCAs, or the one behind it."""
    netdevs, hcas = [each[0] for each in ports], [each[1] for each in ports]
    address = netdevs[0]["addresses"][0].partition("/")[0] if netdevs and netdevs[0]["addresses"] else None
    return {
        "address": address,
        "interface": netdevs[0]["name"] if address else None,
        "mtu": netdevs[0]["mtu"] if address else None,
        "selected": [f"{name}:1" for name in selected or [hca["name"] for hca in hcas[:1] if address]],
        "netdevs": netdevs,
        "hcas": hcas,
        "problems": [],
        "notes": [],
        **other,
    }
