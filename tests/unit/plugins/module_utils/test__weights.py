# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import json
import subprocess
import sys
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import render_header, tensor_bytes
from ansible_collections.sparks.hy3.plugins.module_utils._weights import (
    PARTS,
    kv_bytes_per_token,
    read_checkpoint,
    read_sizes,
    weights_per_rank,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.hy3_checkpoint import (
    CONFIG,
    Tensors,
    bf16,
    hy3_tensors,
    nvfp4,
)
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[4]
GIB = 1024**3
SIZES = read_sizes(CONFIG, {})


def total(tensors: Tensors) -> int:
    return sum(tensor_bytes(dtype, shape) for dtype, shape in tensors.values())


# ---- Which reading of "169 GB" the parameter count fits


def test_what_the_published_sizes_are() -> None:
    """Experts in NVFP4 and all else in BF16, as two of the published checkpoints say of themselves."""
    size = total(hy3_tensors())
    assert size == 180_952_494_592
    # LibertAI's "169 GB" is GiB, as `du -h` writes it: 169e9 bytes (157.4 GiB) are 7 % less than the tensors have.
    assert round(size / GIB, 1) == 168.5
    # kodelow's "181 GB" is decimal, as the hub writes it, and the same checkpoint by its count.
    assert round(size / 1e9) == 181


def test_no_other_reading_of_it_fits() -> None:
    """169e9 bytes would have attention, shared experts and the dense layer in NVFP4, too: another checkpoint."""
    assert round(total(hy3_tensors(rest=nvfp4)) / 1e9) == 170
    assert round(total(hy3_tensors(mtp_experts=bf16)) / 1e9) == 186


# id, options of the tensors, ranks, drafter, GiB a rank
TEST_RANKS: list[tuple[str, dict[str, t.Any], int, bool, float]] = [
    ("LibertAI and kodelow, 2 ranks", {}, 2, True, 84.47),
    ("without the drafter", {}, 2, False, 83.37),
    ("1 rank", {}, 1, True, 168.59),
    ("4 ranks", {}, 4, True, 42.42),
    ("a BF16 drafter", {"mtp_experts": bf16}, 2, True, 86.90),
    # vroomfondel's W4A4 says ~40 GB a GPU, served without the drafter.
    ("W4A4 on 4 ranks", {"rest": nvfp4, "mtp_experts": bf16}, 4, False, 39.26),
]


@pytest.mark.parametrize(
    ("options", "ranks", "speculative", "gib"), [case[1:] for case in TEST_RANKS], ids=[case[0] for case in TEST_RANKS]
)
def test_weights_per_rank(options: dict[str, t.Any], ranks: int, speculative: bool, gib: float) -> None:
    parts = weights_per_rank(hy3_tensors(**options), SIZES, tensor_parallel=ranks, speculative=speculative)
    assert tuple(parts) == PARTS
    assert parts["other"] == 0
    assert round(sum(parts.values()) / GIB, 2) == gib


def test_what_is_on_every_rank() -> None:
    one, two = (weights_per_rank(hy3_tensors(), SIZES, tensor_parallel=n, speculative=False) for n in (1, 2))
    assert {part for part in PARTS if one[part] == two[part] > 0} == {"router", "norms", "rotary"}
    scales = 79 * 192 * 3 * 2 * 4  # two single numbers for each matrix
    assert two["experts"] * 2 == one["experts"] + scales


# id, tensor, dtype, shape, ranks, bytes
TEST_TENSORS: list[tuple[str, str, str, tuple[int, ...], int, int]] = [
    ("router is widened", "mlp.router.gate.weight", "BF16", (192, 4096), 2, 192 * 4096 * 4),
    ("router of the HF names", "mlp.gate.weight", "F32", (192, 4096), 2, 192 * 4096 * 4),
    ("bias of the HF names", "mlp.e_score_correction_bias", "BF16", (192,), 2, 192 * 4),
    ("shared expert of the HF names", "mlp.shared_experts.down_proj.weight", "BF16", (4096, 1536), 2, 4096 * 1536),
    ("columns", "self_attn.q_proj.weight", "BF16", (8192, 4096), 2, 4096 * 4096 * 2),
    ("rows", "self_attn.o_proj.weight", "BF16", (4096, 8192), 4, 4096 * 2048 * 2),
    ("KV heads are repeated", "self_attn.k_proj.weight", "BF16", (1024, 4096), 16, 128 * 4096 * 2),
    ("packed rows", "mlp.down_proj.weight", "U8", (4096, 6656), 2, 4096 * 3328),
    ("block scales of FP8", "self_attn.o_proj.weight_scale", "F32", (32, 64), 2, 32 * 32 * 4),
    ("channel scales are whole over rows", "mlp.down_proj.weight_scale", "F32", (4096, 1), 2, 4096 * 4),
    ("channel scales are split over columns", "mlp.up_proj.weight_scale", "F32", (13312, 1), 2, 6656 * 4),
    ("one-dimensional scales over rows", "mlp.down_proj.weight_scale", "F32", (4096,), 2, 4096 * 4),
    ("single number", "mlp.experts.7.up_proj.weight_scale_2", "F32", (), 2, 4),
    ("number in a list", "mlp.experts.7.up_proj.weight_global_scale", "F32", (1,), 2, 4),
    ("fused experts", "mlp.experts.gate_up_proj", "BF16", (192, 3072, 4096), 2, 192 * 1536 * 4096 * 2),
    ("fused experts, rows", "mlp.experts.down_proj", "BF16", (192, 4096, 1536), 2, 192 * 4096 * 768 * 2),
    ("nothing in it", "mlp.up_proj.weight", "BF16", (0, 4096), 2, 0),
    ("unknown", "mlp.something.weight", "BF16", (8, 8), 2, 128),
]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "ranks", "size"),
    [case[1:] for case in TEST_TENSORS],
    ids=[case[0] for case in TEST_TENSORS],
)
def test_one_tensor(name: str, dtype: str, shape: tuple[int, ...], ranks: int, size: int) -> None:
    sizes = SIZES._replace(max_positions=0)
    parts = weights_per_rank(
        {f"model.layers.1.{name}": (dtype, shape)}, sizes, tensor_parallel=ranks, speculative=False
    )
    assert sum(parts.values()) == size


