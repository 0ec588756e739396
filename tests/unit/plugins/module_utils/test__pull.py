# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is pulled, in which order, and from which source, as tables and with a clock of the test's own."""

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._manifest import File
from ansible_collections.sparks.hy3.plugins.module_utils._pull import (
    Board,
    agrees,
    check_manifest,
    differing,
    in_order,
    needed_bytes,
    surplus,
)
from ansible_collections.sparks.hy3.plugins.module_utils._pull_rsync import Said, Source

A, B = "a" * 64, "b" * 64
CONFIG, INDEX = File("config.json", 5, A), File("model.safetensors.index.json", 50, A)
ONE, TWO = File("m1.safetensors", 100, A), File("m2.safetensors", 200, A)
TREE = [CONFIG, INDEX, ONE, TWO]
SIZES = {file.name: file.size for file in TREE}
NAMES = [TWO.name, ONE.name]


@pytest.mark.parametrize(
    ("want", "have", "expected"),
    [
        (File("x", 1, A), None, False),
        (File("x", 1, A), File("x", 2, A), False),
        (File("x", 1, A), File("x", 1, B), False),
        (File("x", 1, A), File("x", 1, None), False),
        (File("x", 1, A.upper()), File("x", 1, A), True),
        (File("x", 1, None), File("x", 1, B), True),
        (File("x", 1, None), File("x", 2, B), False),
    ],
)
def test_agrees(*, want: File, have: File | None, expected: bool) -> None:
    assert agrees(want, have) is expected


def test_order_is_the_same_everywhere_and_ends_with_what_makes_it_loadable() -> None:
    assert in_order(TREE) == in_order(reversed(TREE)) == [TWO, ONE, INDEX, CONFIG]
    equal = [File(name, 7) for name in ("b", "a")]
    assert [file.name for file in in_order(equal)] == ["a", "b"]


def test_the_configuration_is_written_again_with_any_other_file() -> None:
    whole = {file.name: file for file in TREE}
    assert differing(TREE, whole) == []
    assert differing(TREE, {**whole, ONE.name: File(ONE.name, 100, B)}) == [ONE, CONFIG]
    assert differing(TREE, {**whole, CONFIG.name: File(CONFIG.name, 5, B)}) == [CONFIG]


def test_surplus_is_what_engines_read() -> None:
    names = ["config.json", "added_tokens.json", "x.jinja", "modeling.py", "merges.txt"]
    names += ["NOTES.md", "other.safetensors", "x.bin", ".hidden.json"]
    assert surplus(names, TREE) == ["added_tokens.json", "merges.txt", "modeling.py", "x.jinja"]


@pytest.mark.parametrize(
    ("replaced", "partial", "streams", "expected"),
    [
        ([], 0, 4, 355),
        ([], 100, 4, 255),
        # The old ones are there until the new ones are whole, as many at once as there are streams.
        ([200, 100], 0, 1, 255),
        ([200, 100], 0, 2, 355),
        ([200, 100, 50, 5, 1000], 0, 1, 0),
    ],
)
def test_needed_bytes(*, replaced: list[int], partial: int, streams: int, expected: int) -> None:
    assert needed_bytes(TREE, replaced=replaced, partial=partial, streams=streams) == expected


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", ".hy3-pull/files/x", "a/.b", "x\0y", "a" * 256]
)
def test_names_that_are_no_files(name: str) -> None:
    with pytest.raises(Hy3Error, match="which is no file of a checkpoint"):
        check_manifest([CONFIG, File(name, 1)])


def test_other_manifests_that_are_none() -> None:
    with pytest.raises(Hy3Error, match="with -1 bytes"):
        check_manifest([CONFIG, File("x", -1)])
    with pytest.raises(Hy3Error, match="'config.json' twice"):
        check_manifest([CONFIG, CONFIG])
    with pytest.raises(Hy3Error, match="has no config.json"):
        check_manifest([ONE])
    check_manifest(TREE)


# ---- Sources

DEAD = Said("source", "Connection refused")


def board(*names: str, timeout: float = 10) -> Board:
    return Board([Source(name, "192.0.2.1", 1) for name in names], timeout=timeout, now=0)


def chosen(places: Board, now: float, names: list[str] | None = None) -> tuple[str, str] | None:
    choice = places.choose(names or NAMES, now)
    return (choice[0], choice[1].source.name) if choice else None


