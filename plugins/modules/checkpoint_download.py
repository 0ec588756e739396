#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: checkpoint_download
short_description: Fetch a model checkpoint with huggingface_hub
version_added: 0.1.0
author:
  - The sparks.hy3 contributors (@sparks-hy3)
description:
  - Fetches the files of a model repository into a plain directory (C(--local-dir) of C(hf download)). The transfer is
    the work of C(huggingface_hub) in O(venv), which every vLLM brings along.
  - What is there is read and compared with the hub's hashes first, so a tree that was brought from elsewhere is taken
    as it is, and a damaged shard is fetched again. What was fetched is compared, too. When all is as the hub has it, a
    hidden record says so. With O(revision) as a commit, later runs then need no network and read nothing.
  - A file of text that was edited stays as it is; remove it to have it fetched again. Files that the repository does
    not have stay as well.
  - Disk space is checked before anything is fetched. A run that was killed goes on with the files that are not whole. A
    connection that is cut is taken up where it was cut, but C(huggingface_hub) 2.4.0 begins a file anew in a new run.
  - While it runs, C(.cache/huggingface/hy3-progress.json) in O(dest) holds its process C(pid) and how far it is, as
    M(sparks.hy3.transfer_wait) reads it.
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.changes
attributes:
  check_mode:
    details: Asks the hub and reads what is there, which takes as long as outside check mode.
