# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``doctor_faults``: what was seen on one node, as a list of faults."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._started_fabric import node_fabric, started_faults

DOCUMENTATION = r"""
name: doctor_faults
short_description: What was seen on one node, as a list of faults
version_added: 0.1.0
description:
  - Turns what the modules of a doctor's visit returned into one list. A module that could not look is a fault, too.
author: The sparks.hy3 contributors (@sparks-hy3)
options:
  _input:
    type: dict
    required: true
    description:
      - Registered results by C(reach), C(found), C(status), C(smoke), C(strangers), C(firewall), C(roce), C(links),
        C(memory) and C(rules). What is missing or skipped was not asked for.
      - C(plan) is the fact C(hy3_failure) where the inventory was refused, so that there is no plan.
      - C(strangers) is what filter P(sparks.hy3.occupant_problems#filter) returns.
      - C(elsewhere) are our units that the plan starts on other nodes only; one that another plan left here may rest.
      - C(hcas) are all HCA ports as M(sparks.hy3.fabric_info) gives them, C(interfaces) the names of all network
        interfaces. Without them only those of the fabric address are known.
  host:
    type: str
    required: true
    description: The node's name.
  address:
    type: str
    required: true
    description: The node's address on the fabric, or an empty text.
"""

EXAMPLES = r"""
- name: List the faults
  ansible.builtin.debug:
    msg: "{{ {'reach': ping, 'roce': gid} | sparks.hy3.doctor_faults(host='spark-1', address='192.168.100.1') }}"
"""

RETURN = r"""
_value:
  description:
    - The faults, worst first, with C(host), C(severity), C(rule) (a rule's id, or the check's name) and C(sentence)
      with the value, the rule and the way out.
    - The severity is V(error), V(warning), V(note), or V(unknown) for what cannot be known from outside.
  type: list
  elements: dict
"""

Facts = t.Mapping[str, t.Any]
Fault = dict[str, str]
SEVERITIES = ("error", "warning", "note", "unknown")
# A key that each module returns when it could look.
LOOKED = {"found": "engines", "status": "units", "roce": "gid_index", "links": "paths"}
LOOKED |= {"memory": "fits", "rules": "findings"}
SKIPPED: Facts = {"skipped": True}


def _message(result: Facts) -> str:
    text = " ".join(str(result.get("msg") or result.get("stderr") or "no message").split())
    return text if text.endswith(".") else f"{text}."


def _blind(seen: Facts) -> list[tuple[str, str]]:
    """What could not look: for roce_gid and memory_budget that itself is the finding."""
    results = {name: seen.get(name) or SKIPPED for name in LOOKED}
    return [
        (name, _message(result))
        for name, result in results.items()
        if not result.get("skipped") and LOOKED[name] not in result
    ]


def _engine(seen: Facts, address: str) -> list[tuple[str, str]]:
    status, others = seen.get("status") or {}, seen.get("found") or {}
    engines, kills = others.get("engines") or [], others.get("kills") or []
    faults: list[tuple[str, str]] = []
    for name, unit in (status.get("units") or {}).items():
        rests = unit["active_state"] == "inactive" and name in (seen.get("elsewhere") or [])
        if unit["load_state"] != "not-found" and unit["active_state"] != "active" and not rests:
            state = (
                f"{name} is {unit['active_state']} ({unit['result']}, {unit['n_restarts']} restarts), and it must be "
                f"active; read `journalctl -u {name}` there."
            )
            faults.append(("unit", " ".join([state, *unit["remarks"]])))
    failures = [status.get("failure"), *(one["failure"] for one in engines), *kills]
    faults += [("log", _said(one)) for one in failures if one]
    for one in engines:
        joined = (one.get("arguments") or {}).get("node-ip-address")
        if one["kind"] == "raylet" and address and joined and joined != address:
            faults.append(
                (
                    "ray-node-address",
                    f"Ray joined as {joined}, and this node's address is {address}; start Ray with "
                    f"--node-ip-address={address}.",
                )
            )
    faults += [_overwritten(change) for one in engines for change in one.get("changes") or []]
    if (status.get("ray") or {}).get("error"):
        faults.append(("ray", f"{status['ray']['error']}; read `journalctl -u hy3-ray` on the head."))
    return list(dict.fromkeys(faults))


def _restarted(seen: Facts) -> list[str]:
    """What there is to say of units that run."""
    units = ((seen.get("status") or {}).get("units") or {}).values()
    return [remark for unit in units if unit["active_state"] == "active" for remark in unit["remarks"]]


def _said(failure: Facts) -> str:
    return f"The log says {failure['line'][:200]!r}: {failure['cause']}; {failure['fix']}."


def _overwritten(change: Facts) -> tuple[str, str]:
    return (
        "carry-over-overwrites",
        f"{change['log']} says that {change['variable']} was overwritten from {change['before']!r} to "
        f"{change['after']!r}, and each node has its own; keep it out of the driver's environment or list it in "
        "ray_non_carry_over_env_vars.json.",
    )


