# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked of huggingface_hub and what its failures are called. The client itself is tested with the module."""

from __future__ import annotations

import errno
import os
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._download import (
    Request,
    Wanted,
    child_environment,
    explain,
    parse_listing,
    read_token,
)
from ansible_collections.sparks.hy3.plugins.module_utils._download_tree import parse_record
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._hub_client import failure
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import Reference

COMMIT, SHA256, GIT = "c" * 40, "a" * 64, "b" * 40
REQUEST = Request("example/model", "main", Path("/srv/m"))
WITH_TOKEN = Request("example/model", "main", Path("/srv/m"), token="hf_secret", token_file="/etc/token")
HUB = "https://huggingface.co"


def listing(**file: t.Any) -> dict[str, t.Any]:
    return {"revision": COMMIT, "files": [{"name": "a", "size": 1, "sha256": None, "git": GIT, **file}]}


def test_a_large_file_has_a_sha256_and_a_small_one_git_s_hash() -> None:
    large = {"name": "a.bin", "size": 7, "sha256": SHA256, "git": GIT}
    answer = {"revision": COMMIT, "files": [*listing(name="b")["files"], large]}
    files = [Wanted("a.bin", 7, Reference("sha256", SHA256)), Wanted("b", 1, Reference("git-sha1", GIT))]
    assert parse_listing(answer) == (COMMIT, files)
    assert [file.is_small for file in files] == [False, True]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (listing(name="../../etc/passwd"), "The repository has a file '../../etc/passwd' of 1 bytes, which cannot lie"),
        (listing(name="/etc/passwd"), "The repository has a file '/etc/passwd'"),
        (listing(size=None), "The repository has a file 'a' of None bytes"),
        ({**listing(), "revision": "main"}, "The endpoint names the commit 'main', which is none;"),
        ({"revision": COMMIT, "files": []}, "No file of the repository passes"),
    ],
)
def test_lists_that_no_hub_gives(answer: dict[str, t.Any], sentence: str) -> None:
    with pytest.raises(Hy3Error, match="^" + sentence.replace(".", r"\.")):
        parse_listing(answer)


def met(*kinds: str, status: int | None = None, number: int | None = None, text: str = "why") -> dict[str, t.Any]:
    return {"kinds": kinds, "status": status, "errno": number, "file": "", "text": text}


@pytest.mark.parametrize(
    ("failure", "request_", "fetching", "sentence"),
    [
        (met("OSError", number=errno.ENOSPC), REQUEST, True, "The disk of /srv/m became full; make room and run again"),
        (met("PermissionError", number=errno.EACCES), REQUEST, True, "/srv/m cannot be written (Permission denied);"),
        (met("HfHubHTTPError", status=401), REQUEST, False, f"{HUB} refuses a stranger without a token (HTTP 401);"),
        (met("HfHubHTTPError", status=403), WITH_TOKEN, True, f"{HUB} refuses the token in /etc/token (HTTP 403);"),
        (met("HfHubHTTPError", status=503), REQUEST, True, f"{HUB} does not answer as a hub does (HTTP 503);"),
        (met("FileMetadataError"), REQUEST, True, f"{HUB} does not answer as a hub does (why);"),
        # What httpx calls it, what requests called it, and what the client says of a file that ended early.
        (met("ConnectError", "TransportError"), REQUEST, False, f"{HUB} cannot be reached (why);"),
        (met("ConnectionError", "RequestException"), REQUEST, False, f"{HUB} cannot be reached (why);"),
        (met("ReadTimeout", "TransportError"), REQUEST, True, f"The transfer was cut off and {HUB} did not come back"),
        (met("OSError", text="Consistency check failed: 1"), REQUEST, True, "The transfer was cut off and"),
        (met("ValueError"), REQUEST, True, "huggingface_hub could not do it (ValueError: why);"),
        (met("ValueError", text="GET /a?Signature=secret failed."), REQUEST, True, "huggingface_hub could not do it ("),
    ],
)
def test_failures(failure: dict[str, t.Any], request_: Request, fetching: bool, sentence: str) -> None:
    said = explain(failure, request_, fetching=fetching, python="/venv/bin/python")
    assert said.startswith(sentence)
    assert said.endswith(".")
    assert "secret" not in said


def test_a_failure_is_described_with_its_causes() -> None:
    cause = OSError(errno.ENOSPC, "No space left on device", "/srv/m/a")
    error = RuntimeError("two\nlines")
    error.__cause__ = cause
    found = failure(error)
    assert {"RuntimeError", "OSError"} <= set(found["kinds"])
    assert (found["errno"], found["file"], found["text"]) == (errno.ENOSPC, "/srv/m/a", "two lines")


def test_the_client_s_environment() -> None:
    """No token, no home, nothing that changes where things are; what tunes Xet stays."""
    given = {"HF_TOKEN": "x", "HF_HOME": "/x", "HF_HUB_CACHE": "/x", "HUGGING_FACE_HUB_TOKEN": "x", "HTTPS_PROXY": "p"}
    found = child_environment({**given, "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": "x"}, WITH_TOKEN)
    assert found["HTTPS_PROXY"] == "p"
    assert (found["HF_HUB_DISABLE_XET"], found["HF_HUB_OFFLINE"]) == ("1", "0")
    assert found["HF_HOME"] == "/srv/m/.cache/huggingface"
    assert {"x", "/x", "hf_secret"} & set(found.values()) == set()


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o604, 0o640, 0o660])
def test_a_token_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("hf_secret\n")
    path.chmod(mode)
    if mode in (0o600, 0o400):
        assert read_token(str(path)) == "hf_secret"
        return
    with pytest.raises(Hy3Error, match=f"has mode {mode:04o}, so others can use it; run `chmod 600 {path}`."):
        read_token(str(path))


@pytest.mark.parametrize("text", ["", "\n", "hf_secret hf_secret", "HF_TOKEN = hf_secret"])
def test_a_token_file_holds_one_token(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    os.chmod(path, 0o600)
    with pytest.raises(Hy3Error, match="and it must hold one token;") as caught:
        read_token(str(path))
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": []}'])
def test_a_damaged_record_is_none(text: str) -> None:
    assert parse_record(text) == {}
