# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Whether full-size packets reach a peer, and by which interface.

A link whose ends differ in MTU lets ping and the TCP handshake pass and loses what is larger, so a small packet proves
nothing. The echo is our own, because a minimal node has no ``ping``.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
import typing as t
from collections.abc import Callable
from dataclasses import dataclass

ROUTE_COMMAND = ["-4", "route", "get"]
# linux/in.h, which Python's socket module does not have: set DF and ignore what was learned about the path.
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3
ECHO_REPLY, ECHO_REQUEST = 0, 8
IP_HEADER, ICMP_HEADER, MAX_PACKET = 20, 8, 65535
# Of a small packet, as ping sends it.
SMALL_BYTES = 84
ATTEMPTS = 3
REPLY_SECONDS = 0.7


@dataclass(frozen=True)
class Route:
    """Where the kernel would send a packet; empty strings for what it does not say."""

    interface: str
    source: str
    gateway: str


@dataclass(frozen=True)
class Path:
    """What was tried to one peer; ``small`` and ``full`` are None where it could not be tried."""

    address: str
    route: Route
    bytes: int
    small: bool | None
    full: bool | None
    error: str


def parse_route(text: str) -> Route:
    """Read the first line of ``ip -4 route get ADDRESS``, such as ``10.77.0.2 dev enp1s0f1np1 src 10.77.0.1``."""
    words = text.splitlines()[0].split() if text.strip() else []
    said = dict(zip(words, words[1:], strict=False))
    return Route(said.get("dev", ""), said.get("src", ""), said.get("via", ""))


def route_problem(route: Route, *, peer: str, interface: str, address: str) -> str | None:
    """Return why a route does not lead through the fabric, in one sentence, or None if it does.

    Args:
        route: What the kernel answered for the peer.
        peer: The peer's fabric address.
        interface: The node's fabric interface.
        address: The node's fabric address.
    """
    if not route.interface:
        return f"There is no route to {peer}; give the fabric addresses of both nodes one subnet."
    if route.interface != interface:
        return (
            f"{peer} is reached through {route.interface}, not through the fabric interface {interface}, so traffic "
            "would take the slow network; correct the subnet of the fabric address or the routes."
        )
    if route.source != address:
        return (
            f"Packets to {peer} leave {interface} with the source {route.source or 'unknown'}, not {address}; give the "
            "fabric address the peer's subnet, or take the other address off."
        )
    return None


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2]))
    if len(data) % 2:
        total += data[-1] << 8
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def echo_request(*, identifier: int, sequence: int, size: int) -> bytes:
    """Return an ICMP echo request that makes an IP packet of ``size`` bytes."""
    payload = bytes(index & 0xFF for index in range(size - IP_HEADER - ICMP_HEADER))
    head = struct.pack("!BBHHH", ECHO_REQUEST, 0, 0, identifier, sequence)
    return struct.pack("!BBHHH", ECHO_REQUEST, 0, checksum(head + payload), identifier, sequence) + payload


def is_reply(packet: bytes, request: bytes) -> bool:
    """Return whether an IP packet is the whole echo of a request."""
    header = (packet[0] & 0x0F) * 4 if packet else 0
    message = packet[header:]
    # Type, code and checksum differ; identifier, sequence and payload come back as they were.
    return header >= IP_HEADER and message[:2] == bytes([ECHO_REPLY, 0]) and message[4:] == request[4:]


def check_path(peer: str, *, route: Route, interface: str, mtu: int | None, echo: Callable[[str, int], bool]) -> Path:
    """Send a small packet and one as large as the interface allows, both undivided; none if the route leads elsewhere.

    Args:
        peer: The peer's fabric address.
        route: Where the kernel would send it.
        interface: The fabric interface.
        mtu: MTU of the interface, in bytes; None if not known.
        echo: Sends a packet of so many bytes to an address and returns whether it came back; may raise OSError.
    """
    largest = min(mtu or 0, MAX_PACKET)
    small: bool | None = None
    full: bool | None = None
    error = ""
    try:
        if route.interface == interface:
            small = echo(peer, SMALL_BYTES)
        if small and largest > SMALL_BYTES:
            full = echo(peer, largest)
    except OSError as exc:
        error = exc.strerror or str(exc)
    return Path(peer, route, max(largest, SMALL_BYTES), small, full, error)


class Echo:
    """Sends ICMP echo requests with DF from one address through one interface; needs CAP_NET_RAW."""

    def __init__(self, interface: str, source: str) -> None:
        self.interface = interface
        self.source = source
        self.sequence = 0

    def __call__(self, peer: str, size: int) -> bool:
        """Return whether a packet of ``size`` bytes came back whole within about two seconds.

        Raises:
            OSError: Nothing can be sent at all.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, self.interface.encode() + b"\0")
            sender.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            sender.bind((self.source, 0))
            return any(self._once(sender, peer, size) for _attempt in range(ATTEMPTS))

    def _once(self, sender: socket.socket, peer: str, size: int) -> bool:
        self.sequence += 1
        request = echo_request(identifier=os.getpid() & 0xFFFF, sequence=self.sequence, size=size)
        try:
            sender.sendto(request, (peer, 0))
        except OSError as exc:
            if exc.errno in (errno.EMSGSIZE, errno.EHOSTUNREACH, errno.ENETUNREACH):
                return False
            raise
        return self._answered(sender, peer, request)

    @staticmethod
    def _answered(sender: socket.socket, peer: str, request: bytes) -> bool:
        deadline = time.monotonic() + REPLY_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            sender.settimeout(left)
            try:
                packet, origin = t.cast("tuple[bytes, tuple[str, int]]", sender.recvfrom(65535))
            except TimeoutError:
                return False
            except OSError as exc:  # the peer or a router refused an earlier packet
                if exc.errno in (errno.EHOSTUNREACH, errno.EMSGSIZE):
                    return False
                raise
            if origin[0] == peer and is_reply(packet, request):
                return True
        return False
