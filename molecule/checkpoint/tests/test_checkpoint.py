# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A damaged tree is whole again and nothing of the copy is left: run by `molecule verify` on each node."""

from __future__ import annotations

import hashlib
import typing as t
from pathlib import Path

TREE = "/srv/hy3/models/Hy3-tiny"
# Where both nodes' trees come from.
SOURCE = Path("/var/lib/hy3-lab/models/Hy3-tiny")


def test_every_file_is_the_original(host: t.Any) -> None:
    names = sorted(path.name for path in SOURCE.iterdir() if path.is_file())
    assert len(names) > 4
    lines = host.check_output(f"cd {TREE} && sha256sum {' '.join(names)}").splitlines()
    found = {line.split()[1]: line.split()[0] for line in lines}
    assert found == {name: hashlib.sha256((SOURCE / name).read_bytes()).hexdigest() for name in names}


def test_what_came_belongs_to_the_engine_s_user(host: t.Any) -> None:
    if host.check_output("hostname") == "spark-1":  # which gave
        return
    assert host.check_output(f"stat -c %U {TREE}/model-00001-of-00004.safetensors") == "hy3"


def test_nothing_unfinished(host: t.Any) -> None:
    assert host.check_output(f"find {TREE} -name '*.incomplete' -o -name '.hy3-pull'") == ""


def test_no_daemon_and_no_secret(host: t.Any) -> None:
    assert host.check_output("systemctl list-units --all --plain --no-legend 'hy3-checkpoint*'") == ""
    assert host.check_output("ls -d /run/hy3-checkpoint* 2>/dev/null; true") == ""
    assert host.run("pgrep -x rsync").rc == 1
