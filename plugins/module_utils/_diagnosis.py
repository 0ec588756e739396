# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What every node says together: which of it is the reason, and what only followed.

The node that complains is rarely the one that failed: a head that lost a rank writes of a cancelled broadcast, and the
reason lies in the kernel's log, the unit or the memory of its peer.
"""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._failure import (
    CONSEQUENCE,
    GENERIC,
    KINDS,
    RECIPE,
    ROOT,
    SUSPECT,
    SYMPTOM,
    UNKNOWN,
    Failure,
    made,
)
from ansible_collections.sparks.hy3.plugins.module_utils._memory import format_gib
from ansible_collections.sparks.hy3.plugins.module_utils._unit_failures import memory_failure, unit_failure

Facts = t.Mapping[str, t.Any]

SERVE = "hy3-serve.service"
# Seconds: how far clocks of two nodes may differ, and how long before a start its reason may lie.
_CLOCKS = 120.0
_BEFORE_RESTART = 3600.0
_MOST = 8


class Finding(t.NamedTuple):
    """A failure on one node."""

    host: str
    failure: Failure


class Diagnosis(t.TypedDict):
    """The reason with its node, what followed from it (host, rule, cause, line), and where nothing was found.

    ``text`` says it in sentences.
    """

    host: str
    rule: str
    kind: str
    cause: str
    fix: str
    source: str
    line: str
    followed: list[dict[str, str]]
    looked: list[str]
    text: str


def diagnose(
    nodes: t.Mapping[str, Facts], *, head: str | None = None, addresses: t.Mapping[str, str] | None = None
) -> Diagnosis | None:
    """The reason why a cluster does not serve, from what ``engine_status`` returned on each node; None for none.

    Args:
        nodes: The result of each node, also of one that was not reached (``unreachable``, ``msg``).
        head: The node of rank 0, whose start counts; without it the times of all findings do.
        addresses: The address of each node by its name, to know whom a line is about.
    """
    first: Facts = nodes.get(head or "") or {}
    if (first.get("health") or {}).get("ok") and not first.get("failure"):
        return None
    active, since = _start(first)
    found = [one for host, status in nodes.items() for one in _of_node(host, status, active)]
    found += _not_in_ray(first, addresses or {}, found)
    found = _in_time([one for one in found if since is None or (one.failure["time"] or since) >= since])
    if not found:
        return None
    names = {address: host for host, address in (addresses or {}).items()}
    blamed = {names.get(one.failure["address"] or "", one.failure["address"]) for one in found if one.failure["peers"]}
    lost = any(one.failure["peers"] and one.failure["kind"] in (SYMPTOM, CONSEQUENCE) for one in found)

    def nearness(one: Finding) -> tuple[int, float, bool]:
        # A suspect explains a loss, and not an error that its own rank met.
        kind = UNKNOWN if one.failure["kind"] == SUSPECT and not lost else one.failure["kind"]
        later = kind != one.failure["kind"]
        return KINDS.index(kind) * 2 + later, one.failure["time"] or 0.0, one.host not in blamed

    found.sort(key=nearness)
    return _diagnosis(_each_once(found)[:_MOST], nodes, names)


def _start(head: Facts) -> tuple[float | None, float | None]:
    """When rank 0 was started and from when on something may be the reason, in Unix seconds; None if not known."""
    unit = (head.get("units") or {}).get(SERVE) or {}
    active = unit.get("active_since")
    if not active:
        return None, None
    # A start that systemd repeated has its reason in the one before.
    return float(active), float(active) - (_BEFORE_RESTART if unit.get("n_restarts") else _CLOCKS)


def _of_node(host: str, status: Facts, active: float | None) -> t.Iterator[Finding]:
    if status.get("unreachable") or status.get("failed"):
        yield Finding(host, _unreached(status) if status.get("unreachable") else _blind(status))
        return
    # Of a start that systemd has repeated the one before has the reason.
    told = status.get("failures") or ([status["failure"]] if status.get("failure") else status.get("failures_before"))
    failures: list[Failure | None] = [*(told or [])]
    failures += [one.get("failure") for one in status.get("engines") or []]
    failures += [*(status.get("troubles") or []), *(status.get("kills") or [])]
    failures += [unit_failure(name, unit) for name, unit in (status.get("units") or {}).items()]
    failures += [memory_failure(status.get("memory") or {})]
    booted = status.get("booted")
    if booted and active is not None and booted > active:
        failures.append(_rebooted(booted))
    yield from (Finding(host, one) for one in failures if one)
    ended = [name for name, unit in (status.get("units") or {}).items() if _ended(unit)]
    if ended and not any(failures):
        yield Finding(host, _stopped(ended))


def _ended(unit: Facts) -> bool:
    return unit.get("load_state") == "loaded" and unit.get("active_state") in ("inactive", "failed")


def _unreached(status: Facts) -> Failure:
    said = " ".join(str(status.get("msg") or "no message").split())[:200].rstrip(".")
    return made(
        "node-unreachable",
        SUSPECT,
        f"It cannot be reached over SSH ({said})",
        "If it answers ping and nothing else, it swaps: end the engine on the other nodes first and wait; only then "
        "cut its power",
        source=RECIPE,
        line=said,
    )


def _blind(status: Facts) -> Failure:
    said = " ".join(str(status.get("msg") or "no message").split())[:200].rstrip(".")
    cause = f"Its state could not be read ({said})"
    return made("node-blind", GENERIC, cause, "Run status_hy3 again", source="engine_status", line=said)


def _rebooted(booted: float) -> Failure:
    return made(
        "node-rebooted",
        ROOT,
        "It was booted again while the engine ran, by hand or because it hung or lost power",
        "Read `journalctl -b -1 -e` there; then run serve_hy3",
        source="btime of /proc/stat",
        line=f"booted at {booted:.0f}",
        time=float(booted),
    )


def _stopped(names: t.Sequence[str]) -> Failure:
    return made(
        "unit-stopped",
        SUSPECT,
        f"{', '.join(names)} is not running there",
        "Run serve_hy3, which starts what is missing",
        source="systemd",
        line=f"{', '.join(names)}: inactive",
    )


def _not_in_ray(head: Facts, addresses: t.Mapping[str, str], found: t.Sequence[Finding]) -> list[Finding]:
    """Nodes that Ray's head does not count as alive and of which nothing else is known."""
    members = (head.get("ray") or {}).get("nodes")
    if members is None:
        return []
    alive = {one.get("address") for one in members if one.get("alive")}
    told = {one.host for one in found if one.failure["kind"] in (ROOT, SUSPECT)}
    cause = "Ray does not count it as alive"
    gone = made("ray-member-lost", SUSPECT, cause, "Run serve_hy3", source="Ray", line="ray.nodes()")
    return [Finding(host, gone) for host, address in addresses.items() if address not in alive and host not in told]


