# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hy_v3 parsers on small models of vLLM's files: which state, and which tokens they look for."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._patch import build
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Patch, State
from ansible_collections.sparks.hy3.plugins.module_utils._patch._vllm_parsers import PATCHES

REASONING, TOOLS = PATCHES

THINK = '''\
class HYV3ReasoningParser(Base):
    """Text between <think> and </think>."""

    def __init__(self, tokenizer, *args, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.effort = kwargs.get("reasoning_effort")

    @property
    def start_token(self) -> str:
        """The token that starts reasoning content."""
        return "<think>"

    @property
    def end_token(self) -> str:
        return "</think>"
'''
TAGS = {
    f"{name}_token": tag
    for name, tag in (
        ("tool_calls_start", "<tool_calls>"),
        ("tool_calls_end", "</tool_calls>"),
        ("tool_call_start", "<tool_call>"),
        ("tool_call_end", "</tool_call>"),
        ("tool_sep", "<tool_sep>"),
        ("arg_key_start", "<arg_key>"),
        ("arg_key_end", "</arg_key>"),
        ("arg_value_start", "<arg_value>"),
        ("arg_value_end", "</arg_value>"),
    )
}
CALLS = """\
class HYV3ToolParser(Base):
    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
""" + "".join(f'        self.{name}: str = "{tag}"\n' for name, tag in TAGS.items())


def suffixed(text: str, *, by: str, count: int = -1) -> str:
    """``text`` with its tokens written as ``by``, where {} is a token without its closing bracket."""
    for tag in ("<think>", "</think>", *TAGS.values()):
        if f'"{tag}"' in text and count:
            text = text.replace(f'"{tag}"', by.format(tag[:-1]))
            count -= 1
    return text


NEWER = 'f"{}{{self.suffix}}>"'
WIRED = '"{}:opensource>"'
GETS = ("        super()", "        self.suffix = tokenizer.init_kwargs['token_suffix']\n        super()")

LATE = ("kwargs)\n", "kwargs)\n        self.suffix = tokenizer.init_kwargs['token_suffix']\n")

# (what, patch, file, its state)
TEST_INSPECT: list[tuple[str, Patch, str, State]] = [
    ("reasoning", REASONING, THINK, "defect"),
    ("tools", TOOLS, CALLS, "defect"),
    ("reasoning-newer", REASONING, suffixed(THINK, by=NEWER).replace(*GETS), "upstream_fixed"),
    ("tools-newer", TOOLS, suffixed(CALLS, by=NEWER).replace(*GETS), "upstream_fixed"),
    ("reasoning-newer-late", REASONING, suffixed(THINK, by=NEWER).replace(*LATE, 1), "partial"),
    (
        "tools-newer-after-base",
        TOOLS,
        suffixed(CALLS, by=NEWER).replace("tools)\n", "tools)\n        self.suffix = 'x'\n"),
        "upstream_fixed",
    ),
    ("tools-newer-late", TOOLS, suffixed(CALLS, by=NEWER) + "        self.suffix = 'x'\n", "partial"),
    ("reasoning-re-export", REASONING, "from x import HYV3ReasoningParser\n", "unrecognised"),
    ("reasoning-by-sed", REASONING, suffixed(THINK, by=WIRED), "upstream_fixed"),
    ("tools-by-sed", TOOLS, suffixed(CALLS, by=WIRED), "upstream_fixed"),
    ("two-suffixes", REASONING, suffixed(suffixed(THINK, by=WIRED, count=1), by='"{}:other>"'), "partial"),
    ("half-by-sed", REASONING, suffixed(THINK, by=WIRED, count=1), "partial"),
    ("tools-half-by-sed", TOOLS, suffixed(CALLS, by=WIRED, count=4), "partial"),
    ("half-newer", TOOLS, suffixed(CALLS, by=NEWER, count=8).replace(*GETS), "partial"),
    ("no-suffix-found", REASONING, suffixed(THINK, by=NEWER), "partial"),
    ("suffix-not-used", REASONING, THINK.replace(*GETS), "partial"),
    ("other-token", REASONING, THINK.replace('"<think>"', '"<thinking>"'), "unrecognised"),
    ("token-from-elsewhere", TOOLS, CALLS.replace('"<tool_sep>"', "SEP"), "unrecognised"),
    ("token-twice", TOOLS, CALLS + '        self.tool_sep_token = "<tool_sep>"\n', "unrecognised"),
    ("token-elsewhere", TOOLS, CALLS + '        self.split = "<tool_sep>".join\n', "unrecognised"),
    (
        "two-returns",
        REASONING,
        THINK.replace('return "<think>"', 'return "<think>" or 1\n        return "<think>"'),
        "unrecognised",
    ),
    ("renamed", REASONING, THINK.replace("HYV3", "HYV4"), "unrecognised"),
    ("two-classes", REASONING, THINK * 2, "unrecognised"),
    ("other-argument", REASONING, THINK.replace("(self, tokenizer", "(self, tok"), "unrecognised"),
    ("no-init", REASONING, THINK.replace("def __init__", "def setup"), "unrecognised"),
    ("nothing", TOOLS, "class Other:\n    pass\n", "absent"),
]


@pytest.mark.parametrize(
    ("patch", "text", "expected"), [row[1:] for row in TEST_INSPECT], ids=[row[0] for row in TEST_INSPECT]
)
def test_inspect(patch: Patch, text: str, expected: State) -> None:
    finding = patch.inspect(ast.parse(text))
    assert finding.state == expected
    assert bool(finding.why) == (expected != "defect")


class Base:
    """As vLLM's: looks for its tokens when it is made."""

    def __init__(self, tokenizer: Any, *_args: Any, **_kwargs: Any) -> None:
        if hasattr(self, "start_token"):
            assert self.start_token in tokenizer.get_vocab()


class Tokenizer:
    def __init__(self, words: str, **init_kwargs: str) -> None:
        self.words = words.split()
        self.init_kwargs = init_kwargs

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


# The words in the vocabulary, the key if there is one, the suffix to be found.
TEST_SUFFIX: list[tuple[str, str, dict[str, str], str]] = [
    ("bare", "<think> <tool_calls>", {}, ""),
    ("from-vocabulary", "<think:opensource> <tool_calls:opensource>", {}, ":opensource"),
    ("from-key", "<think:a> <think:b> <tool_calls:a>", {"token_suffix": ":b"}, ":b"),
    ("empty-key", "<think:a> <tool_calls:a>", {"token_suffix": ""}, ":a"),
    ("bare-and-suffixed", "<think:a> <think> <tool_calls:a> <tool_calls>", {}, ""),
    ("others-that-begin-alike", "<thinking> <think: <think> <tool_calls_more> <tool_calls>", {}, ""),
]


@pytest.mark.parametrize(
    ("words", "key", "suffix"), [row[1:] for row in TEST_SUFFIX], ids=[row[0] for row in TEST_SUFFIX]
)
def test_tokens_after_the_patch(words: str, key: dict[str, str], suffix: str) -> None:
    space: dict[str, Any] = {"Base": Base}
    exec(build(THINK.encode(), [REASONING]), space)  # noqa: S102
    exec(build(CALLS.encode(), [TOOLS]), space)  # noqa: S102
    thinker = space["HYV3ReasoningParser"](Tokenizer(words, **key))
    assert (thinker.start_token, thinker.end_token) == (f"<think{suffix}>", f"</think{suffix}>")
    caller = space["HYV3ToolParser"](Tokenizer(words, **key))
    assert {name: getattr(caller, name) for name in TAGS} == {n: f"{tag[:-1]}{suffix}>" for n, tag in TAGS.items()}
