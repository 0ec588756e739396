# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._bench_verdict import differing_arguments, fitting, verdicts

Facts = dict[str, t.Any]


def workload(name: str, tokens: int, streams: int, temperature: float = 0.0) -> Facts:
    return {
        "id": name,
        "output_tokens": tokens,
        "streams": streams,
        "temperature": temperature,
        "top_p": None,
        "source": "here",
    }


ALL = [
    workload("one_256", 256, 1),
    workload("one_512", 512, 1, 0.9),
    workload("six_512", 512, 6, 0.9),
    workload("one_1024", 1024, 1),
    workload("four_1024", 1024, 4),
]
LIBERTAI = {"max-model-len": 163840, "max-num-seqs": 2}
TEST_FITTING: list[tuple[str, Facts, list[int], list[str], list[tuple[str, int, int]]]] = [
    (
        "two-streams",
        LIBERTAI,
        [],
        [],
        [
            ("one_256", 256, 1),
            ("streams_2", 256, 2),
            ("one_512", 512, 1),
            ("six_512", 512, 2),
            ("one_1024", 1024, 1),
            ("four_1024", 1024, 2),
        ],
    ),
    (
        "one-stream",
        {"max-num-seqs": "1"},
        [],
        [],
        [("one_256", 256, 1), ("one_512", 512, 1), ("one_1024", 1024, 1)],
    ),
    ("chosen", LIBERTAI, [], ["one_512"], [("one_512", 512, 1)]),
    ("chosen-with-streams", LIBERTAI, [1, 2], ["one_256"], [("one_256", 256, 1), ("streams_2", 256, 2)]),
    ("too-many-streams-become-one", LIBERTAI, [4, 8], ["one_256"], [("one_256", 256, 1), ("streams_4", 256, 2)]),
    ("short-context", {"max-model-len": 1024}, [], ["one_1024"], [("one_1024", 768, 1)]),
    (
        "shortened-to-another",
        {"context-length": 512},
        [],
        ["one_256", "one_1024"],
        [("one_256", 256, 1)],
    ),
    ("sglang", {"max-running-requests": 3}, [], ["four_1024"], [("four_1024", 1024, 3)]),
    ("no-number", {"max-model-len": "auto"}, [], ["four_1024"], [("four_1024", 1024, 4)]),
]


@pytest.mark.parametrize(
    ("args", "streams", "only", "expected"), [row[1:] for row in TEST_FITTING], ids=[row[0] for row in TEST_FITTING]
)
def test_fitting(args: Facts, streams: list[int], only: list[str], expected: list[tuple[str, int, int]]) -> None:
    found = fitting(ALL, args, streams, only)
    assert [(each["id"], each["output_tokens"], each["streams"]) for each in found] == expected


def test_fitting_says_what_it_changed() -> None:
    (found,) = fitting(ALL, {"max-model-len": 1024, "max-num-seqs": 2}, [], ["four_1024"])
    assert found["sized"] == [
        "768 tokens instead of 1024, as max-model-len is 1024",
        "2 streams instead of 4, as max-num-seqs is 2",
    ]


TEST_DIFFERENCES: list[tuple[str, Facts, Facts, list[str]]] = [
    ("same", {"max-num-seqs": 2}, {"max-num-seqs": 2}, []),
    ("same-as-text", {"max-num-seqs": 2}, {"max-num-seqs": "2"}, []),
    ("another", {"max-num-seqs": 2}, {"max-num-seqs": 6}, ["max-num-seqs is 6 and not 2"]),
    ("left-out", {"enforce-eager": True}, {}, ["enforce-eager is left out and not True"]),
    ("added", {}, {"async-scheduling": True}, ["async-scheduling is True and not left out"]),
    ("parsers", {}, {"reasoning-parser": "hy_v3", "enable-auto-tool-choice": True}, []),
]


@pytest.mark.parametrize(
    ("published", "used", "expected"), [row[1:] for row in TEST_DIFFERENCES], ids=[row[0] for row in TEST_DIFFERENCES]
)
def test_differing_arguments(published: Facts, used: Facts, expected: list[str]) -> None:
    assert differing_arguments(published, used) == expected


