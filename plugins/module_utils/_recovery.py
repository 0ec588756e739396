# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What to do about a sick cluster: from the evidence to each node's state, to actions in their order, to advice.

Pure. What acts looks again afterwards and asks anew, with what was done; nothing is done twice, so it comes to an end.
An engine that answers is never stopped, and nothing is stopped or ended that is not this cluster's own.
"""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._reach import BANNER
from ansible_collections.sparks.hy3.plugins.module_utils._recovery_states import (
    BLIND,
    CUT_OFF,
    ENGINE_DEAD,
    ENGINE_SILENT,
    ENGINE_WRONG,
    HEALTHY,
    LEFTOVER,
    MEMORY_HELD,
    NO_LOGIN,
    ORPHANS,
    OTHER_CLUSTER,
    OUT_OF_REACH,
    RAY,
    SERVE,
    SSH_DOWN,
    STARTING,
    UNREACHABLE,
    WEDGED,
    WORKER_LOST,
    Cluster,
    Facts,
    Finding,
    facts_of,
    rows_of,
)

STOP, END, WAIT = "stop", "end", "wait"
# Of these something may come back by itself: a machine that boots, or one whose peers have let go.
MAY_COME_BACK = (WEDGED, SSH_DOWN, UNREACHABLE)
BUDGET = (
    "before the next start lower what the engine takes of it: max-model-len or gpu-memory-utilization in "
    "hy3_engine_args, or the caps in hy3_memory"
)


class Action(t.TypedDict):
    """What to do on a node (C(stop) a unit, C(end) orphans, C(wait) for its SSH), why, and its state before."""

    do: str
    node: str
    what: str
    why: str
    state: str


class Advice(t.TypedDict):
    """What a person may do; C(person) says that nothing else helps. C(node) is empty for the cluster as a whole."""

    node: str
    sentence: str
    person: bool


class NodeState(t.TypedDict):
    """A node's gravest state and why, what else is the matter, and the evidence for it."""

    state: str
    why: str
    also: list[str]
    evidence: list[str]
    reached: bool


class Plan(t.TypedDict):
    """The judgement, the actions in their order, and the advice; C(person) if some of that only a person can do."""

    answers: bool
    healthy: bool
    person: bool
    nodes: dict[str, NodeState]
    actions: list[Action]
    advice: list[Advice]


