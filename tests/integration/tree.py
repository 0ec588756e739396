# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint to copy: whole by its index and headers, its weights random bytes that no engine loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header


def make_checkpoint(directory: Path, shards: int, shard_bytes: int) -> None:
    """One tensor of ``shard_bytes`` random bytes in each of ``shards`` files."""
    directory.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name, tensor = (
            f"model-{number + 1:05d}-of-{shards:05d}.safetensors",
            f"model.layers.{number}.mlp.up_proj.weight",
        )
        (directory / name).write_bytes(render_header({tensor: ("U8", (shard_bytes,))}, {}) + os.urandom(shard_bytes))
        weight_map[tensor] = name
    index = {"metadata": {"total_size": shards * shard_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": shards}))
