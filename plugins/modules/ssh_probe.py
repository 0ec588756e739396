#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: ssh_probe
short_description: See how far a node's SSH server answers the controller, without logging in
version_added: 0.1.0
description:
  - Connects from the controller to the node's SSH server and waits for its banner, at most so long. Ansible itself,
    asked to log in to a machine that accepts connections and then says nothing, may hang for as long as that lasts.
  - Where paramiko is installed on the controller, it does the key exchange too, which is the first that needs packets
    of full size.
  - Asks the address and port that Ansible would connect to. Does not go through a jump host.
  - Runs on the controller and needs nothing on the node. Does not fail on what it meets.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
    details: Looks once and does not wait.
  diff_mode:
    support: N/A
    details: The action changes nothing.
  idempotent:
    support: full
    details: The action changes nothing.
options:
  timeout:
    description: Seconds that the server has for its banner, and again for the key exchange.
    type: float
    default: 10
  wait:
    description: Seconds for which to ask again until the banner comes. Says meanwhile what it meets.
    type: float
    default: 0
  interval:
    description: Seconds between two looks while it waits.
    type: float
    default: 5
"""

EXAMPLES = r"""
---
- name: See whether the nodes can be logged in to
  sparks.hy3.ssh_probe:
  register: seen

- name: Wait for a node that boots
  sparks.hy3.ssh_probe:
    wait: 300
"""

RETURN = r"""
tcp:
  description:
    - What the connection came to, as RV(sparks.hy3.reach_info#module:views[].tcp).
    - V(not_asked) for a node that Ansible does not reach over SSH; nothing else is returned then but RV(transport).
  returned: always
  type: str
  choices: [banner, silent, closed, other, refused, timeout, unreachable, unresolved, error, not_asked]
  sample: banner
key_exchange:
  description:
    - V(done), V(stalled) if a banner came and the key exchange did not end in time, V(failed) if it ended otherwise.
    - Null without a banner or without paramiko.
  returned: when it was asked
  type: str
  sample: done
name:
  description: The node's name in the inventory.
  returned: when it was asked
  type: str
  sample: spark-2
address:
  description: The address or name that was asked.
  returned: when it was asked
  type: str
  sample: spark-2.local
port:
  description: The port that was asked.
  returned: when it was asked
  type: int
  sample: 22
ping:
  description: As RV(sparks.hy3.reach_info#module:views[].ping).
  returned: when it was asked
  type: bool
banner:
  description: As RV(sparks.hy3.reach_info#module:views[].banner).
  returned: when it was asked
  type: str
  sample: SSH-2.0-OpenSSH_9.6p1
seconds:
  description: How long the last look took.
  returned: when it was asked
  type: float
  sample: 0.02
error:
  description: What went wrong in words, or an empty text.
  returned: when it was asked
  type: str
  sample: Connection refused
waited_s:
  description: Seconds until the banner came, or for which it was waited; 0 without O(wait).
  returned: when it was asked
  type: float
  sample: 95.2
transport:
  description: How Ansible reaches the node instead.
  returned: when it was not asked
  type: str
  sample: local
"""
