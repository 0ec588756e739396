# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a patch is, and how Python source is read and edited through its syntax tree."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Literal, NamedTuple, ParamSpec

P = ParamSpec("P")

State = Literal["absent", "upstream_fixed", "defect", "applied", "partial", "unrecognised"]

# What ends a line for Python; a form feed or U+2028 does not.
_LINE_END = re.compile(rb"\r\n|\r|\n")


class Finding(NamedTuple):
    """The state of one patch in one file; ``why`` is a clause for a person and may be empty.

    ``rest`` says of a ``partial`` one that the patch's edits add what is missing. ``suffix`` is that of the special
    tokens where somebody wrote one into the file, which then fits no checkpoint that has another.
    """

    state: State
    why: str = ""
    rest: bool = False
    suffix: str | None = None


class Edit(NamedTuple):
    """Replace the bytes from ``start`` to ``end`` (offsets of ``Source``) by ``text``, whose line ends are ``\\n``."""

    start: int
    end: int
    text: str


class Source:
    """A Python file: its text, its syntax tree, and offsets into its UTF-8 form.

    The tree counts columns in bytes of UTF-8 whatever encoding the file declares, so edits are made there and the
    result goes back into the file's own encoding, byte order mark and line ends.

    Raises SyntaxError or ValueError where the running interpreter cannot read the file.
    """

    def __init__(self, raw: bytes) -> None:
        self.encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        try:
            self.text = raw.decode(self.encoding)
        except LookupError as exc:  # such as rot13, a codec that makes no text
            raise ValueError(f"{self.encoding} is no encoding of text") from exc
        self.tree = ast.parse(self.text)
        self._utf8 = self.text.encode()
        self._line_starts = [0, *(match.end() for match in _LINE_END.finditer(self._utf8))]

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """Offset in bytes of the first byte of ``node``."""
        return self._line_starts[node.lineno - 1] + node.col_offset

    def insert_before(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> Edit:
        """Put ``text`` before ``node``: on a line of its own where the node begins its line, else on the same line."""
        start = self.start(node)
        lead = self._utf8[self._line_starts[node.lineno - 1] : start]
        return Edit(start, start, text + ("\n" + lead.decode() if lead.isspace() else " "))

    def prepend(self, node: ast.expr, text: str) -> Edit:
        """Put ``text`` directly before an expression."""
        return Edit(self.start(node), self.start(node), text)

    def replace(self, node: ast.expr, text: str) -> Edit:
        """Put ``text`` in place of an expression."""
        if node.end_lineno is None or node.end_col_offset is None:
            raise AssertionError("the parser sets them always")
        return Edit(self.start(node), self._line_starts[node.end_lineno - 1] + node.end_col_offset, text)

    def insert_statements(self, node: ast.stmt, statements: Iterable[str]) -> Edit:
        """Put simple statements before statement ``node``, each on a line of its own where ``node`` begins its line."""
        start = self.start(node)
        lead = self._utf8[self._line_starts[node.lineno - 1] : start]
        own_line = not lead.strip()
        return Edit(start, start, "".join(s + ("\n" + lead.decode() if own_line else "; ") for s in statements))

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """The file's new bytes."""
        content = self._utf8
        for edit in sorted(edits, reverse=True):
            line_end = _LINE_END.search(self._utf8, edit.start)
            text = edit.text.replace("\n", line_end.group().decode() if line_end else "\n")
            content = content[: edit.start] + text.encode() + content[edit.end :]
        return content.decode().encode(self.encoding)


@dataclass(frozen=True)
class Patch:
    """One entry of the catalogue in one file; a patch of two files has two, under the same id.

    ``inspect`` decides by the syntax tree alone; it says ``applied`` only for the exact form that ``edits`` makes.
    ``edits`` is called for a tree in state ``defect``, or ``partial`` with ``rest``, and returns edits that do not
    overlap.
    """

    id: str
    engine: str  # the name of its Python package
    file: str  # relative to the directory that holds the package
    title: str
    harm: str  # what goes wrong without it
    source: str
    inspect: Callable[[ast.Module], Finding]
    edits: Callable[[Source], list[Edit]]


def classes(tree: ast.AST, name: str) -> list[ast.ClassDef]:
    """Every definition of class ``name`` in ``tree``."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]


def methods(owner: ast.ClassDef, name: str) -> list[ast.FunctionDef]:
    """Every definition of method ``name`` in the body of ``owner``."""
    return [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name]


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Every call of ``name(...)`` or ``….name(...)`` in ``tree``."""

    def called(node: ast.Call) -> str | None:
        if isinstance(node.func, ast.Name):
            return node.func.id
        return node.func.attr if isinstance(node.func, ast.Attribute) else None

    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == name]


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    """The keyword argument ``name`` of ``call``."""
    return next((item for item in call.keywords if item.arg == name), None)


