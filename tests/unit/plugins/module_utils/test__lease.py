# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._lease import (
    Held,
    Lease,
    LeaseFile,
    in_the_way,
    parse,
    taken_over,
)

OTHER = Lease("desk:1:1", "ann@desk, process 1", since=1000, until=2000)

IN_THE_WAY: list[tuple[Lease | None, str, int, bool]] = [
    (None, "me", 1500, False),
    (OTHER, "me", 1500, True),
    (OTHER, "me", 2000, False),
    (OTHER, OTHER.holder, 1500, False),
]


@pytest.mark.parametrize(("found", "holder", "now", "expected"), IN_THE_WAY, ids=["free", "held", "expired", "our own"])
def test_in_the_way(found: Lease | None, holder: str, now: int, expected: bool) -> None:
    assert in_the_way(found, holder=holder, now=now) == expected


BROKEN = [
    *("", "{", "[]", "{}", '{"holder": 1}'),
    *(json.dumps(asdict(OTHER) | wrong) for wrong in ({"more": 1}, {"until": "2000"}, {"who": None})),
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_protects_nobody(text: str) -> None:
    assert parse(text) is None


EXPIRED = (
    "the cluster over from ann@desk, process 1, which has worked on it since 1970-01-01 00:16:40 UTC and did not renew "
    "its lease, which expired at 1970-01-01 00:33:20 UTC; whether it still runs cannot be seen from here: if it does, "
    "end it."
)
# (dead, write): what is said
TAKEN_OVER: dict[tuple[str, bool], str] = {
    ("", True): f"Took {EXPIRED}",
    ("desk:2:2", False): f"Would take {EXPIRED}",
    (OTHER.holder, True): "Took the cluster over from ann@desk, process 1, which ended without giving it back.",
}


@pytest.mark.parametrize(("dead", "write"), TAKEN_OVER, ids=["expired", "another is dead", "dead"])
def test_what_is_known_is_said(dead: str, write: bool) -> None:
    assert taken_over(OTHER, dead=dead, write=write) == TAKEN_OVER[dead, write]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(tmp_path: Path, clock: Clock) -> LeaseFile:
    return LeaseFile(str(tmp_path / "run/lease.json"), clock=clock)


def take(lease: LeaseFile, who: str, *, ttl: int = 100, dead: str = "", write: bool = True) -> Lease | None:
    return lease.take(holder=f"{who}:1:1", who=f"{who}, process 1", ttl=ttl, dead=dead, write=write)


def on_disk(tmp_path: Path) -> Lease | None:
    path = tmp_path / "run/lease.json"
    return parse(path.read_text()) if path.exists() else None


def test_renewed_lease_keeps_its_beginning(lease: LeaseFile, clock: Clock, tmp_path: Path) -> None:
    assert take(lease, "ann") is None
    clock.now = 1090
    assert take(lease, "ann") is None
    assert on_disk(tmp_path) == Lease("ann:1:1", "ann, process 1", since=1000, until=1190)


def test_second_play_is_told_who_the_first_is(lease: LeaseFile, clock: Clock) -> None:
    take(lease, "ann")
    clock.now = 1050
    with pytest.raises(Held, match="ann, process 1 has worked on this cluster since 1970-01-01 00:16:40 UTC"):
        take(lease, "bob")


def test_expired_and_dead_leases_are_taken_over_and_named(lease: LeaseFile, clock: Clock) -> None:
    take(lease, "ann")
    clock.now = 1100
    before = take(lease, "bob")
    assert before is not None and before.who == "ann, process 1"
    before = take(lease, "eve", dead="bob:1:1")
    assert before is not None and before.who == "bob, process 1"
    with pytest.raises(Held):
        take(lease, "ann", dead="bob:1:1")


def test_only_the_holder_gives_it_back(lease: LeaseFile, tmp_path: Path) -> None:
    take(lease, "ann")
    assert not lease.give_back(holder="bob:1:1")
    assert on_disk(tmp_path) is not None
    assert lease.give_back(holder="ann:1:1")
    assert on_disk(tmp_path) is None
    assert not lease.give_back(holder="ann:1:1")


def test_check_mode_refuses_and_writes_nothing(lease: LeaseFile, tmp_path: Path) -> None:
    assert take(lease, "ann", write=False) is None
    assert not (tmp_path / "run").exists()
    take(lease, "ann")
    with pytest.raises(Held):
        take(lease, "bob", write=False)
    assert lease.give_back(holder="ann:1:1", write=False)
    assert on_disk(tmp_path) is not None
