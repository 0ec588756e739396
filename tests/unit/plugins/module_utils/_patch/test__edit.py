# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading source and editing it by offsets: every encoding, line end and layout keeps its own bytes."""

from __future__ import annotations

import ast

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import (
    Source,
    alias_of,
    calls,
    keyword,
    parameters,
    same,
    strings,
    unpacks,
)

BOM = b"\xef\xbb\xbf"

# The file, and the file with C="c", put before keyword q of the one call of f.
TEST_INSERT: list[tuple[str, bytes, bytes]] = [
    ("one-line", b"f(a, q=q)\n", b'f(a, c="c", q=q)\n'),
    ("only-argument", b"f(q=q)", b'f(c="c", q=q)'),
    ("hugging-lines", b"f(\n    a, q=q\n)\n", b'f(\n    a, c="c", q=q\n)\n'),
    ("own-lines", b"f(\n    a,\n    q=q,\n)\n", b'f(\n    a,\n    c="c",\n    q=q,\n)\n'),
    ("comment-after", b"f(\n    a,\n    q=q,  # why\n)\n", b'f(\n    a,\n    c="c",\n    q=q,  # why\n)\n'),
    ("tabs", b"f(\n\ta,\n\tq=q)\n", b'f(\n\ta,\n\tc="c",\n\tq=q)\n'),
    ("column-zero", b"f(a,\nq=q)\n", b'f(a,\nc="c", q=q)\n'),
    ("crlf", b"x = 1\r\nf(\r\n  a,\r\n  q=q,\r\n)\r\n", b'x = 1\r\nf(\r\n  a,\r\n  c="c",\r\n  q=q,\r\n)\r\n'),
    ("cr", b"x = 1\rf(\r  a,\r  q=q)\r", b'x = 1\rf(\r  a,\r  c="c",\r  q=q)\r'),
    ("mixed-ends", b"x = 1\nf(\r\n  a,\r\n  q=q)\n", b'x = 1\nf(\r\n  a,\r\n  c="c",\n  q=q)\n'),
    ("bom", BOM + b"f(a, q=q)\n", BOM + b'f(a, c="c", q=q)\n'),
    ("non-ascii-line", "f('größe 混元', q=q)\n".encode(), "f('größe 混元', c=\"c\", q=q)\n".encode()),
    (
        "latin-1",
        b"# -*- coding: latin-1 -*-\n# \xfc\nf('\xe4\xf6', q=q)\n",
        b"# -*- coding: latin-1 -*-\n# \xfc\nf('\xe4\xf6', c=\"c\", q=q)\n",
    ),
    ("form-feed", b"x = 1\n\x0c\nf(a, q=q)\n", b'x = 1\n\x0c\nf(a, c="c", q=q)\n'),
    ("line-separator", "x = '\u2028'\nf(a, q=q)\n".encode(), "x = '\u2028'\nf(a, c=\"c\", q=q)\n".encode()),
    ("several-lines-above", b's = """\n\n"""\nf(a, q=q)\n', b's = """\n\n"""\nf(a, c="c", q=q)\n'),
]


@pytest.mark.parametrize(("before", "after"), [row[1:] for row in TEST_INSERT], ids=[row[0] for row in TEST_INSERT])
def test_insert_before(before: bytes, after: bytes) -> None:
    source = Source(before)
    (call,) = calls(source.tree, "f")
    argument = keyword(call, "q")
    assert argument is not None
    assert source.edited([source.insert_before(argument, 'c="c",')]) == after
    compile(after, "f.py", "exec")


def test_edited_takes_edits_in_any_order() -> None:
    source = Source(b"f(q=1)\nf(q=2)\n")
    edits = [source.insert_before(call.keywords[0], "c=0,") for call in calls(source.tree, "f")]
    assert source.edited(edits) == source.edited(edits[::-1]) == b"f(c=0, q=1)\nf(c=0, q=2)\n"


@pytest.mark.parametrize(
    "raw",
    [b"def f(:\n", b"\xff\n", b"# coding: no-such\n", b"# coding: rot13\n", b"x = 1\x00\n"],
    ids=["syntax", "utf-8", "cookie", "no-text", "nul"],
)
def test_source_refuses_what_python_cannot_read(raw: bytes) -> None:
    with pytest.raises((SyntaxError, ValueError)):
        Source(raw)


