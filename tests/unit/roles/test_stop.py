# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is stopped and what is not: the real roles in check mode, with a stand-in for systemctl."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.systemctl import Tasks, changes, install, moved

UNITS = ("hy3-serve", "hy3-ray", "hy3-firewall")
STOPPED: Tasks = [
    (f"Unit | {which}, stop {unit}", {node})
    for unit in UNITS
    for which, node in (("Of rank 0", "spark-1"), ("Of the others", "spark-2"))
]
# The cluster that the units name, variables of the inventory `sparks`: what is stopped.
CLUSTERS: dict[str, tuple[str, dict[str, t.Any], Tasks]] = {
    "its own": ("sparks", {}, STOPPED),
    "another's": ("east", {}, []),
    "its own by name": ("east", {"hy3_cluster": "east"}, STOPPED),
    "another's by name": ("sparks", {"hy3_cluster": "east"}, []),
}


# The cluster that the units name, whether they start with the node: what a stop of `sparks` changes though none runs.
RESTING: dict[str, tuple[str, str, Tasks]] = {
    "its own": ("sparks", "enabled", STOPPED),
    "its own that stays down": ("sparks", "disabled", []),
    "a firewall": ("sparks", "static", []),
    "another's": ("east", "enabled", []),
}


@pytest.mark.parametrize(("cluster", "enabled", "expected"), RESTING.values(), ids=RESTING)
def test_what_is_stopped_does_not_start_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, enabled: str, expected: Tasks
) -> None:
    install(tmp_path, monkeypatch, "inactive", description=f"Hy3: Ray head of cluster {cluster}", enabled=enabled)
    done = run_playbook("stop", tmp_path, {}, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert moved(changes(done.stdout)) == expected
    assert ("would start with the node as" in done.stdout) == (cluster == "east")


@pytest.mark.parametrize(("cluster", "variables", "expected"), CLUSTERS.values(), ids=CLUSTERS)
def test_only_ones_own_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, variables: dict[str, t.Any], expected: Tasks
) -> None:
    install(tmp_path, monkeypatch, "active", description=f"Hy3: Ray head of cluster {cluster}")
    done = run_playbook("stop", tmp_path, variables, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert moved(changes(done.stdout)) == expected
    said = [f"{node}: {unit}.service runs here as" for unit in UNITS for node in ("spark-1", "spark-2")]
    assert all((sentence in done.stdout) is not bool(expected) for sentence in said)
