# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._metrics import Metrics, read_metrics

# vLLM 0.24.0, shortened.
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="hy3"} 1.0
vllm:num_requests_waiting{engine="0",model_name="hy3"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="hy3",reason="capacity"} 3.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="hy3"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="hy3"} 1000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="hy3"} 613.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="hy3",position="0"} 613.0
vllm:cache_config_info{block_size="16",engine="0",kv_cache_max_concurrency="1.079",kv_cache_size_tokens="176784"} 1.0
"""

NOTHING = Metrics(
    drafts=None,
    drafted=None,
    accepted=None,
    accepted_per_position=None,
    acceptance=None,
    kv_cache_tokens=None,
    max_concurrency=None,
    running=None,
    waiting=None,
)

TEST_METRICS: list[tuple[str, str, Metrics]] = [
    (
        "vllm-0.24",
        PAGE,
        Metrics(
            drafts=1000,
            drafted=1000,
            accepted=613,
            accepted_per_position=[613],
            acceptance=0.613,
            kv_cache_tokens=176784,
            max_concurrency=1.079,
            running=1,
            waiting=0,
        ),
    ),
    ("empty", "", NOTHING),
    ("not-prometheus", "<html>nothing here</html>", NOTHING),
    ("nan", 'vllm:num_requests_running{engine="0"} NaN', NOTHING),
    ("cache-size-unknown", 'vllm:cache_config_info{kv_cache_size_tokens="None"} 1.0', NOTHING),
    ("two-engines", 'vllm:num_requests_running{e="0"} 1\nvllm:num_requests_running{e="1"} 2', NOTHING | {"running": 3}),
    (
        "two-positions-of-two-engines",
        "\n".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="{place}"}} {count}'
            for engine, place, count in ((0, 1, 20.0), (0, 0, 62.0), (1, 0, 8.0))
        ),
        NOTHING | {"accepted_per_position": [70, 20]},
    ),
    (
        "nothing-drafted-yet",
        "vllm:spec_decode_num_draft_tokens_total 0.0\nvllm:spec_decode_num_accepted_tokens_total 0.0",
        NOTHING | {"drafted": 0, "accepted": 0},
    ),
]


@pytest.mark.parametrize(("page", "expected"), [row[1:] for row in TEST_METRICS], ids=[row[0] for row in TEST_METRICS])
def test_read_metrics(page: str, expected: Metrics) -> None:
    assert read_metrics(page) == expected
