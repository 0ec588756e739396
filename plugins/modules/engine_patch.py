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
  - All files or none. If one patch cannot be applied, nothing is written. A file that is a symbolic link is refused.
  - With O(checkpoint), it says of each patch whether that checkpoint needs it, applies those that it needs, refuses or
    takes out one that would break it, and does not mind code that it does not know where the patch is not needed.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  engine:
    description: The engine, which is also the name of its Python package.
    type: str
    choices: [sglang, vllm]
    default: vllm
  venv:
    description:
      - The virtual environment the engine is installed in, or another prefix such as C(/usr). Of a prefix that is no
        virtual environment, the packages of the user who runs the module count, too.
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
    description:
      - The patches, by id, of O(engine). A patch that the installed engine does not need is left out by itself.
      - Those that O(checkpoint) needs are applied in addition.
      - Needed for O(state=present) unless O(checkpoint) is given. Otherwise all patches of O(engine) if left out.
    type: list
    elements: str
    choices:
      P1: >-
        Names the output head of vLLM's Hy3 drafter (multi-token prediction) V(lm_head), so that a quantization that
        excludes V(lm_head) excludes this one, too. Without it, vLLM 0.23 and newer build the head of a ModelOpt
        checkpoint at packed width and stop with a tensor size of 2048 that must match 4096. The file is
        C(vllm/model_executor/models/hy_v3_mtp.py).
      P2: >-
        Gives the special tokens of vLLM's C(hy_v3) reasoning and tool parsers the suffix that the checkpoint's have.
        Without it, vLLM up to 0.24 stops because it finds no think or tool call tokens. The files are
        C(vllm/reasoning/hy_v3_reasoning_parser.py) and C(vllm/tool_parsers/hy_v3_tool_parser.py).
      P3: >-
        Pads vLLM's vocabulary to the least common multiple of 64 and the tensor parallel size, for three ranks. The
        file is C(vllm/model_executor/layers/vocab_parallel_embedding.py).
      P4: >-
        Loads, in SGLang, the shared expert and the router's bias under the names that transformers gives them, in the
        model and in its MTP layer. Without it, they are skipped silently, and the answers are empty or drafts are
        never accepted. The files are C(sglang/srt/models/hunyuan_v3.py) and C(sglang/srt/models/hunyuan_v3_nextn.py).
      P5: >-
        Builds SGLang's MTP layer without the quantization that the checkpoint excludes it from. Without it, a BF16
        layer cannot be loaded. The file is C(sglang/srt/models/hunyuan_v3_nextn.py).
      P6: >-
        Loads the final norm of SGLang's MTP layer. Without it, SGLang up to 0.5.15 accepts nearly no draft. The file is
        C(sglang/srt/models/hunyuan_v3_nextn.py).
      P7: >-
        Names vLLM's shared expert C(shared_mlp) when asking whether it is quantized. Without it, vLLM up to 0.28 does
        not find it in a list of what is not. The file is C(vllm/model_executor/models/hy_v3.py).
      P8: >-
        Names SGLang's layers without a leading dot, so that the wildcards in a list of what is not quantized match. The
        file is C(sglang/srt/models/hunyuan_v3.py).
  checkpoint:
    description:
      - The directory of the checkpoint that is to be served. C(config.json), C(hf_quant_config.json),
        C(tokenizer_config.json), C(tokenizer.json) and the index of its tensors are read, no tensors.
    type: path
  tensor_parallel_size:
    description: The number of ranks that share each layer. With O(checkpoint), it decides about V(P3).
    type: int
    default: 1
  repair_token_suffix:
    description:
      - With O(state=present), writes the key C(token_suffix) into C(tokenizer_config.json) of O(checkpoint), if it
        is not the suffix of its special tokens. vLLM 0.25 and newer need it instead of V(P2).
      - A file that is a symbolic link, as in a download cache, is refused, and so is one that is not there.
      - The file is not put back by O(state=absent). All nodes must have the same checkpoint, so use it on all of them,
        or on the one that the others copy from.
    type: bool
    default: false
  state:
    description:
      - V(present) applies O(patches), and those that O(checkpoint) needs, where the defect is.
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

- name: Apply what this checkpoint needs on three nodes
  sparks.hy3.engine_patch:
    venv: /opt/hy3/venv
    checkpoint: /opt/hy3/models/Hy3-NVFP4-FP8-TP3
    tensor_parallel_size: 3

- name: Say what each patch of SGLang would do for this checkpoint
  sparks.hy3.engine_patch:
    venv: /opt/hy3/venv
    engine: sglang
    checkpoint: /opt/hy3/models/Hy3-NVFP4-W4A4
    state: reported

