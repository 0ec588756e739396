# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Ray token and the API's key, by the real Ansible: where they end up, and where they do not."""

from __future__ import annotations

import base64
import re
import subprocess
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.roles.render import render_units, run_playbook
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import (
    read_environment,
    read_options,
    read_unit,
    split_words,
)

NODES = ("spark-1", "spark-2")
SENTINEL = "sentinel-0123456789-abcdef"


def changed(done: subprocess.CompletedProcess[str]) -> list[int]:
    """How much a play changed on each node."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(count) for count in re.findall(r"changed=(\d+)", done.stdout)]


# ---- The token


class Tokens:
    """The token files of all nodes, as directories of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {node: root / node / "ray_token" for node in NODES}
        for file in self.files.values():
            file.parent.mkdir()

    def play(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the role's tasks, as talkative as Ansible can be."""
        return run_playbook("token", self.root, {"token_dir": str(self.root)}, "-vvvv", "--diff", *options)

    def values(self) -> list[str]:
        return [file.read_text() for file in self.files.values()]

    def silent(self, done: subprocess.CompletedProcess[str]) -> bool:
        """Whether the output, which ends with all variables of each node, lacks the head's token."""
        assert "hostvars[inventory_hostname]" in done.stdout
        token = self.files["spark-1"].read_bytes()
        return not any(text in (done.stdout + done.stderr).encode() for text in (token, base64.b64encode(token)))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


def test_one_token_on_all_nodes_made_once_and_never_shown(tokens: Tokens) -> None:
    done = tokens.play("--check")
    assert changed(done) == [1, 0]
    assert [file.exists() for file in tokens.files.values()] == [False, False]
    done = tokens.play()
    assert changed(done) == [1, 1]
    first, second = tokens.values()
    assert first == second
    assert re.fullmatch(r"[A-Za-z0-9]{64}", first)
    assert {file.stat().st_mode & 0o777 for file in tokens.files.values()} == {0o600}
    assert tokens.silent(done)
    done = tokens.play()
    assert changed(done) == [0, 0]
    assert tokens.values() == [first, first]
    assert tokens.silent(done)


def test_a_node_with_another_token_gets_the_clusters(tokens: Tokens) -> None:
    tokens.files["spark-1"].write_text(SENTINEL)
    tokens.files["spark-2"].write_text("another cluster's")
    done = tokens.play()
    # The head's mode is mended, its token is kept.
    assert changed(done) == [1, 2]
    assert tokens.values() == [SENTINEL, SENTINEL]
    assert {file.stat().st_mode & 0o777 for file in tokens.files.values()} == {0o600}
    assert tokens.silent(done)


# ---- The key


class Units:
    """The units of inventories/sparks with variables laid over it."""

    def __init__(self, root: Path, **variables: object) -> None:
        root.mkdir()
        nodes: dict[str, object] = {node: {"fabric_env": {}} for node in NODES}
        self.root, self.done = root, render_units(root, nodes, **variables)
        assert self.done.returncode == 0, self.done.stdout + self.done.stderr

    def text(self, node: str, unit: str) -> str:
        return (self.root / node / f"{unit}.service").read_text()

    def digest(self, node: str, unit: str) -> str:
        return read_environment(read_unit(self.text(node, unit))["Service.Environment"])["HY3_DIGEST"]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "api_key"
    path.write_text(SENTINEL + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def with_key(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Units:
    return Units(tmp_path_factory.mktemp("with") / "key", hy3_api_key_file=str(key_file))


def test_key_reaches_the_server_by_its_file_only(with_key: Units) -> None:
    unit = read_unit(with_key.text("spark-1", "hy3-serve"))
    # Without a dash: no key, no start.
    assert unit["Service.EnvironmentFile"] == ["/etc/hy3/api_key.env"]
    assert read_environment(unit["Service.Environment"])["PYTHONPATH"] == "/usr/local/lib/hy3/api"
    argv = split_words(unit["Service.ExecStart"][0], command=True)
    assert read_options(argv[3:])["middleware"] == "api_guard.EveryRoute"
    written = [file for file in with_key.root.rglob("*") if file.is_file()]
    assert [file for file in written if SENTINEL in file.read_text(errors="replace")] == []
    assert SENTINEL not in with_key.done.stdout + with_key.done.stderr


def test_another_key_restarts_the_server_and_no_raylet(tmp_path: Path, with_key: Units) -> None:
    other = tmp_path / "other_key"
    other.write_text(SENTINEL[::-1] + "\n")
    other.chmod(0o600)
    after = Units(tmp_path / "after", hy3_api_key_file=str(other))
    assert with_key.digest("spark-1", "hy3-serve") != after.digest("spark-1", "hy3-serve")
    assert with_key.text("spark-1", "hy3-serve").replace(
        with_key.digest("spark-1", "hy3-serve"), after.digest("spark-1", "hy3-serve")
    ) == after.text("spark-1", "hy3-serve")
    for node in NODES:
        assert with_key.text(node, "hy3-ray") == after.text(node, "hy3-ray")


def test_ray_needs_its_firewall_unless_that_is_off(tmp_path: Path, with_key: Units) -> None:
    off = Units(tmp_path / "off", hy3_firewall=False)
    for node in NODES:
        assert read_unit(with_key.text(node, "hy3-ray"))["Unit.BindsTo"] == ["hy3-firewall.service"]
        assert "Unit.BindsTo" not in read_unit(off.text(node, "hy3-ray"))


def test_an_open_api_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    nodes: dict[str, object] = {node: {"fabric_env": {}} for node in NODES}
    done = render_units(tmp_path, nodes, hy3_api_host="0.0.0.0")
    assert done.returncode != 0
    assert "hy3_api_host is 0.0.0.0 and the API has no key; name a file in hy3_api_key_file" in done.stdout
    assert not (tmp_path / "spark-1").exists()
