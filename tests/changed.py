# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of the long test suites have not passed with the inputs that they have now.

A clone does not tell what it was changed from, so each suite that passes leaves the digest of its inputs in
tests/passed.json, which is committed: `changed.py` prints the suites whose digest is another one now, and
`changed.py --passed SUITE` records one. A suite has make's name for it, but each file of tests/integration is one by
its path, for together they take an hour.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path("tests/passed.json")

# The Makefile only says how to call a suite.
COMMON = ["requirements", "ansible.cfg", "pyproject.toml"]
# What two suites use of others.
SHARED = ("tests/wheels/released.py", "tests/unit/plugins/modules/module_runner.py")
PULL_NODES = "tests/unit/plugins/modules/pull_nodes.py"
# What the virtual machine runs, and what reads the words of its systemd-oomd.
NODE_SIDE = ("errors", "memory", "page_cache", "roce", "engine_failures", "engine_log")
# What sanity exports: each file can be found fault with, also a page. Not the link to itself, nor what a suite that
# passes writes.
TREE = [".", ":!.collections", f":!{RECORD}"]
INTEGRATION = "tests/integration"
PLAYS = ["plugins", "roles", "playbooks", "inventories"]
# Paths that git knows, by the suite whose outcome depends on them. The eight faults are recorded nowhere.
INPUTS = {
    "test-vm": [*COMMON, *(f"plugins/module_utils/_{name}.py" for name in NODE_SIDE), "roles/guard/files", "tests/vm"],
    "test-wheels": [*COMMON, "plugins/module_utils/_patch", "plugins/modules/engine_patch.py", "tests/wheels"],
    "test-sglang": [*COMMON, "plugins", "roles", "inventories", "tests/sglang", "tests/unit/roles", *SHARED],
    "molecule-tp3": [*COMMON, *PLAYS, "molecule/config.yml", "molecule/tp3"],
    "molecule-sglang": [*COMMON, *PLAYS, "molecule/config.yml", "molecule/sglang", "tests/sglang"],
    "test-faults-rest": [*COMMON, *PLAYS, "tests/faults", f"{INTEGRATION}/lab.py"],
}
# Builds the collection, which galaxy.yml keeps two folders out of.
INSTALL = f"{INTEGRATION}/test_install.py"
OF_EACH_FILE = [*COMMON, *PLAYS, *SHARED, PULL_NODES]


def git(root: Path, *arguments: str) -> str:
    # CI's clone may belong to another user.
    command = ["git", "-c", f"safe.directory={root}", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def inputs(root: Path) -> dict[str, list[str]]:
    """All suites. A file of tests/integration depends on the modules beside it, and on no other file of tests.

    The one that builds the collection depends on what it builds.
    """
    files = git(root, "ls-files", "--", INTEGRATION).split()
    tests = [name for name in files if Path(name).match("test_*.py")]
    helpers = [name for name in files if name not in tests]
    own = {INSTALL: [*TREE, ":!.ci", ":!molecule"]}
    # Sanity last: it takes longest, and almost any change asks for it.
    return INPUTS | {name: own.get(name, [*OF_EACH_FILE, *helpers, name]) for name in tests} | {"sanity": TREE}


def digest(root: Path, suite: str) -> str:
    """SHA-256 over mode, content and path of each input, as git's index has them."""
    return hashlib.sha256(git(root, "ls-files", "--stage", "--", *inputs(root)[suite]).encode()).hexdigest()


def recorded(root: Path) -> dict[str, str]:
    path = root / RECORD
    return dict(json.loads(path.read_text())) if path.exists() else {}


def changed(root: Path) -> list[str]:
    passed = recorded(root)
    return [suite for suite in inputs(root) if passed.get(suite) != digest(root, suite)]


def record(root: Path, suite: str) -> str:
    """Remember that ``suite`` passed, and say so; what is not committed yet is no state to remember."""
    if git(root, "status", "--porcelain", "--", *inputs(root)[suite]):
        return f"{suite} passed with changes that are not committed, so tests/passed.json does not say so."
    known = inputs(root)
    kept = {name: seen for name, seen in recorded(root).items() if name in known}
    passed = kept | {suite: digest(root, suite)}
    (root / RECORD).write_text(json.dumps(passed, indent=2, sort_keys=True) + "\n")
    return f"{suite} passed: commit tests/passed.json."


def main(arguments: list[str]) -> int:
    match arguments:
        case []:
            print(*changed(ROOT))
        case ["--passed", suite] if suite in inputs(ROOT):
            print(record(ROOT, suite))
        case _:
            suites = ", ".join(inputs(ROOT))
            said = " ".join(arguments)
            print(f"changed.py knows no {said!r}: call it alone, or with --passed and one of {suites}.")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
