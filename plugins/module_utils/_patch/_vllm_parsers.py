# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""vLLM's reasoning and tool parsers of Hy3: checkpoints whose special tokens carry a suffix."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import (
    Edit,
    Finding,
    Patch,
    Source,
    UnknownCodeError,
    classes,
    deciding,
    each_once,
    gone,
    methods,
    same,
    strings,
)


class _Parser(NamedTuple):
    """A parser's class, its special tokens without the closing bracket, and where those are written.

    Properties are read by the base class's ``__init__`` already.
    """

    name: str
    tokens: Mapping[str, str]
    written: Callable[[ast.ClassDef, str], list[ast.expr]]

    @property
    def suffix(self) -> str:
        """Source of the statement that finds the suffix, in the words of the parser's ``__init__``.

        The key is what vLLM 0.25 and newer read. A vocabulary that has the bare token, too, means no suffix.
        """
        first = next(iter(self.tokens.values()))
        size = len(first)
        return (
            'self.suffix: str = (getattr(tokenizer, "init_kwargs", None) or {}).get("token_suffix") or '
            f"min((token[{size}:-1] for token in tokenizer.get_vocab() "
            f'if token[:{size + 1}] in ("{first}>", "{first}:") and token.endswith(">")), default="")'
        )


def _returned(owner: ast.ClassDef, name: str) -> list[ast.expr]:
    """What the property ``name`` returns."""
    return [
        node.value
        for function in methods(owner, name)
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]


def _assigned(owner: ast.AST, name: str) -> list[ast.expr]:
    """What the methods of ``owner`` put into ``self.name``."""
    found = []
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [node.value for target in targets if ast.unparse(target) == f"self.{name}"]
    return found


_REASONING = _Parser("HYV3ReasoningParser", {"start_token": "<think", "end_token": "</think"}, _returned)
_TOOLS = _Parser(
    "HYV3ToolParser",
    {
        "tool_calls_start_token": "<tool_calls",
        "tool_calls_end_token": "</tool_calls",
        "tool_call_start_token": "<tool_call",
        "tool_call_end_token": "</tool_call",
        "tool_sep_token": "<tool_sep",
        "arg_key_start_token": "<arg_key",
        "arg_key_end_token": "</arg_key",
        "arg_value_start_token": "<arg_value",
        "arg_value_end_token": "</arg_value",
    },
    _assigned,
)


def _kind(value: ast.expr, token: str) -> str:
    """``bare``, ``computed`` from ``self.suffix``, ``wired`` and the suffix, or empty if it is none of these."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        text = value.value
        if text == f"{token}>":
            return "bare"
        return f"wired {text[len(token) : -1]}" if text.startswith(f"{token}:") and text.endswith(">") else ""
    return "computed" if same(value, f'f"{token}{{self.suffix}}>"') else ""


@deciding
def _inspect(parser: _Parser, tree: ast.Module) -> Finding:
    owners = classes(tree, parser.name)
    if not owners and not any(token in text for text in strings(tree) for token in parser.tokens.values()):
        return gone(tree, parser.name)
    inits = [init for owner in owners for init in methods(owner, "__init__")]
    each_once({f"class {parser.name}": len(owners), "__init__ in it": len(inits)})
    (owner,), (init,) = owners, inits
    written = {name: parser.written(owner, name) for name in parser.tokens}
    each_once({name: len(values) for name, values in written.items()})
    kinds = {_kind(values[0], parser.tokens[name]) for name, values in written.items()}
    suffixes = _assigned(owner, "suffix")
    if "" in kinds:
        raise UnknownCodeError("a special token is made in another way")
    if kinds == {"computed"} and suffixes:
        return _computed(parser, init)
    if kinds != {"bare"} or suffixes:
        (kind, *more) = sorted(kinds)
        if more or not kind.startswith("wired "):
            return Finding("partial", "only some of the special tokens have the suffix, or none is found for them")
        suffix = kind.removeprefix("wired ")
        return Finding("upstream_fixed", f"the suffix {suffix} is written into the tokens", suffix=suffix)
    return _elsewhere(parser, tree, init)


def _computed(parser: _Parser, init: ast.FunctionDef) -> Finding:
    if any(same(node, parser.suffix) for node in init.body):
        return Finding("applied")
    words = parser.tokens.keys() | ({"__init__"} if parser.written is _returned else set())
    if not any(_assigned(node, "suffix") for node in _before(init, words)):
        return Finding("partial", "the suffix is found only after the tokens are made")
    return Finding("upstream_fixed", "the special tokens are made with the suffix")


def _elsewhere(parser: _Parser, tree: ast.Module, init: ast.FunctionDef) -> Finding:
    """The state of a file that has all tokens bare: the defect, if the patch reaches all that uses them."""
    bare = [f"{token}>" for token in parser.tokens.values()]
    if sum(any(token in text for token in bare) for text in strings(tree)) != len(bare):
        raise UnknownCodeError("special tokens are written in other places, too")
    if _anchor(parser, init) is None or "tokenizer" not in [item.arg for item in init.args.args]:
        raise UnknownCodeError(f"{parser.name} is built in another way")
    return Finding("defect")


def _before(init: ast.FunctionDef, words: Set[str]) -> list[ast.stmt]:
    """The statements of ``init`` before the first that has one of ``words`` as an attribute."""
    return list(
        takewhile(
            lambda node: not any(isinstance(n, ast.Attribute) and n.attr in words for n in ast.walk(node)), init.body
        )
    )


def _anchor(parser: _Parser, init: ast.FunctionDef) -> ast.stmt | None:
    """The first statement that needs the suffix, or may."""
    return next(iter(init.body[len(_before(init, parser.tokens.keys() | {"__init__"})) :]), None)


def _edits(parser: _Parser, source: Source) -> list[Edit]:
    (owner,) = classes(source.tree, parser.name)
    (init,) = methods(owner, "__init__")
    anchor = _anchor(parser, init)
    if anchor is None:
        raise AssertionError("the state is not defect then")
    places = [(parser.written(owner, name)[0], token) for name, token in parser.tokens.items()]
    return [
        source.insert_statements(anchor, [parser.suffix]),
        *(source.replace(place, f'f"{token}{{self.suffix}}>"') for place, token in places),
    ]


_REASONING_PATCH = Patch(
    id="P2",
    engine="vllm",
    file="vllm/reasoning/hy_v3_reasoning_parser.py",
    title="Give the special tokens of the hy_v3 parsers the suffix that the checkpoint's have",
    harm=(
        "vLLM up to 0.24 knows <think> and <tool_calls> without a suffix only. With a checkpoint that has "
        "<think:opensource>, it does not start with the parsers: could not locate think start/end tokens in the "
        "tokenizer."
    ),
    source="seed 001, which replaces the words by one suffix; vLLM 0.25 reads the key token_suffix instead",
    inspect=lambda tree: _inspect(_REASONING, tree),
    edits=lambda source: _edits(_REASONING, source),
)

PATCHES = (
    _REASONING_PATCH,
    replace(
        _REASONING_PATCH,
        file="vllm/tool_parsers/hy_v3_tool_parser.py",
        inspect=lambda tree: _inspect(_TOOLS, tree),
        edits=lambda source: _edits(_TOOLS, source),
    ),
)
