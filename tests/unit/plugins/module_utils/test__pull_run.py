# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A run on transfers that never end. With real daemons: tests/unit/plugins/modules/test_checkpoint_pull.py."""

from __future__ import annotations

import subprocess
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import File
from ansible_collections.sparks.hy3.plugins.module_utils._pull_rsync import Source
from ansible_collections.sparks.hy3.plugins.module_utils._pull_run import Puller


def test_rsync_that_hangs_is_ended(tmp_path: Path) -> None:
    """As on a link that passes small packets only: rsync waits on, whatever its own timeout."""
    started: list[subprocess.Popen[bytes]] = []

    def hang(command: list[str], **options: t.Any) -> subprocess.Popen[bytes]:
        listed = ["echo", "2 config.json"]
        started.append(subprocess.Popen(listed if "--dry-run" in command else ["sleep", "60"], **options))
        return started[-1]

    puller = Puller(tmp_path / "m", [File("config.json", 2, None)], streams=1, timeout=1, owner=None, spawn=hang)
    with puller.locked(), pytest.raises(Hy3Error, match=r"\(head: it has sent nothing for 2 s\)"):
        puller.pull(puller.survey(), [Source("head", "127.0.0.1", 1)], password="x")
    assert started
    assert all(process.poll() is not None for process in started)
