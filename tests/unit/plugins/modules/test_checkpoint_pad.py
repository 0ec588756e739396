# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module on real files: what it writes, that it changes no answer, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import typing as t
from pathlib import Path

import numpy as np
import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint import inspect
from ansible_collections.sparks.hy3.plugins.module_utils._padding_tree import MARKER, PARTIAL
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.padded_model import (
    DENSE,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    QUANT,
    Array,
    Stored,
    model,
    numbers,
    read_model,
    weights,
    write_model,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from safetensors.numpy import load_file

TOKENS = 5


def pad(source: Path, dest: Path, ranks: int = 3, **others: t.Any) -> dict[str, t.Any]:
    return run_module("checkpoint_pad", path=str(source), dest=str(dest), tensor_parallel_size=ranks, **others)


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def exact_attention(tensors: dict[str, Stored], layer: int, hidden: Array, config: dict[str, int], ranks: int) -> Array:
    """Attention as tensor parallel ranks compute it, with softmax rounded to whole numbers, so that sums are exact."""
    prefix = f"model.layers.{layer}.self_attn"
    q, k, v, o = (weights(tensors, f"{prefix}.{name}_proj") for name in "qkvo")
    heads, kv_heads = config["num_attention_heads"] // ranks, config["num_key_value_heads"] // ranks
    total = np.zeros_like(hidden)
    for rank in range(ranks):
        rows = slice(rank * heads * HEAD_DIM, (rank + 1) * heads * HEAD_DIM)
        kv_rows = slice(rank * kv_heads * HEAD_DIM, (rank + 1) * kv_heads * HEAD_DIM)
        queries = (hidden @ q[rows].T).reshape(-1, heads, HEAD_DIM)
        keys, values = ((hidden @ own[kv_rows].T).reshape(-1, kv_heads, HEAD_DIM) for own in (k, v))
        out = np.empty_like(queries)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = queries[:, head] @ keys[:, group].T / 2**20
            chances = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = np.round(chances / chances.sum(axis=1, keepdims=True) * 64) @ values[:, group]
        total += out.reshape(len(hidden), -1) @ o[:, rows].T
    return total


def exact_mlp(tensors: dict[str, Stored], prefix: str, hidden: Array, ranks: int) -> Array:
    """A gated MLP as ranks compute it, silu rounded to whole numbers."""
    gate, up, down = (weights(tensors, f"{prefix}.{name}_proj") for name in ("gate", "up", "down"))
    size = len(gate) // ranks
    assert len(gate) % ranks == 0
    total = np.zeros_like(hidden)
    for rank in range(ranks):
        own = slice(rank * size, (rank + 1) * size)
        gated = hidden @ gate[own].T
        total += (np.round(np.where(gated < 0, 0, gated)) * (hidden @ up[own].T)) @ down[:, own].T
    return total


# Formats of attention, dense MLP and experts; ranks; sizes afterwards: heads, KV heads, dense, expert.
LAYOUTS = [
    ("bf16", "bf16", "bf16", 3, (72, 9, 13344, 1536)),
    ("bf16", "bf16", "nvfp4_modelopt", 3, (72, 9, 13344, 1536)),  # LibertAI's
    ("fp8_block", "fp8_block", "nvfp4_packed", 3, (72, 9, 13440, 1536)),  # Red Hat's, as in seed 002
    ("fp8_block_inv", "fp8_block_inv", "fp8_block_inv", 5, (80, 10, 13440, 1920)),
    ("fp8_channel", "fp8_channel", "fp8_tensor", 5, (80, 10, 13360, 1600)),
    ("nvfp4_modelopt", "nvfp4_modelopt", "nvfp4_modelopt", 3, (72, 9, 13344, 1536)),
    ("nvfp4_packed", "nvfp4_packed", "nvfp4_packed", 5, (80, 10, 13360, 1600)),
]


@pytest.mark.parametrize(
    ("attention", "mlp", "experts", "ranks", "sizes"), LAYOUTS, ids=["-".join(case[:3]) for case in LAYOUTS]
)
def test_padded_answers_are_the_same(
    *, tmp_path: Path, attention: str, mlp: str, experts: str, ranks: int, sizes: tuple[int, ...]
) -> None:
    old = model(attention, mlp, experts=experts)
    write_model(tmp_path / "old", old, quant=QUANT[mlp])
    result = pad(tmp_path / "old", tmp_path / "new", ranks)
    assert result["changed"], result
    config = json.loads((tmp_path / "new/config.json").read_bytes())
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
    assert tuple(config[name] for name in names) == sizes
    assert config["expert_hidden_dim"] == sizes[3]
    assert not inspect(tmp_path / "new", level="header").problems
    new = read_model(tmp_path / "new")
    assert new.keys() == old.keys()
    assert result["padded_tensors"] == sum(new[name][1] != old[name][1] for name in old)
    assert all(new[name] == old[name] for name in old if new[name][1] == old[name][1])
    check_padded_numbers(old, new)
    before = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    hidden = np.random.default_rng(1).integers(-2, 3, (TOKENS, HIDDEN)).astype(float)
    for layer in range(LAYERS + 1):  # the last is the drafter's
        expected = exact_attention(old, layer, hidden, before, 1)
        assert np.abs(expected).max() > 0
        assert np.abs(exact_attention(new, layer, hidden, config, ranks) - expected).max() == 0
    mlps = ["0.mlp"] + [
        f"{layer}.mlp.{part}"
        for layer in range(1, LAYERS + 1)
        for part in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_mlp")
    ]
    for prefix in mlps:
        expected = exact_mlp(old, f"model.layers.{prefix}", hidden, 1)
        assert np.abs(expected).max() > 0
        assert np.abs(exact_mlp(new, f"model.layers.{prefix}", hidden, ranks) - expected).max() == 0


def check_padded_numbers(old: dict[str, Stored], new: dict[str, Stored]) -> None:
    """The old numbers stand where they stood; what is new is zero, or one in a scale."""
    for name, stored in old.items():
        before, after = numbers(*stored), numbers(*new[name])
        if before.shape == after.shape:
            continue
        corner = tuple(slice(size) for size in before.shape)
        assert np.array_equal(after[corner], before), name
        rest = np.ones(after.shape, dtype=bool)
        rest[corner] = False
        assert (after[rest] == (1 if "scale" in name else 0)).all(), name


def test_a_misplaced_head_would_be_seen() -> None:
    """The comparison above can fail: zero heads after each old group, without new KV heads, read others."""
    tensors = model("bf16", "bf16", experts="bf16")
    hidden = np.random.default_rng(1).integers(-2, 3, (TOKENS, HIDDEN)).astype(float)
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    expected = exact_attention(tensors, 0, hidden, sizes, 1)
    name = "model.layers.0.self_attn.k_proj.weight"
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, data[len(data) // KV_HEADS :] + data[: len(data) // KV_HEADS])
    assert np.abs(exact_attention(tensors, 0, hidden, sizes, 1) - expected).max() > 0


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in four shards."""
    whole = model("bf16", "bf16", experts="nvfp4_modelopt")
    kept = {name: stored for name, stored in whole.items() if "layers.0.mlp" not in name}
    directory = tmp_path_factory.mktemp("pad") / "old"
    write_model(directory, kept, shards=4)
    return directory


def test_check_mode_then_twice(original: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    predicted = pad(original, new, _ansible_check_mode=True, _ansible_diff=True)
    assert not new.exists()
    done = pad(original, new, _ansible_diff=True)
    assert done == predicted
    assert done["changed"]
    assert done["checkpoint"] == str(new)
    assert done["plan"][:2] == ["num_attention_heads 64 -> 72", "num_key_value_heads 8 -> 9"]
    assert done["sizes"]["intermediate_size"] == {"before": DENSE, "after": 13344}
    assert done["written"][-2:] == ["model.safetensors.index.json", "config.json"]
    config = (new / "config.json").read_text()
    assert done["diff"][-1]["after"] == config
    assert json.loads(config)["num_attention_heads_ckpt"] == HEADS
    index = json.loads((new / "model.safetensors.index.json").read_bytes())
    assert index["metadata"] == {"total_size": done["total_size"], "made": "here"}
    for name in ("LICENSE", "tokenizer.json", "chat template.jinja"):
        assert (new / name).read_bytes() == (original / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in new.iterdir()}
    again = pad(original, new)
    assert (again["changed"], again["written"], again["diff"]) == (False, [], [])
    assert {path: path.stat().st_mtime_ns for path in new.iterdir()} == before


def test_nothing_to_pad(original: Path, tmp_path: Path) -> None:
    result = pad(original, tmp_path / "new", 4)
    assert (result["changed"], result["needed"], result["checkpoint"]) == (False, False, str(original))
    assert result["plan"] == ["nothing to pad: tensor parallel size 4 divides every size"]
    assert not (tmp_path / "new").exists()


def test_padding_a_padded_one(original: Path, tmp_path: Path) -> None:
    """Field case B72."""
    new, other = tmp_path / "new", tmp_path / "other"
    assert pad(original, new)["changed"]  # run1
    result = pad(new, other)  # run2
    assert (result["changed"], result["needed"], result["checkpoint"]) == (False, False, str(new))
    for ranks in (4, 2):  # run3, run4
        message = pad(new, other, ranks)["msg"]
        assert "num_key_value_heads 9" in message
        assert "the original with 64 attention heads and 8 KV heads" in message
        assert str(original) in message
    # The same of a tool that recorded nothing.
    (new / MARKER).unlink()
    config = {
        key: value
        for key, value in json.loads((new / "config.json").read_bytes()).items()
        if not key.endswith("_ckpt") and key != "padded_for_tensor_parallel_size"
    }
    (new / "config.json").write_text(json.dumps(config))
    assert "is padded already and has" in pad(new, other, 4)["msg"]
    assert not other.exists()


def test_one_shard_without_index(tmp_path: Path) -> None:
    tensors = {name: stored for name, stored in model("bf16", "bf16", experts="bf16").items() if ".mlp" not in name}
    write_model(tmp_path / "old", tensors, shards=1)
    assert pad(tmp_path / "old", tmp_path / "new")["written"][0] == "model.safetensors"
    assert read_model(tmp_path / "new").keys() == tensors.keys()
    assert not pad(tmp_path / "old", tmp_path / "new")["changed"]


def test_an_index_that_claims_too_much_is_no_fault(original: Path, tmp_path: Path) -> None:
    """Published checkpoints do."""
    source = tmp_path / "old"
    shutil.copytree(original, source)
    index = json.loads((source / "model.safetensors.index.json").read_bytes())
    index["metadata"]["total_size"] = 10**12
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert pad(source, tmp_path / "new")["changed"]


def test_cache_of_the_hub(original: Path, tmp_path: Path) -> None:
    """Links to blobs become files; what tools keep for themselves and strange weights stay behind."""
    snapshot, blobs = tmp_path / "snapshots/abc", tmp_path / "blobs"
    shutil.copytree(original, blobs)
    (snapshot / ".cache/huggingface").mkdir(parents=True)
    (snapshot / ".cache/huggingface/x").touch()
    (snapshot / "figures").mkdir()
    (snapshot / "figures/a b.txt").write_text("kept")
    (snapshot / "consolidated.safetensors").touch()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    pad(snapshot, tmp_path / "new")
    names = {str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*") if not path.is_dir()}
    assert names == {path.name for path in blobs.iterdir()} | {"figures/a b.txt", MARKER}
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))


# Hooks of Python's own, in the module's own process.
KILL = """
left = {number}
def hook(event, arguments):
    global left
    if event == "os.rename":
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
"""
TOUCH = """
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("{shard}.hy3-partial"):
        os.utime("{source}/{shard}")
"""
LIMIT = """
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("{shard}.hy3-partial"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (300000, 300000))
"""
RUN = """
sys.addaudithook(hook)
runpy.run_module("ansible_collections.sparks.hy3.plugins.modules.checkpoint_pad", run_name="__main__")
"""


def pad_with_hook(hook: str, source: Path, dest: Path) -> subprocess.CompletedProcess[str]:
    arguments = {"path": str(source), "dest": str(dest), "tensor_parallel_size": 3}
    return subprocess.run(
        [sys.executable, "-c", f"import os, resource, runpy, signal, sys\n{hook}{RUN}"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def kill_before_rename(number: int, source: Path, dest: Path) -> bool:
    """Run the module and kill it for real before it renames so many files; False if it ended before."""
    done = pad_with_hook(KILL.format(number=number), source, dest)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def test_killed_on_the_way(original: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    everything = pad(original, reference)["written"]
    # The marker, shards, small files, index and configuration, in this order.
    for renames in (0, 1, 3, 6, 8, 9):
        new = tmp_path / f"new{renames}"
        assert kill_before_rename(renames, original, new)
        assert inspect(new, level="size").problems
        assert not (new / "config.json").exists()
        assert len(list(new.glob(f"*{PARTIAL}"))) == 1
        result = pad(original, new)
        assert result["written"] == everything[max(0, renames - 1) :]
        assert tree(new) == tree(reference)
        shutil.rmtree(new)
    assert not kill_before_rename(len(everything) + 1, original, tmp_path / "last")


def test_killed_while_it_mends(original: Path, tmp_path: Path) -> None:
    """A whole tree with one shard to write again never looks whole in between."""
    source, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(original, source)
    pad(source, new)
    reference = tree(new)
    shard = "model-00002-of-00004.safetensors"
    os.utime(source / shard, (1, 1))  # far from what it was
    assert kill_before_rename(0, source, new)
    assert not (new / "config.json").exists()
    assert pad(source, new)["written"] == [shard, "config.json"]
    assert tree(new) == reference
    assert not pad(source, new)["changed"]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            TOUCH,
            "model-00003-of-00004.safetensors was changed while it was read; wait until it is whole, then run again.",
        ),
        (LIMIT, "cannot be written (File too large); see to that and run again, and only the rest is written."),
    ],
    ids=["original changes", "write fails"],
)
def test_failures_on_the_way(original: Path, tmp_path: Path, hook: str, message: str) -> None:
    source, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(original, source)
    shard = "model-00003-of-00004.safetensors"
    done = pad_with_hook(hook.format(source=source, shard=shard), source, new)
    assert message in json.loads(done.stdout)["msg"]
    assert sorted(path.name for path in new.iterdir()) == [MARKER] + [
        f"model-0000{number}-of-00004.safetensors" for number in (1, 2)
    ]
    assert pad(source, new)["written"][:2] == [shard, "model-00004-of-00004.safetensors"]
    assert not pad(source, new)["changed"]


def test_no_room(original: Path, tmp_path: Path) -> None:
    """A sparse shard of 4 TiB takes no room, and its copy would."""
    source, size = tmp_path / "old", 2**42
    shutil.copytree(original, source)
    header = render_header({"model.huge": ("U8", (size,))}, {})
    with (source / "huge.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    index = json.loads((source / "model.safetensors.index.json").read_bytes())
    index["weight_map"]["model.huge"] = "huge.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    message = pad(source, tmp_path / "new")["msg"]
    assert "make room, or name a directory on a larger disk." in message
    assert "needs 4398" in message
    assert not (tmp_path / "new").exists()


def test_damaged_and_lost_files_are_written_again(original: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    pad(original, new)
    reference = tree(new)
    shard = new / "model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (new / "LICENSE").unlink()
    (new / "tokenizer.json").write_text("changed")
    (new / "mine.txt").write_text("stays")
    assert pad(original, new)["written"] == [shard.name, "LICENSE", "tokenizer.json", "config.json"]
    assert tree(new) == {**reference, "mine.txt": b"stays"}


def test_mode_and_time_are_kept(original: Path, tmp_path: Path) -> None:
    source, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(original, source)
    shard = source / "model-00001-of-00004.safetensors"
    shard.chmod(0o640)
    os.utime(shard, (1000, 1000))
    pad(source, new)
    stat = (new / shard.name).stat()
    assert (stat.st_mode & 0o777, stat.st_mtime) == (0o640, 1000)


def break_shard(source: Path) -> None:
    shard = source / "model-00001-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])


def other_model(source: Path) -> None:
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))


def moved_tensor(source: Path) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["weight_map"]["model.embed_tokens.weight"] = "model-00004-of-00004.safetensors"
    path.write_text(json.dumps(index))


def lost_tensor(source: Path) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["weight_map"]["model.lost"] = "model-00004-of-00004.safetensors"
    path.write_text(json.dumps(index))


def odd_ratio(source: Path) -> None:
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(json.dumps({**config, "num_attention_heads": 63}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_shard, "5 fewer than its header describes; fetch it again."),
        (moved_tensor, "Tensors in another shard than the index says (1): model.embed_tokens.weight"),
        (lost_tensor, "Tensors in the index and in no shard (1): model.lost"),
        (other_model, "model_type 'llama'"),
        (odd_ratio, "63 attention heads, which 8 KV heads do not divide"),
        (shutil.rmtree, "is no directory; fetch the checkpoint to it."),
    ],
)
def test_originals_that_are_refused(
    original: Path, tmp_path: Path, damage: t.Callable[[Path], None], message: str
) -> None:
    shutil.copytree(original, tmp_path / "old")
    damage(tmp_path / "old")
    assert message in pad(tmp_path / "old", tmp_path / "new")["msg"]
    assert not (tmp_path / "new").exists()


def test_destinations_that_are_refused(original: Path, tmp_path: Path) -> None:
    assert "is never changed" in pad(original, original)["msg"]
    assert "is never changed" in pad(original, original / "new")["msg"]
    assert "is never changed" in pad(original, original.parent)["msg"]
    (tmp_path / "file").touch()
    assert "is no directory" in pad(original, tmp_path / "file")["msg"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").write_text("mine")
    assert "holds something else than a padded checkpoint" in pad(original, tmp_path / "full")["msg"]
    pad(original, tmp_path / "new")
    assert "for tensor parallel size 3, not that of" in pad(original, tmp_path / "new", 5)["msg"]
    assert (tmp_path / "full/model.safetensors").read_text() == "mine"


def test_another_run_at_work(original: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    with subprocess.Popen(["flock", str(new), "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin
        assert holder.stdout
        holder.stdin.write(b"x")
        holder.stdin.flush()
        holder.stdout.read(1)
        assert "Another run is writing" in pad(original, new)["msg"]
        holder.stdin.close()
    assert pad(original, new)["changed"]


def test_no_ranks(original: Path, tmp_path: Path) -> None:
    assert "tensor_parallel_size is 0, a number of ranks" in pad(original, tmp_path / "new", 0)["msg"]


def test_numpy_loads_a_padded_file(tmp_path: Path) -> None:
    """With the library's own loader, for dtypes that numpy has."""
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = np.arange(KV_HEADS * HEAD_DIM * HIDDEN, dtype="<f4").reshape(-1, HIDDEN)
    write_model(
        tmp_path / "old", {name: ("F32", weight.shape, weight.tobytes())}, shards=1, config={"num_hidden_layers": 1}
    )
    pad(tmp_path / "old", tmp_path / "new")
    loaded = load_file(tmp_path / "new/model.safetensors")[name]
    assert loaded.shape == (9 * HEAD_DIM, HIDDEN)
    assert np.array_equal(loaded[: len(weight)], weight)
    assert not loaded[len(weight) :].any()
