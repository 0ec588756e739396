#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_budget
short_description: Check that memory caps, device budget and reserve fit into a node
description:
  - Adds the memory caps of all units of a node and a reserve for the operating system, and compares the sum with the
    memory of the node. Caps that are safe one by one still wedge a node if their sum is larger than it.
  - Separately adds the engine's device budget, what its processes need beside it, and the reserve. CPU and GPU share
    one memory on a DGX Spark, and a cap probably does not see what CUDA allocates.
  - A plan that does not fit is returned, not failed, so that the caller can report all nodes. Only bad input fails.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options:
  caps:
    description: The memory caps of all units on this node.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the unit, for messages.
        type: str
        required: true
      limit:
        description:
          - The cap as systemd reads C(MemoryMax), with V(K), V(M), V(G) or V(T) of base 1024, or plain bytes.
          - V(infinity) bounds nothing and is refused.
        type: str
        required: true
  reserve:
    description: What stays with the operating system, in the syntax of O(caps[].limit).
    type: str
    default: 4G
  gpu_memory_utilization:
    description:
      - The engine's share of the node's memory, above 0 and up to 1.
      - If left out, the device budget is not checked.
    type: float
  host_side:
    description:
      - What the engine's processes need beside the device budget, in the syntax of O(caps[].limit), for example the cap
        of the driver that serves the API on this node.
      - If left out, nothing is added.
    type: str
  object_store:
    description: Ray's object store. It is charged to the raylet's cap, so it is compared with that and not added again.
    type: dict
    suboptions:
      cap:
        description: The name in O(caps) that it lives in.
        type: str
        required: true
      size:
        description: Its size, in the syntax of O(caps[].limit).
        type: str
        required: true
  meminfo:
    description: The file that tells the memory of the node.
    type: path
    default: /proc/meminfo
"""

EXAMPLES = r"""
---
- name: Check the head of a pair
  sparks.hy3.memory_budget:
    caps:
      - name: raylet
        limit: 104G
      - name: driver
        limit: 8G
    reserve: 4G
    gpu_memory_utilization: 0.85
    host_side: 8G
    object_store:
      cap: raylet
      size: "2000000000"
  register: budget

- name: Refuse a plan that does not fit
  ansible.builtin.assert:
    that: budget.fits
    fail_msg: "{{ budget.problems | join(' ') }}"
"""

RETURN = r"""
mem_total:
  description: Memory of the node, in bytes.
  returned: success
  type: int
  sample: 130663165952
mem_available:
  description: What can be had now, reclaimable page cache included, in bytes.
  returned: success
  type: int
  sample: 121411960832
caps_total:
  description: Sum of the caps, in bytes.
  returned: success
  type: int
  sample: 120259084288
headroom:
  description: What is left after caps and reserve, in bytes; negative if they do not fit.
  returned: success
  type: int
  sample: 6109114368
device_budget:
  description: What the engine claims for weights and KV pool, in bytes.
  returned: when O(gpu_memory_utilization) is given
  type: int
  sample: 111063691060
fits:
  description: Whether there are no RV(problems).
  returned: success
  type: bool
  sample: true
problems:
  description: One sentence for each sum that does not fit, with the way out.
  returned: success
  type: list
  elements: str
  sample: []
"""

import typing as t
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._budget import Cap, ObjectStore, judge
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import MemoryInputError, parse_meminfo, parse_size


def bounded(name: str, text: str) -> int:
    size = parse_size(text)
    if size is None:
        raise Hy3Error(f"The size of {name} is infinity, which bounds nothing: write it in bytes, as in 104G")
    return size


def check(params: dict[str, t.Any]) -> dict[str, t.Any]:
    try:
        meminfo = parse_meminfo(Path(params["meminfo"]).read_text(encoding="ascii"))
    except OSError as exc:
        raise Hy3Error(f"Cannot read {params['meminfo']}: {exc.strerror}") from exc
    store = params["object_store"]
    verdict = judge(
        mem_total=meminfo["MemTotal"],
        reserve=bounded("reserve", params["reserve"]),
        caps=[Cap(cap["name"], bounded(f"cap {cap['name']}", cap["limit"])) for cap in params["caps"]],
        gpu_memory_utilization=params["gpu_memory_utilization"],
        host_side=0 if params["host_side"] is None else bounded("host_side", params["host_side"]),
        object_store=store and ObjectStore(store["cap"], bounded("object_store", store["size"])),
    )
    result = {
        "mem_total": meminfo["MemTotal"],
        "mem_available": meminfo["MemAvailable"],
        "caps_total": verdict.caps_total,
        "headroom": verdict.headroom,
        "fits": not verdict.problems,
        "problems": verdict.problems,
    }
    if verdict.device_budget is not None:
        result["device_budget"] = verdict.device_budget
    return result


def main() -> None:
    size = {"type": "str", "required": True}
    module = AnsibleModule(
        argument_spec={
            "caps": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {"name": {"type": "str", "required": True}, "limit": size},
            },
            "reserve": {"type": "str", "default": "4G"},
            "gpu_memory_utilization": {"type": "float"},
            "host_side": {"type": "str"},
            "object_store": {"type": "dict", "options": {"cap": {"type": "str", "required": True}, "size": size}},
            "meminfo": {"type": "path", "default": "/proc/meminfo"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **check(module.params))
    except (Hy3Error, MemoryInputError) as exc:
        module.fail_json(msg=str(exc))


if __name__ == "__main__":
    main()
