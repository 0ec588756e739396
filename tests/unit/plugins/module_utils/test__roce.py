# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _roce
from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    Gid,
    Port,
    RoceError,
    Sysfs,
    choose_address,
    choose_index,
    choose_interface,
    environment,
    exact_selector,
    gid_type,
    index_text,
    is_active,
    link_layer,
    main,
    nccl_chooses,
    parse_address,
    parse_selector,
    parse_table,
    render_env_file,
    resolve,
    select_ports,
    write_atomically,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import Row, make_sysfs, v4

FE80 = "fe80:0000:0000:0000:02aa:bbff:fe00:0001"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"


def table(*rows: Row) -> list[Gid]:
    return parse_table({"index": index, "gid": gid, "type": kind, "ndev": ndev} for index, gid, kind, ndev in rows)


def usable(rows: dict[int, str], ndev: str = "") -> list[Gid]:
    return table(*((index, v4(address), "RoCE v2", ndev) for index, address in rows.items()))


def ip_output(**addresses: list[str]) -> str:
    return json.dumps(
        [
            {},
            *(
                {"ifname": name, "addr_info": [{"local": local} for local in found]}
                for name, found in addresses.items()
            ),
        ]
    )


TEST_GID_TYPE: list[tuple[str, str]] = [
    ("IB/RoCE v1\n", "v1"),
    ("RoCE v1\n", "v1"),
    ("RoCE v2\n", "v2"),
    ("RoCE v2", "v2"),
    ("  RoCE v2 \n", "v2"),
    ("RoCE v2\0", "v2"),
    ("\n", "unknown"),
    ("", "unknown"),
    ("RoCE v3\n", "unknown"),
]


@pytest.mark.parametrize(("text", "expected"), TEST_GID_TYPE)
def test_gid_type(text: str, expected: str) -> None:
    assert gid_type(text) == expected


TEST_CARRIES: list[tuple[str, bool]] = [
    ("fd00:0000:0000:0000:0000:ffff:c0a8:6401", False),
    ("fe80:0000:0000:0000:0000:ffff:c0a8:6401", False),
    ("::ffff:192.168.100.1", True),
    ("0000:0000:0000:0000:0000:FFFF:C0A8:6401", True),
    ("::ffff:c0a8:6401", True),
]


@pytest.mark.parametrize(("gid", "expected"), TEST_CARRIES)
def test_only_a_v4_mapped_gid_is_usable(gid: str, expected: bool) -> None:
    (row,) = table((3, gid, "RoCE v2", ""))
    assert (row.is_v4_mapped, row.usable) == (expected, expected)


def test_parse_table_keeps_filled_rows_in_numeric_order() -> None:
    rows: list[Row] = [
        (10, FE80, "RoCE v2", ""),
        (0, ZERO, "RoCE v2", ""),
        (1, FE80, None, ""),
        (2, FE80, "RoCE v1", ""),
    ]
    assert [(row.index, row.type) for row in table(*rows)] == [(2, "v1"), (10, "v2")]


# id, rows, address, netdev, index
TEST_ONE_HCA: list[tuple[str, list[Row], str, str, int]] = [
    (
        "head of a pair",
        [
            (0, FE80, "IB/RoCE v1", ""),
            (1, FE80, "RoCE v2", ""),
            (2, "fe80:0000:0000:0000:5c1e:22d0:9e31:77a0", "RoCE v2", ""),
            (3, v4("10.77.0.1"), "IB/RoCE v1", ""),
            (4, v4("10.77.0.1"), "RoCE v2", ""),
        ],
        "10.77.0.1",
        "",
        4,
    ),
    (
        "worker of the same pair",
        [
            (0, FE80, "IB/RoCE v1", ""),
            (1, FE80, "RoCE v2", ""),
            (2, v4("10.77.0.2"), "IB/RoCE v1", ""),
            (3, v4("10.77.0.2"), "RoCE v2", ""),
        ],
        "10.77.0.2",
        "",
        3,
    ),
    (
        "empty slots first",
        [
            *((index, ZERO, None, "") for index in range(4)),
            (4, FE80, "IB/RoCE v1", "net1"),
            (5, FE80, "RoCE v2", "net1"),
            (6, v4("10.77.4.12"), "IB/RoCE v1", "net1"),
            (7, v4("10.77.4.12"), "RoCE v2", "net1"),
        ],
        "10.77.4.12",
        "net1",
        7,
    ),
    (
        "numeric order",
        [(index, v4("10.77.0.1"), kind, "") for index, kind in ((10, "IB/RoCE v1"), (11, "RoCE v2"), (3, "RoCE v2"))],
        "10.77.0.1",
        "",
        3,
    ),
    (
        "row of the VLAN child that owns the address",
        [(2, v4("10.40.0.1"), "RoCE v2", "enp1s0f1np1"), (6, v4("10.40.0.1"), "RoCE v2", "enp1s0f1np1.40")],
        "10.40.0.1",
        "enp1s0f1np1.40",
        6,
    ),
    (
        "kernel that names no netdev",
        [(3, v4("10.78.0.1"), "RoCE v2", ""), (5, v4("10.77.0.1"), "RoCE v2", "")],
        "10.77.0.1",
        "enp1s0f1np1",
        5,
    ),
    (
        "row of the parent, whose VLAN child has the same address",
        [(2, v4("10.40.0.1"), "RoCE v2", "enp1s0f1np1.40"), (6, v4("10.40.0.1"), "RoCE v2", "enp1s0f1np1")],
        "10.40.0.1",
        "enp1s0f1np1",
        6,
    ),
    (
        "netdev of the address not known",
        [(2, v4("10.77.0.2"), "RoCE v2", "net0"), (6, v4("10.77.0.1"), "RoCE v2", "net1")],
        "10.77.0.1",
        "",
        6,
    ),
    ("index 0", [(0, v4("10.77.0.1"), "RoCE v2", "")], "10.77.0.1", "", 0),
    ("link-local", [(3, v4("169.254.18.7"), "RoCE v2", "")], "169.254.18.7", "", 3),
]


