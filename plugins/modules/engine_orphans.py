#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_orphans
short_description: Find or end the processes of an engine that have outlived it
version_added: 0.1.0
description:
  - Engine cores and workers that have lost their API server keep the memory of the GPU, and no systemd unit knows them.
    The port is free, the unit is inactive, and the next start finds no memory.
  - Ours are those with the title of an engine's process that run as O(user), whose code comes from O(venv), in whose
    control group no API server and no raylet lives, and whose parent is the manager of the system or of a user.
    Everything else is left alone, also what runs in a container, and so is a program that only has such a title.
  - They are ended by their process id, by force after O(grace). The process is recognised again before each signal.
  - Needs C(become).
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: The processes are listed in RV(orphans).
  idempotent:
    support: full
options:
  user:
    description: Name of the user that runs the engine.
    type: str
    required: true
  venv:
    description: Its virtual environment.
    type: path
    required: true
  state:
    description: V(reported) only finds them, V(absent) ends them.
    type: str
    choices: [reported, absent]
    default: reported
  grace:
    description: Seconds until they are ended by force, and then for which they are waited for.
    type: float
    default: 10
"""

EXAMPLES = r"""
---
- name: End what an engine has left
  sparks.hy3.engine_orphans:
    user: hy3
    venv: /opt/hy3/venv
    state: absent
"""

RETURN = r"""
orphans:
  description: The processes that were found, in the order of their ids.
  returned: success
  type: list
  elements: dict
  contains:
    pid:
      description: Process id.
      type: int
      returned: always
    kind:
      description: What it is.
      type: str
      returned: always
      choices: [engine_core, worker]
    title:
      description: What it calls itself.
      type: str
      returned: always
      sample: VLLM::EngineCore
    unit:
      description: The systemd unit whose control group it is in, or an empty text.
      type: str
      returned: always
      sample: session-3.scope
    resident:
      description:
        - Bytes of it in memory, or null if that cannot be read. What it has on the GPU of a DGX Spark is probably not
          among them.
      type: int
      returned: always
      sample: 1739461632
left:
  description: Ids of those that did not end. The driver holds such a process; only a reboot ends it.
  returned: success
  type: list
  elements: int
  sample: []
"""

import pwd

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._orphans import Orphans

SHOWN = ("pid", "kind", "title", "unit", "resident")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "venv": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["reported", "absent"], "default": "reported"},
            "grace": {"type": "float", "default": 10},
        },
        supports_check_mode=True,
    )
    params = module.params
    if not params["venv"].strip("/"):
        module.fail_json(msg=f"venv is {params['venv']!r}, and every program lies below that; name the directory.")
    try:
        user = pwd.getpwnam(params["user"]).pw_uid
    except KeyError:  # who does not exist has no processes
        module.exit_json(changed=False, orphans=[], left=[])
    orphans = Orphans(user=user, venv=params["venv"])
    found = orphans.find()
    ending = bool(found) and params["state"] == "absent"
    left = orphans.end(found, grace=params["grace"]) if ending and not module.check_mode else []
    shown = [{name: value for name, value in one.items() if name in SHOWN} for one in found]
    module.exit_json(changed=ending and len(left) < len(found), orphans=shown, left=left)


if __name__ == "__main__":
    main()
