# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each rule finds its lines in whatever form journald, Ray, an engine or a terminal hands them on, and nothing else."""

from __future__ import annotations

import typing as t
from collections import Counter

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._diagnosis import diagnose
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import (
    OOM_PROCESS,
    RULES,
    find_failures,
    find_kills,
    find_troubles,
)
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines, read_facts
from ansible_collections.sparks.hy3.plugins.module_utils._failure import KINDS
from ansible_collections.sparks.hy3.plugins.module_utils._log_lines import (
    last_start,
    merged,
    message_of,
    own_time,
    timed,
)
from ansible_collections.sparks.hy3.plugins.module_utils._remarks import find_remarks
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.failure_samples import NEAR_MISSES, NODE, SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

NOW = 1796100000.0


def before(prefix: str) -> t.Callable[[str], str]:
    return lambda text: "\n".join(prefix + line for line in text.split("\n"))


FORMS: dict[str, t.Callable[[str], str]] = {
    "as it is": str,
    "journald": before("Dec 01 11:02:09 spark-a vllm[4242]: "),
    "journald elsewhere": before("Mär 03 11:02:09 spark-a vllm[4242]: "),
    "journald, ISO": before("2026-12-01T11:02:09+0100 spark-a vllm[4242]: "),
    "Ray": before("(RayWorkerProc pid=1963, ip=10.77.0.9) "),
    "Ray in vLLM": before("(EngineCore pid=1118) (RayWorkerProc pid=1963) (Worker_TP0 pid=1963) "),
    "vLLM": before("(Worker_TP0 pid=7) ERROR 12-01 07:32:58 [multiproc_executor.py:839] "),
    "SGLang": before("[2026-11-30 17:11:55 TP0] "),
    "torchrun": before("[rank1]: "),
    "Compose": before("head-1  | "),
    "colours": lambda text: before("\x1b[36m(EngineCore pid=7)\x1b[0;0m \x1b[1;31m")(text) + "\x1b[0m",
    "colours that syslog has escaped": before("#033[36m(EngineCore pid=7)#033[0;0m "),
    "Windows": lambda text: text.replace("\n", "\r\n") + "\r\n",
    "after a progress bar": lambda text: f"Loading:  50%|##   |\rLoading: 100%|####|\r{text}",
    "said by several": lambda text: text + "\x1b[32m [repeated 2x across cluster] (Ray deduplicates logs)\x1b[0m",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_sample_in_every_form(form: t.Callable[[str], str]) -> None:
    found = {}
    for name, text in SAMPLES:
        failures = find_failures(clean_lines(form(text)), stopped=True)
        if not failures or failures[0]["rule"] != name:
            found[text] = (name, [one["rule"] for one in failures])
    assert found == {}


def test_every_sample_from_the_journal_with_its_time() -> None:
    for name, text in SAMPLES:
        journal = before("1796064460.123456 spark-a vllm[4242]: ")(text)
        failures = find_failures(timed(journal, now=NOW), stopped=True)
        assert (failures[0]["rule"], failures[0]["time"]) == (name, 1796064460.123456), text


def test_every_rule_has_a_sample() -> None:
    rules = [*RULES, OOM_PROCESS]
    assert {rule.id for rule in rules} == {name for name, _text in SAMPLES}
    assert [name for name, count in Counter(rule.id for rule in rules).items() if count > 1] == []
    assert {rule.kind for rule in rules} <= set(KINDS)


def test_sentences_are_whole() -> None:
    for name, text in SAMPLES:
        first = find_failures(clean_lines(text), stopped=True)[0]
        assert not first["cause"].startswith(("kernel", "?", " ")), name
        assert not first["cause"].endswith((".", " ")), name
        assert not first["fix"].endswith("."), name
        assert first["source"], name
        assert "{" not in first["fix"] or "speculative_config" in first["fix"], name


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("line", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(line: str, stopped: bool) -> None:
    assert [one["rule"] for one in find_failures([line], stopped=stopped)] == []
    assert find_troubles([line]) == []


def test_node_lines_are_troubles() -> None:
    for name, text in NODE:
        if name in ("oom-process", "oom-unit"):
            continue
        [found] = find_troubles([f"Dec 01 11:02:09 spark-2 {text}"])
        assert found["rule"] == name, text


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("kernel: firefox[42]: segfault at 10 ip 00007f sp 00007f error 4 in libxul.so[7f00]", []),
        ("kernel: INFO: task kworker/3:1:77 blocked for more than 122 seconds.", []),
        ("kernel: Out of memory: Killed process 42 (firefox) total-vm:1kB", []),
        ("kernel: Out of memory: Killed process 42 (VLLM::Worker_TP) total-vm:1kB", ["oom-process"]),
    ],
)
def test_other_programs_are_no_trouble(line: str, rules: list[str]) -> None:
    assert [one["rule"] for one in find_troubles([line])] == rules


def test_one_kill_is_said_once() -> None:
    lines = [
        "kernel: oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        "task_memcg=/hy3.slice/hy3-ray.service,task=ray::RayWorkerP,pid=4242,uid=1000",
        "kernel: Out of memory: Killed process 4242 (ray::RayWorkerP) total-vm:1kB",
    ]
    assert [one["rule"] for one in find_troubles(lines)] == ["oom-node"]


# ---- Any text

WORDS = (
    [text for _name, text in SAMPLES]
    + list(NEAR_MISSES.values())
    + [
        "Traceback (most recent call last):",
        "During handling of the above exception, another exception occurred:",
        "Starting vLLM server on http://127.0.0.1:8000",
        "Loading drafter model...",
        "1796064460.123456 spark-1 vllm[4242]: x",
        "1796064460.1 \x00 kernel: y",
        "9999-99-99 99:99:99",
        "0000-01-01 00:00:00",
        "02-30 24:61:61",
        "[W519 18:16:21.56 x]",
    ]
)
fragments = st.one_of(st.sampled_from(WORDS), st.text(max_size=80))
texts = st.lists(
    st.tuples(st.sampled_from(["", *[form(" ") for form in FORMS.values()]]), fragments, st.integers(0, 400)),
    max_size=12,
).map(lambda parts: "\n".join((prefix + text)[: cut or None] for prefix, text, cut in parts))


@settings(deadline=None, max_examples=150)
@given(texts, st.booleans(), st.floats(0, 4e9))
def test_any_text_gives_an_answer(text: str, stopped: bool, now: float) -> None:
    lines = timed(text, now=now)
    failures = find_failures(lines, stopped=stopped)
    assert all(one["cause"] and one["kind"] in KINDS for one in failures)
    find_kills(lines)
    troubles = find_troubles(lines)
    facts = read_facts([line.text for line in last_start(lines)])
    find_remarks(merged(lines, timed(text, now=now, source=True)), facts, now=now, running=not stopped)
    message_of(text)
    own_time(text, now)
    status = {"failures": failures, "troubles": troubles, "units": {}, "memory": {"total": 1, "available": 1}}
    diagnosis = diagnose({"a": status, "b": {"unreachable": True, "msg": text}}, head="a", addresses={"b": "10.77.0.2"})
    assert diagnosis is not None
    assert diagnosis["text"]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(SAMPLES), st.integers(0, 400))
def test_a_log_may_end_within_a_line(sample: tuple[str, str], kept: int) -> None:
    find_failures(clean_lines(sample[1][:kept]), stopped=True)
