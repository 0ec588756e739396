# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node of a ring: two ports, each cabled to another node, and one address that every node reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._fabric import Facts, read_node
from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    Resolution,
    RoceError,
    Sysfs,
    main,
    nccl_of,
    resolve,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import Row, make_sysfs, v4

HOST, LEFT, RIGHT = "192.168.1.11", "192.168.12.1", "192.168.31.1"
LINKS = [{"interface": "enp1s0f0np0", "address": LEFT}, {"interface": "enp1s0f1np1", "address": RIGHT}]
NETDEVS = [link["interface"] for link in LINKS]
PLACES = {"enP7s7": HOST, "enp1s0f0np0": LEFT, "enp1s0f1np1": RIGHT}
IP = json.dumps(
    [
        {
            "ifname": name,
            "mtu": 9000,
            "flags": ["LOWER_UP"],
            "addr_info": [{"family": "inet", "local": place, "prefixlen": 24}],
        }
        for name, place in PLACES.items()
    ]
)


def tree(root: Path, right: list[Row] | None = None) -> Sysfs:
    """Unlike indexes on the two ports, as on a node whose links were configured one after the other."""
    ports: dict[str, list[Row]] = {
        "rocep1s0f0:1": [(3, v4(LEFT), "RoCE v2", NETDEVS[0])],
        "rocep1s0f1:1": [(5, v4(RIGHT), "RoCE v2", NETDEVS[1])] if right is None else right,
    }
    behind = {NETDEVS[0]: ["rocep1s0f0"], NETDEVS[1]: ["rocep1s0f1"]}
    return Sysfs(str(make_sysfs(root, ports, devices=behind).resolve()))


def found(sysfs: Sysfs, version: str | None = "2.30.3", hca: str | None = None) -> Resolution:
    return resolve(
        address=HOST,
        hca=hca,
        interface=None,
        sysfs=sysfs,
        list_addresses=lambda: IP,
        nccl_version=version,
        links=NETDEVS,
    )


def test_nccl_takes_both_ports_and_chooses_the_index_of_each(tmp_path: Path) -> None:
    answer = found(tree(tmp_path))
    assert answer.env == {
        "NCCL_IB_HCA": "=rocep1s0f0,rocep1s0f1",
        "NCCL_SOCKET_IFNAME": "=enP7s7",
        "GLOO_SOCKET_IFNAME": "enP7s7",
        "NCCL_IB_DISABLE": "0",
    }
    assert (list(answer.indexes.values()), answer.warnings) == (
        [3, 5],
        ["NCCL 2.30.3 chooses an index for each link of the ring"],
    )


def test_an_index_in_common_is_not_set_either(tmp_path: Path) -> None:
    """It stands for another subnet at the peer of each link."""
    sysfs = tree(tmp_path, right=[(3, v4(RIGHT), "RoCE v2", NETDEVS[1])])
    assert found(sysfs).index is None


@pytest.mark.parametrize("version", [None, "2.20.5"])
def test_an_nccl_that_needs_an_index_is_refused(tmp_path: Path, version: str | None) -> None:
    with pytest.raises(RoceError, match=f"this one is {version or 'of an unknown version'}: install a newer one"):
        found(tree(tmp_path), version)


def test_a_link_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RoceError, match=r"No RoCE v2 GID with an IPv4 address on rocep1s0f1:1: give each link"):
        found(tree(tmp_path, right=[(5, v4(RIGHT), "IB/RoCE v1", NETDEVS[1])]))


def test_the_users_selector_wins(tmp_path: Path) -> None:
    assert found(tree(tmp_path), hca="=rocep1s0f0").hca == "=rocep1s0f0"


def facts_of(sysfs: Sysfs, ring: list[dict[str, str]]) -> Facts:
    return read_node(address=HOST, interface=None, hca=None, sysfs=sysfs, links=IP, ring=ring)


def test_the_ports_of_the_links_carry_the_traffic(tmp_path: Path) -> None:
    facts = facts_of(tree(tmp_path), LINKS)
    assert (facts["interface"], facts["selected"], facts["problems"]) == (
        "enP7s7",
        ["rocep1s0f0:1", "rocep1s0f1:1"],
        [],
    )


def test_a_link_that_is_not_there(tmp_path: Path) -> None:
    facts = facts_of(tree(tmp_path), [LINKS[0], {"interface": "enp9s0", "address": RIGHT}])
    assert facts["selected"] == ["rocep1s0f0:1"]
    assert facts["problems"] == [
        "This node has no interface 'enp9s0' (it has enP7s7, enp1s0f0np0, enp1s0f1np1), on which NCCL and Gloo stop at "
        "the start; correct hy3_fabric_interface or leave it out."
    ]


def test_swapped_cables_are_seen_by_the_address(tmp_path: Path) -> None:
    facts = facts_of(tree(tmp_path), [LINKS[0], {"interface": "enp1s0f1np1", "address": LEFT}])
    assert facts["problems"] == [
        f"{LEFT} is on enp1s0f0np0, not on enp1s0f1np1; correct hy3_fabric_interface or leave it out."
    ]


TEST_NCCL_OF: list[tuple[list[str], str | None]] = [
    ([], None),
    (["nvidia_nccl_cu13-2.28.9.dist-info"], "2.28.9"),
    (["nvidia_nccl_cu12-2.27.5.dist-info", "nvidia_nccl_cu13-2.28.9.dist-info"], "2.28.9"),
    (["nvidia_cublas-13.0.dist-info"], None),
]


@pytest.mark.parametrize(("packages", "version"), TEST_NCCL_OF)
def test_nccl_of(tmp_path: Path, packages: list[str], version: str | None) -> None:
    for package in packages:
        (tmp_path / "lib/python3.12/site-packages" / package).mkdir(parents=True)
    assert nccl_of(str(tmp_path)) == version


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the real `ip`: lo is the host's interface, and the links are those of the table."""
    tree(tmp_path / "sys")
    (tmp_path / "venv/lib/python3.12/site-packages/nvidia_nccl_cu13-2.30.3.dist-info").mkdir(parents=True)
    output = tmp_path / "fabric.env"
    links = [argument for netdev in NETDEVS for argument in ("--link", netdev)]
    arguments = ["--address", "127.0.0.1", "--sysfs-root", str(tmp_path / "sys"), "--output", str(output), *links]
    assert main([*arguments, "--venv", str(tmp_path / "venv")]) == 0
    assert output.read_text() == (
        "NCCL_IB_HCA==rocep1s0f0,rocep1s0f1\nNCCL_SOCKET_IFNAME==lo\nGLOO_SOCKET_IFNAME=lo\nNCCL_IB_DISABLE=0\n"
    )
    assert main(arguments) == 1
    assert not output.exists()
    assert "this one is of an unknown version" in capsys.readouterr().err