def _fabric(seen: Facts) -> list[tuple[str, str, str]]:
    """Severity, check and sentence for fabric variables of processes with ranks that do not work on this node."""
    roce, engines = seen.get("roce") or {}, (seen.get("found") or {}).get("engines") or []
    node = node_fabric(roce, seen.get("hcas") or [], seen.get("interfaces") or [])
    if not node:
        return []
    # Ray's raylet hands its environment to the ranks; the driver beside it has none of them.
    by_ray = any(one["kind"] == "raylet" for one in engines)
    who: dict[tuple[str, str], list[str]] = {}
    for one in engines:
        ranks = one["kind"] in ("raylet", "worker", "engine_core") or (one["kind"] == "driver" and not by_ray)
        for fault in started_faults(one.get("environment") or {}, node) if ranks else []:
            who.setdefault(fault, []).append(f"{one['kind']} {one['pid']}")
    return [
        (severity, "fabric", f"Started with {sentence} ({', '.join(names)}).")
        for (severity, sentence), names in who.items()
    ]


def _unknown(seen: Facts) -> list[tuple[str, str]]:
    """What cannot be known from outside."""
    unknown: list[tuple[str, str]] = []
    for one in (seen.get("found") or {}).get("engines") or []:
        who = f"{one['kind']} {one['pid']} ({one['unit'] or 'no unit'})"
        if one["kind"] in ("driver", "raylet") and one["changes"] is None:
            unknown.append(("log", f"{who} logs to {one['log'] or 'a terminal or a pipe'}, which tells nothing here."))
        if one["environment"] is None:
            unknown.append(("environment", f"What {who} was started with: it has written its title over that."))
    lacking: dict[str, list[str]] = {}
    for rule, fact in ((seen.get("rules") or {}).get("unjudged") or {}).items():
        lacking.setdefault(fact, []).append(rule)
    return unknown + [(", ".join(rules), f"Not judged without {fact}.") for fact, rules in sorted(lacking.items())]


def doctor_faults(seen: Facts, host: str, address: str) -> list[Fault]:
    """Every fault in what was seen on one node, as dictionaries, worst first."""
    reach = seen.get("reach") or {}
    if reach.get("unreachable") or reach.get("failed"):
        why = _message(reach)
        sentence = f"It cannot be reached over SSH ({why.rstrip('.')}), so nothing else of it is known; mend the "
        sentence += "connection, or if it answers ping and nothing else, free the memory of its peers first."
        return [{"host": host, "severity": "error", "rule": "reach", "sentence": sentence}]
    plan = seen.get("plan") or {}
    found = [("inventory", _message(plan))] if plan.get("msg") else []
    found += _blind(seen) + _engine(seen, address)
    found += [("memory", sentence) for sentence in (seen.get("memory") or {}).get("problems") or []]
    found += [("occupied", sentence) for sentence in seen.get("strangers") or []]
    firewall, smoke = seen.get("firewall") or SKIPPED, seen.get("smoke") or SKIPPED
    if not firewall.get("skipped") and firewall.get("rc") != 0:
        way = "install the package nftables, or set hy3_firewall to false if another firewall guards Ray's ports."
        found.append(("firewall", f"`nft list tables` fails ({_message(firewall).rstrip('.')}); {way}"))
    if not smoke.get("skipped") and smoke.get("ok") is False:
        found.append(("smoke", f"The endpoint did not answer as it must: {_message(smoke)}"))
    faults = [{"host": host, "severity": "error", "rule": rule, "sentence": text} for rule, text in found]
    faults += [{"host": host, "severity": "warning", "rule": "unit", "sentence": text} for text in _restarted(seen)]
    faults += [{"host": host, "severity": how, "rule": rule, "sentence": text} for how, rule, text in _fabric(seen)]
    told = {sentence for _rule, sentence in found}
    for one in (seen.get("status") or {}).get("troubles") or []:
        # What killed an engine is among the errors; the rest may be over.
        text = f"{one['cause']} ({one['line'][:200]!r}); {one['fix']}."
        if _said(one) not in told:
            faults.append({"host": host, "severity": "warning", "rule": one["rule"], "sentence": text})
    for one in (seen.get("rules") or {}).get("findings") or []:
        if not one["allowed"]:
            text = f"{one['found']}, and {one['what']}; {one['fix']}."
            faults.append({"host": host, "severity": one["severity"], "rule": one["rule"], "sentence": text})
    faults += [{"host": host, "severity": "unknown", "rule": rule, "sentence": text} for rule, text in _unknown(seen)]
    return sorted(faults, key=lambda fault: SEVERITIES.index(fault["severity"]))


class FilterModule:
    """Ansible's entry."""

    def filters(self) -> dict[str, t.Callable[..., object]]:
        """Filters by name."""
        return {"doctor_faults": doctor_faults}