@pytest.mark.parametrize(
    ("rows", "address", "netdev", "expected"),
    [case[1:] for case in TEST_ONE_HCA],
    ids=[case[0] for case in TEST_ONE_HCA],
)
def test_choose_index_of_one_hca(rows: list[Row], address: str, netdev: str, expected: int) -> None:
    assert choose_index({"rocep1s0f1:1": table(*rows)}, IPv4Address(address), netdev)[0] == expected


def test_several_candidates_are_listed() -> None:
    assert choose_index({"a:1": usable({11: "10.77.0.1", 3: "10.77.0.1"})}, IPv4Address("10.77.0.1"), "") == (
        3,
        ["10.77.0.1 stands at the GID indexes 3, 11; the lowest is taken"],
    )


TWINS: dict[str, dict[int, str]] = {
    "rocep1s0f1:1": {1: "10.80.0.1", 5: "10.80.0.9"},
    "roceP2p1s0f1:1": {3: "10.81.0.1", 5: "10.81.0.9"},
}


def test_two_hcas_take_the_common_index() -> None:
    tables = {label: usable(rows) for label, rows in TWINS.items()}
    assert choose_index(tables, IPv4Address("10.80.0.9"), "") == (5, [])


def test_two_hcas_prefer_the_common_index_that_carries_the_address() -> None:
    tables = {"a:1": usable({1: "10.80.0.1", 5: "10.80.0.9"}), "b:1": usable({1: "10.81.0.1", 5: "10.81.0.9"})}
    assert choose_index(tables, IPv4Address("10.80.0.9"), "") == (5, [])


def test_a_common_index_without_the_address_is_said() -> None:
    tables = {label: usable(rows) for label, rows in TWINS.items()}
    assert choose_index(tables, IPv4Address("10.80.0.1"), "") == (
        5,
        ["GID index 5 is common to all HCAs but does not carry 10.80.0.1"],
    )


# Rows of the fabric's HCA and of its twin, and the index that both can use; None where there is none.
TEST_TWIN_ROWS: dict[str, tuple[list[Row], list[Row], int | None]] = {
    "an address that the twin gave itself": (
        [(3, v4("10.80.0.9"), "RoCE v2", "A")],
        [(3, v4("169.254.7.7"), "RoCE v2", "B"), (4, v4("10.81.0.9"), "RoCE v2", "B")],
        None,
    ),
    "no other": ([(3, v4("10.80.0.9"), "RoCE v2", "A")], [(3, v4("169.254.7.7"), "RoCE v2", "B")], None),
    "a VLAN of the twin": (
        [(3, v4("10.80.0.9"), "RoCE v2", "A")],
        [(3, v4("10.99.0.1"), "RoCE v2", "B.40"), (4, v4("10.81.0.9"), "RoCE v2", "B")],
        None,
    ),
    "an address that the fabric's own port gave itself": (
        [(3, v4("10.80.0.9"), "RoCE v2", "A"), (4, v4("169.254.7.7"), "RoCE v2", "A")],
        [(4, v4("10.81.0.9"), "RoCE v2", "B")],
        None,
    ),
    "the next row of both": (
        [(3, v4("169.254.1.1"), "RoCE v2", "A"), (5, v4("10.80.0.9"), "RoCE v2", "A")],
        [(3, v4("169.254.7.7"), "RoCE v2", "B"), (5, v4("10.81.0.9"), "RoCE v2", "B")],
        5,
    ),
    "a twin whose rows name no netdev": (
        [(3, v4("10.80.0.9"), "RoCE v2", "A")],
        [(3, v4("10.81.0.9"), "RoCE v2", "")],
        3,
    ),
    "VLANs of both": (
        [(2, v4("10.60.0.1"), "RoCE v2", "A"), (3, v4("10.80.0.9"), "RoCE v2", "A.40")],
        [(2, v4("10.61.0.1"), "RoCE v2", "B"), (3, v4("10.81.0.9"), "RoCE v2", "B.40")],
        3,
    ),
}


