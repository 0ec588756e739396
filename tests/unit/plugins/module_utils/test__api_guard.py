# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import asyncio
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._api_guard import EveryRoute, Message, Receive, Scope, Send

KEY = "sentinel-0123456789-abcdef"
PASSED: Message = {"type": "passed"}


async def engine(scope: Scope, receive: Receive, send: Send) -> None:
    """The application behind the guard."""
    await send(PASSED)


async def receive() -> Message:
    return {"type": "http.request"}


def ask(monkeypatch: pytest.MonkeyPatch, **scope: t.Any) -> list[Message]:
    """What is sent in answer to a request, by default a POST without headers."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    request = {"type": "http", "method": "POST", "path": "/v1/models", "headers": []} | scope
    asyncio.run(EveryRoute(engine)(request, receive, send))
    return sent


def bearer(token: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"{scheme} {token}".encode())]


MAY: dict[str, dict[str, t.Any]] = {
    "with the key": {"headers": bearer(KEY)},
    "with the key in another spelling": {"headers": bearer(KEY, "bearer")},
    "health": {"path": "/health"},
    "ping": {"path": "/ping"},
    "a browser that asks what it may": {"method": "OPTIONS"},
    "the server's own start": {"type": "lifespan"},
    "a socket with the key": {"type": "websocket", "headers": bearer(KEY)},
}


@pytest.mark.parametrize("scope", MAY.values(), ids=MAY)
def test_lets_through(scope: dict[str, t.Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, **scope) == [PASSED]


MAY_NOT: dict[str, dict[str, t.Any]] = {
    **{
        path: {"path": path}
        for path in ("/v1/models", "/invocations", "/metrics", "/tokenize", "/", "/health/", "//ping")
    },
    "another key": {"headers": bearer("k" * 26)},
    "a part of the key": {"headers": bearer(KEY[:-1])},
    "another scheme": {"headers": bearer(KEY, "Basic")},
    "the key alone": {"headers": [(b"authorization", KEY.encode())]},
    "bytes that are no text": {"headers": [(b"authorization", b"Bearer \xff")]},
}


@pytest.mark.parametrize("scope", MAY_NOT.values(), ids=MAY_NOT)
def test_refuses(scope: dict[str, t.Any], monkeypatch: pytest.MonkeyPatch) -> None:
    start, body = ask(monkeypatch, **scope)
    assert start["status"] == 401
    assert KEY.encode() not in body["body"]


def test_closes_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, type="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_does_not_start_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(KeyError):
        EveryRoute(engine)
