# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Names of files that are not UTF-8, for an answer that Ansible takes."""

from __future__ import annotations

from typing import Any


def printable(value: Any) -> Any:
    """A result whose strings have escapes in place of what UTF-8 cannot write; Ansible refuses the whole otherwise."""
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable(item) for item in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
