# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Pulls the files of a manifest with rsync from the daemons of other nodes, several at once.

Each is written below a hidden directory of the checkpoint, checked, synced, and only then given its name. A run that
was killed leaves whole files under their names and halves in that directory; the next one completes the rest.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import CONFIG, naming, unfinished
from ansible_collections.sparks.hy3.plugins.module_utils._durable import sync_directory
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import File, hash_all, hash_file
from ansible_collections.sparks.hy3.plugins.module_utils._progress import Progress
from ansible_collections.sparks.hy3.plugins.module_utils._pull import (
    PARTIAL,
    Board,
    Supply,
    check_manifest,
    differing,
    needed_bytes,
    surplus,
)
from ansible_collections.sparks.hy3.plugins.module_utils._pull_halves import Halves
from ansible_collections.sparks.hy3.plugins.module_utils._pull_rsync import (
    Said,
    Source,
    Transfer,
    command,
    parse_listing,
)

PROGRESS = "progress.json"
# Seconds between two looks at what the processes do, and at how far they are.
STEP_SECONDS, PROGRESS_SECONDS = 0.02, 1.0
# Times the timeout: before a half grows, rsync has to read it.
STALLED = 2
# A file that a source failed to give, though it has it, is asked for once more.
ATTEMPTS = 2


@dataclass
class Work:
    """What a run has to do: files to pull in order, sizes of those they replace, names to remove."""

    pending: list[File]
    replaced: list[int]
    removed: list[str]

    @property
    def changes(self) -> bool:
        return bool(self.pending or self.removed)


@dataclass
class Outcome:
    """What a run did: bytes that came over the network, seconds, files by source, sources passed over and why."""

    received: int = 0
    seconds: float = 0.0
    given: dict[str, int] = field(default_factory=dict)
    passed_over: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass
class _Flight:
    """A running rsync: a look at a source if ``file`` is None. ``moved`` is when it started or its file last grew."""

    transfer: Transfer
    supply: Supply
    file: File | None
    moved: float


class Puller:
    """One directory that becomes what the manifest says."""

    def __init__(
        self,
        dest: Path,
        manifest: Sequence[File],
        *,
        streams: int,
        timeout: int,
        owner: str | None,
        spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises Hy3Error for a manifest that is none, a path that is no directory, and an owner who does not exist."""
        check_manifest(manifest)
        if dest.exists() and not dest.is_dir():
            raise Hy3Error(f"{dest} is no directory; name another, or remove it.")
        self.dest = dest
        self.manifest = manifest
        self.streams = streams
        self.timeout = timeout
        self.owner = _find_owner(owner)
        self.partial = dest / PARTIAL
        self.halves = Halves(self.partial / "files")
        self.spawn, self.clock, self.sleep = spawn, clock, sleep

    # ---- Before

    def survey(self) -> Work:
        """What is left to do. Hashes the files that are there in the right size; nothing is trusted by its time."""
        self._check_places()
        there = {
            file.name: os.stat(self.dest / file.name).st_size for file in self.manifest if self._is_file(file.name)
        }
        same = {file.name: file for file in self.manifest if there.get(file.name) == file.size}
        found = {name: file for name, file in same.items() if file.sha256 is None}
        to_hash = {name: file.size for name, file in same.items() if file.sha256 is not None}
        found |= {hashed.file.name: hashed.file for hashed in hash_all(self.dest, to_hash, references={})}
        pending = differing(self.manifest, found)
        replaced = [there[file.name] for file in pending if file.name in there and not self._is_link(file.name)]
        return Work(pending, replaced, self._to_remove(pending))

    def check_space(self, work: Work) -> None:
        """Raise Hy3Error when the file system has less room than the files to pull take."""
        place = next(path for path in (self.dest, *self.dest.absolute().parents) if path.exists())
        come = self.halves.sizes()
        partial = sum(min(file.size, come.get(file.name, 0)) for file in work.pending)
        needed = needed_bytes(work.pending, replaced=work.replaced, partial=partial, streams=2 * self.streams)
        free = shutil.disk_usage(place).free
        if needed > free:
            raise Hy3Error(
                f"{self.dest} needs {needed} bytes more for {len(work.pending)} files and has {free} free; make room, "
                "or name a directory on a larger disk."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory, which is made. Waits as long as for a source: a run before may be about to end."""
        try:
            if not self.dest.is_dir():
                self.dest.mkdir(parents=True)
                self.give(self.dest)
            self.lock = os.open(self.dest, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            until = self.clock() + self.timeout
            while not self._try_lock():
                if self.clock() > until:
                    raise Hy3Error(f"Another run is writing {self.dest}; wait for it, or stop it, and run again.")
                self.sleep(PROGRESS_SECONDS)
            # Of a run that was killed.
            (self.partial / PROGRESS).unlink(missing_ok=True)
            yield
        finally:
            os.close(self.lock)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_file(self, name: str) -> bool:
        return (self.dest / name).is_file()

    def _is_link(self, name: str) -> bool:
        return (self.dest / name).is_symlink()

    def _is_below(self, folder: Path) -> bool:
        """Whether a folder is in the directory itself, and not behind a link that leads elsewhere."""
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self.dest))

    def _check_places(self) -> None:
        for folder in {os.path.dirname(file.name) for file in self.manifest} - {""}:
            if not self._is_below(self.dest / folder):
                raise Hy3Error(
                    f"{self.dest / folder} leads out of {self.dest}, and nothing is written there; remove it."
                )

    def _to_remove(self, pending: Sequence[File]) -> list[str]:
        """What would make this another checkpoint, or an unfinished one; all of it below the directory itself."""
        if not self.dest.is_dir():
            return []
        removed = surplus((path.name for path in self.dest.iterdir() if not path.is_dir()), self.manifest)
        halves = [path for path in unfinished(self.dest) if self._is_below(path.parent) and not path.is_dir()]
        removed += [str(path.relative_to(self.dest)) for path in halves]
        # Left by a run that was killed when it had all but done.
        return removed + ([PARTIAL] if self.partial.exists() and not pending else [])

    # ---- The run

    def pull(self, work: Work, sources: Sequence[Source], *, password: str) -> Outcome:
        """Pull what is left. Raises Hy3Error with whatever stops it; what came whole stays."""
        if not shutil.which("rsync"):
            raise Hy3Error("rsync is not on this node; install it.")
        try:
            return _Run(self, work, sources, password).run()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> Hy3Error:
        return Hy3Error(
            f"{error.filename or self.dest} cannot be written ({error.strerror or error}); see to that and run again, "
            "and only the rest is pulled."
        )

    def give(self, path: Path) -> None:
        if self.owner:
            os.chown(path, *self.owner)


