# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Random small changes to a file that has the defect: the edit is right, or there is none."""

from __future__ import annotations

import ast
import re

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
