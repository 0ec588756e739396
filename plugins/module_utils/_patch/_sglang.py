# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The patches of SGLang."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import NamedTuple

from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import (
    Edit,
    Finding,
    Patch,
    Source,
    UnknownCodeError,
    argument,
    calls,
    classes,
    deciding,
    each_once,
    gone,
    is_none,
    keyword,
    methods,
    parameters,
    same,
    stores,
    strings,
    unpacks,
    value_at,
)

_TARGET = "sglang/srt/models/hunyuan_v3.py"
_NEXTN = "sglang/srt/models/hunyuan_v3_nextn.py"
_TARGET_CLASS = "HYV3ForCausalLM"
_NEXTN_CLASS = "HYV3ForCausalLMNextN"
_NEXTN_MODEL = "HYV3ModelNextN"


class _Step(NamedTuple):
    """A statement that replaces parts of tensor names, of all that have ``asked`` in them."""

    node: ast.stmt
    asked: str
    pairs: list[tuple[str, str]]


class _Rename(NamedTuple):
    """A part of tensor names as transformers has it, and as SGLang has it."""

    old: str
    new: str
    said: str

    @property
    def word(self) -> str:
        """The last part of ``old`` by itself."""
        return self.old.strip(".").rpartition(".")[2]

    def done_by(self, steps: list[_Step]) -> bool:
        """Whether ``steps`` give such a tensor its new name."""
        name = f"model.layers.1{self.old}"
        for step in steps:
            for old, new in step.pairs if step.asked in name else []:
                name = name.replace(old, new)
        return name == f"model.layers.1{self.new}"

    def statement(self, variable: str) -> str:
        """Source of the statement that renames the tensor whose name is in ``variable``."""
        return f'{variable} = {variable}.replace("{self.old}", "{self.new}")'


_RENAMES = (
    _Rename(".mlp.shared_experts.", ".mlp.shared_mlp.", "the shared expert"),
    _Rename(".mlp.e_score_correction_bias", ".mlp.expert_bias", "the router's bias"),
)


def _loaders(tree: ast.Module, owner: str) -> list[ast.FunctionDef]:
    return [method for found in classes(tree, owner) for method in methods(found, "load_weights")]


def _loops(loader: ast.FunctionDef) -> list[tuple[ast.For, str]]:
    """The loops over the tensors, each with the variable that has the tensor's name."""
    return [
        (node, node.target.elts[0].id)
        for node in ast.walk(loader)
        if isinstance(node, ast.For)
        and isinstance(node.iter, ast.Name)
        and node.iter.id == "weights"
        and isinstance(node.target, ast.Tuple)
        and isinstance(node.target.elts[0], ast.Name)
    ]


def _head(loop: ast.For) -> list[ast.stmt]:
    """The statements before the first inner loop, which compares and stacks names and may go on to the next tensor."""
    inner = (any(isinstance(n, ast.For | ast.While) for n in ast.walk(node)) for node in loop.body)
    return loop.body[: next((number for number, has in enumerate(inner) if has), None)]


def _replaced(value: ast.expr, variable: str) -> list[tuple[str, str]]:
    """The arguments of each call in ``variable.replace(old, new).replace(…)``; none for any other expression."""
    pairs: list[tuple[str, str]] = []
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "replace":
        words = [item.value for item in value.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        if len(words) != 2 or len(value.args) != 2:
            return []
        pairs.insert(0, (words[0], words[1]))
        value = value.func.value
    return pairs if isinstance(value, ast.Name) and value.id == variable else []


def _steps(loader: ast.FunctionDef, loop: ast.For, variable: str) -> list[_Step]:
    """What is done to the names, in a generator over the tensors or at the head of the loop."""
    steps = []
    for node in loader.body[: loader.body.index(loop)] if loop in loader.body else []:
        value = node.value if isinstance(node, ast.Assign) and same(node.targets[0], "weights") else None
        if isinstance(value, ast.GeneratorExp) and isinstance(value.elt, ast.Tuple) and len(value.generators) == 1:
            (each,) = value.generators
            if same(each.iter, "weights") and isinstance(each.target, ast.Tuple) and not each.ifs:
                steps.append(_Step(node, "", _replaced(value.elt.elts[0], ast.unparse(each.target.elts[0]))))
    for node in _head(loop):
        asked, inner = "", [node]
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.test, ast.Compare):
            (asked,) = strings(node.test.left)[:1] or [""]
            inner = node.body if same(node.test, f"{asked!r} in {variable}") else inner
        pairs = [
            _replaced(each.value, variable) if isinstance(each, ast.Assign) and same(each.targets[0], variable) else []
            for each in inner
        ]
        if all(pairs):
            steps.append(_Step(node, asked, [pair for several in pairs for pair in several]))
    return [step for step in steps if step.pairs]


