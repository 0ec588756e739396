# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What went wrong, from the lines of an engine, a node and its guards: the choice among the failures that match.

The known lines are data, in ``_failures_*.py``.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import phase_of, without_repeat
from ansible_collections.sparks.hy3.plugins.module_utils._engine_processes import without_secrets
from ansible_collections.sparks.hy3.plugins.module_utils._failure import (
    CONSEQUENCE,
    KINDS,
    SYMPTOM,
    UNKNOWN,
    Failure,
    Rule,
)
from ansible_collections.sparks.hy3.plugins.module_utils._failures_echoes import ECHO_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._failures_gpu import BACKEND_RULES, DRIVER_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._failures_load import FILE_RULES, SHAPE_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._failures_memory import MEMORY_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._failures_network import NETWORK_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._failures_node import (
    ENGINE,
    GUARD_RULES,
    NODE_RULES,
    OOM_PROCESS,
)
from ansible_collections.sparks.hy3.plugins.module_utils._failures_ray import RAY_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._failures_settings import SETTINGS_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import Line, message_of

# The first rule that matches a line speaks for it, so the special ones stand before the general ones.
RULES: tuple[Rule, ...] = (
    *GUARD_RULES,
    *NODE_RULES,
    *SHAPE_RULES,
    *BACKEND_RULES,
    *DRIVER_RULES,
    *NETWORK_RULES,
    *MEMORY_RULES,
    *RAY_RULES,
    *FILE_RULES,
    *SETTINGS_RULES,
    *ECHO_RULES,
)

# Of journalctl: who writes such lines; the message of systemd when a process of a unit was killed for memory.
_GUARDS = (
    *("SYSLOG_IDENTIFIER=systemd-oomd", "SYSLOG_IDENTIFIER=earlyoom", "_TRANSPORT=kernel"),
    "MESSAGE_ID=fe6faa94e7774663a0da52717891d8ef",
)
_NEWEST_LINES = 5000
# Each failure line has one of these in it, in any case. Most lines have none, and rules are many.
_TRIGGERS = (
    *("error", "fail", "except", "oom", "kill", "nvrm", "down", "mlx5", "i/o", "ext4", "xfs", "remount", "segfault"),
    *("unhandled", "undefined", "opcode", "blocked for", "lock", "stall", "temperature", "thermal", "tensor", "nan"),
    *("attempted", "not initialized", "divisible", "header", "not found", "no such", "not exist", "missing", "cannot"),
    *(
        "can't",
        "couldn't",
        "could not",
        "invalid",
        "repo id",
        "offline",
        "trust_remote",
        "requires",
        "support",
        "match",
    ),
    *("recognize", "attribute", "unknown", "greater", "larger", "less than", "kernel image", "symbol", "arch", "ptx"),
    *("nvcc", "insufficient", "too old", "no nvidia", "no cuda", "initialized", "compiled with", "illegal", "misalign"),
    *("assert", "ibv_", "completion", "async", "gid", "no device", "interface", "unable", "mesh", "duplicate"),
    *("truncated", "usage", "refused", "route", "unreach", "errno", "timed out", "timeout", "closed", "reset by"),
    *(
        "broken",
        "0 bytes",
        "remote",
        "died",
        "dead",
        "crash",
        "lost",
        "memory",
        "% full",
        "authentic",
        "already",
        "persist",
    ),
    *("exit code", "unique ip", "scheduled", "fulfil", "infeasible", "placement", "required", "exceeds", "available"),
    *("disk", "cancelled", "sigquit", "watchdog", "resolve", "service", "module", "operator", "deserial", "no space"),
    *("quota", "read-only", "too many", "thread", "permission", "hca", "bad_alloc", "capture", "driver", "ninja"),
    *(
        "python.h",
        "fp4 gemm",
        "gloo",
        "instruction",
        "retry",
        "unspecified",
        "versions",
        "not ready",
        "unexpected",
        "sigbus",
        "sigsegv",
    ),
)
# What quotes others or only reports progress: requests, arguments, access logs, tactics that a tuner skips.
_QUOTES = re.compile(
    r"\d+%\|| it/s[\],]|\d+/\d+ \[\d\d:\d\d<|Completed \| \d+/\d+"
    r"|Received request \S+|GenerateReqInput\(|Receive: obj=|Finish: obj=|Generated response|prompt(?:_token_ids)?: "
    r"|\"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS) /\S* HTTP/|non-default args|server_args=|LLM engine \(v.*with config"
    r"|Namespace\(|Skipping tactic|\[Autotuner\]|is deprecated|DEBUG \d\d-\d\d "
    r"|\[\d{4}-\d\d-\d\d [\d:,]+ [ID] \d+ \d+\]"
)
_DRAFTER = ("Loading drafter model", "hy_v3_mtp.py", "llm_base_proposer.py")
_TARGET = "Starting to load model"
_SGLANG = re.compile(
    r"server_args=|\bsglang\b|hunyuan_v3|Init torch distributed|Load weight (?:begin|end)|fused_moe_triton"
)
_VLLM = re.compile(r"\bvllm\b|\(EngineCore|\(APIServer|\(Worker|LLM engine \(v|hy_v3|Loading drafter model|\[core\.py:")
_CHAINED = re.compile(r"During handling of the above exception|was the direct cause of the following exception")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_NEAR_LINES = 60
# Seconds: an error so much later than the first lost connection is an echo of it, an error so long before the end of
# an engine that has served was survived.
_ECHO_AFTER = 3.0
_LAST_WORDS = 1800.0
_MOST = 8
_CAUSE_CHARACTERS = 400
_LINE_CHARACTERS = 600
_READ_CHARACTERS = 2000
# An engine names itself in its first lines and in each traceback.
_FIRST_LINES = 400

