# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/rules.md is the data, written out."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._rules import RULES
from ansible_collections.sparks.hy3.plugins.module_utils._situation import Rule

PAGE = Path(__file__).parents[3] / "docs/rules.md"
HEAD = ["| Rule | | For | Holds when | What happens | What to do | Known from |", "|---|---|---|---|---|---|---|"]


def scope(rule: Rule) -> str:
    """Engine, versions and scheme of a rule, in words."""
    parts = [{"vllm": "vLLM", "sglang": "SGLang", "": ""}[rule.engine]]
    if rule.since and rule.until:
        parts.append(f"{rule.since} to below {rule.until}")
    elif rule.since or rule.until:
        parts.append(f"{rule.since} and newer" if rule.since else f"below {rule.until}")
    parts.append(", ".join(sorted(rule.schemes)))
    return "; ".join(part for part in parts if part) or "any"


def row(rule: Rule) -> str:
    cells = [f"`{rule.id}`", rule.severity, scope(rule), rule.about, rule.what, rule.fix, rule.source]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def test_the_table_is_the_data() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert lines == [*HEAD, *map(row, RULES)]
