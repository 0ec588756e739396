# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the real vLLM's hy_v3 parsers make of a thought and of a tool call.

``engine_parsers.py CHECKPOINT THOUGHT CALL [REASONING_PARSER TOOL_PARSER]``, run by the engine's own interpreter,
prints a line ``PARSED`` with a JSON object. The parsers are the engine's, or those in two files of an older release.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

from vllm.entrypoints.generate.base import protocol
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import hy_v3_reasoning_parser
from vllm.renderers import chat_utils
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import hy_v3_tool_parser

# Where 0.24.0 has what these modules have now.
FORMER = {"vllm.entrypoints.openai.engine.protocol": protocol, "vllm.entrypoints.chat_utils": chat_utils}


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("parser_of_a_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(checkpoint: str, thought: str, call: str, *files: str) -> dict[str, Any]:
    sys.modules.update(FORMER)
    reasoning, tools = map(load, files) if files else (hy_v3_reasoning_parser, hy_v3_tool_parser)
    tokenizer = get_tokenizer(checkpoint)
    request = ChatCompletionRequest(messages=[], model="hy3")
    found: dict[str, Any] = {}
    try:
        thinking = reasoning.HYV3ReasoningParser(tokenizer, chat_template_kwargs={"reasoning_effort": "high"})
        found["thought"] = thinking.extract_reasoning(thought, request)
    except RuntimeError as exc:
        found["thought"] = str(exc)
    try:
        calls = tools.HYV3ToolParser(tokenizer).extract_tool_calls(call, request).tool_calls
        found["calls"] = [[item.function.name, json.loads(item.function.arguments)] for item in calls]
    except RuntimeError as exc:
        found["calls"] = str(exc)
    return found


if __name__ == "__main__":
    print("PARSED", json.dumps(parse(*sys.argv[1:])))
