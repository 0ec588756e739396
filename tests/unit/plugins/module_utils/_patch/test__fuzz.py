# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random small changes to a file that has the defect: the edit is right, or there is none."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

from ansible_collections.sparks.hy3.plugins.module_utils import _patch
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._patch._edit import Patch
from ansible_collections.sparks.hy3.plugins.module_utils._patch._store import Seen
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils._patch import (
    test__sglang,
    test__vllm,
    test__vllm_parsers,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SOURCES = {
    "vllm/model_executor/models/hy_v3_mtp.py": test__vllm.drafter(),
    "vllm/reasoning/hy_v3_reasoning_parser.py": test__vllm_parsers.THINK,
    "vllm/tool_parsers/hy_v3_tool_parser.py": test__vllm_parsers.CALLS,
    "vllm/model_executor/layers/vocab_parallel_embedding.py": test__vllm.PAD,
    "vllm/model_executor/models/hy_v3.py": test__vllm.SHARED,
    "sglang/srt/models/hunyuan_v3.py": test__sglang.TARGET,
    "sglang/srt/models/hunyuan_v3_nextn.py": test__sglang.NEXTN,
}
PATCHES = [patch for twins in _patch.CATALOGUE.values() for patch in twins]
WORDS = ["prefix", "None", "name", "x", "", "(", ")", ",", "not ", "*", "\\\n", "\t", ";", "# ", "'", "\r", "\x0c"]


STACKS = "            for part in [name]:\n                loaded.append(part)\n"
LOADER = test__sglang.changed(test__sglang.TARGET, (test__sglang.END, STACKS))
NORM = (
    '            elif "final_layernorm" in name:\n                name = "model.shared_head.norm.weight"\n'
    + test__sglang.ELSE
)


def loads_all(text: str) -> bool:
    loaded = test__sglang.module(text)["HYV3ForCausalLM"](test__sglang.Config).load_weights(
        [(name, None) for name in test__sglang.NAMES]
    )
    return not any("shared_experts" in name or "e_score_correction_bias" in name for name in loaded)


def loads_norm(text: str) -> bool:
    model = test__sglang.module(text)["HYV3ForCausalLMNextN"](test__sglang.Config)
    loaded = model.load_weights([("model.layers.80.final_layernorm.weight", None)])
    return "model.decoder.final_layernorm.weight" not in loaded


def pads(text: str) -> bool:
    space: dict[str, Any] = {"lcm": math.lcm, "tp_size": 3}
    exec(text, space)  # noqa: S102 - our own text
    return space["pad_vocab_size"](120832) % 3 == 0


# Somebody's whole repair, the patch that it stands for, and whether the file does what it has to.
REPAIRED: list[tuple[str, Patch, Callable[[str], bool]]] = [
    (
        test__sglang.changed(LOADER, (test__sglang.LOOP, test__sglang.LOOP + test__sglang.SHARED + test__sglang.BIAS)),
        test__sglang.P4,
        loads_all,
    ),
    (test__sglang.changed(test__sglang.NEXTN, (test__sglang.ELSE, NORM)), test__sglang.P6, loads_norm),
    (test__vllm.PAD.replace("    return", "    pad_to = lcm(pad_to, tp_size)\n    return"), test__vllm.P3, pads),
]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_repaired_by_someone_means_repaired(data: st.DataObject) -> None:
    """Each line of a repair that stands in another place may leave the fault where it was."""
    text, patch, works = data.draw(st.sampled_from(REPAIRED))
    assert patch.inspect(ast.parse(text)).state == "upstream_fixed"
    assert works(text)
    lines = text.splitlines(keepends=True)
    line = lines.pop(data.draw(st.integers(0, len(lines) - 1)))
    if data.draw(st.booleans()):
        lines.insert(data.draw(st.integers(0, len(lines))), line)
    moved = "".join(lines)
    seen = Seen(patch.file, moved.encode(), None)
    if _patch.survey(seen, [patch])[patch.id].state == "upstream_fixed":
        with contextlib.suppress(NameError, TypeError, AttributeError, KeyError):  # a fault that everybody notices
            assert works(moved), moved


@st.composite
def cases(draw: st.DrawFn) -> tuple[Patch, bytes]:
    """A patch, and the file it is for with one to three words replaced, put in, or lines dropped and doubled."""
    patch = draw(st.sampled_from(PATCHES))
    text = SOURCES[patch.file]
    for _number in range(draw(st.integers(1, 3))):
        places = [match.span() for match in re.finditer(r"\w+|[^\w ]| +", text)] or [(0, 0)]
        start, end = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["replace", "insert", "double", "drop-line"]))
        if kind == "drop-line":
            lines = text.splitlines(keepends=True)
            del lines[text.count("\n", 0, start) :][:1]
            text = "".join(lines)
        else:
            new = text[start:end] * 2 if kind == "double" else draw(st.sampled_from(WORDS))
            text = text[:start] + new + text[start if kind == "insert" else end :]
    return patch, text.encode()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_right_or_refused(case: tuple[Patch, bytes]) -> None:
    patch, content = case
    seen = Seen(patch.file, content, None)
    found = _patch.survey(seen, [patch])[patch.id]
    if found.state != "defect" and not found.rest:
        assert _patch.plan(seen, [patch], "present", [patch]).content == content
        return
    try:
        new = _patch.plan(seen, [patch], "present", [patch]).content
    except Hy3Error:
        return
    assert new is not None
    compile(new, patch.file, "exec", dont_inherit=True)
    assert patch.inspect(ast.parse(new)).state == "applied"
    # Only what was there is still there, in the same order: nothing is taken away but a token that is written anew.
    old_words, new_words = re.findall(rb"\w+", content), iter(re.findall(rb"\w+", new))
    assert all(word in new_words for word in old_words)
