# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``systemd_quote``: words for ``ExecStart=`` and ``Environment=`` that arrive byte for byte."""

from __future__ import annotations

import re
import typing as t

from ansible.errors import AnsibleFilterError

DOCUMENTATION = r"""
name: systemd_quote
short_description: Words of a systemd unit, quoted so that they arrive byte for byte
version_added: 0.1.0
description:
  - Quotes words for C(ExecStart=) or C(Environment=) by the rules of C(systemd.service(5)) and C(systemd.unit(5)).
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: list
    elements: str
    required: true
    description: The words, for instance a command and its arguments, or C(NAME=value) settings.
  exec:
    type: bool
    default: true
    description:
      - Whether the words are a command. systemd expands C($) in a command and nowhere else.
"""

EXAMPLES = r"""
- name: A command line of a unit
  ansible.builtin.debug:
    msg: "ExecStart={{ ['/usr/bin/printf', '%s', '{\"a\": \"b c\"}'] | sparks.hy3.systemd_quote }}"
"""

RETURN = r"""
_value:
  description: The words on one line.
  type: str
"""

PLAIN = re.compile(r"[A-Za-z0-9_./:=@,+-]+")
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "%": "%%"}


def _quote(word: str, *, dollar: str) -> str:
    if "\0" in word:
        raise AnsibleFilterError(f"systemd_quote got {word!r}, and no argument can hold a NUL byte; take it out.")
    if PLAIN.fullmatch(word):
        return word
    escapes = ESCAPES | {"$": dollar}
    return '"' + "".join(escapes.get(char, char) for char in word) + '"'


def systemd_quote(words: list[object], exec: bool = True) -> str:  # noqa: A002 - the unit's own word
    """``words`` quoted and joined by spaces; ``%`` is never a specifier and, with ``exec``, ``$`` never a variable."""
    return " ".join(_quote(str(word), dollar="$$" if exec else "$") for word in words)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"systemd_quote": systemd_quote}
