# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds vLLM's Hy3 and its drafter for a checkpoint and loads it, by the code of the CUDA wheel, on a CPU.

The engine's interpreter runs this: load_on_cpu.py CHECKPOINT. It prints a line ``target`` and a line ``drafter``, with
``loaded`` or what went wrong. vLLM is told that there is a Hopper GPU; no kernel is called while weights are loaded.
"""

from __future__ import annotations

import socket
import sys
import typing as t

import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1

import vllm.platforms  # noqa: E402  asks for a GPU as it is imported
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402  after the pretence
from vllm.platforms.interface import DeviceCapability  # noqa: E402  after the pretence


class Hopper(NonNvmlCudaPlatform):
    """What vLLM asks a GPU for before it loads."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H200"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 140 << 30

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


class Nothing:
    """A stream or an event, of which none is used."""

    def __init__(self, *_arguments: object, **_options: object) -> None: ...


vllm.platforms._current_platform = Hopper()
torch.cuda.Stream = torch.cuda.Event = Nothing

from vllm.config import set_current_vllm_config  # noqa: E402  after the pretence
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402  after the pretence
from vllm.engine.arg_utils import EngineArgs  # noqa: E402  after the pretence
from vllm.model_executor.layers.fused_moe.runner import shared_experts  # noqa: E402  after the pretence
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402  after the pretence
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402  after the pretence
from vllm.utils import torch_utils  # noqa: E402  after the pretence

torch_utils.aux_stream = shared_experts.aux_stream = lambda: None


def load(config: t.Any, model_config: t.Any) -> str:
    try:
        model = initialize_model(vllm_config=config, model_config=model_config)
        model.load_weights(get_model_loader(config.load_config).get_all_weights(model_config, model))
    except RuntimeError as error:
        return str(error)
    return "loaded"


def main() -> None:
    config = EngineArgs(
        model=sys.argv[1],
        trust_remote_code=True,
        moe_backend="marlin",
        enforce_eager=True,
        kv_cache_dtype="fp8",
        max_model_len=163840,
        max_num_seqs=2,
        max_num_batched_tokens=8192,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1)
        drafter = config.speculative_config.draft_model_config
        print("target", load(config, config.model_config), flush=True)
        print("drafter", load(config.with_hf_config(drafter.hf_config, drafter.architectures), drafter), flush=True)


if __name__ == "__main__":
    main()
