# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading the headers of a checkpoint as large as the real one, against the safetensors library."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import inspect
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header
from ansible_collections.sparks.hy3.tests.bench.figures import median_seconds, show
from safetensors import safe_open

SHARDS, TENSORS = 99, 1862  # per shard; Hy3 in NVFP4 has about 184,000 tensors in 99 shards


def make_checkpoint(directory: Path) -> None:
    """Shards with as many tensors as the real ones, of one byte each."""
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {f"model.layers.{shard}.mlp.experts.{number}.weight": ("U8", (1,)) for number in range(TENSORS)}
        (directory / name).write_bytes(render_header(tensors, {}) + bytes(TENSORS))
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": SHARDS * TENSORS}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"num_hidden_layers": 1}')


def read_with_library(directory: Path) -> int:
    """What the safetensors library offers for the same question: every tensor's name and shape."""
    count = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as shard:
            count += sum(bool(shard.get_slice(name).get_shape()) for name in shard.keys())  # noqa: SIM118 - no dictionary
    return count


def bench() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_checkpoint(directory)
        assert not inspect(directory, level="header").problems
        assert read_with_library(directory) == SHARDS * TENSORS
        ours = median_seconds(lambda: inspect(directory, level="header"))
        library = median_seconds(lambda: read_with_library(directory))
    show("checkpoint_info, 99 shards, headers", ours, "s", "aim 5")
    show("checkpoint_info / safetensors names and shapes", ours / library, "ratio", "-")
