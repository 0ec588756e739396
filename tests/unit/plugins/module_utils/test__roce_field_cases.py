# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What went wrong on other people's clusters, by the number of its report; each must come out right here."""

from __future__ import annotations

import json
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._fabric import find_twins, node_findings
from ansible_collections.sparks.hy3.plugins.module_utils._path import Path as PeerPath
from ansible_collections.sparks.hy3.plugins.module_utils._path import parse_route, route_problem
from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    Gid,
    Port,
    RoceError,
    Sysfs,
    choose_index,
    choose_interface,
    environment,
    gid_type,
    index_text,
    parse_selector,
    parse_table,
    port_warnings,
    resolve,
    select_ports,
)
from ansible_collections.sparks.hy3.plugins.module_utils._topology import RING_ENVIRONMENT, judge
from ansible_collections.sparks.hy3.plugins.modules.roce_gid import describe_port
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.fabric_facts import Facts, node, port
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import Row, make_sysfs, v4

CASES = {f"B{number:02}" for number in (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26)}
# Parts of reports that are true and that this code has no say in.
NOT_OURS = {
    "B14 what NCCL would do with text": "what it does with a bad value is moot: such a value is never written",
    "B22 names of Ansible facts": "interfaces come from `ip -j addr show`, whose names are the kernel's own",
    "B25 channel lines": "NCCL prints them after the start that the preflight refuses",
    "B26 port_xmit_data": "it needs a burst of RDMA; role verify reads what NCCL itself says it uses",
}

V1, V2 = "IB/RoCE v1", "RoCE v2"
FE80 = "fe80:0000:0000:0000:02aa:bbff:fe00:0001"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
A, B, TWIN = "enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"


def table(*rows: tuple[int, str, str | None] | Row) -> list[Gid]:
    return parse_table(
        {"index": row[0], "gid": row[1], "type": row[2], "ndev": row[3] if len(row) == 4 else ""} for row in rows
    )


def rows_of(indexes: dict[int, str]) -> list[Gid]:
    return table(*((index, v4(address), V2) for index, address in indexes.items()))


def chosen(address: str, **tables: list[Gid]) -> int:
    return choose_index({f"{name}:1": rows for name, rows in tables.items()}, IPv4Address(address), "")[0]


def refusal(address: str, **tables: list[Gid]) -> str:
    with pytest.raises(RoceError) as caught:
        chosen(address, **tables)
    return str(caught.value)


def test_b01_each_node_has_its_own_index() -> None:
    head = table((0, FE80, V1), (1, FE80, V2), (2, "fe80::5c1e:22d0:9e31:77a0", V2), (3, v4("10.77.0.1"), V1))
    head += table((4, v4("10.77.0.1"), V2))
    worker = table((0, FE80, V1), (1, FE80, V2), (2, v4("10.77.0.2"), V1), (3, v4("10.77.0.2"), V2))
    assert (chosen("10.77.0.1", a=head), chosen("10.77.0.2", a=worker)) == (4, 3)
    found = judge(
        {"head": node(port(B, "10.77.0.1/24", index=4)), "worker": node(port(B, "10.77.0.2/24", index=3))}, {}
    )
    assert "The GID index differs (head 4, worker 3)" in found["nccl"][1]
    for index, wrong in (("4", "worker"), ("3", "head")):
        (problem,) = judge(
            {"head": node(port(B, "10.77.0.1/24", index=4)), "worker": node(port(B, "10.77.0.2/24", index=3))},
            {"NCCL_IB_GID_INDEX": index},
        )["problems"]
        assert problem.startswith(f"{wrong}: NCCL_IB_GID_INDEX={index} is set on all nodes, and 10.77.0.")


def test_b02_empty_slots_are_skipped() -> None:
    """Those above the last row are no news: a table has 256."""
    empty: list[Row] = [(index, ZERO, None, "") for index in range(4)]
    rows: list[Row] = [(4, FE80, V1, "net1"), (5, FE80, V2, "net1")]
    rows += [(6, v4("10.77.4.12"), V1, "net1"), (7, v4("10.77.4.12"), V2, "net1")]
    assert [row.index for row in table(*empty, *rows)] == [4, 5, 6, 7]
    assert chosen("10.77.4.12", a=table(*empty, *rows)) == 7
    found = describe_port(Port("a", 1), table(*empty, *rows), 7, [str(index) for index in range(16)])
    assert found["skipped"] == [0, 1, 2, 3]


