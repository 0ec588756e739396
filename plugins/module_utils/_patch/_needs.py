# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Which patches a checkpoint needs, by its small files and the names of its tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ansible_collections.sparks.hy3.plugins.module_utils._checkpoint_files import (
    CONFIG,
    INDEX,
    LEGACY_QUANT_CONFIG,
    SINGLE_SHARD,
    parse_index,
    read_object,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch._sglang import MTP_PARTS
from ansible_collections.sparks.hy3.plugins.module_utils._quantization import IGNORE_LISTS, ignore_patterns
from ansible_collections.sparks.hy3.plugins.module_utils._safetensors import read_header

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
SUFFIX_KEY = "token_suffix"

# vLLM's and SGLang's smallest unit of a padded vocabulary, in tokens.
_VOCAB_UNIT = 64
# What the engines fuse, by what it is made of.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
# The marks of Hy3's chat template; a release checkpoint writes each with one suffix, a preview with none.
_MARK = re.compile(r"<(?:think|tool_calls|tool_call)(:[^<>\"\\]{1,40})?>")
_LINEAR = re.compile(
    r"(model\.layers\.\d+\.)(self_attn|mlp)(\.shared_mlp|\.shared_experts|\.experts\.\d+)?\.(\w+_proj)\.(\w+)"
)


class Need(NamedTuple):
    """Whether a checkpoint needs a patch; ``why`` is a clause for a person."""

    needed_by: Literal["needed", "not_needed", "harmful"]
    why: str


