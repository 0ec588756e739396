# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Known-bad settings: what holds facts against the rules. The rules themselves are data, in ``_rules_*.py``."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass
from difflib import get_close_matches

from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._rules_checkpoint import CHECKPOINT_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._rules_moe import MOE_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._rules_node import NODE_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._rules_processes import PROCESS_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._rules_ray import RAY_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._rules_sglang import SGLANG_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._rules_vllm import VLLM_RULES
from ansible_collections.sparks.hy3.plugins.module_utils._situation import (
    ERROR,
    Rule,
    Situation,
    Unknown,
    release_of,
)

RULES: tuple[Rule, ...] = (
    *MOE_RULES,
    *VLLM_RULES,
    *CHECKPOINT_RULES,
    *RAY_RULES,
    *PROCESS_RULES,
    *NODE_RULES,
    *SGLANG_RULES,
)
IDS: tuple[str, ...] = tuple(rule.id for rule in RULES)


@dataclass(frozen=True)
class Finding:
    """A rule that holds. ``found`` is the value, ``allowed`` says that the user accepts it."""

    rule: Rule
    found: str
    allowed: bool

    @property
    def sentence(self) -> str:
        """Value, rule and way out in one sentence, with the id by which it can be accepted."""
        way = "; hy3_allow can accept it" if self.rule.severity == ERROR else ""
        return f"{self.found}, and {self.rule.what}; {self.rule.fix} (rule {self.rule.id}{way})."


@dataclass(frozen=True)
class Verdict:
    """What holds, in the order of the rules, and the rules that could not be judged with the fact that each lacks."""

    findings: list[Finding]
    unjudged: dict[str, str]

    def sentences(self, severity: str) -> list[str]:
        """The sentences of one severity that nobody has accepted."""
        return [one.sentence for one in self.findings if one.rule.severity == severity and not one.allowed]


def refuse_unknown_ids(allow: t.Iterable[object]) -> None:
    """Raise Hy3Error for an id that no rule has: a slip of the pen would otherwise accept nothing, and say nothing."""
    for given in allow:
        if given not in IDS:
            near = get_close_matches(str(given), IDS, n=1, cutoff=0.4)
            way = f"write {near[0]}" if near else "take it out"
            raise Hy3Error(f"hy3_allow has {given!r}, and no rule has that name; {way}, or see docs/rules.md.")


def of_the_engine(rule: Rule, situation: Situation) -> bool:
    """Whether the rule is about this engine and this version of it. Raises Unknown."""
    if rule.engine and situation.engine != rule.engine:
        return False
    if rule.since and situation.version < release_of(rule.since):
        return False
    return not rule.until or situation.version < release_of(rule.until)


def value_found(rule: Rule, situation: Situation) -> str | None:
    """The value that breaks the rule, or None. One part of the condition that is false settles it, whatever is unknown
    of the others; Unknown is raised only when no part is.
    """
    lacking: Unknown | None = None
    found: str | None = None
    parts: tuple[t.Callable[[], str | bool | None], ...] = (
        lambda: of_the_engine(rule, situation),
        lambda: not rule.schemes or situation.scheme in rule.schemes,
        lambda: rule.found(situation),
    )
    for part in parts:
        try:
            value = part()
        except Unknown as unknown:
            lacking = lacking or unknown
            continue
        if not value:
            return None
        found = value if isinstance(value, str) else found
    if lacking:
        raise lacking
    return found


def judge(facts: t.Mapping[str, t.Any], *, allow: t.Collection[str] = ()) -> Verdict:
    """Hold every rule against ``facts`` (see :class:`Situation` for their shape).

    A fact that is None is unknown: a rule that needs it is not judged, and said so, instead of passed.
    """
    situation = Situation(facts)
    verdict = Verdict([], {})
    for rule in RULES:
        try:
            found = value_found(rule, situation)
        except Unknown as lacking:
            verdict.unjudged[rule.id] = str(lacking)
            continue
        if found:
            verdict.findings.append(Finding(rule, found, rule.id in allow))
    return verdict
