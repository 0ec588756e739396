# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""A small client for an OpenAI-compatible API: one chat question with its timing."""

from __future__ import annotations

import http.client
import json
import math
import time
import typing as t
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error

# vLLM writes -9999.0 for a log probability of minus infinity; a chosen token with it is as bad as NaN.
_LOWEST_LOGPROB = -9999.0
# Speculative decoding sends several tokens in a chunk, up to 1 + num_speculative_tokens; more means a buffer.
_TOKENS_PER_CHUNK = 8
# More calls than this in one answer are garbage.
_CALLS = 64


class TopLogprob(t.TypedDict):
    """A candidate for a position; C(logprob) is natural, None where the engine sent no number."""

    token: str
    logprob: float | None


class ToolCall(t.TypedDict):
    """A call that the model asks for; C(arguments) is JSON if it is right."""

    name: str
    arguments: str


@dataclass
class Answer:
    """A chat answer. Times are seconds after the request was sent, None where they cannot be told.

    C(tokens) are those that were chosen, and C(undecided) says whether all candidates were alike at every position;
    both need log probabilities.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, t.Any] | None = None
    logprobs: list[TopLogprob] = field(default_factory=list)
    logprobs_finite: bool | None = None
    tokens: list[str] = field(default_factory=list)
    undecided: bool = True
    error: str | None = None
    text_chunks: int = 0
    first_text: float | None = None
    last_text: float | None = None
    end: float = 0.0

    @property
    def completion_tokens(self) -> int | None:
        """Tokens of the answer by the engine's own count; chunks are no tokens."""
        return (self.usage or {}).get("completion_tokens")


class Timing(t.TypedDict):
    """Seconds to the first text; tokens per second while decoding, and over the whole request."""

    ttft_s: float | None
    decode_tps: float | None
    overall_tps: float | None