_ADDRESS = r"(?P<node>\d{1,3}(?:\.\d{1,3}){3}|[A-Za-z][\w.-]*)"
# The other end first: what a rank says of its peer is about the peer.
_NAMED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"remote=\[{_ADDRESS}\]",
        rf"[Cc]losed by (?:remote )?peer \[?{_ADDRESS}(?:[\]<:]|$)",
        rf"\b(?:from|remote) peer {_ADDRESS}<",
        rf"[Cc]onnect to {_ADDRESS}[<:]\d+",
        rf"\(IP: {_ADDRESS}",
        rf"at node \([^)]*IP: {_ADDRESS}",
        rf"and address: {_ADDRESS}",
        rf"Worker IP address: {_ADDRESS}",
        rf"\bip[:=] ?\[?{_ADDRESS}",
    )
)
_BEHIND = re.compile(rf"^\s*ip: \[?{_ADDRESS}|Worker IP address: {_ADDRESS.replace('node', 'worker')}")
_BEFORE = re.compile(rf"RayTaskError\(.*\bip={_ADDRESS}")


class _Match(t.NamedTuple):
    kind: str
    at: int
    rule: Rule
    groups: dict[str, str | None]


def guards_command(since: int) -> list[str]:
    """The command that prints what kernel and guards of a node's memory wrote since then, in Unix seconds."""
    command = ["journalctl", "--no-pager", "--quiet", "--all", "--output=short-unix", f"--since=@{since}"]
    return [*command, f"--lines={_NEWEST_LINES}", *" + ".join(_GUARDS).split()]


# ---- What the node says


def kills_of_engines(lines: t.Iterable[str | Line]) -> list[Line]:
    """Those of the guards' lines whose victim has an engine's name."""
    return [line for line, victim in _kills(lines) if ENGINE.search(victim)]


def find_kills(lines: t.Iterable[str | Line]) -> list[Failure]:
    """A diagnosis for each victim of the guards that may have been an engine, each once.

    systemd-oomd names a control group only, and an engine that was started by hand may be in one of any name.
    """
    return _each_once(line for line, victim in _kills(lines) if ENGINE.search(victim) or "systemd-oomd" in victim)


