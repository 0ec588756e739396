# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Padding a checkpoint of 4 GiB for three ranks, against ``cp -r`` and a sync, and the memory that it takes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header, tensor_bytes
from ansible_collections.sparks.hy3.tests.bench.figures import show

SHARDS = 8
HIDDEN, EXPERT, EXPERTS = 4096, 1536, 10  # as in Hy3, but for fewer experts: more than half of it is padded
MODULE = "ansible_collections.sparks.hy3.plugins.modules.checkpoint_pad"
TURNS = 3
MIB = 1024**2


def layer(number: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a layer: attention in BF16, experts in NVFP4."""
    prefix = f"model.layers.{number}"
    rows = {"q_proj": 8192, "k_proj": 1024, "v_proj": 1024}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{prefix}.self_attn.{name}.weight": ("BF16", (count, HIDDEN)) for name, count in rows.items()
    }
    tensors[f"{prefix}.self_attn.o_proj.weight"] = ("BF16", (HIDDEN, 8192))
    for expert in range(EXPERTS):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, EXPERT) if name == "down_proj" else (EXPERT, HIDDEN)
            weight = f"{prefix}.mlp.experts.{expert}.{name}.weight"
            tensors[weight] = ("U8", (shape[0], shape[1] // 2))
            tensors[f"{weight}_scale"] = ("F8_E4M3", (shape[0], shape[1] // 16))
    return tensors


def make_checkpoint(directory: Path) -> None:
    """Two layers a shard of random bytes."""
    directory.mkdir()
    block = os.urandom(MIB)
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = layer(2 * number) | layer(2 * number + 1)
        left = sum(tensor_bytes(*tensor) for tensor in tensors.values())
        with (directory / name).open("wb") as file:
            file.write(render_header(tensors, {}))
            while left:
                left -= file.write(block[:left])
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "hy_v3", "hidden_size": HIDDEN, "head_dim": 128, "num_hidden_layers": 2 * SHARDS}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 1024}
    (directory / "config.json").write_text(
        json.dumps({**config, "intermediate_size": 13440, "moe_intermediate_size": EXPERT})
    )


def seconds(work: t.Callable[[], object], target: Path) -> float:
    """Wall time of making the target, which is removed before; nothing else is left to be written back."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def pad(source: Path, target: Path) -> None:
    arguments = {"path": str(source), "dest": str(target), "tensor_parallel_size": 3}
    subprocess.run(
        [sys.executable, "-m", MODULE],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", "--file-system", str(target)], check=True)


def bench() -> None:
    # On a disk: /tmp may be a tmpfs.
    output = Path(__file__).parents[1] / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as name:
        source, target = Path(name) / "original", Path(name) / "copy"
        make_checkpoint(source)
        turns = []
        for _turn in range(TURNS):
            ours = seconds(lambda: pad(source, target), target)
            theirs = seconds(lambda: copy(source, target), target)
            turns.append((ours, theirs))
        size = sum(path.stat().st_size for path in source.iterdir())
    # Of the largest child, which cp is not.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # The least disturbed turn of each: this machine does other things.
    ours, theirs = (min(taken) for taken in zip(*turns, strict=True))
    show(f"checkpoint_pad, {size / 1024**3:.1f} GiB, synced", ours, "s", "-")
    show("cp -r and sync, the same", theirs, "s", "-")
    show("checkpoint_pad / cp -r and sync", ours / theirs, "ratio", "aim 1.5")
    show("checkpoint_pad, peak memory", peak / 1024, "MiB", "aim 190")
