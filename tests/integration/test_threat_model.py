# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What docs/threat_model.md says of strangers, seen from a network namespace that is no node.

Needs a lab (`make lab-up`) and root. Leaves a cluster that serves as the inventory says.
"""

from __future__ import annotations

import json
import re
import shlex
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import NODES, on, play
from ansible_collections.sparks.hy3.tests.integration.outside import NETWORKS, Outsider, Request, outsider

KEY = "hy3-outsider-key-0123456789abcdef"
SSH, API = 22, 8000
HEAD = "spark-1"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
# Where a request is answered without the key, and why: method and path as patterns.
OPEN = {
    (r".*", r"/health|/ping"): "they say that the server lives and nothing else, and load balancers have no key",
    (r"OPTIONS", r".*"): "a browser asks before it may send the key; no handler of the engine's answers",
}
# As a path may be written to look like an open one.
DISGUISES = [
    *("//v1/models", "/v1/models/", "/health/../v1/models", "/ping/../invocations", "/health;/v1/models", "/HEALTH"),
    *("/v1/models?path=/health", "/health%2f..%2fv1/models", "/health/", "http://127.0.0.1/v1/models"),
]


@pytest.fixture(scope="module", params=NETWORKS)
def stranger(request: pytest.FixtureRequest) -> Iterator[Outsider]:
    with outsider(NETWORKS[request.param]) as one:
        yield one


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Outsider]:
    """On the management network, with an address that the API's sources have or have not."""
    with outsider(NETWORKS["management"]) as one:
        yield one


# ---- As a user gets it: no key, and the API on loopback


@pytest.fixture(scope="module")
def served() -> None:
    play("serve-hy3")


@pytest.mark.parametrize("node", NODES)
def test_only_ssh_answers(served: None, stranger: Outsider, node: str) -> None:
    assert stranger.open_ports(node) == {SSH}


class Joiner(t.NamedTuple):
    """Somebody on the other node, which the firewall lets in, by what Ray is told, and whether it is let in."""

    user: str
    mode: str
    token_file: str
    joins: bool = False

    def join(self, address: str) -> str:
        program = f'import ray; ray.init(address="{address}"); print("joined", len(ray.nodes()))'
        environment = f"HOME=/tmp RAY_AUTH_MODE={self.mode} RAY_AUTH_TOKEN_PATH={self.token_file}"
        command = f"timeout 90 /var/lib/hy3-lab/venv/bin/python -I -c {shlex.quote(program)}"
        script = f"cd /; {environment} {command} 2>&1"
        return on("spark-2", f"runuser -u {self.user} -- sh -c {shlex.quote(script)} || true")


OTHER_TOKEN = "/run/hy3-outsider-token"
# The first shows that nothing else keeps the others out.
JOINERS = {
    "the engine's user with the token": Joiner("hy3", "token", "/etc/hy3/ray_token_lab", joins=True),
    "with another token": Joiner("hy3", "token", OTHER_TOKEN),
    "without a token": Joiner("hy3", "disabled", ""),
    "somebody else by the engine's file": Joiner("nobody", "token", "/etc/hy3/ray_token_lab"),
}
DOORS = {"GCS": "198.18.20.1:6379", "client": "ray://198.18.20.1:10001"}


@pytest.mark.parametrize("address", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("joiner", JOINERS.values(), ids=JOINERS)
def test_ray_without_its_token_refuses(served: None, address: str, joiner: Joiner) -> None:
    on("spark-2", f"umask 077; printf %s {'x' * 64} >{OTHER_TOKEN}; chown hy3 {OTHER_TOKEN}")
    try:
        seen = joiner.join(address)
    finally:
        on("spark-2", f"rm -f {OTHER_TOKEN}")
    assert ("joined 2" in seen) is joiner.joins, seen[-2000:]


# ---- With a key, on all addresses, for one network


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, served: None) -> Iterator[None]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    settings = {
        "hy3_api_key_file": str(key),
        "hy3_api_host": "0.0.0.0",
        "hy3_api_sources": [NETWORKS["management"].address + "/32"],
        # Else the server does not say which routes it has.
        "hy3_engine_args": {"disable-fastapi-docs": False},
    }
    play("serve-hy3", "-e", json.dumps(settings))
    yield
    play("serve-hy3")


