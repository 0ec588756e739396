#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: transfer_wait
short_description: Wait for a transfer to end, and say how far it is meanwhile
version_added: 0.1.0
description:
  - Waits for a task with C(async) and C(poll=0), and returns what its module returned.
  - Meanwhile prints files, bytes, rate and time left of each node, from the file that
    M(sparks.hy3.checkpoint_pull) and M(sparks.hy3.checkpoint_download) write.
  - Runs on the controller and reads the node again and again, so no connection has to last as long as the transfer.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
    details: Does not wait.
  diff_mode:
    support: none
    details: The task that it waits for runs unseen.
  idempotent:
    support: N/A
    details: A job can be waited for once; its record on the node is removed.
options:
  job:
    description: C(ansible_job_id) of the task that is waited for.
    type: str
    required: true
  progress:
    description: Path on the node of the file with its progress; before there is one, nothing is printed.
    type: str
    required: true
  interval:
    description: Seconds between two looks at the node.
    type: float
    default: 5
"""

EXAMPLES = r"""
---
- name: Begin to pull
  sparks.hy3.checkpoint_pull:
    dest: /srv/models/hy3
    manifest: "{{ hostvars['spark-1'].checkpoint.files }}"
    sources: [{name: spark-1, address: 192.168.100.1}]
    password: "{{ secret_of_this_run }}"
  async: 21600
  poll: 0
  register: begun

- name: Wait for it
  sparks.hy3.transfer_wait:
    job: "{{ begun.ansible_job_id }}"
    progress: /srv/models/hy3/.hy3-pull/progress.json
  register: pulled
"""

RETURN = r"""
changed:
  description: Whether the transfer changed anything. Beside it comes all that its module returns.
  returned: always
  type: bool
  sample: true
"""
