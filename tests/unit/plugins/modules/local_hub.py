# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A double of the Hugging Face hub on loopback: one model repository, as much of the protocol as the client asks for.

Headers, error codes and routes are those that huggingface_hub 2.4.0 reads (``hf_api.py``, ``file_download.py``,
``utils/_http.py``). It has no Xet. Faults are attributes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import typing as t
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE_BYTES = 4096  # from here on a file is in Git LFS
REPOSITORY = "example/Hy3-tiny"


class Seen(t.NamedTuple):
    """A request that came: method, path without the query, the Range header and the Authorization header."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class LocalHub:
    """``commits`` holds the files of each commit, the last of which is ``main``. Use as a context."""

    commits: dict[str, dict[str, bytes]]
    token: str = ""  # what requests must bear
    gated: bool = False  # the list is open, the files are not
    cut_after: int = 0  # close the connection after so many bytes of a large file ...
    cuts: int = 0  # ... this many times
    delay: float = 0  # seconds before each answer
    wait_within: float = 0  # seconds in the middle of a large file
    damage: set[str] = field(default_factory=set)  # files of which other bytes are sent
    claimed: dict[str, int] = field(default_factory=dict)  # sizes in the list, for a disk that is too small
    html: bool = False  # something else than a hub
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> LocalHub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def head(self) -> str:
        """The commit of ``main``."""
        return list(self.commits)[-1]

    def gets(self, name: str) -> list[Seen]:
        """The requests for a file's content."""
        return [one for one in self.seen if one.method == "GET" and one.path.endswith(f"/{name}")]

    def resolve(self, revision: str) -> str | None:
        """The commit of a revision, None if there is none."""
        return self.head if revision == "main" else revision if revision in self.commits else None


def git_hash(content: bytes) -> str:
    """As git names a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def described(name: str, content: bytes) -> dict[str, t.Any]:
    """A file in the tree's list."""
    sha256 = hashlib.sha256(content).hexdigest()
    # The git hash of a large file is that of its pointer, which nobody asks for.
    lfs = {"oid": sha256, "size": len(content), "pointerSize": 130}
    large = {"lfs": lfs} if len(content) >= LARGE_BYTES else {}
    return {"type": "file", "path": name, "size": len(content), "oid": git_hash(content), **large}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *_arguments: object) -> None:
        """Nothing on the terminal."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.hub
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        bearer = self.headers.get("Authorization")
        hub.seen.append(Seen(self.command, path, self.headers.get("Range"), bearer))
        time.sleep(hub.delay)
        if hub.html:
            return self._send(200, b"<html>Welcome</html>", {"Content-Type": "text/html"})
        if hub.token and bearer != f"Bearer {hub.token}":
            # Nobody learns which repositories are private; a token that is none is said.
            unknown = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}
            wrong = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return self._send(401, b"", wrong if bearer else unknown)
        api, _slash, rest = path.removeprefix("/api/models/").partition(f"{REPOSITORY}/")
        if path.startswith("/api/models/") and not api and rest:
            return self._describe(*rest.partition("/")[::2])
        if path.startswith(f"/{REPOSITORY}/resolve/"):
            revision, _slash, name = path.removeprefix(f"/{REPOSITORY}/resolve/").partition("/")
            return self._file(revision, name)
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, what: str, revision: str) -> None:
        commit = self.hub.resolve(revision)
        if commit is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = [described(name, content) for name, content in self.hub.commits[commit].items()]
        if what == "tree":
            return self._json(files)
        siblings = [
            {
                "rfilename": file["path"],
                "size": self.hub.claimed.get(file["path"], file["size"]),
                "blobId": file["oid"],
                **({"lfs": {"sha256": file["lfs"]["oid"], **file["lfs"]}} if "lfs" in file else {}),
            }
            for file in files
        ]
        return self._json({"id": REPOSITORY, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0})

    def _file(self, revision: str, name: str) -> None:
        hub = self.hub
        commit = hub.resolve(revision)
        if hub.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if commit is None or name not in hub.commits[commit]:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound" if commit else "RevisionNotFound"})
        content = hub.commits[commit][name]
        file = described(name, content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" in file:
            headers |= {"X-Linked-Etag": f'"{file["lfs"]["oid"]}"', "X-Linked-Size": str(len(content))}
        if name in hub.damage:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = 0
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206 if start else 200, content[start:], headers, large="lfs" in file)

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, large: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        # A client that is killed or gives up has closed the connection.
        with contextlib.suppress(ConnectionError):
            self._send_body(content, large=large)

    def _send_body(self, content: bytes, *, large: bool) -> None:
        hub = self.hub
        half = hub.cut_after or len(content) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        if large and hub.cuts:
            hub.cuts -= 1
            self.close_connection = True
            return
        if large:
            time.sleep(hub.wait_within)
        self.wfile.write(content[half:])
