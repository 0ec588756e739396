# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The attributes that every module states, in one wording. PRIVATE to the collection."""

from __future__ import annotations


class ModuleDocFragment:
    """Attributes to extend with ``sparks.hy3._attributes`` and one of ``.info`` or ``.changes``."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and return changed status prediction without modifying target.
  diff_mode:
    description: Returns details on what has changed, or would change in C(check_mode), when in diff mode.
  idempotent:
    description: The second of two runs with the same arguments, outside check mode, reports no change.
"""

    # For modules that only read.
    INFO = r"""
options: {}
attributes:
  check_mode:
    support: full
    details: The module only reads.
  diff_mode:
    support: N/A
    details: The module only reads.
  idempotent:
    support: full
    details: The module only reads.
"""

    # For modules that change files and predict it exactly.
    CHANGES = r"""
options: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
"""
