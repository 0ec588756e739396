# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The module against a real HTTP server: a double of an OpenAI-compatible engine whose behaviour is chosen by path."""

from __future__ import annotations

import http.server
import json
import threading
import time
import typing as t

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.sparks.hy3.plugins.modules import chat_smoke

KEY = "the-key"


def chunk(delta: dict[str, t.Any], **more: t.Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, **more}]}).encode() + b"\n\n"


def position(token: str, value: float) -> dict[str, t.Any]:
    top = [{"token": token, "logprob": value}, {"token": "Rome", "logprob": -4.0}]
    return {"logprobs": {"content": [{"token": token, "logprob": value, "top_logprobs": top}]}}


USAGE = {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}
RIGHT = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Paris"}, **position("Paris", -0.01)),
    chunk({"content": "."}, finish_reason="stop", **position(".", -0.02)),
    b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n",
    b"data: [DONE]\n\n",
]
BROKEN = [chunk({"content": "!"}, finish_reason="length", **position("!", float("nan")))]
CALL = [
    chunk({"tool_calls": [{"index": 0, "function": {"name": "get_weather", "arguments": '{"city": '}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"Tokyo"}'}}]}, finish_reason="tool_calls"),
]
DIES = [RIGHT[0], b'data: {"error": {"message": "EngineCore died"}}\n\n']
WHOLE = {
    "choices": [{"message": {"content": "Paris."}, "finish_reason": "stop", **position("Paris", -0.01)}],
    "usage": USAGE,
}


class EngineDouble(http.server.BaseHTTPRequestHandler):
    """Answers as the first part of the path says; remembers the requests on its server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: t.Any) -> None:
        pass

    def reply(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, chunks: t.Iterable[bytes], pause: float = 0.0) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            time.sleep(pause)
        self.wfile.write(b"0\r\n\r\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        t.cast("EngineServer", self.server).requests.append(body)
        kind = self.path.split("/")[1]
        if kind == "guarded" and self.headers["Authorization"] != f"Bearer {KEY}":
            self.reply(b'{"error": "Unauthorized"}', 401)
        elif kind == "missing":
            self.reply(b'{"error": {"message": "The model `hy4` does not exist."}}', 404)
        elif kind == "garbage":
            self.reply(b"<html>proxy</html>")
        elif kind == "silent":
            time.sleep(2)
        elif kind == "trickle":
            self.stream([b": ping\n\n"] * 20, pause=0.1)
        elif not body.get("stream"):
            self.reply(json.dumps(WHOLE).encode())
        else:
            answers = {"nan": BROKEN, "dies": DIES, "cut": RIGHT[:2], "call": CALL}
            if kind == "moody":
                seen = len(t.cast("EngineServer", self.server).requests)
                answers["moody"] = [chunk({"content": f"Paris {seen}"}, finish_reason="stop")]
            self.stream(answers.get(kind, RIGHT), pause=0.02)


class EngineServer(http.server.ThreadingHTTPServer):
    """The double on a free port of the loopback."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EngineDouble)
        self.requests: list[dict[str, t.Any]] = []

    def handle_error(self, request: t.Any, client_address: t.Any) -> None:
        pass  # clients that give up are part of the tests


@pytest.fixture
def server() -> t.Iterator[EngineServer]:
    with EngineServer() as double:
        threading.Thread(target=double.serve_forever, args=(0.05,), daemon=True).start()
        yield double
        double.shutdown()


class Runner:
    """Runs the module against a path of the double."""

    def __init__(self, server: EngineServer, capsys: pytest.CaptureFixture[str]) -> None:
        self._base = f"http://127.0.0.1:{server.server_port}"
        self._capsys = capsys

    def __call__(self, kind: str, **arguments: t.Any) -> dict[str, t.Any]:
        defaults: dict[str, t.Any] = {"url": f"{self._base}/{kind}", "model": "hy3", "timeout": 20}
        with patch_module_args(defaults | arguments), pytest.raises(SystemExit):
            chat_smoke.main()
        return json.loads(self._capsys.readouterr().out)


@pytest.fixture
def run(server: EngineServer, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(server, capsys)


def test_right_answer(run: Runner) -> None:
    result = run("right", expect=["(?i)paris"])
    assert (result["ok"], result["changed"], result["text"], result["finish_reason"]) == (True, False, "Paris.", "stop")
    assert (result["usage"], result["problems"], result["logprobs_finite"]) == (USAGE, [], True)
    assert result["logprobs"] == [{"token": "Paris", "logprob": -0.01}, {"token": "Rome", "logprob": -4.0}]
    # The double pauses 20 ms after each chunk, and the first one is empty.
    assert result["ttft_s"] >= 0.02
    assert result["decode_tps"] > 0


def test_without_stream(run: Runner) -> None:
    result = run("right", stream=False)
    assert (result["ok"], result["text"], result["usage"], result["logprobs_finite"]) == (True, "Paris.", USAGE, True)
    assert (result["ttft_s"], result["decode_tps"]) == (None, None)


def test_warmups_come_first(run: Runner, server: EngineServer) -> None:
    run("right", warmups=2)
    assert len(server.requests) == 3


def test_the_request(run: Runner, server: EngineServer) -> None:
    run("right", question="2 + 2?", max_tokens=3, top_logprobs=7)
    assert server.requests == [
        {
            "model": "hy3",
            "messages": [{"role": "user", "content": "2 + 2?"}],
            "max_tokens": 3,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 7,
            "chat_template_kwargs": {"reasoning_effort": "no_think"},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_check_mode_asks_nothing(run: Runner, server: EngineServer) -> None:
    result = run("missing", _ansible_check_mode=True)
    assert (result["ok"], result["changed"], server.requests) == (None, False, [])


# (path, more arguments, words of the message)
TEST_FAILURES: list[tuple[str, dict[str, t.Any], str]] = [
    ("right", {"expect": ["Rome"]}, "The text 'Paris.' does not match 'Rome'"),
    ("nan", {}, "not finite"),
    ("dies", {}, "The engine answered with an error: EngineCore died"),
    ("cut", {}, "without a finish_reason"),
    ("missing", {}, "answered 404: The model `hy4` does not exist."),
    ("guarded", {}, "answered 401: Unauthorized"),
    ("garbage", {"stream": False}, "not JSON: '<html>proxy</html>'"),
    ("garbage", {}, "without a finish_reason"),
    ("silent", {"timeout": 0.3}, "gave no complete answer within 0.3 seconds"),
    ("trickle", {"timeout": 0.5}, "gave no complete answer within 0.5 seconds"),
    ("right", {"expect": ["("]}, "expect has '(', which is no regular expression"),
    ("right", {"url": "127.0.0.1:8000"}, "The API URL '127.0.0.1:8000' is not of the form http://HOST:PORT"),
    ("right", {"url": "http://127.0.0.1:1"}, "http://127.0.0.1:1 gave no answer: "),
]


@pytest.mark.parametrize(("kind", "arguments", "message"), TEST_FAILURES)
def test_failure(run: Runner, kind: str, arguments: dict[str, t.Any], message: str) -> None:
    result = run(kind, **arguments)
    assert (result["failed"], result["ok"]) == (True, False)
    assert message in result["msg"]


def test_the_key_goes_out_and_not_into_the_result(run: Runner) -> None:
    result = run("guarded", api_key=KEY)
    assert result["ok"]
    assert KEY not in json.dumps(result)


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


def test_a_tool_call(run: Runner, server: EngineServer) -> None:
    result = run("call", tools=[TOOL], expect_tool="get_weather")
    assert (result["ok"], result["finish_reason"]) == (True, "tool_calls")
    assert result["tool_calls"] == [{"name": "get_weather", "arguments": '{"city": "Tokyo"}'}]
    assert server.requests[0]["tools"] == [TOOL]


def test_text_instead_of_a_call(run: Runner, server: EngineServer) -> None:
    result = run("right", expect_tool="get_weather")
    assert result["failed"]
    assert "calls no tool, and it must call get_weather" in result["msg"]
    assert "tools" not in server.requests[0]


def test_no_thought(run: Runner) -> None:
    assert "has no reasoning apart from its text" in run("right", expect_reasoning=True)["msg"]


def test_the_same_again(run: Runner, server: EngineServer) -> None:
    assert run("right", repeats=2)["repeatable"] is True
    assert len(server.requests) == 3
    assert run("right")["repeatable"] is None


def test_another_answer_refuses_nothing(run: Runner) -> None:
    result = run("moody", repeats=1)
    assert (result["ok"], result["repeatable"]) == (True, False)