def _missing(loader: ast.FunctionDef) -> list[_Rename]:
    """The renames that ``loader`` does not do; UnknownCodeError if it treats one of those names otherwise."""
    ((loop, variable),) = _loops(loader)
    steps = _steps(loader, loop, variable)
    missing = []
    for rename in _RENAMES:
        known = sum(_count(rename.word, strings(step.node)) for step in steps)
        if known != _count(rename.word, strings(loader)) or (known and not rename.done_by(steps)):
            raise UnknownCodeError(f"load_weights treats {rename.word} in another way")
        if not known:
            missing.append(rename)
    return missing


@deciding
def _names_of_transformers(tree: ast.Module, owner: str, *, shared_mlp: bool) -> Finding:
    owners, loaders = classes(tree, owner), _loaders(tree, owner)
    if not owners and not any(isinstance(n, ast.FunctionDef) and n.name == "load_weights" for n in ast.walk(tree)):
        return gone(tree, owner)
    loops = [loop for loader in loaders for loop in _loops(loader)]
    each_once({f"class {owner}": len(owners), "load_weights in it": len(loaders), "loop over weights": len(loops)})
    (loader,), ((loop, variable),) = loaders, loops
    if shared_mlp and not any(isinstance(n, ast.Attribute) and n.attr == "shared_mlp" for n in ast.walk(tree)):
        raise UnknownCodeError("no module is called shared_mlp")
    inside, everywhere = strings(loader), strings(tree)
    for word in (rename.word for rename in _RENAMES):
        if _count(word, everywhere) != _count(word, inside):
            raise UnknownCodeError(f"{word} is handled outside of load_weights")
    missing = _missing(loader)
    if missing and len(missing) < len(_RENAMES):
        return Finding("partial", f"{missing[0].said} is not renamed, the rest is", rest=True)
    if missing:
        return Finding("defect")
    if any(same(node, rename.statement(variable)) for node in _head(loop) for rename in _RENAMES):
        return Finding("applied")
    return Finding("upstream_fixed", "load_weights knows the names of transformers")


def _count(word: str, texts: list[str]) -> int:
    return sum(word in text.replace("num_shared_experts", "") for text in texts)


def _rename_first(source: Source, owner: str) -> list[Edit]:
    """At the head of the loop: what follows it compares names and stacks them."""
    (loader,) = _loaders(source.tree, owner)
    ((loop, variable),) = _loops(loader)
    return [source.insert_statements(loop.body[0], [rename.statement(variable) for rename in _missing(loader)])]


# The parts of the MTP layer, by any of which an exclude list may name its experts.
MTP_PARTS = ("", ".mlp", ".mlp.experts", *(f".mlp.experts.0.{kind}_proj" for kind in ("gate", "up", "down")))
# Of what SGLang can build, only ModelOpt's configurations have the method.
_UNLESS_EXCLUDED = (
    'None if hasattr(quant_config, "is_layer_excluded") and any(quant_config.is_layer_excluded('
    f'f"model.layers.{{config.num_hidden_layers}}{{part}}") for part in {MTP_PARTS}) else '
)


def _inits(tree: ast.Module, owner: str) -> list[ast.FunctionDef]:
    return [init for found in classes(tree, owner) for init in methods(found, "__init__")]


@deciding
def _nextn_quantization(tree: ast.Module) -> Finding:
    owners, inits = classes(tree, _NEXTN_MODEL), _inits(tree, _NEXTN_MODEL)
    if not owners and not calls(tree, "HYV3DecoderLayer"):
        return gone(tree, _NEXTN_MODEL)
    layers = [call for init in inits for call in calls(init, "HYV3DecoderLayer")]
    each_once(
        {
            f"class {_NEXTN_MODEL}": len(owners),
            "__init__ in it": len(inits),
            "call of HYV3DecoderLayer there": len(layers),
            "call of HYV3DecoderLayer": len(calls(tree, "HYV3DecoderLayer")),
        }
    )
    (init,), (layer,) = inits, layers
    quant = keyword(layer, "quant_config")
    if quant is None or unpacks(layer):
        raise UnknownCodeError("the call of HYV3DecoderLayer has no keyword quant_config")
    if same(quant.value, f"{_UNLESS_EXCLUDED}quant_config"):
        return Finding("applied")
    sites = [(outer, call) for outer in _inits(tree, _NEXTN_CLASS) for call in calls(outer, _NEXTN_MODEL)]
    handed = [(init, layer, quant.value), *((outer, call, argument(call, 1, "quant_config")) for outer, call in sites)]
    found = [value if value is None else value_at(where, call, value) for where, call, value in handed]
    if any(value is None for _where, _call, value in handed) or any(value and is_none(value) for value in found):
        return Finding("upstream_fixed", "the layer is built without a quantization config")
    if any(value and _asks_modelopt(value) for value in found):
        return Finding("upstream_fixed", "the quantization config is left out where ModelOpt needs that")
    if other := [ast.unparse(value) for value in found if value]:
        raise UnknownCodeError(f"quant_config is {other[0]}")
    both = [node for part in (init, *_inits(tree, _NEXTN_CLASS)) for node in part.body]
    if any(_asks_modelopt(node) and any(isinstance(n, ast.Assign) for n in ast.walk(node)) for node in both):
        return Finding("partial", "the quantization config is left out, but the layer gets the other one")
    if not {"config", "quant_config"} <= parameters(init):
        raise UnknownCodeError(f"{_NEXTN_MODEL} gets config or quant_config in another way")
    return Finding("defect")


