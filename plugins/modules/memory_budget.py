#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_budget
short_description: Check that caps, engine, host side and reserve fit into a node, and predict the KV pool
description:
  - Adds the memory caps of all units of a node and a reserve for the operating system, and compares the sum with the
    memory of the node. Caps that are safe one by one still wedge a node if their sum is larger than it.
  - Separately adds what the engine claims, what is really used beside it, and the reserve. CPU and GPU share one
    memory on a DGX Spark, and a cap probably does not see what CUDA allocates.
  - Counts what one rank of a Hy3 checkpoint holds from its headers, and predicts how many tokens the KV pool holds.
    What cannot be predicted is said so in RV(unknown).
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
    default: []
    suboptions:
      name:
        description: Name of the unit, for messages.
        type: str
        required: true
      limit:
        description:
          - The cap as systemd reads C(MemoryMax), with V(K), V(M), V(G), V(T), V(P) or V(E) of base 1024, plain
            bytes (also with V(B)), or a share of the node's memory such as V(50%).
          - V(infinity), and no value, bound nothing and are refused.
        type: str
  reserve:
    description: What stays with the operating system, in the syntax of O(caps[].limit).
    type: str
    default: 4G
  needs:
    description:
      - What is really used beside the engine's claim, by a name of your choice, in the syntax of O(caps[].limit). For
        example the raylet, the driver that serves the API on this node, and the buffers of the loader.
      - These are no caps. A cap says what may be used, and is checked in a sum of its own. A need above the cap of the
        same name is a problem.
    type: dict
    default: {}
  compile_jobs:
    description:
      - Compilers that may run at once on a start with a cold cache (C(MAX_JOBS)); each adds 1.5 GiB to O(needs).
      - If it is left out, none is counted, or with O(compiles=true) one for each CPU of the node, as C(ninja) starts
        them then.
    type: int
  compiles:
    description: Whether a start with a cold cache compiles kernels, so that O(compile_jobs) must be bounded.
    type: bool
    default: false
  load_format:
    description:
      - The engine's C(load-format). A parallel loader (V(fastsafetensors), V(runai_streamer) and its relatives) stages
        24 GiB in host buffers, which then is the need C(loader) if O(needs) has less.
    type: str
    default: auto
  floor:
    description:
      - What must be available at the least before a start, whatever the engine claims, in the syntax of
        O(caps[].limit).
      - Only checked with O(idle=true).
    type: str
    default: "0"
  gpu_memory_utilization:
    description:
      - vLLM's share of the node's memory for everything it allocates, above 0 and up to 1.
      - If this and O(mem_fraction_static) are left out, the engine claims no share, as vLLM does on CPUs. Its sum is
        then checked with O(kv_cache_memory) only.
    type: float
  mem_fraction_static:
    description:
      - SGLang's share for weights and KV pool, above 0 and up to 1, of what is available before it loads.
      - The pool is only predicted with O(idle=true).
    type: float
  kv_cache_memory:
    description: A fixed size of the KV pool of one rank (C(kv-cache-memory-bytes)), in the syntax of O(caps[].limit).
    type: str
  engine_overhead:
    description:
      - What a rank takes beside weights and KV pool, in the syntax of O(caps[].limit).
      - The default is one figure for every case, measured with vLLM 0.24.0 on DGX Sparks.
    type: str
    default: 5.4G
  max_model_len:
    description: The longest request in tokens. A pool that cannot hold one is a problem.
    type: int
  checkpoint:
    description:
      - Directory of a Hy3 checkpoint to count, from C(config.json) and the headers of its shards.
      - One that cannot be counted makes the prediction unknown and is no failure.
    type: path
  tensor_parallel_size:
    description: Number of ranks that share O(checkpoint).
    type: int
    default: 1
  speculative:
    description: Whether the MTP layer of O(checkpoint) is loaded as drafter.
    type: bool
    default: false
  kv_cache_dtype:
    description: The engine's C(kv-cache-dtype). V(auto) is what the checkpoint says, or else its own dtype.
    type: str
    default: auto
  rank:
    description: What was counted on another node, RV(rank) there. Instead of O(checkpoint).
    type: dict
    suboptions:
      weights:
        description: Bytes that a rank holds.
        type: int
        required: true
      parts:
        description: The same by part, in bytes.
        type: dict
        default: {}
      kv_bytes_per_token:
        description: Bytes that a rank keeps for each token.
        type: int
        required: true
      max_positions:
        description: The longest context that the model allows, in tokens.
        type: int
        required: true
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
  idle:
    description:
      - Whether the engine does not run on this node, so that what is available now is what it finds at its start.
      - With V(true) its claim is compared with that, too, and processes that hold GPU memory are listed. Of SGLang,
        which takes a share of what it finds, that share must hold the weights and one request of O(max_model_len).
    type: bool
    default: false
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
    needs:
      raylet: 4G
      driver: 2G
      loader: 2G
    gpu_memory_utilization: 0.85
    max_model_len: 163840
    checkpoint: /opt/hy3/models/Hy3-NVFP4
    tensor_parallel_size: 2
    speculative: true
    kv_cache_dtype: fp8
    object_store:
      cap: raylet
      size: "2000000000"
    idle: true
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
rank:
  description: What one rank holds, to hand to O(rank) on another node, or null if it is not known.
  returned: success
  type: dict
  contains:
    weights:
      description: Bytes that the largest rank holds once loaded, a drafter included.
      returned: always
      type: int
      sample: 90703655424
    parts:
      description:
        - The same by part, in bytes. V(mtp) is the whole drafter, V(rotary) the table of positions, V(other) what no
          rule knows and is counted on each rank.
      returned: always
      type: dict
      sample:
        {experts: 80518417920, shared: 1491075072, dense: 163577856, attention: 6039797760, embeddings: 989855744,
         router: 248573184, norms: 1359872, mtp: 1183889152, rotary: 67108864, other: 0}
    kv_bytes_per_token:
      description: Bytes that a rank keeps for each token.
      returned: always
      type: int
      sample: 82944
    max_positions:
      description: The longest context that the model allows, in tokens.
      returned: always
      type: int
      sample: 262144
