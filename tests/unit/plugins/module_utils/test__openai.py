# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import itertools
import json
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._openai import (
    Answer,
    error_message,
    model_names,
    read_stream,
    sse_data,
    timing,
)


def frame(delta: dict[str, t.Any], **more: t.Any) -> str:
    return json.dumps({"choices": [{"delta": delta, **more}]})


def stream(*events: str) -> Answer:
    return read_stream(events, lambda: 0.0)


def timed(events: list[tuple[float, str]], end: float) -> Answer:
    """The answer of events at known times."""
    moments = iter([moment for moment, _event in events] + [end])
    return read_stream((event for _moment, event in events), lambda: next(moments))


# Field case B102: a comment, no space after the colon, a character split over two reads, an error after status 200.
READS = [
    b": ping\n\n",
    b'data:{"choices":[{"delta":{"content":"\xe6\xb7',
    b'\xb7"}}]}\r\n\r\n',
    b'event: error\ndata: {"error":{"message":"EngineCore died"}}\n\n',
]


def test_sse_framing() -> None:
    answer = stream(*sse_data(READS))
    assert (answer.text, answer.error) == ("\u6df7", "EngineCore died")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_sse_reads_of_any_size(size: int) -> None:
    raw = b"".join(READS)
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert list(sse_data(pieces)) == list(sse_data(READS))


def test_sse_last_line_without_its_end() -> None:
    assert list(sse_data([b"data: [DONE]"])) == ["[DONE]"]


# Field case B95: (id, first text in seconds, decode rate)
def test_reasoning_counts_as_text() -> None:
    answer = timed(
        [
            (0.2, frame({"role": "assistant", "content": ""})),
            (0.45, frame({"reasoning": "a"})),
            *((0.45 + 0.05 * step, frame({"reasoning_content": "."})) for step in range(1, 50)),
            (3.0, frame({"content": "b"})),
            (5.45, frame({"content": "z"}, finish_reason="stop")),
            (5.45, json.dumps({"choices": [], "usage": {"completion_tokens": 101}})),
        ],
        end=5.45,
    )
    assert timing(answer) == {
        "ttft_s": 0.45,
        "decode_tps": pytest.approx(20.0),
        "overall_tps": pytest.approx(101 / 5.45),
    }
    assert answer.text == "bz"


# Field case B96: the usage in three shapes, and none.
TEST_USAGE: list[tuple[str, list[str], int | None]] = [
    ("own-frame", [frame({"content": "x"}), '{"choices": [], "usage": {"completion_tokens": 12}}'], 12),
    (
        "with-a-choice",
        ['{"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 12}}'],
        12,
    ),
    (
        "running-total",
        [
            '{"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": 5}}',
            '{"choices": [{"delta": {"content": "y"}}], "usage": {"completion_tokens": 12}}',
        ],
        12,
    ),
    ("none", [frame({"content": "x"})], None),
]


@pytest.mark.parametrize(("events", "tokens"), [row[1:] for row in TEST_USAGE], ids=[row[0] for row in TEST_USAGE])
def test_usage(events: list[str], tokens: int | None) -> None:
    assert stream(*events).completion_tokens == tokens


def measured(**fields: t.Any) -> Answer:
    tokens = fields.pop("tokens", None)
    return Answer(**fields, usage={"completion_tokens": tokens} if tokens is not None else None)


# (id, answer, ttft, decode rate, overall rate); the first is field case B98.
TEST_TIMING: list[tuple[str, Answer, float | None, float | None, float | None]] = [
    (
        "held-back-by-a-parser",
        measured(first_text=9.98, last_text=10.0, text_chunks=2, end=10.0, tokens=200),
        None,
        None,
        20.0,
    ),
    (
        "many-chunks-in-no-time",
        measured(first_text=9.99, last_text=10.0, text_chunks=100, end=10.0, tokens=100),
        None,
        None,
        10.0,
    ),
    ("drafted-pairs", measured(first_text=1.0, last_text=6.0, text_chunks=51, end=6.0, tokens=101), 1.0, 20.0, 101 / 6),
    (
        "short-after-a-cold-prefill",
        measured(first_text=9.9, last_text=10.0, text_chunks=2, end=10.0, tokens=2),
        9.9,
        pytest.approx(10.0),
        0.2,
    ),
    ("one-token", measured(first_text=1.0, last_text=1.0, text_chunks=1, end=1.0, tokens=1), 1.0, None, 1.0),
    ("no-usage", measured(first_text=1.0, last_text=2.0, text_chunks=9, end=2.0), 1.0, None, None),
    ("not-streamed", measured(end=2.0, tokens=10), None, None, 5.0),
]


@pytest.mark.parametrize(
    ("answer", "ttft", "decode", "overall"), [row[1:] for row in TEST_TIMING], ids=[row[0] for row in TEST_TIMING]
)
def test_timing(answer: Answer, ttft: float | None, decode: float | None, overall: float | None) -> None:
    assert timing(answer) == {"ttft_s": ttft, "decode_tps": decode, "overall_tps": overall}


TEST_ERRORS: list[tuple[t.Any, str | None]] = [
    ({"error": {"message": "no such model", "type": "NotFoundError"}}, "no such model"),
    ({"error": "Unauthorized"}, "Unauthorized"),
    ({"object": "error", "message": "old form"}, "old form"),
    ({"detail": "Not Found"}, "Not Found"),
    ({"choices": []}, None),
    (None, None),
]


@pytest.mark.parametrize(("body", "expected"), TEST_ERRORS)
def test_error_message(body: t.Any, expected: str | None) -> None:
    assert error_message(body) == expected


TEST_MODELS: list[tuple[bytes, list[str]]] = [
    (b'{"object": "list", "data": [{"id": "hy3"}, {"id": "lora"}]}', ["hy3", "lora"]),
    (b'{"error": "Unauthorized"}', []),
    (b"<html>", []),
    (b"[]", []),
]


@pytest.mark.parametrize(("body", "expected"), TEST_MODELS)
def test_model_names(body: bytes, expected: list[str]) -> None:
    assert model_names(body) == expected


def test_nothing_after_done() -> None:
    clock = itertools.count()
    answer = read_stream([frame({"content": "a"}), "[DONE]", frame({"content": "b"})], lambda: float(next(clock)))
    assert (answer.text, answer.end) == ("a", 1.0)
