# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role guard's files do on a kernel with control groups that bind: the cap, systemd-oomd before it, and sshd."""

from __future__ import annotations

import json
import shutil
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import kills_of_engines
from ansible_collections.sparks.hy3.tests.vm.machine import ROOT, boot, copy_libraries, copy_with_libraries, fetch, run

MIB = 1024**2
Said = dict[str, t.Any]

SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
ListenAddress 127.0.0.1
UsePAM no
PidFile none
MaxStartups 100
"""
USERS = "root:x:0:0::/:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\n"


def furnish(root: Path) -> None:
    """Lay sshd, systemd-oomd with its own settings, and the files of role guard."""
    package = fetch("systemd-oomd", ROOT / "tests/output/vm-oomd")
    for folder in ("etc/systemd", "lib/systemd", "usr/lib/systemd"):
        if (package / folder).is_dir():
            shutil.copytree(package / folder, root / folder, symlinks=True, dirs_exist_ok=True)
    (oomd,) = (path for path in package.rglob("systemd-oomd") if path.is_file() and path.stat().st_mode & 0o100)
    copy_libraries([oomd], root)
    (root / "oomd").symlink_to("/" / oomd.relative_to(package))
    copy_with_libraries([Path("/usr/sbin/sshd")], root)
    for name in ("etc/ssh", "run/sshd", "run/systemd/oom"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "run/sshd").chmod(0o755)
    (root / "etc/passwd").write_text(USERS)
    (root / "etc/nsswitch.conf").write_text("passwd: files\n")
    (root / "etc/ssh/sshd_config").write_text(SSHD_CONFIG)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / "etc/ssh/ssh_host_ed25519_key"))
    shutil.copytree(ROOT / "roles/guard/files", root / "guard")


@pytest.fixture(scope="module")
def answers() -> dict[str, Said]:
    """What the machine said, by scenario; it has ended by then."""
    work = ROOT / "tests/output/vm-guard"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for name, size in (("checkpoint", 256 * MIB), ("swap", 128 * MIB)):
        with (work / name).open("wb") as file:
            file.truncate(size)
    run("mkswap", str(work / "swap"))
    drive = "if=virtio,format=raw"
    found = boot(
        work,
        "guest_guard",
        furnish=furnish,
        options=[
            *("-smp", "2", "-drive", f"file={work / 'checkpoint'},{drive},throttling.iops-read=400"),
            *("-drive", f"file={work / 'swap'},{drive}"),
        ],
        timeout=900,
    )
    shutil.rmtree(work)
    for answer in found.values():
        # The figures of docs/guard.md.
        print(json.dumps({name: value for name, value in answer.items() if name not in ("sshd",)}))
    return found


@pytest.fixture
def said(request: pytest.FixtureRequest, answers: dict[str, Said]) -> Said:
    """The answer of the scenario that the test is named after."""
    answer = answers[request.node.name.removeprefix("test_").partition("_says_")[0]]
    assert "error" not in answer, answer["error"]
    assert answer["oomd_lives"], answers["end"]
    return answer


def test_scores_says_that_sshd_spares_itself_and_nobody_it_starts(said: Said) -> None:
    assert (said["own"], said["children"], said["kept"]) == (-1000, [0], 64 * MIB)


def test_over_cap_says_that_the_cap_kills_a_hog_and_not_sshd(said: Said) -> None:
    assert (said["signal"], said["oom_kill"], said["oomd"]) == (9, 1, [])
    assert said["sshd_lives"]
    assert said["slowest_banner"] is not None


def test_loading_says_that_nobody_ends_a_start(said: Said) -> None:
    assert (said["ended_after"], said["over_limit_after"], said["oomd"], said["oom_kill"]) == (None, None, [], 0)


@pytest.mark.parametrize("scenario", ["under_cap", "uncharged"])
def test_systemd_oomd_acts_first(answers: dict[str, Said], scenario: str) -> None:
    said = answers[scenario]
    assert "error" not in said, said["error"]
    assert (said["signal"], said["oom_kill"]) == (9, 0)
    (kill,) = said["oomd"]
    assert "/hy3.slice/hy3-serve.service due to memory pressure for /hy3.slice being" in kill
    # Our diagnosis reads what a real one writes.
    assert kills_of_engines([f"systemd-oomd[1]: {kill}"]) != []
    assert said["sshd_lives"]
    assert said["slowest_banner"] is not None


def test_uncharged_says_that_the_cap_saw_nothing(said: Said) -> None:
    assert said["max"] == 0
    assert said["taker_lives"]


def test_beside_spinner_says_what_the_pressure_was(said: Said) -> None:
    # A figure for docs/guard.md: what computes on another processor counts as no stall.
    assert 0 < said["peak"] <= 100