@dataclass(frozen=True)
class Checkpoint:
    """What the engines are told by a checkpoint's small files, and the names of its tensors."""

    config: Mapping[str, Any]
    legacy_quant: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    tokens: Collection[str]
    tensors: Collection[str]

    @property
    def layers(self) -> int:
        """Number of decoder layers, which is also the number of the MTP layer, since they count from 0."""
        number = self.config.get("num_hidden_layers")
        return number if isinstance(number, int) else 0

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization config: the newer place first, as the engines do."""
        newer, older = self.config.get("quantization_config"), self.legacy_quant.get("quantization")
        if isinstance(newer, dict):
            return newer
        return {"quant_method": "modelopt", **older} if isinstance(older, dict) else {}

    @property
    def modelopt(self) -> bool:
        """Whether ModelOpt has quantized it."""
        return str(self.quantization.get("quant_method", "")).startswith("modelopt")

    @property
    def mixed(self) -> bool:
        """Whether ModelOpt has quantized its layers in several ways."""
        said = next((one["quant_algo"] for one in self._quantizations if one.get("quant_algo")), "")
        return self.quantization.get("quant_method") == "modelopt_mixed" or str(said).upper() == "MIXED_PRECISION"

    @property
    def quantized_layers(self) -> Collection[str] | None:
        """What is quantized, where that is listed instead of what is not."""
        found = (one.get("quantized_layers") for one in self._quantizations)
        return next((layers for layers in found if isinstance(layers, dict)), None) if self.mixed else None

    @property
    def _quantizations(self) -> list[Mapping[str, Any]]:
        """Both places that may speak of it, the newer one first."""
        older = self.legacy_quant.get("quantization")
        return [self.quantization, older if isinstance(older, dict) else {}]

    @property
    def ignored(self) -> list[str]:
        """Patterns of the modules that are not quantized."""
        for source in self._quantizations:
            if any(isinstance(source.get(key), list) for key in IGNORE_LISTS):
                return ignore_patterns(source)
        return []

    @property
    def suffix(self) -> str:
        """What the special tokens end in before the closing bracket; empty if the vocabulary has the bare ones."""
        return suffix_of(self.tokens) or ""

    @property
    def wrong_suffix(self) -> bool:
        """Whether the key for the suffix says another one than the vocabulary, which has such tokens."""
        found = suffix_of(self.tokens)
        return found is not None and (self.tokenizer_config.get(SUFFIX_KEY) or "") != found

    def linears(self) -> dict[str, bool]:
        """Each linear module by the name that the engines build it under, and whether it is stored quantized."""
        found: dict[str, bool] = {}
        for tensor in self.tensors:
            if match := _LINEAR.fullmatch(tensor):
                layer, block, inner, linear, kind = match.groups()
                inner = (inner or "").replace("shared_experts", "shared_mlp")
                name = f"{layer}{block}{inner}.{_FUSED.get(linear, linear)}"
                if inner.startswith(".experts"):
                    name = f"{layer}{block}.experts"
                found[name] = found.get(name, False) or _is_scale(kind)
        return found

    def has_mtp(self) -> bool:
        """Whether the MTP layer is stored."""
        return any(tensor.startswith(f"model.layers.{self.layers}.") for tensor in self.tensors)


def _is_scale(kind: str) -> bool:
    return "scale" in kind and kind.startswith("weight") or kind == "weight_packed"


def read_tokens(directory: Path) -> set[str]:
    """The marks in the vocabulary of the checkpoint in ``directory``, wherever they stand; Hy3Error or OSError."""
    added = _json(directory / TOKENIZER_CONFIG).get("added_tokens_decoder")
    tokenizer = _json(directory / TOKENIZER)
    listed, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    entries = [*(added.values() if isinstance(added, dict) else []), *(listed if isinstance(listed, list) else [])]
    named = [str(entry.get("content")) for entry in entries if isinstance(entry, dict)]
    return {
        token for token in (*named, *(vocabulary if isinstance(vocabulary, dict) else ())) if _MARK.fullmatch(token)
    }


def suffix_of(tokens: Collection[str]) -> str | None:
    """The suffix of the marks among ``tokens``, empty for bare ones, None if there are no marks."""
    return max((match[1] or "" for match in map(_MARK.fullmatch, tokens) if match), default=None)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the small files of the checkpoint in ``directory``; Hy3Error if they are not there or not readable."""
    config = _json(directory / CONFIG)
    if not config:
        raise Hy3Error(f"{directory} has no {CONFIG} with settings in it: give the directory of a checkpoint.")
    if (directory / INDEX).is_file():
        tensors: Collection[str] = parse_index(_json(directory / INDEX))[0]
    elif (directory / SINGLE_SHARD).is_file():
        tensors = read_header(directory / SINGLE_SHARD).tensors
    else:
        raise Hy3Error(f"Neither {INDEX} nor {SINGLE_SHARD} is in {directory}: fetch the checkpoint.")
    return Checkpoint(
        config,
        _json(directory / LEGACY_QUANT_CONFIG),
        _json(directory / TOKENIZER_CONFIG),
        read_tokens(directory),
        tensors,
    )


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, an empty one if there is no such file."""
    return read_object(path, name=str(path)) or {}


def excluded(engine: str, checkpoint: Checkpoint, name: str) -> bool:
    """Whether ``engine`` leaves the module that it calls ``name`` unquantized, by the checkpoint's list of patterns."""
    patterns, layers = checkpoint.ignored, checkpoint.quantized_layers
    head, _dot, last = name.rpartition(".")
    shards = [f"{head}.{shard}" for shard, fused in _FUSED.items() if fused == last]
    if not checkpoint.modelopt:
        # compressed-tensors: equal, or an expression that matches at the start.
        return _listed(name, patterns) or (bool(shards) and all(_listed(shard, patterns) for shard in shards))
    if layers is not None:
        # A list of what is quantized instead; what it lacks is not.
        return not any(f"{layer}.".startswith(f"{part}.") for layer in layers for part in (name, *shards))
    if engine == "vllm":
        # Each pattern is a wildcard and also a substring; the shards of a fused module have to be listed one by one.
        if any(pattern in name or fnmatchcase(name, pattern) for pattern in patterns):
            return True
        return bool(shards) and all(shard in patterns for shard in shards)
    # SGLang, which asks for all experts of a layer together, and then by wildcard only.
    if last == "experts" or _by_wildcard(patterns, name):
        return _by_wildcard(patterns, name)
    return all(any(f".{pattern}." in f".{shard}." for pattern in patterns) for shard in shards or [name])


def _by_wildcard(patterns: list[str], name: str) -> bool:
    """SGLang's ``is_layer_excluded``: a pattern is for the whole name or for one part of it."""
    for pattern in patterns:
        expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
        if any(expression.fullmatch(text) for text in (name, *name.split("."))):
            return True
    return False


def _listed(name: str, patterns: list[str]) -> bool:
    for pattern in patterns:
        if pattern == name:
            return True
        if pattern.startswith("re:"):
            try:
                if re.match(pattern[3:], name):
                    return True
            except re.error:
                continue
    return False