predicted:
  description: What the engine will do on this node. A value is null where it is not known; RV(unknown) says why.
  returned: success
  type: dict
  contains:
    claim:
      description: What the engine takes of the node in all, in bytes.
      returned: always
      type: int
      sample: 111063691060
    kv_room:
      description: What of that is left for the KV pool, in bytes; negative if weights and overhead do not fit.
      returned: always
      type: int
      sample: 14561829787
    kv_tokens:
      description: Tokens that the pool holds.
      returned: always
      type: int
      sample: 175552
    max_concurrency:
      description: How many requests of O(max_model_len) tokens it holds at once.
      returned: always
      type: float
      sample: 1.07
    largest_max_model_len:
      description: The longest request that it holds, in tokens, up to what the model allows.
      returned: always
      type: int
      sample: 175552
largest_share:
  description: The largest share of the node that the engine may claim so that all else fits, rounded down.
  returned: success
  type: float
  sample: 0.88
missing:
  description:
    - What the engine will ask for at its start beyond what is available now, in bytes. V(0) without O(idle=true).
    - A GB10 returns the memory of an engine that was stopped within a minute or two, so ask again before you refuse.
  returned: success
  type: int
  sample: 0
table:
  description: What takes the node's memory, in order, with C(left) at the end.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: What it is.
      returned: always
      type: str
    bytes:
      description: How much; negative only for C(left).
      returned: always
      type: int
  sample: [{name: reserve, bytes: 4294967296}]
owners:
  description: Processes that hold GPU memory, as C(pid), C(name) and C(mib) (null where the driver does not say).
  returned: success
  type: list
  elements: dict
  sample: [{pid: 4242, name: "VLLM::EngineCore", mib: 104277}]
unknown:
  description: One sentence for each thing that is not predicted, and why.
  returned: success
  type: list
  elements: str
  sample: []
idle:
  description: O(idle), to tell whose RV(mem_available) is what an engine finds at its start.
  returned: success
  type: bool
  sample: true
fits:
  description: Whether there are no RV(problems).
  returned: success
  type: bool
  sample: true
problems:
  description: One sentence for each thing that does not fit, with the way out.
  returned: success
  type: list
  elements: str
  sample: []
