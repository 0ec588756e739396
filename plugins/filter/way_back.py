# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``way_back``: what an upgrade of the engine can go back to."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._way_back import Facts, Node, WayBack, find_way_back

DOCUMENTATION = r"""
name: way_back
short_description: What an upgrade of the engine can go back to
version_added: 0.1.0
description:
  - Chooses the unit files that an upgrade puts back if the new engine does not pass. Those that an upgrade kept which
    did not end, or else those that run and answer now.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - What role P(sparks.hy3.upgrade#role) saw on each node, by host.
      - C(wanted) are the units that the plan has there, C(units) what M(sparks.hy3.engine_status) says of them,
        C(files) the texts of their files by name, and C(kept) the text of the file in which an upgrade keeps them,
        empty if there is none.
  head:
    type: str
    required: true
    description: The node with rank 0.
  answer:
    type: dict
    required: true
    description: The result of M(sparks.hy3.chat_smoke) there, which may have failed.
  log:
    type: dict
    description: What M(sparks.hy3.engine_status) says of the engine's log there, or nothing.
  user:
    type: str
    required: true
    description: The user that is to run the engine.
  checkpoint:
    type: str
    description: The digest of the checkpoint that is to be served, from M(sparks.hy3.checkpoint_info).
"""

EXAMPLES = r"""
- name: Refuse an upgrade without a way back
  ansible.builtin.assert:
    that: (seen | sparks.hy3.way_back(head='spark-1', answer=smoke, user='hy3')).problems | length == 0
"""

RETURN = r"""
_value:
  description:
    - C(problems) has one sentence per reason against an upgrade; an empty list is good. C(kept) says whether an upgrade
      that did not end is gone on with, C(runs) whether any of the units runs now. C(venv) and C(version) are the
      engine's.
    - C(nodes) has the texts of the unit files, and C(digests) the digest of each unit, both by host and name.
  type: dict
"""


def way_back(  # noqa: PLR0917 - a filter's options, which come by name
    nodes: t.Mapping[str, Node],
    head: str,
    answer: Facts,
    user: str,
    log: Facts | None = None,
    checkpoint: str | None = None,
) -> WayBack:
    """:func:`find_way_back` of results as modules return them."""
    return find_way_back(
        nodes,
        head=head,
        silence=None if answer.get("ok") else str(answer.get("msg") or "it was not asked"),
        version=(log or {}).get("version"),
        user=user,
        checkpoint=checkpoint,
    )


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"way_back": way_back}
