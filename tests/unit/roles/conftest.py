# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks that several tests share say what differs, as those in the tests themselves do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("ansible_collections.sparks.hy3.tests.unit.roles.golden")
