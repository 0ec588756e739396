# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What of a repository a directory lacks, and how it gets there: huggingface_hub fetches, here is decided and proved.

A directory that holds every file with the hub's content carries a record that says so, and needs no network afterwards.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import typing as t
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import LOCAL_DOWNLOADS
from ansible_collections.sparks.hy3.plugins.module_utils._download import COMMIT, Answer, Request, Wanted, parse_listing
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import contradiction, hash_all, hub_reference
from ansible_collections.sparks.hy3.plugins.module_utils._padding_tree import MARKER as PADDING
from ansible_collections.sparks.hy3.plugins.module_utils._progress import Progress

# Beside the client's notes, so neither is part of the manifest or of a padded copy.
RECORD = ".cache/huggingface/hy3-download.json"
PROGRESS = ".cache/huggingface/hy3-progress.json"
NOTE = LOCAL_DOWNLOADS + "/{}.metadata"
# huggingface_hub 2.4.0 (_download_to_tmp_and_move) gives each attempt a name of its own and goes on with none of them;
# older ones end in the etag, and are gone on with.
_ABANDONED = re.compile(r"\.[0-9a-f]{8}\.incomplete$")

Ask = Callable[[dict[str, t.Any], Callable[[], None]], Answer]


@dataclass
class Work:
    """What a run has to do: files to fetch, files that were edited and stay, and whole ones without the hub's note."""

    revision: str
    files: list[Wanted] = field(default_factory=list)
    fetch: list[Wanted] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    unnoted: list[Wanted] = field(default_factory=list)
    recorded: bool = False

    @property
    def bytes(self) -> int:
        """Size in bytes of the files to fetch."""
        return sum(file.size for file in self.fetch)


def parse_record(text: str) -> dict[str, t.Any]:
    """What an earlier run wrote down; empty if it is damaged."""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and isinstance(record.get("files"), dict) else {}


def nearest(directory: Path) -> Path:
    """The directory, or that of its parents which is there."""
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def may_write(directory: Path) -> bool:
    """Whether the effective user may make files there."""
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=True)


