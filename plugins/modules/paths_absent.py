#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: paths_absent
short_description: Remove files and directories next to others that stay
version_added: 0.1.0
description:
  - Removes files and whole directories, all but what O(keep) names, and then directories that are empty by that time.
  - Follows no symbolic link, also where the owner of a directory changes it meanwhile, and leaves what is mounted in
    one alone.
  - What is not there is no error. A run that is killed is completed by the next one.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: partial
    details: >-
      Exact, but for O(directories) in which something lies that another task would have removed before: those count
      as not empty.
  diff_mode:
    support: full
  idempotent:
    support: full
options:
  paths:
    description:
      - Files, links and directories to remove, each with all that is in it. Absolute, and no directory of the system.
    type: list
    elements: path
    default: []
  patterns:
    description: The same as patterns of the shell, such as V(/run/hy3-checkpoint-*).
    type: list
    elements: str
    default: []
  keep:
    description:
      - What stays of O(paths) and O(patterns), with all that is in it and the directories above it, as absolute
        patterns. A C(*) matches within one part of the path.
    type: list
    elements: str
    default: []
  directories:
    description: Directories to remove only if nothing is in them after that, in this order.
    type: list
    elements: path
    default: []
"""

EXAMPLES = r"""
- name: Remove what Ray left, but for its logs
  sparks.hy3.paths_absent:
    paths: [/var/lib/hy3/ray]
    keep: [/var/lib/hy3/ray/session_*/logs]
    directories: [/var/lib/hy3]

- name: Remove one file, and its directory if no other is there
  sparks.hy3.paths_absent:
    paths: [/etc/hy3/hy3.nft]
    directories: [/etc/hy3]
"""

RETURN = r"""
removed:
  description: What is gone, or in check mode would be. Of a directory that went as a whole only that one.
  returned: success
  type: list
  elements: str
  sample: [/etc/hy3/hy3.nft, /etc/hy3]
kept:
  description: What stays, because O(keep) names it, it is mounted there, or it lies in one of O(directories).
  returned: success
  type: list
  elements: str
  sample: [/var/lib/hy3/ray/session_2026-12-01_10-00-00_000000_812/logs]
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._removal import Remover, expand, refuse_shallow


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "path", "default": []},
            "patterns": {"type": "list", "elements": "str", "default": []},
            "keep": {"type": "list", "elements": "str", "default": []},
            "directories": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    remover = Remover(write=not module.check_mode, keep=params["keep"])
    try:
        refuse_shallow(params["paths"] + params["patterns"] + params["directories"])
        for path in params["paths"] + expand(params["patterns"]):
            remover.tree(path)
        for path in params["directories"]:
            remover.directory(path)
    except Hy3Error as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"'{error.filename}' cannot be removed ({error.strerror}); see who holds it, and run again.",
            removed=remover.removed,
        )
    module.exit_json(
        changed=bool(remover.removed),
        removed=remover.removed,
        kept=remover.kept,
        diff={"before": "".join(f"{path}\n" for path in remover.removed), "after": ""},
    )


if __name__ == "__main__":
    main()
