# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What rsync 3.2.7 says, as it said it on Debian 12."""

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._pull_rsync import Source, command, judge, parse_listing

LISTING = """\
2 #odd.txt
1 new\\#012line
3 back\\#134#012slash
1 ü:*?[x]"
4 \\#303\\#274
4096 sub/
2 sub/sp ace.txt
skipping non-regular file "x"
"""

ERROR = "rsync error: something (code 1) at main.c(1872) [Receiver=3.2.7]\n"
CASES = [
    (0, "", "done", ""),
    (0, 'skipping non-regular file "x"\n', "done", ""),
    (5, f"@ERROR: auth failed on module checkpoint\n{ERROR}", "denied", "@ERROR: auth failed on module checkpoint"),
    (5, f"@ERROR: Unknown module 'checkpoint'\n{ERROR}", "denied", "@ERROR: Unknown module 'checkpoint'"),
    (5, f"@ERROR: access denied to checkpoint from x (192.0.2.1)\n{ERROR}", "denied", None),
    (5, f"@ERROR: chdir failed\n{ERROR}", "source", "@ERROR: chdir failed"),
    (10, f"rsync: [Receiver] failed to connect to x (x): Connection refused (111)\n{ERROR}", "source", None),
    (12, f"rsync: [receiver] read error: Connection reset by peer (104)\n{ERROR}", "source", None),
    (30, "[generator] io timeout after 5 seconds -- exiting\n", "source", None),
    (35, ERROR, "source", None),
    (20, ERROR, "source", None),
    (-9, "", "source", "rsync ended with -9"),
    (24, f'file has vanished: "/x" (in checkpoint)\n{ERROR}', "file", 'file has vanished: "/x" (in checkpoint)'),
    (
        23,
        f'rsync: [sender] send_files failed to open "x" (in checkpoint): Permission denied (13)\n{ERROR}',
        "file",
        None,
    ),
    (23, f"ERROR: x failed verification -- update discarded.\n{ERROR}", "file", None),
    (23, f'rsync: [receiver] mkstemp "/d/.x.aBcDeF" failed: Permission denied (13)\n{ERROR}', "local", None),
    (11, f'rsync: [receiver] write failed on "/d/x": No space left on device (28)\n{ERROR}', "full", None),
    (
        12,
        'rsync: connection closed\nrsync: [receiver] write failed on "/d/x": No space left on device (28)\n',
        "full",
        None,
    ),
    (11, f'rsync: [receiver] close failed on "/d/x": Disk quota exceeded (122)\n{ERROR}', "full", None),
    (127, "setpriv: failed to execute rsync: No such file or directory\n", "local", None),
    (22, ERROR, "local", None),
]


def test_parse_listing() -> None:
    assert parse_listing(LISTING) == {
        "#odd.txt": 2,
        "new\nline": 1,
        "back\\#012slash": 3,
        'ü:*?[x]"': 1,
        "ü": 4,
        "sub/sp ace.txt": 2,
    }


@pytest.mark.parametrize(("returncode", "stderr", "kind", "text"), CASES)
def test_judge(returncode: int, stderr: str, kind: str, text: str | None) -> None:
    said = judge(returncode, stderr)
    assert said.kind == kind
    if text is not None:
        assert said.text == text


@pytest.mark.parametrize("dry", [True, False])
def test_command_has_what_rsync_3_2_7_knows_and_never_inplace(dry: bool) -> None:
    arguments = command(Source("head", "192.0.2.1", 8730), "/srv/d", timeout=60, dry=dry)
    assert arguments[-2:] == ["rsync://hy3@192.0.2.1:8730/checkpoint/", "/srv/d/"]
    assert "--contimeout=10" in arguments
    assert not {"--inplace", "--append", "--update", "-u", "--delete"} & set(arguments)
    assert ("--dry-run" in arguments) is dry
