# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What an engine's log says: its facts. What went wrong is in ``_engine_failures``."""

from __future__ import annotations

import re
import typing as t

# In the order of a boot. "failed" is set by who knows that the engine stopped; no line alone means it.
PHASES = ("starting", "engine_init", "loading", "drafter", "kv_cache", "warmup", "ready", "failed")

# The first line of a phase, for vLLM 0.20 to 0.33 and SGLang 0.5.11 to 0.5.23.
_PHASE_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("engine_init", re.compile(r"Initializing a V\d LLM engine|server_args=(?:ServerArgs\(|\{)")),
    ("loading", re.compile(r"Starting to load model|Loading safetensors|Load weight begin")),
    ("drafter", re.compile(r"Loading drafter model")),
    ("kv_cache", re.compile(r"Model loading took|Load weight end")),
    ("warmup", re.compile(r"KV cache size: |#tokens: \d|max_total_num_tokens=")),
    ("ready", re.compile(r"Starting vLLM server on|Application startup complete|fired up and ready to roll")),
)

# As a terminal gets them, and as syslog and less write the escape.
_ANSI = re.compile(r"(?:\x1b|#033|\^\[)(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|\([A-Z0-9])")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_SHARDS = re.compile(r"Loading (?:safetensors checkpoint|.*) shards:.*?(\d+)/(\d+)")
_ENGINE = re.compile(r"Initializing a V\d LLM engine \(v([^)]+)\) with config: (.*)")
# A record up to 0.5.19 or so, a dictionary in 0.5.23.
_SGLANG_ARGS = re.compile(r"server_args=(?:ServerArgs\(|\{)(.*)")
_SPECULATIVE = re.compile(r"SpeculativeConfig\(method='?(\w+)'?.*?num_spec_tokens=(\d+)")
_MOE = re.compile(r"Using '?([\w ]+?)'? (\w+) MoE backend")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens|max_total_num_tokens=(\d+)|#tokens: ([\d,]+)")
_KV_BLOCKS = re.compile(r"(?:cuda|GPU) blocks: (\d+)")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_SGLANG_CONTEXT = re.compile(r"max_total_num_tokens=(\d+).*\bcontext_len=(\d+)")
_AVAILABLE = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")
_WEIGHTS = re.compile(r"(?:Model loading|[Ll]oading model weights) took ([\d.]+) Gi?B(?:.*? and ([\d.]+) seconds)?")
_SGLANG_WEIGHTS = re.compile(r"Load weight end\..*?elapsed=([\d.]+) s.*mem usage=([\d.]+) GB")
_READING = re.compile(r"Loading weights took ([\d.]+) seconds")
_INIT = re.compile(r"init engine \(.*?\) took ([\d.]+) s")
_RANK = re.compile(r"world_size=\d+ rank=(\d+) ")
_IP = re.compile(r"\([^()]*\bip=([0-9A-Fa-f.:]+)[^()]*\)")
_ACCEPTANCE = re.compile(r"[Dd]raft acceptance rate: ([\d.]*\d)(%?)")
_ACCEPTED = re.compile(r"(?:Number of accepted tokens|Accepted): ([\d,]*\d)")
_DRAFTED = re.compile(r"(?:Number of draft tokens(?: tokens)?|Drafted): ([\d,]*\d)")
_MEAN_LENGTH = re.compile(r"(?:Mean acceptance length|accept len): ([\d.]+\d)")
_PER_POSITION = re.compile(r"Per-position acceptance rate: ((?:[\d.]+(?:, |$))+)")
_SGLANG_ACCEPTANCE = re.compile(r"accept rate: ([\d.]+\d)")

# vLLM's default KV block on CUDA; a log that prints blocks (before V1) does not print their size.
_BLOCK_TOKENS = 16

_TAIL_LINES = 5
_TAIL_CHARACTERS = 300


class Shards(t.TypedDict):
    """Files read so far and in all."""

    loaded: int
    total: int


