# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's tiny Hy3 with its routed experts in ModelOpt's NVFP4, as the published checkpoints for Sparks are.

checkpoint.py OUT --algorithm NVFP4|W4A16_NVFP4 [--acceptance 0.6]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import struct
import sys
import typing as t
from collections.abc import Iterable, Iterator
from pathlib import Path

from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny
from ansible_collections.sparks.hy3.tests.gpu import nvfp4

ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
SEED, LAYERS, SHARDS = 0, 3, 4
INPUT_SCALE = 0.01
PRODUCER = {"name": "modelopt", "version": "0.39.0"}
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}


def quantized(tensors: Iterable[tiny.Tensor], algorithm: str) -> Iterator[tiny.Tensor]:
    """Every tensor, of a routed expert's projection its NVFP4 parts. Gate and up, which engines fuse, share scale_2."""
    everything = list(tensors)
    amax: dict[tuple[str, bool], float] = {}
    for tensor in everything:
        if match := _EXPERT.fullmatch(tensor.name):
            key = match[1], match[2] == "down_proj"
            amax[key] = max(amax.get(key, 0.0), nvfp4.largest(tensor.data))
    for tensor in everything:
        if match := _EXPERT.fullmatch(tensor.name):
            scale_2 = nvfp4.scale_2_for(amax[match[1], match[2] == "down_proj"])
            yield from _parts(tensor, scale_2, with_inputs=algorithm == "NVFP4")
        else:
            yield tensor


def _parts(tensor: tiny.Tensor, scale_2: float, *, with_inputs: bool) -> Iterator[tiny.Tensor]:
    rows, columns = tensor.shape
    packed = nvfp4.quantize(tensor.data, scale_2)
    yield tensor._replace(dtype="U8", shape=(rows, columns // 2), data=packed.weight)
    shape = (rows, columns // nvfp4.BLOCK)
    yield tiny.Tensor(f"{tensor.name}_scale", "F8_E4M3", shape, packed.scales)
    yield tiny.Tensor(f"{tensor.name}_scale_2", "F32", (), struct.pack("<f", scale_2))
    if with_inputs:
        name = tensor.name.removesuffix("weight") + "input_scale"
        yield tiny.Tensor(name, "F32", (), struct.pack("<f", INPUT_SCALE))


def excluded(layers: int) -> list[str]:
    """What is not quantized. The shared expert stands twice: vLLM up to 0.28 looks for it without its own name."""
    names = ["lm_head", "model.embed_tokens", "*.self_attn*", "*.eh_proj"]
    for layer in range(layers + 1):
        names += [f"model.layers.{layer}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        names += [f"model.layers.{layer}.mlp.{name}" for name in ("shared_mlp*", "router*")]
    return names


def small_files(algorithm: str, layers: int) -> dict[str, str]:
    """Every file but the weights, with the quantization in both places in which engines look for it."""
    files = tiny.small_files(layers)
    number = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    group: dict[str, t.Any] = {"targets": ["Linear"], "weights": number}
    if algorithm == "NVFP4":
        group["input_activations"] = number
    said = {"quant_algo": algorithm, "group_size": nvfp4.BLOCK}
    newer = {"quant_method": "modelopt", **said, "producer": PRODUCER, "ignore": excluded(layers)}
    config = {**json.loads(files["config.json"]), "quantization_config": {**newer, "config_groups": {"group_0": group}}}
    older = {**said, "kv_cache_quant_algo": None, "exclude_modules": excluded(layers)}
    contents = {"config.json": config, "hf_quant_config.json": {"producer": PRODUCER, "quantization": older}}
    return {**files, **{name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}}


def checkpoint(algorithm: str, *, acceptance: float) -> dict[str, bytes]:
    """Every file: name to content."""
    weights = tiny.Weights(seed=SEED, layers=LAYERS, acceptance=acceptance)
    # A tensor's offset must be a multiple of its element size.
    tensors = sorted(quantized(weights.tensors(), algorithm), key=lambda tensor: -_ITEM_BYTES[tensor.dtype])
    files = {name: content.encode() for name, content in small_files(algorithm, LAYERS).items()}
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = tensors[number::SHARDS]
        files[name] = tiny.shard(part)
        weight_map.update((tensor.name, name) for tensor in part)
    total = sum(len(tensor.data) for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return {**files, "model.safetensors.index.json": (json.dumps(index, indent=2) + "\n").encode()}


def drafts_of_one_answer(tokens: int, *, acceptance: float) -> tuple[int, int]:
    """How many drafts a chat answer of ``tokens`` tokens has, and how many of them are right, by the drafter's design.

    A step checks the draft for the token after the newest one. It adds that token and, where that was right, one more.
    """
    words = tiny.CYCLE
    rng = random.Random(f"{SEED} wrong drafts")  # noqa: S311  the generator's own draw, no secret
    wrong = {words[word] for word in rng.sample(range(len(words)), round(len(words) * (1 - acceptance)))}
    newest, written, drafts, right = tiny.successor("<assistant>"), 1, 0, 0
    while written < tokens:
        drafts += 1
        steps = 1 if newest in wrong else 2
        right += steps - 1
        for _step in range(steps):
            newest = tiny.successor(newest)
        written += steps
    return drafts, right


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a tiny Hy3 checkpoint with NVFP4 experts and known answers.")
    parser.add_argument("out", type=Path, help="directory to make; an identical one is left alone")
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0], help="ModelOpt's name (default: NVFP4)"
    )
    parser.add_argument("--acceptance", type=float, default=1.0, help="share of right drafts, 0 to 1 (default: 1.0)")
    options = parser.parse_args()
    try:
        files = checkpoint(options.algorithm, acceptance=options.acceptance)
        print("changed" if tiny.write(options.out.absolute(), files) else "unchanged")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
