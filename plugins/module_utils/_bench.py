# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The engines' own load generators: how one is called, what its result says, what several runs say together. Pure."""

from __future__ import annotations

import json
import statistics
import typing as t
from dataclasses import dataclass

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._metrics import Metrics
from ansible_collections.sparks.hy3.plugins.module_utils._openai import Answer, timing

# As role verify asks: Hy3's template thinks or not by this argument, and its default differs between documents.
_NO_THINKING = {"chat_template_kwargs": {"reasoning_effort": "no_think"}}


class Request(t.TypedDict):
    """One request. Its rate is None where something held the text back until the end, and so is its TTFT."""

    tokens: int
    ttft_s: float | None
    decode_tps: float | None
    error: str | None


class Run(t.TypedDict):
    """One run of the load generator; C(total_tps) counts generated tokens of all requests per second.

    C(accept_length) is SGLang's mean of tokens per step since the server's start.
    """

    duration_s: float
    total_tps: float
    accept_length: float | None
    requests: list[Request]


class Acceptance(t.TypedDict):
    """Drafted tokens that the model took: share of all, share by place in the draft, tokens per step."""

    drafted: int
    accepted: int
    rate: float
    per_position: list[float]
    mean_length: float | None


class Spread(t.TypedDict):
    """The middle of several runs, and how far they are apart."""

    median: float
    min: float
    max: float


@dataclass(frozen=True)
class Load:
    """What is to be sent: C(requests) of C(output_tokens) each, C(streams) at a time."""

    engine: str
    venv: str
    url: str
    model: str
    tokenizer: str
    output_tokens: int
    streams: int
    requests: int
    temperature: float
    top_p: float | None
    trust_remote_code: bool


def prompts_file(prompts: t.Sequence[str], count: int) -> str:
    """Content of a file of C(count) prompts in ShareGPT's form, all different as far as there are enough.

    Both load generators read that form without another package; vLLM's own custom one needs pandas, which no vLLM
    brings. Equal prompts would route all streams to the same experts, which no users do.
    """
    chosen = [prompts[number % len(prompts)] for number in range(count)]
    turns = [[{"from": "human", "value": prompt}, {"from": "gpt", "value": ""}] for prompt in chosen]
    return json.dumps([{"conversations": conversation} for conversation in turns])


def command(load: Load, *, prompts: str, result: str) -> list[str]:
    """The load generator's command line; C(prompts) and C(result) are paths of files.

    The length of every answer is fixed (C(ignore_eos)), or two runs would not measure the same. No warm-up of its own:
    it would be in the engine's counters, and the caller does that in a run that it throws away.
    """
    sampling: dict[str, t.Any] = {"temperature": load.temperature, "ignore_eos": True, **_NO_THINKING}
    if load.top_p is not None:
        sampling["top_p"] = load.top_p
    common = [
        *("--base-url", load.url, "--model", load.model, "--tokenizer", load.tokenizer),
        *("--dataset-name", "sharegpt", "--dataset-path", prompts, "--sharegpt-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.streams), "--seed", "0"),
        "--disable-tqdm",
    ]
    if load.engine == "sglang":
        return [
            *(f"{load.venv}/bin/python", "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", *common),
            *("--extra-request-body", json.dumps(sampling), "--warmup-requests", "0"),
            *("--output-file", result, "--output-details"),
        ]
    return [
        *(f"{load.venv}/bin/vllm", "bench", "serve", "--backend", "openai-chat", *common),
        *("--endpoint", "/v1/chat/completions", "--extra-body", json.dumps(sampling)),
        *("--ready-check-timeout-sec", "0", "--save-result", "--save-detailed", "--result-filename", result),
        # SGLang's always trusts.
        *(["--trust-remote-code"] if load.trust_remote_code else []),
    ]


def read_result(text: str) -> Run:
    """What the result file of either load generator says (its last line, as SGLang's appends).

    The rates are counted here, from the times between chunks: (tokens - 1) / (last - first). vLLM's own TPOT is the
    inverse of that since its latency no longer includes the frame with the usage (0.24 includes it, 0.32 does not).
    Raises Hy3Error if it is no result or no request has succeeded.
    """
    lines = text.strip().splitlines()
    try:
        result = json.loads(lines[-1] if lines else "")
        errors = result["errors"]
        columns = zip(result["output_lens"], result["ttfts"], result["itls"], errors, strict=True)
        requests = [_request(*column) for column in columns]
        duration, total = float(result["duration"]), float(result["output_throughput"])
    except (ValueError, KeyError, TypeError) as error:
        raise Hy3Error(f"The load generator's result cannot be read ({type(error).__name__}: {error})") from error
    if not any(request["error"] is None for request in requests):
        first = requests[0]["error"] if requests else "it sent none"
        raise Hy3Error(f"None of {len(requests)} requests of the load generator has succeeded: {first}")
    return Run(
        duration_s=duration, total_tps=total, accept_length=result.get("accept_length") or None, requests=requests
    )


def _request(tokens: int, ttft: float, gaps: t.Sequence[float], error: str) -> Request:
    if error or not tokens:
        lines = (error or "it got no answer").strip().splitlines()
        return Request(tokens=0, ttft_s=None, decode_tps=None, error=lines[-1][:300])
    last = ttft + sum(gaps)
    seen = timing(
        Answer(
            usage={"completion_tokens": tokens}, text_chunks=len(gaps) + 1, first_text=ttft, last_text=last, end=last
        )
    )
    return Request(tokens=tokens, ttft_s=seen["ttft_s"], decode_tps=seen["decode_tps"], error=None)


def acceptance_between(pairs: t.Iterable[tuple[Metrics | None, Metrics | None]]) -> Acceptance | None:
    """Acceptance over several stretches, each with the engine's counters before and after; None without drafts."""
    drafts = drafted = accepted = 0
    places: list[int] = []
    for before, after in pairs:
        if before is None or after is None:
            return None
        drafts += (after["drafts"] or 0) - (before["drafts"] or 0)
        drafted += (after["drafted"] or 0) - (before["drafted"] or 0)
        accepted += (after["accepted"] or 0) - (before["accepted"] or 0)
        now, then = after["accepted_per_position"] or [], before["accepted_per_position"] or []
        places += [0] * (len(now) - len(places))
        for place, count in enumerate(now):
            places[place] += count - (then[place] if place < len(then) else 0)
    if drafted <= 0:
        return None
    return Acceptance(
        drafted=drafted,
        accepted=accepted,
        rate=accepted / drafted,
        per_position=[count / drafts for count in places] if drafts > 0 else [],
        mean_length=1 + accepted / drafts if drafts > 0 else None,
    )


def spread(values: t.Iterable[float | None]) -> Spread | None:
    """Of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return Spread(median=statistics.median(known), min=min(known), max=max(known)) if known else None


def figures(runs: t.Sequence[Run]) -> dict[str, Spread | None]:
    """Each run's own middle (of its requests) makes one value, so that the spread is that of runs.

    C(ttft_ms) in milliseconds, C(decode_tps) of one stream and C(total_tps) of all in tokens per second.
    """
    ttfts = [spread(request["ttft_s"] for request in run["requests"]) for run in runs]
    rates = [spread(request["decode_tps"] for request in run["requests"]) for run in runs]
    return {
        "ttft_ms": spread(None if ttft is None else 1000 * ttft["median"] for ttft in ttfts),
        "decode_tps": spread(None if rate is None else rate["median"] for rate in rates),
        "total_tps": spread(run["total_tps"] for run in runs),
    }
