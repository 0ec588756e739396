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
    details:
      - Measures only, and predicts that whatever is resident can be released, unless a process that can be seen maps
        the file. With O(drop_caches) it predicts a change.
  diff_mode:
    support: none
  idempotent:
    support: partial
    details: With O(drop_caches) each run reports a change, for other programs fill the caches all the time.
options:
  paths:
    description:
      - Files and directories. Directories are searched through; links to files are followed, as in a Hugging Face
        cache, links to directories only if they are named here. Each file is treated and counted once, however many
        names it has.
      - What does not exist or is no regular file is listed in RV(skipped_paths), what cannot be read in
        RV(failed_paths). The module fails if there is a failed path and no file could be treated.
    type: list
    elements: path
    required: true
  drop_caches:
    description:
      - Also drop all clean caches of the machine (page cache, dentries and inodes), through
        C(/proc/sys/vm/drop_caches), after a C(sync). Everything else on the machine then reads from its disks again.
      - Needs root, and a machine or container that may write there.
    type: bool
    default: false
notes:
  - A file must be owned or writable by the user that the task runs as, or else the kernel does not tell its residency.
  - On a tmpfs (such as C(/dev/shm)) the page cache is the only place where a file is, so it stays.
"""

EXAMPLES = r"""
---
- name: Release the page cache of the checkpoint before serving
  sparks.hy3.page_cache:
    paths:
      - /srv/models/Hy3-NVFP4

- name: Release all clean caches of the node
  sparks.hy3.page_cache:
    paths:
      - /srv/models/Hy3-NVFP4
    drop_caches: true
  become: true
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
  description: What was released of O(paths), in bytes.
  returned: success
  type: int
  sample: 181462368256
files:
  description: Number of files that were treated.
  returned: success
  type: int
  sample: 104
kept_paths:
  description: Files with pages that are in the page cache now.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: The file, without links in its path.
      type: str
      sample: /srv/models/Hy3-NVFP4/model-00001-of-00099.safetensors
    bytes:
      description: What is in the page cache of it, in bytes.
      type: int
      sample: 1832910848
mapped_by:
  description: Processes that map files of RV(kept_paths), as far as the task's user may see them.
  returned: success
  type: list
  elements: dict
  contains:
    pid:
      description: Process id.
      type: int
      sample: 4242
    name:
      description: The process's name, as in C(/proc/PID/comm).
      type: str
      sample: VLLM::Worker_TP
    paths:
      description: The files that it maps.
      type: list
      elements: str
      sample: [/srv/models/Hy3-NVFP4/model-00001-of-00099.safetensors]
skipped_paths:
  description: What has nothing to release.
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
      sample: No such file or directory
failed_paths:
  description: What could not be treated.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: The path.
      type: str
      sample: /srv/models/Hy3-NVFP4/model-00001-of-00099.safetensors
    errno:
      description: Name of the error.
      type: str
      sample: EACCES
    reason:
      description: The error in words.
      type: str
      sample: Permission denied
memory:
  description:
    - The node's memory in bytes. Page cache counts as available and not as free, and which of the two an engine asks
      for differs; vLLM on a DGX Spark asks for what is available.
  returned: success
  type: dict
  contains:
    free_before:
      description: C(MemFree) before.
      type: int
      sample: 44560285696
    free_after:
      description: C(MemFree) now.
      type: int
      sample: 124124033024
    available_after:
      description: C(MemAvailable) now.
      type: int
      sample: 124554051584
"""

import typing as t
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._memory import parse_meminfo
from ansible_collections.sparks.hy3.plugins.module_utils._page_cache import (
    Failed,
    Mapper,
    Outcome,
    drop_all,
    mapped_by,
    purge,
)


def find_warnings(outcome: Outcome, mappers: list[Mapper], unexplained: list[str]) -> list[str]:
    """Return what a person must know about a purge, one sentence each."""
    found = [
        f"Process {mapper.pid} ({mapper.name}) maps {len(mapper.paths)} of the files, whose pages stay: stop it first"
        for mapper in mappers
    ]
    if unexplained:
        found.append(
            f"Pages of {unexplained[0]} stay although no process that this user may see maps it: look as root, and "
            "whether it lies on a tmpfs or is being written"
        )
    if outcome.failed:
        found.append(describe_failures(outcome.failed))
    elif outcome.skipped and not outcome.files:
        found.append(f"Nothing could be treated: {outcome.skipped[0].path}: {outcome.skipped[0].reason}")
    return found


def describe_failures(failed: list[Failed]) -> str:
    """Return one sentence about the paths that could not be treated."""
    return (
        f"Could not treat {failed[0].path} ({failed[0].reason}){f' and {len(failed) - 1} more' if failed[1:] else ''}: "
        "run the task as the owner of the files or as root"
    )


def printable(value: t.Any) -> t.Any:
    """Return a result with names that are not UTF-8 written with escapes: Ansible takes nothing else."""
    if isinstance(value, dict):
        return {key: printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


def read_memory() -> dict[str, int]:
    return parse_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "path", "required": True},
            "drop_caches": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    check_mode, drop_caches = module.check_mode, module.params["drop_caches"]
    before = read_memory()
    outcome = purge(module.params["paths"], measure_only=check_mode)
    if outcome.failed and not outcome.files:
        module.fail_json(msg=printable(describe_failures(outcome.failed)))
    if drop_caches and not check_mode:
        try:
            drop_all()
        except OSError as exc:
            module.fail_json(
                msg=f"Cannot drop the caches of the machine ({exc.strerror}): run the task as root and outside a "
                "container, or without drop_caches"
            )
    mappers = mapped_by(kept.path for kept in outcome.kept)
    explained = {path for mapper in mappers for path in mapper.paths}
    others = [kept.path for kept in outcome.kept if kept.path not in explained]
    for warning in find_warnings(outcome, mappers, [] if check_mode else others):
        module.warn(printable(warning))
    after = read_memory()
    result = {
        "resident_before": outcome.resident_before,
        "resident_after": outcome.resident_after,
        "released": outcome.released,
        "files": outcome.files,
        "kept_paths": [kept._asdict() for kept in outcome.kept],
        "mapped_by": [mapper._asdict() for mapper in mappers],
        # "skipped" and "failed" alone would make Ansible show the task so.
        "skipped_paths": [skipped._asdict() for skipped in outcome.skipped],
        "failed_paths": [failed._asdict() for failed in outcome.failed],
        "memory": {
            "free_before": before["MemFree"],
            "free_after": after["MemFree"],
            "available_after": after["MemAvailable"],
        },
    }
    module.exit_json(changed=drop_caches or bool(others if check_mode else outcome.released), **printable(result))


if __name__ == "__main__":
    main()
