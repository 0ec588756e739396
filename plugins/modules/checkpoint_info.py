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
  - Compares layers, experts and shapes of a Hy3 with its configuration, and says which tensors are quantized how.
  - Tensor data is read with O(level=sha256) only. Without, damage that leaves sizes and headers alone is not found.
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
      header: Read the header of every shard, and hash the small files.
      size: Only look for the shards that the index names, and compare their sizes with its total size.
      sha256:
        - Also hash every file, on as many cores as the process may use, and compare with what C(huggingface_hub)
          recorded and with O(manifest).
        - It takes as long as reading the checkpoint. The page cache is left about as it was.
    default: header
  manifest:
    description:
      - What the files must be, such as RV(files) of another node. Each must be there in its size.
      - Hashes are compared where both sides know them, which is all of them with O(level=sha256).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Path of the file below O(path).
        type: str
        required: true
      size:
        description: Size of the file in bytes.
        type: int
        required: true
      sha256:
        description: SHA-256 of its content, in 64 hexadecimal digits.
        type: str
      source:
        description: Where the hash comes from, which does not matter here.
        type: str
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

- name: Read every byte, and compare with what the first node has
  sparks.hy3.checkpoint_info:
    path: /srv/models/hy3
    level: sha256
    manifest: "{{ hostvars['spark-1'].checkpoint.files }}"
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
    - The same with O(level=header) and O(level=sha256). O(level=size) leaves the headers out.
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
files:
  description:
    - The manifest; every file below O(path), by name. Hidden ones, unfinished downloads and what lies behind links to
      directories are left out.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Path below O(path).
      type: str
      sample: model-00001-of-00099.safetensors
    size:
      description: Size of the file in bytes; of the file itself if RV(files[].name) is a link.
      type: int
      sample: 1719664640
    sha256:
      description: SHA-256 of the content, V(none) if not known.
      type: str
      sample: 45e7c1b9f2e8d7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2
    source:
      description:
        - Where RV(files[].sha256) comes from. V(read) is computed from the file; V(hub) is what C(huggingface_hub)
          recorded when it fetched the file, and only that; V(none) if it is not known.
        - Names in the hub's shared store are no SHA-256 and not taken for it.
      type: str
      sample: hub
outside:
  description:
    - Those of the RV(files) that are links to a place outside of O(path), other than the C(huggingface_hub) cache that
      O(path) lies in.
  returned: success
  type: list
  elements: str
  sample: []
foreign:
  description: What lies in O(path), looks like weights or a half of them, and is in no index.
  returned: success
  type: list
  elements: str
  sample: ["consolidated.safetensors"]
quantization:
  description:
    - How the tensors are stored by the shards' headers, the largest first.
    - Empty with O(level=size), and if there is a problem with index, sizes or headers.
  returned: success
  type: list
  elements: dict
  contains:
    part:
      description: Part of the model.
      type: str
      choices: [experts, shared, dense, attention, embeddings, router, norms, other]
      sample: experts
    drafter:
      description: Whether it belongs to the MTP layer.
      type: bool
      sample: false
    format:
      description:
        - V(nvfp4) (inputs have scales, too), V(w4a16) (only weights have), V(mxfp4), V(fp8_tensor), V(fp8_channel) and
          V(fp8_block) by what one scale is for, V(int8), V(int_packed).
        - If it is not quantized, the dtype in the words of the safetensors format in small letters.
      type: str
      sample: nvfp4
    modules:
      description: Number of modules, such as projections.
      type: int
      sample: 45504
    size:
      description: Bytes, scales included.
      type: int
      sample: 160541000000
"""

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import capped, inspect
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import File
from ansible_collections.sparks.hy3.plugins.module_utils._printable import printable


def main() -> None:
    """Report on the checkpoint in O(path)."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "level": {"type": "str", "choices": ["header", "size", "sha256"], "default": "header"},
            "manifest": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "size": {"type": "int", "required": True},
                    "sha256": {"type": "str"},
                    "source": {"type": "str"},
                },
            },
        },
        supports_check_mode=True,
    )
    params = module.params
    manifest = [File(file["name"], file["size"], file["sha256"]) for file in params["manifest"]]
    report = inspect(Path(params["path"]), level=params["level"], manifest=manifest)
    for warning in report.warnings:
        module.warn(printable(warning))
    answer = {
        "exists": report.exists,
        "complete": not report.problems,
        "problems": capped(report.problems),
        "problem_count": len(report.problems),
        "shards": [asdict(shard) for shard in report.shards],
        "tensors": report.tensors,
        "total_size": report.total_size,
        "digest": report.digest,
        "model": report.model,
        "mtp": report.mtp,
        "files": [asdict(file) for file in report.files],
        "outside": report.outside,
        "foreign": report.foreign,
        "quantization": [stored._asdict() for stored in report.stored],
    }
    module.exit_json(changed=False, **printable(answer))


if __name__ == "__main__":
    main()
