# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The download of role checkpoint by the real Ansible and the real huggingface_hub, against a double of the hub."""

from __future__ import annotations

import re
import sys
import typing as t
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.local_hub import LocalHub
from ansible_collections.sparks.hy3.tests.unit.roles.render import run_playbook

COMMIT = "1" * 40
FILES = {"config.json": b"{}", "model.safetensors": bytes(8192)}


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub({COMMIT: FILES}) as double:
        yield double


def play(hub: LocalHub, tmp_path: Path, *options: str, **variables: t.Any) -> tuple[int, str]:
    """Number of changed tasks (-1 if one failed), and the output with its lines joined."""
    download = {"revision": COMMIT, "endpoint": hub.endpoint, "token_file": ""}
    own = {
        "download": download,
        "download_env": {"HF_HUB_DISABLE_XET": "1"},
        "download_path": str(tmp_path / "m"),
        "download_venv": sys.prefix,
    }
    done = run_playbook("download", tmp_path, {**own, **variables}, *options)
    text = " ".join(done.stdout.split())
    recap = re.search(r"changed=(\d+) .*failed=(\d+)", text)
    assert recap, done.stdout + done.stderr
    return -1 if int(recap[2]) else int(recap[1]), text


def test_says_what_it_fetches_and_then_nothing(hub: LocalHub, tmp_path: Path) -> None:
    changed, said = play(hub, tmp_path, "--check")
    assert (changed, (tmp_path / "m").exists()) == (1, False)
    assert f"2 files with 8.00 KB of example/Hy3-tiny at {COMMIT}" in said
    changed, said = play(hub, tmp_path)
    assert changed == 1, said
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir() if path.name in FILES} == FILES
    hub.seen.clear()
    assert (play(hub, tmp_path)[0], hub.seen) == (0, [])


def test_waits_for_the_engine_in_check_mode(hub: LocalHub, tmp_path: Path) -> None:
    changed, said = play(hub, tmp_path, "--check", hy3_engine={"pending": True})
    assert (changed, hub.seen) == (0, [])
    assert "vllm would be installed first, and then example/Hy3-tiny be fetched" in said


def test_fails_in_the_module_s_words(hub: LocalHub, tmp_path: Path) -> None:
    hub.token = "hf_other"
    changed, said = play(hub, tmp_path)
    assert (changed, "that a stranger without a token may read; correct the name" in said) == (-1, True)


def test_goes_through_the_engine_s_proxy(hub: LocalHub, tmp_path: Path) -> None:
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "LD_PRELOAD": "/nonexistent"}
    changed, said = play(hub, tmp_path, download_env=proxy)
    assert (changed, hub.seen) == (-1, [])
    assert f"{hub.endpoint} cannot be reached (" in said
    assert "LD_PRELOAD" not in said
