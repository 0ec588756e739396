# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Figures side by side with a named baseline from the same run; ``BENCH=page_cache`` in the environment selects one.

No figure is asserted. Those of the play need a lab that serves (`make demo`).
"""

from __future__ import annotations

import importlib
import os
import sys

BENCHES = ("checkpoint", "fanout", "pad", "page_cache", "play", "pull", "verify")


def main() -> None:
    wanted = os.environ.get("BENCH", "")
    if wanted and wanted not in BENCHES:
        sys.exit(f"BENCH is {wanted!r}: take one of {', '.join(BENCHES)}, or leave it out for all")
    for name in (wanted,) if wanted else BENCHES:
        importlib.import_module(f"ansible_collections.sparks.hy3.tests.bench.{name}").bench()


if __name__ == "__main__":
    main()
