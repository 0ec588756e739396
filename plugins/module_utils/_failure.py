# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a failure is, and what a rule is that finds one in a log. The rules are data, in ``_failures_*.py``."""

from __future__ import annotations

import re
import typing as t
from dataclasses import dataclass

# From the root to its echoes. Peers of a failed rank report a lost connection, louder than the rank itself; a suspect
# is a state that explains a loss (a node that is not reached); an unknown is an error that no rule is about.
KINDS = ("root", "suspect", "unknown", "symptom", "consequence", "generic")
ROOT, SUSPECT, UNKNOWN, SYMPTOM, CONSEQUENCE, GENERIC = KINDS

RECIPE = "recipe LibertAIDAI/Hy3-NVFP4 on two Sparks, troubleshooting"
SGLANG_RECIPE = "recipe vroomfondel/Hy3-NVFP4-W4A4 on four Sparks"


class Failure(t.TypedDict):
    """A diagnosis in sentences, the log line that it stands on, and whether the engine cannot come up any more.

    ``rule`` and ``kind`` are those of the rule. ``peers`` says that the reason may lie on another node, ``address`` is
    the node (address or name) that the log names, ``time`` is in Unix seconds; both are None where the log is silent.
    """

    rule: str
    kind: str
    cause: str
    fix: str
    source: str
    line: str
    fatal: bool
    peers: bool
    address: str | None
    time: float | None


@dataclass(frozen=True)
class Rule:
    """A known failure line. ``cause`` and ``fix`` may name the pattern's groups in braces.

    ``fatal``: the engine never recovers after this line. ``drafter``: only while the drafter loads (True) or while the
    main model does (False). ``engine``: not in a log of the other engine. ``near``: one of the lines shortly before
    or right after must match. ``unless``: the line must not match. ``when``: the groups must satisfy it. ``message``:
    the pattern is held against what is left of a line without the prefixes of its writers, from its beginning.
    ``vague``: says nothing once another rule of the same ``family`` has matched.
    """

    id: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    source: str
    fatal: bool = True
    kind: str = ROOT
    drafter: bool | None = None
    engine: str = ""
    near: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    when: t.Callable[[t.Mapping[str, str]], bool] | None = None
    message: bool = False
    peers: bool = False
    family: str = ""
    vague: bool = False


def rule(
    name: str,
    pattern: str,
    cause: str,
    fix: str,
    source: str,
    *,
    near: str = "",
    unless: str = "",
    **more: t.Any,
) -> Rule:
    """A :class:`Rule` from patterns as text."""
    return Rule(
        name,
        re.compile(pattern),
        cause,
        fix,
        source,
        near=re.compile(near) if near else None,
        unless=re.compile(unless) if unless else None,
        **more,
    )


def made(
    name: str,
    kind: str,
    cause: str,
    fix: str,
    *,
    source: str,
    line: str,
    time: float | None = None,
) -> Failure:
    """A :class:`Failure` that no log line says: from the state of a unit or of a node."""
    return Failure(
        rule=name,
        kind=kind,
        cause=cause,
        fix=fix,
        source=source,
        line=line,
        fatal=False,
        peers=kind == CONSEQUENCE,
        address=None,
        time=time,
    )