- name: Put the original files back
  sparks.hy3.engine_patch:
    venv: /opt/hy3/venv
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
  description: >-
    What was found and what is there now, or in check mode would be there, one entry for each patch and file. The
    patches are O(patches), and those that O(checkpoint) needs or is broken by.
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
    source:
      description: Where the repair comes from, and which release has it.
      type: str
      sample: SGLang pull request 30331, released in 0.5.16
    needed_by:
      description:
        - Whether O(checkpoint) needs the patch. V(null) without O(checkpoint).
        - With V(needed), O(state=present) fails if the patch cannot be put in place. With V(not_needed), it does not.
        - V(harmful) means that the checkpoint cannot be loaded with the patch. O(state=present) fails if it is
          asked for, and takes it out if this collection applied it.
      type: str
      choices: [needed, not_needed, harmful]
      sample: needed
    needed_why:
      description: Why RV(patches[].needed_by) is so, for a person. V(null) without O(checkpoint).
      type: str
      sample: lm_head is excluded from quantization, and the drafter's head is not found under that name
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
        - V(partial) means that someone has applied half of it, and V(unrecognised) that the code has changed in a way
          the patch does not know. Both make O(state=present) fail, unless the patch can add the other half, or
          O(checkpoint) does not need it.
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
    written:
      description:
        - When the content of the file can last have changed, or in check mode would change, as Unix time in seconds.
          Bytecode made from an older content is removed with every write, so a process that started later runs this
          content, and one that started earlier may run another, whatever the hashes say.
        - It is the file system's time of change, which nobody can set. A new owner or mode counts as a change, too.
        - V(null) if there is no file, or if the time is in the future because the clock was set back.
      type: float
      sample: 1796063600.51
checkpoint_problems:
  description: >-
    What keeps O(checkpoint) from being served and no patch of O(engine) repairs, as sentences, such as a C(lm_head)
    that is missing from the list of what is not quantized, a wrong C(token_suffix) in C(tokenizer_config.json), or a
    repair in the engine that breaks this checkpoint.
    They are warnings, too.
  returned: success
  type: list
  elements: str
  sample: []
digest:
  description: >-
    SHA-256 over RV(files). A change of it calls for a restart of the engine, and nodes whose digests differ run
    different code.
  returned: success
  type: str
  sample: 0f5c1d8a6b7e4c3f2a1908f7e6d5c4b39a3b5a0f3f1f0c7f7bb0a8f7b2a6d6a1
files:
  description: >-
    All files that a patch of O(engine) is about, asked for or not, with the SHA-256 of each as it is now, or in check
    mode would be. V(null) where there is no file.
  returned: success
  type: dict
  sample: {vllm/model_executor/models/hy_v3_mtp.py: 9a3b5a0f3f1f0c7f7bb0a8f7b2a6d6a1de1d6b0f0f1f4c3b2a1908f7e6d5c4b3}
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
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error


def interpreter(venv: Path) -> str:
    """The interpreter of ``venv``; Hy3Error if there is none."""
    for python in (venv / "bin" / "python", venv / "bin" / "python3"):
        if os.access(python, os.X_OK):
            return str(python)
    raise Hy3Error(
        f"{venv / 'bin' / 'python'} is not a program, so {venv} is not a virtual environment: give the engine's venv."
    )


def ask(module: AnsibleModule) -> dict[str, Any]:
    """Run the patch program under the engine's interpreter and return its answer."""
    venv = module.params["venv"]
    python = interpreter(Path(venv)) if venv else sys.executable
    names = ("engine", "package_path", "patches", "state", "checkpoint")
    more = ("tensor_parallel_size", "repair_token_suffix")
    request = {name: module.params[name] for name in (*names, *more)}
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
            "engine": {"type": "str", "choices": ["sglang", "vllm"], "default": "vllm"},
            "venv": {"type": "path"},
            "package_path": {"type": "path"},
            "patches": {"type": "list", "elements": "str", "choices": list(_patch.CATALOGUE)},
            "checkpoint": {"type": "path"},
            "tensor_parallel_size": {"type": "int", "default": 1},
            "repair_token_suffix": {"type": "bool", "default": False},
            "state": {"type": "str", "choices": ["present", "absent", "reported"], "default": "present"},
        },
        mutually_exclusive=[("venv", "package_path")],
        required_one_of=[("venv", "package_path")],
        required_if=[("state", "present", ("patches", "checkpoint"), True)],
        supports_check_mode=True,
    )
    try:
        answer = ask(module)
    except Hy3Error as exc:
        module.fail_json(msg=str(exc))
    for problem in answer["checkpoint_problems"]:
        module.warn(problem)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
