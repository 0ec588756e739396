# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``lay_profile``: a profile under what the inventory says."""

from __future__ import annotations

import typing as t

from ansible.errors import AnsibleFilterError
from ansible_collections.sparks.hy3.plugins.module_utils._topology import RING_ENVIRONMENT

DOCUMENTATION = r"""
name: lay_profile
short_description: A profile under what the inventory says
version_added: 0.1.0
description:
  - Lays the inventory's settings over a profile, key by key, so that a user states only what differs.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description: The profile.
  inventory:
    type: dict
    required: true
    description:
      - What the inventory says. Dictionaries are laid over the profile's at every depth but inside an engine argument,
        which is replaced whole. V(null) takes a key away. Any other value replaces the profile's.
      - In C(engine_args) and C(ray_args), C(_) and C(-) in a name are the same.
  ring:
    type: bool
    default: false
    description:
      - Whether the nodes form a ring without a switch. Then C(engine_env) has what NCCL needs there, under what the
        inventory says.
"""

EXAMPLES = r"""
- name: A longer context without MTP
  ansible.builtin.debug:
    msg: "{{ profile | sparks.hy3.lay_profile(inventory={'engine_args': {'speculative_config': none}}) }}"
"""

RETURN = r"""
_value:
  description: The profile with the inventory's settings in it.
  type: dict
"""

Settings = t.Mapping[str, object]
ARGUMENTS = ("engine_args", "ray_args")


def _dashed(options: Settings) -> dict[str, object]:
    return {name.replace("_", "-"): value for name, value in options.items()}


def _lay(under: Settings, over: Settings, *, deep: bool) -> dict[str, object]:
    """``over`` on ``under``; the order is the profile's, new keys follow."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        if value is None:
            merged.pop(name, None)
        elif deep and isinstance(value, t.Mapping) and isinstance(below, t.Mapping):
            merged[name] = _lay(below, value, deep=True)
        else:
            merged[name] = value
    return merged


def lay_profile(profile: Settings, inventory: Settings, ring: bool = False) -> dict[str, object]:
    """``inventory`` laid over ``profile``; raises :class:`AnsibleFilterError` for a value of the wrong kind.

    In a ``ring`` what NCCL needs there lies between the two.
    """
    merged = dict(profile)
    if ring:
        merged["engine_env"] = {**t.cast(Settings, profile.get("engine_env", {})), **RING_ENVIRONMENT}
    for name, value in inventory.items():
        below = merged.get(name, {})
        if isinstance(below, t.Mapping) and not isinstance(value, t.Mapping):
            raise AnsibleFilterError(
                f"hy3_{name} is {value!r}, and it must be a dictionary; write `name: value` pairs."
            )
        if name in ARGUMENTS:
            merged[name] = _lay(_dashed(t.cast(Settings, below)), _dashed(t.cast(Settings, value)), deep=False)
        elif isinstance(value, t.Mapping):
            merged[name] = _lay(t.cast(Settings, below), value, deep=True)
        else:
            merged[name] = value
    return merged


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"lay_profile": lay_profile}
