# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Released files that somebody changed: the state is right, and no edit is ever wrong."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Patch, State
from ansible_collections.sparks.hy3.plugins.module_utils._patch._store import Seen
from ansible_collections.sparks.hy3.tests.wheels.released import RELEASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILES = {release.name: release.files() for release in RELEASES}
PATCHES = [patch for twins in _patch.CATALOGUE.values() for patch in twins]
# Many releases have the same file: each content once, under the first release that has it.
DEFECTS = list(
    {
        (patch.id, FILES[release.name][patch.file]): (release.name, patch)
        for release in reversed(RELEASES)
        for patch in PATCHES
        if patch.engine == release.engine and release.state(patch.id) == "defect"
    }.values()
)
IDS = [f"{name}-{patch.id}-{patch.file.rpartition('/')[2]}" for name, patch in DEFECTS]


def state_of(patch: Patch, content: bytes) -> State:
    return _patch.survey(Seen(patch.file, content, None), [patch])[patch.id].state


def code(content: bytes) -> str:
    """What the file says, without the blanks in its docstrings, which a formatter may move."""
    return re.sub(r"(\\n|\\t|\s)+", "", ast.dump(ast.parse(content)))


def reformatted(text: str, width: int) -> str:
    command = ["ruff", "format", "--isolated", f"--line-length={width}", "--config=format.indent-style='tab'", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


# Another layout of the same code.
LAYOUTS: dict[str, Callable[[str], str]] = {
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "tabs-narrow": lambda text: reformatted(text, 40),
    "wide": lambda text: reformatted(text, 300),
    "unparsed": lambda text: ast.unparse(ast.parse(text)),
    "bom": lambda text: "\ufeff" + text,
    "no-last-line-end": lambda text: text.rstrip("\n"),
}


@pytest.mark.parametrize(("name", "patch"), DEFECTS, ids=IDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_does_not_matter(name: str, patch: Patch, layout: Callable[[str], str]) -> None:
    text = layout(FILES[name][patch.file].decode()).encode()
    assert state_of(patch, text) == "defect"
    new = _patch.build(text, [patch])
    assert code(new) == code(_patch.build(FILES[name][patch.file], [patch]))
    assert new.count(b"\r\n") == new.count(b"\n") or b"\r\n" not in text


def renamed(text: str) -> str:
    return re.sub(r"\b(class|def) (HYV3\w+|pad_vocab_size)\b", r"\1 \2Other", text)


BROKEN: dict[str, Callable[[str], str]] = {
    "twice": lambda text: text + text,
    "renamed": renamed,
    "syntax-error": lambda text: text + "def (:\n",
    "nul": lambda text: text + "\0",
}


@pytest.mark.parametrize(("name", "patch"), DEFECTS, ids=IDS)
@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_other_code_is_refused(name: str, patch: Patch, change: Callable[[str], str]) -> None:
    assert state_of(patch, change(FILES[name][patch.file].decode()).encode()) == "unrecognised"


@pytest.mark.parametrize("patch", PATCHES, ids=[f"{patch.id}-{patch.file}" for patch in PATCHES])
def test_empty_file(patch: Patch) -> None:
    assert state_of(patch, b"") == "absent"


MTP, EMBEDDING = "vllm/model_executor/models/hy_v3_mtp.py", "vllm/model_executor/layers/vocab_parallel_embedding.py"
REASONING, TOOLS = "vllm/reasoning/hy_v3_reasoning_parser.py", "vllm/tool_parsers/hy_v3_tool_parser.py"
MODEL, NEXTN = "sglang/srt/models/hunyuan_v3.py", "sglang/srt/models/hunyuan_v3_nextn.py"
LOOP = "        for name, loaded_weight in weights:\n"
SHARED = '            name = name.replace(".shared_experts.", ".shared_mlp.")\n'
BIAS = '            name = name.replace("e_score_correction_bias", "expert_bias")\n'
INIT = "        super().__init__()\n        self.config = config\n"
STACKED = (
    "            if name not in params_dict:\n                continue\n"
    "            param = params_dict[name]\n            weight_loader = getattr("
)
LAYER = "        self.decoder = HYV3DecoderLayer("
NEXTN_QUANT = '        nextn_quant_config = None if quant_config.get_name() == "modelopt_fp4" else quant_config\n'
OTHERS = "                if any(subname.startswith(s)"
CALL = "HYV3SharedHead(config=config, quant_config=quant_config)"

# What, the file, the patch, pairs of old and new text (each old one is there), the state after that.
TEST_BY_HAND: list[tuple[str, str, str, list[tuple[str, str]], State]] = [
    ("seed-000-call-only", MTP, "P1", [(CALL, CALL[:-1] + ", prefix=prefix)")], "partial"),
    (
        "seed-001-reasoning",
        REASONING,
        "P2",
        [('"<think>"', '"<think:opensource>"'), ('"</think>"', '"</think:opensource>"')],
        "upstream_fixed",
    ),
    ("seed-001-half", REASONING, "P2", [('"<think>"', '"<think:opensource>"')], "partial"),
    (
        "seed-001-tools-half",
        TOOLS,
        "P2",
        [('"<tool_call>"', '"<tool_call:opensource>"'), ('"</tool_call>"', '"</tool_call:opensource>"')],
        "partial",
    ),
    ("parser-other-word", TOOLS, "P2", [('"<tool_sep>"', "TOOL_SEP")], "unrecognised"),
    (
        "parser-suffix-and-no-tokens",
        REASONING,
        "P2",
        [("        super()", "        self.suffix = ''\n        super()")],
        "partial",
    ),
    (
        "seed-002-lcm",
        EMBEDDING,
        "P3",
        [("    return ((vocab", "    pad_to = math.lcm(pad_to, tp_size())\n    return ((vocab")],
        "upstream_fixed",
    ),
    (
        "size-unused",
        EMBEDDING,
        "P3",
        [("    return ((vocab", "    tp_size = get_tensor_model_parallel_world_size()\n    return ((vocab")],
        "partial",
    ),
    (
        "padding-other",
        EMBEDDING,
        "P3",
        [("return ((vocab_size + pad_to - 1)", "return ((vocab_size + pad_to)")],
        "unrecognised",
    ),
    ("seed-003-remap", MODEL, "P4", [(LOOP, LOOP + SHARED)], "partial"),
    ("remap-both", MODEL, "P4", [(LOOP, LOOP + SHARED + BIAS)], "upstream_fixed"),
    ("remap-twin", NEXTN, "P4", [(LOOP, LOOP + SHARED + BIAS)], "upstream_fixed"),
    ("seed-003-remap-late", MODEL, "P4", [(STACKED, SHARED + STACKED)], "unrecognised"),
    ("remap-both-late", MODEL, "P4", [(STACKED, SHARED + BIAS + STACKED)], "unrecognised"),
    ("remap-unused", MODEL, "P4", [(LOOP, LOOP + (SHARED + BIAS).replace("name =", "new ="))], "unrecognised"),
    ("second-loop", MODEL, "P4", [(LOOP, "        for _n, _w in weights: pass\n" + LOOP)], "unrecognised"),
    ("skips-them", MODEL, "P4", [(LOOP, LOOP + '            if "shared_experts" in name: continue\n')], "unrecognised"),
    (
        "elsewhere",
        MODEL,
        "P4",
        [("class HYV3ForCausalLM(", 'NAMES = {"shared_experts": 1}\nclass HYV3ForCausalLM(')],
        "unrecognised",
    ),
    (
        "seed-003-guard",
        NEXTN,
        "P5",
        [(INIT, INIT + '        if quant_config and quant_config.get_name() == "modelopt_fp4": quant_config = None\n')],
        "upstream_fixed",
    ),
    ("guard-other", NEXTN, "P5", [(INIT, INIT + "        quant_config = pick(quant_config)\n")], "unrecognised"),
    ("guard-not-passed", NEXTN, "P5", [(LAYER, NEXTN_QUANT + LAYER)], "partial"),
    (
        "guard-passed",
        NEXTN,
        "P5",
        [
            (LAYER, NEXTN_QUANT + LAYER),
            ("layer_id=0,\n            quant_config=q", "layer_id=0,\n            quant_config=nextn_q"),
        ],
        "upstream_fixed",
    ),
    (
        "norm-unused",
        NEXTN,
        "P6",
        [(OTHERS, '                norm = "model.shared_head.norm" + "final_layernorm"\n' + OTHERS)],
        "unrecognised",
    ),
    (
        "seed-003-norm",
        NEXTN,
        "P6",
        [
            (
                "                else:\n                    name = f",
                '                elif subname == "final_layernorm.weight":\n'
                '                    name = "model.shared_head.norm.weight"\n'
                "                else:\n                    name = f",
            )
        ],
        "upstream_fixed",
    ),
    (
        "norm-skipped",
        NEXTN,
        "P6",
        [(LOOP, LOOP + '            if "final_layernorm" in name: continue\n')],
        "unrecognised",
    ),
    ("dot-if", MODEL, "P8", [('f"{prefix}.model"', 'f"{prefix}.model" if prefix else "model"')], "upstream_fixed"),
    ("dot-add-prefix", MODEL, "P8", [('f"{prefix}.model"', 'add_prefix("model", prefix)')], "upstream_fixed"),
    ("dot-other", MODEL, "P8", [('f"{prefix}.model"', 'f"{prefix}.language.model"')], "unrecognised"),
]


@pytest.mark.parametrize(
    ("file", "patch", "pairs", "state"), [row[1:] for row in TEST_BY_HAND], ids=[row[0] for row in TEST_BY_HAND]
)
def test_changed_by_hand(file: str, patch: str, pairs: list[tuple[str, str]], state: State) -> None:
    (known,) = (item for item in _patch.CATALOGUE[patch] if item.file == file)
    for name in ("vllm-0.24.0", "sglang-0.5.14"):
        if file not in FILES[name]:
            continue
        text = FILES[name][file].decode()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new, 1)
        assert state_of(known, text.encode()) == state


@st.composite
def edited(draw: st.DrawFn) -> tuple[Patch, bytes]:
    """A released file with one to three small edits near what the patch changes, or anywhere."""
    name, patch = draw(st.sampled_from(DEFECTS))
    original = FILES[name][patch.file]
    lines = original.decode().splitlines(keepends=True)
    new = _patch.build(original, [patch]).decode().splitlines(keepends=True)
    near = next(number for number, (a, b) in enumerate(zip(lines, new, strict=False)) if a != b)
    for _number in range(draw(st.integers(1, 3))):
        where = st.integers(max(0, near - 12), min(len(lines) - 1, near + 12)) | st.integers(0, len(lines) - 1)
        at = min(draw(where), len(lines) - 1)
        kind = draw(st.sampled_from(["drop", "double", "word", "swap", "insert", "indent"]))
        words = re.findall(r"\w+|[^\w\s]", lines[at])
        if kind == "drop":
            del lines[at]
        elif kind == "double":
            lines.insert(at, lines[at])
        elif kind == "word" and words:
            old = draw(st.sampled_from(words))
            lines[at] = lines[at].replace(old, draw(st.sampled_from(["prefix", "None", "x", "name", "", "(", ","])), 1)
        elif kind == "swap" and at + 1 < len(lines):
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
        elif kind == "insert":
            lines.insert(
                at, draw(st.sampled_from(["pass\n", "        pass\n", "# prefix\n", "\n", "\x0c\n", "x = '''\n"]))
            )
        else:
            lines[at] = "    " + lines[at]
    return patch, "".join(lines).encode()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(edited())
def test_never_a_wrong_edit(case: tuple[Patch, bytes]) -> None:
    patch, content = case
    found = _patch.survey(Seen(patch.file, content, None), [patch])[patch.id]
    # None of these edits repairs anything, but for leaving the quantization config out.
    assert found.state != "upstream_fixed" or patch.id in ("P1", "P5")
    if found.state != "defect" and not found.rest:
        return
    try:
        new = _patch.build(content, [patch])
    except Hy3Error:
        return
    compile(new, patch.file, "exec", dont_inherit=True)
    assert state_of(patch, new) == "upstream_fixed", "done, and not by us as far as a record says"
