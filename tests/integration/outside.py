# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Somebody on a network of the lab's nodes who is none of them: a network namespace of this machine, on one bridge."""

from __future__ import annotations

import json
import subprocess
import sys
import typing as t
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible_collections.sparks.hy3.tests.integration.lab import run


class Network(t.NamedTuple):
    """A bridge of the lab, a link that the lab's own `down` would find, too, and an address that no node has."""

    bridge: str
    link: str
    address: str
    nodes: dict[str, str]


NETWORKS = {
    "management": Network(
        "hy3lab-mgmt", "hy3lab-out-m", "198.18.10.253", {"spark-1": "198.18.10.1", "spark-2": "198.18.10.2"}
    ),
    "fabric": Network(
        "hy3lab-fabric", "hy3lab-out-f", "198.18.20.253", {"spark-1": "198.18.20.1", "spark-2": "198.18.20.2"}
    ),
}

# Both read their request from standard input and print what they found, as JSON.
PORTS = """
import asyncio, json, sys
address, seconds = json.load(sys.stdin)
async def opens(port, gate):
    async with gate:
        try:
            _reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), seconds)
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True
async def main():
    gate = asyncio.Semaphore(500)
    found = await asyncio.gather(*(opens(port, gate) for port in range(1, 65536)))
    print(json.dumps([port for port, one in enumerate(found, 1) if one]))
asyncio.run(main())
"""
HTTP = """
import http.client, json, sys
address, port, requests = json.load(sys.stdin)
def ask(method, path, headers):
    connection = http.client.HTTPConnection(address, port, timeout=30)
    try:
        connection.putrequest(method, path)
        for name, value in headers.items():
            connection.putheader(name, value)
        body = b"{}" if method in ("POST", "PUT", "PATCH") else b""
        if body:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()
print(json.dumps([ask(*request) for request in requests]))
"""

Request = tuple[str, str, dict[str, str]]


class Outsider:
    """Asks from within the namespace."""

    def __init__(self, name: str, network: Network) -> None:
        self._name = name
        self.network = network

    def _ask(self, program: str, request: object) -> t.Any:
        done = subprocess.run(
            ["ip", "netns", "exec", self._name, sys.executable, "-I", "-c", program],
            input=json.dumps(request), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    def open_ports(self, node: str) -> set[int]:
        """The TCP ports of a node, of all 65535, that take a connection within two seconds."""
        return set(self._ask(PORTS, [self.network.nodes[node], 2]))

    def http(self, node: str, port: int, requests: list[Request]) -> list[tuple[int, str]]:
        """Status and text of the answer to each request (method, path, headers); status 0 where there is none."""
        found = self._ask(HTTP, [self.network.nodes[node], port, requests])
        return [(status, text) for status, text in found]


@contextmanager
def outsider(network: Network) -> Iterator[Outsider]:
    """A namespace with one address on the network. It goes at the end, and its link with it."""
    name = network.link
    if Path("/run/netns", name).exists():  # what a run that was killed left
        run("ip", "netns", "delete", name)
    mtu = Path("/sys/class/net", network.bridge, "mtu").read_text().strip()
    run("ip", "netns", "add", name)
    try:
        # Both ends as large as the others on the bridge, which would shrink otherwise.
        ends = ["mtu", mtu, "type", "veth", "peer", "name", "outside", "mtu", mtu, "netns", name]
        run("ip", "link", "add", network.link, *ends)
        run("ip", "link", "set", network.link, "master", network.bridge, "up")
        run("ip", "-n", name, "address", "add", f"{network.address}/24", "dev", "outside")
        run("ip", "-n", name, "link", "set", "outside", "up")
        yield Outsider(name, network)
    finally:
        run("ip", "netns", "delete", name)