# Field case B78: what vLLM leaves where a module used to be.
TEST_ALIAS: list[tuple[str, str, str | None]] = [
    ("from", "import sys\nfrom vllm.new.place import hy_v3 as m\nsys.modules[__name__] = m\n", "vllm.new.place.hy_v3"),
    ("import-as", "import sys\nimport vllm.new as n\nsys.modules[__name__] = n\n", "vllm.new"),
    ("import", "import sys\nimport vllm.new\nsys.modules[__name__] = vllm.new\n", "vllm.new"),
    ("sys-by-another-name", "import sys as _s\nfrom a import m\n_s.modules[__name__] = m\n", "a.m"),
    ("modules-imported", "from sys import modules\nfrom a import m\nmodules[__name__] = m\n", "a.m"),
    (
        "by-name",
        "import importlib, sys\nsys.modules[__name__] = importlib.import_module('vllm.new')\n",
        "vllm.new",
    ),
    ("by-relative-name", "import sys\nsys.modules[__name__] = import_module('.new', __package__)\n", "vllm.models.new"),
    ("relative", "import sys\nfrom . import m\nsys.modules[__name__] = m\n", "vllm.models.m"),
    ("relative-further", "import sys\nfrom ..new import m\nsys.modules[__name__] = m\n", "vllm.new.m"),
    ("beyond-the-top", "import sys\nfrom .... import m\nsys.modules[__name__] = m\n", ".m"),
    ("unknown", "import sys\nsys.modules[__name__] = make()\n", "make()"),
    ("other-module", "import sys\nsys.modules['x'] = 1\n", None),
    ("re-export", "from vllm.new.place import *\n", None),
    ("only-said", '"""sys.modules[__name__] = m"""\n', None),
]


@pytest.mark.parametrize(("text", "alias"), [row[1:] for row in TEST_ALIAS], ids=[row[0] for row in TEST_ALIAS])
def test_alias_of(text: str, alias: str | None) -> None:
    assert alias_of(ast.parse(text), "vllm/models/hy_v3.py") == alias


def test_calls_by_name_and_by_attribute() -> None:
    tree = ast.parse("f(1)\nm.f(2)\nf.g(3)\nx = f\nfs(4)\n")
    assert [ast.unparse(call) for call in calls(tree, "f")] == ["f(1)", "m.f(2)"]


def test_unpacks() -> None:
    assert [unpacks(call) for call in calls(ast.parse("f(a, b=1)\nf(*a)\nf(**a)\n"), "f")] == [False, True, True]


def test_parameters() -> None:
    (function,) = ast.parse("def f(a, /, b: int, *c, d='', **e): pass").body
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == {"a", "b", "d"}


# The file, and the file with two statements put before its return.
TEST_STATEMENTS: list[tuple[str, bytes, bytes]] = [
    ("own-line", b"def f():\n    return 1\n", b"def f():\n    a\n    b\n    return 1\n"),
    ("same-line", b"def f(): return 1\n", b"def f(): a; b; return 1\n"),
    ("after-another", b"def f():\n\tx; return 1", b"def f():\n\tx; a; b; return 1"),
    ("crlf", b"def f():\r\n  return 1\r\n", b"def f():\r\n  a\r\n  b\r\n  return 1\r\n"),
]


@pytest.mark.parametrize(
    ("before", "after"), [row[1:] for row in TEST_STATEMENTS], ids=[row[0] for row in TEST_STATEMENTS]
)
def test_insert_statements(before: bytes, after: bytes) -> None:
    source = Source(before)
    (function,) = source.tree.body
    assert isinstance(function, ast.FunctionDef)
    assert source.edited([source.insert_statements(function.body[-1], ["a", "b"])]) == after


def test_replace_and_prepend_an_expression_of_several_lines() -> None:
    source = Source("f(q=('ö'\n  'b'), r=1)\n".encode())
    (call,) = calls(source.tree, "f")
    q, r = (item.value for item in call.keywords)
    assert source.edited([source.replace(q, "x"), source.prepend(r, "not ")]) == b"f(q=(x), r=not 1)\n"


def test_strings_are_not_docstrings() -> None:
    tree = ast.parse('"""module"""\ndef f():\n    "function"\n    return "a", f"b{x}"\n')
    assert strings(tree) == ["a", "b"]


def test_same_code_in_another_layout() -> None:
    (statement,) = ast.parse("a = [1,\n  (2)]").body
    assert same(statement, "a = [1, 2]")
    assert not same(statement, "a = [2, 1]")