@pytest.mark.parametrize("node", NODES)
def test_only_ssh_and_the_keyed_api_answer(keyed: None, stranger: Outsider, node: str) -> None:
    """A stranger on the fabric is none of the API's sources."""
    may = node == HEAD and stranger.network is NETWORKS["management"]
    assert stranger.open_ports(node) == ({SSH, API} if may else {SSH})


def bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="module")
def routes(keyed: None, neighbour: Outsider) -> list[tuple[str, str]]:
    """Each method with each path that the running server has."""
    ((status, text),) = neighbour.http(HEAD, API, [("GET", "/openapi.json", bearer(KEY))])
    assert status == 200, text
    paths = [re.sub(r"\{\w+(?::\w+)?\}", "x", path) for path in json.loads(text)["paths"]]
    # Or it has told nothing.
    assert {"/v1/chat/completions", "/v1/models", "/invocations", "/tokenize"} <= set(paths)
    beside = ["/metrics", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect", "/", "/none"]
    return [(method, path) for path in dict.fromkeys([*paths, *beside]) for method in METHODS]


def answers_without_key(method: str, path: str) -> bool:
    return any(re.fullmatch(methods, method) and re.fullmatch(paths, path) for methods, paths in OPEN)


@pytest.mark.parametrize("key", [None, KEY[::-1], KEY[:-1], ""], ids=["none", "wrong", "cut short", "empty"])
def test_every_route_asks_for_the_key(routes: list[tuple[str, str]], neighbour: Outsider, key: str | None) -> None:
    headers = {"Authorization": "Bearer "} if key == "" else bearer(key)
    requests: list[Request] = [(method, path, headers) for method, path in routes]
    answers = dict(zip(routes, neighbour.http(HEAD, API, requests), strict=True))
    closed = {route: answer for route, answer in answers.items() if not answers_without_key(*route)}
    assert {route: answer for route, answer in closed.items() if answer[0] != 401} == {}
    # What is open says little, and never what a model said.
    assert {route: text for route, (_status, text) in answers.items() if len(text) > 200} == {}


def test_what_is_open_is_used(routes: list[tuple[str, str]], neighbour: Outsider) -> None:
    """A line of the list that no route needs is one too many."""
    for methods, paths in OPEN:
        assert any(re.fullmatch(methods, method) and re.fullmatch(paths, path) for method, path in routes)
    asked = neighbour.http(HEAD, API, [("GET", "/health", {}), ("GET", "/ping", {})])
    assert asked == [(200, ""), (200, "")]


def test_the_key_opens(keyed: None, neighbour: Outsider) -> None:
    """Or a server that refuses everything would pass."""
    ((status, text),) = neighbour.http(HEAD, API, [("GET", "/v1/models", bearer(KEY))])
    assert (status, "hy3-tiny" in text) == (200, True)


@pytest.mark.parametrize("path", DISGUISES)
def test_no_path_looks_like_an_open_one(keyed: None, neighbour: Outsider, path: str) -> None:
    ((status, text),) = neighbour.http(HEAD, API, [("GET", path, {})])
    assert status == 401, text


def test_a_websocket_needs_the_key(keyed: None, neighbour: Outsider) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "aHkzLW91dHNpZGVyLWtleQ==",
    }
    ((status, text),) = neighbour.http(HEAD, API, [("GET", "/v1/realtime", upgrade)])
    assert status in (401, 403), text


def test_the_page_lists_the_same(routes: list[tuple[str, str]]) -> None:
    page = (Path(__file__).parents[2] / "docs/threat_model.md").read_text()
    listed = page.partition("## Routes without a key")[2].partition("\n## ")[0]
    opened: t.Iterable[str] = {
        path for method, path in routes if method != "OPTIONS" and answers_without_key(method, path)
    }
    assert opened == {"/health", "/ping"}
    assert all(f"`{path}`" in listed for path in opened)
