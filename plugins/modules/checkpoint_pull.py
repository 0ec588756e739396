#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_pull
short_description: Pull a checkpoint from other nodes, checked file by file
version_added: 0.1.0
author:
  - The sparks.hy3 contributors (@sparks-hy3)
description:
  - Makes a directory hold the files of a manifest. Those that are there in their size are hashed, and only the others
    are pulled, with C(rsync) from its daemon on other nodes, several at once.
  - A file is written in a hidden directory within O(dest), compared with the manifest in size and SHA-256, synced, and
    only then given its name. C(config.json) goes first and comes last, so no engine loads a tree that is half old and
    half new.
  - A run that was killed leaves whole files and halves; the next one completes the rest, the halves included.
  - With several O(sources) it works as a chain. The first that lives is asked again and again for files that it does
    not have yet; one that does not answer is passed over for the next and asked again later. What is wrong on one
    source is taken from the next.
  - The last of the O(sources) must have the whole checkpoint as the manifest says; the module fails with the name of
    the first file that is otherwise.
  - Free disk space is checked first.
  - Also removes, from the directory itself, unfinished downloads, and files at its top that engines read
    (configuration, tokenizer, chat template, Python) and the manifest lacks. Any other file stays.
  - Writes C(.hy3-pull/progress.json) in O(dest) once a second while it pulls, with C(bytes), C(bytes_total), C(files),
    C(files_total), C(rate) in bytes a second and C(eta_s) in seconds; M(sparks.hy3.transfer_wait) shows it.
  - Needs C(rsync) 3.2.7 or newer and C(setpriv) (util-linux).
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.changes
options:
  dest:
    description:
      - Directory of the checkpoint. Made if it does not exist.
      - Links in it are replaced by files; what they lead to is left alone.
    type: path
    required: true
  manifest:
    description: RV(sparks.hy3.checkpoint_info#module:files) of the node that has the checkpoint.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Path of the file below O(dest).
        type: str
        required: true
      size:
        description: Size of the file in bytes.
        type: int
        required: true
      sha256:
        description: SHA-256 of its content, in 64 hexadecimal digits. Without, only the size is compared.
        type: str
      source:
        description: Where the hash comes from, which does not matter here.
        type: str
  sources:
    description: The nodes to pull from, the preferred one first and the one that the manifest is of last.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the node, for messages.
        type: str
        required: true
      address:
        description: IPv4 address of the daemon as this node reaches it.
        type: str
        required: true
      port:
        description: TCP port of the daemon.
        type: int
        default: 8730
  password:
    description: Password of user C(hy3) in the daemons' module C(checkpoint).
    type: str
    required: true
  streams:
    description: Number of files to pull at once, 1 to 32.
    type: int
    default: 4
  timeout:
    description:
      - Seconds after which a source that shows nothing new that is needed is passed over, and twice as many for one
        that stops to send.
      - The module fails when no source was of use for as long. It waits as long for another run to leave O(dest).
    type: int
    default: 60
  owner:
    description: User to give what is written to, with that user's group. If left out, the one that runs the module.
    type: str
"""

EXAMPLES = r"""
---
- name: Pull the checkpoint from the node before this one, or else from the first
  sparks.hy3.checkpoint_pull:
    dest: /srv/models/hy3
    manifest: "{{ hostvars['spark-1'].checkpoint.files }}"
    sources:
      - name: spark-2
        address: 192.168.100.2
      - name: spark-1
        address: 192.168.100.1
    password: "{{ secret_of_this_run }}"
    owner: hy3
  register: pulled

- name: Say how fast
  ansible.builtin.debug:
    msg: "{{ pulled.pulled | length }} files at {{ pulled.rate }} bytes a second"
"""

RETURN = r"""
pulled:
  description: Names of the files that were pulled, or would be in check mode, in this order. Empty if all are there.
  returned: success
  type: list
  elements: str
  sample: [model-00001-of-00099.safetensors, tokenizer.json, model.safetensors.index.json, config.json]
pulled_bytes:
  description: Size of these files in bytes.
  returned: success
  type: int
  sample: 169000000000
received:
  description:
    - Bytes that came over the network for them; fewer than RV(pulled_bytes) if halves were here.
    - V(0) in check mode.
  returned: success
  type: int
  sample: 169000000000
elapsed_s:
  description: Seconds that pulling took, without hashing what was there before.
  returned: success
  type: float
  sample: 172.4
rate:
  description: RV(received) in bytes per second, V(0) if nothing was pulled.
  returned: success
  type: int
  sample: 980000000
given:
  description: Number of files that came from each source, by its name.
  returned: success
  type: dict
  sample: {spark-2: 108}
passed_over:
  description: The sources that were passed over when the run ended, each also a warning.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Name of the source.
      type: str
      sample: spark-2
    reason:
      description: Why.
      type: str
      sample: "rsync: [Receiver] failed to connect to 192.168.100.2 (192.168.100.2): Connection refused (111)"
removed:
  description: Names that were removed below O(dest), or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [added_tokens.json]
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import File
from ansible_collections.sparks.hy3.plugins.module_utils._printable import printable
from ansible_collections.sparks.hy3.plugins.module_utils._pull_rsync import Source
from ansible_collections.sparks.hy3.plugins.module_utils._pull_run import Outcome, Puller, Work

MAX_STREAMS = 32


def report(dest: Path, work: Work, outcome: Outcome) -> dict[str, Any]:
    """What the module returns. ``skipped`` is a word of Ansible's own: with it, the task would not count as changed."""
    names = [file.name for file in work.pending]
    header = f"{dest} (files)"
    before, after = ("".join(f"{name}\n" for name in some) for some in (work.removed, names))
    return {
        "changed": work.changes,
        "pulled": names,
        "pulled_bytes": sum(file.size for file in work.pending),
        "received": outcome.received,
        "elapsed_s": round(outcome.seconds, 1),
        "rate": round(outcome.received / outcome.seconds) if outcome.seconds else 0,
        "given": outcome.given,
        "passed_over": [{"name": name, "reason": reason} for name, reason in outcome.passed_over],
        "removed": work.removed,
        "diff": [{"before_header": header, "after_header": header, "before": before, "after": after}]
        if work.changes
        else [],
    }


def pull(params: dict[str, Any], *, check_mode: bool) -> tuple[Work, Outcome]:
    """Make O(dest) what the manifest says, or find out what that takes. Raises Hy3Error."""
    sources = [Source(source["name"], source["address"], source["port"]) for source in params["sources"]]
    if not sources:
        raise Hy3Error("sources is empty, and there must be a node to pull from; name one that has the checkpoint.")
    for name, most in (("streams", MAX_STREAMS), ("timeout", 86400)):
        if not 1 <= params[name] <= most:
            raise Hy3Error(f"{name} is {params[name]}, which is not 1 to {most}; choose a number between these.")
    puller = Puller(
        Path(params["dest"]),
        [File(file["name"], file["size"], file["sha256"]) for file in params["manifest"]],
        streams=params["streams"],
        timeout=params["timeout"],
        owner=params["owner"],
    )
    if check_mode:
        work = puller.survey()
        puller.check_space(work)
        return work, Outcome()
    with puller.locked():
        work = puller.survey()
        puller.check_space(work)
        return work, puller.pull(work, sources, password=params["password"]) if work.changes else Outcome()


def main() -> None:
    """Pull the checkpoint, or tell in check mode what would be pulled."""
    module = AnsibleModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "manifest": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "size": {"type": "int", "required": True},
                    "sha256": {"type": "str"},
                    "source": {"type": "str"},
                },
            },
            "sources": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "address": {"type": "str", "required": True},
                    "port": {"type": "int", "default": 8730},
                },
            },
            "password": {"type": "str", "required": True, "no_log": True},
            "streams": {"type": "int", "default": 4},
            "timeout": {"type": "int", "default": 60},
            "owner": {"type": "str"},
        },
        supports_check_mode=True,
    )
    try:
        work, outcome = pull(module.params, check_mode=module.check_mode)
    except Hy3Error as error:
        module.fail_json(msg=printable(str(error)))
    for warning in outcome.warnings:
        module.warn(printable(warning))
    module.exit_json(**printable(report(Path(module.params["dest"]), work, outcome)))


if __name__ == "__main__":
    main()
