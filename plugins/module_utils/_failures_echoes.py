# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What the rest of an engine says when one part of it ends: consequences, and errors that no rule is about."""

from __future__ import annotations

import typing as t

from ansible_collections.sparks.hy3.plugins.module_utils._failure import (
    CONSEQUENCE,
    GENERIC,
    RECIPE,
    SYMPTOM,
    UNKNOWN,
    Rule,
    rule,
)

_LOOK = "Look at the unit's log and the memory of the other nodes"
_ABOVE = "Read the log above this line for the first error"
_LOST: dict[str, t.Any] = {"kind": CONSEQUENCE, "peers": True}

# Errors of a program that is being ended or that lost its counterpart: they say nothing about the reason.
_ECHOES = (
    r"(?:\w{1,60}\.){0,8}(?:BrokenPipeError|ConnectionResetError|ConnectionAbortedError|EOFError|IncompleteReadError"
    r"|CancelledError|KeyboardInterrupt|SystemExit|GeneratorExit|EngineDeadError|ContextTerminated|ZMQError"
    r"|ChildFailedError|ProcessRaisedException|ProcessExitedException|GetTimeoutError|RayTaskError|ResourceWarning"
    r"|WorkerProcError|DistBackendError|DistNetworkError|DistStoreError|EngineGenerateError)\b"
    r"|Exception ignored|Event loop is closed|AttributeError: 'NoneType' object has no attribute '(?:shutdown|close"
    r"|poll)"
)

ECHO_RULES: tuple[Rule, ...] = (
    rule(
        "cancelled",
        r"RuntimeError: cancelled\b|^cancelled\s*$",
        "The head lost a worker",
        "Look at the memory and the log of the other nodes; a worker that ran out of memory is the usual reason: lower "
        "max_model_len or the KV budget",
        RECIPE,
        **_LOST,
    ),
    rule(
        "engine-died",
        r"EngineDeadError|EngineCore (?:died|encountered an issue)"
        r"|(?:Worker proc|RayWorkerProc|Engine core process|Subprocess|Process) .{1,60}?(?:died|crashed)\b"
        r"|scheduler died during initialization|Rank \d+ scheduler is dead",
        "A worker or the engine core ended, and the rest noticed",
        _LOOK,
        "vLLM and SGLang",
        **_LOST,
    ),
    rule(
        "sglang-watchdog",
        r"\b\w{1,40} watchdog timeout \(|[Ww]atchdog timeout \(self\.watchdog_timeout",
        "A rank of SGLang did not get through a step in time: another rank is gone or hangs",
        _LOOK + "; if all are well and this is a first start, raise watchdog-timeout",
        "SGLang's watchdog",
        kind=SYMPTOM,
        peers=True,
    ),
    rule(
        "engine-failed",
        r"Engine core initialization failed|Frontend process failed during engine core"
        r"|Initialization failed\. Please see|Received sigquit from a child|SIGQUIT received",
        "The engine core failed to start, and the log names no reason that is known here",
        _ABOVE,
        "vLLM and SGLang",
        kind=GENERIC,
    ),
    # These come before the lines with the reason, for which it is worth to wait.
    rule(
        "engine-failing",
        r"EngineCore (?:failed to start|encountered a fatal error)|WorkerProc (?:initialization failed|hit an "
        r"exception)"
        r"|(?:Scheduler|EngineCore|TokenizerManager|DetokenizerManager) hit an exception"
        r"|Initialization failed\. warmup error|Executor failed\.",
        "The engine core failed, and the log names no reason that is known here",
        _ABOVE,
        "vLLM and SGLang",
        fatal=False,
        kind=GENERIC,
    ),
    rule(
        "unknown",
        f"(?!{_ECHOES})"
        r"(?P<error>(?:\w{1,60}\.){0,8}\w{0,60}?(?:Error|Exception))(?P<text>: .*)?$",
        "The engine raised {error}{text}",
        "Read the log around this line",
        "no rule of this collection knows it",
        fatal=False,
        kind=UNKNOWN,
        message=True,
    ),
)
