# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Failures of a checkpoint's load: shapes, names, divisibility, files, tokenizer, model code."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._failure import RECIPE, SGLANG_RECIPE, Rule, rule

_SHAPES = r"[Tt]he size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)"
_P1 = f"{RECIPE}; vLLM pull request 42124 made the defect active in 0.23.0"
_IGNORE = (
    "Compare quantization_config.ignore in config.json (exclude_modules in hf_quant_config.json) with the checkpoint's "
    "source"
)
_VERIFY = "Verify the checkpoint on every node (tag checkpoint), which names the file, and copy it again"
_PADDED = "Use 2 or 4 nodes, or a checkpoint that is padded for {tp}"


def _packed(groups: t.Mapping[str, str]) -> bool:
    # Two FP4 values lie in one byte, so a packed layer is half as wide as the weight.
    return 2 * int(groups["a"]) == int(groups["b"])


SHAPE_RULES: tuple[Rule, ...] = (
    rule(
        "drafter-packed",
        _SHAPES,
        "The drafter's head was built {a} wide for a weight that is {b} wide: vLLM quantized the MTP head although the "
        "checkpoint keeps lm_head unquantized",
        "Apply patch P1 on every node (tag patch) and start again",
        _P1,
        drafter=True,
        engine="vllm",
    ),
    rule(
        "sglang-nextn-packed",
        _SHAPES,
        "SGLang built the NEXTN layer {a} wide for a weight that is {b} wide: in FP4, although the checkpoint keeps "
        "that "
        "layer in BF16",
        "Apply patch P5 on every node (tag patch), or serve without speculation; "
        "speculative-draft-model-quantization unquant does not help",
        SGLANG_RECIPE + "; field case B91",
        near=r"hunyuan_v3_nextn|NextN|_load_w13",
        engine="sglang",
    ),
    rule(
        "target-packed",
        _SHAPES,
        "A layer of the main model was built {a} wide for a weight that is {b} wide, before the drafter was loaded: "
        "the checkpoint's ignore list most likely lacks lm_head",
        _IGNORE + "; patch P1 cannot cure this",
        "vLLM 0.24.0, ModelOpt loader, reproduced",
        drafter=False,
        engine="vllm",
        when=_packed,
    ),
    rule(
        "layer-packed",
        _SHAPES,
        "A layer was built {a} wide for a weight that is {b} wide, which is FP4 packing: most likely the drafter's "
        "head, "
        "which the engine quantized although the checkpoint keeps lm_head unquantized",
        "Apply the patches that the checkpoint needs on every node (tag patch: P1 of vLLM, P5 and P8 of SGLang); if "
        "they "
        "are in place, see whether its ignore list names that layer",
        f"{_P1}; {SGLANG_RECIPE}",
        when=_packed,
    ),
    rule(
        "shapes",
        _SHAPES + "|Attempted to load weight \\((?P<weight>[^()]*(?:\\([^()]*\\))?)\\) into parameter "
        "\\((?P<parameter>[^()]*(?:\\([^()]*\\))?)\\)",
        "A weight does not have the size that the engine built for it (built {a}{parameter}, stored {b}{weight}): "
        "config.json and the shards do not belong together, or a padded copy is not padded everywhere",
        _VERIFY + "; a checkpoint padded for three ranks must have its MTP layer padded, too",
        "vLLM and SGLang; field case B71",
    ),
    rule(
        "shared-mlp-assertion",
        r"AssertionError\s*$",
        "A layer was built quantized for weights that are not, most likely the shared expert or, with SGLang, "
        "attention: "
        "the engine does not find the names of the ignore list",
        "Apply the patches that the checkpoint needs on every node (tag patch: P7 for vLLM below 0.29.0, P8 for "
        "SGLang)",
        "vLLM 0.24.0 and SGLang 0.5.23, run; vLLM pull request 48682",
        near=r"load_merged_column_weight|weight_loader|load_weights|load_column_parallel_weight|load_row_parallel_weight",
        message=True,
        fatal=False,
    ),
    rule(
        "shared-expert-name",
        r"KeyError: '(?P<name>[^']{0,200}shared_(?:experts|mlp)[^']{0,200})'",
        "The engine has no parameter for the shared expert's tensor {name}",
        "A checkpoint with shared_experts names needs a rename; one whose ignore list names shared_mlp needs "
        "vLLM 0.29.0 or newer, or patch P7",
        "vLLM pull request 48682",
    ),
    rule(
        "tensor-name",
        r"KeyError: '(?P<name>(?:model\.)?layers\.\d+\.[^']{0,200}|[^']{0,200}\.(?:weight|weight_scale(?:_2)?"
        r"|input_scale|bias))'",
        "The engine has no parameter for the checkpoint's tensor {name}",
        "See that the engine's release knows this quantization and that the patches are applied on every node; else "
        "use "
        "a checkpoint with Tencent's names",
        "vLLM hy_v3.py, read",
        fatal=False,
    ),
    rule(
        "mtp-missing",
        r"weights were not initialized from checkpoint: (?P<names>.*?(?:eh_proj|enorm|hnorm|mtp).{0,80})",
        "The checkpoint has no MTP layer ({names})",
        "Serve without MTP, or use a conversion that kept it",
        "field case B85",
    ),
    rule(
        "weights-missing",
        r"weights were not initialized from checkpoint: (?P<names>.{1,160})",
        "The checkpoint lacks weights of this model ({names})",
        _VERIFY,
        "vLLM default_loader",
    ),
    rule(
        "nan",
        r"probability tensor contains either|probability tensor contains|NaN detected! |NaN in the logits"
        r"|NaN detected in .*sanitized before sampling",
        "The model computes NaN: SGLang skips tensors whose names it does not know, as shared_experts, without a word",
        "Apply patch P4 on every node (tag patch); answers are wrong until then, also where the API says 200",
        SGLANG_RECIPE + "; SGLang 0.5.23, run; field case B90",
    ),
    rule(
        "heads",
        r"[Tt]otal number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
        r"\((?P<tp>\d+)\)",
        "{heads} attention heads cannot be divided by {tp} ranks",
        _PADDED,
        "vLLM ModelConfig.verify_with_parallel_config; field case B87",
    ),
    rule(
        "vocabulary",
        r"AssertionError: (?P<size>\d+) is not divisible by (?P<tp>\d+)",
        "A dimension of {size} (120832 is the vocabulary) cannot be divided by {tp} ranks",
        "Use 2 or 4 nodes, or a padded checkpoint and patch P3 for {tp}",
        "vLLM pad_vocab_size, 0.19.1 to 0.33.0",
    ),
    rule(
        "divisibility",
        r"(?:is not|must be|should be) divisible by (?P<by>[\w' =.()-]{1,80})",
        "The tensor parallel size does not divide a dimension of the model (not divisible by {by})",
        "Use 2 or 4 nodes, or a checkpoint that is padded for three",
        "vLLM and SGLang; field cases B69 and B87",
        unless=r"INFO|WARNING|DEBUG|n_predict",
        fatal=False,
    ),
)

