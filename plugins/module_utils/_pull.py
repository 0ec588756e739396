# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which files of a manifest a node pulls, in which order, and from which of several sources. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import CONFIG, INDEX, is_inside, is_small
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import File
from ansible_collections.sparks.hy3.plugins.module_utils._pull_rsync import Said, Source

# Below the checkpoint. Hidden, so that no manifest lists it and no daemon shows it.
PARTIAL = ".hy3-pull"
# Seconds between two looks at a source that lacks something, and at one that does not answer.
LOOK_SECONDS, RETRY_SECONDS = 0.5, 3.0


# ---- What to pull


def check_manifest(files: Sequence[File]) -> None:
    """Raise Hy3Error for a name that is no file of a checkpoint, is there twice, or should be there."""
    seen: set[str] = set()
    for file in files:
        hidden = any(part.startswith(".") for part in file.name.split("/"))
        if hidden or file.size < 0 or not is_inside(file.name):
            raise Hy3Error(
                f"The manifest has {file.name!r} with {file.size} bytes, which is no file of a checkpoint (hidden ones "
                "are none); give what checkpoint_info returns as files."
            )
        if file.name in seen:
            raise Hy3Error(f"The manifest has {file.name!r} twice; give what checkpoint_info returns as files.")
        seen.add(file.name)
    if CONFIG not in seen:
        raise Hy3Error(f"The manifest has no {CONFIG}, which every checkpoint has; give what checkpoint_info returns.")


def in_order(files: Iterable[File]) -> list[File]:
    """The order on every node of a chain: the largest first, index and configuration last.

    Without its configuration no engine loads a tree, so one that lacks something never looks whole.
    """
    last = {INDEX: 1, CONFIG: 2}
    return sorted(files, key=lambda file: (last.get(file.name, 0), -file.size, file.name))


def differing(manifest: Sequence[File], found: Mapping[str, File]) -> list[File]:
    """The files to pull, in order, where ``found`` is what is there, hashed. With any other, the configuration too."""
    pending = [file for file in manifest if not agrees(file, found.get(file.name))]
    config = [file for file in manifest if file.name == CONFIG and file not in pending]
    return in_order(pending + config) if pending else []


def agrees(want: File, have: File | None) -> bool:
    """Whether a file is the manifest's; by its size alone where the manifest has no hash."""
    if have is None or have.size != want.size:
        return False
    return want.sha256 is None or want.sha256.lower() == have.sha256


def surplus(names: Iterable[str], manifest: Sequence[File]) -> list[str]:
    """Names at the top of a checkpoint that engines read and the manifest lacks: with them it is another checkpoint."""
    wanted = {file.name for file in manifest}
    return sorted(name for name in names if is_small(name) and name not in wanted)


def needed_bytes(pending: Sequence[File], *, replaced: Iterable[int], partial: int, streams: int) -> int:
    """Bytes of free space that pulling takes at its peak.

    Args:
        pending: The files to pull.
        replaced: Sizes of the files that they take the place of, each freed once its successor is whole.
        partial: Bytes that are here from a run that was interrupted.
        streams: How many files come at once.
    """
    old = sorted(replaced, reverse=True)
    return max(0, sum(file.size for file in pending) - partial - sum(old[streams:]))


# ---- Which source


@dataclass(eq=False)
class Supply:
    """What this node knows of one source. Times are seconds of one clock.

    ``ready`` are the pending files that it has in the right size, ``refused`` those it failed to give, ``moved`` is
    when it last answered with something new; ``trouble`` is why it is not asked now, ``denied`` that it will not mend.
    """

    source: Source
    moved: float
    ready: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    trouble: str = ""
    denied: bool = False
    look_at: float = 0.0
    given: int = 0


class Board:
    """Decides where each file comes from. The last source is the one that the manifest is of."""

    def __init__(self, sources: Sequence[Source], *, timeout: float, now: float) -> None:
        self.supplies = [Supply(source, now) for source in sources]
        self.timeout = timeout

    def due(self, pending: Collection[str], now: float) -> list[Supply]:
        """The sources to look at: those that lack something or do not answer, each after a while."""
        return [
            supply
            for supply in self.supplies
            if now >= supply.look_at
            and not supply.denied
            and (supply.trouble or any(name not in supply.ready | supply.refused for name in pending))
        ]

    def listed(self, supply: Supply, sizes: Mapping[str, int], pending: Sequence[File], now: float) -> None:
        """Take note of a look. Raises Hy3Error when the last source no longer has what the manifest says."""
        ready = {file.name for file in pending if sizes.get(file.name) == file.size} - supply.refused
        if supply is self.supplies[-1]:
            for file in pending:
                if file.name not in ready:
                    found = f"{sizes[file.name]} bytes" if file.name in sizes else "no such file"
                    raise Hy3Error(_changed(file, supply.source, f"it has {found} there, not {file.size} bytes"))
        # A source that failed is as one that had nothing. Of one that had nothing new, only something new counts.
        if ready - supply.ready:
            supply.moved = now
            supply.trouble = ""
        supply.ready = ready
        supply.look_at = now + LOOK_SECONDS

    def failed(self, supply: Supply, said: Said, now: float) -> None:
        """Take note that a source does not answer."""
        supply.trouble, supply.denied = said.text, said.kind == "denied"
        supply.ready.clear()
        supply.look_at = now + RETRY_SECONDS

    def moves(self, supply: Supply, now: float) -> None:
        """Take note that a source sends."""
        supply.moved = now

    def refuse(self, supply: Supply, file: File, why: str) -> None:
        """Take no more of this file from there. Raises Hy3Error if there is no other place for it."""
        supply.refused.add(file.name)
        if supply is self.supplies[-1]:
            raise Hy3Error(_changed(file, supply.source, why))

    def choose(self, pending: Sequence[str], now: float) -> tuple[str, Supply] | None:
        """The next file to pull and its source; None while there is nothing to do but wait.

        A file waits for the first source that lives, even if a later one has it: its link has others to feed.
        """
        for name in pending:
            for supply in self.supplies:
                if supply.trouble or name in supply.refused:
                    continue
                if name in supply.ready:
                    return name, supply
                if now - supply.moved <= self.timeout:
                    break
                supply.trouble = f"it has shown nothing new for {self.timeout:g} s"
        return None

    def check_hope(self, now: float) -> None:
        """Raise Hy3Error when no source has answered for so long that none will."""
        supplies = self.supplies
        if not all(supply.trouble for supply in supplies):
            return
        if all(supply.denied for supply in supplies) or now - max(s.moved for s in supplies) > self.timeout:
            said = "; ".join(f"{supply.source.name}: {supply.trouble}" for supply in supplies)
            raise Hy3Error(
                f"No source can be pulled from ({said}); see that the daemons there run and the fabric's links are up, "
                "and run again: only the rest is pulled."
            )

    def passed_over(self) -> list[tuple[str, str]]:
        """Name and reason of each source that is passed over now."""
        return [(supply.source.name, supply.trouble) for supply in self.supplies if supply.trouble]


def _changed(file: File, source: Source, why: str) -> str:
    return (
        f"{file.name} on {source.name} is not the manifest's ({why}): it is damaged or was changed since; see to it "
        "there and run again, and only the rest is pulled."
    )