class Recovery:
    """One look at a cluster, and what was done about it before."""

    def __init__(self, cluster: Cluster, *, done: t.Sequence[Facts], wait: int) -> None:
        self.cluster = cluster
        self.wait = wait
        self._done = [facts_of(one) for one in done]
        self.findings = {node: cluster.findings(node) for node in cluster.hosts}
        self.state = {node: found[0].state for node, found in self.findings.items()}
        # Rank 0 first: SGLang's other ranks end when it tells them to, and not before.
        self._order = [cluster.head, *(node for node in cluster.hosts if node != cluster.head)]
        wanted = self._stops() + self._ends() + self._waits()
        self.actions = [one for one in wanted if not self._was_done(one)]
        self._failed = [one for one in wanted if self._was_done(one)]

    def _was_done(self, action: Action) -> bool:
        key = ("do", "node", "what")
        return any(all(one.get(name) == action[name] for name in key) for one in self._done)  # type: ignore[literal-required]  # of a tuple

    def _with(self, *states: str) -> list[str]:
        return [node for node in self._order if any(one.state in states for one in self.findings[node])]

    # ---- Actions

    def _action(self, do: str, node: str, what: str, why: str) -> Action:
        return Action(do=do, node=node, what=what, why=why, state=self.state[node])

    def _stops(self) -> list[Action]:
        cluster = self.cluster
        if cluster.answers:
            return []
        if wedged := self._with(WEDGED):
            names = ", ".join(wedged)
            why = f"{names} starves and may come back when its peers let go, as the published case did"
            return self._stop_all(SERVE, why) + self._stop_all(RAY, why)
        stops = self._stop_all(SERVE, why) if (why := self._why_engine_is_dead()) else []
        for node in self._with(LEFTOVER):
            for one in self.findings[node]:
                if one.state == LEFTOVER and (node, one.unit) not in [(stop["node"], stop["what"]) for stop in stops]:
                    stops.append(self._action(STOP, node, one.unit, one.why))
        return sorted(stops, key=lambda one: one["what"] != SERVE)

    def _stop_all(self, unit: str, why: str) -> list[Action]:
        return [self._action(STOP, node, unit, why) for node in self._order if self.cluster.runs(node, unit)]

    def _why_engine_is_dead(self) -> str:
        """Why ranks that still run can never answer again, or an empty text."""
        for node in self._with(ENGINE_DEAD):
            return f"{node}: {next(one.why for one in self.findings[node] if one.state == ENGINE_DEAD)}"
        # Ranks that start wait for one another, and that ends by itself.
        if STARTING in (one.state for one in self.findings[self.cluster.head]):
            return ""
        for node in self._with(WORKER_LOST):
            why = next(one.why for one in self.findings[node] if one.state == WORKER_LOST)
            return f"the rank of {node} is lost ({why}), and no rank can rejoin"
        for node in self._order:
            by_peers = any(who != "the controller" for who, _view in self.cluster.views(node))
            gone = self.state[node] == UNREACHABLE and by_peers
            if gone or (self.state[node] in OUT_OF_REACH and self.cluster.ray_counts(node) is False):
                return f"the rank of {node} is lost ({self.findings[node][0].why}), and no rank can rejoin"
        return ""

    def _ends(self) -> list[Action]:
        return [
            self._action(END, node, "orphans", next(one.why for one in self.findings[node] if one.state == ORPHANS))
            for node in self._with(ORPHANS)
        ]

    def _waits(self) -> list[Action]:
        if self.cluster.answers or self.wait <= 0:
            return []
        why = f"it may come back by itself; if it has not within {self.wait} s, a person must power cycle or mend it"
        return [self._action(WAIT, node, "ssh", why) for node in self._order if self.state[node] in MAY_COME_BACK]

    # ---- Advice

    def advice(self) -> list[Advice]:
        """For each node that no action is left for, then for the cluster."""
        busy = {one["node"] for one in self.actions}
        found = [one for node in self._order if node not in busy for one in self._for_node(node)]
        if self.actions:
            return found
        return found + self._for_cluster(any(one["person"] for one in found))

    def _for_node(self, node: str) -> list[Advice]:
        failed = [one for one in self._failed if one["node"] == node and one["do"] != WAIT]
        sentences = [(self._not_helped(one), True) for one in failed]
        for one in self.findings[node]:
            if words := self._words(node, one):
                sentences.append((words, one.state != STARTING))
        return [Advice(node=node, sentence=sentence, person=person) for sentence, person in sentences]

    @staticmethod
    def _not_helped(action: Action) -> str:
        node = action["node"]
        if action["do"] == END:
            return (
                f"Reboot {node} (`sudo systemctl reboot`): {action['why']} and did not end by force either, so the "
                "driver holds it, and nothing else gives its memory back."
            )
        return (
            f"Look at `systemctl status {action['what']}` on {node}: it was stopped and runs again or still; disable "
            "what starts it, or reboot the node."
        )

    def _words(self, node: str, finding: Finding) -> str:
        """What to do about one finding that no action is for, or an empty text."""
        state, why = finding.state, finding.why
        if state in MAY_COME_BACK:
            return self._gone(node, state, why)
        if state == CUT_OFF:
            who = next(who for who, view in self.cluster.views(node) if view.get("tcp") == BANNER)
            address = facts_of(self.cluster.plan.get("addresses")).get(node)
            return (
                f"Mend the controller's way to {node}, which lives: {why}. Until then Ansible can go through {who}, "
                f"with ansible_host: {address} and ansible_ssh_common_args: '-o ProxyJump={who}' for {node}."
            )
        return {
            NO_LOGIN: f"Let Ansible work on {node}: {why}; `ssh` to it, and `sudo true` there, show what is missing.",
            OTHER_CLUSTER: f"Take {node} out of this inventory, or run stop-hy3 with that cluster's: {why}, so nothing "
            "there is touched.",
            BLIND: f"See that {node} has systemd and a Python for Ansible: {why}.",
            MEMORY_HELD: self._held(node, why),
            ENGINE_WRONG: f"Run doctor-hy3, which looks for the reason: {why}.",
            ENGINE_SILENT: f"Wait if somebody uses the engine; if nobody does, run stop-hy3 and serve-hy3: {why}.",
            STARTING: f"Wait until status-hy3 says that it answers: {why} on {node}.",
        }.get(state, "")

    def _gone(self, node: str, state: str, why: str) -> str:
        if self.cluster.answers:
            return (
                f"Leave {node} until nobody needs the engine, then look at its console: {why}, and yet the engine "
                "answers, so nothing was stopped."
            )
        stopped = [f"{one.get('what')} on {one.get('node')}" for one in self._done if one.get("do") == STOP]
        after = f" after stopping {' and '.join(stopped)}" if stopped else ""
        waited = f" It was waited for, up to {self.wait} s{after}." if self._waited(node) else ""
        if state == WEDGED:
            return (
                f"Power cycle {node}: hold its power button until it is off, or unplug it, and switch it on again: "
                f"{why}.{waited} Then run recover-hy3 again, and {BUDGET}."
            )
        if state == SSH_DOWN:
            return (
                f"On the console of {node} run `sudo systemctl restart ssh`, and read in `journalctl -u ssh` why it "
                f"ended: {why}.{waited} If the console does not answer either, power cycle it. Then run "
                "recover-hy3 again."
            )
        return (
            f"See that {node} has power and its cables: {why}.{waited} If it is switched on, power cycle it. "
            "Then run recover-hy3 again."
        )

    def _held(self, node: str, why: str) -> str:
        if "held by" in why:
            return f"End what holds the memory of {node}, which is not ours and was left alone: {why}."
        return (
            f"See what uses the memory of {node} (`ps -e -o rss,user,args --sort=-rss | head`): {why}. If nothing "
            "there does, reboot it: the driver has kept what an engine had, and each further start begins with less."
        )

    def _waited(self, node: str) -> bool:
        return any(one.get("do") == WAIT and one.get("node") == node for one in self._done)

    def _for_cluster(self, person: bool) -> list[Advice]:
        found: list[Advice] = []
        came_back = {one.get("node") for one in self._done if one.get("state") == WEDGED and one.get("do") == WAIT}
        for node in self._order:
            line = self.cluster.wreck(node)
            if node in came_back and self.cluster.reached(node):
                found.append(Advice(node=node, person=False, sentence=f"{node} had starved and is back: {BUDGET}."))
            elif line and not self.cluster.answers:
                words = f"The boot of {node} before this one ended without memory ({line!r}): {BUDGET}."
                found.append(Advice(node=node, person=False, sentence=words))
        if person or self._with(STARTING):
            return found
        if self.cluster.answers:
            sentence = "Healthy: the engine answers, and nothing is to be done."
        else:
            sentence = "Run serve-hy3: nothing is in its way, and it is the one way to a cluster that serves."
        return [*found, Advice(node="", sentence=sentence, person=False)]