def _renamed(
    engine: str, checkpoint: Checkpoint, modules: Mapping[str, bool], old: Callable[[str], str], what: str
) -> Need:
    """The need for a patch that makes ``engine`` ask for ``modules`` by their names instead of by ``old`` of these."""
    if not checkpoint.quantization:
        return Need("not_needed", "the checkpoint is not quantized")
    # A module is built right if it is built quantized exactly when it is stored so.
    without = {m for m, stored in modules.items() if stored != excluded(engine, checkpoint, old(m))}
    with_it = {m for m, stored in modules.items() if stored != excluded(engine, checkpoint, m)}
    if gained := with_it - without:
        return Need("needed", f"{min(gained)} is excluded from quantization and only the patch {what}")
    if lost := without - with_it:
        return Need("harmful", f"{min(lost)} is built as it is stored only without the patch")
    return Need("not_needed", "what is excluded from quantization is found without it")


def _p1(checkpoint: Checkpoint, _ranks: int) -> Need:
    if not checkpoint.has_mtp():
        return Need("not_needed", "the checkpoint has no MTP layer")
    if not checkpoint.modelopt or checkpoint.mixed:
        return Need("not_needed", "only a ModelOpt quantization of one kind touches the head")
    if "lm_head.weight" not in checkpoint.tensors or _is_stored_quantized(checkpoint, "lm_head"):
        return Need("not_needed", "lm_head is not stored in full width")
    if not excluded("vllm", checkpoint, "lm_head"):
        return Need(
            "not_needed",
            "lm_head is stored in full width but missing from the list of excluded modules, so the target model dies "
            "first and with the same message, which no patch helps: add lm_head to that list",
        )
    return Need("needed", "lm_head is excluded from quantization, and the drafter's head is not found under that name")


def _is_stored_quantized(checkpoint: Checkpoint, module: str) -> bool:
    return any(f"{module}.{kind}" in checkpoint.tensors for kind in ("weight_scale", "weight_scale_2", "weight_packed"))


def _p2(checkpoint: Checkpoint, _ranks: int) -> Need:
    if not checkpoint.suffix:
        return Need("not_needed", "the special tokens have no suffix")
    return Need("needed", f"the special tokens end in {checkpoint.suffix}")


def _p3(checkpoint: Checkpoint, ranks: int) -> Need:
    vocabulary = checkpoint.config.get("vocab_size")
    if not isinstance(vocabulary, int):
        return Need("not_needed", "config.json has no vocab_size")
    padded = math.ceil(vocabulary / _VOCAB_UNIT) * _VOCAB_UNIT
    if padded % ranks == 0:
        return Need("not_needed", f"a vocabulary of {padded} divides among {ranks}")
    return Need("needed", f"a vocabulary of {padded} does not divide among {ranks}")


def _p4(checkpoint: Checkpoint, _ranks: int) -> Need:
    for word in (".mlp.shared_experts.", ".mlp.e_score_correction_bias"):
        named = [tensor for tensor in checkpoint.tensors if word in tensor]
        if named:
            return Need("needed", f"{len(named)} tensors are named as by transformers, such as {min(named)}")
    return Need("not_needed", "the tensors have the names that the engine knows")


def _p5(checkpoint: Checkpoint, _ranks: int) -> Need:
    layer = f"model.layers.{checkpoint.layers}"
    experts = f"{layer}.mlp.experts"
    stored = checkpoint.linears().get(experts)
    if stored is None:
        return Need("not_needed", "the checkpoint has no MTP layer with experts")
    if stored:
        return Need("harmful", f"{experts} is stored quantized and would be built in full width")
    if not checkpoint.modelopt:
        return Need("not_needed", "the checkpoint is not quantized by ModelOpt")
    if not any(_by_wildcard(checkpoint.ignored, f"{layer}{part}") for part in MTP_PARTS):
        return Need(
            "not_needed",
            f"{experts} is stored in full width but missing from the list of excluded modules, by which the patch "
            f"decides: add {layer}* to that list",
        )
    return Need("needed", f"{experts} is stored in full width and would be built quantized")


def _p6(checkpoint: Checkpoint, _ranks: int) -> Need:
    norm = f"model.layers.{checkpoint.layers}.final_layernorm.weight"
    if norm in checkpoint.tensors:
        return Need("needed", f"{norm} is stored")
    return Need("not_needed", f"{norm} is not stored")


def _p7(checkpoint: Checkpoint, _ranks: int) -> Need:
    shared = {name: stored for name, stored in checkpoint.linears().items() if ".shared_mlp." in name}
    return _renamed("vllm", checkpoint, shared, lambda name: name.replace(".shared_mlp", ""), "asks for it by name")


