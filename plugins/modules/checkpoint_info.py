#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_info
short_description: Tell whether a model checkpoint is whole, and what it holds
version_added: 0.1.0
author:
  - The sparks.hy3 contributors (@sparks-hy3)
description:
  - Examines a directory with a model checkpoint in the safetensors format. Engines load a checkpoint that lacks a shard
    or a tensor without complaint and answer nonsense, or fail after minutes; this takes seconds.
  - Compares the index with the shards, and each shard's header with its size. Finds unfinished downloads and Git LFS
    pointers that stand in place of files.
  - No tensor data is read. Damage that leaves sizes and headers alone is not found.
  - An incomplete or absent checkpoint is not a failure of the module; see RV(complete) and RV(problems).
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options:
  path:
    description:
      - Directory of the checkpoint, the one that holds C(config.json).
      - In a cache of C(huggingface_hub) this is a directory below C(snapshots).
    type: path
    required: true
  level:
    description: How closely to look.
    type: str
    choices:
      header: Read the header of every shard.
      size: Only look for the shards that the index names, and compare their sizes with its total size.
    default: header
"""

EXAMPLES = r"""
---
- name: Look at the checkpoint
  sparks.hy3.checkpoint_info:
    path: /srv/models/hy3
  register: checkpoint

- name: Refuse to serve an incomplete checkpoint
  ansible.builtin.assert:
    that: checkpoint.complete
    fail_msg: "{{ checkpoint.problems | first }}"
"""

RETURN = r"""
exists:
  description: Whether O(path) is a directory.
  returned: success
  type: bool
  sample: true
complete:
  description: Whether no problem was found.
  returned: success
  type: bool
  sample: true
problems:
  description:
    - What is wrong, one sentence each, most important first. Each says what to do.
    - At most 20, then a sentence that counts the rest.
  returned: success
  type: list
  elements: str
  sample: ["1 of the 99 shards that the index names are missing: model-00042-of-00099.safetensors; fetch them."]
problem_count:
  description: Number of problems, those left out of RV(problems) included.
  returned: success
  type: int
  sample: 1
shards:
  description: The shards that belong to the checkpoint and are there, by name.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: File name in O(path).
      type: str
      sample: model-00001-of-00099.safetensors
    size:
      description: Size of the file in bytes.
      type: int
      sample: 1719664640
    tensors:
      description: Number of tensors in its header, or with O(level=size) in the index.
      type: int
      sample: 1870
tensors:
  description: Number of tensors in all RV(shards).
  returned: success
  type: int
  sample: 185130
total_size:
  description:
    - Bytes of all tensors by the shards' headers.
    - With O(level=size) what the index claims, or V(0) if it claims nothing.
  returned: success
  type: int
  sample: 169000000000
digest:
  description:
    - SHA-256 over the names, sizes and headers of the shards and the content of the small files that engines read
      (configuration, index, tokenizer, chat template, Python). Documentation and licenses do not count.
    - Equal on two nodes if they hold the same checkpoint, apart from damage within the tensor data.
    - Only compare digests of the same O(level), as V(size) leaves the headers out.
    - V(none) unless RV(complete).
  returned: success
  type: str
  sample: 45e7c1b9f2e8d7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2
model:
  description: What C(config.json) and C(hf_quant_config.json) say. Empty if the first cannot be read.
  returned: success
  type: dict
  contains:
    architecture:
      description: Name of the model class, V(none) if not given.
      type: str
      sample: HYV3ForCausalLM
    layers:
      description: Number of decoder layers, without MTP layers.
      type: int
      sample: 80
    heads:
      description: Number of attention heads.
      type: int
      sample: 64
    kv_heads:
      description: Number of key and value heads; that of the attention heads if not given.
      type: int
      sample: 8
    head_dim:
      description: Elements per head.
      type: int
      sample: 128
    hidden_size:
      description: Elements of the hidden state.
      type: int
      sample: 4096
    experts:
      description: Number of routed experts in a layer, V(none) for a dense model.
      type: int
      sample: 192
    nextn_layers:
      description: Number of MTP layers that the configuration promises. See RV(mtp) for whether they are there.
      type: int
      sample: 1
    max_position_embeddings:
      description: Longest context in tokens.
      type: int
      sample: 262144
    quant_method:
      description: Family of the quantization, V(none) if the weights are not quantized.
      type: str
      sample: modelopt
    quant_algo:
      description: Algorithm within the family, V(none) if not given.
      type: str
      sample: NVFP4
    lm_head_excluded:
      description: Whether the quantization's ignore list names C(lm_head), directly or by a pattern.
      type: bool
      sample: true
mtp:
  description: Whether the tensors of the MTP layer are really listed, so that speculative decoding can work.
  returned: success
  type: bool
  sample: true
"""

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import capped, inspect


def main() -> None:
    """Report on the checkpoint in O(path)."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "level": {"type": "str", "choices": ["header", "size"], "default": "header"},
        },
        supports_check_mode=True,
    )
    report = inspect(Path(module.params["path"]), level=module.params["level"])
    for warning in report.warnings:
        module.warn(warning)
    module.exit_json(
        changed=False,
        exists=report.exists,
        complete=not report.problems,
        problems=capped(report.problems),
        problem_count=len(report.problems),
        shards=[asdict(shard) for shard in report.shards],
        tensors=report.tensors,
        total_size=report.total_size,
        digest=report.digest,
        model=report.model,
        mtp=report.mtp,
    )


if __name__ == "__main__":
    main()
