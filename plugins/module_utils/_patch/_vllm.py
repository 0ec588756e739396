# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The patches of vLLM."""

from __future__ import annotations

import ast

from ansible_collections.sparks.hy3.plugins.module_utils._patch import _vllm_parsers
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

_HEAD_CLASS = "HYV3SharedHead"
_HEAD_CALL = "ParallelLMHead"


@deciding
def _mtp_head(tree: ast.Module) -> Finding:
    owners = classes(tree, _HEAD_CLASS)
    if not owners and not calls(tree, _HEAD_CALL):
        return gone(tree, _HEAD_CLASS)
    inits = [init for owner in owners for init in methods(owner, "__init__")]
    heads = [call for init in inits for call in calls(init, _HEAD_CALL)]
    sites = calls(tree, _HEAD_CLASS)
    each_once(
        {
            f"class {_HEAD_CLASS}": len(owners),
            "__init__ in it": len(inits),
            f"call of {_HEAD_CALL} there": len(heads),
            f"call of {_HEAD_CLASS}": len(sites),
        }
    )
    (init,), (head,), (site,) = inits, heads, sites
    if unpacks(head) or unpacks(site):
        raise UnknownCodeError(f"the call of {_HEAD_CALL} or {_HEAD_CLASS} unpacks its arguments")
    takes_prefix = "prefix" in parameters(init)
    # config and quant_config come first, so a third positional argument is the prefix.
    gets_prefix = keyword(site, "prefix") is not None or len(site.args) > 2
    if takes_prefix != gets_prefix:
        missing = "gets no prefix for its parameter" if takes_prefix else "has no parameter for the prefix it gets"
        return Finding("partial", f"{_HEAD_CLASS} {missing}")
    prefix = keyword(head, "prefix")
    if prefix is None:
        return _unnamed_head(tree, init, head, site, takes_prefix=takes_prefix)
    # The name may be made where the class is used.
    handed = takes_prefix and same(prefix.value, "prefix")
    name = argument(site, 2, "prefix") if handed and value_at(init, head, prefix.value) is None else prefix.value
    if name is None:
        raise AssertionError("what takes a prefix gets one here")
    if handed and same(name, '"lm_head"'):
        return Finding("upstream_fixed", "the head is named 'lm_head'")
    return _named_head(name, takes_prefix=takes_prefix)


def _named_head(name: ast.expr, *, takes_prefix: bool) -> Finding:
    if isinstance(name, ast.Constant) and name.value == "lm_head":
        return Finding("applied")
    words = strings(name)
    variables = {n.id for n in ast.walk(name) if isinstance(n, ast.Name)} - {"maybe_prefix"}
    # An exclusion list of just lm_head matches no other last word: shared_head.head, as in Step3.5, is no repair.
    if not words or words[-1].rpartition(".")[2] != "lm_head" or variables != {"prefix"}:
        raise UnknownCodeError(f"the head is named {ast.unparse(name)}")
    if not takes_prefix:
        return Finding("partial", f"the head is named by a prefix that {_HEAD_CLASS} has no parameter for")
    return Finding("upstream_fixed", f"the head is named {ast.unparse(name)}")


def _unnamed_head(
    tree: ast.Module, init: ast.FunctionDef, head: ast.Call, site: ast.Call, *, takes_prefix: bool
) -> Finding:
    if takes_prefix:
        return Finding("partial", f"{_HEAD_CLASS} gets a prefix but does not name its head")
    if len(head.args) > 2:
        raise UnknownCodeError(f"{_HEAD_CALL} gets {len(head.args)} positional arguments instead of 2")
    quant = keyword(head, "quant_config")
    outer = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and site in ast.walk(f)]
    for function, call, value in (
        (init, head, quant.value if quant else None),
        *((function, site, argument(site, 1, "quant_config")) for function in outer[-1:]),
    ):
        found = value_at(function, call, value)
        if value is None or (found and is_none(found)):
            return Finding("upstream_fixed", "the head is built without a quantization config")
        if found:
            raise UnknownCodeError(f"quant_config is {ast.unparse(found)}")
    return Finding("defect")


def _name_mtp_head(source: Source) -> list[Edit]:
    """One edit at one site, instead of the published one at three.

    A name handed down from the layer would be ``model.layers.80.lm_head``: ModelOpt's substring rule excludes that, an
    exact ``ignore: ["lm_head"]`` of compressed-tensors does not. The bare name matches both, is what the target model
    calls its own head, and one site has no half-made state. The name serves for loading only: afterwards the
    proposer puts the target's head in this one's place.
    """
    (owner,) = classes(source.tree, _HEAD_CLASS)
    (head,) = calls(owner, _HEAD_CALL)
    (quant,) = (item for item in head.keywords if item.arg == "quant_config")
    # Before a keyword rather than after the last: no comma or comment at the end of the call has to be understood.
    return [source.insert_before(quant, 'prefix="lm_head",')]


_PAD = "pad_vocab_size"
_PAD_ARGUMENTS = ["vocab_size", "pad_to"]
_PADDED = "return (vocab_size + pad_to - 1) // pad_to * pad_to"
# Outside of a started engine there are no groups, and asking for their size would fail.
_PAD_TO_RANKS = (
    "from math import lcm",
    "from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size, model_parallel_is_initialized",
    "pad_to = lcm(pad_to, get_tensor_model_parallel_world_size() if model_parallel_is_initialized() else 1)",
)
_KNOWS_RANKS = {"lcm", "gcd", "tp_size", "get_tensor_model_parallel_world_size"}


def _words(tree: ast.AST) -> set[str]:
    """Names and attributes used in ``tree``."""
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }


