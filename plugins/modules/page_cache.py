#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: page_cache
short_description: Release the page cache of files
description:
  - Writes the dirty pages of each file and tells the kernel to drop the file from the page cache. Needs no root, and
    leaves the cache of all other files alone.
  - Measures what is resident before and after, so that a change means that memory was really released.
  - Pages that a living process maps stay; a warning names the process.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: partial
    details: Measures only, and predicts that whatever is resident can be released.
  diff_mode:
    support: none
  idempotent:
    support: full
options:
  paths:
    description:
      - Files and directories. Directories are searched through; links to files are followed, each file is treated once.
      - What does not exist, is no regular file or cannot be read is listed in RV(skipped_paths).
    type: list
    elements: path
    required: true
notes:
  - A file must be owned or writable by the user that the task runs as, or else the kernel does not tell its residency.
"""

EXAMPLES = r"""
---
- name: Release the page cache of the checkpoint before serving
  sparks.hy3.page_cache:
    paths:
      - /srv/models/Hy3-NVFP4
"""

RETURN = r"""
resident_before:
  description: What was in the page cache, in bytes.
  returned: success
  type: int
  sample: 181462368256
resident_after:
  description: What is in the page cache now, in bytes. In check mode the same as RV(resident_before).
  returned: success
  type: int
  sample: 0
released:
  description: What was released, in bytes.
  returned: success
  type: int
  sample: 181462368256
files:
  description: Number of files that were treated.
  returned: success
  type: int
  sample: 104
skipped_paths:
  description: What was left alone.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: The path.
      type: str
      sample: /srv/models/Hy3-NVFP4/old.safetensors
    reason:
      description: Why it was left alone.
      type: str
      sample: Permission denied
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._page_cache import mapped_by, purge


def main() -> None:
    module = AnsibleModule(
        argument_spec={"paths": {"type": "list", "elements": "path", "required": True}},
        supports_check_mode=True,
    )
    outcome = purge(module.params["paths"], measure_only=module.check_mode)
    for pid, name in mapped_by(outcome.kept).items():
        module.warn(f"Process {pid} ({name}) maps some of the files, so their pages stay: stop it first")
    if outcome.skipped and not outcome.files:
        first = outcome.skipped[0]
        module.warn(f"Nothing could be treated: {first.path}: {first.reason}")
    module.exit_json(
        changed=bool(outcome.resident_before if module.check_mode else outcome.released),
        resident_before=outcome.resident_before,
        resident_after=outcome.resident_after,
        released=outcome.released,
        files=outcome.files,
        # "skipped" alone would make Ansible show the task as skipped.
        skipped_paths=[skipped._asdict() for skipped in outcome.skipped],
    )


if __name__ == "__main__":
    main()
