# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""On a repository of its own: which suites ran green with what is there now."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.changed import INPUTS, INSTALL, RECORD, changed, git, main, record

KILL, TP3 = "tests/integration/test_kill.py", "tests/integration/test_tp3.py"
FILES = [INSTALL, KILL, TP3]
ALL = [*INPUTS, *FILES, "sanity"]
# What depends on each file that is built into the collection.
BUILT = ["sanity", INSTALL]
# What depends on each role and inventory, besides.
OF_PLAYS = ["sanity", "molecule-tp3", "molecule-sglang", "test-faults-rest"]


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    git(root, "add", path)


def commit(root: Path) -> None:
    git(root, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "--all", "--message=x")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for path in ("ansible.cfg", "roles/engine/tasks/main.yml", "tests/official/run.py", "README.md", *FILES):
        write(tmp_path, path, "one\n")
    commit(tmp_path)
    return tmp_path


def pass_all(root: Path) -> None:
    for suite in ALL:
        record(root, suite)
    git(root, "add", str(RECORD))
    commit(root)


def test_nothing_has_passed_yet(root: Path) -> None:
    assert changed(root) == ALL


def test_what_passed_is_not_run_again(root: Path) -> None:
    pass_all(root)
    assert changed(root) == []


@pytest.mark.parametrize(
    ("path", "suites"),
    [
        (".ci/run", ["sanity"]),
        ("molecule/default/converge.yml", ["sanity"]),
        ("molecule/tp3/converge.yml", ["sanity", "molecule-tp3"]),
        ("molecule/config.yml", ["sanity", "molecule-tp3", "molecule-sglang"]),
        ("tests/sglang/lab.py", ["sanity", "molecule-sglang", "test-sglang", INSTALL]),
        *(
            (path, BUILT)
            for path in ("README.md", "docs/new.md", "galaxy.yml", "meta/runtime.yml", "tests/official/run.py")
        ),
        ("tests/vm/guest.py", ["sanity", "test-vm", INSTALL]),
        ("tests/faults/cases.py", ["sanity", "test-faults-rest", INSTALL]),
        ("inventories/new/hosts.yml", [*OF_PLAYS, "test-sglang", *FILES]),
        ("roles/engine/tasks/main.yml", [*OF_PLAYS, "test-sglang", *FILES]),
        ("roles/new/tasks/main.yml", [*OF_PLAYS, "test-sglang", *FILES]),
        (TP3, [*BUILT, TP3]),
        ("tests/integration/lab.py", ["sanity", "test-faults-rest", *FILES]),
        ("tests/integration/test_new.py", [*BUILT, "tests/integration/test_new.py"]),
        ("ansible.cfg", ALL),
    ],
)
def test_a_changed_input(root: Path, path: str, suites: list[str]) -> None:
    pass_all(root)
    write(root, path, "two\n")
    commit(root)
    assert sorted(changed(root)) == sorted(suites)


def test_a_removed_input(root: Path) -> None:
    pass_all(root)
    git(root, "rm", "--quiet", "tests/official/run.py")
    assert sorted(changed(root)) == sorted(BUILT)


def test_uncommitted_changes_are_not_recorded(root: Path) -> None:
    (root / "ansible.cfg").write_text("two\n")
    assert "not committed" in record(root, KILL)
    assert changed(root) == ALL


def test_a_file_that_is_gone_is_forgotten(root: Path) -> None:
    pass_all(root)
    git(root, "rm", "--quiet", TP3)
    commit(root)
    record(root, KILL)
    assert TP3 not in (root / RECORD).read_text()


def test_a_suite_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--passed", "integratoin"]) == 2
    assert "integratoin" in capsys.readouterr().out