@pytest.mark.parametrize(("one", "two", "expected"), TEST_TWIN_ROWS.values(), ids=TEST_TWIN_ROWS)
@pytest.mark.parametrize("behind", [None, {"a:1": {"A"}, "b:1": {"B"}}], ids=["netdevs not known", "known"])
def test_what_counts_for_a_common_index(
    one: list[Row], two: list[Row], expected: int | None, behind: dict[str, set[str]] | None
) -> None:
    netdev = one[-1][3] if expected else "A"
    try:
        found = choose_index({"a:1": table(*one), "b:1": table(*two)}, IPv4Address("10.80.0.9"), netdev, behind)
    except RoceError as exc:
        assert "no usable GID index in common" in str(exc)
        assert expected is None
    else:
        assert found == (expected, [])


def test_a_vlan_is_known_by_what_is_behind_the_hca() -> None:
    tables = {
        "a:1": table((3, v4("10.80.0.9"), "RoCE v2", "A")),
        "b:1": table((3, v4("10.99.0.1"), "RoCE v2", "storage"), (4, v4("10.81.0.9"), "RoCE v2", "B")),
    }
    assert choose_index(tables, IPv4Address("10.80.0.9"), "A")[0] == 3
    with pytest.raises(RoceError, match=r"in common \(a:1 has 3; b:1 has 4\)"):
        choose_index(tables, IPv4Address("10.80.0.9"), "A", {"a:1": {"A"}, "b:1": {"B"}})


def test_a_fabric_of_addresses_that_ports_gave_themselves() -> None:
    tables = {"a:1": usable({3: "169.254.1.1"}, "A"), "b:1": usable({3: "169.254.7.7"}, "B")}
    assert choose_index(tables, IPv4Address("169.254.1.1"), "A") == (3, [])


# id, tables, address, parts of the sentence
TEST_NO_INDEX: list[tuple[str, dict[str, list[Gid]], str, list[str]]] = [
    (
        "no row for the address",
        {"rocep1s0f1:1": usable({3: "169.254.18.7"})},
        "10.77.0.1",
        ["No RoCE v2 GID for 10.77.0.1", "3 (169.254.18.7)"],
    ),
    (
        "only the row of a VLAN with the same address",
        {"rocep1s0f1:1": table((4, v4("10.77.0.1"), "RoCE v2", "enp1s0f1np1.40"))},
        "10.77.0.1",
        ["No RoCE v2 GID for 10.77.0.1", "4 (10.77.0.1 of enp1s0f1np1.40)"],
    ),
    (
        "only a v1 row",
        {"rocep1s0f1:1": table((3, v4("10.77.0.1"), "RoCE v1", ""))},
        "10.77.0.1",
        ["usable are none"],
    ),
    (
        "no common index",
        {"rocep1s0f1:1": usable(TWINS["rocep1s0f1:1"]), "roceP2p1s0f1:1": usable({2: "10.82.0.1"})},
        "10.80.0.9",
        ["rocep1s0f1:1 has 1, 5", "roceP2p1s0f1:1 has 2"],
    ),
    (
        "twin without an address",
        {"rocep1s0f1:1": usable({3: "10.77.0.1"}), "roceP2p1s0f1:1": table((1, FE80, "RoCE v2", ""))},
        "10.77.0.1",
        ["rocep1s0f1:1 has 3", "roceP2p1s0f1:1 has none"],
    ),
]


@pytest.mark.parametrize(
    ("tables", "address", "parts"), [case[1:] for case in TEST_NO_INDEX], ids=[case[0] for case in TEST_NO_INDEX]
)
def test_choose_index_refuses(tables: dict[str, list[Gid]], address: str, parts: list[str]) -> None:
    with pytest.raises(RoceError) as caught:
        choose_index(tables, IPv4Address(address), "enp1s0f1np1")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_rows_of_two_netdevs_need_a_name() -> None:
    rows = table((2, v4("10.40.0.1"), "RoCE v2", "eth1"), (6, v4("10.40.0.1"), "RoCE v2", "eth1.40"))
    with pytest.raises(RoceError, match="has RoCE v2 GIDs of eth1, eth1.40: name one of them in hy3_fabric_interface"):
        choose_index({"a:1": rows}, IPv4Address("10.40.0.1"), "")


TEST_VERSIONS: list[tuple[str | None, bool]] = [
    (None, False),
    ("2.20.5", False),
    ("2.21", True),
    ("2.21.5+cuda12.4", True),
    ("2.28.9\n", True),
    ("3.0.1", True),
]


@pytest.mark.parametrize(("version", "expected"), TEST_VERSIONS)
def test_nccl_chooses(version: str | None, expected: bool) -> None:
    assert nccl_chooses(version) is expected


@pytest.mark.parametrize("version", ["", "2", "v2.28", "22809", "latest"])
def test_nccl_chooses_refuses(version: str) -> None:
    with pytest.raises(RoceError, match="NCCL version .* is none: write it as 2.28.9"):
        nccl_chooses(version)


TEST_STATES: list[tuple[str | None, bool]] = [
    ("4: ACTIVE\n", True),
    (None, True),
    ("1: DOWN\n", False),
    ("2: INIT", False),
    ("5: ACTIVE_DEFER\n", False),
    ("ACTIVE", False),
    ("", False),
]


