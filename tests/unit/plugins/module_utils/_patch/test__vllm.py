# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""P1, P3 and P7 on small sources with the structure of vLLM's files: each state by the syntax tree, and the edit."""

from __future__ import annotations

import ast
import sys
import textwrap
import types
from typing import Any

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._patch import build
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Patch, State
from ansible_collections.sparks.hy3.plugins.module_utils._patch._vllm import PATCHES

P1, P3, P7 = (patch for patch in PATCHES if patch.id != "P2")

PLAIN = "cfg.vocab, cfg.width, quant_config=quant_config"
SITE = "config=cfg, quant_config=quant_config"


def drafter(head: str = PLAIN, *, parameter: str = "", site: str = SITE, config: str = "PretrainedConfig") -> str:
    """The two classes that matter, with the arguments of both calls and a further parameter of the first class."""
    return textwrap.dedent(
        f"""\
        from transformers import {config}

        from .utils import maybe_prefix


        class HYV3SharedHead(Module):
            def __init__(
                self,
                cfg: {config},
                quant_config: QuantizationConfig | None = None,
                {parameter}
            ) -> None:
                super().__init__()
                self.head = ParallelLMHead(
                    {head}
                )


        class HYV3MultiTokenPredictorLayer(Module):
            def __init__(self, cfg: {config}, prefix: str, quant_config=None) -> None:
                self.shared_head = HYV3SharedHead({site})
                self.block = HYV3DecoderLayer(config=cfg, quant_config=quant_config, prefix=prefix)
        """
    )


PREFIX: dict[str, Any] = {"parameter": 'prefix: str = "",', "site": SITE + ", prefix=prefix"}
TAKES: dict[str, Any] = {"parameter": PREFIX["parameter"]}
PASSES: dict[str, Any] = {"site": PREFIX["site"]}
BY_SEED = PLAIN + ', prefix=maybe_prefix(prefix, "lm_head")'
PASSED = PLAIN + ", prefix=prefix"
HEAD_CLASS = drafter().partition("class HYV3MultiTokenPredictorLayer")[0]

TEST_INSPECT: list[tuple[str, str, State]] = [
    ("old-annotation", drafter(), "defect"),
    ("new-annotation", drafter(config="PreTrainedConfig"), "defect"),
    ("one-line-signature", drafter().replace("(\n        self,\n", "(self, "), "defect"),
    ("by-keyword", drafter("num_embeddings=cfg.vocab, embedding_dim=cfg.width, quant_config=quant_config"), "defect"),
    ("through-module", drafter().replace("ParallelLMHead(", "layers.ParallelLMHead("), "defect"),
    # Field case B74: words that a guard by substring would take for the repair.
    ("name-in-comment", drafter() + '# prefix="lm_head"\nlm_head_prefix = "lm_head"\n', "defect"),
    ("prefix-elsewhere", drafter() + 'ParallelLMHead(1, 2, prefix="lm_head")\n', "defect"),
    ("ours", drafter(PLAIN + ', prefix="lm_head"'), "applied"),
    ("ours-and-prefix-passed", drafter(PLAIN + ', prefix="lm_head"', **PREFIX), "applied"),
    # Field case B75: repaired by someone else.
    ("seed-complete", drafter(BY_SEED, **PREFIX), "upstream_fixed"),
    ("seed-positional", drafter(BY_SEED, **TAKES, site="cfg, quant_config, prefix"), "upstream_fixed"),
    ("f-string", drafter(PLAIN + ', prefix=f"{prefix}.lm_head"', **PREFIX), "upstream_fixed"),
    ("quant-none", drafter("cfg.vocab, cfg.width, quant_config=None"), "upstream_fixed"),
    ("quant-left-out", drafter("cfg.vocab, cfg.width"), "upstream_fixed"),
    (
        "named-at-the-site",
        drafter(PASSED, **TAKES, site=SITE + ', prefix=maybe_prefix(prefix, "lm_head")'),
        "upstream_fixed",
    ),
    ("constant-at-the-site", drafter(PASSED, **TAKES, site=SITE + ', prefix="lm_head"'), "upstream_fixed"),
    ("other-name-at-the-site", drafter(PASSED, **PREFIX), "unrecognised"),
    ("site-quant-none", drafter(site="config=cfg, quant_config=None"), "upstream_fixed"),
    ("site-quant-none-by-position", drafter(site="cfg, None"), "upstream_fixed"),
    ("site-quant-left-out", drafter(site="config=cfg"), "upstream_fixed"),
    ("quant-set-to-none", drafter().replace("__init__()", "__init__()\n        quant_config = None"), "upstream_fixed"),
    ("quant-set", drafter().replace("__init__()", "__init__()\n        quant_config = pick()"), "unrecognised"),
    ("half-parameter", drafter(**TAKES), "partial"),
    ("half-call-site", drafter(**PASSES), "partial"),
    ("half-head-and-parameter", drafter(BY_SEED, **TAKES), "partial"),
    ("half-head-and-call-site", drafter(BY_SEED, **PASSES), "partial"),
    ("half-head", drafter(BY_SEED), "partial"),
    ("half-parameter-and-call-site", drafter(**PREFIX), "partial"),
    # Field case B77: the place is there twice, or four times.
    ("two-classes", drafter() + HEAD_CLASS, "unrecognised"),
    ("two-heads", drafter().replace("super().__init__()", "ParallelLMHead(1, 2)"), "unrecognised"),
    ("two-call-sites", drafter() + "HYV3SharedHead(cfg)\n", "unrecognised"),
    ("four-heads", drafter().replace("super().__init__()", "ParallelLMHead(); " * 3), "unrecognised"),
    ("no-call-site", HEAD_CLASS, "unrecognised"),
    ("head-moved-out", drafter().replace("ParallelLMHead(", "make_head("), "unrecognised"),
    ("class-renamed", drafter().replace("HYV3SharedHead", "SharedHead"), "unrecognised"),
    ("other-name", drafter(PLAIN + ', prefix=maybe_prefix(prefix, "shared_head.head")', **PREFIX), "unrecognised"),
    ("other-variable", drafter(PLAIN + ', prefix=f"{where}.lm_head"', **PREFIX), "unrecognised"),
    ("empty-name", drafter(PLAIN + ', prefix=""'), "unrecognised"),
    ("quant-computed", drafter("cfg.vocab, cfg.width, quant_config=pick(quant_config)"), "unrecognised"),
    ("quant-by-position", drafter("cfg.vocab, cfg.width, False, None, None, 64, quant_config"), "unrecognised"),
    ("head-unpacks", drafter("**kwargs"), "unrecognised"),
    ("site-unpacks", drafter(site="*args"), "unrecognised"),
    ("re-export", "from vllm.x.hy_v3_mtp import *\n", "unrecognised"),
    ("class-from-elsewhere", drafter().replace(HEAD_CLASS, "from .x import HYV3SharedHead\n"), "unrecognised"),
    ("class-imported", "from .x import Other as HYV3SharedHead\n", "unrecognised"),
    ("module-getattr", "from .x import m\n\ndef __getattr__(name):\n    return getattr(m, name)\n", "unrecognised"),
    ("other-entry-of-modules", "import sys\nsys.modules['x'] = 1\n", "unrecognised"),
    ("no-class", "class Other:\n    pass\n", "absent"),
    ("empty", "", "absent"),
]


