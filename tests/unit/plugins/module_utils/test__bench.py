# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import typing as t
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._bench import (
    Load,
    Run,
    acceptance_between,
    command,
    figures,
    prompts_file,
    read_result,
    spread,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._metrics import Metrics, read_metrics

# Written by `vllm bench serve` of vLLM 0.32.0 (CPU) against a served tiny Hy3 with MTP k=1; texts cut, numbers rounded.
RECORDED: dict[str, t.Any] = json.loads((Path(__file__).parent / "vllm_bench_serve.json").read_text())

# Written by `sglang.bench_serving` of SGLang 0.5.23, called as here, against the same vLLM: no SGLang served.
OF_SGLANG = (Path(__file__).parent / "sglang_bench_serving.json").read_text()

LOAD = Load(
    engine="vllm",
    venv="/opt/hy3/venv",
    url="http://127.0.0.1:8000",
    model="hy3",
    tokenizer="/opt/hy3/models/Hy3",
    output_tokens=256,
    streams=2,
    requests=4,
    temperature=0.0,
    top_p=None,
    trust_remote_code=False,
)


def options(argv: t.Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in zip(argv, argv[1:], strict=False) if name.startswith("--")}


def test_vllm_is_called() -> None:
    argv = command(LOAD, prompts="/tmp/p.json", result="/tmp/r.json")
    assert argv[:3] == ["/opt/hy3/venv/bin/vllm", "bench", "serve"]
    said = options(argv)
    assert (said["--num-prompts"], said["--max-concurrency"], said["--sharegpt-output-len"]) == ("4", "2", "256")
    assert (said["--dataset-path"], said["--result-filename"]) == ("/tmp/p.json", "/tmp/r.json")
    assert json.loads(said["--extra-body"]) == {
        "temperature": 0.0,
        "ignore_eos": True,
        "chat_template_kwargs": {"reasoning_effort": "no_think"},
    }
    # A request of its own would be among the engine's counters.
    assert said["--ready-check-timeout-sec"] == "0"
    assert "--trust-remote-code" not in argv
    assert "--trust-remote-code" in command(replace(LOAD, trust_remote_code=True), prompts="p", result="r")


def test_sglang_is_called() -> None:
    load = replace(LOAD, engine="sglang", temperature=0.9, top_p=1.0)
    argv = command(load, prompts="/tmp/p.json", result="/tmp/r.json")
    assert argv[:3] == ["/opt/hy3/venv/bin/python", "-m", "sglang.bench_serving"]
    said = options(argv)
    assert (said["--backend"], said["--warmup-requests"]) == ("sglang-oai-chat", "0")
    assert json.loads(said["--extra-request-body"]) == {
        "temperature": 0.9,
        "top_p": 1.0,
        "ignore_eos": True,
        "chat_template_kwargs": {"reasoning_effort": "no_think"},
    }


def test_prompts_differ_as_far_as_they_can() -> None:
    entries = json.loads(prompts_file(["a", "b"], 3))
    assert [entry["conversations"][0]["value"] for entry in entries] == ["a", "b", "a"]
    assert {len(entry["conversations"]) for entry in entries} == {2}


def test_a_recorded_result() -> None:
    recorded = RECORDED["one_256"]
    run = read_result(json.dumps(recorded))
    assert (run["duration_s"], run["total_tps"], run["accept_length"]) == (
        recorded["duration"],
        recorded["output_throughput"],
        None,
    )
    (request,) = run["requests"]
    assert (request["tokens"], request["ttft_s"], request["error"]) == (256, recorded["ttfts"][0], None)
    # The seed's formula is the inverse of vLLM's TPOT, also where one frame brings two tokens.
    assert len(recorded["itls"][0]) < 200
    assert request["decode_tps"] == pytest.approx(1000 / recorded["mean_tpot_ms"], rel=1e-3)


def test_a_recorded_result_of_two_streams() -> None:
    run = read_result(json.dumps(RECORDED["streams_2"]))
    assert [request["tokens"] for request in run["requests"]] == [256, 256]
    found = figures([run, run])
    assert found["ttft_ms"] is not None
    assert found["ttft_ms"]["median"] == pytest.approx(RECORDED["streams_2"]["median_ttft_ms"], rel=1e-3)


def test_a_recorded_result_of_sglang() -> None:
    recorded = json.loads(OF_SGLANG)
    run = read_result(OF_SGLANG)
    assert (run["total_tps"], run["accept_length"]) == (recorded["output_throughput"], None)
    assert [request["tokens"] for request in run["requests"]] == [256, 256]
    rates = [request["decode_tps"] for request in run["requests"]]
    # SGLang's TPOT ends with the last frame, which has no text.
    assert sum(rates) / 2 == pytest.approx(1000 / recorded["mean_tpot_ms"], rel=0.02)


def result(**changes: t.Any) -> str:
    base = {
        "duration": 2.0,
        "output_throughput": 50.5,
        "output_lens": [101],
        "ttfts": [0.5],
        "itls": [[0.05] * 100],
        "errors": [""],
    }
    return json.dumps(base | changes)


OK = {"tokens": 101, "ttft_s": 0.5, "decode_tps": pytest.approx(20.0), "error": None}
TRACEBACK = "Traceback (most recent call last):\n  ...\naiohttp.ClientError: refused\n"
TEST_REQUESTS: list[tuple[str, str, list[dict[str, t.Any]]]] = [
    ("one", result(), [OK]),
    ("two-tokens-a-frame", result(itls=[[0.1] * 50]), [OK]),
    ("the-last-line-counts", "{}\n" + result() + "\n", [OK]),
    (
        "held-back-until-the-end",
        result(output_lens=[200], ttfts=[9.98], itls=[[0.02]]),
        [{"tokens": 200, "ttft_s": None, "decode_tps": None, "error": None}],
    ),
    (
        "one-of-two-failed",
        result(output_lens=[101, 0], ttfts=[0.5, 0.0], itls=[[0.05] * 100, []], errors=["", TRACEBACK]),
        [OK, {"tokens": 0, "ttft_s": None, "decode_tps": None, "error": "aiohttp.ClientError: refused"}],
    ),
]


@pytest.mark.parametrize(
    ("text", "expected"), [row[1:] for row in TEST_REQUESTS], ids=[row[0] for row in TEST_REQUESTS]
)
def test_read_result(text: str, expected: list[dict[str, t.Any]]) -> None:
    assert read_result(text)["requests"] == expected


TEST_REFUSED: list[tuple[str, str, str]] = [
    ("empty", "", "cannot be read"),
    ("no-json", "Traceback", "cannot be read"),
    ("another-json", "[]", "cannot be read"),
    ("without-details", json.dumps({"duration": 1.0}), r"cannot be read \(KeyError: 'errors'\)"),
    ("columns-of-other-lengths", result(ttfts=[]), "cannot be read"),
    ("none-sent", result(output_lens=[], ttfts=[], itls=[], errors=[]), "None of 0 requests .* it sent none"),
    ("all-failed", result(output_lens=[0], errors=[TRACEBACK]), "None of 1 requests .*: aiohttp.ClientError: refused"),
    ("no-answer", result(output_lens=[0]), "it got no answer"),
]


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in TEST_REFUSED], ids=[row[0] for row in TEST_REFUSED])
def test_read_result_refuses(text: str, message: str) -> None:
    with pytest.raises(Hy3Error, match=message):
        read_result(text)