@pytest.mark.parametrize(("state", "expected"), TEST_STATES)
def test_is_active(state: str | None, expected: bool) -> None:
    assert is_active(state) is expected


def test_a_gid_that_is_none_is_refused() -> None:
    with pytest.raises(RoceError, match="GID 3 reads 'what'"):
        table((3, "what", "RoCE v2", ""))


DEVICES = [Port("mlx5_1", 1), Port("mlx5_10", 8), Port("mlx5_11", 1)]
TEST_SELECTORS: list[tuple[str, list[str]]] = [
    ("mlx5_1", ["mlx5_1:1", "mlx5_10:8", "mlx5_11:1"]),
    ("=mlx5_1", ["mlx5_1:1"]),
    ("^mlx5_1", []),
    ("^=mlx5_1", ["mlx5_10:8", "mlx5_11:1"]),
    ("=mlx5_1:1,mlx5_10:08", ["mlx5_1:1", "mlx5_10:8"]),
    (" =mlx5_1 , mlx5_11 ", ["mlx5_1:1", "mlx5_11:1"]),
    ("^absent", ["mlx5_1:1", "mlx5_10:8", "mlx5_11:1"]),
]


@pytest.mark.parametrize(("selector", "expected"), TEST_SELECTORS)
def test_select_ports(selector: str, expected: list[str]) -> None:
    assert [port.label for port in select_ports(parse_selector(selector), DEVICES)] == expected


@pytest.mark.parametrize("selector", ["", "=", "=^mlx5_1", "mlx5_1:", "mlx5_1:0x1", "mlx5_1,,mlx5_2", "a b"])
def test_parse_selector_refuses(selector: str) -> None:
    with pytest.raises(RoceError, match="HCA selector"):
        parse_selector(selector)


@pytest.mark.parametrize(("selector", "wanted"), [("=mlx5_2", "mlx5_2"), ("=mlx5_1:2", "mlx5_1:2"), ("=mlx5", "mlx5")])
def test_select_ports_refuses_an_absent_hca(selector: str, wanted: str) -> None:
    with pytest.raises(RoceError, match=f"matches {wanted}: it has mlx5_1:1, mlx5_10:8, mlx5_11:1"):
        select_ports(parse_selector(selector), DEVICES)


TEST_EXACT: list[tuple[list[Port], list[Port], str]] = [
    (DEVICES[:1], DEVICES, "=mlx5_1"),
    (DEVICES[1:], DEVICES, "=mlx5_10,mlx5_11"),
    ([Port("mlx4_0", 2)], [Port("mlx4_0", 1), Port("mlx4_0", 2)], "=mlx4_0:2"),
    ([Port("mlx4_0", 1), Port("mlx4_0", 2)], [Port("mlx4_0", 1), Port("mlx4_0", 2)], "=mlx4_0"),
]


@pytest.mark.parametrize(("chosen", "ports", "expected"), TEST_EXACT)
def test_exact_selector(chosen: list[Port], ports: list[Port], expected: str) -> None:
    assert exact_selector(chosen, ports) == expected


TWO_OWNERS = ip_output(lo=["127.0.0.1"], eth0=["192.168.7.9", "10.77.0.1"], eth1=["10.77.0.1"], eth2=["10.78.0.1"])
TEST_INTERFACE: list[tuple[str, str | None, str]] = [
    ("192.168.7.9", None, "eth0"),
    ("10.78.0.1", None, "eth2"),
    ("10.78.0.1", "eth2", "eth2"),
    ("10.77.0.1", "eth1", "eth1"),
]


@pytest.mark.parametrize(("address", "wanted", "expected"), TEST_INTERFACE)
def test_choose_interface(address: str, wanted: str | None, expected: str) -> None:
    assert choose_interface(IPv4Address(address), TWO_OWNERS, wanted) == expected


TEST_NO_INTERFACE: list[tuple[str, str | None, str, str]] = [
    ("10.9.9.9", None, TWO_OWNERS, "No interface of this node owns 10.9.9.9: it has 127.0.0.1 on lo, 192.168.7.9"),
    ("10.77.0.1", None, TWO_OWNERS, "owned by eth0, eth1: name one of them in hy3_fabric_interface"),
    ("10.78.0.1", "eth0", TWO_OWNERS, "owned by eth2, not by eth0"),
    ("10.78.0.1", None, "Usage: ip", "printed no list of links"),
    ("10.78.0.1", None, '["eth0"]', "printed no list of links"),
]


@pytest.mark.parametrize(("address", "wanted", "output", "message"), TEST_NO_INTERFACE)
def test_choose_interface_refuses(address: str, wanted: str | None, output: str, message: str) -> None:
    with pytest.raises(RoceError, match=message):
        choose_interface(IPv4Address(address), output, wanted)


TEST_LAYERS: list[tuple[str | None, str]] = [
    ("Ethernet\n", "Ethernet"),
    (None, "Ethernet"),
    ("InfiniBand\n", "InfiniBand"),
    ("", "unknown"),
    ("a\nb", "unknown"),
]


