# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One fault after the other: it strikes, somebody notices, the user asks, its cause ends, and `serve-hy3` converges.

What is right does not depend on whether anything restarts by itself: where it does, the next run finds nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ansible_collections.sparks.hy3.tests.faults import output, state
from ansible_collections.sparks.hy3.tests.faults.table import Row

# Seconds. A question that takes longer is one without an answer; a busy machine of two cores takes two.
PATIENCE = 8.0
# How long nobody may notice a fault, and how long to look whether anybody does where nobody has to.
UNNOTICED, SILENCE = 150.0, 15.0
# How long everything must rest to say that nothing comes back, and how long something may take to.
REST, RETURN = 6.0, 300.0
STEP = 1.0


class Played(Protocol):
    @property
    def succeeded(self) -> bool: ...
    @property
    def output(self) -> str: ...


class Cluster(Protocol):
    """What :class:`nodes.Lab` is."""

    @property
    def head(self) -> str: ...
    def answers(self, patience: float) -> bool: ...
    def units(self) -> Mapping[str, Mapping[str, state.Unit]]: ...
    def play(self, playbook: str) -> Played: ...
    def look(self) -> Mapping[str, state.Node]: ...
    def keep(self) -> Mapping[str, state.Node]: ...
    def source(self) -> Mapping[str, str]: ...


def nothing() -> None:
    """A kill has no cause that lasts."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    ``inject`` calls what it is given when it strikes, and may return what a play said meanwhile. ``ask`` is the
    playbook with which the user looks, and ``says`` what must be in its words; without one, in those of ``inject`` or
    of the next `serve-hy3`. ``mend`` ends the cause, after ``lasts`` seconds at least; ``ask_afterwards`` asks only
    then. A ``silent`` one may go unnoticed; where not ``watched`` there is nothing to notice, for the user did it. A
    ``rider`` is expected to leave the engine running: then the next fault strikes the same start, and one `serve-hy3`
    speaks for both.
    """

    name: str
    inject: Callable[[Callable[[], None]], str | None]
    says: str
    ask: str = "status-hy3"
    mend: Callable[[], None] = nothing
    lasts: float = 0.0
    ask_afterwards: bool = False
    silent: bool = False
    watched: bool = True
    rider: bool = False


def end_of(said: str) -> str:
    """The summary of a play, or else the end of its output."""
    return " ".join(output.summary(said)) or output.one_line(said)[-600:]


class Suite:
    """Runs faults on one cluster and keeps a row of each."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.cluster, self.clock, self.sleep = cluster, clock, sleep
        self.rows: list[Row] = []
        self.began = clock()
        self._before = cluster.keep()
        self._starts: list[str] = []
        self._open: list[Row] = []

    @property
    def seconds(self) -> float:
        return self.clock() - self.began

    def strike(self, fault: Fault) -> list[str]:
        """Run one fault, and `serve-hy3` unless the next one does; what was not right, of this and what it ends."""
        if fault.watched and not self.cluster.answers(PATIENCE):
            problems = self.converge()  # what a test before left
            assert not problems, problems
        row = Row(fault.name, start=self._start() if fault.watched else 0, watched=fault.watched)
        self.rows.append(row)
        self._open.append(row)
        self._let_strike(fault, row)
        row.start = row.start or self._start()  # the one that it struck on the way up
        found = list(row.problems)
        if not (fault.rider and row.back_s is not None):
            found += self.converge(fault)
        return found

    def finish(self) -> None:
        """Run `serve-hy3` for faults whose turn it was left to."""
        if self._open:
            self.converge()

    def converge(self, fault: Fault | None = None) -> list[str]:
        """Run `serve-hy3` until it changes nothing, twice at most, and see what was lost; what was not right."""
        began = self.clock()
        problems: list[str] = []
        first = self.cluster.play("serve-hy3")
        took = self.clock() - began
        changes = self._changes(first, problems)
        if changes and self._changes(self.cluster.play("serve-hy3"), problems):
            problems.append("A further serve-hy3 changed something.")
        if not problems:
            problems += state.lost(self._before, self.cluster.look(), self.cluster.source(), self.cluster.head)
        for row in self._open:
            row.converged_s, row.changes = took, changes
            row.problems += problems
        if fault and not fault.ask and not self._open[-1].said:
            problems += self._read(fault, self._open[-1], "serve-hy3", first.output)
        self._open = []
        return problems

    def _let_strike(self, fault: Fault, row: Row) -> None:
        struck = self.clock()

        def strikes() -> None:
            nonlocal struck
            struck = self.clock()

        try:
            if heard := fault.inject(strikes):
                self._read(fault, row, "serve-hy3", heard)
            if fault.watched:
                self._notice(fault, row, struck)
            if fault.ask and not fault.ask_afterwards:
                self._ask(fault, row)
            self.sleep(max(0.0, struck + fault.lasts - self.clock()))
        finally:
            ended = struck if fault.mend is nothing else self.clock()
            fault.mend()
        row.back_s = self._await_answer(ended)
        if fault.ask and fault.ask_afterwards:
            self._ask(fault, row)

    def _notice(self, fault: Fault, row: Row, struck: float) -> None:
        """Ask until no answer comes. systemd may have been earlier, or the only one."""
        limit = min(SILENCE, fault.lasts or SILENCE) if fault.silent else UNNOTICED
        while row.noticed_s is None and self.clock() - struck < limit:
            if self.cluster.answers(PATIENCE):
                self.sleep(STEP)
            else:
                row.noticed_s, row.noticed_by = self.clock() - struck, "a question without an answer"
        end = state.first_end(self.cluster.units(), struck)
        if end and (row.noticed_s is None or end[0] - struck < row.noticed_s):
            row.noticed_s, row.noticed_by = end[0] - struck, f"{end[1]} ended"
        if row.noticed_s is None and not fault.silent:
            row.problems.append(f"Nobody noticed it for {limit:.0f} s.")

    def _ask(self, fault: Fault, row: Row) -> None:
        self._read(fault, row, fault.ask, self.cluster.play(fault.ask).output)

    @staticmethod
    def _read(fault: Fault, row: Row, playbook: str, said: str) -> list[str]:
        """Enter what the user reads; what is wrong with it."""
        found = output.sentence(said, fault.says)
        if found is None:
            wrong = [f"{playbook} said nothing like {fault.says!r} but: {end_of(said)}"]
            row.problems += wrong
            return wrong
        row.said_by, row.said = playbook, ". ".join(filter(None, [found, output.cause(said)]))
        return []

    def _await_answer(self, since: float) -> float | None:
        """Seconds until it answers again by itself, or None once everything rests or for too long nothing came."""
        resting: float | None = None
        while self.clock() - since < RETURN:
            if self.cluster.answers(PATIENCE):
                return self.clock() - since
            if not state.is_down(self.cluster.units(), self.cluster.head):
                resting = None
            elif resting is None:
                resting = self.clock()
            elif self.clock() - resting >= REST:
                return None
            self.sleep(STEP)
        return None

    @staticmethod
    def _changes(played: Played, problems: list[str]) -> int:
        if not played.succeeded or "-> Paris." not in played.output:
            problems.append(f"serve-hy3 did not serve: {end_of(played.output)}")
            return 0
        return output.changes(played.output)

    def _start(self) -> int:
        """The number of the engine's current start among those that were struck."""
        serve = self.cluster.units().get(self.cluster.head, {}).get("hy3-serve.service")
        invocation = serve.invocation if serve else ""
        if invocation not in self._starts:
            self._starts.append(invocation)
        return self._starts.index(invocation) + 1