def test_sglang_says_its_own_accept_length() -> None:
    assert read_result(result(accept_length=1.6, server_info={"api_key": "secret"})) == Run(
        duration_s=2.0, total_tps=50.5, accept_length=1.6, requests=[OK]
    )


NOTHING = read_metrics("")


def counters(drafts: int, accepted: list[int]) -> Metrics:
    return NOTHING | {
        "drafts": drafts,
        "drafted": drafts * len(accepted),
        "accepted": sum(accepted),
        "accepted_per_position": accepted,
    }


TEST_ACCEPTANCE: list[tuple[str, list[tuple[Metrics | None, Metrics | None]], dict[str, t.Any] | None]] = [
    (
        "one-stretch",
        [(counters(1000, [900]), counters(2000, [1513]))],
        {"drafted": 1000, "accepted": 613, "rate": 0.613, "per_position": [0.613], "mean_length": 1.613},
    ),
    (
        "two-stretches-two-positions",
        [(counters(0, [0, 0]), counters(50, [31, 10])), (counters(90, [50, 20]), counters(140, [81, 30]))],
        {"drafted": 200, "accepted": 82, "rate": 0.41, "per_position": [0.62, 0.2], "mean_length": 1.82},
    ),
    ("no-drafter", [(NOTHING, NOTHING)], None),
    ("nothing-drafted", [(counters(5, [5]), counters(5, [5]))], None),
    ("no-metrics", [(None, NOTHING)], None),
]


@pytest.mark.parametrize(
    ("pairs", "expected"), [row[1:] for row in TEST_ACCEPTANCE], ids=[row[0] for row in TEST_ACCEPTANCE]
)
def test_acceptance(pairs: list[tuple[Metrics | None, Metrics | None]], expected: dict[str, t.Any] | None) -> None:
    found = acceptance_between(pairs)
    assert found == (expected and {key: pytest.approx(value) for key, value in expected.items()})


def test_spread_is_of_runs() -> None:
    """One slow request of a run moves its middle little; a slow run shows."""

    def run(*rates: float | None) -> Run:
        requests = [{"tokens": 9, "ttft_s": 0.1, "decode_tps": rate, "error": None} for rate in rates]
        return t.cast(Run, {"duration_s": 1.0, "total_tps": 9.0, "accept_length": None, "requests": requests})

    found = figures([run(20.0, 20.0, 2.0), run(19.0), run(None, 21.0)])
    assert found["decode_tps"] == {"median": 20.0, "min": 19.0, "max": 21.0}
    assert spread([None]) is None
