#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: chat_smoke
short_description: Ask a served model one question and judge the answer
version_added: 0.1.0
description:
  - Sends a chat question to an OpenAI-compatible API and fails unless the answer is text, as expected, and computed
    with finite log probabilities. C(/health) is no such proof; it answers 200 for a model that computes NaN.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
    details: Asks nothing then and returns RV(ok) as null.
  diff_mode:
    support: N/A
    details: The module changes nothing.
  idempotent:
    support: full
    details: The module changes nothing.
options:
  url:
    description: Base URL of the API, for example V(http://127.0.0.1:8000).
    type: str
    required: true
  model:
    description: Name of the served model.
    type: str
    required: true
  question:
    description: What to ask.
    type: str
    default: capital of France? one word
  expect:
    description: Regular expressions that the text must match, all of them. Any text will do if there are none.
    type: list
    elements: str
    default: []
  max_tokens:
    description: Most tokens to generate.
    type: int
    default: 8
  temperature:
    description: Sampling temperature; V(0) makes the answer repeatable.
    type: float
    default: 0.0
  tools:
    description: Tools that the model may call, as the API takes them.
    type: list
    elements: dict
    default: []
  expect_tool:
    description: Name of the tool that the answer must call, with a JSON object as arguments.
    type: str
  expect_reasoning:
    description: Whether the answer must have a thought apart from its text.
    type: bool
    default: false
  repeats:
    description:
      - How often to ask again afterwards.
      - An answer that differs is a warning and makes RV(repeatable) false. Kernels that add in no fixed order do that.
    type: int
    default: 0
  reasoning_effort:
    description: Hy3's thinking mode, as its chat template takes it.
    type: str
    choices: [no_think, low, high]
    default: no_think
  warmups:
    description:
      - How often to ask before the answer that is judged and timed.
      - The first requests after a start are slow, as weights are still paged in.
    type: int
    default: 0
  stream:
    description: Whether to have the answer streamed; without it there is no RV(ttft_s) and no RV(decode_tps).
    type: bool
    default: true
  top_logprobs:
    description: How many candidates to ask for at each position, at most V(20).
    type: int
    default: 5
  timeout:
    description: Seconds for each request as a whole. The first one after a start may take minutes.
    type: float
    default: 600
  api_key:
    description: Key of the API, if it has one.
    type: str
"""

EXAMPLES = r"""
---
- name: Ask for the capital of France after two throwaway generations
  sparks.hy3.chat_smoke:
    url: http://127.0.0.1:8000
    model: hy3-nvfp4
    expect: ['(?i)\bparis\b']
    warmups: 2
  register: smoke

- name: Ask for a tool call
  sparks.hy3.chat_smoke:
    url: http://127.0.0.1:8000
    model: hy3-nvfp4
    question: What is the weather in Tokyo? Call the tool.
    tools:
      - type: function
        function:
          name: get_weather
          parameters: {type: object, properties: {city: {type: string}}, required: [city]}
    expect_tool: get_weather
    max_tokens: 128
"""

RETURN = r"""
ok:
  description: Whether the answer is right; null in check mode.
  returned: always
  type: bool
problems:
  description: What is wrong with the answer, in sentences.
  returned: when an answer came
  type: list
  elements: str
text:
  description: The answer's text.
  returned: when an answer came
  type: str
  sample: Paris.
reasoning:
  description: The answer's reasoning, where a reasoning parser separates it.
  returned: when an answer came
  type: str
tool_calls:
  description: The tools that the answer calls.
  returned: when an answer came
  type: list
  elements: dict
  contains:
    name:
      description: Name of the tool.
      type: str
      sample: get_weather
    arguments:
      description: The arguments as the engine sent them.
      type: str
      sample: '{"city": "Tokyo"}'
repeatable:
  description: Whether each of O(repeats) gave the same text; null without any.
  returned: when an answer came
  type: bool
finish_reason:
  description: Why the generation ended.
  returned: when an answer came
  type: str
  sample: stop
usage:
  description: Token counts of the engine, or null if it sent none.
  returned: when an answer came
  type: dict
  sample: {prompt_tokens: 12, completion_tokens: 3, total_tokens: 15}
ttft_s:
  description: Seconds to the first text, or null without O(stream) or if a parser held the text back.
  returned: when an answer came
  type: float
decode_tps:
  description:
    - Tokens per second from the first to the last text, or null where that cannot be told.
    - A handful of tokens makes a poor benchmark.
  returned: when an answer came
  type: float
overall_tps:
  description: Tokens per second over the whole request, or null without RV(usage).
  returned: when an answer came
  type: float
logprobs_finite:
  description: Whether all log probabilities are finite; null if the API sent none.
  returned: when an answer came
  type: bool
logprobs:
  description: Candidates for the first token, the most likely first. A C(logprob) that is no finite number is null.
  returned: when an answer came
  type: list
  elements: dict
  sample: [{token: Paris, logprob: -0.01}]
"""

import re
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._openai import Answer, Client, request_body, timing
from ansible_collections.sparks.hy3.plugins.module_utils._smoke import Wanted, judge


def check_patterns(patterns: list[str]) -> None:
    """Refuse a pattern that does not compile before a model is asked anything."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise Hy3Error(f"expect has {pattern!r}, which is no regular expression: {error}") from error


def ask(params: dict[str, t.Any]) -> tuple[Answer, list[Answer]]:
    """The answer after the warm-ups, each of which must come, too, and those to the same question afterwards."""
    client = Client(params["url"], key=params["api_key"], timeout=params["timeout"])
    body = request_body(
        model=params["model"],
        question=params["question"],
        max_tokens=params["max_tokens"],
        temperature=params["temperature"],
        stream=params["stream"],
        reasoning_effort=params["reasoning_effort"],
        top=params["top_logprobs"],
        tools=params["tools"],
    )
    for _warmup in range(params["warmups"]):
        client.chat(body)
    return client.chat(body), [client.chat(body) for _repeat in range(params["repeats"])]


def report(answer: Answer, again: list[Answer], problems: list[str]) -> dict[str, t.Any]:
    return {
        "ok": not problems,
        "problems": problems,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": answer.tool_calls,
        "repeatable": all(other.text == answer.text for other in again) if again else None,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "logprobs_finite": answer.logprobs_finite,
        "logprobs": answer.logprobs,
        **timing(answer),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "question": {"type": "str", "default": "capital of France? one word"},
            "expect": {"type": "list", "elements": "str", "default": []},
            "max_tokens": {"type": "int", "default": 8, "no_log": False},
            "temperature": {"type": "float", "default": 0.0},
            "tools": {"type": "list", "elements": "dict", "default": []},
            "expect_tool": {"type": "str"},
            "expect_reasoning": {"type": "bool", "default": False},
            "repeats": {"type": "int", "default": 0},
            "reasoning_effort": {"type": "str", "choices": ["no_think", "low", "high"], "default": "no_think"},
            "warmups": {"type": "int", "default": 0},
            "stream": {"type": "bool", "default": True},
            "top_logprobs": {"type": "int", "default": 5},
            "timeout": {"type": "float", "default": 600},
            "api_key": {"type": "str", "no_log": True},
        },
        supports_check_mode=True,
    )
    try:
        check_patterns(module.params["expect"])
        if module.check_mode:
            module.exit_json(changed=False, ok=None, msg="Check mode: the model was not asked")
        answer, again = ask(module.params)
    except Hy3Error as error:
        module.fail_json(msg=str(error), ok=False)
    wanted = Wanted(module.params["expect"], module.params["expect_tool"], module.params["expect_reasoning"])
    result = report(answer, again, judge(answer, wanted))
    if result["repeatable"] is False:
        module.warn(f"The same question at temperature {module.params['temperature']:g} got another answer than before")
    if not result["ok"]:
        module.fail_json(msg=". ".join(result["problems"]), **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
