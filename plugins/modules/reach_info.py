#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: reach_info
short_description: See how far the SSH servers of other hosts answer from here
version_added: 0.1.0
description:
  - Connects from this node to a port of each host and waits for the banner of its SSH server, and where nobody takes
    the connection, asks for an ICMP echo. Nothing is sent and nobody is logged in.
  - A machine that has no memory to give answers ping and accepts the connection, and its server never says a word.
    That is RV(views[].tcp=silent).
  - All hosts are asked at once, so that the answer comes within a few seconds of O(timeout) however many hang.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options:
  addresses:
    description: Address of each host as seen from this node, or a name that this node resolves, by what to call it.
    type: dict
    required: true
  ports:
    description: Port of the SSH server of each host that has another one than 22.
    type: dict
    default: {}
  timeout:
    description: Seconds that each host has.
    type: float
    default: 10
"""

EXAMPLES = r"""
---
- name: Look at the other node over the fabric
  sparks.hy3.reach_info:
    addresses: {spark-2: 192.168.100.2}
  register: seen

- name: Say whether its programs still run
  ansible.builtin.debug:
    msg: "{{ seen.views[0].tcp }}"
"""

RETURN = r"""
views:
  description: How far each host answered, in the order of O(addresses).
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: What it is called in O(addresses).
      type: str
      returned: always
      sample: spark-2
    address:
      description: Its address.
      type: str
      returned: always
      sample: 192.168.100.2
    port:
      description: The port that was asked.
      type: int
      returned: always
      sample: 22
    tcp:
      description:
        - What the connection came to. V(banner) is an SSH server that runs. V(silent) took the connection and said
          nothing in time, V(closed) ended it without a word, V(other) is no SSH server or one that is overrun.
        - V(refused) is a kernel without such a server. V(timeout), V(unreachable), V(unresolved) and V(error) are none.
      type: str
      returned: always
      choices: [banner, silent, closed, other, refused, timeout, unreachable, unresolved, error]
      sample: silent
    ping:
      description: Whether its kernel answers, by an echo or by a TCP answer; null where no echo could be sent.
      type: bool
      returned: always
      sample: true
    banner:
      description: The first line that came, or an empty text.
      type: str
      returned: always
      sample: SSH-2.0-OpenSSH_9.6p1
    seconds:
      description: How long it took to know.
      type: float
      returned: always
      sample: 10.01
    error:
      description: The system's words for what went wrong, or an empty text.
      type: str
      returned: always
      sample: Connection refused
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._reach import Target, look_at_all, port_number


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "dict", "required": True},
            "ports": {"type": "dict", "default": {}},
            "timeout": {"type": "float", "default": 10},
        },
        supports_check_mode=True,
    )
    addresses, ports, timeout = (module.params[name] for name in ("addresses", "ports", "timeout"))
    if not timeout > 0:
        module.fail_json(msg=f"timeout is {timeout:g}, and each host needs some seconds to answer; give it 5 or more.")
    try:
        targets = [
            Target(name=name, address=str(address), port=port_number(name, ports.get(name)))
            for name, address in addresses.items()
        ]
    except Hy3Error as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, views=look_at_all(targets, timeout=timeout))


if __name__ == "__main__":
    main()
