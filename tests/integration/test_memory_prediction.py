# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What memory_budget predicts for the lab's checkpoint, against the real engine. Needs the lab's venv."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._budget import Engine, Rank, predict
from ansible_collections.sparks.hy3.plugins.module_utils._memory import GIB
from ansible_collections.sparks.hy3.plugins.module_utils._weights import (
    kv_bytes_per_token,
    read_checkpoint,
    weights_per_rank,
)

HERE = Path(__file__).parent
LAB = Path(os.environ.get("HY3_LAB_DIR", "/var/lib/hy3-lab"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_and_pool(tmp_path: Path, ranks: int) -> None:
    checkpoint = tmp_path / "Hy3-tiny"
    script = HERE.parents[1] / "roles/lab/files/make_tiny_hy3.py"
    subprocess.run([sys.executable, script, checkpoint], check=True, capture_output=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "VLLM_CONFIG_ROOT": str(tmp_path / "config"),
    }
    command = [str(LAB / "venv/bin/python"), str(HERE / "engine_weights.py"), str(checkpoint), str(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    weights = re.search(r"^WEIGHTS (.*)$", done.stdout, re.MULTILINE)
    pool = re.search(r"KV cache size: ([\d,]+) tokens", done.stdout + done.stderr)
    assert weights is not None, done.stderr[-4000:]
    assert pool is not None

    sizes, tensors = read_checkpoint(checkpoint)
    predicted = sum(weights_per_rank(tensors, sizes, tensor_parallel=ranks, speculative=True).values())
    real = json.loads(weights[1])
    assert len(real) == ranks
    assert [abs(predicted / size - 1) < 0.02 for size in real] == [True] * ranks
    per_token = kv_bytes_per_token(sizes, tensor_parallel=ranks, cache_dtype="auto", speculative=True)
    engine = Engine(kv_cache_memory=GIB, rank=Rank(predicted, per_token, sizes.max_positions))
    assert predict(engine, mem_total=4 * GIB).kv_tokens == int(pool[1].replace(",", ""))