def find_troubles(lines: t.Iterable[str | Line]) -> list[Failure]:
    """A diagnosis for all that kernel, driver and guards say of engines and of what they need, each once, in order."""
    read = [_line(line) for line in lines]
    killed = {line for line, victim in _kills(read) if ENGINE.search(victim)}
    return _each_once(line for line in read if line in killed or _hurts(line.text))


def _hurts(text: str) -> bool:
    for rule in NODE_RULES:
        if match := rule.pattern.search(text):
            name = match.groupdict().get("name")
            return name is None or bool(ENGINE.search(name))
    return False


def _each_once(lines: t.Iterable[Line]) -> list[Failure]:
    found = [failure for line in lines for failure in find_failures([line], stopped=True)[:1]]
    first: dict[str, Failure] = {}
    for one in found:
        first.setdefault(one["cause"], one)
    return list(first.values())


def _kills(lines: t.Iterable[str | Line]) -> list[tuple[Line, str]]:
    """The lines that tell of a kill, and what each says from the guard's name on."""
    found: list[tuple[Line, str]] = []
    named: set[str] = set()
    for line in map(_line, lines):
        match = next(filter(None, (rule.pattern.search(line.text) for rule in GUARD_RULES)), None)
        if match:
            pid = re.search(r",pid=(\d+)", line.text)
            named.add(pid[1] if pid else "")
            found.append((line, line.text[match.start() :]))
        elif (match := OOM_PROCESS.pattern.search(line.text)) and match["pid"] not in named:
            found.append((line, match["name"]))
    return found


def _line(line: str | Line) -> Line:
    line = line if isinstance(line, Line) else Line(line, None)
    text = line.text
    return line._replace(text=text[:-500][:_READ_CHARACTERS] + text[-500:]) if len(text) > _READ_CHARACTERS else line


# ---- What the engine says


def find_failure(lines: t.Sequence[str | Line], *, stopped: bool) -> Failure | None:
    """The first of :func:`find_failures`, or None."""
    return next(iter(find_failures(lines, stopped=stopped)), None)


def find_failures(lines: t.Sequence[str | Line], *, stopped: bool) -> list[Failure]:
    """The diagnoses of one start, the root before its consequences, each rule once, of the same kind the earliest.

    While the engine runs there are none without a fatal line, and none once it is ready (a request's error is not the
    engine's). C(stopped) says that it ended by itself: then every match counts, of an engine that had been ready those
    of its last half hour.
    """
    read = [_line(line) for line in lines]
    texts = [line.text for line in read]
    ready = phase_of(texts) == "ready"
    if ready and not stopped:
        return []
    times = [line.time for line in read if line.time is not None]
    after = max(times) - _LAST_WORDS if ready and times else None
    matches = _without_vague(list(_matches(read, after)))
    if not matches or not (stopped or any(match.rule.fatal for match in matches)):
        return []
    first: dict[str, _Match] = {}
    for match in sorted(matches, key=lambda one: (KINDS.index(one.kind), one.at)):
        first.setdefault(match.rule.id, match)
    return [_failure(match, read) for match in list(first.values())[:_MOST]]


def _matches(read: t.Sequence[Line], after: float | None) -> t.Iterator[_Match]:
    texts = [line.text for line in read]
    other = _other_engine(texts)
    rules = [rule for rule in (*RULES, OOM_PROCESS) if not rule.engine or rule.engine != other]
    drafter: bool | None = None
    lost: float | None = None
    for index, line in enumerate(read):
        text = line.text
        if any(mark in text for mark in _DRAFTER):
            drafter = True
        elif drafter is None and _TARGET in text:
            drafter = False
        if after is not None and line.time is not None and line.time < after:
            continue
        small = text.lower()
        if not any(word in small for word in _TRIGGERS) or _QUOTES.search(text):
            continue
        for rule in rules:
            if (groups := _held(rule, text, texts, index, drafter)) is None:
                continue
            kind = rule.kind
            if kind in (SYMPTOM, CONSEQUENCE):
                lost = lost or line.time
            elif kind == UNKNOWN and _echoes(texts, index, line.time, lost):
                kind = KINDS[-1]
            yield _Match(kind, index, rule, groups)
            break


