# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for docker or podman: one image, whose files are a directory, and a log of what was asked."""

from __future__ import annotations

import json
import sys
import typing as t
from pathlib import Path

ID = "sha256:" + "5f0c8a1de0a9" + "0" * 52
DIGEST = "sha256:" + "d" * 64
NAME = "registry.example/hy3:1"
SITE = "/usr/local/lib/python3.12/dist-packages"

# As docker 28.2 and podman 4.9 print them, in the parts that count.
INFO: dict[str, dict[str, t.Any]] = {
    "docker": {"CgroupDriver": "systemd", "CgroupVersion": "2", "SecurityOptions": ["name=cgroupns"]},
    "podman": {"host": {"cgroupManager": "systemd", "cgroupVersion": "v2", "security": {"rootless": False}}},
}

PROGRAM = """\
#!{python} -I
import glob, json, os, shutil, sys
words = sys.argv[1:]
root, settings = {root!r}, json.load(open({settings!r}))
open({log!r}, "a").write(json.dumps(words) + "\\n")
if words[0] in settings["fails"]:
    sys.exit(settings["fails"][words[0]])
if words[0] == "info":
    print(json.dumps(settings["info"]))
elif words[:2] == ["image", "inspect"]:
    print(json.dumps([settings["image"]]))
elif words[0] == "run":
    # What the image's python3 would say of itself.
    engine = words[-1]
    site = root + settings["site"]
    package = os.path.join(settings["site"], engine) if os.path.isdir(os.path.join(site, engine)) else None
    infos = [path.removeprefix(root) for path in sorted(glob.glob(site + "/*.dist-info"))]
    print("a banner")
    print(json.dumps({{"python": "3.12.11", "package": package, "infos": infos}}))
elif words[0] == "create":
    print("b" * 64)
elif words[0] == "cp":
    box, _colon, path = words[1].partition(":")
    assert box == "b" * 64
    if os.path.isdir(root + path):
        shutil.copytree(root + path, words[2])
    elif os.path.exists(root + path):
        shutil.copyfile(root + path, words[2])
    else:
        sys.exit("Error response from daemon: Could not find the file " + path + " in container " + box)
elif words[0] not in ("rm", "exec"):
    sys.exit("the stand-in does not know " + words[0])
"""

# Of vLLM 0.24.0 what patch P1 looks for.
MTP = """\
class HYV3SharedHead:
    def __init__(self, config, quant_config=None):
        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant_config)


class HYV3MultiTokenPredictorLayer:
    def __init__(self, config, prefix, quant_config=None):
        self.shared_head = HYV3SharedHead(config=config, quant_config=quant_config)
"""
PACKAGES = {"vllm": "0.24.0", "ray": "2.60.0", "torch": "2.11.0+cu130", "nvidia_nccl_cu13": "2.28.9", "other": "1"}


class Docker:
    """The program below ``directory/bin``, and its image below ``directory/image``."""

    def __init__(self, directory: Path, program: str = "docker") -> None:
        self.root, self.log = directory / "image", directory / "docker.log"
        self.path = directory / "bin" / program
        self._settings = directory / "docker.json"
        self.fails: dict[str, str] = {}
        self.info = INFO[program]
        self.image: dict[str, t.Any] = {"Id": ID, "RepoDigests": [f"registry.example/hy3@{DIGEST}"]}
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(
            PROGRAM.format(python=sys.executable, root=str(self.root), settings=str(self._settings), log=str(self.log))
        )
        self.path.chmod(0o755)
        self.file("vllm/__init__.py", "")
        self.file("vllm/model_executor/models/hy_v3_mtp.py", MTP)
        self.file("torch/version.py", "cuda: str = '13.0'\n")
        for name, version in PACKAGES.items():
            self.file(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        self.save()

    def file(self, name: str, text: str) -> Path:
        path = self.root / SITE.lstrip("/") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def save(self) -> None:
        """Let the program see what was set."""
        settings = {"fails": self.fails, "info": self.info, "image": self.image, "site": SITE}
        self._settings.write_text(json.dumps(settings))

    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
