# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What is asked of huggingface_hub, what it answers, and one sentence for each way in which it fails."""

from __future__ import annotations

import errno
import inspect
import json
import os
import pwd
import re
import subprocess
import tempfile
import typing as t
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ansible_collections.sparks.hy3.plugins.module_utils import _hub_client
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import Reference, parse_etag

HUB = "https://huggingface.co"
PROGRESS_SECONDS = 5
# Read now: a module comes in an archive that the user of acting_as cannot open.
PROGRAM = inspect.getsource(_hub_client)
COMMIT = re.compile(r"[0-9a-f]{40}")
# What httpx and requests call a network that does not work.
_NETWORK = {"TransportError", "ConnectionError", "Timeout", "TimeoutError", "ProxyError", "ChunkedEncodingError"}
_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}

Answer = Mapping[str, t.Any]


class Wanted(t.NamedTuple):
    """A file of the repository: ``size`` in bytes, and what it hashes to, if the hub says it."""

    name: str
    size: int
    reference: Reference | None

    @property
    def is_small(self) -> bool:
        """Whether git itself keeps it: a file of text, which a user may have edited."""
        return self.reference is not None and self.reference.algorithm == "git-sha1"


@dataclass(frozen=True)
class Request:
    """What is asked for; ``timeout`` in seconds of silence, ``token_file`` only for sentences."""

    repository: str
    revision: str
    directory: Path
    endpoint: str = ""
    token: str = ""
    token_file: str = ""
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    workers: int = 8
    timeout: int = 30


def parse_listing(answer: Answer) -> tuple[str, list[Wanted]]:
    """The commit and its files, sorted by name. Raises Hy3Error for a list that no hub gives."""
    files: list[Wanted] = []
    for file in answer.get("files") or []:
        name, size, etag = file["name"], file["size"], file["sha256"] or file["git"] or ""
        if PurePosixPath(name).is_absolute() or ".." in name.split("/") or not isinstance(size, int):
            raise Hy3Error(
                f"The repository has a file {name!r} of {size} bytes, which cannot lie in a directory; leave it out "
                "with ignore_patterns, or fetch another repository."
            )
        files.append(Wanted(name, size, parse_etag(etag)))
    revision = str(answer.get("revision"))
    if not COMMIT.fullmatch(revision):
        raise Hy3Error(f"The endpoint names the commit {revision!r}, which is none; correct the endpoint.")
    if not files:
        raise Hy3Error("No file of the repository passes allow_patterns and ignore_patterns; correct them.")
    return revision, sorted(files, key=lambda file: file.name)


def explain(failure: Answer, request: Request, *, fetching: bool, python: str) -> str:  # noqa: PLR0911 - a table
    """The one sentence for what the client met."""
    kinds, status, number = set(failure["kinds"]), failure["status"], failure["errno"]
    where, repository, directory = request.endpoint or HUB, request.repository, request.directory
    # A signed address is a secret for as long as it is valid.
    said = re.sub(r"\?\S+", "", failure["text"])[:200].rstrip(".")
    who = f"the token in {request.token_file}" if request.token else "a stranger without a token"
    if "ImportError" in kinds:
        return (
            f"{python} has no huggingface_hub that works ({said}), which fetches the checkpoint; install it there, or "
            "name the venv of the engine, which has it."
        )
    if "GatedRepoError" in kinds:
        return (
            f"{repository} is gated, and {who} may not read it; accept its terms at {where}/{repository}, and name a "
            "file with a token of that account in token_file."
        )
    if "RepositoryNotFoundError" in kinds:
        return (
            f"{where} has no repository {repository} that {who} may read; correct the name, or if it is private name a "
            "file with a token in token_file."
        )
    if "RevisionNotFoundError" in kinds:
        return (
            f"{repository} has no revision '{request.revision}'; write a commit of 40 hexadecimal digits, or a branch "
            "or tag that is there."
        )
    if number == errno.ENOSPC:
        return f"The disk of {directory} became full; make room and run again, and only the rest is fetched."
    if number in _NO_ACCESS:
        name = failure["file"] or directory
        return f"{name} cannot be written ({os.strerror(number)}); give it to the user that fetches."
    if status in (401, 403):
        return f"{where} refuses {who} (HTTP {status}); write a token that may read {repository} in token_file."
    if status or kinds & {"JSONDecodeError", "FileMetadataError"}:
        what = f"HTTP {status}" if status else said
        return f"{where} does not answer as a hub does ({what}); correct the endpoint, or try again later."
    if fetching and (kinds & _NETWORK or "Consistency check" in said):
        return (
            f"The transfer was cut off and {where} did not come back ({said}); run again, and only the rest is fetched."
        )
    if kinds & _NETWORK:
        return (
            f"{where} cannot be reached ({said}); mend the network, set HTTPS_PROXY or the endpoint, or bring the "
            "checkpoint yourself and ask for no revision."
        )
    return f"huggingface_hub could not do it ({failure['kinds'][0]}: {said}); mend that and run again."