def _assigns(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and stores(node, name)


def _pad_functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == _PAD]


@deciding
def _vocab_padding(tree: ast.Module) -> Finding:
    functions = _pad_functions(tree)
    if not functions and not calls(tree, _PAD):
        return gone(tree, _PAD, "function")
    each_once({f"function {_PAD}": len(functions)})
    (function,) = functions
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(body) == len(_PAD_TO_RANKS) + 1 and all(map(same, body, (*_PAD_TO_RANKS, _PADDED))):
        return Finding("applied")
    end = next((number for number, node in enumerate(body) if isinstance(node, ast.Return)), len(body))
    until = [n for node in body[: end + 1] for n in ast.walk(node)]
    results = [n for n in until if isinstance(n, ast.Return) or _assigns(n, "pad_to")]
    if any(_words(node) & _KNOWS_RANKS for node in results):
        return Finding("upstream_fixed", f"{_PAD} pads by the tensor parallel size")
    if _words(function) & _KNOWS_RANKS:
        return Finding("partial", f"{_PAD} knows the tensor parallel size and does not pad by it")
    callers = calls(tree, _PAD)
    if callers and all(any(_words(value) & {"lcm", "gcd"} for value in call.args) for call in callers):
        return Finding("upstream_fixed", "the padding is computed for the tensor parallel size")
    names = [item.arg for item in function.args.args]
    if len(body) != 1 or not same(body[0], _PADDED) or names != _PAD_ARGUMENTS:
        raise UnknownCodeError(f"{_PAD} computes something else")
    return Finding("defect")


def _pad_to_ranks(source: Source) -> list[Edit]:
    """At the one place that every vocabulary comes by, so that target and drafter get the same padding.

    A no-op wherever 64 divides evenly among the ranks, so for 1, 2, 4 and 8 of them.
    """
    (function,) = _pad_functions(source.tree)
    return [source.insert_statements(function.body[-1], _PAD_TO_RANKS)]


_MOE_CLASS = "HYV3MoEFused"
_MLP_CALL = "HYV3FeedForward"


def _shared_mlps(tree: ast.Module) -> tuple[int, list[ast.Call]]:
    inits = [init for owner in classes(tree, _MOE_CLASS) for init in methods(owner, "__init__")]
    return len(inits), [call for init in inits for call in calls(init, _MLP_CALL)]


@deciding
def _shared_mlp(tree: ast.Module) -> Finding:
    owners = classes(tree, _MOE_CLASS)
    if not owners and not calls(tree, _MLP_CALL):
        return gone(tree, _MOE_CLASS)
    inits, found = _shared_mlps(tree)
    each_once({f"class {_MOE_CLASS}": len(owners), "__init__ in it": inits, f"call of {_MLP_CALL} there": len(found)})
    (call,) = found
    prefix = keyword(call, "prefix")
    if prefix is None or unpacks(call):
        raise UnknownCodeError(f"the call of {_MLP_CALL} has no keyword prefix")
    if same(prefix.value, 'f"{prefix}.shared_mlp"'):
        return Finding("applied")
    if same(prefix.value, 'f"{prefix}"') or same(prefix.value, "prefix"):
        return Finding("defect")
    words = strings(prefix.value)
    if words and words[-1].rpartition(".")[2] == "shared_mlp" and "prefix" in _words(prefix.value):
        return Finding("upstream_fixed", f"the shared expert is named {ast.unparse(prefix.value)}")
    raise UnknownCodeError(f"the shared expert is named {ast.unparse(prefix.value)}")


def _name_shared_mlp(source: Source) -> list[Edit]:
    _inits, (call,) = _shared_mlps(source.tree)
    (prefix,) = (item for item in call.keywords if item.arg == "prefix")
    return [source.replace(prefix.value, 'f"{prefix}.shared_mlp"')]


PATCHES = (
    Patch(
        id="P1",
        engine="vllm",
        file="vllm/model_executor/models/hy_v3_mtp.py",
        title="Name the drafter's output head so that quantization skips it",
        harm=(
            "On a ModelOpt checkpoint whose lm_head is BF16, vLLM 0.23 and newer build the drafter's head at packed "
            "4-bit width and die while loading it: the size of tensor a (2048) must match the size of tensor b (4096)."
        ),
        source="seed 000 step 1; vLLM pull request 42124 made it fatal, 48883 is the same repair for Step3.5",
        inspect=_mtp_head,
        edits=_name_mtp_head,
    ),
    *_vllm_parsers.PATCHES,
    Patch(
        id="P3",
        engine="vllm",
        file="vllm/model_executor/layers/vocab_parallel_embedding.py",
        title="Pad the vocabulary so that three ranks can share it",
        harm=(
            "Three ranks cannot share the vocabulary of 120832: it is padded to a multiple of 64 only, and vLLM stops "
            "with 120832 is not divisible by 3."
        ),
        source="seed 002, which does it by a hook at import; nothing upstream up to 0.33",
        inspect=_vocab_padding,
        edits=_pad_to_ranks,
    ),
    Patch(
        id="P7",
        engine="vllm",
        file="vllm/model_executor/models/hy_v3.py",
        title="Name the shared expert so that quantization can skip it",
        harm=(
            "vLLM up to 0.28 asks about the shared expert under the name of the whole MLP. An ignore list that names "
            "shared_mlp does not match, a BF16 shared expert is built quantized, and loading stops with a KeyError for "
            "shared_mlp or a tensor size."
        ),
        source="vLLM pull request 48682, released in 0.29",
        inspect=_shared_mlp,
        edits=_name_shared_mlp,
    ),
)
