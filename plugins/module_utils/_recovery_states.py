# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What state each node of a sick cluster is in, from what was seen of it here, by its peers and on itself.

Pure: the evidence is what modules returned, and any part of it may be missing, for that is when it is asked.
"""

from __future__ import annotations

import re
import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._engine_processes import kind_of
from ansible_collections.sparks.hy3.plugins.module_utils._memory import format_gib
from ansible_collections.sparks.hy3.plugins.module_utils._reach import BANNER, CLOSED, OTHER, REFUSED, SILENT
from ansible_collections.sparks.hy3.plugins.module_utils._units import of_another_cluster

Facts = t.Mapping[str, t.Any]
SERVE, RAY = "hy3-serve.service", "hy3-ray.service"

# Gravest first: a node's own state is the first that it has.
WEDGED, UNREACHABLE, SSH_DOWN, NO_LOGIN = "wedged", "unreachable", "ssh_down", "no_login"
CUT_OFF, OTHER_CLUSTER, BLIND = "cut_off", "other_cluster", "blind"
ORPHANS, ENGINE_DEAD, WORKER_LOST, LEFTOVER = "orphans", "engine_dead", "worker_lost", "leftover"
MEMORY_HELD, ENGINE_WRONG, ENGINE_SILENT = "memory_held", "engine_wrong", "engine_silent"
STARTING, STOPPED, HEALTHY = "starting", "stopped", "healthy"
STATES = (
    *(WEDGED, UNREACHABLE, SSH_DOWN, NO_LOGIN, CUT_OFF, OTHER_CLUSTER, BLIND, ORPHANS, ENGINE_DEAD, WORKER_LOST),
    *(LEFTOVER, MEMORY_HELD, ENGINE_WRONG, ENGINE_SILENT, STARTING, STOPPED, HEALTHY),
)
# Nobody can look at, or act on, a node in one of these.
OUT_OF_REACH = (WEDGED, UNREACHABLE, SSH_DOWN, NO_LOGIN, CUT_OFF)

RUNS = ("active", "activating", "reloading", "deactivating")
_TCP = {
    "banner": "gives the banner of SSH",
    "silent": "takes the connection and gives no banner",
    "closed": "takes the connection and ends it without a banner",
    "other": "answers with something else than a banner of SSH",
    "refused": "refuses the connection",
    "timeout": "does not answer",
    "unreachable": "cannot be reached",
    "unresolved": "is a name that does not resolve",
    "error": "cannot be asked",
}
_HANGS = re.compile(r"timed? ?out", re.IGNORECASE)
# Of the kernel's log of a boot that ended: the driver could not get memory, or nothing was left (field case B117).
_WRECK = re.compile(r"NVRM: .*NV_ERR_NO_MEMORY|\bOut of memory: Killed process|swap_free 0 kB")


class Finding(t.NamedTuple):
    """One of C(STATES), why, in a sentence without its full stop, and of a leftover the unit that it is."""

    state: str
    why: str
    unit: str = ""


def facts_of(value: object) -> Facts:
    """The value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def rows_of(value: object) -> list[t.Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _text(value: object, size: int = 200) -> str:
    return " ".join(str(value or "").split())[:size].rstrip(" .")


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def said(who: str, view: Facts) -> str:
    """What one look at a node's SSH server came to, in words."""
    words = _TCP.get(str(view.get("tcp")), "was not asked")
    if view.get("tcp") == BANNER and view.get("key_exchange") == "stalled":
        words += ", and the key exchange does not end"
    if view.get("tcp") not in (BANNER, SILENT, CLOSED, OTHER, REFUSED):
        reason = f" ({_text(view['error'], 80)})" if view.get("error") else ""
        pinged = {"True": ", and its kernel answers ping", "False": ", nor to ping"}
        words += reason + pinged.get(str(view.get("ping")), "")
    return f"from {who}, {view.get('address')}:{view.get('port')} {words}"


class Cluster:
    """The evidence of all nodes, and the plan C(hy3_plan) that says what ought to run."""

    def __init__(self, evidence: Facts, plan: Facts, *, now: float, start_timeout: float) -> None:
        self.hosts: list[str] = list(plan["hosts"])
        self.head: str = plan["head"]["name"]
        self.ray = plan["executor"] == "ray"
        self.plan = plan
        self._evidence = {name: facts_of(evidence.get(name)) for name in self.hosts}
        self._now, self._start_timeout = now, start_timeout
        # Text from all ranks, right or wrong: the one proof that each of them computes.
        smoke = self._of(self.head, "smoke")
        self.answers = self.reached(self.head) and (smoke.get("ok") is True or bool(_text(smoke.get("text"))))
        self._wrong = "" if smoke.get("ok") is True else _text(smoke.get("msg")) or "no reason is known"

    def _of(self, node: str, what: str) -> Facts:
        return facts_of(self._evidence[node].get(what))

    def reached(self, node: str) -> bool:
        """Whether Ansible could log in to the node and run something there."""
        login = self._of(node, "login")
        return login.get("ping") == "pong" and not login.get("failed") and not login.get("unreachable")

    def views(self, node: str) -> list[tuple[str, Facts]]:
        """Who looked at the node's SSH server from outside, and what it saw."""
        found = [("the controller", self._of(node, "view"))]
        for peer in self.hosts:
            if peer != node and self.reached(peer):
                rows = [facts_of(row) for row in rows_of(self._of(peer, "peers").get("views"))]
                found += [(peer, row) for row in rows if row.get("name") == node]
        return [(who, view) for who, view in found if view.get("tcp") in _TCP]

    def evidence_for(self, node: str) -> list[str]:
        """What the judgement of a node stands on, in sentences."""
        login = self._of(node, "login")
        lines = [said(who, view) for who, view in self.views(node)]
        if not self.reached(node) and login.get("msg"):
            lines.append(f"Ansible: {_text(login['msg'])}")
        for name, unit in self.units(node).items():
            if unit.get("load_state") != "not-found":
                lines.append(f"{name} is {unit.get('active_state')} ({unit.get('result')})")
        for one in self.orphans(node):
            lines.append(f"{one.get('title')} (process {one.get('pid')}, {one.get('unit') or 'no unit'})")
        return lines

    def units(self, node: str) -> dict[str, Facts]:
        """Our units on a node that was looked at, but for those of another cluster."""
        units = self._units(node)
        others = {name for name, _role, _cluster in of_another_cluster(units, self.plan["cluster"])}
        return {name: unit for name, unit in units.items() if name not in others}

    def strangers(self, node: str) -> list[tuple[str, str]]:
        """Our units there that run for another cluster, and its name."""
        found = of_another_cluster(self._units(node), self.plan["cluster"])
        return [(name, cluster) for name, _role, cluster in found]

    def _units(self, node: str) -> dict[str, Facts]:
        known = facts_of(self._of(node, "status").get("units")) if self.reached(node) else {}
        rows = {name: facts_of(known.get(name)) for name in (SERVE, RAY)}
        empty = {"description": "", "active_state": "inactive", "load_state": "not-found", "result": "success"}
        return {name: {**empty, **{key: unit[key] for key in unit}} for name, unit in rows.items() if unit}

    def runs(self, node: str, unit: str) -> bool:
        """Whether our unit has a process there, or is about to."""
        return self.units(node).get(unit, {}).get("active_state") in RUNS

    def orphans(self, node: str) -> list[Facts]:
        """Processes of ours there that no unit and no engine holds any more."""
        rows = rows_of(self._of(node, "orphans").get("orphans")) if self.reached(node) else []
        return [facts_of(row) for row in rows if facts_of(row)]

    def wreck(self, node: str) -> str:
        """A line of the boot before this one that tells of a node out of memory, or an empty text."""
        lines = rows_of(self._of(node, "wreck").get("stdout_lines")) if self.reached(node) else []
        return next((_text(line) for line in reversed(lines) if _WRECK.search(str(line))), "")

    def findings(self, node: str) -> list[Finding]:
        """All that is the matter with a node, gravest first; a healthy one has that as its one finding."""
        found = self._inside(node) if self.reached(node) else [self._outside(node)]
        return sorted(found, key=lambda one: STATES.index(one.state)) or [Finding(HEALTHY, "its part runs as planned")]

    # ---- From outside

    def _outside(self, node: str) -> Finding:
        login, views = self._of(node, "login"), self.views(node)
        here = next((view for who, view in views if who == "the controller"), {})
        message = _text(login.get("msg"))
        # Who waits for sudo's prompt says so, and that is a matter of settings.
        hangs = bool(login.get("timedout")) or bool(_HANGS.search(message) and "privilege escalation" not in message)
        met = [view.get("tcp") for _who, view in views]
        if here.get("tcp") == BANNER and hangs:
            return Finding(WEDGED, "its SSH server gives a banner, and no login ends in time")
        if here.get("tcp") == BANNER:
            return Finding(
                NO_LOGIN, f"its SSH server answers, and Ansible cannot work there ({_text(login.get('msg'))})"
            )
        if BANNER in met:
            who = next(who for who, view in views if view.get("tcp") == BANNER)
            return Finding(CUT_OFF, f"the controller does not reach it, and {who} gets the banner of its SSH server")
        if SILENT in met:
            words = "its kernel takes connections to SSH, and no program there gets to say a word"
            return Finding(WEDGED, f"{words}: on a Spark that is a unified-memory wedge")
        if any(view.get("ping") for _who, view in views):
            return Finding(SSH_DOWN, "its kernel answers, and no SSH server does")
        return Finding(UNREACHABLE, "nothing of it answers")

    # ---- From inside

    def _inside(self, node: str) -> list[Finding]:
        status = self._of(node, "status")
        if "units" not in status:
            if status.get("timedout"):
                return [Finding(WEDGED, "a login works, and a look at its units does not end in time")]
            return [Finding(BLIND, f"its units cannot be looked at ({_text(status.get('msg')) or 'no message'})")]
        if others := self.strangers(node):
            name, cluster = others[0]
            return [Finding(OTHER_CLUSTER, f"{name} runs there for cluster '{cluster}'")]
        found = self._orphaned(node)
        if self.answers:
            wrong = self._wrong and node == self.head
            return [*found, Finding(ENGINE_WRONG, f"it answers, and wrongly: {self._wrong}")] if wrong else found
        found += self._ray(node) if self.ray else []
        found += self._engine(node) if node in self.plan["serve_hosts"] else []
        found += self._held(node)
        if not found and not any(self.runs(node, unit) for unit in (SERVE, RAY)):
            return [Finding(STOPPED, "nothing of ours runs there")]
        return found

    def _orphaned(self, node: str) -> list[Finding]:
        titles = [f"{one.get('title')} (process {one.get('pid')})" for one in self.orphans(node)]
        return [Finding(ORPHANS, f"{', '.join(titles)} outlived its engine")] if titles else []

    def _held(self, node: str) -> list[Finding]:
        memory = self._of(node, "memory")
        missing = _number(memory.get("missing")) or 0
        if missing <= 0 or any(self.runs(node, unit) for unit in (SERVE, RAY)):
            return []
        owners = [_text(facts_of(one).get("name"), 60) for one in rows_of(memory.get("owners"))]
        holder = f"held by {', '.join(dict.fromkeys(owners))}" if owners else "and no process on the GPU holds it"
        return [Finding(MEMORY_HELD, f"{format_gib(int(missing))} of its memory are missing for a start, {holder}")]

    def _ray(self, node: str) -> list[Finding]:
        unit = self.units(node).get(RAY, {})
        state, head_runs = unit.get("active_state"), self.runs(self.head, RAY)
        if state == "failed" or (state not in RUNS and head_runs and node != self.head):
            dead = f"{RAY} is {state or 'not there'} ({unit.get('result')})"
            return [Finding(WORKER_LOST if node != self.head else ENGINE_DEAD, dead)]
        if state == "activating":
            return [self._starts(node, RAY)]
        return self._raylet(node, unit) if state == "active" else []

    def _starts(self, node: str, unit: str) -> Finding:
        """Of a unit that is about to run. One that waits for a head that was stopped waits for ever."""
        if node != self.head and self.reached(self.head) and not self.runs(self.head, unit):
            return Finding(STOPPED, f"{unit} waits for the head's, which does not run")
        return Finding(STARTING, f"{unit} is starting")

    def _raylet(self, node: str, unit: Facts) -> list[Finding]:
        """Of a node whose Ray runs."""
        if node != self.head and self.reached(self.head) and not self.runs(self.head, RAY):
            return [Finding(LEFTOVER, f"{RAY} runs on without the head's", RAY)]
        if ranks := self._ranks_without_driver(unit):
            return [Finding(LEFTOVER, f"{', '.join(ranks)} in {RAY} outlived the engine", RAY)]
        if self.ray_counts(node) is False:
            return [Finding(WORKER_LOST, f"{RAY} runs there, and the head's Ray does not count it")]
        error = facts_of(self._of(node, "status").get("ray")).get("error") if node == self.head else None
        return [Finding(ENGINE_SILENT, _text(error))] if error else []

    def ray_counts(self, node: str) -> bool | None:
        """Whether the head's Ray has the node among its living members; None where it cannot be asked.

        With as many members as nodes none is lost: one of them has another address than the inventory says.
        """
        members = facts_of(self._of(self.head, "status").get("ray")).get("nodes") if self.reached(self.head) else None
        if not self.ray or not isinstance(members, list) or not self.runs(self.head, RAY):
            return None
        alive = [facts_of(one).get("address") for one in members if facts_of(one).get("alive")]
        return None if len(alive) >= len(self.hosts) else facts_of(self.plan.get("addresses")).get(node) in alive

    def _ranks_without_driver(self, unit: Facts) -> list[str]:
        if not self.reached(self.head) or self.runs(self.head, SERVE):
            return []
        titles = [str(facts_of(one).get("title")) for one in rows_of(unit.get("processes"))]
        return [title for title in titles if (kind_of([title]) or ("",))[0] in ("worker", "engine_core")]

    def _engine(self, node: str) -> list[Finding]:
        unit, status = self.units(node).get(SERVE, {}), self._of(node, "status")
        state, failure = unit.get("active_state"), facts_of(status.get("failure"))
        cause = f": {_text(failure.get('cause'))}" if failure else ""
        if state not in RUNS and node != self.head and self.runs(self.head, SERVE):
            return [Finding(WORKER_LOST, f"{SERVE} is {state or 'not there'} ({unit.get('result')}){cause}")]
        if state == "failed":
            return [Finding(ENGINE_DEAD, f"{SERVE} failed ({unit.get('result')}){cause}")]
        if state not in RUNS:
            return [Finding(STOPPED, f"{SERVE} does not run")]
        if node != self.head:
            return self._other_rank(node, state)
        if failure.get("fatal"):
            return [Finding(ENGINE_DEAD, f"{SERVE} runs, and its log says that it cannot come up{cause}")]
        health = facts_of(status.get("health")).get("status")
        return [self._silence(unit, str(facts_of(status.get("log")).get("phase") or "starting"), health)]

    def _other_rank(self, node: str, state: object) -> list[Finding]:
        """Of a unit that runs beside the head's, without Ray."""
        if state == "activating":
            return [self._starts(node, SERVE)]
        headless = self.reached(self.head) and not self.runs(self.head, SERVE)
        return [Finding(LEFTOVER, f"{SERVE} runs on without the head's", SERVE)] if headless else []

    def _silence(self, unit: Facts, phase: str, health: object) -> Finding:
        """Of the head's engine that runs and has not answered. C(phase) is what its log says, C(health) a status."""
        since, limit = _number(unit.get("active_since")), self._start_timeout
        age = self._now - since if since else 0.0
        ready = phase == "ready" or health == 200
        if unit.get("active_state") == "activating" or (not ready and age <= limit):
            return Finding(STARTING, f"{SERVE} is in its phase '{phase}'")
        if not ready:
            limits = f"{age / 60:.0f} min, longer than hy3_start_timeout ({limit / 60:.0f} min)"
            return Finding(ENGINE_SILENT, f"{SERVE} has been in its phase '{phase}' for {limits}")
        # vLLM says so when its engine core is dead, and that never comes back.
        if self.plan["engine"] == "vllm" and health in (500, 503):
            return Finding(ENGINE_DEAD, f"{SERVE} runs, and its /health says {health}: the engine core is dead")
        return Finding(ENGINE_SILENT, f"{SERVE} runs and did not answer a question in time: it is busy, or hangs")