def _p8(checkpoint: Checkpoint, _ranks: int) -> Need:
    mtp = f"model.layers.{checkpoint.layers}."
    target = {name: stored for name, stored in checkpoint.linears().items() if not name.startswith(mtp)}
    return _renamed("sglang", checkpoint, target, lambda name: f".{name}", "asks for it without a leading dot")


_NEEDS: dict[str, Callable[[Checkpoint, int], Need]] = {
    "P1": _p1,
    "P2": _p2,
    "P3": _p3,
    "P4": _p4,
    "P5": _p5,
    "P6": _p6,
    "P7": _p7,
    "P8": _p8,
}


def needed_by(checkpoint: Checkpoint, patch: str, *, ranks: int = 1) -> Need:
    """Whether ``checkpoint`` needs ``patch`` (an id) where ``ranks`` processes share each layer."""
    return _NEEDS[patch](checkpoint, ranks)


def problems(checkpoint: Checkpoint, engine: str) -> list[str]:
    """What no patch of ``engine`` can repair, because the checkpoint itself says it wrongly. Sentences."""
    found = []
    key = checkpoint.tokenizer_config.get(SUFFIX_KEY)
    if engine == "vllm" and checkpoint.wrong_suffix:
        ends = f"end in {checkpoint.suffix!r}" if checkpoint.suffix else "have no suffix"
        found.append(
            f"{TOKENIZER_CONFIG} has {SUFFIX_KEY} {key!r} and the special tokens {ends}, so the hy_v3 parsers of vLLM "
            f"0.25 and newer do not find them: set {SUFFIX_KEY} to {checkpoint.suffix!r}."
        )
    full_width = "lm_head.weight" in checkpoint.tensors and not _is_stored_quantized(checkpoint, "lm_head")
    if checkpoint.modelopt and full_width and not excluded(engine, checkpoint, "lm_head"):
        found.append(
            "lm_head is stored in full width and missing from the list of modules excluded from quantization, so the "
            f"model cannot be loaded whatever is patched: add lm_head to that list in {CONFIG} and "
            f"{LEGACY_QUANT_CONFIG}."
        )
    return [*found, *(_drafter_problem(checkpoint) if engine == "sglang" else [])]


def _drafter_problem(checkpoint: Checkpoint) -> list[str]:
    """Which linear of the MTP layer SGLang would not build as it is stored, with P5 where that is needed."""
    if not checkpoint.modelopt or checkpoint.mixed:
        return []
    layer = f"model.layers.{checkpoint.layers}"
    parts = {
        name.removeprefix(layer): kind for name, kind in checkpoint.linears().items() if name.startswith(f"{layer}.")
    }
    dropped = _p5(checkpoint, 1).needed_by == "needed"
    plain = {part for part in parts if dropped or excluded("sglang", checkpoint, f"model.decoder{part}")}
    wrong = {part for part, quantized in parts.items() if quantized == (part in plain)}
    if not wrong:
        return []
    part = min(wrong)
    if dropped:
        return [
            f"{layer}{part} is stored quantized and the experts beside it in full width, and patch P5 builds all of "
            "that layer in full width, so SGLang cannot load the drafter: serve without one."
        ]
    if parts[part]:
        return [
            f"{layer}{part} is stored quantized and is on the list of modules excluded from quantization, so SGLang "
            f"cannot load the drafter: take it off that list in {CONFIG} and {LEGACY_QUANT_CONFIG}."
        ]
    missing = f"model.decoder{part}" if any(parts.values()) else f"{layer}*"
    return [
        f"{layer}{part} is stored in full width and SGLang, which calls it model.decoder{part}, does not find it on "
        f"the list of modules excluded from quantization, so it cannot load the drafter: add {missing} to that list in "
        f"{CONFIG} and {LEGACY_QUANT_CONFIG}, or serve without a drafter."
    ]


def with_suffix(text: str, suffix: str) -> str:
    """The ``text`` of a tokenizer_config.json with the key for ``suffix``, and as little else changed as can be."""
    content = json.loads(text.removeprefix("\ufeff"))
    if SUFFIX_KEY in content:
        return json.dumps({**content, SUFFIX_KEY: suffix}, indent=2, ensure_ascii=False) + "\n"
    head, brace, rest = text.partition("{")
    blank = rest[: len(rest) - len(rest.lstrip())] if content else ""
    return f"{head}{brace}{blank}{json.dumps(SUFFIX_KEY)}: {json.dumps(suffix)}{',' if content else ''}{rest}"
