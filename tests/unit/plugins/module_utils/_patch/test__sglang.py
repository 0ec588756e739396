# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang's patches on small models of its files: which state, and what the code does before and after."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._patch import build
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Patch, State
from ansible_collections.sparks.hy3.plugins.module_utils._patch._sglang import _NO_DOT_EITHER, PATCHES

P4, P4_TWIN, P5, P6, P8 = PATCHES

TARGET = """\
class HYV3MoEFused:
    def __init__(self, config):
        self.shared_mlp = config.num_shared_experts or getattr(config, "num_shared_experts", 0)


class HYV3ForCausalLM:
    def __init__(self, config, quant_config=None, prefix=""):
        self.model = HYV3Model(config, quant_config, prefix=f"{prefix}.model")

    def load_weights(self, weights):
        "Loads shared_experts, too."
        loaded = []
        for name, tensor in weights:
            if "router.gate." in name:
                name = name.replace("router.", "")
            loaded.append(name)
        return loaded
"""
LOOP = "        for name, tensor in weights:\n"
NEXTN = """\
class HYV3ModelNextN:
    def __init__(self, config, quant_config=None, prefix=""):
        self.decoder = HYV3DecoderLayer(
            config=config,
            quant_config=quant_config,
        )


class HYV3ForCausalLMNextN:
    def __init__(self, config, quant_config=None):
        self.model = HYV3ModelNextN(config, quant_config)

    def load_weights(self, weights):
        loaded = []
        for name, tensor in weights:
            subname = name[len("model.layers.80."):]
            if subname.startswith("enorm"):
                name = f"model.{subname}"
            else:
                name = f"model.decoder.{subname}"
            loaded.append(name)
        return loaded
"""
SHARED = '            name = name.replace(".shared_experts.", ".shared_mlp.")\n'
BIAS = '            name = name.replace("e_score_correction_bias", "expert_bias")\n'


def state(patch: Patch, text: str) -> State:
    return patch.inspect(ast.parse(text)).state


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


# The names are compared and stacked before this.
STACKED = "            for part in parts:\n                name = name.replace(part, part)\n"
END = "            loaded.append(name)\n"
IN_ONE = '.replace(".shared_experts.", ".shared_mlp.").replace("e_score_correction_bias", "expert_bias")'
ASKED = "".join(
    f'            if "{word}" in name:\n    {line}' for word, line in (("shared_experts", SHARED), ("e_sc", BIAS))
)
GENERATED = f"        weights = ((n{IN_ONE}, w) for n, w in weights)\n"
QUANT = "            quant_config=quant_config,\n"
LAYER = "        self.decoder = HYV3"
INNER = "        nextn = None if 'modelopt' in quant_config.get_name() else quant_config\n"
OUTER = "self.model = HYV3ModelNextN(config, quant_config)"
ELSE = "            else:\n"
DECODER = '                name = f"model.decoder.{subname}"\n'
TO_NORM = 'name.replace("model.decoder.final_layernorm", "model.shared_head.norm")\n'