def test_b04_texts_of_the_type() -> None:
    raw = ["IB/RoCE v1\n", "RoCE v1\n", "RoCE v2\n", "RoCE v2", "  RoCE v2 \n", "\n", "", "RoCE v3\n"]
    assert [gid_type(text) == "v2" for text in raw] == [False, False, True, True, True, False, False, False]
    odd = table((3, v4("10.77.0.1"), "RoCE v3\n"))
    assert port_warnings(Port("a", 1), odd) == ["a:1 has GIDs of an unknown type at 3; they are not used"]


def test_b05_ten_comes_after_nine(tmp_path: Path) -> None:
    rows = [(index, v4("10.77.0.1"), kind, B) for index, kind in ((2, V1), (3, V2), (10, V1), (11, V2))]
    sysfs = Sysfs(str(make_sysfs(tmp_path, {"rocep1s0f1:1": rows})))
    found = sysfs.table(Port("rocep1s0f1", 1))
    assert [row.index for row in found] == [2, 3, 10, 11]
    assert choose_index({"a:1": found}, IPv4Address("10.77.0.1"), B) == (
        3,
        ["10.77.0.1 stands at the GID indexes 3, 11; the lowest is taken"],
    )


def test_b07_only_mapped_gids() -> None:
    gids = [
        "fd00:0000:0000:0000:0000:ffff:c0a8:6401",
        "fe80:0000:0000:0000:0000:ffff:c0a8:6401",
        "::ffff:192.168.100.1",
        "0000:0000:0000:0000:0000:FFFF:C0A8:6401",
        "::ffff:c0a8:6401",
    ]
    wanted = IPv4Address("192.168.100.1")
    rows = table(*((index, gid, V2) for index, gid in enumerate(gids)))
    assert [row.gid.ipv4_mapped == wanted for row in rows] == [False, False, True, True, True]
    assert [row.usable for row in rows] == [False, False, True, True, True]


def test_b08_link_local_only_when_asked_for(tmp_path: Path) -> None:
    rows = table((0, FE80, V1), (1, FE80, V2), (2, v4("169.254.18.7"), V1), (3, v4("169.254.18.7"), V2))
    assert chosen("169.254.18.7", a=rows) == 3
    assert "No RoCE v2 GID for 10.77.0.1 on a:1: usable are 3 (169.254.18.7)" in refusal("10.77.0.1", a=rows)
    sysfs = Sysfs(str(make_sysfs(tmp_path, {"a:1": [(3, v4("169.254.18.7"), V2, B), (5, v4("10.77.0.1"), V2, B)]})))
    own = json.dumps([{"ifname": B, "addr_info": [{"local": "169.254.18.7"}, {"local": "10.77.0.1"}]}])

    def found(address: str | None, interface: str | None) -> tuple[int | None, bool]:
        answer = resolve(address=address, hca=None, interface=interface, sysfs=sysfs, list_addresses=lambda: own)
        return answer.index, any("link-local address and may change" in text for text in answer.warnings)

    assert found("169.254.18.7", None) == (3, True)
    assert found(None, B) == (5, False)


def test_b08_a_twins_own_address_is_not_taken() -> None:
    twin = rows_of({3: "169.254.7.7"})
    assert "(a:1 has 3; b:1 has none)" in refusal("10.77.0.1", a=rows_of({3: "10.77.0.1"}), b=twin)


def test_b10_two_hcas_intersect() -> None:
    one, two = rows_of({1: "10.80.0.1", 5: "10.80.0.9"}), rows_of({3: "10.81.0.1", 5: "10.81.0.9"})
    assert chosen("10.80.0.9", rocep1s0f1=one, roceP2p1s0f1=two) == 5
    said = refusal("10.80.0.9", rocep1s0f1=one, roceP2p1s0f1=rows_of({2: "10.82.0.1"}))
    assert "no usable GID index in common (rocep1s0f1:1 has 1, 5; roceP2p1s0f1:1 has 2)" in said


def test_b11_a_twin_without_an_address() -> None:
    one = table((1, FE80, V2), (3, v4("10.77.0.1"), V2))
    twin = table((0, "fe80::3", V1), (1, "fe80::3", V2))
    assert "(rocep1s0f1:1 has 3; roceP2p1s0f1:1 has none)" in refusal("10.77.0.1", rocep1s0f1=one, roceP2p1s0f1=twin)
    both = node(port(B, "10.77.0.1/24"), port(TWIN, None), selected=["rocep1s0f1", "roceP2p1s0f1"])
    (problem,) = node_findings(both, [])[0]
    assert problem.startswith("roceP2p1s0f1:1 is selected and has no RoCE v2 GID with an IPv4 address")