def _asks_modelopt(tree: ast.AST) -> bool:
    return any("modelopt" in text.lower() for text in strings(tree)) or bool(calls(tree, "is_layer_excluded"))


def _ask_about_layer(source: Source) -> list[Edit]:
    """Not the published edit, which drops the config always, and so breaks a checkpoint whose MTP layer is NVFP4.

    The layer is called model.decoder here, so that no entry of the exclude list can match it by itself.
    """
    (init,) = _inits(source.tree, _NEXTN_MODEL)
    (layer,) = calls(init, "HYV3DecoderLayer")
    (quant,) = (item for item in layer.keywords if item.arg == "quant_config")
    return [source.prepend(quant.value, _UNLESS_EXCLUDED)]


def _decoder_names(loader: ast.FunctionDef) -> list[tuple[ast.expr, str]]:
    """The places that put a tensor of the MTP layer below model.decoder, each with the variable it gets there."""
    found = []
    for node in ast.walk(loader):
        value = node.value if isinstance(node, ast.Assign) else None
        plain = value.orelse if isinstance(value, ast.IfExp) else value
        if isinstance(plain, ast.JoinedStr) and len(plain.values) == 2:
            words, variable = plain.values
            if isinstance(words, ast.Constant) and words.value == "model.decoder." and value is not None:
                found += [(value, n.id) for n in ast.walk(variable) if isinstance(n, ast.Name)]
    return found


def _to_norm(variable: str) -> str:
    return f'"model.shared_head.norm.weight" if {variable}.startswith("final_layernorm") else '


def _names_norm(tree: ast.AST, variable: str) -> bool:
    """Whether ``tree`` gives ``variable`` the norm's name, in a branch for that tensor alone or by an expression."""
    for node in ast.walk(tree):
        branch = isinstance(node, ast.If) and len(node.body) == 1 and "final_layernorm" in " ".join(strings(node.test))
        for each in node.body if isinstance(node, ast.If) and branch else [node]:
            if isinstance(each, ast.Assign) and same(each.targets[0], variable):
                said = " ".join(strings(each.value))
                if "shared_head.norm" in said and (branch or "final_layernorm" in said):
                    return True
    return False


@deciding
def _final_norm(tree: ast.Module) -> Finding:
    owners, loaders = classes(tree, _NEXTN_CLASS), _loaders(tree, _NEXTN_CLASS)
    if not owners and not any(isinstance(n, ast.FunctionDef) and n.name == "load_weights" for n in ast.walk(tree)):
        return gone(tree, _NEXTN_CLASS)
    each_once({f"class {_NEXTN_CLASS}": len(owners), "load_weights in it": len(loaders)})
    (loader,) = loaders
    places = _decoder_names(loader)
    if len(places) == 1 and same(places[0][0], f'{_to_norm(places[0][1])}f"model.decoder.{{{places[0][1]}}}"'):
        return Finding("applied")
    if any("final_layernorm" in text for text in strings(tree)):
        if any(_names_norm(node, variable) for loop, variable in _loops(loader) for node in _head(loop)):
            return Finding("upstream_fixed", "load_weights knows final_layernorm")
        raise UnknownCodeError("final_layernorm is handled in another way")
    each_once({"name below model.decoder": len(places)})
    return Finding("defect")


def _load_final_norm(source: Source) -> list[Edit]:
    (loader,) = _loaders(source.tree, _NEXTN_CLASS)
    ((value, variable),) = _decoder_names(loader)
    return [source.prepend(value, _to_norm(variable))]