class _Run:
    """The processes of one run; a single thread decides, others only hash."""

    def __init__(self, puller: Puller, work: Work, sources: Sequence[Source], password: str) -> None:
        self.puller = puller
        self.files = puller.halves.directory
        self.work = work
        self.todo = {file.name: file for file in work.pending}
        self.password = password
        self.began = puller.clock()
        self.board = Board(sources, timeout=puller.timeout, now=self.began)
        self.flights: list[_Flight] = []
        self.checks: dict[Future[str], tuple[File, Supply]] = {}
        self.attempts: dict[tuple[str, str], int] = {}
        self.progress = Progress(sum(file.size for file in work.pending), len(work.pending))
        self.progress_at = self.began
        self.come: dict[str, int] = {}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        if self.todo:
            self.puller.halves.adopt(self.todo)
            with ThreadPoolExecutor(self.puller.streams) as pool:
                try:
                    while self.todo:
                        self._step(pool)
                        self.puller.sleep(STEP_SECONDS)
                finally:
                    for flight in self.flights:
                        flight.transfer.end()
                    pool.shutdown(wait=False, cancel_futures=True)
        for name in self.work.removed:
            if name != PARTIAL:
                (self.puller.dest / name).unlink(missing_ok=True)
        shutil.rmtree(self.puller.partial, ignore_errors=True)
        sync_directory(self.puller.dest)
        self.outcome.seconds = self.puller.clock() - self.began
        self.outcome.passed_over = self.board.passed_over()
        self.outcome.warnings += [f"{name} was passed over: {reason}." for name, reason in self.outcome.passed_over]
        return self.outcome

    def _step(self, pool: ThreadPoolExecutor) -> None:
        now = self.puller.clock()
        for flight in [flight for flight in self.flights if flight.transfer.has_ended()]:
            self.flights.remove(flight)
            self._landed(flight, pool, now)
        for flight in [flight for flight in self.flights if now - flight.moved > STALLED * self.puller.timeout]:
            self._stalled(flight, now)
        for future in [future for future in self.checks if future.done()]:
            file, supply = self.checks.pop(future)
            self._checked(file, supply, future.result())
        self._look(now)
        self._fill(now)
        self.board.check_hope(now)
        if now >= self.progress_at:
            self._tell(now)

    def _fill(self, now: float) -> None:
        """Start what may be started."""
        pulling = {flight.file.name for flight in self.flights if flight.file}
        busy = pulling | {file.name for file, _from in self.checks.values()}
        # Those that are being checked count, or the disk would have to hold any number of them.
        for _free in range(min(self.puller.streams - len(pulling), 2 * self.puller.streams - len(busy))):
            waiting = [name for name in self.todo if name not in busy and (name != CONFIG or len(self.todo) == 1)]
            choice = self.board.choose(waiting, now)
            if not choice:
                break
            name, supply = choice
            busy.add(name)
            self._start(supply, [name], self.todo[name])

    def _look(self, now: float) -> None:
        looking = [flight.supply for flight in self.flights if not flight.file]
        for supply in self.board.due(self.todo, now):
            if supply not in looking:
                self._start(supply, list(self.todo), None)

    def _start(self, supply: Supply, names: Sequence[str], file: File | None) -> None:
        arguments = command(supply.source, str(self.files), timeout=self.puller.timeout, dry=file is None)
        lock, spawn = self.puller.lock, self.puller.spawn
        transfer = Transfer(arguments, names, password=self.password, lock=lock, spawn=spawn)
        self.flights.append(_Flight(transfer, supply, file, self.puller.clock()))

    def _stalled(self, flight: _Flight, now: float) -> None:
        """Give up a transfer of which nothing comes.

        rsync's own timeout counts what it sends, too, and on a link that is gone the kernel takes that for long.
        """
        self.flights.remove(flight)
        flight.transfer.end()
        supply, said = flight.supply, Said("source", f"it has sent nothing for {now - flight.moved:.0f} s")
        self.board.failed(supply, said, now)
        if flight.file and supply is not self.board.supplies[-1]:
            # One that answers and does not send: large packets do not pass, for instance.
            key = (supply.source.name, flight.file.name)
            self.attempts[key] = self.attempts.get(key, 0) + 1
            if self.attempts[key] >= ATTEMPTS:
                supply.refused.add(flight.file.name)

    def _landed(self, flight: _Flight, pool: ThreadPoolExecutor, now: float) -> None:
        stdout, said = flight.transfer.result()
        supply, file = flight.supply, flight.file
        if said.kind == "full":
            raise Hy3Error(
                f"The disk of {self.puller.dest} ran full while {file.name if file else PARTIAL} was pulled, with "
                f"{naming(self.todo)} to come; make room and run again, and only the rest is pulled."
            )
        if said.kind == "local":
            raise Hy3Error(f"{self.puller.dest} cannot be written ({said.text}); see to that and run again.")
        if said.kind in ("source", "denied"):
            self.board.failed(supply, said, now)
        elif file is None:
            self.board.listed(supply, parse_listing(stdout), list(self.todo.values()), now)
        elif said.kind == "done" and file.name in (come := parse_listing(stdout)):
            self.outcome.received += come[file.name]
            self.board.moves(supply, now)
            self.checks[pool.submit(self._check, file)] = (file, supply)
        else:
            self._not_given(supply, file, said)

    def _not_given(self, supply: Supply, file: File, said: Said) -> None:
        supply.ready.discard(file.name)
        key = (supply.source.name, file.name)
        self.attempts[key] = self.attempts.get(key, 0) + 1
        if self.attempts[key] >= ATTEMPTS:
            self.board.refuse(supply, file, said.text or "it is not there")

    def _check(self, file: File) -> str:
        """What is wrong with a file that has come; nothing if it is whole and on the disk."""
        path = self.files / file.name
        size, digest, _git = hash_file(path)
        if size != file.size:
            return f"it has {size} bytes, not {file.size}"
        if file.sha256 and digest != file.sha256.lower():
            return f"its sha256 is {digest[:12]}, not {file.sha256[:12]}"
        self.puller.give(path)
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            # What was pulled would fill the memory that the model needs.
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return ""

    def _checked(self, file: File, supply: Supply, wrong: str) -> None:
        path = self.files / file.name
        if wrong:
            path.unlink()
            self.board.refuse(supply, file, wrong)
            self.outcome.warnings.append(
                f"{file.name} was not taken from {supply.source.name} ({wrong}), but from another source."
            )
            return
        target = self.puller.dest / file.name
        if len(self.todo) == len(self.work.pending):
            # No engine is to load what is new and old by halves.
            (self.puller.dest / CONFIG).unlink(missing_ok=True)
        for folder in reversed(target.relative_to(self.puller.dest).parents[:-1]):
            if not (self.puller.dest / folder).is_dir():
                (self.puller.dest / folder).mkdir()
                self.puller.give(self.puller.dest / folder)
        path.rename(target)
        sync_directory(target.parent)
        del self.todo[file.name]
        self.outcome.given[supply.source.name] = self.outcome.given.get(supply.source.name, 0) + 1

    def _tell(self, now: float) -> None:
        """Leave the progress where others can read it, and note which sources do send."""
        come = self.puller.halves.sizes()
        for flight in self.flights:
            if flight.file and come.get(flight.file.name, 0) > self.come.get(flight.file.name, 0):
                self.board.moves(flight.supply, now)
                flight.moved = now
        self.come = come
        left = sum(max(0, file.size - come.get(name, 0)) for name, file in self.todo.items())
        whole = len(self.work.pending) - len(self.todo)
        facts = self.progress.at(now, done=self.progress.total - left, files_done=whole)
        place = self.puller.partial / PROGRESS
        place.with_suffix(".new").write_text(json.dumps(facts))
        place.with_suffix(".new").rename(place)
        self.progress_at = now + PROGRESS_SECONDS


def _find_owner(name: str | None) -> tuple[int, int] | None:
    if name is None:
        return None
    try:
        found = pwd.getpwnam(name)
    except KeyError as error:
        raise Hy3Error(f"The owner {name!r} is no user of this node; make that user, or name another.") from error
    return found.pw_uid, found.pw_gid
