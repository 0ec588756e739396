# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import errno
import struct
from collections.abc import Callable

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._path import (
    Path,
    Route,
    check_path,
    checksum,
    echo_request,
    is_reply,
    parse_route,
    route_problem,
)
from hypothesis import given, settings
from hypothesis import strategies as st

PEER, OWN, NETDEV = "10.77.0.2", "10.77.0.1", "enp1s0f1np1"
FABRIC = Route(NETDEV, OWN, "")

ROUTES: dict[str, tuple[str, Route]] = {
    "direct": (f"{PEER} dev {NETDEV} src {OWN} uid 0 \n    cache \n", FABRIC),
    "gateway": (f"{PEER} via 192.168.1.1 dev wlP9s9 src 192.168.1.20", Route("wlP9s9", "192.168.1.20", "192.168.1.1")),
    "local": ("local 127.0.0.1 dev lo src 127.0.0.1 uid 0", Route("lo", "127.0.0.1", "")),
    "none": ("", Route("", "", "")),
    "blank": (" \n\n", Route("", "", "")),
    "cut off": (f"{PEER} dev", Route("", "", "")),
}


@pytest.mark.parametrize(("text", "expected"), ROUTES.values(), ids=ROUTES)
def test_parse_route(text: str, expected: Route) -> None:
    assert parse_route(text) == expected


ROUTE_PROBLEMS: dict[str, tuple[Route, str | None]] = {
    "through the fabric": (FABRIC, None),
    "no route": (Route("", "", ""), "There is no route to 10.77.0.2; "),
    "Wi-Fi": (Route("wlP9s9", "192.168.1.20", "192.168.1.1"), "10.77.0.2 is reached through wlP9s9, not through"),
    "another source": (Route(NETDEV, "169.254.8.8", ""), "Packets to 10.77.0.2 leave enp1s0f1np1 with the source 169."),
    "no source": (Route(NETDEV, "", ""), "Packets to 10.77.0.2 leave enp1s0f1np1 with the source unknown, not 10."),
}


@pytest.mark.parametrize(("route", "start"), ROUTE_PROBLEMS.values(), ids=ROUTE_PROBLEMS)
def test_route_problem(route: Route, start: str | None) -> None:
    problem = route_problem(route, peer=PEER, interface=NETDEV, address=OWN)
    assert problem is None if start is None else str(problem).startswith(start)


def test_checksum() -> None:
    # The example of RFC 1071, section 3: the sum is ddf2.
    assert checksum(bytes.fromhex("0001f203f4f5f6f7")) == 0xFFFF ^ 0xDDF2
    assert checksum(b"\x01") == 0xFFFF ^ 0x0100


@pytest.mark.parametrize("size", [28, 84, 1500, 9000])
def test_echo_request_fills_the_packet(size: int) -> None:
    request = echo_request(identifier=7, sequence=1, size=size)
    assert 20 + len(request) == size
    assert checksum(request) == 0
    assert struct.unpack("!BBHHH", request[:8])[3:] == (7, 1)


REQUEST = echo_request(identifier=7, sequence=2, size=84)
HEADER = bytes([0x45]) + bytes(19)
REPLY = bytes([0, 0, 1, 2]) + REQUEST[4:]
REPLIES: dict[str, tuple[bytes, bool]] = {
    "whole": (HEADER + REPLY, True),
    "with IP options": (bytes([0x46]) + bytes(23) + REPLY, True),
    "our own request": (HEADER + REQUEST, False),
    "of another sequence": (HEADER + bytes(4) + echo_request(identifier=7, sequence=3, size=84)[4:], False),
    "cut off": (HEADER + REPLY[:-1], False),
    "unreachable": (HEADER + bytes([3, 4, 0, 0]) + REQUEST[4:], False),
    "empty": (b"", False),
}


@pytest.mark.parametrize(("packet", "expected"), REPLIES.values(), ids=REPLIES)
def test_is_reply(packet: bytes, expected: bool) -> None:
    assert is_reply(packet, REQUEST) is expected


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_packet_is_too_odd(packet: bytes) -> None:
    assert is_reply(packet, REQUEST) in (False, True)


def link(largest: int, error: OSError | None = None, sizes: list[int] | None = None) -> Callable[[str, int], bool]:
    """A link that carries packets up to a size."""

    def echo(_peer: str, size: int) -> bool:
        if error:
            raise error
        if sizes is not None:
            sizes.append(size)
        return size <= largest

    return echo


# id, MTU, what the link carries, (bytes, small, full)
PATHS: dict[str, tuple[int | None, int, tuple[int, bool | None, bool | None]]] = {
    "healthy": (9000, 9000, (9000, True, True)),
    "a bridge of 1500 between": (9000, 1500, (9000, True, False)),
    "no peer": (9000, 0, (9000, False, None)),
    "MTU not known": (None, 9000, (84, True, None)),
    "no MTU": (0, 9000, (84, True, None)),
    "loopback": (65536, 65535, (65535, True, True)),
}


@pytest.mark.parametrize(("mtu", "largest", "expected"), PATHS.values(), ids=PATHS)
def test_check_path(mtu: int | None, largest: int, expected: tuple[int, bool | None, bool | None]) -> None:
    found = check_path(PEER, route=FABRIC, interface=NETDEV, mtu=mtu, echo=link(largest))
    assert (found.bytes, found.small, found.full, found.error) == (*expected, "")


def test_check_path_without_permission() -> None:
    refused = PermissionError(errno.EPERM, "Operation not permitted")
    found = check_path(PEER, route=FABRIC, interface=NETDEV, mtu=9000, echo=link(0, refused))
    assert found == Path(PEER, FABRIC, 9000, None, None, "Operation not permitted")


def test_nothing_large_is_sent_to_a_peer_that_does_not_answer() -> None:
    sizes: list[int] = []
    check_path(PEER, route=FABRIC, interface=NETDEV, mtu=9000, echo=link(0, sizes=sizes))
    assert sizes == [84]


def test_nothing_is_sent_where_the_route_leads_elsewhere() -> None:
    sizes: list[int] = []
    found = check_path(PEER, route=FABRIC, interface="eth9", mtu=9000, echo=link(9000, sizes=sizes))
    assert (sizes, found.small, found.full) == ([], None, None)