# (what, patch, file, its state)
TEST_INSPECT: list[tuple[str, Patch, str, State]] = [
    # Field case B74: the untouched file has the word num_shared_experts, and here even a docstring has the other.
    ("remap", P4, TARGET, "defect"),
    ("remap-twin", P4_TWIN, NEXTN, "defect"),
    ("remap-in-half", P4, changed(TARGET, (LOOP, LOOP + SHARED)), "partial"),
    ("remap-bias-only", P4, changed(TARGET, (LOOP, LOOP + BIAS)), "partial"),
    ("remap-whole", P4, changed(TARGET, (LOOP, LOOP + SHARED + BIAS)), "upstream_fixed"),
    ("remap-two-loops", P4, changed(TARGET, (LOOP, LOOP + "            pass\n" + LOOP)), "unrecognised"),
    ("remap-no-loop", P4, changed(TARGET, ("in weights", "in self.renamed(weights)")), "unrecognised"),
    ("remap-loop-of-pairs", P4, changed(TARGET, ("for name, tensor in", "for pair in")), "unrecognised"),
    (
        "remap-other",
        P4,
        changed(TARGET, (LOOP, LOOP + '            if "shared_experts" in name: break\n')),
        "unrecognised",
    ),
    ("remap-in-one", P4, changed(TARGET, (LOOP, f"{LOOP}            name = name{IN_ONE}\n")), "upstream_fixed"),
    ("remap-asks", P4, changed(TARGET, (LOOP, LOOP + ASKED)), "upstream_fixed"),
    ("remap-asks-wrongly", P4, changed(TARGET, (LOOP, LOOP + ASKED.replace("in name", "not in name"))), "unrecognised"),
    ("remap-generated", P4, changed(TARGET, (LOOP, GENERATED + LOOP)), "upstream_fixed"),
    ("remap-generated-after", P4, changed(TARGET, (END, END + GENERATED)), "unrecognised"),
    ("remap-late", P4, changed(TARGET, (END, STACKED + SHARED + BIAS + END)), "unrecognised"),
    ("remap-late-in-half", P4, changed(TARGET, (END, STACKED + SHARED + END)), "unrecognised"),
    ("remap-early-and-stacked", P4, changed(TARGET, (END, SHARED + BIAS + STACKED + END)), "upstream_fixed"),
    ("remap-unused", P4, changed(TARGET, (LOOP, f"{LOOP}            new = name{IN_ONE}\n")), "unrecognised"),
    (
        "remap-reversed",
        P4,
        changed(TARGET, (LOOP, LOOP + '            name = name.replace("shared_mlp", "shared_experts")\n' + BIAS)),
        "unrecognised",
    ),
    (
        "remap-one-projection",
        P4,
        changed(TARGET, (LOOP, LOOP + SHARED.replace('s."', 's.up_proj"').replace('mlp."', 'mlp.up_proj"') + BIAS)),
        "unrecognised",
    ),
    (
        "remap-log-only",
        P4,
        changed(TARGET, (LOOP, LOOP + '            log("no shared_experts, e_score_correction_bias: shared_mlp")\n')),
        "unrecognised",
    ),
    (
        "remap-mapping-unused",
        P4,
        changed(TARGET, (LOOP, '        names = {"shared_experts": "shared_mlp"}\n' + LOOP)),
        "unrecognised",
    ),
    ("remap-imported", P4, "from x import HYV3ForCausalLM\n", "unrecognised"),
    ("remap-elsewhere", P4, TARGET + 'NAMES = {"shared_experts": "shared_mlp"}\n', "unrecognised"),
    ("remap-no-shared-mlp", P4, changed(TARGET, ("self.shared_mlp", "self.shared")), "unrecognised"),
    ("remap-renamed", P4, changed(TARGET, ("HYV3ForCausalLM", "Other")), "unrecognised"),
    ("remap-twice", P4, TARGET * 2, "unrecognised"),
    ("remap-nothing", P4, "x = 1\n", "absent"),
    ("quant", P5, NEXTN, "defect"),
    ("quant-none", P5, changed(NEXTN, ("quant_config=quant_config,", "quant_config=None,")), "upstream_fixed"),
    (
        "quant-asks",
        P5,
        changed(
            NEXTN,
            (LAYER, "        if quant_config.is_layer_excluded(1):\n            quant_config = None\n" + LAYER),
        ),
        "upstream_fixed",
    ),
    ("quant-only-said", P5, changed(NEXTN, (LAYER, '        log("modelopt")\n' + LAYER)), "defect"),
    (
        "quant-other-name",
        P5,
        changed(NEXTN, (LAYER, INNER + LAYER), (QUANT, QUANT.replace("=q", "=nextn or q"))),
        "unrecognised",
    ),
    (
        "quant-under-another-name",
        P5,
        changed(NEXTN, (LAYER, INNER + LAYER), (QUANT, "            quant_config=nextn,\n")),
        "upstream_fixed",
    ),
    ("quant-half-not-passed", P5, changed(NEXTN, (LAYER, INNER + LAYER)), "partial"),
    ("quant-half-not-set", P5, changed(NEXTN, (QUANT, "            quant_config=nextn,\n")), "unrecognised"),
    (
        "quant-set-after",
        P5,
        changed(NEXTN, ("        )\n", "        )\n        quant_config = None\n")),
        "unrecognised",
    ),
    (
        "quant-in-the-other-class",
        P5,
        changed(NEXTN, (OUTER, f"{INNER.strip()}\n        {OUTER.replace('quant_config', 'nextn')}")),
        "upstream_fixed",
    ),
    ("quant-half-in-the-other-class", P5, changed(NEXTN, (OUTER, f"{INNER.strip()}\n        {OUTER}")), "partial"),
    ("quant-none-handed", P5, changed(NEXTN, (OUTER, OUTER.replace("quant_config", "None"))), "upstream_fixed"),
    ("quant-nothing-handed", P5, changed(NEXTN, (OUTER, OUTER.replace(", quant_config", ""))), "upstream_fixed"),
    ("quant-set-to-none", P5, changed(NEXTN, (OUTER, f"quant_config = None\n        {OUTER}")), "upstream_fixed"),
    ("quant-moved", P5, NEXTN.replace("class HYV3ModelNextN", "class M").replace("HYV3Decoder", "D"), "unrecognised"),
    (
        "quant-set",
        P5,
        changed(NEXTN, ("        self.decoder", "        quant_config = f()\n        self.decoder")),
        "unrecognised",
    ),
    (
        "quant-computed",
        P5,
        changed(NEXTN, ("quant_config=quant_config,", "quant_config=f(quant_config),")),
        "unrecognised",
    ),
    (
        "quant-positional",
        P5,
        changed(NEXTN, ("config=config,\n            quant_config=quant_config", "config, 0, quant_config")),
        "unrecognised",
    ),
    (
        "quant-unpacked",
        P5,
        changed(NEXTN, ("quant_config=quant_config,", "quant_config=quant_config, **more,")),
        "unrecognised",
    ),
    ("quant-two-layers", P5, NEXTN + "HYV3DecoderLayer()\n", "unrecognised"),
    (
        "quant-other-arguments",
        P5,
        changed(NEXTN, ("(self, config, quant_config=None, prefix", "(self, cfg, quant_config=None, prefix")),
        "unrecognised",
    ),
    ("quant-nothing", P5, "", "absent"),
    ("norm", P6, NEXTN, "defect"),
    (
        "norm-handled",
        P6,
        changed(
            NEXTN,
            (
                "            else:\n",
                '            elif "final_layernorm" in name:\n'
                '                name = "model.shared_head.norm.weight"\n            else:\n',
            ),
        ),
        "upstream_fixed",
    ),
    (
        "norm-skipped",
        P6,
        changed(
            NEXTN,
            (
                "            else:\n",
                '            elif "final_layernorm" in name:\n                continue\n            else:\n',
            ),
        ),
        "unrecognised",
    ),
    ("norm-after", P6, changed(NEXTN, (DECODER, DECODER + "            name = " + TO_NORM)), "upstream_fixed"),
    ("norm-unused", P6, changed(NEXTN, (DECODER, DECODER + "            norm = " + TO_NORM)), "unrecognised"),
    ("norm-late", P6, changed(NEXTN, (END, STACKED + "            name = " + TO_NORM + END)), "unrecognised"),
    (
        "norm-mapping-unused",
        P6,
        changed(NEXTN, (LOOP, '        names = {"final_layernorm": "shared_head.norm"}\n' + LOOP)),
        "unrecognised",
    ),
    ("norm-moved", P6, "from x import *\n", "unrecognised"),
    ("norm-two-places", P6, changed(NEXTN, ('f"model.{subname}"', 'f"model.decoder.{subname}"')), "unrecognised"),
    ("norm-nothing", P6, "", "absent"),
    ("dot", P8, TARGET, "defect"),
    (
        "dot-asked",
        P8,
        changed(TARGET, ('f"{prefix}.model"', 'f"{prefix}.model" if prefix else "model"')),
        "upstream_fixed",
    ),
    ("dot-helper", P8, changed(TARGET, ('f"{prefix}.model"', 'add_prefix("model", prefix)')), "upstream_fixed"),
    ("dot-plain", P8, changed(TARGET, ('f"{prefix}.model"', '"model"')), "upstream_fixed"),
    *(
        (f"dot-{number}", P8, changed(TARGET, ('f"{prefix}.model"', name)), "upstream_fixed")
        for number, name in enumerate(_NO_DOT_EITHER)
    ),
    (
        "dot-either",
        P8,
        changed(TARGET, ('f"{prefix}.model"', 'f"{prefix}.model" if prefix else f"{prefix}.model"')),
        "unrecognised",
    ),
    ("dot-misused", P8, changed(TARGET, ('f"{prefix}.model"', 'add_prefix("model", f"{prefix}.")')), "unrecognised"),
    (
        "dot-set",
        P8,
        changed(TARGET, ("        self.model", "        prefix = prefix or 'x'\n        self.model")),
        "unrecognised",
    ),
    ("dot-moved", P8, "from x import y\n\ndef __getattr__(name):\n    return getattr(y, name)\n", "unrecognised"),
    ("dot-other", P8, changed(TARGET, ('f"{prefix}.model"', 'f"{prefix}.inner"')), "unrecognised"),
    ("dot-positional", P8, changed(TARGET, ("prefix=f", "f")), "unrecognised"),
    ("dot-two-models", P8, TARGET + "HYV3Model()\n", "unrecognised"),
    ("dot-nothing", P8, "", "absent"),
]