class Download:
    """The directory that becomes the checkpoint. ``ask`` puts a question to the client and calls back every while."""

    def __init__(self, request: Request, ask: Ask) -> None:
        self.request = request
        self.directory = request.directory
        self.ask = ask

    def check(self) -> None:
        """Raise Hy3Error for a directory that is not to be filled."""
        if self.directory.exists() and not self.directory.is_dir():
            raise Hy3Error(f"{self.directory} is no directory; name another, or remove it.")
        if self.directory.absolute().parent.name == "snapshots":
            raise Hy3Error(
                f"{self.directory} lies in a cache of huggingface_hub, and this fetches into a plain directory; name "
                "one, or serve the cache's and ask for no revision."
            )
        if (self.directory / PADDING).exists():
            raise Hy3Error(
                f"{self.directory} holds a padded checkpoint, which the original would overwrite; name another "
                "directory, or ask for no revision."
            )
        record = self._record()
        if record and record.get("repository") != self.request.repository:
            raise Hy3Error(
                f"{self.directory} holds {record.get('repository')}, not {self.request.repository}, and files of both "
                "would be mixed; name another directory, or remove that one."
            )
        # Root makes one that is not there, and gives it away.
        if not may_write(place := nearest(self.directory)) and (self.directory.exists() or os.getuid() != 0):
            raise Hy3Error(f"{place} cannot be written by the user that fetches; give it to that user.")

    def plan(self) -> Work:
        """What is left to do. Asks the hub unless an earlier run recorded this very commit; reads what is there."""
        revision = self.request.revision
        if COMMIT.fullmatch(revision) and self._is_recorded(revision):
            return Work(revision, recorded=True)
        revision, files = parse_listing(self._ask("list", revision=revision))
        if self._is_recorded(revision):
            return Work(revision, files, recorded=True)
        work = Work(revision, files)
        present: dict[str, Wanted] = {}
        for file in files:
            try:
                size = (self.directory / file.name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                work.fetch.append(file)
                continue
            if size == file.size:
                present[file.name] = file
            else:
                self._sort_out(file, work)
        wrong = self._disproved(present)
        for file in present.values():
            if file.name in wrong:
                self._sort_out(file, work)
            elif hub_reference(self.directory, file.name) is None and file.reference:
                work.unnoted.append(file)
        return work

    def _sort_out(self, file: Wanted, work: Work) -> None:
        """A file of text stays, unless it is as some other commit had it: somebody edited it."""
        noted = hub_reference(self.directory, file.name)
        if file.is_small and noted in (None, file.reference):
            work.kept.append(file.name)
        else:
            work.fetch.append(file)

    def check_space(self, work: Work) -> None:
        """Raise Hy3Error when the file system has less room than the files to fetch take."""
        old = [self.directory / file.name for file in work.fetch]
        left = sum(path.stat().st_size for path in [*filter(Path.is_file, old), *self._unfinished()])
        free = shutil.disk_usage(nearest(self.directory)).free
        if work.bytes > free + left:
            raise Hy3Error(
                f"{self.directory} needs {work.bytes - left} bytes for {len(work.fetch)} files and has {free} free; "
                "make room, or name a directory on a larger disk."
            )

    def try_access(self, work: Work) -> None:
        """Raise Hy3Error when the hub would not give the files."""
        self._ask("look", revision=work.revision, names=[file.name for file in work.fetch])

    def finish(self, work: Work) -> None:
        """Fetch what is left, prove it, and write that down. Raises Hy3Error."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if work.fetch:
                    self._fetch(work)
                for file in work.unnoted:
                    self._note(file, work.revision)
                if not work.recorded:
                    self._write_record(work)
        except OSError as error:
            raise Hy3Error(
                f"{error.filename or self.directory} cannot be written ({error.strerror or error}); see to that and "
                "run again, and only the rest is fetched."
            ) from error

    def _fetch(self, work: Work) -> None:
        self._refuse_company()
        for path in self._unfinished():
            if _ABANDONED.search(path.name):
                path.unlink(missing_ok=True)
        for file in work.fetch:
            # With the note of a damaged file the client would take it for whole.
            if not file.is_small:
                (self.directory / NOTE.format(file.name)).unlink(missing_ok=True)
        so_far = Progress(work.bytes, len(work.fetch))

        def progress() -> None:
            whole = sum((self.directory / file.name).exists() for file in work.fetch)
            facts = so_far.at(time.monotonic(), done=self._arrived(work), files_done=whole)
            self._write(PROGRESS, json.dumps({"pid": os.getpid(), **facts}) + "\n", durable=False)

        try:
            names = [file.name for file in work.fetch]
            self._ask("fetch", progress, revision=work.revision, names=names)
        finally:
            (self.directory / PROGRESS).unlink(missing_ok=True)
        wanted = {file.name: file for file in work.fetch}
        missing = [name for name in wanted if not (self.directory / name).is_file()]
        wrong = {name: f"{name} is missing" for name in missing}
        wrong |= self._disproved({name: file for name, file in wanted.items() if name not in wrong})
        if wrong:
            what = next(iter(wrong.values()))
            raise Hy3Error(
                f"{len(wrong)} of {len(wanted)} files did not arrive as the hub has them ({what}); "
                "run again, and these are fetched again."
            )
        for path in self._unfinished():
            path.unlink(missing_ok=True)

    def _disproved(self, files: Mapping[str, Wanted]) -> dict[str, str]:
        """Those of the files that are not what the hub has, each with a clause that says how."""
        references = {name: file.reference for name, file in files.items() if file.reference}
        sizes = {name: (self.directory / name).stat().st_size for name in files}
        wrong = {
            name: f"{name} has {sizes[name]} bytes, not {files[name].size}"
            for name in files
            if sizes[name] != files[name].size
        }
        to_hash = {name: sizes[name] for name in references if name not in wrong}
        for hashed in hash_all(self.directory, to_hash, references=references):
            name = hashed.file.name
            if what := hashed.error or contradiction(hashed, references[name]):
                wrong[name] = what
        return wrong

    def _ask(self, what: str, progress: Callable[[], None] = lambda: None, **details: t.Any) -> Answer:
        request = self.request
        question = {"do": what, "repository": request.repository, "token": request.token, "timeout": request.timeout}
        question |= {"allow": request.allow, "ignore": request.ignore, "workers": request.workers}
        return self.ask({**question, "directory": str(self.directory), **details}, progress)

    # ---- What lies in the directory

    def _record(self) -> dict[str, t.Any]:
        try:
            return parse_record((self.directory / RECORD).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return {}

    def _is_recorded(self, revision: str) -> bool:
        record = self._record()
        wanted = {"revision": revision, "allow": list(self.request.allow), "ignore": list(self.request.ignore)}
        if not record or any(record.get(key) != value for key, value in wanted.items()):
            return False
        return all(self._is_there(name, size) for name, size in record["files"].items())

    def _is_there(self, name: str, size: int | None) -> bool:
        path = self.directory / name
        return path.is_file() and size in (None, path.stat().st_size)

    def _write_record(self, work: Work) -> None:
        record = {"repository": self.request.repository, "revision": work.revision}
        # A file of text may be edited later on.
        files = {file.name: None if file.is_small else file.size for file in work.files}
        patterns = {"allow": self.request.allow, "ignore": self.request.ignore}
        self._write(RECORD, json.dumps({**record, **patterns, "files": files}, indent=1) + "\n")

    def _note(self, file: Wanted, revision: str) -> None:
        """Leave the hub's own note at a file that was proved and not fetched, so that its hash is known later."""
        if file.reference:
            text = f"{revision}\n{file.reference.value}\n{time.time()}\n"
            self._write(NOTE.format(file.name), text)

    def _unfinished(self) -> list[Path]:
        return sorted((self.directory / LOCAL_DOWNLOADS).rglob("*.incomplete"))

    def _arrived(self, work: Work) -> int:
        """Bytes of the files to fetch that are here."""
        found = 0
        for path in [*(self.directory / file.name for file in work.fetch), *self._unfinished()]:
            try:
                stat = path.stat()
            except OSError:  # not yet, or renamed by now
                continue
            # Xet's client may make a file as long as it will be.
            found += min(stat.st_size, stat.st_blocks * 512)
        return min(found, work.bytes)

    def _write(self, name: str, text: str, *, durable: bool = True) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise Hy3Error(
                f"Another run is filling {self.directory}{self._how_far()}; wait for it, or stop it, and run again."
            ) from error
        finally:
            os.close(handle)

    def _how_far(self) -> str:
        try:
            figures = json.loads((self.directory / PROGRESS).read_text(encoding="utf-8"))
            return f" (process {figures['pid']}, {figures['bytes']} of {figures['bytes_total']} bytes)"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _refuse_company(self) -> None:
        """Raise Hy3Error if somebody's own ``hf download`` writes here: the client locks each file that it fetches."""
        for path in (self.directory / LOCAL_DOWNLOADS).rglob("*.lock"):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise Hy3Error(
                        f"Something else is fetching {path.stem} into {self.directory}; wait for it, or stop "
                        "it, and run again."
                    ) from error