def test_the_vocabulary_of_three_ranks_is_padded() -> None:
    """72 and 9 heads, as the padded checkpoint has them: 120,832 rows become 120,960, 40,320 a rank."""
    sizes = SIZES._replace(heads=72, kv_heads=9, divided={"intermediate_size": 13440, "expert_hidden_dim": 1536})
    parts = weights_per_rank(bf16("lm_head", 120832, 4096), sizes, tensor_parallel=3, speculative=True)
    assert parts["embeddings"] == 40320 * 4096 * 2


def test_the_drafter_reads_neither_embedding_nor_head_of_its_own() -> None:
    own = bf16("model.layers.80.embed_tokens", 120832, 4096) | bf16("model.layers.80.shared_head.head", 120832, 4096)
    assert weights_per_rank(own, SIZES, tensor_parallel=2, speculative=True)["mtp"] == 0


# ---- KV

# id, ranks, dtype of the engine, what the checkpoint says, drafter, bytes
TEST_KV: list[tuple[str, int, str, str, bool, int]] = [
    ("Hy3 on two Sparks", 2, "fp8", "", True, 82_944),
    ("without MTP", 2, "fp8_e4m3", "", False, 81_920),
    ("four ranks", 4, "fp8", "", True, 41_472),
    ("a KV head for two ranks", 16, "fp8", "", True, 20_736),
    ("auto is the model's", 2, "auto", "", True, 165_888),
    ("auto is what ModelOpt wrote", 2, "auto", "fp8", True, 82_944),
    ("given wins", 2, "bfloat16", "fp8", True, 165_888),
    ("NVFP4", 2, "nvfp4", "", True, 46_656),
]


