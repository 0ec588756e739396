# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._openai import Answer, read_body, read_stream
from ansible_collections.sparks.hy3.plugins.module_utils._smoke import Wanted, judge


def whole(message: dict[str, t.Any], finish: str | None = "stop", **more: t.Any) -> Answer:
    return read_body(json.dumps({"choices": [{"message": message, "finish_reason": finish, **more}]}), 1.0)


def stream(*choices: dict[str, t.Any]) -> Answer:
    return read_stream([json.dumps({"choices": [choice]}) for choice in choices], lambda: 0.0)


def logprobs(value: t.Any, other: t.Any = -3.0) -> dict[str, t.Any]:
    top = [{"token": "Paris", "logprob": value}, {"token": "Rome", "logprob": other}]
    return {"logprobs": {"content": [{"token": "Paris", "logprob": value, "top_logprobs": top}]}}


# Field cases B99 and B101, and the numbers: (id, answer, expected patterns, words of the problem or None)
TEST_JUDGE: list[tuple[str, Answer, list[str], str | None]] = [
    ("right", whole({"content": "Paris."}), ["(?i)paris"], None),
    ("any-text", whole({"content": "Rome."}), [], None),
    ("thinking-until-the-limit", whole({"content": None, "reasoning": "We need"}, "length"), [], None),
    ("cut-by-the-limit", whole({"content": "Paris"}, "length"), ["Paris"], None),
    ("tool-call", whole({"content": None, "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls"), [], None),
    ("empty", whole({"content": "", "reasoning": None}), [], "The answer is empty"),
    ("wrong", whole({"content": "Rome."}), ["Paris"], "The text 'Rome.' does not match 'Paris'"),
    (
        "thought-instead",
        whole({"content": "", "reasoning_content": "We need"}, "length"),
        ["Paris"],
        "the tokens went into reasoning",
    ),
    ("cut-off", whole({"content": "Paris"}, None), [], "without a finish_reason"),
    ("tool-tags", whole({"content": "<tool_call:opensource>get_time</arg_value:opensource>"}), [], "raw tags"),
    ("think-tags", whole({"content": "<think:opensource>x</think:opensource>ok"}), [], "raw tags"),
    ("not-json", read_body("<html>", 1.0), [], "not JSON: '<html>'"),
    ("a-list", read_body("[1]", 1.0), [], "not an object"),
    ("finite", whole({"content": "Paris."}, **logprobs(-0.1)), [], None),
    ("unlikely-candidate", whole({"content": "Paris."}, **logprobs(-0.1, -9999.0)), [], None),
    ("nan", whole({"content": "!!!!"}, **logprobs(float("nan"))), [], "not finite"),
    ("null", whole({"content": "!!!!"}, **logprobs(None)), [], "not finite"),
    ("clamped", whole({"content": "!!!!"}, **logprobs(-9999.0)), [], "not finite"),
    ("nan-candidate", whole({"content": "!!!!"}, **logprobs(-0.1, float("nan"))), [], "not finite"),
]


@pytest.mark.parametrize(
    ("answer", "expect", "problem"), [row[1:] for row in TEST_JUDGE], ids=[row[0] for row in TEST_JUDGE]
)
def test_judge(answer: Answer, expect: list[str], problem: str | None) -> None:
    problems = judge(answer, Wanted(expect))
    assert (problem in ". ".join(problems)) if problem else problems == []


def test_one_bad_position_spoils_the_answer() -> None:
    answer = stream(*({"delta": {"content": "a"}, **logprobs(value)} for value in (-0.1, float("nan"), -0.2)))
    assert answer.logprobs_finite is False
    assert answer.logprobs == [{"token": "Paris", "logprob": -0.1}, {"token": "Rome", "logprob": -3.0}]


def written(*tokens: str, margin: float = 1.0) -> dict[str, t.Any]:
    """Log probabilities of an answer of these tokens; the runner-up of each is less likely by C(margin)."""
    return {
        "logprobs": {
            "content": [
                {
                    "token": token,
                    "logprob": -1.0,
                    "top_logprobs": [{"token": token, "logprob": -1.0}, {"token": "x", "logprob": -1.0 - margin}],
                }
                for token in tokens
            ]
        }
    }


TEST_NONSENSE: dict[str, tuple[Answer, str | None]] = {
    "words": (whole({"content": "Paris ."}, **written("Paris", " ", ".")), None),
    "stuck": (whole({"content": "!" * 9}, **written(*"!!!!!!!!!")), "repeats the token '!'"),
    "stuck after a start": (whole({"content": "a" + "!" * 8}, **written(*"a!!!!!!!!")), "repeats the token '!'"),
    "a short shout": (whole({"content": "No!!!"}, **written("No", "!", "!", "!")), None),
    "indented code": (whole({"content": "x" + " " * 12}, **written("x", *[" "] * 12)), None),
    "no choice at all": (whole({"content": "a b"}, **written("a", "b", margin=0.0)), "All candidates are equally"),
    "one tie": (whole({"content": "a"}, **written("a", margin=0.0)), None),
    "a suffix": (whole({"content": "Paris:opensource>"}), "raw tags"),
    "a word like it": (whole({"content": "It is opensource: yes"}), None),
}


@pytest.mark.parametrize(("answer", "problem"), TEST_NONSENSE.values(), ids=TEST_NONSENSE)
def test_nonsense(answer: Answer, problem: str | None) -> None:
    problems = judge(answer, Wanted())
    assert (problem in ". ".join(problems)) if problem else problems == []


def call(name: str, arguments: str, finish: str = "tool_calls") -> Answer:
    return whole({"content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}, finish)


TEST_CALLS: dict[str, tuple[Answer, list[str]]] = {
    "right": (call("get_weather", '{"city": "Tokyo"}'), []),
    "text instead": (
        whole({"content": "Sunny."}),
        [
            "The answer 'Sunny.' calls no tool, and it must call get_weather: the engine needs --tool-call-parser and "
            "--enable-auto-tool-choice"
        ],
    ),
    "another tool": (call("get_time", "{}"), ["The answer calls 'get_time', and it must call get_weather"]),
    "broken arguments": (
        call("get_weather", '{"city": '),
        ["The call of get_weather has the arguments '{\"city\": ', which are no JSON object"],
    ),
    "no object": (
        call("get_weather", '"x"'),
        ["The call of get_weather has the arguments '\"x\"', which are no JSON object"],
    ),
    "another end": (
        call("get_weather", "{}", "stop"),
        ["The call ended with finish_reason 'stop', and it must be 'tool_calls'"],
    ),
}


@pytest.mark.parametrize(("answer", "problems"), TEST_CALLS.values(), ids=TEST_CALLS)
def test_calls(answer: Answer, problems: list[str]) -> None:
    assert judge(answer, Wanted(tool="get_weather")) == problems


def test_a_streamed_call_comes_in_pieces() -> None:
    pieces = [{"index": 0, "function": {"name": "get_weather"}}, {"index": 0, "function": {"arguments": '{"city": '}}]
    pieces += [{"index": 0, "function": {"arguments": '"Tokyo"}'}}, {"index": 1, "function": {"name": "f"}}]
    answer = stream(
        *({"delta": {"tool_calls": [piece]}} for piece in pieces), {"delta": {}, "finish_reason": "tool_calls"}
    )
    assert answer.tool_calls == [
        {"name": "get_weather", "arguments": '{"city": "Tokyo"}'},
        {"name": "f", "arguments": ""},
    ]
    assert judge(answer, Wanted(tool="get_weather")) == []


@pytest.mark.parametrize("index", [-1, 10**9, None, "0"])
def test_an_index_that_is_garbage(index: t.Any) -> None:
    answer = stream({"delta": {"tool_calls": [{"index": index, "function": {"name": "f"}}]}, "finish_reason": "stop"})
    assert len(answer.tool_calls) <= 64


TEST_REASONING: dict[str, tuple[dict[str, t.Any], str | None]] = {
    "apart": ({"content": "Paris", "reasoning": "Let me see"}, None),
    "the former name": ({"content": "Paris", "reasoning_content": "Let me see"}, None),
    "in the text": ({"content": "Let me see. Paris"}, "has no reasoning apart from its text"),
}


@pytest.mark.parametrize(("message", "problem"), TEST_REASONING.values(), ids=TEST_REASONING)
def test_reasoning(message: dict[str, t.Any], problem: str | None) -> None:
    problems = judge(whole(message), Wanted(reasoning=True))
    assert (problem in ". ".join(problems)) if problem else problems == []
