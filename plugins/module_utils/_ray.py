# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Ray's ports."""

from __future__ import annotations

import typing as t


def ports(plan: t.Mapping[str, t.Any], *, head: bool) -> dict[str, range]:
    """The ports that Ray needs on a node, by what they are for: a range for the workers, one for each other thing.

    ``plan`` is the fact ``hy3_plan``, which has them all.
    """
    named = dict(plan["ray_ports"])
    workers = range(named.pop("min-worker-port"), named.pop("max-worker-port") + 1)
    if head:
        named |= {"head": plan["ray_port"], **plan["ray_head_ports"]}
    return {f"Ray's {name}": range(port, port + 1) for name, port in named.items()} | {"Ray's workers": workers}