@pytest.mark.parametrize(
    ("ranks", "dtype", "said", "speculative", "size"), [case[1:] for case in TEST_KV], ids=[case[0] for case in TEST_KV]
)
def test_kv_bytes_per_token(ranks: int, dtype: str, said: str, speculative: bool, size: int) -> None:
    sizes = SIZES._replace(kv_dtype=said)
    assert kv_bytes_per_token(sizes, tensor_parallel=ranks, cache_dtype=dtype, speculative=speculative) == size


def test_kv_of_a_checkpoint_without_mtp() -> None:
    """An engine that is asked for MTP refuses it; the layer is not made up here."""
    sizes = read_sizes({**CONFIG, "num_nextn_predict_layers": 0}, {})
    assert kv_bytes_per_token(sizes, tensor_parallel=2, cache_dtype="fp8", speculative=True) == 81_920


def test_kv_of_a_dtype_without_a_known_size() -> None:
    with pytest.raises(Hy3Error, match="The KV pool's dtype is 'int4_per_head', which has no size known here"):
        kv_bytes_per_token(SIZES, tensor_parallel=2, cache_dtype="int4_per_head", speculative=True)


def test_tiny_kv_heads_of_a_padded_checkpoint() -> None:
    """TP 3 costs 12.5 % more KV: 9 heads instead of 8."""
    sizes = SIZES._replace(heads=72, kv_heads=9, divided={})
    assert kv_bytes_per_token(sizes, tensor_parallel=3, cache_dtype="fp8", speculative=True) == 81 * 2 * 3 * 128


# ---- What cannot be split or read

# id, sizes, ranks, message
TEST_SPLITS: list[tuple[str, dict[str, t.Any], int, str]] = [
    ("heads", {}, 3, "The checkpoint has num_attention_heads 64, which tensor parallel size 3 does not divide"),
    ("72/9 heads at two", {"heads": 72, "kv_heads": 9}, 2, "num_key_value_heads 9, which tensor parallel size 2"),
    ("dense", {"heads": 72, "kv_heads": 9}, 3, "intermediate_size 13312, which tensor parallel size 3"),
    ("none", {}, 0, "tensor_parallel_size is 0, a number of ranks"),
]


@pytest.mark.parametrize(
    ("changes", "ranks", "message"), [case[1:] for case in TEST_SPLITS], ids=[case[0] for case in TEST_SPLITS]
)
def test_sizes_that_ranks_cannot_split(changes: dict[str, t.Any], ranks: int, message: str) -> None:
    with pytest.raises(Hy3Error, match=message):
        weights_per_rank({}, SIZES._replace(**changes), tensor_parallel=ranks, speculative=False)


# id, changes to config.json, message
TEST_CONFIGS: list[tuple[str, dict[str, t.Any], str]] = [
    ("another model", {"model_type": "glm4_moe"}, "config.json has model_type 'glm4_moe', and only hy_v3"),
    ("no layers", {"num_hidden_layers": None}, "config.json has num_hidden_layers None, which is no size"),
    ("text", {"num_attention_heads": "64"}, "config.json has num_attention_heads '64', which is no size"),
    ("truth", {"hidden_size": True}, "config.json has hidden_size True, which is no size"),
    ("negative", {"head_dim": -128}, "config.json has head_dim -128, which is no size"),
    ("dtype", {"dtype": "int3"}, "config.json has dtype 'int3', which is none of"),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in TEST_CONFIGS], ids=[c[0] for c in TEST_CONFIGS])
def test_configs_that_are_refused(changes: dict[str, t.Any], message: str) -> None:
    with pytest.raises(Hy3Error, match=message):
        read_sizes({**CONFIG, **changes}, {})