@pytest.mark.parametrize(("text", "expected"), TEST_LAYERS)
def test_link_layer(text: str | None, expected: str) -> None:
    assert link_layer(text) == expected


def test_garbage_is_not_the_absence_of_a_netdev() -> None:
    assert [row.ndev for row in table((3, FE80, "RoCE v2", "a\tb"), (4, FE80, "RoCE v2", " \n"))] == ["?", ""]


def test_a_gid_of_one_owner_decides() -> None:
    assert choose_interface(IPv4Address("10.77.0.1"), TWO_OWNERS, None, lambda name: name == "eth1") == "eth1"
    with pytest.raises(RoceError, match="owned by eth0, eth1: name one of them in hy3_fabric_interface"):
        choose_interface(IPv4Address("10.77.0.1"), TWO_OWNERS, None, lambda name: True)


TEST_ADDRESS: list[tuple[str, str]] = [("eth1", "10.77.0.1"), ("eth2", "10.78.0.1"), ("eth3", "169.254.1.1")]
OWN_ADDRESSES = ip_output(eth1=["169.254.7.7", "10.77.0.1"], eth2=["10.78.0.1"], eth3=["169.254.1.1"])


@pytest.mark.parametrize(("interface", "expected"), TEST_ADDRESS)
def test_choose_address(interface: str, expected: str) -> None:
    assert str(choose_address(OWN_ADDRESSES, interface)) == expected


TEST_NO_ADDRESS: list[tuple[str, str]] = [
    ("eth0", "eth0 owns 192.168.7.9, 10.77.0.1: set hy3_fabric_address to one of them"),
    ("eth9", "This node has no interface 'eth9' with an IPv4 address: it has 127.0.0.1 on lo, "),
]


@pytest.mark.parametrize(("interface", "message"), TEST_NO_ADDRESS)
def test_choose_address_refuses(interface: str, message: str) -> None:
    with pytest.raises(RoceError, match=message):
        choose_address(TWO_OWNERS, interface)


@pytest.mark.parametrize("text", ["", "spark-1", "10.77.0.1/24", "fe80::1", "010.77.0.1"])
def test_parse_address_refuses(text: str) -> None:
    with pytest.raises(RoceError, match="is no IPv4 address"):
        parse_address(text)


TEST_INDEX_TEXT: list[tuple[int | str | None, str | None]] = [
    (None, None),
    ("", None),
    (0, "0"),
    (3, "3"),
    ("3\n", "3"),
]


@pytest.mark.parametrize(("value", "expected"), TEST_INDEX_TEXT)
def test_index_text(value: int | str | None, expected: str | None) -> None:
    assert index_text(value) == expected
    env = environment(index=value, hca="=rocep1s0f1", interface="eth1")
    assert env.get("NCCL_IB_GID_INDEX") == expected


@pytest.mark.parametrize("value", ["auto", "None", "010", "-1", "0x3", "٣"])
def test_index_text_refuses(value: str) -> None:
    with pytest.raises(RoceError, match="no decimal number without leading zeros"):
        index_text(value)


def test_render_env_file() -> None:
    assert render_env_file(environment(index=0, hca="=rocep1s0f1,roceP2p1s0f1", interface="enp1s0f1np1")) == (
        "NCCL_IB_GID_INDEX=0\n"
        "NCCL_IB_HCA==rocep1s0f1,roceP2p1s0f1\n"
        "NCCL_SOCKET_IFNAME==enp1s0f1np1\n"
        "GLOO_SOCKET_IFNAME=enp1s0f1np1\n"
        "NCCL_IB_DISABLE=0\n"
    )


@pytest.mark.parametrize("value", ["", " ", "a b", "a\nb", 'a"'])
def test_render_env_file_refuses(value: str) -> None:
    with pytest.raises(RoceError, match="NCCL_IB_HCA would be"):
        render_env_file({"NCCL_IB_HCA": value})


SPARK_DEVICES = {
    "enp1s0f1np1": ["rocep1s0f1"],
    "enP2p1s0f1np1": ["roceP2p1s0f1"],
    "enP7s7": [],
}
SPARK_PORTS: dict[str, list[Row]] = {
    "rocep1s0f1:1": [
        (0, FE80, "IB/RoCE v1", "enp1s0f1np1"),
        (1, FE80, "RoCE v2", "enp1s0f1np1"),
        (2, ZERO, None, ""),
        (3, v4("10.77.0.1"), "RoCE v2", "enp1s0f1np1"),
        (10, v4("10.40.0.1"), "RoCE v2", "enp1s0f1np1.40"),
    ],
    "roceP2p1s0f1:1": [(3, v4("10.78.0.1"), "RoCE v2", "enP2p1s0f1np1"), (5, v4("10.9.0.1"), "RoCE v9", "")],
    "rocep1s0f0:1": [(3, v4("10.79.0.1"), "RoCE v2", "enp1s0f0np0")],
    "mlx4_0:1": [(0, v4("10.60.0.1"), "RoCE v2", "ens4")],
    "mlx4_0:2": [(0, v4("10.61.0.1"), "RoCE v2", "ens4d1")],
}
SPARK_ADDRESSES = ip_output(
    **{
        "enp1s0f1np1": ["10.77.0.1"],
        "enp1s0f1np1.40": ["10.40.0.1"],
        "enP2p1s0f1np1": ["10.78.0.1"],
        "enp1s0f0np0": ["10.79.0.1"],
        "enP7s7": ["192.168.1.5"],
        "bond0": ["10.50.0.1"],
        "ens4d1": ["10.61.0.1"],
    }
)


