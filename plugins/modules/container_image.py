#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: container_image
short_description: Look at an engine's container image, and copy the few files out that are read or patched
version_added: 0.1.0
description:
  - Asks docker or podman whether containers can run as the collection needs it, in the slice C(hy3.slice) with control
    groups of version 2 that systemd manages, and whether the image is there. Fetches nothing.
  - Asks the image's own Python, as the user and with the GPUs that the engine will have, what is installed. Nothing of
    the engine is imported.
  - With O(dest), copies the files that M(sparks.hy3.engine_patch) is about, and the metadata of packages that
    M(sparks.hy3.serve_check) reads, into a directory of the image's own, where both find them as in a virtual
    environment. An image never changes, so they are copied once.
  - Needs C(become).
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: The files come from the image as they are.
  idempotent:
    support: full
options:
  program:
    description: What runs containers.
    type: str
    choices: [docker, podman]
    default: docker
  image:
    description: The image, by its name with a tag or a digest, or by its id.
    type: str
    required: true
  engine:
    description: The engine that it holds.
    type: str
    choices: [vllm, sglang]
    default: vllm
  user:
    description: Numeric ids of the user that runs the engine and of that user's group, for instance V(1000:1000).
    type: str
    required: true
  dest:
    description: Directory for the copies of all images. Nothing is copied if left out.
    type: path
"""

EXAMPLES = r"""
---
- name: See what an image holds
  sparks.hy3.container_image:
    image: vllm/vllm-openai:hy3-arm64-cu130
    user: "1000:1000"

- name: Copy the files out that a patch may be about
  sparks.hy3.container_image:
    image: vllm/vllm-openai:hy3-arm64-cu130
    user: "1000:1000"
    dest: /var/lib/hy3/images
  register: image

- name: Patch the copies
  sparks.hy3.engine_patch:
    package_path: "{{ image.package_path }}"
    patches: [P1]
"""

RETURN = r"""
program_path:
  description: Where O(program) lies.
  returned: success
  type: str
  sample: /usr/bin/docker
reference:
  description: What names exactly this image, by the registry's digest where it came from one, else by its id.
  returned: success
  type: str
  sample: vllm/vllm-openai@sha256:5f0c8a1de0a9a5e2cbe84cc4ab84a2f6fd7b2dcb2a9d7f0f3c1c4c0a4a1b5b1e
digest:
  description: The digest in RV(reference), or the id. Equal images have equal ones, unless they came by different ways.
  returned: success
  type: str
  sample: sha256:5f0c8a1de0a9a5e2cbe84cc4ab84a2f6fd7b2dcb2a9d7f0f3c1c4c0a4a1b5b1e
python:
  description: The version of its Python.
  returned: success
  type: str
  sample: 3.12.11
packages:
  description: Versions of all installed distributions by normal name.
  returned: success
  type: dict
  sample: {vllm: 0.24.0, torch: 2.11.0+cu130, nvidia-nccl-cu13: 2.28.9}
site:
  description: The directory in the image that holds the engine's package, or null without one.
  returned: success
  type: str
  sample: /usr/local/lib/python3.12/dist-packages
prefix:
  description: The directory of the copies, laid out like a virtual environment; null without O(dest).
  returned: success
  type: str
  sample: /var/lib/hy3/images/5f0c8a1de0a9-1b7f0e2d
copies:
  description: Where below RV(prefix) the files of RV(site) are; null without O(dest).
  returned: success
  type: str
  sample: /var/lib/hy3/images/5f0c8a1de0a9-1b7f0e2d/lib/python3.12/site-packages
package_path:
  description: The copy of the engine's package, for M(sparks.hy3.engine_patch); null without O(dest) or the engine.
  returned: success
  type: str
  sample: /var/lib/hy3/images/5f0c8a1de0a9-1b7f0e2d/lib/python3.12/site-packages/vllm
copied:
  description: Whether the copies are there. In check mode they may not be yet.
  returned: success
  type: bool
"""

import typing as t
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._image import Images, directory_of, place_of_copies


def run(module: AnsibleModule) -> dict[str, t.Any]:
    """Look, and copy what is not there yet."""

    def command(argv: list[str]) -> tuple[int, str, str]:
        result: tuple[int, str, str] = module.run_command(
            argv, expand_user_and_vars=False, errors="surrogateescape", handle_exceptions=False
        )
        return result

    params = module.params
    path = module.get_bin_path(params["program"])
    images = Images(params["program"], path, command)
    images.check()
    image = images.look(params["image"])
    content = images.content(image, params["engine"], params["user"])
    prefix = Path(params["dest"]) / directory_of(image, params["engine"]) if params["dest"] else None
    lacking = prefix is not None and not prefix.is_dir()
    if prefix and lacking and not module.check_mode:
        images.copy(image, params["engine"], content, prefix)
    copies = prefix / place_of_copies(content) if prefix else None
    return {
        "changed": lacking,
        "program_path": path,
        "reference": image.reference,
        "digest": image.reference.rpartition("@")[2],
        "python": content.python,
        "packages": content.packages,
        "site": str(Path(content.package).parent) if content.package else None,
        "prefix": str(prefix) if prefix else None,
        "copies": str(copies) if copies else None,
        "package_path": str(copies / params["engine"]) if copies and content.package else None,
        "copied": prefix is not None and (not lacking or not module.check_mode),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "program": {"type": "str", "choices": ["docker", "podman"], "default": "docker"},
            "image": {"type": "str", "required": True},
            "engine": {"type": "str", "choices": ["vllm", "sglang"], "default": "vllm"},
            "user": {"type": "str", "required": True},
            "dest": {"type": "path"},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except Hy3Error as error:
        module.fail_json(msg=f"{error}.")
    except OSError as error:
        module.fail_json(msg=f"{error.filename} cannot be written ({error.strerror}); run the play as root (become).")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
