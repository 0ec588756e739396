# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random tables, and garbage in every file: never a traceback, never a wrong index, one sentence."""

from __future__ import annotations

import json
import typing as t
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from tempfile import TemporaryDirectory

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._fabric import node_findings, parse_links, read_node
from ansible_collections.sparks.hy3.plugins.module_utils._roce import (
    RoceError,
    Sysfs,
    choose_index,
    choose_interface,
    index_text,
    nccl_chooses,
    parse_selector,
    parse_table,
    resolve,
)
from ansible_collections.sparks.hy3.plugins.module_utils._topology import judge
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.fabric_facts import Facts, node, port
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.roce_sysfs import Row, make_sysfs, v4
from hypothesis import given, settings
from hypothesis import strategies as st

OWN, NETDEV = "10.77.0.1", "eth1"
quick = settings(max_examples=150, deadline=None)
# Each example writes a tree.
slow = settings(max_examples=15, deadline=None)

GIDS = [
    "0000:0000:0000:0000:0000:0000:0000:0000",
    "fe80:0000:0000:0000:02aa:bbff:fe00:0001",
    "fd00:0000:0000:0000:0000:ffff:0a4d:0001",  # ends as the right one does
    v4(OWN),
    v4("10.77.0.9"),
    v4("169.254.7.7"),
]
ROWS = st.dictionaries(
    st.integers(0, 127),
    st.tuples(
        st.sampled_from(GIDS),
        st.sampled_from(["IB/RoCE v1", "RoCE v2", "RoCE v3", None]),
        st.sampled_from(["", NETDEV, f"{NETDEV}.40"]),
    ),
    max_size=12,
).map(lambda table: [(index, *row) for index, row in table.items()])
LINKS = json.dumps(
    [
        {"ifname": "lo", "mtu": 65536, "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]},
        {"ifname": NETDEV, "mtu": 9000, "addr_info": [{"family": "inet", "local": OWN, "prefixlen": 24}]},
    ]
)


def right(rows: list[Row]) -> list[int]:
    """The rows that may be used, written as plainly as the rule is said."""
    rows = [row for row in rows if row[1] == v4(OWN) and row[2] == "RoCE v2"]
    own = [row[0] for row in rows if row[3] == NETDEV]
    return own or [row[0] for row in rows if row[3] == ""]


def one_sentence(call: Callable[[], t.Any]) -> t.Any:
    """The answer, or None for a refusal in one line."""
    try:
        return call()
    except (RoceError, Hy3Error) as exc:
        assert str(exc)
        assert "\n" not in str(exc)
        return None


def resolve_in(root: Path, hca: str | None = None, version: str | None = None) -> t.Any:
    return one_sentence(
        lambda: resolve(
            address=OWN,
            hca=hca,
            interface=None,
            sysfs=Sysfs(str(root)),
            list_addresses=lambda: LINKS,
            nccl_version=version,
        )
    )


@quick
@given(ROWS)
def test_never_a_wrong_index(rows: list[Row]) -> None:
    table = parse_table({"index": index, "gid": gid, "type": kind, "ndev": ndev} for index, gid, kind, ndev in rows)
    found = one_sentence(lambda: choose_index({"a:1": table}, IPv4Address(OWN), NETDEV)[0])
    assert found == min(right(rows), default=None)


@slow
@given(ROWS)
def test_never_a_wrong_index_from_files(rows: list[Row]) -> None:
    with TemporaryDirectory() as place:
        found = resolve_in(make_sysfs(Path(place), {"a:1": rows}, devices={NETDEV: ["a"]}))
    assert (found.index if found else None) == min(right(rows), default=None)


@slow
@given(ROWS, ROWS, st.sampled_from([None, "2.20.5", "2.28.9"]))
def test_never_a_wrong_index_of_two_hcas(one: list[Row], two: list[Row], version: str | None) -> None:
    with TemporaryDirectory() as place:
        root = make_sysfs(Path(place), {"a:1": one, "b:1": two})
        found = resolve_in(root, "=a,b", version=version)
    # A VLAN's rows lead nowhere from the port that has the fabric address.
    usable = [
        {
            row[0]
            for row in rows
            if row[1] in (v4(OWN), v4("10.77.0.9")) and row[2] == "RoCE v2" and row[3] != f"{NETDEV}.40"
        }
        for rows in (one, two)
    ]
    own = {*right(one), *right(two)}
    if found is None:
        # No row of ours, or none in common and nobody to choose.
        assert not own or not usable[0] & usable[1]
    elif found.index is None:
        assert (version, usable[0] & usable[1]) == ("2.28.9", set())
        assert [index in rows for index, rows in zip(found.indexes.values(), usable, strict=True)] == [True, True]
    else:
        assert found.index in usable[0] & usable[1]
        assert found.index in own or found.warnings


GARBAGE = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\n", b"4: ACTIVE", b"RoCE v2", v4(OWN).encode()]))
FILES = [
    *(f"{folder}/{index}" for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs") for index in range(4)),
    *("state", "link_layer", "rate", "gids/x", "gids/٣", "gids/-1"),
]


@slow
@given(st.dictionaries(st.sampled_from(FILES), st.none() | GARBAGE, max_size=8))
def test_garbage_in_every_file(contents: dict[str, bytes | None]) -> None:
    """None stands for a file that is a directory."""
    rows: list[Row] = [(index, v4(OWN), kind, NETDEV) for index, kind in enumerate(["IB/RoCE v1", "RoCE v2"])]
    with TemporaryDirectory() as place:
        root = make_sysfs(Path(place), {"a:1": rows}, devices={NETDEV: ["a"]})
        base = root / "devices" / "a" / "ports" / "1"
        for name, content in contents.items():
            (base / name).unlink(missing_ok=True)
            if content is None:
                (base / name).mkdir()
            else:
                (base / name).write_bytes(content)
        found = resolve_in(root)
        if found:
            gid = (base / "gids" / str(found.index)).read_text().strip()
            assert gid == v4(OWN)
            assert (base / "gid_attrs" / "types" / str(found.index)).read_text().strip("\0 \r\t\n") == "RoCE v2"
        facts = one_sentence(
            lambda: read_node(address=OWN, interface=None, hca=None, sysfs=Sysfs(str(root)), links=LINKS)
        )
        problems, notes = node_findings(facts, [])
        json.dumps(judge({"s1": {**facts, "problems": problems, "notes": notes}}, {}))
        assert not any("\n" in sentence for sentence in problems + notes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ifname", "addr_info", "local", "prefixlen", "family", "mtu", "flags", "link"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
OUTPUT = st.text(max_size=40) | JSON.map(json.dumps) | st.lists(JSON, max_size=3).map(json.dumps)


@quick
@given(OUTPUT)
def test_garbage_from_ip(output: str) -> None:
    one_sentence(lambda: choose_interface(IPv4Address(OWN), output, None))
    links = one_sentence(lambda: parse_links(output))
    for link in links or []:
        assert all(IPv4Interface(place) for place in link["addresses"])
    absent = Sysfs("/nonexistent")
    one_sentence(lambda: read_node(address=OWN, interface=None, hca="a", sysfs=absent, links=output))


@quick
@given(st.text(max_size=30) | st.from_regex(r"\A[=^]?[a-z0-9_]{1,5}(:[0-9]{1,30})?(,[a-z:]{1,4})?\Z"))
def test_garbage_from_the_user(text: str) -> None:
    one_sentence(lambda: parse_selector(text))
    one_sentence(lambda: index_text(text))
    one_sentence(lambda: nccl_chooses(text))


PLACES = st.builds("10.77.{}.{}/{}".format, st.integers(0, 2), st.integers(1, 6), st.sampled_from([16, 24, 30, 32]))
PORTS = st.builds(
    port,
    st.sampled_from(["eth1", "eth2", "eth3"]),
    st.none() | PLACES,
    mtu=st.sampled_from([None, 1500, 9000]),
    carrier=st.sampled_from([None, True, False]),
    speed=st.sampled_from([None, 100.0, 200.0]),
    active=st.booleans(),
)
NODES = st.lists(st.lists(PORTS, max_size=3).map(lambda ports: node(*ports)), min_size=1, max_size=4)


@quick
@given(NODES)
def test_every_cluster_has_a_shape(nodes: list[Facts]) -> None:
    named = {f"s{number}": facts for number, facts in enumerate(nodes)}
    found = judge(named, {})
    assert found["topology"] in ("single", "pair", "switch", "ring", "broken")
    for name, peers in found["reach"].items():
        for peer, address in peers.items():
            assert name in found["reach"][peer]
            assert address in [place.partition("/")[0] for dev in named[peer]["netdevs"] for place in dev["addresses"]]
    # A cluster without a fault has a way from each node to each other.
    if not found["problems"]:
        assert all(len(found["reach"].get(name, {})) == len(named) - 1 for name in named)
