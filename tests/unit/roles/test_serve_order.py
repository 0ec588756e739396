# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""In which order the ranks of all nodes stop and start: the real roles in check mode, with a stand-in for systemctl."""

from __future__ import annotations

import getpass
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.systemctl import Tasks, changes, install, moved

SGLANG = {"hy3_profile": "vroomfondel_w4a4_tp4", "hy3_engine_args": {"tensor-parallel-size": 2}}


def play(
    root: Path, monkeypatch: pytest.MonkeyPatch, state: str, *, enabled: str = "enabled", **variables: t.Any
) -> Tasks:
    install(root, monkeypatch, state, enabled=enabled)
    facts = {
        "hy3_node": {f"spark-{n}": {"fabric_env": {}, "interface": "enp1s0f1np1"} for n in (1, 2)},
        "hy3_checkpoint": {"digest": "0" * 64},
        "hy3_engine": {"vllm": "0.24.0", "sglang": "0.5.23"},
        "hy3_patches": {"digest": "1" * 64, "patches": []},
    }
    (root / "model").mkdir()
    given = {"serve_facts": facts, "hy3_checkpoint_dir": str(root / "model"), "hy3_firewall": False, **variables}
    given["hy3_user"] = getpass.getuser()
    done = run_playbook("serve", root, given, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    return changes(done.stdout)


ALL_RANKS = [
    ("Unit | Of rank 0, stop hy3-ray", {"spark-1"}),
    ("Unit | Of the others, stop hy3-ray", {"spark-2"}),
    ("Unit | Of rank 0, stop hy3-serve", {"spark-1"}),
    ("Unit | Of the others, stop hy3-serve", {"spark-2"}),
    ("Unit | Restart hy3-serve", {"spark-1"}),
    ("Unit | Restart hy3-serve", {"spark-2"}),
]


@pytest.mark.parametrize("variables", [SGLANG, {"hy3_executor": "mp"}], ids=["sglang", "vllm"])
def test_all_ranks_restart_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, t.Any]
) -> None:
    tasks = play(tmp_path, monkeypatch, "active", **variables)
    assert moved(tasks) == ALL_RANKS
    names = [name for name, _hosts in tasks]
    asked = names.index("Options | Ask the engine's own parser")
    assert asked < names.index("Unit | Of rank 0, stop hy3-serve", names.index("Write the unit"))


def test_a_first_start_has_nothing_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = play(tmp_path, monkeypatch, "", **SGLANG)
    assert moved(tasks) == ALL_RANKS[4:]


def test_with_ray_the_engine_stops_before_any_raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only the head has a driver: what another executor left on the other node is stopped, and stays so."""
    tasks = play(tmp_path, monkeypatch, "active", hy3_executor="ray")
    assert moved(tasks) == [
        ("Unit | Of rank 0, stop hy3-serve", {"spark-1"}),
        ("Unit | Of the others, stop hy3-serve", {"spark-2"}),
        ("Unit | Restart hy3-ray", {"spark-1"}),
        ("Unit | Restart hy3-ray", {"spark-2"}),
        ("Unit | Of the others, stop hy3-serve", {"spark-2"}),  # systemctl of the test forgets
        ("Unit | Restart hy3-serve", {"spark-1"}),
    ]


# Whether units start with the node, what a user says: whether that changes.
WITH_THE_NODE: dict[str, tuple[str, dict[str, t.Any], bool]] = {
    "first time": ("disabled", {}, True),
    "second time": ("enabled", {}, False),
    "switched off": ("enabled", {"hy3_restart": False}, True),
    "still off": ("disabled", {"hy3_restart": False}, False),
}


@pytest.mark.parametrize(("enabled", "variables", "changes_it"), WITH_THE_NODE.values(), ids=WITH_THE_NODE)
def test_what_ran_starts_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str, variables: dict[str, t.Any], changes_it: bool
) -> None:
    tasks = play(tmp_path, monkeypatch, "active", enabled=enabled, hy3_executor="mp", **variables)
    found = [hosts for name, hosts in tasks if name.startswith("Unit | Let hy3-serve start with the node") and hosts]
    assert found == ([{"spark-1"}, {"spark-2"}] if changes_it else [])
