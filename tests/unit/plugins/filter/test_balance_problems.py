# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.filter.balance_problems import balance_problems
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB


def test_the_sentence_names_both_nodes() -> None:
    """B94."""
    found = balance_problems({"n1": int(114.2 * GIB), "n2": 81 * GIB, "n3": int(113.8 * GIB)})
    assert found == {
        "n2": "n2 has 81.00 GiB available and n1 114.20 GiB, and SGLang refuses a node with less than 0.9 of another "
        "('The memory capacity is unbalanced'); end what uses 21.78 GiB of it on n2, or wait until a stopped engine's "
        "memory has come back."
    }


def test_nobody_was_looked_at() -> None:
    assert balance_problems({}) == {}
