# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``in_container``: a unit in a container."""

from __future__ import annotations

import typing as t

from ansible.errors import AnsibleFilterError
from ansible_collections.sparks.hy3.plugins.module_utils._container import contained
from ansible_collections.sparks.hy3.plugins.module_utils._memory import MemoryInputError

DOCUMENTATION = r"""
name: in_container
short_description: The unit that runs in a container what a unit runs without one
version_added: 0.1.0
description:
  - Makes C(docker run) or C(podman run) of a unit's command, with the same arguments, and adds what stops and removes
    the container.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The unit, as role P(sparks.hy3.systemd_unit#role) wants it.
  plan:
    type: dict
    required: true
    description: The fact C(hy3_plan).
  container:
    type: dict
    required: true
    description: The fact C(hy3_container) of role P(sparks.hy3.engine#role).
  owner:
    type: str
    required: true
    description: Numeric ids of the engine's user and group, for instance V(1000:1000).
  environment:
    type: dict
    required: true
    description: All variables that the engine gets, but for what the image sets.
  fabric_file:
    type: str
    default: ''
    description: File with more of them, that is written at each start. Empty for a unit without ranks.
  patched:
    type: list
    elements: str
    default: []
    description: Files of the engine to lay over the image's, relative to the directory that holds its package.
"""

EXAMPLES = r"""
- name: The command line of a unit in a container
  ansible.builtin.debug:
    msg: "{{ (unit | sparks.hy3.in_container(plan=hy3_plan, container=hy3_container, owner='1000:1000',
      environment=unit.environment)).argv }}"
"""

RETURN = r"""
_value:
  description:
    - The unit with other C(argv), C(environment), C(before), C(needs) and C(secret_files).
    - Its C(stop) is what stops it, its C(after) what runs when it has ended.
  type: dict
"""

Facts = t.Mapping[str, t.Any]


def in_container(
    unit: Facts,
    plan: Facts,
    container: Facts,
    *,
    owner: str,
    environment: Facts,
    fabric_file: str = "",
    patched: t.Sequence[str] = (),
) -> dict[str, t.Any]:
    """:func:`contained`; raises :class:`AnsibleFilterError` for a cap that is no size."""
    try:
        return contained(
            unit,
            plan,
            container,
            owner=owner,
            environment=environment,
            fabric_file=fabric_file,
            patched=patched,
        )
    except MemoryInputError as error:
        raise AnsibleFilterError(f"The cap of {unit['name']} in hy3_memory is wrong: {error}") from error


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"in_container": in_container}