B13: dict[str, list[str]] = {
    "mlx5_1": ["mlx5_1:1", "mlx5_10:8", "mlx5_11:1"],
    "=mlx5_1": ["mlx5_1:1"],
    "^mlx5_1": [],
    "^=mlx5_1": ["mlx5_10:8", "mlx5_11:1"],
    "=mlx5_1:1,mlx5_10:08": ["mlx5_1:1", "mlx5_10:8"],
}


@pytest.mark.parametrize(("selector", "expected"), B13.items())
def test_b13_selectors(selector: str, expected: list[str]) -> None:
    ports = [Port("mlx5_1", 1), Port("mlx5_10", 8), Port("mlx5_11", 1)]
    assert [each.label for each in select_ports(parse_selector(selector), ports)] == expected


def test_b14_five_different_things() -> None:
    values: list[int | str | None] = [None, "", 0, 3, "3\n"]
    rendered = [environment(index=value, hca="=a", interface="e").get("NCCL_IB_GID_INDEX") for value in values]
    assert rendered == [None, None, "0", "3", "3"]
    for text in ("auto", "010"):
        with pytest.raises(RoceError):
            index_text(text)


def test_b16_hcas_are_found_behind_netdevs(tmp_path: Path) -> None:
    rows: dict[str, list[Row]] = {"rocep1s0f1:1": [], "roceP2p1s0f1:1": []}
    devices = {B: ["rocep1s0f1"], TWIN: ["roceP2p1s0f1"], "enP7s7": []}
    sysfs = Sysfs(str(make_sysfs(tmp_path, rows, devices=devices)))
    ports = sysfs.ports()
    assert [sysfs.ports_of(name, ports)[0].name for name in (B, TWIN)] == ["rocep1s0f1", "roceP2p1s0f1"]
    for name, message in {"enP7s7": "No RDMA device behind enP7s7", "bond0": "has no parent device .* member"}.items():
        with pytest.raises(RoceError, match=message):
            sysfs.ports_of(name, ports)
    assert find_twins({B: "0000:01:00.1", TWIN: "0002:01:00.1", "bond0": None}) == {B: TWIN, TWIN: B}


def test_b17_left_and_right_port(tmp_path: Path) -> None:
    found = judge({"head": node(port(A, "10.77.0.1/24")), "worker": node(port(B, "10.77.0.2/24"))}, {})
    assert {name: (env["NCCL_IB_HCA"], env["NCCL_SOCKET_IFNAME"]) for name, env in found["set"].items()} == {
        "head": ("=rocep1s0f0", f"={A}"),
        "worker": ("=rocep1s0f1", f"={B}"),
    }
    rows: dict[str, list[Row]] = {"rocep1s0f0:1": [], "rocep1s0f1:1": [(3, v4("10.77.0.2"), V2, B)]}
    worker = Sysfs(str(make_sysfs(tmp_path, rows, down=["rocep1s0f0:1"])))
    own = json.dumps([{"ifname": B, "addr_info": [{"local": "10.77.0.2"}]}])
    with pytest.raises(RoceError, match=r"No selected HCA port is ACTIVE \(rocep1s0f0:1\)"):
        resolve(address="10.77.0.2", hca="rocep1s0f0", interface=None, sysfs=worker, list_addresses=lambda: own)


def test_b17_one_value_for_both() -> None:
    nodes = {
        "head": node(port(A, "10.77.0.1/24")),
        "worker": node(port(B, "10.77.0.2/24"), port(A, None, active=False)),
    }
    (problem,) = judge(nodes, {"NCCL_IB_HCA": "rocep1s0f0"})["problems"]
    assert problem.startswith(
        "worker: NCCL_IB_HCA=rocep1s0f0 is set on all nodes (No selected HCA port is ACTIVE (rocep1s0f0:1)"
    )