options:
  repository:
    description: Model repository, as V(OWNER/NAME).
    type: str
    required: true
  revision:
    description:
      - Commit of 40 hexadecimal digits, or a branch or a tag.
      - Only a commit is the same tomorrow, and only with one the network is not needed once all is there. RV(revision)
        says which one a branch is.
    type: str
    default: main
  dest:
    description:
      - Directory for the checkpoint. Made if it does not exist, and O(user)'s then.
      - Neither a cache of C(huggingface_hub), nor one that M(sparks.hy3.checkpoint_pad) wrote, nor one with another
        repository.
    type: path
    required: true
  venv:
    description: Virtual environment with C(huggingface_hub), such as the engine's.
    type: path
    required: true
  user:
    description:
      - User that fetches, and owns what is fetched. Only root can name another one.
      - If not set, the user that the task runs as.
    type: str
    default: ""
  token_file:
    description:
      - File on the node with an access token of the hub on its only line, with mode V(0600) or closer. Read by the user
        that the task runs as, not by O(user).
      - Needed for repositories that are gated or private. Without it no token is used, not that of C(hf auth
        login) either.
    type: path
  endpoint:
    description: Address of a mirror, such as V(https://mirror.example). V(https://huggingface.co) if not set.
    type: str
    default: ""
  allow_patterns:
    description: Fetch only the files that match one of these, such as V(*.safetensors). All, if empty.
    type: list
    elements: str
    default: []
  ignore_patterns:
    description: Leave out the files that match one of these.
    type: list
    elements: str
    default: []
  max_workers:
    description: Number of files that are fetched at a time.
    type: int
    default: 8
  timeout:
    description:
      - How long the hub may be silent before the client tries again, or in the end gives up.
      - Unit is seconds. The transfer as a whole may take as long as it takes.
    type: int
    default: 30
seealso:
  - module: sparks.hy3.checkpoint_info
"""

EXAMPLES = r"""
---
- name: Fetch the checkpoint at one commit
  sparks.hy3.checkpoint_download:
    repository: LibertAIDAI/Hy3-NVFP4
    revision: 3d6f0a4c8b1e5f7a9c2d4e6f8a0b1c3d5e7f9a1b
    dest: /opt/hy3/models/Hy3-NVFP4
    venv: /opt/hy3/venv
    user: hy3
  become: true

- name: Fetch a gated one through a proxy, without Xet
  sparks.hy3.checkpoint_download:
    repository: example/private
    dest: /srv/models/private
    venv: /opt/hy3/venv
    token_file: /etc/hy3/hf_token
  environment:
    HTTPS_PROXY: http://proxy.example:3128
    HF_HUB_DISABLE_XET: "1"
  register: fetched

- name: Say which commit that was
  ansible.builtin.debug:
    msg: "{{ fetched.revision }}: {{ fetched.fetched_bytes }} bytes fetched"
"""

RETURN = r"""
revision:
  description: The commit, in 40 hexadecimal digits.
  returned: success
  type: str
  sample: 3d6f0a4c8b1e5f7a9c2d4e6f8a0b1c3d5e7f9a1b
fetched:
  description: Names of the files that were fetched, or in check mode would be.
  returned: success
  type: list
  elements: str
  sample: [config.json, model-00001-of-00099.safetensors]
fetched_bytes:
  description: Size of RV(fetched) in bytes.
  returned: success
  type: int
  sample: 169000000000
recorded:
  description:
    - Whether an earlier run had recorded that all is as the hub has it. Files were then neither read nor compared, only
      looked for.
  returned: success
  type: bool
  sample: false
kept:
  description: Names of the files of text that differ from the repository's and were kept, because somebody edited them.
  returned: success
  type: list
  elements: str
  sample: [config.json]
"""

import os
import pwd
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.sparks.hy3.plugins.module_utils._download import Client, Request, acting_as, read_token
from ansible_collections.sparks.hy3.plugins.module_utils._download_tree import Download, Work, may_write, nearest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._printable import printable

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def read_request(module: AnsibleModule) -> Request:
    """The request, the token included. Raises Hy3Error for values that cannot be."""
    params = module.params
    if not REPOSITORY.fullmatch(params["repository"]):
        raise Hy3Error(f"repository is '{params['repository']}', which is none; write OWNER/NAME.")
    if params["endpoint"] and not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", params["endpoint"]):
        raise Hy3Error(
            f"endpoint is '{params['endpoint']}', which is no address of a hub; write https://HOST without a user."
        )
    for name in ("max_workers", "timeout"):
        if params[name] < 1:
            raise Hy3Error(f"{name} is {params[name]}, and it must be at least 1; write a larger number.")
    token_file = params["token_file"] or ""
    token = read_token(token_file) if token_file else ""
    if token:
        module.no_log_values.add(token)
    return Request(
        repository=params["repository"],
        revision=params["revision"] or "main",
        directory=Path(params["dest"]),
        endpoint=params["endpoint"].rstrip("/"),
        token=token,
        token_file=token_file,
        allow=tuple(params["allow_patterns"]),
        ignore=tuple(params["ignore_patterns"]),
        workers=params["max_workers"],
        timeout=params["timeout"],
    )


@contextmanager
def readable() -> Iterator[None]:
    """What cannot be looked at within is said in a sentence."""
    try:
        yield
    except OSError as error:
        raise Hy3Error(
            f"{error.filename} cannot be used ({error.strerror or error}); give it to the user that fetches."
        ) from error


def make_directory(directory: Path, user: str) -> None:
    """Make a directory where only root may, and give it to the user."""
    with readable():
        directory.mkdir(parents=True)
        os.chown(directory, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid, follow_symlinks=False)


def run(module: AnsibleModule) -> Work:
    """Fetch what is lacking, or in check mode see what that is and whether it could be fetched."""
    request, user = read_request(module), module.params["user"]
    with acting_as(user), readable():
        download = Download(request, Client(Path(module.params["venv"]) / "bin/python", request))
        download.check()
        work = download.plan()
        if work.fetch:
            download.check_space(work)
        if work.fetch:
            download.try_access(work)
        own = may_write(nearest(request.directory))
    if not module.check_mode and not work.recorded:
        if not own:
            make_directory(request.directory, user)
        with acting_as(user):
            download.finish(work)
    return work


def main() -> None:
    """Fetch the checkpoint, or tell in check mode what would be fetched."""
    module = AnsibleModule(
        argument_spec={
            "repository": {"type": "str", "required": True},
            "revision": {"type": "str", "default": "main"},
            "dest": {"type": "path", "required": True},
            "venv": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "token_file": {"type": "path", "no_log": False},
            "endpoint": {"type": "str", "default": ""},
            "allow_patterns": {"type": "list", "elements": "str", "default": []},
            "ignore_patterns": {"type": "list", "elements": "str", "default": []},
            "max_workers": {"type": "int", "default": 8},
            "timeout": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    try:
        work = run(module)
    except Hy3Error as error:
        module.fail_json(msg=printable(str(error)))
    for name in work.kept:
        module.warn(printable(f"{name} was edited and is kept; remove it to have the repository's fetched."))
    names = [file.name for file in work.fetch]
    answer = {
        "revision": work.revision,
        "fetched": names,
        "fetched_bytes": work.bytes,
        "recorded": work.recorded,
        "kept": work.kept,
        "diff": {
            "before_header": f"{module.params['dest']} (files)",
            "after_header": f"{module.params['dest']} (files at {work.revision})",
            "before": "",
            "after": "".join(f"{name}\n" for name in names),
        },
    }
    module.exit_json(changed=bool(names), **printable(answer))


if __name__ == "__main__":
    main()
