# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What is wrong with a model's answer. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._openai import Answer

# Tags of Hy3 that only a mismatched parser leaves in the text (its checkpoints may add a suffix after the name).
_TAG_RESIDUE = re.compile(r"</?(?:think|tool_calls?|tool_sep|arg_key|arg_value)\b|:opensource\b")
# So many equal tokens in a row are no answer: what a model with broken weights writes at temperature 0.
_STUCK = 8
# One position may be a tie by chance.
_TIES = 2


@dataclass(frozen=True)
class Wanted:
    """What an answer must be: regular expressions for its text, a call of one tool, a thought before it."""

    patterns: Sequence[str] = ()
    tool: str | None = None
    reasoning: bool = False


def judge(answer: Answer, wanted: Wanted) -> list[str]:
    """What is wrong with an answer, in sentences; empty for a right one."""
    if answer.error:
        return [f"The engine answered with an error: {answer.error}"]
    problems = _broken(answer)
    for pattern in wanted.patterns:
        if not re.search(pattern, answer.text):
            thought = " (the tokens went into reasoning)" if answer.reasoning and not answer.text else ""
            problems.append(f"The text {answer.text!r} does not match {pattern!r}{thought}")
    if wanted.reasoning and not answer.reasoning.strip():
        problems.append(
            f"The answer {answer.text!r} has no reasoning apart from its text: the engine needs --reasoning-parser"
        )
    return problems + (_call_problems(answer, wanted.tool) if wanted.tool else [])


def _broken(answer: Answer) -> list[str]:
    """What no right answer of any model has."""
    problems = []
    if answer.finish_reason is None:
        problems.append("The stream ended without a finish_reason: the answer is cut off")
    if not (answer.text.strip() or answer.reasoning.strip() or answer.tool_calls):
        problems.append("The answer is empty")
    if answer.logprobs_finite is False:
        problems.append("The log probabilities are not finite: the model computes NaN, whatever /health says")
    elif len(answer.tokens) >= _TIES and answer.undecided:
        problems.append("All candidates are equally likely at every position: the model's head computes nothing")
    if stuck := _stuck(answer.tokens):
        problems.append(f"The answer repeats the token {stuck!r}: the model computes nonsense, whatever /health says")
    if _TAG_RESIDUE.search(answer.text):
        problems.append(f"The text holds raw tags, so the engine's parser does not fit the checkpoint: {answer.text!r}")
    return problems


def _stuck(tokens: Sequence[str]) -> str | None:
    """Return the token that fills the end of an answer; white space is none, for code is indented."""
    last = set(tokens[-_STUCK:])
    return tokens[-1] if len(tokens) >= _STUCK and len(last) == 1 and tokens[-1].strip() else None


def _call_problems(answer: Answer, tool: str) -> list[str]:
    if not answer.tool_calls:
        return [
            f"The answer {answer.text!r} calls no tool, and it must call {tool}: the engine needs --tool-call-parser "
            "and --enable-auto-tool-choice"
        ]
    call = answer.tool_calls[0]
    problems = []
    if call["name"] != tool:
        problems.append(f"The answer calls {call['name']!r}, and it must call {tool}")
    if not _is_object(call["arguments"]):
        problems.append(f"The call of {call['name']} has the arguments {call['arguments']!r}, which are no JSON object")
    if answer.finish_reason != "tool_calls":
        problems.append(f"The call ended with finish_reason {answer.finish_reason!r}, and it must be 'tool_calls'")
    return problems


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
