# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""A middleware for the engine's API server that asks for the key on every route.

vLLM's own asks below ``/v1`` and a few other prefixes, and ``/invocations`` generates text too. The file is copied to
the head and loaded there by ``vllm serve --middleware``, so it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import typing as t

Scope = t.MutableMapping[str, t.Any]
Message = t.MutableMapping[str, t.Any]
Receive = t.Callable[[], t.Awaitable[Message]]
Send = t.Callable[[Message], t.Awaitable[None]]
App = t.Callable[[Scope, Receive, Send], t.Awaitable[None]]

# They say whether the server lives and nothing else; load balancers ask them without a key.
OPEN = ("/health", "/ping")
BODY = b'{"error": "Unauthorized"}'


def has_key(headers: t.Iterable[tuple[bytes, bytes]], key: str) -> bool:
    """Whether the headers of a request (names in lower case, as ASGI has them) carry ``key`` as their bearer token."""
    wanted = hashlib.sha256(key.encode()).digest()
    for name, value in headers:
        scheme, _space, token = value.partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            return hmac.compare_digest(hashlib.sha256(token).digest(), wanted)
    return False


class EveryRoute:
    """ASGI middleware; raises :class:`KeyError` without ``VLLM_API_KEY``, so that no server starts unguarded."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ["VLLM_API_KEY"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": BODY})

    def _may(self, scope: Scope) -> bool:
        # A browser asks what it may do (OPTIONS) without the key, and gets no answer of the engine's.
        return scope.get("method") == "OPTIONS" or scope["path"] in OPEN or has_key(scope["headers"], self._key)
