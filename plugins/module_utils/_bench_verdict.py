# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which workloads fit a plan, and how measured figures stand to a profile's published ones. Pure."""

from __future__ import annotations

import typing as t

# A prompt of the benchmark with its chat template; also where a tokenizer takes a token for each letter.
PROMPT_TOKENS = 256
# Published figures are one author's few runs. Ours: closer than this is the same.
TOLERANCE = 0.10
# Engine options that change no figure.
_HARMLESS = {"reasoning-parser", "tool-call-parser", "enable-auto-tool-choice", "trust-remote-code"}
# Names of a plan's limits, by vLLM's and SGLang's options.
_CONTEXT = ("max-model-len", "context-length")
_STREAMS = ("max-num-seqs", "max-running-requests")

# A published figure: its key in a profile's C(expected), what is measured for it, and where the profile says how.
_PUBLISHED = (
    ("decode_tokens_per_s", "decode_tps", "workload"),
    ("aggregate_tokens_per_s", "total_tps", "aggregate_workload"),
    ("ttft_ms", "ttft_ms", "workload"),
    ("draft_acceptance", "acceptance", "workload"),
    ("kv_cache_tokens", "kv_cache_tokens", None),
    ("max_concurrency", "max_concurrency", None),
)

Facts = t.Mapping[str, t.Any]


class Verdict(t.TypedDict):
    """A published figure beside the measured one.

    C(published) and C(measured) are lowest and highest; C(published_text) and C(measured_text) say the same in words.
    """

    figure: str
    workload: str | None
    published: list[float]
    published_text: str
    measured: list[float] | None
    measured_text: str
    verdict: str
    why: str


def _limit(args: Facts, names: t.Iterable[str]) -> tuple[str, int] | None:
    for name in names:
        if str(args.get(name)).isdigit():
            return name, int(args[name])
    return None


def _sized(workload: Facts, context: tuple[str, int] | None, streams: tuple[str, int] | None) -> dict[str, t.Any]:
    sized: dict[str, t.Any] = {**workload, "sized": []}
    if context and workload["output_tokens"] + PROMPT_TOKENS > context[1]:
        sized["output_tokens"] = max(context[1] - PROMPT_TOKENS, 16)
        sized["sized"].append(
            f"{sized['output_tokens']} tokens instead of {workload['output_tokens']}, as {context[0]} is {context[1]}"
        )
    if streams and workload["streams"] > streams[1]:
        sized["streams"] = streams[1]
        sized["sized"].append(f"{streams[1]} streams instead of {workload['streams']}, as {streams[0]} is {streams[1]}")
    return sized


def fitting(
    workloads: t.Sequence[Facts], args: Facts, streams: t.Sequence[int], only: t.Collection[str]
) -> list[dict[str, t.Any]]:
    """The chosen workloads made as small as the engine's arguments want, with what that changed in C(sized).

    C(streams) adds the first workload with so many streams; without any, with as many as the engine takes. What
    becomes equal to another one is left out.
    """
    context, most = _limit(args, _CONTEXT), _limit(args, _STREAMS)
    first = workloads[0]
    wanted = [workload for workload in workloads if not only or workload["id"] in only]
    more = streams or ([most[1]] if most and not only else [])
    wanted += [{**first, "id": f"streams_{count}", "streams": count, "source": "hy3_bench_streams"} for count in more]
    found: dict[tuple[t.Any, ...], dict[str, t.Any]] = {}
    # What needs no change comes before what would become equal to it.
    for workload in sorted((_sized(each, context, most) for each in wanted), key=lambda each: bool(each["sized"])):
        shape = (workload["output_tokens"], workload["streams"], workload["temperature"], workload.get("top_p"))
        found.setdefault(shape, workload)
    return sorted(found.values(), key=lambda each: (each["output_tokens"], each["streams"], each["id"]))


def differing_arguments(published: Facts, used: Facts) -> list[str]:
    """Sentences for engine arguments other than the published ones, as far as they could change a figure."""
    names = sorted((set(published) | set(used)) - _HARMLESS)
    return [
        f"{name} is {_said(used.get(name))} and not {_said(published.get(name))}"
        for name in names
        # An inventory may say "2".
        if _said(used.get(name)) != _said(published.get(name))
    ]


def _said(value: t.Any) -> str:
    return "left out" if value is None else str(value)


def verdicts(
    expected: Facts, measured: t.Mapping[str, Facts], engine: Facts, differences: t.Sequence[str]
) -> list[Verdict]:
    """One for each published figure of a profile.

    C(measured) has the results by workload, C(engine) what is known of the engine itself, C(differences) why nothing
    at all can be compared.
    """
    return [
        _verdict(
            (key, expected[key]),
            workload=str(expected[how]) if how and how in expected else None,
            found=_interval((measured.get(str(expected.get(how)), {}) if how else engine).get(source)),
            reasons=[*differences, *(_reasons(expected.get(how), measured) if how else [])],
        )
        for key, source, how in _PUBLISHED
        if expected.get(key) is not None
    ]


def _verdict(
    figure: tuple[str, t.Any], *, workload: str | None, found: list[float] | None, reasons: list[str]
) -> Verdict:
    key, value = figure
    bounds = [float(bound) for bound in (value if isinstance(value, list) else [value])]
    published = [min(bounds), max(bounds)]
    if found is None:
        verdict, why = "not comparable", "; ".join(reasons or ["it was not measured"])
    elif reasons:
        verdict, why = "not comparable", "; ".join(reasons)
    else:
        verdict, why = _compare(found, published)
    return Verdict(
        figure=key,
        workload=workload,
        published=published,
        published_text=_range(published),
        measured=found,
        measured_text="not measured" if found is None else _range(found),
        verdict=verdict,
        why=why,
    )


def _range(bounds: t.Sequence[float]) -> str:
    said = [f"{bound:,.0f}" if bound >= 1000 else f"{bound:.4g}" for bound in bounds]
    return " to ".join(dict.fromkeys(said))


def _interval(value: t.Any) -> list[float] | None:
    """Lowest and highest of a spread, of an acceptance or of a plain number."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return [float(value)] * 2
    return [value["rate"]] * 2 if "rate" in value else [value["min"], value["max"]]


def _reasons(workload: str | None, measured: t.Mapping[str, Facts]) -> list[str]:
    if workload is None:
        return ["the profile does not say with which workload it was measured"]
    result = measured.get(workload)
    if not result:
        return [f"workload {workload} was not run"]
    reasons = list(result["sized"])
    if result["failed"]:
        reasons.append(f"{result['failed']} of its requests failed")
    if result["shortest"] is not None and result["shortest"] < result["output_tokens"]:
        reasons.append(f"an answer ended after {result['shortest']} of {result['output_tokens']} tokens")
    if result["others"]:
        reasons.append(f"{result['others']} requests of others ran meanwhile")
    return reasons


def _compare(found: t.Sequence[float], published: t.Sequence[float]) -> tuple[str, str]:
    """Every run must be off before the whole is."""
    low, high = published[0] * (1 - TOLERANCE), published[1] * (1 + TOLERANCE)
    if found[0] > high:
        return "above", f"all runs are more than {TOLERANCE:.0%} above it"
    if found[1] < low:
        return "below", f"all runs are more than {TOLERANCE:.0%} below it"
    return "within", f"a run is within {TOLERANCE:.0%} of it"