def _in_time(found: list[Finding]) -> list[Finding]:
    """Without what came long after the first that somebody noticed: it cannot be the reason."""
    noticed = [one.failure["time"] for one in found if one.failure["kind"] in (SYMPTOM, CONSEQUENCE)]
    times = [time for time in noticed if time is not None]
    if not times:
        return found
    last = min(times) + _CLOCKS
    return [one for one in found if one.failure["kind"] != ROOT or (one.failure["time"] or 0.0) <= last]


def _each_once(found: t.Sequence[Finding]) -> list[Finding]:
    first: dict[tuple[str, str], Finding] = {}
    for one in found:
        first.setdefault((one.host, one.failure["cause"]), one)
    return list(first.values())


def _diagnosis(found: t.Sequence[Finding], nodes: t.Mapping[str, Facts], names: t.Mapping[str, str]) -> Diagnosis:
    host, reason = found[0]
    followed = [
        {"host": one.host, "rule": one.failure["rule"], "cause": one.failure["cause"], "line": one.failure["line"]}
        for one in found[1:]
    ]
    # Where the reason is not known, what was looked at is worth as much as what was found.
    asks = reason["peers"] or reason["kind"] == GENERIC
    looked = [_looked(name, status) for name, status in nodes.items() if name != host] if asks else []
    text = f"{host}: {reason['cause']}; {reason['fix']}. It says {reason['line'][:240]!r}."
    lost = names.get(reason["address"] or "", reason["address"])
    text += f" The other node is {lost}." if reason["peers"] and lost and lost != host else ""
    echoes = [one for one in followed if one["cause"] != reason["cause"]]
    text += "".join(f" Then {one['host']}: {one['cause']} ({one['line'][:120]!r})." for one in echoes[:3])
    text += "".join(f" {one}" for one in looked)
    return Diagnosis(
        host=host,
        rule=reason["rule"],
        kind=reason["kind"],
        cause=reason["cause"],
        fix=reason["fix"],
        source=reason["source"],
        line=reason["line"],
        followed=followed,
        looked=looked,
        text=text,
    )


def _looked(host: str, status: Facts) -> str:
    """What a node has, of which nothing bad is known."""
    if status.get("unreachable") or status.get("failed"):
        return f"{host} could not be looked at."
    memory = status.get("memory") or {}
    units = [
        f"{name} {unit.get('active_state')}"
        for name, unit in (status.get("units") or {}).items()
        if unit.get("load_state") != "not-found"
    ]
    parts = [f"{format_gib(memory['available'])} of {format_gib(memory['total'])} free"] if memory.get("total") else []
    parts += ["no kill for memory"] if status.get("troubles") == [] else []
    return f"Looked at {host}: {', '.join([*parts, *units]) or 'nothing is known of it'}."