@pytest.mark.parametrize(
    ("patch", "text", "expected"), [row[1:] for row in TEST_INSPECT], ids=[row[0] for row in TEST_INSPECT]
)
def test_inspect(patch: Patch, text: str, expected: State) -> None:
    finding = patch.inspect(ast.parse(text))
    assert finding.state == expected
    assert bool(finding.why) == (expected != "defect")


class Recorder:
    """Stands for a layer: keeps the arguments it was made with."""

    def __init__(self, *_args: Any, **arguments: Any) -> None:
        self.arguments = arguments


class ModelOpt:
    """A quantization config with an exclude list."""

    def __init__(self, *excluded: str) -> None:
        self.excluded = excluded

    def is_layer_excluded(self, name: str) -> bool:
        return any(name.startswith(pattern) for pattern in self.excluded)


class Exactly(ModelOpt):
    """One whose list has no wildcards."""

    def is_layer_excluded(self, name: str) -> bool:
        return name in self.excluded


class Config:
    num_hidden_layers = 80
    num_shared_experts = 1


def module(text: str, *patches: Patch) -> dict[str, Any]:
    space: dict[str, Any] = {"HYV3Model": Recorder, "HYV3DecoderLayer": Recorder}
    exec(compile(build(text.encode(), list(patches)), "sglang.py", "exec"), space)  # noqa: S102 - our own text
    return space


