#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: port_info
short_description: Tell who listens on the TCP ports of a node
version_added: 0.1.0
description:
  - Reads from the kernel which TCP ports of this node are listened on, and by which process of which systemd unit, so
    that a port in use is found before a service starts and can be told from one's own.
  - Sees the network namespace that it runs in; a container with a network of its own is not seen.
  - Needs C(become) to name the processes of other users.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options: {}
"""

EXAMPLES = r"""
---
- name: See who listens
  sparks.hy3.port_info:
  register: ports

- name: Refuse a port that is taken
  ansible.builtin.assert:
    that: ports.listeners | selectattr('port', 'equalto', 8000) | length == 0
    fail_msg: Port 8000 is in use by {{ ports.listeners | selectattr('port', 'equalto', 8000) | first }}; stop that.
"""

RETURN = r"""
listeners:
  description: The listening sockets, by port, then by process id.
  returned: success
  type: list
  elements: dict
  contains:
    port:
      description: TCP port.
      type: int
      sample: 8000
    address:
      description: Address that it listens on, V(0.0.0.0) or V(::) for all.
      type: str
      sample: 127.0.0.1
    pid:
      description:
        - Id of the process that holds the socket, the lowest of several.
        - V(none) if it is another user's and may not be looked at, or the kernel's own.
      type: int
      sample: 4242
    name:
      description: The process's name as the kernel has it, at most 15 characters; empty without RV(listeners[].pid).
      type: str
      sample: gcs_server
    unit:
      description: The systemd service or scope that the process runs in; empty if it runs in none or is not known.
      type: str
      sample: hy3-ray.service
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._port import listeners
from ansible_collections.sparks.hy3.plugins.module_utils._units import Processes


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    processes = Processes()
    module.exit_json(
        changed=False,
        listeners=[found._asdict() | {"unit": processes.unit(found.pid) if found.pid else ""} for found in listeners()],
    )


if __name__ == "__main__":
    main()
