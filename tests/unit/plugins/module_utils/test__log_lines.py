# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

from datetime import datetime

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import (
    Line,
    last_start,
    merged,
    message_of,
    own_time,
    timed,
)

NOW = datetime(2026, 12, 1, 12).timestamp()


def local(*numbers: int) -> float:
    return datetime(*numbers).timestamp()  # type: ignore[arg-type]  # the tests' own numbers


# (id, line, seconds)
TEST_TIMES: list[tuple[str, str, float | None]] = [
    ("vLLM", "(EngineCore pid=1) ERROR 11-30 17:11:55 [core.py:1231] x", local(2026, 11, 30, 17, 11, 55)),
    ("vLLM of last year", "INFO 12-31 23:59:59 [x.py:1] y", local(2025, 12, 31, 23, 59, 59)),
    ("SGLang", "[2026-11-30 17:11:55 TP0] x", local(2026, 11, 30, 17, 11, 55)),
    ("Ray", "[2026-11-30 18:49:36,524 W 514 514] gcs_client.cc:210: x", local(2026, 11, 30, 18, 49, 36) + 0.524),
    ("torch", "[rank1]:[W1119 18:16:21.560000017 ProcessGroupNCCL.cpp:1826] x", local(2026, 11, 19, 18, 16, 21) + 0.56),
    ("torch, a month of one digit", "[rank1]:[W519 18:16:21.5 x.cpp:1] x", local(2026, 5, 19, 18, 16, 21) + 0.5),
    ("none", "RuntimeError: cancelled", None),
    ("no date", "99-99 99:99:99", None),
    ("a date far within a line", "x" * 300 + "2026-11-30 17:11:55", None),
]


@pytest.mark.parametrize(("line", "seconds"), [row[1:] for row in TEST_TIMES], ids=[row[0] for row in TEST_TIMES])
def test_own_time(line: str, seconds: float | None) -> None:
    found = own_time(line, NOW)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=0.001))


@pytest.mark.parametrize(
    "prefix",
    [
        "Dec 01 11:02:09 spark-a vllm[4242]: ",
        "Mär 03 11:02:09 spark-a hy3[4242]: ",
        "2026-12-01T11:02:09+0100 spark-a vllm[4242]: ",
        "2026-12-01T11:02:09.123456789Z stdout F ",
        "(EngineCore pid=1) (RayWorkerProc pid=9, ip=10.77.0.2) (Worker_TP0 pid=9) ERROR 12-01 07:32:58 [x.py:1] ",
        "(raylet) ",
        "(autoscaler +25s) ",
        "[2026-11-30 17:11:55 TP0 EP1] ",
        "[2026-11-30 18:49:36,524 E 514 514] (raylet) node_manager.cc:3064: ",
        "2026-05-18 01:11:02,824\tERROR worker.py:1843 -- ",
        "[rank0]: ",
        "[rank1]:[E519 18:16:21.560000017 ProcessGroupNCCL.cpp:1826] ",
        "node-1  | ",
        "",
    ],
)
def test_message_without_its_prefixes(prefix: str) -> None:
    assert message_of(f"{prefix}ValueError: heads not divisible") == "ValueError: heads not divisible"


def test_a_traceback_has_the_time_of_its_first_line() -> None:
    lines = timed("[2026-11-30 17:11:55 TP0] Traceback:\n  File x\nValueError: y\n", now=NOW)
    assert [line.time for line in lines] == [local(2026, 11, 30, 17, 11, 55)] * 3


def test_the_journals_time_counts_and_its_prefix_goes() -> None:
    text = "1796064460.123456 spark-1 vllm[42]: \x1b[36mINFO 11-30 17:11:55 [x.py:1]\x1b[0m y\n-- No entries --\n"
    assert timed(text, now=NOW)[0] == Line("INFO 11-30 17:11:55 [x.py:1] y", 1796064460.123456)
    assert timed("1796064460.1 spark-1 kernel: x", now=NOW, source=True) == [Line("kernel: x", 1796064460.1)]


def test_logs_are_merged_by_time_and_keep_their_own_order() -> None:
    first = [Line("a", None), Line("b", 2.0), Line("clock set back", 1.0), Line("d", 5.0)]
    second = [Line("x", 1.5), Line("y", 4.0)]
    assert [line.text for line in merged(first, second)] == ["a", "x", "b", "clock set back", "y", "d"]
    assert merged() == []


def test_only_the_last_start_of_a_file_that_is_appended_to() -> None:
    texts = [
        "OSError: [Errno 28]",
        "vLLM API server version 0.24.0",
        "Initializing a V1 LLM engine (v0.24.0)",
        "serving",
    ]
    lines = [Line(text, None) for text in texts]
    assert [line.text for line in last_start(lines)] == texts[1:]
    assert last_start(lines[:1]) == lines[:1]
    assert [line.text for line in last_start([*lines, Line("server_args=ServerArgs(x", None)])] == [
        "server_args=ServerArgs(x"
    ]
