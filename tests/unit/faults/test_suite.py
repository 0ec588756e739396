# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The order of events when a fault strikes: on a cluster of words, with a clock of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from ansible_collections.sparks.hy3.tests.faults import state, table
from ansible_collections.sparks.hy3.tests.faults.suite import REST, RETURN, UNNOTICED, Fault, Suite
from ansible_collections.sparks.hy3.tests.faults.table import Results
from ansible_collections.sparks.hy3.tests.unit.faults.said import RECAP, REFUSED, SOURCE, STATUS, whole

SERVED = "\n    msg:\n    - '  capital of France? one word -> Paris. (stop, 15 tokens)'\n"


@dataclass
class Simulated:
    """A cluster that ends when it is struck. ``returns`` seconds later it answers again, if it ever does by itself."""

    returns: float | None = None
    converges: bool = True
    loses: bool = False
    answer: str = SERVED
    hangs: bool = False
    now: float = 1000.0
    struck: float | None = None
    starts: int = 1
    plays: list[str] = field(default_factory=list)
    head: str = "spark-1"

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def strike(self, strikes: Callable[[], None]) -> None:
        self.now += 2.0  # what it takes to find the process
        strikes()
        self.struck = self.now

    def ride(self, strikes: Callable[[], None]) -> None:
        strikes()

    def down(self) -> bool:
        back = self.returns is not None and self.struck is not None and self.now - self.struck >= self.returns
        if back:
            self.struck, self.starts = None, self.starts + 1
        return self.struck is not None

    def answers(self, patience: float) -> bool:
        self.now += 1.0
        return not self.down()

    def units(self) -> dict[str, dict[str, state.Unit]]:
        self.now += 0.5
        left = (self.struck or 0) + 0.25 if self.struck else 0.0
        active = "active" if not self.down() or self.hangs else "failed" if self.returns is None else "activating"
        unit = state.Unit("hy3-serve.service", active, invocation=str(self.starts), left_s=left)
        return {"spark-1": {unit.name: unit}, "spark-2": {}}

    def play(self, playbook: str) -> Played:
        self.plays.append(playbook)
        self.now += 12.0
        if playbook == "status-hy3":
            return Played(True, STATUS)
        if not self.converges:
            return Played(False, REFUSED)
        changed = 5 if self.down() else 0
        self.starts += bool(changed)
        self.struck = None
        return Played(True, self.answer + RECAP.format(changed, 0))

    def look(self) -> dict[str, state.Node]:
        after = whole()
        if self.loses:
            after["spark-1"].kept.clear()
        return after

    def keep(self) -> dict[str, state.Node]:
        return whole()

    def source(self) -> dict[str, str]:
        return SOURCE


@dataclass
class Played:
    """A playbook that ran to its end."""

    succeeded: bool
    output: str


def suite_of(cluster: Simulated) -> Suite:
    return Suite(cluster, clock=cluster.clock, sleep=cluster.sleep)


def killed(cluster: Simulated) -> Fault:
    return Fault("killed", cluster.strike, says="Hy3 does not answer")


def test_nothing_restarts_by_itself() -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    assert suite.strike(killed(cluster)) == []
    (row,) = suite.rows
    assert (row.noticed_s, row.noticed_by) == (0.25, "hy3-serve.service of spark-1 ended")
    assert row.said.startswith("Hy3 does not answer at http://127.0.0.1:8000/v1 on spark-1. A worker or the engine")
    assert row.back_s is None
    assert (row.changes, row.start, row.problems) == (5, 1, [])
    assert cluster.plays == ["status-hy3", "serve-hy3", "serve-hy3"]


def test_it_comes_back_by_itself() -> None:
    cluster = Simulated(returns=50.0)
    suite = suite_of(cluster)
    assert suite.strike(killed(cluster)) == []
    (row,) = suite.rows
    assert row.back_s is not None and 50 <= row.back_s < 55
    assert row.changes == 0
    assert cluster.plays == ["status-hy3", "serve-hy3"], "what changes nothing need not be run again"
    assert suite.strike(killed(cluster)) == []
    assert [row.start for row in suite.rows] == [1, 2]


def test_something_that_hangs_is_given_up() -> None:
    cluster = Simulated(hangs=True)
    suite = suite_of(cluster)
    began = cluster.now
    assert suite.strike(killed(cluster)) == []
    assert suite.rows[0].back_s is None
    assert RETURN < cluster.now - began < RETURN + 60


