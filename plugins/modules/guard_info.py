#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: guard_info
short_description: Tell who ends an engine before its node runs out of memory
version_added: 0.1.0
description:
  - Looks for systemd-oomd, a running earlyoom, control groups of version 2, pressure figures and the unit of sshd, and
    chooses the one killer of C(hy3.slice). Role P(sparks.hy3.guard#role) does what it says.
  - Tells what is in force already, as systemd, the kernel and systemd-oomd show it.
  - An earlyoom counts by its process, whoever started it; one in a container with processes of its own cannot reach
    ours and does not count.
  - Does not fail on what it finds. What to refuse is the caller's to say, with RV(refused).
  - Needs C(become) to look into other users' processes.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options:
  wanted:
    description:
      - The killer. What is asked for by name is refused where it cannot be had.
      - V(auto) takes the earlyoom that runs, else systemd-oomd where the node can have it, else nobody.
    type: str
    choices: [auto, oomd, earlyoom, none]
    default: auto
  spare:
    description:
      - What a planned engine and its host side leave available at the most, in bytes, to hold against the threshold of
        an earlyoom. Left out, nothing is said of that.
    type: int
"""

EXAMPLES = r"""
---
- name: See who guards
  sparks.hy3.guard_info:
  register: guard

- name: Refuse a node without
  ansible.builtin.assert:
    that: guard.killer != 'none'
    fail_msg: "{{ guard.says | join(' ') }}"
"""

RETURN = r"""
killer:
  description: The one that ends what takes too much.
  returned: success
  type: str
  choices: [oomd, earlyoom, none]
  sample: oomd
protect:
  description: Whether sshd's unit can and should have memory of its own, which control groups of version 1 cannot give.
  returned: success
  type: bool
  sample: true
refused:
  description: One sentence for each reason why what is wanted cannot be, with the way out.
  returned: success
  type: list
  elements: str
  sample: []
says:
  description: One sentence for each thing that a person should know.
  returned: success
  type: list
  elements: str
  sample: ["Guard: systemd-oomd on hy3.slice."]
unapplied:
  description: One sentence for each thing that was chosen and is not in force. What does not run yet is left out.
  returned: success
  type: list
  elements: str
  sample: [systemd has ManagedOOMMemoryPressure=auto for hy3.slice instead of kill]
reload:
  description: Whether systemd has not read files that belong to these units.
  returned: success
  type: bool
  sample: false
monitored:
  description: Whether systemd-oomd watches C(hy3.slice), by C(oomctl). V(none) where one of the two does not run.
  returned: success
  type: bool
  sample: true
sshd:
  description: What lets people in.
  returned: success
  type: dict
  contains:
    unit:
      description: The unit, or empty for none that is known.
      type: str
      sample: ssh.service
    oom_score_adj:
      description: What its main process has. V(none) where that does not run. sshd gives itself V(-1000).
      type: int
      sample: -1000
    memory_min:
      description: Memory in bytes that the kernel keeps for it. V(none) where it does not run.
      type: int
      sample: 67108864
swap_total:
  description: Swap of the node, in bytes.
  returned: success
  type: int
  sample: 17179869184
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._guard import CHOICES, Node, decide, unapplied


def look(module: AnsibleModule) -> dict[str, t.Any]:
    """What the module returns."""

    def run(command: list[str]) -> str | None:
        path = module.get_bin_path(command[0])
        if not path:
            return None
        # earlyoom prints its version as an error.
        _rc, out, err = module.run_command([path, *command[1:]], errors="surrogateescape")
        return t.cast(str, out or err)

    node = Node(run)
    host, seen = node.host(), node.seen()
    decision = decide(host, module.params["wanted"], spare=module.params["spare"])
    return {
        **decision._asdict(),
        "unapplied": unapplied(decision, host, seen),
        "reload": seen.reload,
        "monitored": seen.monitored,
        "sshd": {"unit": host.sshd, "oom_score_adj": host.sshd_score, "memory_min": seen.sshd_min},
        "swap_total": host.swap_total,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "wanted": {"type": "str", "choices": list(CHOICES), "default": "auto"},
            "spare": {"type": "int"},
        },
        supports_check_mode=True,
    )
    try:
        found = look(module)
    except Hy3Error as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
