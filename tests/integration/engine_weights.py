# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the real vLLM allocates on each rank: parameters and buffers, before a CPU build repacks and hides them.

``engine_weights.py CHECKPOINT RANKS``, run by the engine's own interpreter, prints a line ``WEIGHTS`` with a JSON list
of bytes, one a rank. Each worker imports this file as its extension before it loads the model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM
from vllm.model_executor.model_loader import base_loader

# Name of a tensor and bytes, by model: the target, then the drafter.
ALLOCATED: list[dict[str, int]] = []
repack = base_loader.process_weights_after_loading


def count_and_repack(model: Any, *args: Any, **options: Any) -> Any:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    storages = {
        tensor.untyped_storage().data_ptr(): (name, tensor.untyped_storage().nbytes()) for name, tensor in tensors
    }
    ALLOCATED.append(dict(storages.values()))
    return repack(model, *args, **options)


base_loader.process_weights_after_loading = count_and_repack


class Counted:
    """Worker extension."""

    def allocated(self) -> int:
        """Bytes of this rank. After its load a drafter has the target's embedding, head and table of positions."""
        target, *drafters = ALLOCATED
        shared = ("embed_tokens", "shared_head", "rotary_emb")
        own = [
            size for drafter in drafters for name, size in drafter.items() if not any(part in name for part in shared)
        ]
        return sum(target.values()) + sum(own)


def main() -> None:
    checkpoint, ranks = sys.argv[1], int(sys.argv[2])
    engine = LLM(
        model=checkpoint,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=2,
        dtype="bfloat16",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        worker_extension_cls="engine_weights.Counted",
    )
    print("WEIGHTS", json.dumps(engine.collective_rpc("allocated")), flush=True)


if __name__ == "__main__":
    main()
