# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.sparks.hy3.plugins.filter.systemd_quote import systemd_quote
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import split_words

# word, in a command, in Environment=
WORDS: dict[str, tuple[str, str, str]] = {
    "plain": ("--port=6379", "--port=6379", "--port=6379"),
    "path": ("/usr/bin/python3", "/usr/bin/python3", "/usr/bin/python3"),
    "empty": ("", '""', '""'),
    "space": ("a b", '"a b"', '"a b"'),
    "double quote": ('a"b', r'"a\"b"', r'"a\"b"'),
    "single quote": ("it's", '"it\'s"', '"it\'s"'),
    "backslash": (r"a\nb", r'"a\\nb"', r'"a\\nb"'),
    "backslash last": ("a\\", r'"a\\"', r'"a\\"'),
    "line end": ("a\nb\r\tc", r'"a\nb\r\tc"', r'"a\nb\r\tc"'),
    "specifier": ("%h/100%", '"%%h/100%%"', '"%%h/100%%"'),
    "variable": ("${HOME}$x", '"$${HOME}$$x"', '"${HOME}$x"'),
    "next command": (";", '";"', '";"'),
    "comment": ("#a", '"#a"', '"#a"'),
    "json": ('{"a":"b c"}', r'"{\"a\":\"b c\"}"', r'"{\"a\":\"b c\"}"'),
    "letters beyond ASCII": ("Grüße", '"Grüße"', '"Grüße"'),
}


@pytest.mark.parametrize(("word", "command", "environment"), WORDS.values(), ids=WORDS)
def test_one_word(word: str, command: str, environment: str) -> None:
    assert systemd_quote([word]) == command
    assert systemd_quote([word], exec=False) == environment
    assert split_words(command, command=True) == split_words(environment, command=False) == [word]


def test_several_words_stay_apart() -> None:
    words = [word for word, _command, _environment in WORDS.values()]
    assert split_words(systemd_quote(list(words)), command=True) == words
    assert "\n" not in systemd_quote(list(words))


def test_numbers_become_text() -> None:
    assert systemd_quote([1, 0.85]) == "1 0.85"


def test_nul_is_refused() -> None:
    with pytest.raises(AnsibleFilterError, match=r"'a\\x00b'.*NUL byte; take it out"):
        systemd_quote(["a\0b"])
