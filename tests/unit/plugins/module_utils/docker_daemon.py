# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for docker's daemon: notes what the real client asks for and refuses it, so that nothing has to run."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socketserver
import subprocess
import tempfile
import threading
import typing as t
from pathlib import Path

DOCKER = shutil.which("docker")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Daemon

    def log_message(self, *args: t.Any) -> None:
        pass

    def _answer(self, status: int, body: t.Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Api-Version", "1.41")
        self.send_header("Ostype", "linux")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def do_HEAD(self) -> None:
        self._answer(200, "")

    def do_GET(self) -> None:
        self._answer(200, "OK")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path.partition("/containers/")[2], body))
        self._answer(500, {"message": "nothing runs here"})


class _Daemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str) -> None:
        self.asked: list[tuple[str, t.Any]] = []
        super().__init__(path, _Handler)

    def get_request(self) -> tuple[t.Any, t.Any]:
        request, _address = super().get_request()
        return request, ("client", 0)


def created(argv: list[str], directory: Path, environment: dict[str, str]) -> dict[str, t.Any]:
    """What the real client asks its daemon to create for ``docker run`` words; its program's path is left out."""
    assert DOCKER
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="hy3-") as place, _Daemon(path := f"{place}/docker") as daemon:
        threading.Thread(target=daemon.serve_forever, args=(0.02,), daemon=True).start()
        done = subprocess.run(
            [DOCKER, *argv[1:]],
            env={**os.environ, "DOCKER_HOST": f"unix://{path}", "HOME": str(directory), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        daemon.shutdown()
    assert "nothing runs here" in done.stderr, done.stderr
    ((asked, body),) = daemon.asked
    assert asked.startswith("create")
    return {"name": asked.partition("name=")[2], **body}
