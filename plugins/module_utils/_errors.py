# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The one exception that helpers raise; only a module's ``main()`` turns it into ``fail_json``."""

from __future__ import annotations


class Hy3Error(Exception):
    """Bad input or a bad node, said in one sentence: the value found, the rule it breaks, the way out."""