@pytest.fixture
def spark(tmp_path: Path) -> Sysfs:
    devices = {**SPARK_DEVICES, "enp1s0f0np0": ["rocep1s0f0"], "ens4d1": ["mlx4_0"]}
    return Sysfs(str(make_sysfs(tmp_path / "sys", SPARK_PORTS, devices=devices, down=["rocep1s0f0:1"])))


def found(sysfs: Sysfs, address: str, hca: str | None = None) -> Any:
    return resolve(address=address, hca=hca, interface=None, sysfs=sysfs, list_addresses=lambda: SPARK_ADDRESSES)


# id, address, selector, (index, exact selector, netdev)
TEST_RESOLVE: list[tuple[str, str, str | None, tuple[int, str, str]]] = [
    ("domain 0", "10.77.0.1", None, (3, "=rocep1s0f1", "enp1s0f1np1")),
    ("domain 2 keeps its capital", "10.78.0.1", None, (3, "=roceP2p1s0f1", "enP2p1s0f1np1")),
    ("VLAN by its GID row", "10.40.0.1", None, (10, "=rocep1s0f1", "enp1s0f1np1.40")),
    ("port of a two-port HCA", "10.61.0.1", None, (0, "=mlx4_0:2", "ens4d1")),
    ("both twins", "10.77.0.1", "=rocep1s0f1,roceP2p1s0f1", (3, "=roceP2p1s0f1,rocep1s0f1", "enp1s0f1np1")),
    ("prefix that also means a dead port", "10.77.0.1", "rocep1s0f", (3, "=rocep1s0f1", "enp1s0f1np1")),
]


@pytest.mark.parametrize(
    ("address", "hca", "expected"), [case[1:] for case in TEST_RESOLVE], ids=[case[0] for case in TEST_RESOLVE]
)
def test_resolve(spark: Sysfs, address: str, hca: str | None, expected: tuple[int, str, str]) -> None:
    answer = found(spark, address, hca)
    assert (answer.index, answer.hca, answer.interface) == expected


def test_resolve_warns(spark: Sysfs) -> None:
    assert found(spark, "10.77.0.1", "=rocep1s0f1,roceP2p1s0f1,rocep1s0f0").warnings == [
        "rocep1s0f0:1 is not ACTIVE and is left out",
        "roceP2p1s0f1:1 has GIDs of an unknown type at 5; they are not used",
    ]


def test_resolve_warns_of_a_link_local_address(tmp_path: Path) -> None:
    sysfs = Sysfs(str(make_sysfs(tmp_path, {"a:1": [(3, v4("169.254.18.7"), "RoCE v2", "eth1")]})))
    answer = resolve(
        address="169.254.18.7",
        hca=None,
        interface=None,
        sysfs=sysfs,
        list_addresses=lambda: ip_output(eth1=["169.254.18.7"]),
    )
    assert answer.index == 3
    assert answer.warnings == ["169.254.18.7 is a link-local address and may change: give the fabric a static one"]


TEST_NO_RESOLUTION: list[tuple[str, str | None, str]] = [
    ("192.168.1.5", None, "No RDMA device behind enP7s7"),
    ("10.50.0.1", None, "bond0 has no parent device and no GID row: use a member port"),
    ("10.79.0.1", None, r"No selected HCA port is ACTIVE \(rocep1s0f0:1\)"),
    ("10.77.0.1", "=rocep1s0f0", "No selected HCA port is ACTIVE"),
    ("10.77.0.1", "=roceP2p1s0f1", "No RoCE v2 GID for 10.77.0.1 on roceP2p1s0f1:1"),
    ("10.77.0.1", "^roce,mlx", r"HCA selector '\^roce,mlx' excludes every HCA of this node: it has mlx4_0:1, mlx4_0:2"),
]


@pytest.mark.parametrize(("address", "hca", "message"), TEST_NO_RESOLUTION)
def test_resolve_refuses(spark: Sysfs, address: str, hca: str | None, message: str) -> None:
    with pytest.raises(RoceError, match=message):
        found(spark, address, hca)


@pytest.mark.parametrize("owners", [["enp1s0f1np1.40"], ["enp1s0f1np1.40", "br0"]], ids=["VLAN", "two owners"])
def test_an_hca_without_a_table_is_no_matter_for_others(spark: Sysfs, owners: list[str]) -> None:
    (spark.infiniband / "zz" / "ports" / "1").mkdir(parents=True)
    own = ip_output(**{name: ["10.40.0.1"] for name in owners})
    answer = resolve(address="10.40.0.1", hca=None, interface=None, sysfs=spark, list_addresses=lambda: own)
    assert (answer.index, answer.hca, answer.interface) == (10, "=rocep1s0f1", "enp1s0f1np1.40")
    with pytest.raises(RoceError, match="zz:1 has no GID table"):
        found(spark, "10.77.0.1", "=rocep1s0f1,zz")


