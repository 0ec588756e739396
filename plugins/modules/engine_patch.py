#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_patch
short_description: Apply, revert or report source patches of an installed inference engine
description:
  - Repairs known defects in the installed Python source of an engine that keep Hy3 from being served.
  - Whether a file has a defect is decided by its syntax tree, never by a version number or by searching for text. So
    one patch covers every release that has the defect, and leaves alone those that are repaired.
  - The edited file replaces the old one atomically, keeps owner and mode, and must compile. The original bytes are
    kept in the directory C(.hy3-patch) inside the engine's package, with the hashes of both. A run that is killed at
    any moment leaves each file either as it was or patched, and the next run completes it.
  - All files or none. If one patch cannot be applied, nothing is written.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  engine:
    description: The engine, which is also the name of its Python package.
    type: str
    choices: [vllm]
    default: vllm
  venv:
    description:
      - The virtual environment the engine is installed in.
      - Its interpreter finds the package, without importing it, and reads and compiles the engine's files.
      - Exactly one of O(venv) and O(package_path) is needed.
    type: path
  package_path:
    description:
      - The directory of the engine's package, the one that holds its C(__init__.py).
      - The interpreter that runs this module then reads and compiles the engine's files, so it should not be older than
        the engine's own. Where it cannot read a file, the state is V(unrecognised).
    type: path
  patches:
    description: The patches, by id. A patch that the installed engine does not need is left out by itself.
    type: list
    elements: str
    required: true
    choices:
      P1: >-
        Names the output head of vLLM's Hy3 drafter (multi-token prediction) V(lm_head), so that a quantization that
        excludes V(lm_head) excludes this one, too. Without it, vLLM 0.23 and newer build the head of a ModelOpt
        checkpoint at packed width and stop with a tensor size of 2048 that must match 4096. The file is
        C(vllm/model_executor/models/hy_v3_mtp.py).
  state:
    description:
      - V(present) applies O(patches) where the defect is.
      - V(absent) takes O(patches) out again. The original bytes come back when no other patch of this collection is
        left in the file. A file that someone else changed after it was patched is refused, and a repair that this
        collection did not make stays.
      - V(reported) only reads. It returns the difference that V(present) would make.
    type: str
    choices: [present, absent, reported]
    default: present
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.changes
"""

EXAMPLES = r"""
---
- name: Patch vLLM
  sparks.hy3.engine_patch:
    venv: /opt/hy3/venv
    patches: [P1]
  register: engine_patch

- name: See what the patch would change, without the engine's interpreter
  sparks.hy3.engine_patch:
    package_path: /opt/hy3/venv/lib/python3.12/site-packages/vllm
    patches: [P1]
    state: reported

- name: Put the original file back
  sparks.hy3.engine_patch:
    venv: /opt/hy3/venv
    patches: [P1]
    state: absent
"""

RETURN = r"""
package_path:
  description: The directory of the engine's package.
  returned: success
  type: str
  sample: /opt/hy3/venv/lib/python3.12/site-packages/vllm
engine_version:
  description: The version by the package's metadata, for information only. V(null) if it has none.
  returned: success
  type: str
  sample: 0.24.0
patches:
  description: What was found and what is there now, or in check mode would be there, for each of O(patches).
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: The patch.
      type: str
      sample: P1
    title:
      description: What the patch does.
      type: str
      sample: Name the drafter's output head so that quantization skips it
    harm:
      description: What goes wrong without the patch.
      type: str
      sample: The drafter's head is built at packed width and cannot be loaded.
    file:
      description: >-
        The file, relative to the directory that holds the package. Where the engine has moved the code and left an
        alias, this is the file it moved to.
      type: str
      sample: vllm/model_executor/models/hy_v3_mtp.py
    state_before:
      description:
        - The state found.
        - V(absent) means that the file, or the class in it, does not exist in this engine.
        - V(upstream_fixed) means that it is repaired, but not by this collection.
        - V(defect) means that the patch is needed.
        - V(applied) means that this collection has applied the patch.
        - V(partial) means that someone has applied half of it by hand, and V(unrecognised) that the code has changed in
          a way the patch does not know. Both make O(state=present) fail.
      type: str
      choices: [absent, upstream_fixed, defect, applied, partial, unrecognised]
      sample: defect
    state:
      description: The state now, or in check mode as it would be. The values are those of RV(patches[].state_before).
      type: str
      choices: [absent, upstream_fixed, defect, applied, partial, unrecognised]
      sample: applied
    reason:
      description: Why the state is RV(patches[].state), for a person. Empty where the state says it all.
      type: str
      sample: the head is built without a quantization config
    sha256_before:
      description: SHA-256 of the file as found. V(null) if there is no file.
      type: str
      sample: 4f0c8a1de0a9a5e2cbe84cc4ab84a2f6fd7b2dcb2a9d7f0f3c1c4c0a4a1b5b1e
    sha256:
      description: SHA-256 of the file now, or in check mode as it would be. V(null) if there is no file.
      type: str
      sample: 9a3b5a0f3f1f0c7f7bb0a8f7b2a6d6a1de1d6b0f0f1f4c3b2a1908f7e6d5c4b3
digest:
  description: >-
    SHA-256 over the names and contents of all files of O(patches) as they are now, or in check mode would be. A change
    of it calls for a restart of the engine, and nodes whose digests differ run different code.
  returned: success
  type: str
  sample: 0f5c1d8a6b7e4c3f2a1908f7e6d5c4b39a3b5a0f3f1f0c7f7bb0a8f7b2a6d6a1
unified_diff:
  description: The change as a unified diff for C(patch -p1). Empty if there is none. See O(state=reported).
  returned: success
  type: str
  sample: |
    --- a/vllm/model_executor/models/hy_v3_mtp.py
    +++ b/vllm/model_executor/models/hy_v3_mtp.py
"""

import json
import os
import sys
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error


def ask(module: AnsibleModule) -> dict[str, Any]:
    """Run the patch program under the engine's interpreter and return its answer."""
    venv = module.params["venv"]
    python = os.path.join(venv, "bin", "python") if venv else sys.executable
    if not os.access(python, os.X_OK):
        raise Hy3Error(f"{python} is not a program, so {venv} is not a virtual environment: give the engine's venv.")
    request = {name: module.params[name] for name in ("engine", "package_path", "patches", "state")}
    rc, out, err = module.run_command(
        [python, *_patch.COMMAND, json.dumps({**request, "check_mode": module.check_mode})]
    )
    try:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError) as exc:
        last = (err.splitlines() or ["no message"])[-1]
        raise Hy3Error(
            f"{python} ended with code {rc} and no answer ({last}): it must be Python 3.10 or newer."
        ) from exc
    if "error" in answer:
        raise Hy3Error(answer["error"])
    return answer


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["vllm"], "default": "vllm"},
            "venv": {"type": "path"},
            "package_path": {"type": "path"},
            "patches": {"type": "list", "elements": "str", "choices": list(_patch.CATALOGUE), "required": True},
            "state": {"type": "str", "choices": ["present", "absent", "reported"], "default": "present"},
        },
        mutually_exclusive=[("venv", "package_path")],
        required_one_of=[("venv", "package_path")],
        supports_check_mode=True,
    )
    try:
        answer = ask(module)
    except Hy3Error as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
