#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_pad
short_description: Pad a Hy3 checkpoint with zeros so that tensor parallelism divides it
version_added: 0.1.0
author:
  - The sparks.hy3 contributors (@sparks-hy3)
description:
  - Hy3 has 64 attention heads on 8 KV heads, which 3 ranks cannot split. Writes a copy of the checkpoint with heads and
    neurons of zeros appended, 72 on 9 for 3 ranks, which answers exactly as the original does.
  - Query heads are appended in whole groups, each with its KV head, so that every old head keeps the KV head it reads.
  - Neurons of the dense MLP and of the experts are appended where the ranks do not divide them, or where a rank's part
    would end within a group of numbers that share a quantization scale. A rank's part is then a multiple of 16, as
    engines need. Layers of the MTP drafter are padded alike.
  - Knows BF16, F16 and F32, FP8 with scales by block, channel or tensor, and NVFP4 and MXFP4, as written by ModelOpt,
    compressed-tensors and others. Refuses any other layout that would have to grow. New scales are 1.
  - Other tensors, the tokenizer, the license and all other files are copied byte for byte, but for hidden directories
    and weights that the index does not name. C(config.json) keeps each original size under its name with C(_ckpt).
  - The vocabulary is not padded. An engine does that itself; vLLM needs patch P3 of M(sparks.hy3.engine_patch) for 3
    ranks.
  - Each file is written under another name, synced and renamed, C(config.json) last. A run that was killed leaves a
    tree that no engine loads, and the next run writes only the rest.
  - Needs room for a second checkpoint, which is checked first, and less than 200 MB of memory.
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.changes
options:
  path:
    description:
      - Directory of the original checkpoint. It is only read.
      - A checkpoint that was padded before fails unless it fits O(tensor_parallel_size) as it is.
    type: path
    required: true
  dest:
    description:
      - Directory for the padded checkpoint. Made if it does not exist, and only if padding is needed.
      - Must be empty, or hold what this module wrote there for the same O(path) and O(tensor_parallel_size).
      - Not within O(path).
    type: path
    required: true
  tensor_parallel_size:
    description: Number of ranks that are to split the model.
    type: int
    required: true
"""

EXAMPLES = r"""
---
- name: Pad the checkpoint for three nodes
  sparks.hy3.checkpoint_pad:
    path: /srv/models/Hy3-NVFP4
    dest: /srv/models/Hy3-NVFP4-TP3
    tensor_parallel_size: 3
  register: padded

- name: Say which one to serve
  ansible.builtin.debug:
    msg: "{{ padded.checkpoint }}: {{ padded.plan | join(', ') }}"
"""

RETURN = r"""
needed:
  description: Whether the ranks cannot split O(path) as it is.
  returned: success
  type: bool
  sample: true
checkpoint:
  description: Directory to serve from, O(dest) if padding is RV(needed), else O(path).
  returned: success
  type: str
  sample: /srv/models/Hy3-NVFP4-TP3
plan:
  description: The sizes that change and what that costs, one line each. One line that says so if none does.
  returned: success
  type: list
  elements: str
  sample:
    - num_attention_heads 64 -> 72
    - num_key_value_heads 8 -> 9
    - intermediate_size 13312 -> 13440
    - 648 of 185130 tensors, 170600000000 bytes in 99 shards
sizes:
  description: The sizes in C(config.json) that change, by name.
  returned: success
  type: dict
  sample: {num_attention_heads: {before: 64, after: 72}, num_key_value_heads: {before: 8, after: 9}}
padded_tensors:
  description: Number of tensors that grow, V(0) if padding is not RV(needed).
  returned: success
  type: int
  sample: 648
total_size:
  description: Bytes of all tensors of the padded checkpoint, V(0) if padding is not RV(needed).
  returned: success
  type: int
  sample: 170600000000
written:
  description:
    - Names of the files that were written, or would be in check mode, in this order. Empty if nothing was left to do.
    - C(config.json) is among them whenever another is.
  returned: success
  type: list
  elements: str
  sample: [model-00001-of-00099.safetensors, tokenizer.json, model.safetensors.index.json, config.json]
written_bytes:
  description: Size of the shards among RV(written) in bytes.
  returned: success
  type: int
  sample: 170600000000
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import CONFIG, INDEX
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._padding_tree import Source, Target, Work, read_source


def report(source: Source, target: Target, work: Work) -> dict[str, Any]:
    """What the module returns, and the diff of the files of text."""
    sizes = source.plan.sizes
    padded = sum(shard.padded for shard in work.shards)
    lines = [f"{name} {before} -> {after}" for name, (before, after) in sizes.items()]
    if sizes:
        lines.append(f"{padded} of {source.tensors} tensors, {work.total_size} bytes in {len(work.shards)} shards")
    else:
        lines = [f"nothing to pad: tensor parallel size {source.plan.tensor_parallel} divides every size"]
    return {
        "changed": bool(work.files),
        "needed": bool(sizes),
        "checkpoint": str(target.directory if sizes else source.directory),
        "plan": lines,
        "sizes": {name: {"before": before, "after": after} for name, (before, after) in sizes.items()},
        "padded_tensors": padded,
        "total_size": work.total_size,
        "written": work.files,
        "written_bytes": work.bytes,
        "diff": [
            {
                "before_header": f"{target.directory} (files)",
                "after_header": f"{target.directory} (files)",
                "before": "",
                "after": "".join(f"{name}\n" for name in work.files if name != CONFIG),
            },
            *(
                {
                    "before_header": str(target.directory / name),
                    "after_header": str(target.directory / name),
                    "before": target.text(name),
                    "after": work.texts[name],
                }
                # The index is as long as the checkpoint has tensors, and changes in its total alone.
                for name in work.stale
                if name != INDEX
            ),
        ]
        if work.files
        else [],
    }


def main() -> None:
    """Pad the checkpoint, or tell in check mode what would be written."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "tensor_parallel_size": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        source = read_source(Path(module.params["path"]), tensor_parallel=module.params["tensor_parallel_size"])
        target, work = Target(source, Path(module.params["dest"])), Work()
        if source.plan.sizes:
            target.check()
            work = target.survey()
            target.check_space(work)
        result = report(source, target, work)
        if work.files and not module.check_mode:
            target.write(work)
    except Hy3Error as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