def child_environment(environment: Mapping[str, str], request: Request) -> dict[str, str]:
    """The client's environment: this process's without what would change repository, token or places; no secret."""
    kept = {
        name: value
        for name, value in environment.items()
        # Xet may be switched off or tuned, for networks where it does not work.
        if not name.startswith(("HF_", "HUGGING")) or name.startswith(("HF_XET_", "HF_HUB_DISABLE_XET"))
    }
    return {
        # The chunks of a checkpoint are not asked for twice.
        "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0",
        **kept,
        **({"HF_ENDPOINT": request.endpoint} if request.endpoint else {}),
        # A service user may have no home.
        "HF_HOME": str(request.directory / ".cache/huggingface"),
        # Wins over TRANSFORMERS_OFFLINE.
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": str(request.timeout),
        "HF_HUB_ETAG_TIMEOUT": str(request.timeout),
    }


def read_token(name: str) -> str:
    """The token on the only line of a file that only its owner may use. Raises Hy3Error, which never repeats it."""
    try:
        with open(name, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            words = file.read(4096).decode(errors="replace").split()
    except OSError as error:
        raise Hy3Error(
            f"token_file {name} cannot be read ({error.strerror}); put the token there with mode 0600, or leave it out."
        ) from error
    if mode & 0o077:
        raise Hy3Error(f"token_file {name} has mode {mode:04o}, so others can use it; run `chmod 600 {name}`.")
    if len(words) != 1 or not words[0].isascii():
        raise Hy3Error(
            f"token_file {name} holds {len(words)} words, and it must hold one token; write nothing else there."
        )
    return words[0]


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Files are read and written as this user within, so that root follows no link that the user laid.

    Raises Hy3Error for a user that does not exist, or that this process may not become. An empty name is nobody else.
    """
    try:
        entry = pwd.getpwnam(name) if name else pwd.getpwuid(os.geteuid())
    except KeyError as error:
        raise Hy3Error(f"user is '{name}', which this node does not have; make it, or name another.") from error
    if entry.pw_uid == os.geteuid():
        yield
        return
    if os.geteuid() != 0:
        raise Hy3Error(f"user is '{name}', and only root can become another user; set become, or leave user out.")
    groups = os.getgroups()
    os.setgroups(os.getgrouplist(entry.pw_name, entry.pw_gid))
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


class Client:
    """Puts a question to huggingface_hub, in the venv's own interpreter and as this process's effective user."""

    def __init__(self, python: Path, request: Request) -> None:
        self.python = python
        self.request = request

    def __call__(self, question: Mapping[str, t.Any], progress: Callable[[], None]) -> Answer:
        """The answer; ``progress`` is called every few seconds. Raises Hy3Error."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = self._run(question, progress, out, err)
            out.seek(0)
            err.seek(0)
            said = out.read()
            noise = err.read().decode(errors="replace").strip().splitlines()
        try:
            answer: Answer = json.loads(said)
        except ValueError as error:
            what = noise[-1][:200] if noise else "it said nothing"
            raise Hy3Error(
                f"{self.python} ended with status {code} and without an answer ({what}); run again, and only the rest "
                "is fetched."
            ) from error
        if "failure" in answer:
            fetching = question["do"] == "fetch"
            raise Hy3Error(explain(answer["failure"], self.request, fetching=fetching, python=str(self.python)))
        return answer

    def _run(
        self, question: Mapping[str, t.Any], progress: Callable[[], None], out: t.IO[bytes], err: t.IO[bytes]
    ) -> int:
        try:
            # run_command drops no user and keeps no pipe open.
            child = subprocess.Popen(  # pylint: disable=ansible-bad-function  # see above
                [str(self.python), "-I", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd="/",
                env=child_environment(os.environ, self.request),
                # A process with another real user could become that one again.
                user=os.geteuid(),
                group=os.getegid(),
            )
        except OSError as error:
            raise Hy3Error(
                f"{self.python} cannot be run ({error.strerror}), and it fetches the checkpoint; name the venv of the "
                "engine, and let the user that fetches read it."
            ) from error
        # Left open: the child ends when this process does.
        pipe = t.cast("t.IO[bytes]", child.stdin)
        try:
            with suppress(BrokenPipeError):  # it ended already, and says why
                pipe.write(json.dumps(question).encode() + b"\n")
                pipe.flush()
            while True:
                try:
                    return child.wait(PROGRESS_SECONDS)
                except subprocess.TimeoutExpired:
                    progress()
        finally:
            child.kill()
            child.wait()
            with suppress(BrokenPipeError):
                pipe.close()
