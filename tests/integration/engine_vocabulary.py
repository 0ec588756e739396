# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the real vLLM makes of Hy3's vocabulary on some ranks that talk over gloo.

``engine_vocabulary.py RANKS PORT``, run by the engine's own interpreter, prints a line ``VOCABULARY`` with a JSON
object for each rank, in no order.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import Tensor, multiprocessing
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

SIZE, WIDTH = 120832, 8
TOKENS = [0, 40319, 40320, 80639, 80640, SIZE - 1]


def load(layer: VocabParallelEmbedding) -> VocabParallelEmbedding:
    """Give each token its number as weight; what nobody loads stays NaN."""
    with torch.no_grad():
        layer.weight.fill_(float("nan"))
        layer.weight_loader(layer.weight, torch.arange(float(SIZE)).unsqueeze(1).expand(SIZE, WIDTH).contiguous())
    return layer


def measure() -> dict[str, object]:
    embedding, head = load(VocabParallelEmbedding(SIZE, WIDTH)), load(ParallelLMHead(SIZE, WIDTH))
    head.quant_method.process_weights_after_loading(head)
    own = embedding.shard_indices.num_org_elements
    # Minus each token's number: a padded row, which is 0, would beat them all.
    logits: Tensor | None = LogitsProcessor(SIZE)(head, torch.tensor([[-1.0] + [0.0] * (WIDTH - 1)]))
    return {
        "padded": embedding.num_embeddings_padded,
        "rows": embedding.num_embeddings_per_partition,
        "own_rows": own,
        "padding_is_zero": not embedding.weight[own:].any().item(),
        "embedded": embedding(torch.tensor(TOKENS))[:, 0].tolist(),
        "logits": None if logits is None else [*logits.shape, torch.equal(logits[0], -torch.arange(float(SIZE)))],
    }


def rank_main(rank: int, ranks: int, port: int) -> None:
    # What the executor gives its workers: a name for their shared memory.
    os.environ["VLLM_DIST_IDENT"] = f"vocabulary-{port}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(ranks)
        try:
            found = measure()
        except AssertionError as exc:
            found = {"error": str(exc)}
        # One that ends while others still connect to it would break these.
        torch.distributed.barrier()
    # One write, so that the ranks' lines stay whole.
    sys.stdout.write(f"VOCABULARY {json.dumps(found)}\n")


if __name__ == "__main__":
    count = int(sys.argv[1])
    # Forked, so that vLLM is imported once.
    multiprocessing.start_processes(rank_main, (count, int(sys.argv[2])), count, start_method="fork")