"""

import os
import typing as t
from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._budget import (
    COMPILERS,
    PARALLEL_LOADER,
    Cap,
    Engine,
    ObjectStore,
    Rank,
    compile_transient,
    judge,
    table,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import (
    MemoryInputError,
    Owner,
    parse_meminfo,
    parse_owners,
    parse_size,
)
from ansible_collections.sparks.hy3.plugins.module_utils._situation import PARALLEL_FORMATS
from ansible_collections.sparks.hy3.plugins.module_utils._weights import count

GPU_QUERY = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]


class Budget:
    """Reads the node and the checkpoint, and hands both to the arithmetic."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params
        try:
            text = Path(self.params["meminfo"]).read_text(encoding="utf-8", errors="replace")
        except OSError as exc:
            raise Hy3Error(f"Cannot read {self.params['meminfo']}: {exc.strerror}") from exc
        self.meminfo = parse_meminfo(text)
        self.unknown: list[str] = []

    def size(self, name: str, text: object) -> int:
        size = parse_size(None if text is None else str(text), mem_total=self.meminfo["MemTotal"])
        if size is None:
            raise Hy3Error(f"The size of {name} is {text or 'not set'}, which bounds nothing: write it, as in 104G")
        return size

    def rank(self) -> dict[str, t.Any] | None:
        if self.params["checkpoint"] is None:
            given: dict[str, t.Any] | None = self.params["rank"]
            return given
        try:
            return count(
                Path(self.params["checkpoint"]),
                tensor_parallel=self.params["tensor_parallel_size"],
                speculative=self.params["speculative"],
                cache_dtype=self.params["kv_cache_dtype"],
            )
        except Hy3Error as exc:
            self.unknown.append(str(exc))
            return None

    def jobs(self) -> int:
        """MAX_JOBS as ninja reads it; without, it starts one compiler for each CPU."""
        given: int | None = self.params["compile_jobs"]
        if given is not None:
            return given
        return os.cpu_count() or 1 if self.params["compiles"] else 0

    def owners(self) -> list[Owner]:
        if not self.params["idle"] or self.module.get_bin_path(GPU_QUERY[0]) is None:
            return []
        rc, stdout, _stderr = self.module.run_command(GPU_QUERY, errors="replace")
        return parse_owners(stdout) if rc == 0 else []

    def engine(self, rank: dict[str, t.Any] | None) -> Engine:
        pool = self.params["kv_cache_memory"]
        return Engine(
            gpu_memory_utilization=self.params["gpu_memory_utilization"],
            mem_fraction_static=self.params["mem_fraction_static"],
            kv_cache_memory=None if pool is None else self.size("kv_cache_memory", pool),
            max_model_len=self.params["max_model_len"],
            overhead=self.size("engine_overhead", self.params["engine_overhead"]),
            rank=Rank(rank["weights"], rank["kv_bytes_per_token"], rank["max_positions"]) if rank else None,
        )

    def check(self) -> dict[str, t.Any]:
        rank, store = self.rank(), self.params["object_store"]
        engine = self.engine(rank)
        reserve = self.size("reserve", self.params["reserve"])
        needs = {name: self.size(f"need {name}", size) for name, size in self.params["needs"].items()}
        if self.params["load_format"] in PARALLEL_FORMATS:
            needs["loader"] = max(needs.get("loader", 0), PARALLEL_LOADER)
        if compiling := compile_transient(self.jobs()):
            needs[COMPILERS] = compiling
        verdict = judge(
            mem_total=self.meminfo["MemTotal"],
            reserve=reserve,
            caps=[Cap(cap["name"], self.size(f"cap {cap['name']}", cap["limit"])) for cap in self.params["caps"]],
            engine=engine,
            needs=needs,
            object_store=store and ObjectStore(store["cap"], self.size("object_store", store["size"])),
            available=self.meminfo["MemAvailable"] if self.params["idle"] else None,
            floor=self.size("floor", self.params["floor"]),
        )
        rows = table(
            engine=engine,
            parts=rank["parts"] if rank else {},
            needs=needs,
            reserve=reserve,
            verdict=verdict,
            mem_total=self.meminfo["MemTotal"],
        )
        predicted = asdict(verdict.prediction)
        return {
            "mem_total": self.meminfo["MemTotal"],
            "mem_available": self.meminfo["MemAvailable"],
            "caps_total": verdict.caps_total,
            "headroom": verdict.headroom,
            "rank": rank,
            "unknown": [*self.unknown, *predicted.pop("unknown")],
            "predicted": predicted,
            "largest_share": verdict.largest_share,
            "missing": verdict.missing,
            "table": [{"name": name, "bytes": size} for name, size in rows],
            "owners": [owner._asdict() for owner in self.owners()],
            "idle": self.params["idle"],
            "fits": not verdict.problems,
            "problems": verdict.problems,
        }


def main() -> None:
    text = {"type": "str", "required": True}
    number = {"type": "int", "required": True}
    module = AnsibleModule(
        argument_spec={
            "caps": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"name": text, "limit": {"type": "str"}},
            },
            "reserve": {"type": "str", "default": "4G"},
            "needs": {"type": "dict", "default": {}},
            "compile_jobs": {"type": "int"},
            "compiles": {"type": "bool", "default": False},
            "load_format": {"type": "str", "default": "auto"},
            "floor": {"type": "str", "default": "0"},
            "gpu_memory_utilization": {"type": "float"},
            "mem_fraction_static": {"type": "float"},
            "kv_cache_memory": {"type": "str"},
            "engine_overhead": {"type": "str", "default": "5.4G"},
            "max_model_len": {"type": "int"},
            "checkpoint": {"type": "path"},
            "tensor_parallel_size": {"type": "int", "default": 1},
            "speculative": {"type": "bool", "default": False},
            "kv_cache_dtype": {"type": "str", "default": "auto"},
            "rank": {
                "type": "dict",
                "options": {
                    "weights": number,
                    "parts": {"type": "dict", "default": {}},
                    "kv_bytes_per_token": {**number, "no_log": False},
                    "max_positions": number,
                },
            },
            "object_store": {"type": "dict", "options": {"cap": text, "size": text}},
            "idle": {"type": "bool", "default": False},
            "meminfo": {"type": "path", "default": "/proc/meminfo"},
        },
        mutually_exclusive=[("checkpoint", "rank"), ("gpu_memory_utilization", "mem_fraction_static")],
        supports_check_mode=True,
    )
    try:
        result = Budget(module).check()
    except (Hy3Error, MemoryInputError) as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