# id, quantization_config, hf_quant_config.json, dtype of the KV pool
TEST_SAID: list[tuple[str, t.Any, dict[str, t.Any], str]] = [
    ("silent", None, {}, ""),
    ("ModelOpt", {"kv_cache_quant_algo": "FP8"}, {}, "fp8"),
    ("ModelOpt's older file alone", None, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
    ("ModelOpt says none", {}, {"quantization": {"kv_cache_quant_algo": None}}, ""),
    ("a scheme", {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, {}, "fp8"),
    ("garbage", [1], {"quantization": 5}, ""),
]


@pytest.mark.parametrize(
    ("quant", "legacy", "said"), [case[1:] for case in TEST_SAID], ids=[case[0] for case in TEST_SAID]
)
def test_what_the_checkpoint_says_about_its_pool(quant: t.Any, legacy: dict[str, t.Any], said: str) -> None:
    assert read_sizes({**CONFIG, "quantization_config": quant}, legacy).kv_dtype == said


# ---- Files


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "Hy3-tiny"
    subprocess.run([sys.executable, ROOT / "roles/lab/files/make_tiny_hy3.py", out], check=True, capture_output=True)
    return out


@pytest.mark.parametrize(("ranks", "weights", "kv"), [(1, 106_100_832, 8192), (2, 87_160_928, 4096)])
def test_the_lab_s_checkpoint(tiny: Path, ranks: int, weights: int, kv: int) -> None:
    """What the real vLLM 0.32.0 allocated for it (CPU build, before it repacks): 64 bytes more, scales of KV."""
    sizes, tensors = read_checkpoint(tiny)
    assert sum(weights_per_rank(tensors, sizes, tensor_parallel=ranks, speculative=True).values()) == weights
    assert kv_bytes_per_token(sizes, tensor_parallel=ranks, cache_dtype="auto", speculative=True) == kv


def test_one_shard_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(render_header({"lm_head.weight": ("BF16", (0, 4))}, {}))
    assert read_checkpoint(tmp_path)[1] == {"lm_head.weight": ("BF16", (0, 4))}


# id, files, message
TEST_FILES: list[tuple[str, dict[str, str], str]] = [
    ("nothing", {}, "config.json cannot be read .No such file or directory., so the checkpoint is not counted"),
    ("no JSON", {"config.json": "{"}, "config.json is no valid JSON"),
    ("a list", {"config.json": "[]"}, "config.json holds no JSON object"),
    ("an LFS pointer", {"config.json": "version https://git-lfs"}, "config.json is no valid JSON"),
    ("no shard", {"config.json": json.dumps(CONFIG)}, "model.safetensors cannot be read"),
    (
        "short",
        {"config.json": json.dumps(CONFIG), "model.safetensors": "x"},
        "model.safetensors is no whole safetensors",
    ),
    (
        "index without a map",
        {"config.json": json.dumps(CONFIG), "model.safetensors.index.json": "{}"},
        "model.safetensors.index.json has no weight_map",
    ),
]


@pytest.mark.parametrize(("files", "message"), [case[1:] for case in TEST_FILES], ids=[case[0] for case in TEST_FILES])
def test_checkpoints_that_cannot_be_counted(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(Hy3Error, match=message):
        read_checkpoint(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), st.lists, max_leaves=3
)
KEYS = st.sampled_from([*CONFIG, "quantization_config", "moe_intermediate_size", "torch_dtype"])


@settings(max_examples=100, deadline=None)
@given(
    changes=st.dictionaries(KEYS, JSON, max_size=3),
    ranks=st.integers(-2, 300),
    dtype=st.text(max_size=6) | st.just("auto"),
)
def test_any_config_gives_numbers_or_one_sentence(changes: dict[str, t.Any], ranks: int, dtype: str) -> None:
    try:
        sizes = read_sizes({**CONFIG, **changes}, {})
        tensors = bf16("lm_head", 128, 8) | bf16("model.layers.0.self_attn.o_proj", 8, 8)
        parts = weights_per_rank(tensors, sizes, tensor_parallel=ranks, speculative=True)
        assert all(size >= 0 for size in parts.values())
        assert kv_bytes_per_token(sizes, tensor_parallel=ranks, cache_dtype=dtype, speculative=True) > 0
    except Hy3Error as error:
        assert "\n" not in str(error)