def measured(decode: tuple[float, float], **changes: t.Any) -> Facts:
    base = {
        "sized": [],
        "failed": 0,
        "shortest": 256,
        "output_tokens": 256,
        "others": 0,
        "decode_tps": {"median": sum(decode) / 2, "min": decode[0], "max": decode[1]},
        "acceptance": {"rate": 0.62},
    }
    return {"one_256": base | changes}


SPEED = {"decode_tokens_per_s": 20.0, "workload": "one_256", "conditions": "as said"}
SIZED = "2 streams instead of 6, as max-num-seqs is 2"
NEAR = "a run is within 10% of it"
HIGH, LOW = "all runs are more than 10% above it", "all runs are more than 10% below it"
OTHER = "max-num-seqs is 6 and not 2"
UNSAID = "the profile does not say with which workload it was measured"
RANGE = {**SPEED, "decode_tokens_per_s": [10, 20]}
TEST_VERDICTS: list[tuple[str, Facts, Facts, list[str], str, str]] = [
    ("within", SPEED, measured((18.5, 21.0)), [], "within", NEAR),
    ("lowest-within", SPEED, measured((18.0, 18.0)), [], "within", NEAR),
    ("one-run-within", SPEED, measured((12.0, 18.1)), [], "within", NEAR),
    ("below", SPEED, measured((12.0, 17.9)), [], "below", LOW),
    ("above", SPEED, measured((22.1, 30.0)), [], "above", HIGH),
    ("range", RANGE, measured((9.5, 9.5)), [], "within", NEAR),
    ("above-range", RANGE, measured((23, 24)), [], "above", HIGH),
    ("sized", SPEED, measured((20, 20), sized=[SIZED]), [], "not comparable", SIZED),
    ("other-arguments", SPEED, measured((20, 20)), [OTHER], "not comparable", OTHER),
    ("failed", SPEED, measured((20, 20), failed=1), [], "not comparable", "1 of its requests failed"),
    ("short", SPEED, measured((20, 20), shortest=9), [], "not comparable", "an answer ended after 9 of 256 tokens"),
    ("others", SPEED, measured((20, 20), others=2), [], "not comparable", "2 requests of others ran meanwhile"),
    ("not-run", SPEED, {}, [], "not comparable", "workload one_256 was not run"),
    ("not-measured", SPEED, measured((20, 20), decode_tps=None), [], "not comparable", "it was not measured"),
    ("unsaid", {"decode_tokens_per_s": 20.0}, measured((20, 20)), [], "not comparable", UNSAID),
    ("acceptance", {"draft_acceptance": 0.613, "workload": "one_256"}, measured((1, 1)), [], "within", NEAR),
    ("kv", {"kv_cache_tokens": 176784}, {}, [], "within", NEAR),
    ("kv-unknown", {"max_concurrency": 1.08}, {}, [], "not comparable", "it was not measured"),
]


@pytest.mark.parametrize(
    ("expected", "results", "differences", "verdict", "why"),
    [row[1:] for row in TEST_VERDICTS],
    ids=[row[0] for row in TEST_VERDICTS],
)
def test_verdicts(expected: Facts, results: Facts, differences: list[str], verdict: str, why: str) -> None:
    engine = {"kv_cache_tokens": 176000, "max_concurrency": None}
    (found,) = verdicts(expected, results, engine, differences)
    assert (found["verdict"], found["why"]) == (verdict, why)


def test_figures_are_said_as_people_do() -> None:
    expected = {"kv_cache_tokens": 176784, "draft_acceptance": [0.62, 0.76], "max_concurrency": 1.08}
    engine = {"kv_cache_tokens": 180224}
    said = {one["figure"]: (one["published_text"], one["measured_text"]) for one in verdicts(expected, {}, engine, [])}
    assert said == {
        "kv_cache_tokens": ("176,784", "180,224"),
        "draft_acceptance": ("0.62 to 0.76", "not measured"),
        "max_concurrency": ("1.08", "not measured"),
    }


def test_nothing_published_needs_no_verdict() -> None:
    assert verdicts({"conditions": "the card has no figures"}, measured((1, 1)), {}, []) == []
