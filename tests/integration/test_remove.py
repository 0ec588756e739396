# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""After a removal a node's own disk holds what it held before, and beside that user data and logs.

A lab node's disk is an overlay, so all that was ever written on it lies in its upper layer. Needs `make lab-up`, makes
the nodes anew, and leaves a cluster that serves.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import (
    LAB,
    NODES,
    changed_nothing,
    command_of,
    kill,
    module,
    on,
    play,
)

# What may be new on a node where nothing of ours is any more, and whose it is.
STAYS = {
    r"srv/hy3/models(/.*)?": "the checkpoint",
    r"var/log(/.*)?": "logs",
    r"var/lib/hy3(/ray(/session_[^/]*(/logs(/.*)?)?)?)?": "Ray's logs, and the directories above them",
    r"home/hy3(/.*)?": "the engine's user's home, with the caches of the engine",
    r"home/lab(/.*)?": "the home of whoever logs in",
    r"root(/\.(ansible|ansible_async|cache|config|python_history)(/.*)?)?": "Ansible's and Python's own",
    r"var/lib/(systemd|dbus|private|logrotate)(/.*)?": "the system's own",
    r"var/(tmp|cache|spool)(/.*)?": "the system's own",
    r"etc/(\.updated|resolv\.conf|machine-id|hostname|\.pwd\.lock)": "the system's own",
    r"var/\.updated": "the system's own",
    # Of files that were patched and put back: it is made again when it is needed.
    r"var/lib/hy3-lab/venv/.*/__pycache__/.*": "bytecode",
}
NEVER = ("etc/hy3", "etc/systemd/system/hy3", "usr/local/lib/hy3", "var/lib/systemd/linger/hy3")
LEFT = r"""
systemctl list-units --all --plain --no-legend 'hy3*'
systemctl list-unit-files --plain --no-legend 'hy3*'
nft list tables | grep hy3_
ls -d /run/hy3* 2>/dev/null
pgrep -u hy3 -f 'raylet|gcs_server|vllm|VLLM|ray::'
true
"""


def describe(path: Path) -> str:
    """What a path of an upper layer is, with its content; ``gone`` where it hides one of the layer below."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"link {os.readlink(path)}"
    if stat.S_ISREG(found.st_mode):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if stat.S_ISCHR(found.st_mode):
        return "gone"
    return "directory" if stat.S_ISDIR(found.st_mode) else "special"


def disk(node: str) -> dict[str, str]:
    """What a node has that this machine, whose files it shares, has not, or has otherwise."""
    upper = LAB / "nodes" / node / "upper"
    own = {}
    for place, directories, files in os.walk(upper):
        for name in directories + files:
            path = Path(place, name)
            shared = Path("/") / path.relative_to(upper)
            try:
                said = describe(path)
            except FileNotFoundError:  # the node runs
                continue
            if not os.path.lexists(shared) or said == "gone" or said != describe(shared):
                own[str(path.relative_to(upper))] = said
    return own


def strange(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """What is new or other than before and nobody's of those whose things stay."""
    changed = {path: said for path, said in after.items() if before.get(path) != said}
    return {path: said for path, said in changed.items() if not any(re.fullmatch(stays, path) for stays in STAYS)}


def left() -> dict[str, str]:
    return {node: on(node, LEFT).strip() for node in NODES}


@pytest.fixture(scope="module")
def fresh() -> Iterator[dict[str, dict[str, str]]]:
    """Nodes on which nothing was ever deployed, and their disks. On the second somebody lets the user linger."""
    play("lab_down")
    play("lab_up")
    module("sparks", "ping", "")
    on("spark-2", "loginctl enable-linger hy3")
    yield {node: disk(node) for node in NODES}
    for node in NODES:
        on(node, "rm -rf /etc/hy3/hf_token")
    play("serve-hy3")


@pytest.fixture(scope="module")
def served(fresh: dict[str, dict[str, str]]) -> None:
    assert changed_nothing(play("remove-hy3")), "nothing was there"
    play("serve-hy3")
    # As docs/checkpoint.md has it.
    on("spark-1", "umask 077; echo hf_secret >/etc/hy3/hf_token")


