#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_lease
short_description: Keep two plays from working on one cluster at once
version_added: 0.1.0
description:
  - Takes, renews or gives back a lease, a small file on the cluster's head.
  - Refuses if another play holds it, and says who. A lease that has expired is taken over, and so is one whose play
    ran on this controller and has ended without giving it back; both are said.
  - The holder is the running C(ansible-playbook) process. An action plugin on the controller fills it in.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
    details: Refuses as it would, and takes nothing.
  diff_mode:
    support: none
    details: A lease is no configuration.
  idempotent:
    support: full
    details: Renewing a lease is no change.
options:
  state:
    description: V(held) takes or renews the lease, V(free) gives it back if it is this play's.
    type: str
    choices: [held, free]
    default: held
  ttl:
    description: Seconds after which others may take the lease over.
    type: int
    default: 3600
  path:
    description: The file on the head. It should not outlive a reboot.
    type: path
    default: /run/hy3/lease.json
  holder:
    description: Identifies the play. Filled in by the action plugin.
    type: str
  who:
    description: Says to a person who holds the lease. Filled in by the action plugin.
    type: str
  dead:
    description: A holder that is known to have ended. Filled in by the action plugin.
    type: str
    default: ""
"""

EXAMPLES = r"""
---
- name: Be the only play that works on this cluster
  sparks.hy3.cluster_lease:
  run_once: true

- name: Let others
  sparks.hy3.cluster_lease:
    state: free
  run_once: true
"""

RETURN = r"""
taken_over:
  description: Who held the lease before and had to give way, or null.
  returned: with O(state=held)
  type: str
  sample: root@laptop, process 4242
msg:
  description: What is known of who held it before, or who is in the way.
  returned: when another play held it
  type: str
held_by:
  description: The holder that is in the way.
  returned: when it is refused
  type: str
  sample: laptop/de5c04e1-3e5f-4b0c-8f1b-3f3a1d2c9b10/pid:[4026531836]:4242:1234567
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._lease import Held, LeaseFile, taken_over


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "ttl": {"type": "int", "default": 3600},
            "path": {"type": "path", "default": "/run/hy3/lease.json"},
            "holder": {"type": "str"},
            "who": {"type": "str"},
            "dead": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params, write = module.params, not module.check_mode
    lease = LeaseFile(params["path"])
    try:
        if params["state"] == "free":
            lease.give_back(holder=params["holder"], write=write)
            module.exit_json(changed=False)
        before = lease.take(
            holder=params["holder"], who=params["who"], ttl=params["ttl"], dead=params["dead"], write=write
        )
    except Held as error:
        module.fail_json(msg=str(error), held_by=error.lease.holder)
    except OSError as error:
        module.fail_json(msg=f"{params['path']} cannot be used for the lease: {error.strerror}")
    if before:
        said = taken_over(before, dead=params["dead"], write=write)
        module.exit_json(changed=False, taken_over=before.who, msg=said)
    module.exit_json(changed=False, taken_over=None)


if __name__ == "__main__":
    main()