def test_what_rests_is_given_up_soon() -> None:
    cluster = Simulated()
    began = cluster.now
    suite_of(cluster).strike(killed(cluster))
    plays = 12.0 * len(cluster.plays)
    assert REST < cluster.now - began - plays < REST + 15


def test_a_rider_shares_its_start_and_its_next_run() -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    mended: list[float] = []
    rider = Fault(
        "link", cluster.ride, says="Hy3 does not answer", mend=lambda: mended.append(cluster.now), lasts=10.0,
        ask_afterwards=True, silent=True, rider=True,
    )  # fmt: skip
    began = cluster.now
    assert suite.strike(rider) == []
    assert 10.0 <= mended[0] - began < 14.0
    assert suite.rows[0].converged_s is None
    assert suite.rows[0].noticed_s is None
    assert cluster.plays == ["status-hy3"]
    assert suite.strike(killed(cluster)) == []
    assert [row.start for row in suite.rows] == [1, 1]
    assert {row.converged_s for row in suite.rows} == {12.0}
    suite.strike(rider)
    suite.finish()
    assert suite.rows[2].converged_s == 12.0


def test_a_cause_lasts_as_long_as_it_must() -> None:
    cluster = Simulated()
    ended: list[float] = []
    fault = dataclasses.replace(killed(cluster), mend=lambda: ended.append(cluster.now), lasts=100.0)
    began = cluster.now + 2.0
    suite_of(cluster).strike(fault)
    assert 100.0 <= ended[0] - began < 105.0


def test_a_rider_that_takes_the_engine_with_it_converges_at_once() -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    assert suite.strike(dataclasses.replace(killed(cluster), rider=True)) == []
    assert suite.rows[0].converged_s == 12.0


def test_a_cluster_that_does_not_answer_is_served_first() -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    cluster.struck = cluster.now
    suite.strike(killed(cluster))
    assert cluster.plays == ["serve-hy3", "serve-hy3", "status-hy3", "serve-hy3", "serve-hy3"]


def test_what_the_user_did_is_not_noticed_and_the_next_run_says_it() -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    fault = Fault("play killed", cluster.strike, says="capital of France", ask="", watched=False)
    assert suite.strike(fault) == []
    (row,) = suite.rows
    assert (row.noticed_s, row.said_by, row.start) == (None, "serve-hy3", 1)
    assert table.noticed(row) == "-"


def test_its_cause_ends_also_where_the_strike_fails() -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    mended: list[str] = []

    def fails(strikes: Callable[[], None]) -> None:
        raise AssertionError("no such process")

    with pytest.raises(AssertionError, match="no such process"):
        suite.strike(Fault("x", fails, says="", mend=lambda: mended.append("mended")))
    assert mended == ["mended"]


def unnoticed(cluster: Simulated) -> Fault:
    return Fault("x", cluster.ride, says="Hy3 does not answer")


def unheard(cluster: Simulated) -> Fault:
    return Fault("x", cluster.strike, says="Everything is fine")


def loses(cluster: Simulated) -> Fault:
    cluster.loses = True
    return killed(cluster)


def is_mute(cluster: Simulated) -> Fault:
    cluster.answer = "no line about an answer"
    return killed(cluster)


def refuses(cluster: Simulated) -> Fault:
    cluster.converges = False
    return killed(cluster)


WRONG: dict[str, tuple[Callable[[Simulated], Fault], str]] = {
    "nobody notices": (unnoticed, f"Nobody noticed it for {UNNOTICED:.0f} s."),
    "another sentence": (unheard, "status-hy3 said nothing like 'Everything is fine' but: Hy3 does not answer"),
    "a file is lost": (loses, "spark-1: home/lab/mine is gone."),
    "the next run has no answer": (is_mute, "serve-hy3 did not serve: no line about an answer"),
    "the next run refuses": (refuses, 'serve-hy3 did not serve: FAILED: spark-2, task "Refuse a node'),
}


@pytest.mark.parametrize(("make", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_in_test_and_table(make: Callable[[Simulated], Fault], sentence: str) -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    (problem,) = suite.strike(make(cluster))
    assert problem.startswith(sentence)
    assert sentence in table.text(Results("2026-12-01", 1.0, suite.rows))


def test_a_further_run_that_changes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Simulated()
    suite = suite_of(cluster)
    restless = Played(True, SERVED + RECAP.format(0, 1))
    monkeypatch.setattr(cluster, "play", lambda playbook: Played(True, STATUS) if "status" in playbook else restless)
    assert suite.strike(killed(cluster)) == ["A further serve-hy3 changed something."]