def _other_engine(texts: t.Sequence[str]) -> str:
    """The engine that this log is not of, empty if it may be of either."""
    text = "\n".join([*texts[:_FIRST_LINES], *texts[-_FIRST_LINES:]])
    sglang, vllm = bool(_SGLANG.search(text)), bool(_VLLM.search(text))
    return "" if sglang == vllm else "vllm" if sglang else "sglang"


def _held(
    rule: Rule, text: str, texts: t.Sequence[str], index: int, drafter: bool | None
) -> dict[str, str | None] | None:
    """The groups of a rule that this line satisfies, or None."""
    if rule.drafter is not None and rule.drafter is not drafter:
        return None
    match = rule.pattern.match(message_of(without_repeat(text))) if rule.message else rule.pattern.search(text)
    if not match or (rule.unless and rule.unless.search(text)):
        return None
    if rule.near and not any(map(rule.near.search, texts[max(0, index - _NEAR_LINES) : index + 4])):
        return None
    if rule.when and (None in match.groupdict().values() or not rule.when(match.groupdict())):
        return None
    return match.groupdict()


def _echoes(texts: t.Sequence[str], index: int, time: float | None, lost: float | None) -> bool:
    """Whether an error that no rule is about follows from another one: raised while that was handled, or later."""
    if time is not None and lost is not None and time > lost + _ECHO_AFTER:
        return True
    for before in range(index - 1, max(-1, index - _NEAR_LINES), -1):
        if _CHAINED.search(texts[before]):
            return True
        if _TRACEBACK.search(texts[before]):
            return before > 0 and bool(_CHAINED.search(texts[before - 1]))
    return False


def _without_vague(matches: t.Sequence[_Match]) -> list[_Match]:
    exact = {match.rule.family for match in matches if match.rule.family and not match.rule.vague}
    return [match for match in matches if not match.rule.vague or match.rule.family not in exact]


def _failure(match: _Match, read: t.Sequence[Line]) -> Failure:
    rule, line = match.rule, read[match.at]
    # Braces of the log are text: str.format does not look into the values that it puts in.
    cause = without_repeat(_filled(rule.cause, match.groups))
    return Failure(
        rule=rule.id,
        kind=match.kind,
        cause=without_secrets(cause)[:_CAUSE_CHARACTERS].strip(" ."),
        fix=_filled(rule.fix, match.groups),
        source=rule.source,
        line=without_secrets(without_repeat(line.text).strip())[:_LINE_CHARACTERS],
        fatal=rule.fatal,
        peers=rule.peers,
        address=_address(read, match.at),
        time=line.time,
    )


def _filled(sentence: str, groups: t.Mapping[str, str | None]) -> str:
    """The sentence with the groups; of two side by side only one has matched, another that has not is unknown."""
    pairs = set(re.findall(r"\{(\w+)\}(?=\{)|(?<=\})\{(\w+)\}", sentence))
    beside = {name for pair in pairs for name in pair if name}
    values = {name: value or ("" if name in beside else "?") for name, value in groups.items()}
    return sentence.format(**values).replace(" ()", "").replace(" (?)", "")


def _address(read: t.Sequence[Line], index: int) -> str | None:
    """The node that a line is about: the peer that it names, else where it was raised."""
    text = read[index].text
    for pattern in _NAMED:
        match = pattern.search(text)
        if match and not match["node"].startswith(("127.", "0.")):
            return match["node"].rstrip(".")
    for line in read[index + 1 : index + 9]:
        if match := _BEHIND.search(line.text):
            return match["node"] or match["worker"]
    for line in reversed(read[max(0, index - _NEAR_LINES) : index]):
        if match := _BEFORE.search(line.text):
            return match["node"]
    return None