class Acceptance(t.TypedDict):
    """Draft acceptance of one metrics line: C(rate) from 0 to 1, counts in tokens, C(mean_length) in tokens a step."""

    rate: float | None
    accepted: int | None
    drafted: int | None
    mean_length: float | None
    per_position: list[float] | None


class Facts(t.TypedDict):
    """All that the log of one start says; None for what it does not say (yet)."""

    phase: str
    version: str | None
    config: dict[str, t.Any] | None
    moe_backends: list[dict[str, str]]
    shards: dict[str, Shards | None]
    kv: dict[str, t.Any]
    available_kv_gib: float | None
    weights_gib: float | None
    acceptance: Acceptance | None
    ranks: list[dict[str, t.Any]]
    timings: dict[str, float | None]
    tail: list[str]


def clean_lines(text: str) -> list[str]:
    """The lines of a log without colours and empty lines; a progress bar's carriage returns end lines, too."""
    return [line for line in re.split(r"[\r\n]+", _ANSI.sub("", text)) if line.strip()]


def without_repeat(line: str) -> str:
    """The line without the note that Ray appends to one that several workers printed."""
    return _REPEATED.sub("", line)


def phase_of(lines: t.Iterable[str]) -> str:
    """The furthest phase that any line shows: ranks write at their own pace, so order alone does not tell."""
    phase = PHASES[0]
    for line in lines:
        for candidate, mark in _PHASE_MARKS:
            if PHASES.index(candidate) > PHASES.index(phase) and mark.search(line):
                phase = candidate
    return phase


def read_acceptance(line: str) -> Acceptance | None:
    """Draft acceptance from a metrics line: V0 wrote a ratio, V1 a percentage; the sign decides, not the size."""
    sglang = _SGLANG_ACCEPTANCE.search(line)
    match = _ACCEPTANCE.search(line)
    if not match and not sglang:
        return None
    rate = float(match[1]) / (100 if match[2] else 1) if match else float(sglang[1]) if sglang else None
    positions = _PER_POSITION.search(line)
    length = _MEAN_LENGTH.search(line)
    return Acceptance(
        rate=None if rate is None else round(rate, 6),
        accepted=_count(_ACCEPTED.search(line)),
        drafted=_count(_DRAFTED.search(line)),
        mean_length=float(length[1]) if length else None,
        per_position=[float(part) for part in positions[1].split(", ") if part] if positions else None,
    )


def read_config(text: str) -> dict[str, t.Any]:
    """What the engine says it runs with, from the text after C(with config:).

    C(speculative_method) and C(speculative_tokens) are None without a drafter; C(max_seq_len) is in tokens.
    """
    names = ("quantization", "moe_backend", "kv_cache_dtype", "max_seq_len", "tensor_parallel_size", "enforce_eager")
    speculative = _SPECULATIVE.search(text)
    return {name: _setting(text, name) for name in names} | {
        "speculative_method": speculative[1] if speculative else None,
        "speculative_tokens": int(speculative[2]) if speculative else None,
    }


def read_sglang_config(text: str) -> dict[str, t.Any]:
    """The same from SGLang's C(server_args=), by the names that vLLM has for it."""
    names = {"quantization": "quantization", "moe_backend": "moe_runner_backend", "kv_cache_dtype": "kv_cache_dtype"}
    names |= {"max_seq_len": "context_length", "tensor_parallel_size": "tp_size"}
    names |= {"speculative_method": "speculative_algorithm", "speculative_tokens": "speculative_num_draft_tokens"}
    return {name: _setting(text, own) for name, own in names.items()} | {"enforce_eager": None}