def test_there_is_something_to_remove(fresh: dict[str, dict[str, str]], served: None) -> None:
    for node in NODES:
        found = strange(fresh[node], disk(node))
        expected = NEVER if node == "spark-1" else NEVER[:-1]
        assert [path for path in expected if not any(one.startswith(path) for one in found)] == []
        assert any(path.endswith("vllm/model_executor/models/hy_v3_mtp.py") for path in found)
    assert all("hy3-ray.service" in text and "hy3_lab" in text for text in left().values())


def test_check_mode_says_all_and_removes_nothing(fresh: dict[str, dict[str, str]], served: None) -> None:
    before = {node: strange(fresh[node], disk(node)) for node in NODES}
    output = play("remove-hy3", "--check", "--diff")
    for path in ("/etc/systemd/system/hy3-serve.service", "/etc/hy3/ray_token_lab", "/usr/local/lib/hy3", "lm_head"):
        assert path in output
    assert {node: strange(fresh[node], disk(node)) for node in NODES} == before
    assert "-> Paris." in play("status-hy3")


def test_another_cluster_removes_nothing(fresh: dict[str, dict[str, str]], served: None) -> None:
    """Neither while this one runs nor when it was stopped."""
    for stopped in (False, True):
        if stopped:
            play("stop-hy3")
        before = {node: strange(fresh[node], disk(node)) for node in NODES}
        output = play("remove-hy3", "-e", "hy3_cluster=west")
        assert changed_nothing(output)
        said = " ".join(output.replace("''", "'").split())  # YAML quotes and wraps
        for node in NODES:
            assert f"{node}: hy3-ray.service is installed here as 'Hy3: Ray" in said or (
                f"{node}: hy3-serve.service is installed here as" in said
            )
        assert {node: strange(fresh[node], disk(node)) for node in NODES} == before
    play("serve-hy3")


def test_only_user_data_and_logs_are_left(fresh: dict[str, dict[str, str]], served: None) -> None:
    output = play("remove-hy3")
    found = {node: strange(fresh[node], disk(node)) for node in NODES}
    assert found["spark-1"].keys() == {"etc/hy3", "etc/hy3/hf_token"}
    assert "spark-1 keeps /etc/hy3/hf_token" in output
    assert found["spark-2"] == {}
    assert left() == dict.fromkeys(NODES, "")
    # Its own is where it was.
    assert on("spark-2", "ls /var/lib/systemd/linger").split() == ["hy3"]
    assert on("spark-1", "ls /var/lib/systemd/linger").split() == []
    for node in NODES:
        assert on(node, "ls /srv/hy3/models/Hy3-tiny/config.json; id -u hy3; ls -d /var/lib/hy3/ray/session_*/logs")
        assert on(node, "journalctl --no-pager -u hy3-ray | grep -c .").strip() != "0"


def test_a_second_removal_changes_nothing(served: None) -> None:
    for options in ([], ["--check"]):
        assert changed_nothing(play("remove-hy3", *options))


def test_serves_again_and_goes_again(fresh: dict[str, dict[str, str]], served: None) -> None:
    """Also where the removal is killed, and where patches are to stay for a while."""
    assert "-> Paris." in play("serve-hy3")
    kill(command_of("remove-hy3"), at=r"^TASK \[sparks\.hy3\.ray_cluster : Remove the token")
    play("remove-hy3", "-e", "keep_patches=true")
    for node in NODES:
        kept = strange(fresh[node], disk(node)).keys() - {"etc/hy3", "etc/hy3/hf_token"}
        assert kept
        assert [path for path in kept if "/site-packages/vllm" not in path] == []
    play("remove-hy3")
    assert strange(fresh["spark-2"], disk("spark-2")) == {}
    assert left() == dict.fromkeys(NODES, "")
    assert changed_nothing(play("remove-hy3"))


@pytest.mark.parametrize("task", [r"Unit \| Write hy3-ray", r"Unit \| Restart hy3-ray", r"Wait until it answers"])
def test_half_of_it_goes_too(fresh: dict[str, dict[str, str]], served: None, task: str) -> None:
    kill(command_of("serve-hy3"), at=rf"^TASK \[sparks\.hy3\.\w+ : {task}")
    play("remove-hy3")
    assert strange(fresh["spark-2"], disk("spark-2")) == {}
    assert strange(fresh["spark-1"], disk("spark-1")).keys() == {"etc/hy3", "etc/hy3/hf_token"}
    assert left() == dict.fromkeys(NODES, "")
    assert changed_nothing(play("remove-hy3"))
