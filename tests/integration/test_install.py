# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection as a stranger has it: built, installed from the tarball, used from a directory with an inventory.

Only the last test needs a lab (`make lab-up`), whose cluster it stops; `-k "not a_strangers_cluster"` leaves it out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import NODES, ROOT, changed_nothing, on, play, run

# What a checkout has and an installed collection does not.
LEFT_OUT = (".ci/", ".collections/", "molecule/", "galaxy.yml")
MADE = {"MANIFEST.json", "FILES.json"}
# As they run.
ROLES = "profile preflight lease engine checkpoint engine_patch ray_cluster vllm_serve sglang_serve verify report"


class Stranger:
    """Somebody who has installed the tarball and stands in a directory with nothing but an inventory ``sparks``."""

    def __init__(self, root: Path, archive: Path) -> None:
        self.directory = root / "empty"
        self.directory.mkdir()
        self.environment = {name: value for name, value in os.environ.items() if name != "ANSIBLE_CONFIG"} | {
            "ANSIBLE_COLLECTIONS_PATH": str(root / "collections"),
            "ANSIBLE_HOME": str(root / "ansible"),
            "ANSIBLE_NOCOLOR": "true",
            "PWD": str(self.directory),
        }
        done = self.run(
            "ansible-galaxy", "collection", "install", "--offline", "-p", str(root / "collections"), archive
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def take(self, inventory: str) -> None:
        shutil.rmtree(self.directory)
        shutil.copytree(ROOT / "inventories" / inventory, self.directory / "sparks")

    def play(self, playbook: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("ansible-playbook", f"sparks.hy3.{playbook}", "-i", "sparks", *options)

    def played(self, playbook: str) -> str:
        """Output of a playbook, which must succeed."""
        done = self.play(playbook)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in the checkout as it is, with whatever caches lie in it."""
    out = tmp_path_factory.mktemp("built")
    run("ansible-galaxy", "collection", "build", "--output-path", str(out))
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> Stranger:
    return Stranger(tmp_path_factory.mktemp("stranger"), archive)


def test_the_archive_holds_what_is_tracked_and_nothing_else(archive: Path) -> None:
    tracked = run("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z").split("\0")
    with tarfile.open(archive) as tar:
        built = {member.name for member in tar if not member.isdir()}
    assert built - MADE == {name for name in tracked if name and not name.startswith(LEFT_OUT)}


@pytest.mark.parametrize(
    "playbook", ["serve_hy3", "status_hy3", "stop_hy3", "upgrade_hy3", "serve-hy3", "lab_up", "lab_down"]
)
def test_syntax(stranger: Stranger, playbook: str) -> None:
    stranger.take("sparks")
    done = stranger.play(playbook, "--syntax-check")
    # A name with a dash is for a checkout: Ansible finds no such playbook in a collection.
    assert (done.returncode == 0) == ("-" not in playbook), done.stdout + done.stderr


def test_every_role_is_found_in_its_order(stranger: Stranger) -> None:
    stranger.take("sparks")
    done = stranger.play("serve_hy3", "--list-tasks")
    assert done.returncode == 0, done.stderr
    roles = [line.split(" : ")[0].strip() for line in done.stdout.splitlines() if " : " in line]
    assert list(dict.fromkeys(role.removeprefix("sparks.hy3.") for role in roles)) == ROLES.split()


def test_what_roles_copy_from_plugins_is_installed(stranger: Stranger) -> None:
    """Roles go to plugins/module_utils by way of role_path."""
    installed = Path(stranger.environment["ANSIBLE_COLLECTIONS_PATH"]) / "ansible_collections/sparks/hy3"
    for name in ("_roce.py", "_port.py"):
        path = installed / "roles/ray_cluster" / "../../plugins/module_utils" / name
        assert path.read_bytes() == (ROOT / "plugins/module_utils" / name).read_bytes()


def test_nodes_that_are_not_there(stranger: Stranger) -> None:
    """As far as it goes without a node: a port on which nobody listens is said, and reported where the user stands."""
    stranger.take("sparks")
    done = stranger.play("serve_hy3", "-e", '{"ansible_host": "127.0.0.1", "ansible_port": 1}')
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    (path,) = stranger.directory.glob("reports/sparks/*.json")
    report = json.loads(path.read_text())
    assert not report["ok"]
    assert report["failures"][0]["msg"].startswith("spark-1 cannot be reached over SSH")


def test_a_strangers_cluster(stranger: Stranger) -> None:
    """What is installed serves the lab from nothing but an inventory, then changes nothing, and stops it."""
    play("stop-hy3")
    stranger.take("lab")
    try:
        first = stranger.played("serve_hy3")
        assert re.search(r"changed=[1-9]", first)
        assert "-> Paris." in first
        (path,) = stranger.directory.glob("reports/sparks/*-serve.json")
        report = json.loads(path.read_text())
        # The inventory's directory names the cluster.
        assert (report["ok"], report["healthy"], report["cluster"]) == (True, True, "sparks")
        assert {path.name for path in stranger.directory.iterdir()} == {"sparks", "reports"}
        for node in NODES:
            assert "of cluster sparks" in on(node, "systemctl show -p Description hy3-ray")

        second = stranger.played("serve_hy3")
        assert changed_nothing(second)
        assert "-> Paris." in second
    finally:
        stopped = stranger.play("stop_hy3")
    assert stopped.returncode == 0, stopped.stdout[-4000:] + stopped.stderr[-1000:]
    # The lab's own plays find nothing of another cluster in their way.
    for node in NODES:
        assert on(node, "systemctl show --value -p ActiveState hy3-ray hy3-serve").split() == ["inactive", "inactive"]
        assert "hy3_sparks" not in on(node, "nft list tables")
        on(node, "rm -f /etc/hy3/ray_token_sparks")