_NO_DOT = '"model" if not prefix else '
# What else gives the same name.
_NO_DOT_EITHER = (
    '"model"',
    'add_prefix("model", prefix)',
    'maybe_prefix(prefix, "model")',
    *(f'f"{{prefix}}.model"{test} else "model"' for test in (" if prefix", ' if prefix != ""', " if len(prefix) > 0")),
    'f"{prefix}.model".lstrip(".")',
    'f"{prefix}.model".strip(".")',
    'f"{prefix}.model".removeprefix(".")',
    """f"{prefix + '.' if prefix else ''}model\"""",
    '(prefix + "." if prefix else "") + "model"',
    '".".join(filter(None, [prefix, "model"]))',
)


def _model_calls(tree: ast.Module) -> list[ast.Call]:
    return [call for init in _inits(tree, _TARGET_CLASS) for call in calls(init, "HYV3Model")]


@deciding
def _model_prefix(tree: ast.Module) -> Finding:
    owners = classes(tree, _TARGET_CLASS)
    if not owners and not calls(tree, "HYV3Model"):
        return gone(tree, _TARGET_CLASS)
    found = _model_calls(tree)
    each_once(
        {
            f"class {_TARGET_CLASS}": len(owners),
            "call of HYV3Model in its __init__": len(found),
            "call of HYV3Model": len(calls(tree, "HYV3Model")),
        }
    )
    (call,) = found
    prefix = keyword(call, "prefix")
    if prefix is None or unpacks(call):
        raise UnknownCodeError("the call of HYV3Model has no keyword prefix")
    name, said = prefix.value, ast.unparse(prefix.value)
    if same(name, f'{_NO_DOT}f"{{prefix}}.model"'):
        return Finding("applied")
    if same(name, 'f"{prefix}.model"'):
        if any(stores(init, "prefix") for init in _inits(tree, _TARGET_CLASS)):
            raise UnknownCodeError("prefix is set before it is used")
        return Finding("defect")
    if any(same(name, repaired) for repaired in _NO_DOT_EITHER):
        return Finding("upstream_fixed", f"the model is named {said}")
    raise UnknownCodeError(f"the model is named {said}")


def _drop_dot(source: Source) -> list[Edit]:
    (call,) = _model_calls(source.tree)
    (prefix,) = (item for item in call.keywords if item.arg == "prefix")
    return [source.prepend(prefix.value, _NO_DOT)]


_REMAP = Patch(
    id="P4",
    engine="sglang",
    file=_TARGET,
    title="Load tensors under the names that transformers gives them",
    harm=(
        "SGLang silently skips tensors named shared_experts or e_score_correction_bias, as ModelOpt exports them, and "
        "computes with whatever was in memory: NaN and empty answers behind a healthy /health, or an MTP layer whose "
        "drafts are never accepted."
    ),
    source="seed 003; SGLang issue 30816, pull request 30824 closed unmerged; the twin and the bias were found here",
    inspect=lambda tree: _names_of_transformers(tree, _TARGET_CLASS, shared_mlp=True),
    edits=lambda source: _rename_first(source, _TARGET_CLASS),
)

PATCHES = (
    _REMAP,
    replace(
        _REMAP,
        file=_NEXTN,
        inspect=lambda tree: _names_of_transformers(tree, _NEXTN_CLASS, shared_mlp=False),
        edits=lambda source: _rename_first(source, _NEXTN_CLASS),
    ),
    Patch(
        id="P5",
        engine="sglang",
        file=_NEXTN,
        title="Build an MTP layer that the checkpoint excludes from quantization without it",
        harm=(
            "SGLang builds the experts of a BF16 MTP layer as NVFP4 and dies while loading them: the size of tensor a "
            "(2048) must match the size of tensor b (4096)."
        ),
        source="seed 003, made conditional: some checkpoints store that layer in NVFP4; nothing upstream up to 0.5.23",
        inspect=_nextn_quantization,
        edits=_ask_about_layer,
    ),
    Patch(
        id="P6",
        engine="sglang",
        file=_NEXTN,
        title="Load the MTP layer's final norm",
        harm=(
            "SGLang up to 0.5.15 drops final_layernorm of the MTP layer. The text is right, but nearly no draft is "
            "accepted."
        ),
        source="seed 003; SGLang pull request 30331, released in 0.5.16",
        inspect=_final_norm,
        edits=_load_final_norm,
    ),
    Patch(
        id="P8",
        engine="sglang",
        file=_TARGET,
        title="Name the model without a leading dot, so that exclude lists match",
        harm=(
            "SGLang calls the layers .model.layers, which no wildcard such as model.layers.0* matches. Layers that the "
            "checkpoint excludes from quantization are built quantized and cannot be loaded."
        ),
        source="found here; nothing upstream up to 0.5.23",
        inspect=_model_prefix,
        edits=_drop_dot,
    ),
)
