# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from pathlib import Path

from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module


def test_check_and_real_run_twice(tmp_path: Path) -> None:
    for name in ("ray_token_east", "api_key.env", "theirs"):
        (tmp_path / name).write_text(name)
    arguments = {
        "paths": [f"{tmp_path}/api_key.env"],
        "patterns": [f"{tmp_path}/ray_token_*"],
        "directories": [str(tmp_path)],
    }
    gone = [f"{tmp_path}/api_key.env", f"{tmp_path}/ray_token_east"]
    for check, removed in ((True, gone), (False, gone), (True, []), (False, [])):
        result = run_module("paths_absent", _ansible_check_mode=check, **arguments)
        assert (result["changed"], result["removed"]) == (bool(removed), removed)
        assert result["kept"] == [f"{tmp_path}/theirs"]
        assert result["diff"] == {"before": "".join(f"{path}\n" for path in removed), "after": ""}
        assert (tmp_path / "api_key.env").exists() is (check and bool(removed))


def test_a_path_that_turned_out_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_module("paths_absent", paths=[f"{tmp_path}/file", "/hy3"])
    assert result["failed"]
    assert result["msg"].startswith("'/hy3' is to be removed, and only an absolute path without '..' that lies below")
    assert (tmp_path / "file").exists()


def test_what_cannot_be_removed_is_named(tmp_path: Path) -> None:
    result = run_module("paths_absent", paths=["/proc/self/status"])
    assert result["failed"]
    # Root is not permitted, others have no permission.
    assert result["msg"].startswith("'/proc/self/status' cannot be removed (")
    assert result["msg"].endswith("); see who holds it, and run again.")