def test_a_bond_is_a_port_of_its_own(tmp_path: Path) -> None:
    rows: dict[str, list[Row]] = {
        "a:1": [(3, v4("10.77.0.1"), "RoCE v2", "eth1")],
        "bond_0:1": [(3, v4("10.78.0.1"), "RoCE v2", "bond0")],
    }
    sysfs = Sysfs(str(make_sysfs(tmp_path, rows, devices={"eth1": ["a"], "eth2": ["bond_0"]})))
    assert sysfs.behind(Port("bond_0", 1)) == {"eth2"}
    (sysfs.net / "bond0" / "bonding").mkdir(parents=True)
    (sysfs.net / "eth2" / "master").symlink_to(sysfs.net / "bond0")
    assert sysfs.behind(Port("bond_0", 1)) == {"eth2", "bond0"}
    answer = resolve(address=None, hca="=a,bond_0", interface="eth1", sysfs=sysfs, list_addresses=lambda: OWN_ADDRESSES)
    assert answer.index == 3


def test_nccl_does_not_get_a_twins_own_address(tmp_path: Path) -> None:
    rows: dict[str, list[Row]] = {
        "a:1": [(3, v4("10.77.0.1"), "RoCE v2", "eth1")],
        "b:1": [(4, v4("169.254.7.7"), "RoCE v2", "eth2"), (5, v4("10.78.0.1"), "RoCE v2", "eth2")],
    }
    sysfs = Sysfs(str(make_sysfs(tmp_path, rows, devices={"eth1": ["a"], "eth2": ["b"]})))

    def both() -> Any:
        return resolve(
            address=None,
            hca="=a,b",
            interface="eth1",
            sysfs=sysfs,
            list_addresses=lambda: OWN_ADDRESSES,
            nccl_version="2.28.9",
        )

    assert (both().index, list(both().indexes.values())) == (None, [3, 5])
    (sysfs.infiniband / "b" / "ports" / "1" / "gids" / "5").unlink()
    with pytest.raises(RoceError, match=r"in common \(a:1 has 3; b:1 has none\)"):
        both()


def resolve_twins(tmp_path: Path, other: int, version: str | None) -> Any:
    ports: dict[str, list[Row]] = {
        "a:1": [(3, v4("10.77.0.1"), "RoCE v2", "eth1")],
        "b:1": [(other, v4("10.78.0.1"), "RoCE v2", "eth2"), (9, v4("10.79.0.1"), "RoCE v2", "eth2")],
    }
    return resolve(
        address=None,
        hca="=a,b",
        interface="eth1",
        sysfs=Sysfs(str(make_sysfs(tmp_path, ports))),
        list_addresses=lambda: OWN_ADDRESSES,
        nccl_version=version,
    )


def test_unlike_hcas_are_left_to_an_nccl_that_can_choose(tmp_path: Path) -> None:
    answer = resolve_twins(tmp_path, 5, "2.28.9")
    assert (answer.index, list(answer.indexes.values())) == (None, [3, 5])
    assert "NCCL_IB_GID_INDEX" not in answer.env
    assert answer.warnings == [
        "NCCL 2.28.9 chooses an index for each HCA, for there is no common one (a:1 has 3; b:1 has 5, 9)"
    ]


@pytest.mark.parametrize("version", [None, "2.20.5"])
def test_unlike_hcas_are_refused_otherwise(tmp_path: Path, version: str | None) -> None:
    with pytest.raises(RoceError, match="no usable GID index in common"):
        resolve_twins(tmp_path, 5, version)


def test_like_hcas_have_their_index_with_any_nccl(tmp_path: Path) -> None:
    answer = resolve_twins(tmp_path, 3, "2.28.9")
    assert (answer.index, list(answer.indexes.values()), str(answer.address)) == (3, [3, 3], "10.77.0.1")


def test_an_infiniband_port_is_left_out(spark: Sysfs) -> None:
    (spark.infiniband / "roceP2p1s0f1" / "ports" / "1" / "link_layer").write_text("InfiniBand\n")
    answer = found(spark, "10.77.0.1", "=rocep1s0f1,roceP2p1s0f1")
    assert (answer.hca, answer.warnings) == (
        "=rocep1s0f1",
        ["roceP2p1s0f1:1 has the link layer InfiniBand and is left out"],
    )
    with pytest.raises(
        RoceError, match=r"No selected HCA port has the link layer Ethernet \(roceP2p1s0f1:1: InfiniBand"
    ):
        found(spark, "10.78.0.1")


def test_neither_address_nor_interface(spark: Sysfs) -> None:
    with pytest.raises(RoceError, match="Neither an address nor an interface is given"):
        resolve(address=None, hca=None, interface=None, sysfs=spark, list_addresses=lambda: SPARK_ADDRESSES)


