# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module with a stand-in for C(vllm), which leaves what a real one left, and a real server for the counters."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import tempfile
import threading
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module

RECORDED = Path(__file__).parents[1] / "module_utils/vllm_bench_serve.json"
KEY = "sesame-open"
# Remembers how it was called, counts what it did for the server, and leaves the result recorded for so many streams.
STAND_IN = """\
#!/usr/bin/env python3
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
options = dict(zip(sys.argv, sys.argv[1:]))
prompts = json.loads(pathlib.Path(options["--dataset-path"]).read_text())
(here / "called.json").write_text(json.dumps({"argv": sys.argv, "prompts": prompts, "env": dict(os.environ)}))
(here / "ran").touch()
recorded = json.loads((here / "recorded.json").read_text())["%s"]
pathlib.Path(options["--result-filename"]).write_text(json.dumps(recorded))
"""
BROKEN = """\
#!/bin/sh
echo "vllm bench: error: unrecognized arguments: --extra-body" >&2
echo "nanobind: leaked 4 instances!" >&2
exit 2
"""


class Place(t.NamedTuple):
    """A virtual environment that has only a stand-in, and a server."""

    venv: Path
    url: str

    def stand_in(self, text: str) -> None:
        program = self.venv / "bin/vllm"
        program.write_text(text)
        program.chmod(0o755)

    def bench(self, **options: t.Any) -> dict[str, t.Any]:
        arguments = {
            "venv": str(self.venv),
            "url": self.url,
            "model": "hy3",
            "tokenizer": "/models/Hy3",
            "prompts": ["first", "second"],
            "output_tokens": 256,
        }
        return run_module("engine_bench", **{**arguments, **options})

    @property
    def called(self) -> dict[str, t.Any]:
        return t.cast(dict[str, t.Any], json.loads((self.venv / "bin/called.json").read_text()))


@pytest.fixture
def place() -> Iterator[Place]:
    # Not pytest's, which only its own user may enter.
    with tempfile.TemporaryDirectory() as directory:
        yield from opened(Path(directory))


def opened(venv: Path) -> Iterator[Place]:
    (venv / "bin").mkdir()
    shutil.copy(RECORDED, venv / "bin/recorded.json")
    venv.chmod(0o755)
    (venv / "bin").chmod(0o777)

    class Counters(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: t.Any) -> None:
            pass

        def do_GET(self) -> None:
            asked_with_key = self.headers.get("Authorization") == f"Bearer {KEY}"
            done = 129 if (venv / "bin/ran").exists() else 1
            lines = [
                f"vllm:spec_decode_num_drafts_total {done}",
                f"vllm:spec_decode_num_draft_tokens_total {done}",
                f"vllm:spec_decode_num_accepted_tokens_total {done}",
            ]
            self.send_response(200 if asked_with_key else 401)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counters) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield Place(venv, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_a_run(place: Place) -> None:
    place.stand_in(STAND_IN % "streams_2")
    done = place.bench(api_key=KEY, streams=2, requests=3)
    assert done["changed"] is False
    assert [request["tokens"] for request in done["run"]["requests"]] == [256, 256]
    assert (done["metrics_before"]["drafted"], done["metrics_after"]["drafted"]) == (1, 129)
    asked = [entry["conversations"][0]["value"] for entry in place.called["prompts"]]
    assert asked == ["first", "second", "first"]
    # It leaves nothing behind.
    assert not Path(place.called["env"]["HOME"]).exists()


def test_the_key_is_no_argument(place: Place) -> None:
    place.stand_in(STAND_IN % "one_256")
    done = place.bench(api_key=KEY)
    assert place.called["env"]["OPENAI_API_KEY"] == KEY
    assert KEY not in json.dumps([place.called["argv"], done])


def test_without_counters_the_times_count(place: Place) -> None:
    place.stand_in(STAND_IN % "one_256")
    done = place.bench()
    assert (done["metrics_before"], done["run"]["requests"][0]["tokens"]) == (None, 256)
    assert "OPENAI_API_KEY" not in place.called["env"] or os.environ.get("OPENAI_API_KEY")


def test_check_mode_sends_nothing(place: Place) -> None:
    place.stand_in(STAND_IN % "one_256")
    done = place.bench(_ansible_check_mode=True)
    assert (done["run"], done["changed"]) == (None, False)
    assert done["command"][1:3] == ["bench", "serve"]
    assert not (place.venv / "bin/ran").exists()


TEST_REFUSED: list[tuple[str, str, dict[str, t.Any], str]] = [
    ("no-engine", "", {"venv": "/nonexistent"}, "/nonexistent/bin/vllm does not exist: venv must be"),
    ("an-old-engine", BROKEN, {}, "bench serve failed with exit status 2: vllm bench: error: unrecognized arguments"),
    ("no-result", "#!/bin/sh\n", {}, "The load generator's result cannot be read"),
    ("too-slow", "#!/bin/sh\nsleep 30\n", {"timeout": 1}, "was not done after 1 seconds: give it more with timeout"),
    ("no-streams", "#!/bin/sh\n", {"streams": 0}, "streams is 0, and it must be at least 1"),
    ("no-prompts", "#!/bin/sh\n", {"prompts": []}, "prompts is empty, and the model must be asked something"),
    ("no-server", "#!/bin/sh\n", {"url": "http://127.0.0.1:1"}, "http://127.0.0.1:1 gave no answer"),
]


@pytest.mark.parametrize(
    ("stand_in", "options", "message"), [row[1:] for row in TEST_REFUSED], ids=[row[0] for row in TEST_REFUSED]
)
def test_refuses(place: Place, stand_in: str, options: dict[str, t.Any], message: str) -> None:
    place.stand_in(stand_in)
    done = place.bench(**options)
    assert done["failed"]
    assert message in done["msg"]
    assert len(done["msg"].splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it as somebody else")
def test_another_user(place: Place) -> None:
    place.stand_in(STAND_IN % "one_256")
    assert (
        "The user 'nobody-has-this-name' does not exist on this node" in place.bench(user="nobody-has-this-name")["msg"]
    )
    done = place.bench(user="nobody", api_key=KEY)
    assert done["run"]["requests"][0]["tokens"] == 256
    assert (place.venv / "bin/called.json").owner() == "nobody"
    assert place.called["env"]["OPENAI_API_KEY"] == KEY
    assert not Path(place.called["env"]["HOME"]).exists()
