# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads systemd units as systemd does, for tests. Stricter: what systemd would expand or guess is an error here."""

from __future__ import annotations

import re

SPACE = " \t\n\r"
ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
ESCAPES |= {char: char for char in "\\\"'"}


def split_words(line: str, *, command: bool) -> list[str]:
    """Split and unquote by systemd.syntax(7); a ``command`` has ``$$`` for ``$``, and everything ``%%`` for ``%``."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    chars = iter(line)
    for char in chars:
        if char == "\\":
            word = (word or "") + ESCAPES[next(chars)]
        elif quote:
            quote, word = ("", word) if char == quote else (quote, f"{word}{char}")
        elif char in "\"'":
            quote, word = char, word or ""
        elif char not in SPACE:
            word = (word or "") + char
        elif word is not None:
            words.append(word)
            word = None
    assert not quote, f"a quote stays open in {line!r}"
    if word is not None:
        words.append(word)
    return [_literal(word, "%$" if command else "%") for word in words]


def _literal(word: str, doubled: str) -> str:
    for char in doubled:
        assert char not in word.replace(char * 2, ""), f"systemd would expand {char} in {word!r}"
        word = word.replace(char * 2, char)
    return word


def read_unit(text: str) -> dict[str, list[str]]:
    """Return the values of each ``Section.Name``, in the file's order."""
    settings: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif line and line[0] not in "#;":
            name, equals, value = line.partition("=")
            assert section and equals and not line.endswith("\\"), line
            settings.setdefault(f"{section}.{name}", []).append(value)
    return settings


def read_environment(settings: list[str]) -> dict[str, str]:
    """Return the variables of all ``Environment=`` lines; none may be set twice."""
    pairs = [word.partition("=")[::2] for line in settings for word in split_words(line, command=False)]
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def read_options(argv: list[str]) -> dict[str, str]:
    """Return ``--name value`` by name, with an empty value for a bare option; none may stand twice."""
    options: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name = word.removeprefix("--")
            assert name not in options, name
            options[name] = ""
        else:
            assert name and not options[name], f"{word!r} belongs to no option"
            options[name] = word
    return options