def test_one_address_on_a_vlan_and_its_parent(spark: Sysfs) -> None:
    both = ip_output(**{"enp1s0f1np1": ["10.40.0.1"], "enp1s0f1np1.40": ["10.40.0.1"]})
    answer = resolve(address="10.40.0.1", hca=None, interface=None, sysfs=spark, list_addresses=lambda: both)
    assert (answer.index, answer.interface) == (10, "enp1s0f1np1.40")


def test_a_node_without_hca_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RoceError, match="has no HCA: load the RDMA driver"):
        found(Sysfs(str(tmp_path)), "10.77.0.1")


def test_a_missing_type_is_an_empty_slot(spark: Sysfs) -> None:
    types = spark.infiniband / "rocep1s0f1" / "ports" / "1" / "gid_attrs" / "types"
    for index in (0, 1, 2):
        (types / str(index)).unlink()
    assert found(spark, "10.77.0.1").index == 3


def test_an_unreadable_row_is_no_empty_slot(spark: Sysfs) -> None:
    types = spark.infiniband / "rocep1s0f1" / "ports" / "1" / "gid_attrs" / "types" / "3"
    types.unlink()
    types.mkdir()
    with pytest.raises(RoceError, match="Cannot read .*types/3: Is a directory"):
        found(spark, "10.77.0.1")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The file as a role puts it on a node."""
    return Path(shutil.copy(_roce.__file__, tmp_path / "roce.py"))


def run_program(program: Path, sysfs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["/usr/bin/python3", "-I", str(program), "--sysfs-root", str(sysfs), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def test_program_writes_the_file(program: Path, tmp_path: Path) -> None:
    # lo really owns 127.0.0.1, so the answer of the real `ip` fits this table.
    sysfs = make_sysfs(tmp_path / "sys", {"rocelo:1": [(0, ZERO, None, ""), (6, v4("127.0.0.1"), "RoCE v2", "lo")]})
    output = tmp_path / "roce.env"
    done = run_program(program, sysfs, "--address", "127.0.0.1", "--output", str(output))
    assert (done.returncode, done.stderr) == (0, "")
    assert output.read_text().splitlines()[:3] == [
        "NCCL_IB_GID_INDEX=6",
        "NCCL_IB_HCA==rocelo",
        "NCCL_SOCKET_IFNAME==lo",
    ]
    assert stat.S_IMODE(output.stat().st_mode) == 0o644


def test_program_takes_the_address_of_the_interface(program: Path, tmp_path: Path) -> None:
    sysfs = make_sysfs(tmp_path / "sys", {"rocelo:1": [(6, v4("127.0.0.1"), "RoCE v2", "lo")]})
    output = tmp_path / "roce.env"
    done = run_program(program, sysfs, "--interface", "lo", "--output", str(output))
    assert (done.returncode, done.stdout) == (0, "GID index 6 on =rocelo (lo) for 127.0.0.1\n")


def test_program_leaves_the_index_to_nccl(program: Path, tmp_path: Path) -> None:
    rows = {"a:1": [(6, v4("127.0.0.1"), "RoCE v2", "lo")], "b:1": [(4, v4("127.0.0.2"), "RoCE v2", "lo")]}
    output = tmp_path / "roce.env"
    arguments = ["--address", "127.0.0.1", "--hca", "a,b", "--output", str(output)]
    done = run_program(program, make_sysfs(tmp_path / "sys", rows), *arguments, "--nccl-version", "2.28.9")
    assert (done.returncode, done.stdout) == (0, "No GID index on =a,b (lo) for 127.0.0.1\n")
    assert output.read_text().splitlines()[0] == "NCCL_IB_HCA==a,b"
    done = run_program(program, tmp_path / "sys", *arguments)
    assert (done.returncode, output.exists()) == (1, False)


def test_program_leaves_no_file_when_it_fails(program: Path, tmp_path: Path) -> None:
    sysfs = make_sysfs(tmp_path / "sys", {"rocelo:1": [(6, v4("127.0.0.2"), "RoCE v2", "lo")]})
    output = tmp_path / "run" / "roce.env"
    output.parent.mkdir()
    output.write_text("NCCL_IB_GID_INDEX=3\n")
    done = run_program(program, sysfs, "--address", "127.0.0.1", "--output", str(output))
    assert done.returncode == 1
    assert done.stderr == (
        "No RoCE v2 GID for 127.0.0.1 on rocelo:1: usable are 6 (127.0.0.2), so correct hy3_fabric_address or hy3_hca\n"
    )
    assert list(output.parent.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "roce.env").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "roce.env", "")
    assert list(tmp_path.iterdir()) == [tmp_path / "roce.env"]


def test_program_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sysfs = make_sysfs(tmp_path / "sys", {"rocelo:1": [(6, v4("127.0.0.1"), "RoCE v2", "lo")]})
    output = tmp_path / "absent" / "roce.env"
    assert main(["--address", "127.0.0.1", "--sysfs-root", str(sysfs), "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"Cannot write {output}: No such file or directory\n"
