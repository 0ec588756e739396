# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``engine_argv``: a dictionary of long options as an argument list."""

from __future__ import annotations

import json
import typing as t

from ansible.errors import AnsibleFilterError

DOCUMENTATION = r"""
name: engine_argv
short_description: Long options as an argument list
version_added: 0.1.0
description:
  - Turns a dictionary of long options into the argument list of vLLM, SGLang or Ray, in the dictionary's order.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - Options without their dashes. C(_) in a name becomes C(-).
      - V(true) gives the bare option, V(null) and V(false) leave it out, a dictionary or list becomes one JSON text
        (as C(--speculative-config) wants it), anything else its text.
"""

EXAMPLES = r"""
- name: "--enforce-eager --speculative-config {...}"
  ansible.builtin.debug:
    msg: "{{ {'enforce-eager': true, 'speculative-config': {'method': 'mtp'}} | sparks.hy3.engine_argv }}"
"""

RETURN = r"""
_value:
  description: The argument list, one element per argument.
  type: list
  elements: str
"""


def engine_argv(options: t.Mapping[str, object]) -> list[str]:
    """The argument list of ``options``; raises :class:`AnsibleFilterError` when it is no mapping."""
    if not isinstance(options, t.Mapping):
        raise AnsibleFilterError(f"engine_argv got {options!r}, which is no dictionary of options; give one.")
    argv: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        argv.append(f"--{str(name).replace('_', '-')}")
        if isinstance(value, (t.Mapping, list)):
            argv.append(json.dumps(value, separators=(",", ":")))
        elif value is not True:
            argv.append(str(value))
    return argv


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"engine_argv": engine_argv}