BOTH = ["rocep1s0f1", "roceP2p1s0f1"]
B19: dict[str, tuple[Facts, int, int]] = {
    "a": (node(port(B, "10.77.0.1/24"), port(TWIN, "10.77.0.11/24"), selected=BOTH), 1, 0),
    "a, one of them used": (node(port(B, "10.77.0.1/24"), port(TWIN, "10.77.0.11/24")), 0, 1),
    "b": (node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24"), selected=BOTH), 0, 0),
    "c": (node(port(B, "10.77.0.1/24"), port(TWIN, None)), 0, 0),
}


@pytest.mark.parametrize(("facts", "problems", "notes"), B19.values(), ids=B19)
def test_b19_twins_and_subnets(facts: Facts, problems: int, notes: int) -> None:
    found = node_findings(facts, [])
    assert (len(found[0]), len(found[1])) == (problems, notes)
    assert all("are in one subnet" in sentence for sentence in found[0] + found[1])


def test_b19_rails_that_do_not_meet() -> None:
    nodes = {
        "n1": node(port(B, "10.77.0.1/24"), port(TWIN, "10.78.0.1/24"), selected=BOTH),
        "n2": node(port(B, "10.77.0.2/24"), port(TWIN, "10.79.0.1/24"), selected=BOTH),
    }
    assert [problem.partition(" (")[0] for problem in judge(nodes, {})["problems"]] == [
        "roceP2p1s0f1 of n1",
        "roceP2p1s0f1 of n2",
    ]


def test_b20_mtu_after_a_firmware_capsule() -> None:
    ends = {"a": node(port(TWIN, "10.78.0.1/24")), "b": node(port(TWIN, "10.78.0.2/24", mtu=1500))}
    (problem,) = judge(ends, {})["problems"]
    assert problem.startswith("enP2p1s0f1np1 of a has MTU 9000 and enP2p1s0f1np1 of b 1500")


def test_b22_secondary_address_and_vlan() -> None:
    own = {B: ["192.168.7.9", "10.77.0.1"], f"{B}.40": ["10.40.0.1"], "tap-x1": ["10.9.9.9"]}
    text = json.dumps(
        [{"ifname": name, "addr_info": [{"local": local} for local in found]} for name, found in own.items()]
    )
    assert choose_interface(IPv4Address("10.77.0.1"), text, None) == B
    assert choose_interface(IPv4Address("10.9.9.9"), text, None) == "tap-x1"


def test_b23_ring_addresses() -> None:
    nodes = {
        "n1": node(port(A, "10.1.12.1/24"), port(B, "10.1.13.1/24")),
        "n2": node(port(A, "10.1.12.2/24"), port(B, "10.1.23.2/24")),
        "n3": node(port(A, "10.1.13.3/24"), port(B, "10.1.23.3/24")),
    }
    reach = judge(nodes, RING_ENVIRONMENT)["reach"]
    assert (reach["n1"]["n2"], reach["n1"]["n3"], reach["n2"]["n3"]) == ("10.1.12.2", "10.1.13.3", "10.1.23.3")


def test_b25_a_triangle_needs_more_than_stock_nccl() -> None:
    nodes = {
        "n0": node(port(A, "10.71.1.1/24"), port(B, "10.71.3.2/24")),
        "n1": node(port(A, "10.71.2.1/24"), port(B, "10.71.1.2/24")),
        "n2": node(port(A, "10.71.3.1/24"), port(B, "10.71.2.2/24")),
    }
    found = judge(nodes, {})
    assert found["topology"] == "ring"
    assert [problem.partition(",")[0] for problem in found["problems"]] == ["The nodes form a ring without a switch"]


B26: dict[str, bool] = {
    "10.77.0.2 via 192.168.1.1 dev wlP9s9 src 192.168.1.20": False,
    "10.77.0.2 dev enp1s0f1np1 src 169.254.8.8": False,
    "10.77.0.2 dev enp1s0f1np1 src 10.77.0.1": True,
}


@pytest.mark.parametrize(("text", "right"), B26.items())
def test_b26_the_route_is_looked_up(text: str, right: bool) -> None:
    problem = route_problem(parse_route(text), peer="10.77.0.2", interface=B, address="10.77.0.1")
    assert (problem is None) is right


def test_b26_a_gateway_inside_the_subnet() -> None:
    route = parse_route("10.77.0.2 via 10.77.0.254 dev enp1s0f1np1 src 10.77.0.1")
    path = PeerPath(address="10.77.0.2", route=route, bytes=9000, small=True, full=True, error="")
    problems, (warning,) = node_findings(node(port(B, "10.77.0.1/24")), [path])
    assert (problems, warning.partition(",")[0]) == ([], "10.77.0.2 is reached through the gateway 10.77.0.254")


def test_every_case_is_here() -> None:
    assert {name[5:8].upper() for name in globals() if name.startswith("test_b")} == CASES
    assert {name[:3] for name in NOT_OURS} <= CASES
