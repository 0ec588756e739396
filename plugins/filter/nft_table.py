# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``nft_table``: who may reach a node's ports, as a file for nft."""

from __future__ import annotations

import hashlib
import ipaddress
import typing as t

DOCUMENTATION = r"""
name: nft_table
short_description: Who may reach a node's ports, as a file for nft
version_added: 0.1.0
description:
  - Writes one table that keeps everybody but the cluster's other nodes from the cluster's ports. What is not named
    stays as it is. Loading the file again replaces the table in one step.
  - The table carries the digest of its rules as a comment, so that what the kernel has can be compared with what is
    wanted.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - C(table), its name in family C(inet); C(interface) and C(peers), through which and from which addresses the
        other nodes come; C(ports), a list of ports and ranges such as V(10100-10299) that only they may reach.
      - C(user), whose listening ports in C(ephemeral), the range from which the kernel picks, only they may reach too.
      - C(api), null, or C(port) and C(sources) of a port that these networks may reach.
"""

EXAMPLES = r"""
- name: Write it
  ansible.builtin.copy:
    content: "{{ firewall | sparks.hy3.nft_table }}"
    dest: /etc/hy3/hy3.nft
    mode: "0644"
"""

RETURN = r"""
_value:
  description: The file's content.
  type: str
"""


def _from(address: str) -> str:
    """nft's match of a source address or network of either family."""
    return f"ip{'6' if ipaddress.ip_network(address).version == 6 else ''} saddr {address}"


def _chain(name: str, rules: list[str]) -> list[str]:
    return ["", f"    chain {name} {{", *(f"        {rule}" for rule in rules), "    }"]


def nft_table(firewall: t.Mapping[str, t.Any]) -> str:
    """The file for ``nft -f`` from the parts that the documentation of this filter lists."""
    interface, peers, api = firewall["interface"], firewall["peers"], firewall["api"]
    # New connections only: the answers to our own ones may come to any port.
    rules = [
        "type filter hook input priority -10; policy accept;",
        'iif "lo" accept',
        "tcp flags & (fin | syn | rst | ack) != syn accept",
        f"tcp dport {{ {', '.join(str(port) for port in firewall['ports'])} }} jump nodes",
    ]
    if api:
        rules.append(f"tcp dport {api['port']} jump api")
    lines = _chain("input", rules)
    lines += _chain("nodes", [*(f'iifname "{interface}" {_from(peer)} accept' for peer in peers), "drop"])
    if api:
        lines += _chain("api", [*(f"{_from(source)} accept" for source in api["sources"]), "drop"])
    # A port that the kernel picked has no number to name, but its answer to a new connection has an owner.
    lines += _chain(
        "output",
        [
            "type filter hook output priority -10; policy accept;",
            'oif "lo" accept',
            "tcp flags & (fin | syn | rst | ack) != (syn | ack) accept",
            *([f"tcp sport {api['port']} accept"] if api else []),
            f'meta skuid "{firewall["user"]}" tcp sport {firewall["ephemeral"]} jump answers',
        ],
    )
    lines += _chain("answers", [*(f'oifname "{interface}" ip daddr {peer} accept' for peer in peers), "drop"])
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    name = f"table inet {firewall['table']}"
    # The first two lines take away what an earlier run loaded, in the same transaction.
    return "\n".join([name, f"delete {name}", f"{name} {{", f'    comment "{digest}"', *lines, "}", ""])


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"nft_table": nft_table}