def strings(tree: ast.AST) -> list[str]:
    """Every string in ``tree`` that is part of an expression, so no docstrings."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]


class UnknownCodeError(Exception):
    """The code is not what a patch knows; the message is a clause for a person."""


def deciding(inspect: Callable[P, Finding]) -> Callable[P, Finding]:
    """Make an inspection that may raise UnknownCodeError say ``unrecognised`` then."""

    @wraps(inspect)
    def decide(*args: P.args, **kwargs: P.kwargs) -> Finding:
        try:
            return inspect(*args, **kwargs)
        except UnknownCodeError as exc:
            return Finding("unrecognised", str(exc))

    return decide


def each_once(wanted: dict[str, int]) -> None:
    """UnknownCodeError unless everything in ``wanted`` (what it is to how often it was found) is there once."""
    if any(number != 1 for number in wanted.values()):
        counts = ", ".join(f"{number} x {what}" for what, number in wanted.items())
        raise UnknownCodeError(f"expected each once, found {counts}")


def same(node: ast.expr | ast.stmt, text: str) -> bool:
    """Whether ``node`` is what the source ``text`` says, whatever its layout."""
    # Not the module itself: a string by itself would be its docstring.
    return ast.unparse(node) == ast.unparse(ast.parse(text).body[0])


def unpacks(call: ast.Call) -> bool:
    """Whether ``call`` has ``*args`` or ``**kwargs``, so that its arguments cannot be read from the tree."""
    return any(isinstance(arg, ast.Starred) for arg in call.args) or any(item.arg is None for item in call.keywords)


def is_none(node: ast.AST) -> bool:
    """Whether ``node`` is the literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """The argument ``name`` of ``call``, by keyword or at ``position``; UnknownCodeError if the call hides it."""
    if unpacks(call):
        raise UnknownCodeError(f"the call of {ast.unparse(call.func)} unpacks its arguments")
    given = keyword(call, name)
    return given.value if given else next(iter(call.args[position:]), None)


def value_at(function: ast.FunctionDef, call: ast.Call, value: ast.expr | None) -> ast.AST | None:
    """What decides about ``value``, an argument of ``call``: ``value`` or the statement that last sets that variable.

    None for a parameter that ``function`` hands down as it got it.
    """
    if not isinstance(value, ast.Name):
        return value
    setters = [node for node in function.body if stores(node, value.id)]
    if not setters and value.id in parameters(function):
        return None
    if not setters or (setters[-1].end_lineno or call.lineno) >= call.lineno:
        raise UnknownCodeError(f"{value.id} is not set before the call of {ast.unparse(call.func)}")
    last = setters[-1]
    return last.value if isinstance(last, ast.Assign) else last


def stores(tree: ast.AST, name: str) -> bool:
    """Whether ``tree`` sets the variable ``name``."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(tree))


def parameters(function: ast.FunctionDef) -> set[str]:
    """Names of the parameters of ``function``, without ``*args`` and ``**kwargs``."""
    every = function.args
    return {item.arg for item in (*every.posonlyargs, *every.args, *every.kwonlyargs)}


def gone(tree: ast.Module, name: str, kind: str = "class") -> Finding:
    """``absent``, for a file that does not define ``name``; UnknownCodeError if it may have it from elsewhere."""
    if any(_brings(node, name) for node in ast.walk(tree)) or any(
        isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body
    ):
        raise UnknownCodeError(f"{kind} {name} is not in this file and seems to come from another one")
    return Finding("absent", f"there is no {kind} {name}")


def _brings(node: ast.AST, name: str) -> bool:
    """Whether ``node`` imports or uses ``name``, or puts some other module in a module's place."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any(text in (name, "*") for item in node.names for text in (item.name, item.asname))
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return ast.unparse(node.value).rpartition(".")[2] == "modules"
    return name in (getattr(node, "id", None), getattr(node, "attr", None))


def alias_of(tree: ast.Module, file: str) -> str | None:
    """Dotted name of the module that ``file`` puts into ``sys.modules`` in its own place, None for a real module.

    vLLM leaves such files where a module used to be: an edit there would reach code that nobody runs.
    """
    module = file.removesuffix(".py").split("/")
    names = dict(_imported(tree, module))

    def meant(node: ast.expr) -> str:
        first, dot, rest = ast.unparse(node).partition(".")
        return names.get(ast.unparse(node)) or names.get(first, first) + dot + rest

    for node in (node for node in tree.body if isinstance(node, ast.Assign)):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and same(target.slice, "__name__"):
                if meant(target.value) != "sys.modules":
                    continue
                named = strings(node.value) if calls(node.value, "import_module") else []
                return _absolute(named[0], module) if named else meant(node.value)
    return None


def _imported(tree: ast.Module, module: list[str]) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((item.asname or item.name, item.name) for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), module)
            yield from ((item.asname or item.name, f"{base}.{item.name}") for item in node.names)


def _absolute(name: str, module: list[str]) -> str:
    """``name`` as an import in ``module`` means it."""
    rest = name.lstrip(".")
    return ".".join([*module[: len(rest) - len(name)], rest]).rstrip(".") if rest != name else name
