# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What plays say, as ansible-core 2.19 wraps and quotes it, and nodes on which nothing is lost."""

from __future__ import annotations

from ansible_collections.sparks.hy3.tests.faults import state

RECAP = """
PLAY RECAP *********************************************************************
spark-1                    : ok=80   changed={0}    unreachable=0    failed=0    skipped=9    rescued=0    ignored=0
spark-2                    : ok=60   changed={1}    unreachable=0    failed=0    skipped=9    rescued=0    ignored=0
"""
# As ansible-core 2.19 wraps and quotes it.
STATUS = """
TASK [sparks.hy3.verify : Look at every node] **********************************
ok: [spark-1]

TASK [sparks.hy3.report : Summary] *********************************************
ok: [spark-1] =>\x20
    msg:
    - Hy3 does not answer at http://127.0.0.1:8000/v1 on spark-1.
    - '  A worker or the engine core ended, and the rest noticed: Look at the unit''s
        log and the memory of the other nodes'
    - '  (EngineCore pid=12) ERROR 12-01 [core.py:12] ray.exceptions.ActorDiedError: The
        actor died unexpectedly'
    - '  Ray      198.18.20.1 with 1 GPUs'
    - '  spark-2  198.18.20.2  cannot be reached over SSH'
    - ''
    - 'Report: /reports/lab/2026-12-01T100000Z-status.json'
""" + RECAP.format(0, 0)
REFUSED = """
TASK [sparks.hy3.preflight : Refuse a node that cannot be reached] *************
fatal: [spark-2]: FAILED! =>\x20
    changed: false
    msg: 'spark-2 cannot be reached over SSH (Connection timed out during banner
        exchange); mend the connection, or if it answers ping and nothing else, free
        the memory of its peers first.'

TASK [sparks.hy3.report : Summary] *********************************************
ok: [spark-1] =>\x20
    msg:
    - 'FAILED: spark-2, task "Refuse a node that cannot be reached"'
    - '  spark-2 cannot be reached over SSH (Connection timed out during banner exchange);
        mend the connection, or if it answers ping and nothing else, free the memory of
        its peers first.'
    - 'Report: /reports/lab/2026-12-01T100000Z-serve.json'

TASK [sparks.hy3.report : Fail with the first cause] ***************************
"""


SOURCE = {"config.json": "c0", "model-1.safetensors": "f1"}


def running(kinds: dict[str, int]) -> list[dict[str, object]]:
    return [
        {"pid": 10 + number, "kind": kind, "unit": "hy3-ray.service"}
        for number, kind in enumerate(kind for kind, count in kinds.items() for _ in range(count))
    ]


def whole() -> dict[str, state.Node]:
    kept = {"home/lab/mine": "aa"}
    return {
        name: state.Node(dict(kept), SOURCE | {".hy3-manifest": "x"}, [], running(kinds))
        for name, kinds in (("spark-1", state.HEAD), ("spark-2", state.WORKER))
    }
