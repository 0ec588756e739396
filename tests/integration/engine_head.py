# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the real vLLM builds the output head of Hy3's drafter for a ModelOpt NVFP4 checkpoint, and loads a BF16 one.

Run by the engine's own interpreter, it prints a line ``HEAD`` with a JSON object.
"""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.models.hy_v3_mtp import HYV3SharedHead

SIZE, WIDTH = 128, 512

# A stand-in: there is no NVFP4 kernel for a CPU, and to build and load a layer none is called.
modelopt.select_linear_kernel = lambda *_arguments, **_options: SimpleNamespace(input_quant_key=lambda: None)


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quantization = modelopt.ModelOptNvFp4Config.from_config(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    )
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1)
        head = HYV3SharedHead(SimpleNamespace(vocab_size=SIZE, hidden_size=WIDTH), quantization).head
    found: dict[str, object] = {"shape": list(head.weight.shape)}
    try:
        head.weight.weight_loader(head.weight, torch.ones(SIZE, WIDTH, dtype=torch.bfloat16))
    except RuntimeError as exc:
        found["error"] = str(exc)
    print("HEAD", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