def request_body(
    *,
    model: str,
    question: str,
    max_tokens: int,
    temperature: float,
    stream: bool,
    reasoning_effort: str,
    top: int,
    tools: t.Sequence[t.Mapping[str, t.Any]] = (),
) -> dict[str, t.Any]:
    """The JSON body of a chat request with C(top) candidates per position."""
    body: dict[str, t.Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "logprobs": True,
        "top_logprobs": top,
        # Hy3's template thinks or not by this argument, and its default differs between documents.
        "chat_template_kwargs": {"reasoning_effort": reasoning_effort},
    }
    if tools:
        body["tools"] = list(tools)
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def sse_data(chunks: t.Iterable[bytes]) -> t.Iterator[str]:
    """The data of server-sent events from network reads of any size.

    Bytes are cut into lines before they are decoded, so a character split over two reads survives. Comments
    and other fields are dropped; C(data:) counts with and without a space.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].decode(errors="replace").strip()
    if rest.startswith(b"data:"):
        yield rest[len(b"data:") :].decode(errors="replace").strip()


def read_stream(events: t.Iterable[str], clock: t.Callable[[], float]) -> Answer:
    """Fold the events of a stream; C(clock) gives the seconds since the request was sent.

    Of several usages the last counts (some servers send a running total); an error frame ends the answer.
    """
    answer = Answer()
    for event in events:
        if event == "[DONE]":
            break
        frame = _json(event)
        if message := error_message(frame):
            answer.error = message
            break
        _add(answer, frame, clock(), "delta")
    answer.end = clock()
    return answer


def read_body(body: str, elapsed: float) -> Answer:
    """The answer of a request without streaming, which took C(elapsed) seconds."""
    answer = Answer()
    frame = _json(body)
    answer.error = error_message(frame)
    if not answer.error:
        _add(answer, frame, elapsed, "message")
    answer.first_text = answer.last_text = None
    answer.end = elapsed
    return answer


def error_message(frame: t.Any) -> str | None:
    """The message of an error body or frame in the forms of vLLM, SGLang and FastAPI; None if it is no error."""
    error = frame.get("error") if isinstance(frame, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if error:
        return str(error)
    if isinstance(frame, dict) and (frame.get("object") == "error" or "detail" in frame):
        return str(frame.get("message") or frame.get("detail"))
    return None


def model_names(body: bytes) -> list[str]:
    """The names in an answer of C(/v1/models); empty if it is none (an error, a proxy's page)."""
    frame = _json(body.decode(errors="replace"))
    data = frame.get("data") if isinstance(frame, dict) else None
    return [str(entry["id"]) for entry in data or [] if isinstance(entry, dict) and "id" in entry]


def timing(answer: Answer) -> Timing:
    """Rates of a streamed answer; only the overall rate if something held the text back until the end."""
    tokens = answer.completion_tokens
    overall = tokens / answer.end if tokens and answer.end > 0 else None
    first, last = answer.first_text, answer.last_text
    if tokens is None or first is None or last is None:
        return Timing(ttft_s=first, decode_tps=None, overall_tps=overall)
    span = last - first
    # Short answers are decoded in no time after a long prefill, so only long ones prove a buffer by their span.
    buffered = tokens > _TOKENS_PER_CHUNK * answer.text_chunks or (tokens >= 16 and span < 0.02 * answer.end)
    if buffered:
        return Timing(ttft_s=None, decode_tps=None, overall_tps=overall)
    rate = (tokens - 1) / span if tokens > 1 and span > 0 else None
    return Timing(ttft_s=first, decode_tps=rate, overall_tps=overall)


class Client:
    """Requests to one API; C(timeout) is the seconds for a whole request, also when bytes trickle in."""

    def __init__(self, url: str, *, key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Hy3Error(f"The API URL {url!r} is not of the form http://HOST:PORT")
        self._url, self._secure, self._host, self._port = url, parts.scheme == "https", parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._key, self._timeout = key, timeout

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; raises Hy3Error if nothing answers in time."""
        status, chunks = self._request("GET", path, None)
        return status, b"".join(chunks)

    def chat(self, body: t.Mapping[str, t.Any]) -> Answer:
        """Ask one question; raises Hy3Error if the API does not answer with 200."""
        sent = time.monotonic()
        status, chunks = self._request("POST", "/v1/chat/completions", json.dumps(body).encode())
        if status != 200:
            text = b"".join(chunks).decode(errors="replace")
            raise Hy3Error(
                f"{self._url} answered {status}: {_error_text(text) or http.client.responses.get(status, '')}"
            )
        if body.get("stream"):
            return read_stream(sse_data(chunks), lambda: time.monotonic() - sent)
        text = b"".join(chunks).decode(errors="replace")
        return read_body(text, time.monotonic() - sent)

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[int, t.Iterator[bytes]]:
        deadline = time.monotonic() + self._timeout
        connect = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=self._timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, self._prefix + path, body=body, headers=headers)
            # After getresponse() the connection forgets its socket, whose timeout must shrink with every read.
            sock = connection.sock
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Hy3Error(self._no_answer(error)) from error

        def chunks() -> t.Iterator[bytes]:
            try:
                # A response that was read to its end has closed the socket, and settimeout() would fail.
                while not response.isclosed():
                    sock.settimeout(max(deadline - time.monotonic(), 0.001))
                    chunk = response.read1(65536)
                    if not chunk:
                        return
                    yield chunk
            except (OSError, http.client.HTTPException) as error:
                raise Hy3Error(self._no_answer(error)) from error
            finally:
                connection.close()

        return response.status, chunks()

    def _no_answer(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"{self._url} gave no complete answer within {self._timeout:g} seconds"
        return f"{self._url} gave no answer: {str(error) or type(error).__name__}"


def _json(text: str) -> t.Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"error": f"not JSON: {text[:200]!r}"}


def _error_text(text: str) -> str:
    frame = _json(text)
    return error_message(frame) or text.strip()[:200]


def _add(answer: Answer, frame: t.Any, now: float, part: str) -> None:
    if not isinstance(frame, dict):
        answer.error = f"not an object: {frame!r}"
        return
    answer.usage = frame.get("usage") or answer.usage
    # The usage frame of a stream has no choices.
    for choice in (frame.get("choices") or [])[:1]:
        message = choice.get(part) or {}
        content = message.get("content") or ""
        # vLLM renamed reasoning_content to reasoning; SGLang and older vLLM send the former.
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        answer.text += content
        answer.reasoning += reasoning
        for number, part_of_call in enumerate(message.get("tool_calls") or []):
            _add_tool_call(answer, part_of_call, number)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if content or reasoning or message.get("tool_calls"):
            answer.text_chunks += 1
            answer.last_text = now
            answer.first_text = now if answer.first_text is None else answer.first_text
        for position in (choice.get("logprobs") or {}).get("content") or []:
            _add_logprobs(answer, position)


def _add_tool_call(answer: Answer, part: t.Mapping[str, t.Any], number: int) -> None:
    """A stream sends a call in pieces: its name once, its arguments bit by bit, each with the index of the call."""
    index = part.get("index")
    index = index if isinstance(index, int) else number
    while len(answer.tool_calls) <= index < _CALLS:
        answer.tool_calls.append(ToolCall(name="", arguments=""))
    function = part.get("function") or {}
    if 0 <= index < len(answer.tool_calls):
        answer.tool_calls[index]["name"] += function.get("name") or ""
        answer.tool_calls[index]["arguments"] += function.get("arguments") or ""


def _add_logprobs(answer: Answer, position: t.Mapping[str, t.Any]) -> None:
    candidates = [(entry.get("token", ""), entry.get("logprob")) for entry in position.get("top_logprobs") or []]
    if answer.logprobs_finite is None:
        answer.logprobs = [TopLogprob(token=token, logprob=_number(value)) for token, value in candidates]
    chosen = _number(position.get("logprob"))
    answer.tokens.append(str(position.get("token", "")))
    answer.undecided = answer.undecided and len(candidates) > 1 and len({value for _token, value in candidates}) == 1
    finite = chosen is not None and chosen > _LOWEST_LOGPROB
    # An unlikely candidate may be minus infinity, but never NaN.
    finite = finite and all(_number(value) is not None for _token, value in candidates)
    answer.logprobs_finite = finite and answer.logprobs_finite is not False


def _number(value: t.Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