def recovery_plan(
    evidence: Facts, plan: Facts, *, done: t.Sequence[Facts], now: float, start_timeout: float, wait: int
) -> Plan:
    """What to do about a cluster.

    Args:
        evidence: By node, what was returned: C(view) by ssh_probe, C(login) by ping, C(peers) by reach_info, C(status)
            by engine_status, C(smoke) by chat_smoke, C(orphans) by engine_orphans, C(memory) by memory_budget, and
            C(wreck) by journalctl of the boot before. Any of it may be missing.
        plan: The fact C(hy3_plan).
        done: The actions of earlier rounds.
        now: The time, in Unix seconds.
        start_timeout: How long a start may take, in seconds.
        wait: How long a node is waited for, in seconds; 0 waits for none.
    """
    cluster = Cluster(evidence, plan, now=now, start_timeout=start_timeout)
    recovery = Recovery(cluster, done=rows_of(done), wait=wait)
    advice = recovery.advice()
    return Plan(
        answers=cluster.answers,
        healthy=cluster.answers and set(recovery.state.values()) == {HEALTHY},
        person=any(one["person"] for one in advice),
        nodes={
            node: NodeState(
                state=found[0].state,
                why=found[0].why,
                also=[f"{one.state}: {one.why}" for one in found[1:]],
                evidence=cluster.evidence_for(node),
                reached=cluster.reached(node),
            )
            for node, found in recovery.findings.items()
        },
        actions=recovery.actions,
        advice=advice,
    )