@pytest.mark.parametrize(("text", "state"), [row[1:] for row in TEST_INSPECT], ids=[row[0] for row in TEST_INSPECT])
def test_inspect(text: str, state: State) -> None:
    finding = P1.inspect(ast.parse(text))
    assert finding.state == state
    assert bool(finding.why) == (state not in ("defect", "applied"))


def test_reason_counts_what_was_found() -> None:
    assert P1.inspect(ast.parse(drafter() + "HYV3SharedHead(cfg)\n")).why == (
        "expected each once, found 1 x class HYV3SharedHead, 1 x __init__ in it, 1 x call of ParallelLMHead there, "
        "2 x call of HYV3SharedHead"
    )


DEFECTS = [row for row in TEST_INSPECT if row[2] == "defect"]


@pytest.mark.parametrize("text", [row[1] for row in DEFECTS], ids=[row[0] for row in DEFECTS])
def test_edit_adds_one_keyword_and_nothing_else(text: str) -> None:
    old, new = text.encode(), build(text.encode(), [P1])
    changed = [pair for pair in zip(old.splitlines(), new.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(changed) == 1
    assert changed[0][1].replace(b'prefix="lm_head", ', b"") == changed[0][0]


def test_edit_on_lines_of_their_own() -> None:
    lines = ["cfg.vocab,", "cfg.width,", "quant_config=quant_config,"]
    indented = [f"            {line}\r\n" for line in lines]
    text = drafter("HEAD").replace("\n", "\r\n").replace("            HEAD\r\n", "".join(indented))
    new = build(text.encode(), [P1]).decode()
    assert new == text.replace(indented[2], '            prefix="lm_head",\r\n' + indented[2])


PAD = '''\
def pad_vocab_size(vocab_size: int, pad_to: int = 64) -> int:
    """Pad the vocab size to the given value."""
    return ((vocab_size + pad_to - 1) // pad_to) * pad_to
'''
SHARED = """\
class HYV3MoEFused:
    def __init__(self, config, quant_config=None, prefix=""):
        self.gate = Gate(prefix=f"{prefix}.gate")
        self.shared_mlp = HYV3FeedForward(quant_config=quant_config, prefix=f"{prefix}", reduce_results=False)


class HYV3DecoderLayer:
    def __init__(self, config, prefix=""):
        self.mlp = HYV3FeedForward(prefix=f"{prefix}.mlp")
"""
NAME = 'prefix=f"{prefix}", '

# (what, patch, file, its state)
TEST_OTHERS: list[tuple[str, Patch, str, State]] = [
    ("padding", P3, PAD, "defect"),
    ("padding-no-docstring", P3, PAD.replace('    """Pad the vocab size to the given value."""\n', ""), "defect"),
    (
        "padding-lcm",
        P3,
        PAD.replace("    return", "    pad_to = math.lcm(pad_to, ranks())\n    return"),
        "upstream_fixed",
    ),
    ("padding-size", P3, PAD.replace("    return", "    pad_to *= get_group().tp_size\n    return"), "upstream_fixed"),
    ("padding-by-caller", P3, PAD + "size = pad_vocab_size(n, lcm(64, 3))\n", "upstream_fixed"),
    ("padding-by-one-caller", P3, PAD + "pad_vocab_size(n, lcm(64, 3)); pad_vocab_size(n)\n", "defect"),
    ("padding-helper-unused", P3, PAD + "def lcm(a, b):\n    return a * b // math.gcd(a, b)\n", "defect"),
    ("padding-size-unused", P3, PAD.replace("    return", "    tp_size = get_world_size()\n    return"), "partial"),
    ("padding-after-return", P3, PAD + "    pad_to = lcm(pad_to, 3)\n", "partial"),
    ("padding-in-return", P3, PAD.replace("// pad_to)", "// lcm(pad_to, n()))"), "upstream_fixed"),
    ("padding-re-export", P3, "from .new import pad_vocab_size\n", "unrecognised"),
    ("padding-other-formula", P3, PAD.replace("- 1", "- 2"), "unrecognised"),
    ("padding-other-names", P3, PAD.replace("pad_to: int", "to: int"), "unrecognised"),
    ("padding-more", P3, PAD.replace("    return", "    check(pad_to)\n    return"), "unrecognised"),
    ("padding-twice", P3, PAD * 2, "unrecognised"),
    ("padding-moved", P3, "from elsewhere import pad_vocab_size\npad_vocab_size(1)\n", "unrecognised"),
    ("padding-nothing", P3, "x = 1\n", "absent"),
    ("shared", P7, SHARED, "defect"),
    ("shared-plain-name", P7, SHARED.replace(NAME, "prefix=prefix, "), "defect"),
    ("shared-named", P7, SHARED.replace(NAME, 'prefix=maybe_prefix(prefix, "shared_mlp"), '), "upstream_fixed"),
    ("shared-other-name", P7, SHARED.replace(NAME, 'prefix=f"{prefix}.shared", '), "unrecognised"),
    ("shared-no-name", P7, SHARED.replace(NAME, ""), "unrecognised"),
    ("shared-unpacks", P7, SHARED.replace(NAME, "**names, "), "unrecognised"),
    ("shared-twice", P7, SHARED.replace("Gate(", "HYV3FeedForward("), "unrecognised"),
    ("shared-renamed", P7, SHARED.replace("MoEFused", "MoE"), "unrecognised"),
    ("shared-nothing", P7, "x = 1\n", "absent"),
]


@pytest.mark.parametrize(
    ("patch", "text", "state"), [row[1:] for row in TEST_OTHERS], ids=[row[0] for row in TEST_OTHERS]
)
def test_inspect_others(patch: Patch, text: str, state: State) -> None:
    finding = patch.inspect(ast.parse(text))
    assert finding.state == state
    assert bool(finding.why) == (state != "defect")


def test_shared_mlp_gets_its_name() -> None:
    assert build(SHARED.encode(), [P7]).decode() == SHARED.replace(NAME, 'prefix=f"{prefix}.shared_mlp", ')


# Ranks (0 before there are groups), vocabulary, padded vocabulary; 120960 is what three ranks measured.
TEST_PADDED = [
    (0, 120832, 120832),
    (1, 120832, 120832),
    (2, 120832, 120832),
    (3, 120832, 120960),
    (4, 120832, 120832),
    (8, 120832, 120832),
    (3, 64, 192),
    (3, 120960, 120960),
]


@pytest.mark.parametrize(("ranks", "vocabulary", "padded"), TEST_PADDED)
def test_padding_divides_among_the_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, vocabulary: int, padded: int
) -> None:
    state = types.ModuleType("parallel_state")
    monkeypatch.setattr(state, "model_parallel_is_initialized", lambda: ranks > 0, raising=False)
    monkeypatch.setattr(state, "get_tensor_model_parallel_world_size", lambda: 1 // bool(ranks) * ranks, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    space: dict[str, Any] = {}
    exec(build(PAD.encode(), [P3]), space)  # noqa: S102 - our own text
    assert space["pad_vocab_size"](vocabulary) == padded


def test_padding_on_one_line() -> None:
    text = "def pad_vocab_size(vocab_size, pad_to=64): return (vocab_size + pad_to - 1) // pad_to * pad_to\n"
    assert P3.inspect(ast.parse(build(text.encode(), [P3]))).state == "applied"
