# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Put SGLang into the lab's directory, where nodes that boot afterwards find it: run by molecule/sglang.

The environment's interpreter is the nodes' own, for the controller's may lie in a home that is closed to others. Its
packages are those of tests/sglang, as hard links where the file system allows; a node that patches one writes its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ansible_collections.sparks.hy3.tests.sglang.checkpoint import write
from ansible_collections.sparks.hy3.tests.sglang.engine import HERE, REQUIREMENTS, install

PYTHON = "/usr/bin/python3"
# By directory: whether its tensors have Tencent's names.
CHECKPOINTS = {"Hy3-tiny-exported": False, "Hy3-tiny-native": True}


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def put(packages: Path, place: Path) -> bool:
    """Make ``place`` complete; whether anything was to do. Its mark, the list of versions, is written last."""
    mark = place / "installed"
    wanted = REQUIREMENTS.read_text()
    if mark.exists() and mark.read_text() == wanted:
        return False
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", place / "venv"], check=True)
    (site,) = place.glob("venv/lib/python*/site-packages")
    if site.parent.name != packages.parent.name:
        raise SystemExit(
            f"{PYTHON} of the nodes is {site.parent.name} and tests/sglang was installed for {packages.parent.name}; "
            "remove .cache/sglang and run this with the nodes' version."
        )
    shutil.copytree(packages, site, copy_function=link_or_copy, symlinks=True, dirs_exist_ok=True)
    shutil.copytree(HERE / "cpu", place / "cpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name, native in CHECKPOINTS.items():
        (place / "models" / name).mkdir(parents=True)
        write(place / "models" / name, native=native)
    mark.write_text(wanted)
    return True


def main(arguments: list[str]) -> int:
    """``lab.py DIRECTORY``; prints ``changed`` or ``unchanged``."""
    (place,) = arguments
    print("changed" if put(install().parent, Path(place)) else "unchanged")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
