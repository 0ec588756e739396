# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``cluster_diagnosis``: what all nodes say together. The decisions are in ``module_utils/_diagnosis.py``."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._diagnosis import Diagnosis, diagnose

DOCUMENTATION = r"""
name: cluster_diagnosis
short_description: The reason why a cluster does not serve, from what all its nodes say
version_added: 0.1.0
description:
  - Puts the results of M(sparks.hy3.engine_status) of all nodes together. The node that complains is rarely the one
    that failed, so for a lost worker the kills, the kernel's log, the units and the memory of its peers count.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - The result of M(sparks.hy3.engine_status) by the node's name, best with
        O(sparks.hy3.engine_status#module:find_troubles). That of a node that was not reached (C(unreachable), C(msg))
        counts, too; an empty one does not.
  head:
    type: str
    description: Name of the node of rank 0. What was written before its unit started does not count.
  addresses:
    type: dict
    default: {}
    description: The address of each node by its name, as the engine knows it.
"""

EXAMPLES = r"""
- name: Look at every node
  sparks.hy3.engine_status:
    units: [hy3-ray.service, hy3-serve.service]
    log_unit: hy3-serve.service
    find_troubles: true
  ignore_unreachable: true
  register: status

- name: Say why it does not serve
  ansible.builtin.debug:
    msg: "{{ (dict(ansible_play_hosts_all | zip(ansible_play_hosts_all | map('extract', hostvars, 'status')))
      | sparks.hy3.cluster_diagnosis(head='spark-1')).text }}"
  run_once: true
"""

RETURN = r"""
_value:
  description:
    - Null if nothing is wrong, or if the head's API is healthy. Else a dictionary with C(host), C(rule), C(kind),
      C(cause), C(fix), C(source) and C(line) of the reason, as RV(sparks.hy3.engine_status#module:failure) has them.
    - C(followed) is the list of what only followed (C(host), C(rule), C(cause), C(line)), C(looked) has a sentence for
      each node on which the reason was looked for in vain, and C(text) says it all in sentences.
  type: dict
"""


def cluster_diagnosis(
    statuses: t.Mapping[str, t.Any], head: str | None = None, addresses: t.Mapping[str, str] | None = None
) -> Diagnosis | None:
    """As :func:`diagnose`, without nodes that were not asked."""
    asked = {host: status for host, status in statuses.items() if isinstance(status, dict) and status}
    return diagnose(asked, head=head, addresses=addresses)


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"cluster_diagnosis": cluster_diagnosis}
