# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``variable_problems``: variables that are misspelt, missing or of the wrong kind."""

from __future__ import annotations

import re
import typing as t
from difflib import get_close_matches
from pathlib import Path

import yaml

DOCUMENTATION = r"""
name: variable_problems
short_description: Variables that are misspelt, missing or of the wrong kind
version_added: 0.1.0
description:
  - Compares variables with the argument specifications of a role and of the roles beside it. Ansible's own validation
    says nothing about a name that no role asks for, and of a wrong value neither what it is nor what to write.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The variables by name.
  role:
    type: path
    required: true
    description:
      - Directory of the role that owns the variables. Its entry point C(main) says which are required and of what kind.
      - A name that any role in the same directory asks for is known.
"""

EXAMPLES = r"""
- name: Refuse a misspelt variable
  ansible.builtin.assert:
    that: "{'hy3_api_prot': 8000} | sparks.hy3.variable_problems(role=role_path) | length == 0"
"""

RETURN = r"""
_value:
  description: One sentence per problem; an empty list is good.
  type: list
  elements: str
"""

Options = t.Mapping[str, t.Mapping[str, t.Any]]
CUTOFF = 0.5  # how alike a word must be to be offered for one that nobody knows, 0 to 1
SHORT_LIST = 8  # how many choices a sentence can hold
# By the type in an argument specification: what a value must be, and what to write.
KINDS = {
    "str": ("text", "write some, or leave the line out"),
    "path": ("a path", "write one, or leave the line out"),
    "int": ("a whole number", "write its digits"),
    "bool": ("true or false", "write one of them"),
    "dict": ("a dictionary", "write `name: value` pairs"),
    "list": ("a list", "write `[a, b]`"),
}


def _is_of(kind: str, value: object) -> bool:
    """Stricter than Ansible, which would take text for a list or dictionary that the roles then use as it is."""
    if kind == "bool":
        return str(value).lower() in ("true", "false")  # text is what `--extra-vars name=false` gives
    if kind == "dict":
        return isinstance(value, t.Mapping)
    if kind == "list":
        return isinstance(value, list)
    if kind == "int":
        return isinstance(value, int | str) and bool(re.fullmatch(r"-?\d+", str(value)))
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _value_problem(name: str, value: object, option: t.Mapping[str, t.Any]) -> str | None:
    kind, way = KINDS[option["type"]]
    if not _is_of(option["type"], value):
        return f"{name} is {value!r}, and it must be {kind}; {way}."
    for element in value if isinstance(value, list) else [value]:
        choices = option.get("choices") or [element]
        if element not in choices:
            near = get_close_matches(str(element), choices, n=1, cutoff=CUTOFF)
            way = f"write {near[0]}" if near else "take it out"
            known = (
                f", and it knows {', '.join(choices)} only"
                if len(choices) <= SHORT_LIST
                else ", which it does not know"
            )
            return f"{name} has {element!r}{known}; {way}."
    return None


def _misspelt(name: str, own: Options, others: Options) -> tuple[str | None, str]:
    """The nearest name that a user may set (a fact has no default), and the sentence."""
    settable = [*own, *(other for other, option in others.items() if "default" in option)]
    near = next(iter(get_close_matches(name, settable, n=1)), None)
    way = f"write {near}, or take it out" if near else "take it out, or see the names in README.md"
    return near, f"{name} is a name that no role knows; {way}."


def problems_of(given: t.Mapping[str, object], own: Options, others: Options) -> list[str]:
    """One sentence for each variable of ``given`` that the options of its own role and of ``others`` do not allow."""
    unknown = [_misspelt(name, own, others) for name in given if name not in own and name not in others]
    problems = [sentence for _near, sentence in unknown]
    for name, option in own.items():
        if name in given:
            problem = _value_problem(name, given[name], option)
            problems += [problem] if problem else []
        elif option.get("required") and name not in [near for near, _sentence in unknown]:
            problems.append(f"{name} is not set, and it is required; set it in the inventory.")
    return problems


def _options(role: Path) -> dict[str, Options]:
    """The options of a role by entry point."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    return {entry_point: spec.get("options", {}) for entry_point, spec in specs.items()}


def variable_problems(given: t.Mapping[str, object], role: str) -> list[str]:
    """:func:`problems_of` with the argument specifications of ``role`` and the roles beside it."""
    roles = [path.parents[1] for path in Path(role).parent.glob("*/meta/argument_specs.yml")]
    others = {name: option for path in roles for options in _options(path).values() for name, option in options.items()}
    return problems_of(given, _options(Path(role))["main"], others)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"variable_problems": variable_problems}