NAMES = [
    "model.layers.1.mlp.shared_experts.up_proj.weight",
    "model.layers.1.mlp.e_score_correction_bias",
    "model.layers.1.mlp.router.gate.weight",
    "model.layers.1.mlp.shared_mlp.up_proj.weight",
]


@pytest.mark.parametrize(
    "text",
    [TARGET, changed(TARGET, (LOOP, LOOP + SHARED)), changed(TARGET, (LOOP, LOOP + BIAS))],
    ids=["none", "published-edit", "bias-only"],
)
def test_all_names_are_known(text: str) -> None:
    loaded = module(text, P4)["HYV3ForCausalLM"](Config).load_weights([(name, None) for name in NAMES])
    assert loaded == [
        "model.layers.1.mlp.shared_mlp.up_proj.weight",
        "model.layers.1.mlp.expert_bias",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_mlp.up_proj.weight",
    ]


def test_names_of_the_mtp_layer() -> None:
    names = [
        "enorm.weight",
        "final_layernorm.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.e_score_correction_bias",
    ]
    model = module(NEXTN, P4_TWIN, P5, P6)["HYV3ForCausalLMNextN"](Config)
    assert model.load_weights([(f"model.layers.80.{name}", None) for name in names]) == [
        "model.enorm.weight",
        "model.shared_head.norm.weight",
        "model.decoder.mlp.shared_mlp.up_proj.weight",
        "model.decoder.mlp.expert_bias",
    ]


# The quantization config, and whether the MTP layer gets it.
TEST_QUANT: list[tuple[str, Any, bool]] = [
    ("none", None, True),
    ("other-kind", object(), True),
    ("mtp-is-nvfp4", ModelOpt("lm_head", "model.layers.0."), True),
    ("mtp-excluded", ModelOpt("model.layers.80"), False),
    ("experts-excluded", ModelOpt("model.layers.80.mlp.experts"), False),
    ("experts-excluded-one-by-one", ModelOpt("model.layers.80.mlp.experts.0.gate_proj"), False),
    ("layer-excluded-without-wildcard", Exactly("model.layers.80"), False),
    ("mlp-excluded-without-wildcard", Exactly("model.layers.80.mlp"), False),
    ("other-layer-excluded", ModelOpt("model.layers.8."), True),
]


@pytest.mark.parametrize(("quant", "kept"), [row[1:] for row in TEST_QUANT], ids=[row[0] for row in TEST_QUANT])
def test_mtp_layer_is_quantized_as_the_list_says(quant: Any, kept: bool) -> None:
    """Field case B91."""
    given = module(NEXTN, P5)["HYV3ModelNextN"](Config, quant).decoder.arguments["quant_config"]
    assert given is (quant if kept else None)


@pytest.mark.parametrize(("prefix", "name"), [("", "model"), ("draft", "draft.model")])
def test_model_name_has_no_leading_dot(prefix: str, name: str) -> None:
    assert module(TARGET, P8)["HYV3ForCausalLM"](Config, prefix=prefix).model.arguments == {"prefix": name}


@pytest.mark.parametrize("prefix", ["", "draft"])
@pytest.mark.parametrize("name", _NO_DOT_EITHER)
def test_other_ways_to_drop_the_dot(prefix: str, name: str) -> None:
    helpers = {"add_prefix": lambda n, p: f"{p}.{n}" if p else n, "maybe_prefix": lambda p, n: f"{p}.{n}" if p else n}
    found = eval(name, {**helpers, "prefix": prefix})  # noqa: S307 - our own text
    assert not found.startswith(".")
    assert found.endswith("model")


def test_loop_on_one_line() -> None:
    text = "class HYV3ForCausalLMNextN:\n    def load_weights(self, weights):\n        for n, w in weights: put(n, w)\n"
    assert b"n = n.replace(" in build(text.encode(), [P4_TWIN])
    assert state(P4_TWIN, build(text.encode(), [P4_TWIN]).decode()) == "applied"