def test_a_file_waits_for_the_nearest_source() -> None:
    places = board("middle", "head")
    middle, head = places.supplies
    assert places.due(NAMES, 0) == [middle, head]
    places.listed(head, SIZES, TREE, 1)
    places.listed(middle, {}, TREE, 1)
    assert chosen(places, 1) is None
    # Only the one that lacks something is asked again, and not at once.
    assert places.due(NAMES, 1.1) == []
    assert places.due(NAMES, 2) == [middle]
    places.listed(middle, {ONE.name: 100, TWO.name: 150}, TREE, 2)
    assert chosen(places, 2) == (ONE.name, "middle")


def test_a_source_that_does_not_answer_is_passed_over_until_it_does() -> None:
    places = board("middle", "head")
    middle, head = places.supplies
    places.listed(middle, SIZES, TREE, 1)
    places.listed(head, SIZES, TREE, 1)
    assert chosen(places, 1) == (TWO.name, "middle")
    places.failed(middle, DEAD, 2)
    assert chosen(places, 2) == (TWO.name, "head")
    assert places.passed_over() == [("middle", "Connection refused")]
    assert places.due(NAMES, 3) == []
    assert places.due(NAMES, 6) == [middle]
    # It answers, and has nothing: that is no reason to wait for it.
    places.listed(middle, {}, TREE, 6)
    assert chosen(places, 6) == (TWO.name, "head")
    places.listed(middle, SIZES, TREE, 7)
    assert chosen(places, 7) == (TWO.name, "middle")
    assert places.passed_over() == []


def test_a_source_that_shows_nothing_new_is_passed_over() -> None:
    places = board("middle", "head")
    middle, head = places.supplies
    places.listed(head, SIZES, TREE, 0)
    places.listed(middle, {CONFIG.name: 5}, TREE, 0)
    places.moves(middle, 3)
    assert chosen(places, 12) is None
    assert chosen(places, 14) == (TWO.name, "head")
    assert places.passed_over() == [("middle", "it has shown nothing new for 10 s")]
    # What it had before is nothing new.
    places.listed(middle, {CONFIG.name: 5}, TREE, 15)
    assert chosen(places, 15) == (TWO.name, "head")
    places.listed(middle, {CONFIG.name: 5, TWO.name: 200}, TREE, 16)
    assert chosen(places, 16) == (TWO.name, "middle")


def test_a_file_that_was_wrong_is_taken_from_the_next() -> None:
    places = board("far", "middle", "head")
    for supply in places.supplies:
        places.listed(supply, SIZES, TREE, 0)
    places.refuse(places.supplies[0], TWO, "its sha256 is b")
    assert chosen(places, 1) == (TWO.name, "middle")
    places.listed(places.supplies[0], SIZES, TREE, 1)
    assert chosen(places, 1) == (TWO.name, "middle")
    assert chosen(places, 1, [ONE.name]) == (ONE.name, "far")
    with pytest.raises(Hy3Error, match=r"^m2.safetensors on head is not the manifest's \(its sha256 is b\)"):
        places.refuse(places.supplies[2], TWO, "its sha256 is b")


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({**SIZES, ONE.name: 99}, "it has 99 bytes there, not 100"),
        ({TWO.name: 200}, "it has no such file there, not 5"),
    ],
)
def test_the_last_source_must_have_what_the_manifest_says(sizes: dict[str, int], why: str) -> None:
    places = board("middle", "head")
    places.listed(places.supplies[0], sizes, TREE, 0)
    with pytest.raises(Hy3Error, match=why):
        places.listed(places.supplies[1], sizes, TREE, 0)


def test_hope_ends_when_nobody_was_of_use_for_long() -> None:
    places = board("middle", "head")
    middle, head = places.supplies
    places.failed(middle, DEAD, 1)
    places.check_hope(100)
    places.moves(head, 95)
    places.failed(head, DEAD, 100)
    places.check_hope(104)
    with pytest.raises(Hy3Error, match=r"\(middle: Connection refused; head: Connection refused\)"):
        places.check_hope(106)


def test_hope_ends_at_once_when_nobody_lets_us_in() -> None:
    places = board("head")
    places.failed(places.supplies[0], Said("denied", "@ERROR: auth failed"), 1)
    assert places.due(NAMES, 1000) == []
    with pytest.raises(Hy3Error, match="auth failed"):
        places.check_hope(1)