def read_facts(lines: t.Sequence[str]) -> Facts:
    """The facts of one start from its cleaned lines; where a line repeats, the last one counts unless said."""
    facts = Facts(
        phase=phase_of(lines),
        version=None,
        config=None,
        moe_backends=[],
        shards={"target": None, "drafter": None},
        kv={"tokens": None, "derived": False, "max_concurrency": None, "request_tokens": None},
        available_kv_gib=None,
        weights_gib=None,
        acceptance=None,
        ranks=[],
        timings={"read_weights_s": None, "load_model_s": None, "init_engine_s": None},
        tail=[line.strip()[:_TAIL_CHARACTERS] for line in lines[-_TAIL_LINES:]],
    )
    model = "target"
    for line in lines:
        if "Loading drafter model" in line:
            model = "drafter"
        if match := _SHARDS.search(line):
            facts["shards"][model] = Shards(loaded=int(match[1]), total=int(match[2]))
        elif match := _ENGINE.search(line):
            facts["version"], facts["config"] = match[1], read_config(match[2])
        elif match := _SGLANG_ARGS.search(line):
            facts["config"] = read_sglang_config(match[1])
        elif match := _MOE.search(line):
            choice = {"kind": match[2], "backend": match[1]}
            facts["moe_backends"] += [choice] if choice not in facts["moe_backends"] else []
        elif acceptance := read_acceptance(line):
            facts["acceptance"] = acceptance
        elif match := _RANK.search(line):
            _add_rank(facts, line, int(match[1]))
        else:
            _read_memory(facts, line)
            _read_timings(facts, line)
    facts["ranks"].sort(key=lambda rank: rank["rank"])
    return facts


def _read_memory(facts: Facts, line: str) -> None:
    # Both numbers are kept as logged: with hybrid caches tokens / request_tokens is not the concurrency.
    if match := _KV_TOKENS.search(line):
        facts["kv"] |= {"tokens": _count(match), "derived": False}
    elif match := _KV_BLOCKS.search(line):
        facts["kv"] |= {"tokens": int(match[1]) * _BLOCK_TOKENS, "derived": True}
    if match := _CONCURRENCY.search(line):
        facts["kv"] |= {"request_tokens": _count(match), "max_concurrency": float(match[2])}
    elif match := _SGLANG_CONTEXT.search(line):
        tokens, context = int(match[1]), int(match[2])
        facts["kv"] |= {"request_tokens": context, "max_concurrency": round(tokens / context, 2)}
    if match := _AVAILABLE.search(line):
        facts["available_kv_gib"] = float(match[1])


def _read_timings(facts: Facts, line: str) -> None:
    timings = facts["timings"]
    if match := _WEIGHTS.search(line):
        # Every rank prints its own; the fullest and the slowest are the ones that matter.
        facts["weights_gib"] = max(float(match[1]), facts["weights_gib"] or 0.0)
        if match[2]:
            timings["load_model_s"] = max(float(match[2]), timings["load_model_s"] or 0.0)
    elif match := _SGLANG_WEIGHTS.search(line):
        facts["weights_gib"], timings["load_model_s"] = float(match[2]), float(match[1])
    elif match := _READING.search(line):
        timings["read_weights_s"] = max(float(match[1]), timings["read_weights_s"] or 0.0)
    elif match := _INIT.search(line):
        timings["init_engine_s"] = float(match[1])


def _add_rank(facts: Facts, line: str, rank: int) -> None:
    # Ray writes ip= only for workers on another node than the driver's; no address means the driver's own node.
    address = _IP.search(line)
    ranks = [entry for entry in facts["ranks"] if entry["rank"] != rank]
    facts["ranks"] = [*ranks, {"rank": rank, "ip": address[1] if address else None}]


def _count(match: re.Match[str] | None) -> int | None:
    text = next((group for group in match.groups() if group), None) if match else None
    return int(text.replace(",", "")) if text else None


def _setting(text: str, name: str) -> t.Any:
    match = re.search(rf"(?<![\w.]){name}(?:=|': )(?:'([^']*)'|([^,)}} ]+))", text)
    if not match:
        return None
    if match[1] is not None:
        return match[1]
    words: dict[str, t.Any] = {"None": None, "True": True, "False": False}
    value = match[2]
    if value in words:
        return words[value]
    return int(value) if value.isdigit() else value
