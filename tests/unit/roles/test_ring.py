# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An inventory that states links: what the units of each node get, with the real Ansible."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.render import render_units
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import read_unit, split_words

HOSTS = {"spark-1": "192.168.1.11", "spark-2": "192.168.1.12"}
LINKS = {
    "spark-1": [
        {"interface": "enp1s0f0np0", "address": "192.168.12.1", "peer": "spark-2"},
        {"interface": "enp1s0f1np1", "address": "192.168.21.1", "peer": "spark-2"},
    ],
    "spark-2": [
        {"interface": "enp1s0f0np0", "address": "192.168.12.2", "peer": "spark-1"},
        {"interface": "enp1s0f1np1", "address": "192.168.21.2", "peer": "spark-1"},
    ],
}
# As host variables would be: of the host that is asked about.
STATED = {
    "ring": {"hosts": HOSTS, "links": LINKS},
    "hy3_host_address": "{{ ring.hosts[inventory_hostname] }}",
    "hy3_fabric_links": "{{ ring.links[inventory_hostname] }}",
}


def render(root: Path, **variables: t.Any) -> str:
    """Return what went wrong, or an empty text."""
    done = render_units(root, {node: {"fabric_env": {}} for node in HOSTS}, **(STATED | variables))
    return " ".join(done.stdout.split()) if done.returncode else ""


def commands(root: Path, node: str) -> tuple[list[str], list[str]]:
    """The resolver that runs before Ray, and Ray."""
    unit = read_unit((root / node / "hy3-ray.service").read_text())
    lines = (unit["Service.ExecStartPre"][-1], unit["Service.ExecStart"][0])
    before = split_words(lines[0], command=True)
    return before[before.index("--") + 1 :], split_words(lines[1], command=True)


def test_units(tmp_path: Path) -> None:
    assert render(tmp_path) == ""
    for node, address in HOSTS.items():
        resolver, ray = commands(tmp_path, node)
        assert resolver[resolver.index("--address") + 1] == address
        assert [resolver[at + 1] for at, word in enumerate(resolver) if word == "--link"] == [
            "enp1s0f0np0",
            "enp1s0f1np1",
        ]
        assert ray[ray.index("--node-ip-address") + 1] == address
    worker = commands(tmp_path, "spark-2")[1]
    assert worker[worker.index("--address") + 1] == "192.168.1.11:6379"


TEST_REFUSED: dict[str, tuple[dict[str, t.Any], str]] = {
    "no host address": (
        {"hy3_host_address": ""},
        "spark-1 has hy3_fabric_links and no hy3_host_address, and Ray needs",
    ),
    "a stranger": (
        {"ring": {"hosts": HOSTS, "links": LINKS | {"spark-2": [LINKS["spark-2"][0] | {"peer": "spark-7"}]}}},
        "spark-2 has a link to 'spark-7', which is no other node of this play; write spark-1.",
    ),
    "a key that does not exist": (
        {"ring": {"hosts": HOSTS, "links": LINKS | {"spark-2": [{"netdev": "eth1", "address": "192.168.12.2"}]}}},
        "spark-2 has the link {'netdev': 'eth1', 'address': '192.168.12.2'} in hy3_fabric_links, and each needs",
    ),
}


@pytest.mark.parametrize(("variables", "sentence"), TEST_REFUSED.values(), ids=TEST_REFUSED)
def test_refused(tmp_path: Path, variables: dict[str, t.Any], sentence: str) -> None:
    assert sentence in render(tmp_path, **variables)