FILE_RULES: tuple[Rule, ...] = (
    rule(
        "shard-damaged",
        r"SafetensorError|HeaderTooLarge|header too large|MetadataIncompleteBuffer|incomplete metadata, file not fully"
        r"|InvalidHeader\w*|invalid header|PytorchStreamReader failed",
        "A shard of the checkpoint is damaged, unfinished, or a pointer of Git LFS",
        _VERIFY,
        "safetensors; field cases B53 and B54",
    ),
    rule(
        "shard-missing",
        r"(?:No such file or directory|FileNotFoundError|does not exist|not "
        r"found).{0,80}?\b(?P<file>[\w.-]{1,80}\.safetensors)"
        r"|\b(?P<other>[\w.-]{1,80}\.safetensors)\S* (?:does not exist|not found|is missing)"
        r"|Cannot find any (?:model weights|\S+ weights?) with",
        "The checkpoint lacks a shard on a node ({file}{other})",
        _VERIFY,
        "vLLM default_loader; field case B50",
        fatal=False,
    ),
    rule(
        "checkpoint-path",
        r"Invalid repository ID or local directory specified|does not appear to have a file named|"
        r"HFValidationError|Repo id must (?:be|use)|Incorrect path_or_model_id|is not a valid model identifier"
        r"|Can't load (?:the configuration|tokenizer) (?:of|for)",
        "There is no whole checkpoint where the engine was told to look",
        "See that the path is the same on every node and holds config.json, tokenizer files and every shard "
        "(tag checkpoint)",
        "vLLM and transformers; field case B60",
        fatal=False,
    ),
    rule(
        "hub",
        r"LocalEntryNotFoundError|GatedRepoError|RepositoryNotFoundError|OfflineModeIsEnabled|HF_HUB_OFFLINE"
        r"|couldn't connect to 'https://huggingface|\b(?:401|403|429) Client Error",
        "The engine wanted a file of the model hub and did not get it",
        "Give it a whole checkpoint in a directory of the node (tag checkpoint) instead of a repository's name",
        "huggingface_hub",
        unless=r"WARNING|INFO",
        fatal=False,
    ),
    rule(
        "trust-remote-code",
        r"trust_remote_code=True|requires you to execute the configuration file",
        "The checkpoint brings code of its own, which the engine was not told to run",
        "Set trust-remote-code, if you trust its author",
        "transformers",
        unless=r"'?trust_remote_code'?(?:=|': )True[,}]|INFO|WARNING",
        fatal=False,
    ),
    rule(
        "parser-tokens",
        r"parser could not locate .*tokens? in the tokenizer",
        "The parser's tokens are not in the tokenizer: this checkpoint writes them with a suffix",
        'vLLM 0.25.0 and newer: set "token_suffix" in tokenizer_config.json; older: apply patch P2',
        "vLLM hy_v3 parsers, 0.20.0 to 0.33.0; seed 001; field case B88",
    ),
    rule(
        "model-file-import",
        r"Ignore import error when loading \S*(?:hunyuan_v3|hy_v3)\S*: (?P<why>.*)",
        "The engine's Hy3 model file cannot be imported: {why}",
        "Revert the patches of that file (sparks.hy3.engine_patch) or reinstall the engine",
        "model registries of SGLang and vLLM hide this error; field case B80",
    ),
    rule(
        "architecture",
        r"Model architectures .*HYV3.* are not supported|model type `hy_v3` but Transformers does not recognize"
        r"|Cannot find model module.*HYV3|no module or parameter named '\S*' in HYV3",
        "This engine does not know Hy3",
        "Install vLLM 0.20.0 or newer, or SGLang 0.5.11 or newer; if it is that new, a patch broke its model file "
        "(sparks.hy3.engine_patch)",
        "vLLM 0.20.0 and SGLang 0.5.11 are the first with HYV3ForCausalLM",
    ),
    rule(
        "config-key",
        r"'HYV3Config' object has no attribute '(?P<key>\w+)'",
        "config.json lacks {key}, for which this engine has no default",
        "Copy it from the config.json of tencent/Hy3, on every node",
        "vLLM wheels 0.32.0 and 0.33.0, read",
    ),
    rule(
        "quantization-mismatch",
        r"[Qq]uantization method specified in the model config \((?P<is>[^)]*)\) does not match the quantization "
        r"method "
        r"specified in the `quantization` argument \((?P<asked>[^)]*)\)",
        "The checkpoint is quantized as {is} and the engine was asked for {asked}",
        "Leave quantization out, which the engine reads from the checkpoint",
        "vLLM ModelConfig",
    ),
    rule(
        "quantization-unknown",
        r"Unknown quantization method: (?P<method>[\w-]+)|Invalid quantization method: (?P<other>[\w-]+)",
        "This engine does not know quantization {method}{other}",
        "Install a release that does; see docs/profile.md for the one of each checkpoint",
        "vLLM ModelConfig",
    ),
    rule(
        "context",
        r"[Uu]ser-specified (?:max_model_len|context_length) \((?P<asked>\d+)\) is greater than the derived "
        r"\w+(?: \([^)]*?(?P<most>\d+)[^)]*\))?",
        "{asked} tokens are more than the checkpoint's {most}",
        "Lower max_model_len (context-length for SGLang)",
        "vLLM ModelConfig; SGLang",
    ),
    rule(
        "drafter-steps",
        r"num_speculative_tokens.{0,20}must be divisible by n_predict",
        "The number of drafted tokens does not fit the MTP layer",
        "Set num_speculative_tokens to 1",
        "vLLM SpeculativeConfig; seed 001",
    ),
)
