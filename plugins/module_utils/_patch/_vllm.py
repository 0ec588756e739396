# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""The patches of vLLM."""

from __future__ import annotations

import ast

from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import (
    Edit,
    Finding,
    Patch,
    Source,
    calls,
    classes,
    keyword,
    methods,
    parameters,
    unpacks,
)

_HEAD_CLASS = "HYV3SharedHead"
_HEAD_CALL = "ParallelLMHead"


def _mtp_head(tree: ast.Module) -> Finding:
    owners = classes(tree, _HEAD_CLASS)
    if not owners and not calls(tree, _HEAD_CALL):
        return Finding("absent", f"there is no class {_HEAD_CLASS}")
    inits = [init for owner in owners for init in methods(owner, "__init__")]
    heads = [call for init in inits for call in calls(init, _HEAD_CALL)]
    sites = calls(tree, _HEAD_CLASS)
    found = (len(owners), len(inits), len(heads), len(sites))
    if found != (1, 1, 1, 1):
        wanted = (f"class {_HEAD_CLASS}", "__init__ in it", f"call of {_HEAD_CALL} there", f"call of {_HEAD_CLASS}")
        counts = ", ".join(f"{number} x {what}" for number, what in zip(found, wanted, strict=True))
        return Finding("unrecognised", f"expected each once, found {counts}")
    (init,), (head,), (site,) = inits, heads, sites
    if unpacks(head) or unpacks(site):
        return Finding("unrecognised", f"the call of {_HEAD_CALL} or {_HEAD_CLASS} unpacks its arguments")
    takes_prefix = "prefix" in parameters(init)
    # config and quant_config come first, so a third positional argument is the prefix.
    gets_prefix = keyword(site, "prefix") is not None or len(site.args) > 2
    if takes_prefix != gets_prefix:
        missing = "gets no prefix for its parameter" if takes_prefix else "has no parameter for the prefix it gets"
        return Finding("partial", f"{_HEAD_CLASS} {missing}")
    prefix = keyword(head, "prefix")
    if prefix is None:
        return _unnamed_head(head, takes_prefix=takes_prefix)
    return _named_head(prefix.value, takes_prefix=takes_prefix)


def _named_head(name: ast.expr, *, takes_prefix: bool) -> Finding:
    if isinstance(name, ast.Constant) and name.value == "lm_head":
        return Finding("applied")
    strings = [n.value for n in ast.walk(name) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    variables = {n.id for n in ast.walk(name) if isinstance(n, ast.Name)} - {"maybe_prefix"}
    # An exclusion list of just lm_head matches no other last word: shared_head.head, as in Step3.5, is no repair.
    if not strings or strings[-1].rpartition(".")[2] != "lm_head" or variables != {"prefix"}:
        return Finding("unrecognised", f"the head is named {ast.unparse(name)}")
    if not takes_prefix:
        return Finding("partial", f"the head is named by a prefix that {_HEAD_CLASS} has no parameter for")
    return Finding("upstream_fixed", f"the head is named {ast.unparse(name)}")


def _unnamed_head(head: ast.Call, *, takes_prefix: bool) -> Finding:
    if takes_prefix:
        return Finding("partial", f"{_HEAD_CLASS} gets a prefix but does not name its head")
    if len(head.args) > 2:
        return Finding("unrecognised", f"{_HEAD_CALL} gets {len(head.args)} positional arguments instead of 2")
    quant = keyword(head, "quant_config")
    if quant is None or (isinstance(quant.value, ast.Constant) and quant.value.value is None):
        return Finding("upstream_fixed", "the head is built without a quantization config")
    if not isinstance(quant.value, ast.Name):
        return Finding("unrecognised", f"quant_config is {ast.unparse(quant.value)}")
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
)
