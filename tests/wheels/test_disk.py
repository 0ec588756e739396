# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Disks that take no patch, real ones: a tmpfs that is full, and one that is read-only. Each in its own namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.wheels.released import RELEASES

(RELEASE,) = (release for release in RELEASES if release.name == "vllm-0.24.0")
FILE = "vllm/model_executor/models/hy_v3_mtp.py"
# Copies the package onto a disk of 1 MiB, spoils the disk, runs the module, and shows what is there afterwards.
SCRIPT = """
set -e
mount -t tmpfs -o size=1m tmpfs "$DISK"
cp -r "$SITE/." "$DISK"
{spoil}
"$PYTHON" -m ansible_collections.sparks.hy3.plugins.modules.engine_patch || true
sha256sum < "$DISK/{file}"
find "$DISK" -name '*.tmp*' -o -path '*/.hy3-patch/*'
"""
DISKS = {
    "full": ("cat /dev/zero > $DISK/ballast 2>/dev/null || true", "No space left on device"),
    "read-only": ("mount -o remount,ro $DISK", "Read-only file system"),
}


@pytest.mark.parametrize(("spoil", "reason"), DISKS.values(), ids=DISKS)
def test_one_sentence_and_the_file_as_it_was(tmp_path: Path, spoil: str, reason: str) -> None:
    site = tmp_path / "site"
    for name, content in RELEASE.files().items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    (site / "vllm/__init__.py").touch()
    (tmp_path / "disk").mkdir()
    arguments = {"package_path": str(tmp_path / "disk/vllm"), "patches": ["P1"]}
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "bash", "-c", SCRIPT.format(spoil=spoil, file=FILE)],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env={
            **os.environ,
            "DISK": str(tmp_path / "disk"),
            "SITE": str(site),
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    answer, sha256, *left = done.stdout.strip().splitlines()
    said = json.loads(answer)
    assert said["failed"]
    assert reason in said["msg"]
    assert "Traceback" not in answer + done.stderr
    assert sha256.split()[0] == subprocess.check_output(["sha256sum"], stdin=(site / FILE).open(), text=True).split()[0]
    assert left == []
