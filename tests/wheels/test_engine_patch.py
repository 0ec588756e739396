# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole catalogue on the engines' files as they were released."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.tests.wheels.released import RELEASES, Release


def install(release: Release, place: Path) -> Path:
    """The package's directory with nothing but the files in it."""
    for file, content in release.files().items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes(content)
    (place / release.engine / "__init__.py").touch()
    return place / release.engine


def run(package: Path, state: str) -> dict[str, Any]:
    known = [name for name, (patch, *_twins) in _patch.CATALOGUE.items() if patch.engine == package.name]
    return _patch.run(engine=package.name, patches=known, state=state, package_path=str(package))


def states(result: dict[str, Any]) -> set[tuple[str, str]]:
    return {(entry["id"], entry["state"]) for entry in result["patches"]}


@pytest.mark.parametrize("release", RELEASES, ids=[release.name for release in RELEASES])
def test_life_of_a_release(release: Release, tmp_path: Path) -> None:
    original = release.files()
    package = install(release, tmp_path)

    def content() -> dict[str, bytes]:
        return {file: (tmp_path / file).read_bytes() for file in original}

    reported = run(package, "reported")
    patches = {entry["id"] for entry in reported["patches"]}
    before = {(patch, release.state(patch)) for patch in patches}
    after = {(patch, "applied" if state == "defect" else state) for patch, state in before}
    assert states(reported) == before
    assert content() == original
    first = run(package, "present")
    assert (first["changed"], states(first)) == (True, after)
    patched = content()
    for file, text in patched.items():
        compile(text, file, "exec", dont_inherit=True)
    again = run(package, "present")
    assert (again["changed"], states(again), again["digest"]) == (False, after, first["digest"])
    assert content() == patched
    assert states(run(package, "absent")) == before
    assert content() == original
    assert not (package / ".hy3-patch").exists()

    # For people who build a fork: the reported difference makes the same files.
    (tmp_path / "p.diff").write_text(reported["unified_diff"], newline="")
    subprocess.run(["git", "apply", "-p1", "p.diff"], cwd=tmp_path, check=True)  # noqa: S607 - git of PATH
    assert content() == patched
    assert states(run(package, "present")) == {(patch, "upstream_fixed") for patch in patches}, "not made by us"
    for file, text in original.items():
        (tmp_path / file).write_bytes(text)
    assert states(run(package, "present")) == after
    assert content() == patched


@pytest.mark.parametrize("release", RELEASES, ids=[release.name for release in RELEASES])
def test_each_patch_by_itself(release: Release, tmp_path: Path) -> None:
    package = install(release, tmp_path)
    for name, (patch, *_twins) in _patch.CATALOGUE.items():
        if patch.engine == release.engine:
            done = _patch.run(engine=release.engine, patches=[name], state="present", package_path=str(package))
            assert done["changed"] is (release.state(name) == "defect")
            _patch.run(engine=release.engine, patches=[name], state="absent", package_path=str(package))
    assert {file: (tmp_path / file).read_bytes() for file in release.files()} == release.files()
