# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Who deploys a cluster now: a small file on its head, so that two plays do not work on one cluster at once."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
import typing as t
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error


@dataclass(frozen=True)
class Lease:
    """``holder`` identifies one run of one play, ``who`` says it to a person; times are Unix seconds of the head."""

    holder: str
    who: str
    since: int
    until: int


class Held(Hy3Error):
    """Another play holds the lease."""

    def __init__(self, lease: Lease, path: Path) -> None:
        self.lease = lease
        super().__init__(
            f"{lease.who} has worked on this cluster since {_clock(lease.since)} and holds it until "
            f"{_clock(lease.until)}, and two plays must not at once: wait, or end it and remove {path} on the head"
        )


def parse(text: str) -> Lease | None:
    """The lease in ``text``, or None if it is none: a broken file protects nobody."""
    try:
        lease = Lease(**json.loads(text))
    except (ValueError, TypeError):
        return None
    said = isinstance(lease.holder, str) and isinstance(lease.who, str)
    return lease if said and isinstance(lease.since, int) and isinstance(lease.until, int) else None


def in_the_way(found: Lease | None, *, holder: str, now: int) -> bool:
    """Whether ``found`` belongs to somebody else and has not expired."""
    return found is not None and found.holder != holder and found.until > now


def next_lease(found: Lease | None, *, holder: str, who: str, now: int, ttl: int) -> Lease:
    """The lease of ``holder`` for another ``ttl`` seconds; it keeps its beginning when it is renewed."""
    since = found.since if found is not None and found.holder == holder else now
    return Lease(holder, who, since, now + ttl)


def taken_over(before: Lease, *, dead: str, write: bool) -> str:
    """What is known of a lease that had to give way: its play has ended, or it was not renewed and may still run."""
    said = f"{'Took' if write else 'Would take'} the cluster over from {before.who}, which "
    if before.holder == dead:
        return f"{said}ended without giving it back."
    return (
        f"{said}has worked on it since {_clock(before.since)} and did not renew its lease, which expired at "
        f"{_clock(before.until)}; whether it still runs cannot be seen from here: if it does, end it."
    )


class LeaseFile:
    """The file on the head. A lock beside it makes look-and-write one step."""

    def __init__(self, path: str, *, clock: t.Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock

    def take(self, *, holder: str, who: str, ttl: int, dead: str = "", write: bool = True) -> Lease | None:
        """Take or renew the lease; return the one of somebody else that had to give way, or None.

        ``dead`` is a holder that is known to have ended. Raises :class:`Held` if another one is in the way.
        """
        with self._locked(write) as found:
            now = int(self._clock())
            if in_the_way(found, holder=holder, now=now) and t.cast(Lease, found).holder != dead:
                raise Held(t.cast(Lease, found), self._path)
            if write:
                self._write(next_lease(found, holder=holder, who=who, now=now, ttl=ttl))
            return found if found is not None and found.holder != holder else None

    def give_back(self, *, holder: str, write: bool = True) -> bool:
        """Remove the lease if it is the holder's; whether it was."""
        with self._locked(write) as found:
            ours = found is not None and found.holder == holder
            if ours and write:
                self._path.unlink()
            return ours

    @contextmanager
    def _locked(self, write: bool) -> Iterator[Lease | None]:
        if not write:
            yield self._read()
            return
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open(self._path.with_suffix(".lock"), "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._read()

    def _read(self) -> Lease | None:
        try:
            return parse(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def _write(self, lease: Lease) -> None:
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".lease.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(lease), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, self._path)


def _clock(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
