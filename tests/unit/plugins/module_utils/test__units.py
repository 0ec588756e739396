# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._units import (
    Processes,
    before_command,
    between_states,
    boot_time,
    innermost_unit,
    journal_commands,
    mask_argv,
    number,
    parse_show,
    refuse_secrets,
    remarks,
    start_facts,
    ticks_since_boot,
    unit_of_cgroup,
)

# systemd 252, a unit that waits for its restart and one that does not exist.
SHOWN = """\
MainPID=0
Result=exit-code
NRestarts=5
ExecMainStatus=3
MemoryCurrent=[not set]
MemoryMax=infinity
Id=hy3-serve.service
LoadState=loaded
ActiveState=activating
SubState=auto-restart
InactiveExitTimestamp=@1796064460
ActiveEnterTimestamp=@1796064460
InvocationID=396cb9fa04ff472caccb8b767f92df7c

MainPID=0
Result=success
NRestarts=0
ExecMainStatus=0
MemoryCurrent=[not set]
MemoryMax=infinity
Id=nope.service
LoadState=not-found
ActiveState=inactive
SubState=dead
InactiveExitTimestamp=
ActiveEnterTimestamp=
InvocationID=
"""


def test_parse_show() -> None:
    shown = parse_show(SHOWN, ["hy3-serve.service", "nope.service"])
    assert shown["hy3-serve.service"]["SubState"] == "auto-restart"
    assert shown["nope.service"]["LoadState"] == "not-found"


def test_an_alias_keeps_the_name_that_was_asked() -> None:
    assert list(parse_show("Id=real.service\n", ["alias.service"])) == ["alias.service"]


def test_a_missing_block_is_said() -> None:
    with pytest.raises(Hy3Error, match="for 2 units of the 3 asked"):
        parse_show(SHOWN, ["a", "b", "c"])


# What systemd 252 printed of a unit of ours: how it starts.
RUNNING = {"ActiveState": "active", "Result": "success", "NRestarts": "0", "UnitFileState": "enabled", "Job": ""}
RUNNING |= {"StartLimitBurst": "5", "StartLimitIntervalUSec": "4h", "StatusText": ""}
AGAIN = RUNNING | {"NRestarts": "2"}
OFTEN = RUNNING | {"ActiveState": "failed", "Result": "start-limit-hit", "NRestarts": "4"}
WAITING = RUNNING | {"ActiveState": "activating", "StatusText": "waits: Ray at h:1 does not list 10.77.0.2"}
LOG = "`journalctl -u hy3-serve.service`"
# Properties: what there is to say.
TEST_REMARKS: dict[str, tuple[dict[str, str], list[str]]] = {
    "runs": (RUNNING, []),
    "once": (
        RUNNING | {"NRestarts": "1"},
        [f"hy3-serve.service has ended by itself and was started again once; {LOG} says why."],
    ),
    "twice": (AGAIN, [f"hy3-serve.service has ended by itself and was started again 2 times; {LOG} says why."]),
    "too often": (
        OFTEN,
        [
            "hy3-serve.service stays down after 5 starts within 4h, as many as it may have, because every start that "
            f"fails may leave memory behind; read {LOG}, mend the cause and run serve_hy3, which starts it again."
        ],
    ),
    "waits": (WAITING, ["hy3-serve.service waits: Ray at h:1 does not list 10.77.0.2."]),
    "waits after a crash": (
        WAITING | {"NRestarts": "1"},
        [
            f"hy3-serve.service has ended by itself and was started again once; {LOG} says why.",
            "hy3-serve.service waits: Ray at h:1 does not list 10.77.0.2.",
        ],
    ),
    "was stopped while it waited": (WAITING | {"ActiveState": "inactive"}, []),
    "another status": (RUNNING | {"ActiveState": "activating", "StatusText": "Processing requests..."}, []),
    "is not there": ({"ActiveState": "inactive", "Result": "success", "NRestarts": "0"}, []),
}


@pytest.mark.parametrize(("shown", "expected"), TEST_REMARKS.values(), ids=TEST_REMARKS)
def test_remarks(shown: dict[str, str], expected: list[str]) -> None:
    assert remarks("hy3-serve.service", start_facts(shown)) == expected


def test_start_facts() -> None:
    facts = start_facts(RUNNING)
    assert (facts["enabled"], facts["start_limit"], facts["limit_reached"]) == (True, "5 starts within 4h", False)
    assert start_facts(RUNNING | {"UnitFileState": "static"})["enabled"] is False
    assert start_facts(RUNNING | {"StartLimitIntervalUSec": "0"})["start_limit"] is None
    assert start_facts(OFTEN)["limit_reached"]


@pytest.mark.parametrize(("job", "expected"), [("", False), ("0", False), ("4711", True)])
def test_between_states(job: str, expected: bool) -> None:
    assert between_states({"Job": job}) is expected
    assert between_states({}) is False


TEST_NUMBERS: list[tuple[str, int | None]] = [
    ("4242", 4242),
    ("@1796064460", 1796064460),
    ("0", 0),
    ("", None),
    ("infinity", None),
    ("[not set]", None),
    ("18446744073709551615", None),
]


@pytest.mark.parametrize(("text", "expected"), TEST_NUMBERS)
def test_number(text: str, expected: int | None) -> None:
    assert number(text) == expected


TEST_CGROUPS: list[tuple[str, str, bool]] = [
    ("v2", "0::/hy3.slice/hy3-serve.service\n", True),
    ("v2-delegated", "0::/hy3.slice/hy3-serve.service/worker\n", True),
    ("v1", "4:memory:/\n1:name=systemd:/hy3.slice/hy3-serve.service\n0::/\n", True),
    ("another-unit", "0::/hy3.slice/hy3-ray.service\n", False),
    ("name-contains-it", "0::/system.slice/not-hy3-serve.service\n", False),
    ("gone", "", False),
]


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in TEST_CGROUPS], ids=[row[0] for row in TEST_CGROUPS])
def test_unit_of_cgroup(text: str, expected: bool) -> None:
    assert unit_of_cgroup(text, "hy3-serve.service") is expected


TEST_INNERMOST: list[tuple[str, str, str]] = [
    ("v2", "0::/hy3.slice/hy3-ray.service\n", "hy3-ray.service"),
    ("v2-delegated", "0::/hy3.slice/hy3-serve.service/worker\n", "hy3-serve.service"),
    (
        "v1",
        "4:memory:/\n1:name=systemd:/machine.slice/node.service/payload/hy3.slice/hy3-ray.service\n0::/\n",
        "hy3-ray.service",
    ),
    ("session", "0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
    ("no unit", "0::/\n", ""),
    ("gone", "", ""),
]


@pytest.mark.parametrize(
    ("text", "expected"), [row[1:] for row in TEST_INNERMOST], ids=[row[0] for row in TEST_INNERMOST]
)
def test_innermost_unit(text: str, expected: str) -> None:
    assert innermost_unit(text) == expected


TEST_MASKED: list[tuple[list[str], list[str]]] = [
    (
        ["vllm", "--api-key", "a", "b", "--port", "8000"],
        ["vllm", "--api-key", "********", "********", "--port", "8000"],
    ),
    (["vllm", "--api-key=a"], ["vllm", "--api-key=********"]),
    (["vllm", "--tokenizer", "x", "--max-num-batched-tokens", "8"],) * 2,
    (["vllm", "--speculative-config", '{"a b": "c\'d"}', ""],) * 2,
]


@pytest.mark.parametrize(("argv", "expected"), TEST_MASKED)
def test_mask_argv(argv: list[str], expected: list[str]) -> None:
    assert mask_argv(argv) == expected


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "HF_TOKEN", "my_secret", "RAY_REDIS_PASSWORD"])
def test_secrets_are_refused(name: str) -> None:
    with pytest.raises(Hy3Error, match=f"{name} looks like a secret"):
        refuse_secrets(["NCCL_IB_HCA", name])


def test_ordinary_names_are_taken() -> None:
    refuse_secrets(["NCCL_IB_GID_INDEX", "VLLM_HOST_IP", "HY3_DIGEST"])


TEST_JOURNAL: list[tuple[int | None, list[list[str]]]] = [
    (None, [[]]),
    (9000, [[]]),
    (1000, [["--until=@4600"], ["--since=@4600", "--lines=2000"]]),
]


@pytest.mark.parametrize(("started", "windows"), TEST_JOURNAL)
def test_only_the_boot_and_the_newest_lines_are_read(started: int | None, windows: list[list[str]]) -> None:
    commands = journal_commands("abc", started=started, now=10000)
    assert [command[command.index("_SYSTEMD_INVOCATION_ID=abc") + 1 :] for command in commands] == windows


def test_what_was_said_before_a_start() -> None:
    command = before_command("hy3-serve.service", started=10_000)
    assert command[0] == "journalctl"
    assert {"_SYSTEMD_UNIT=hy3-serve.service", "--since=@6400", "--until=@10000"} <= set(command)


def process(proc: Path, pid: int, *, cgroup: str, cmdline: bytes, environ: bytes) -> None:
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "cgroup").write_text(cgroup)
    (directory / "cmdline").write_bytes(cmdline)
    (directory / "environ").write_bytes(environ)
    # Fields 3 to 22 after the name; the process started two seconds after the boot, for ticks of 10 ms.
    (directory / "stat").write_text(f"{pid} (a) b (c) S {' '.join(['0'] * 18)} 200 0\n")
    (directory / "limits").write_text("Limit  Soft  Hard  Units\nMax locked memory  8388608  unlimited  bytes\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    unit = "0::/hy3.slice/hy3-serve.service\n"
    process(tmp_path, 12, cgroup=unit, cmdline=b"VLLM::Worker_TP0\0\0\0", environ=b"\0\0\0\0TAIL=1\0")
    process(
        tmp_path,
        7,
        cgroup=unit,
        cmdline=b"vllm\0serve\0\0--speculative-config\0{\"a b\": 'c'}\0\xff\0",
        environ=b"NCCL_IB_HCA=rocep1s0f1\0EMPTY=\0HF_TOKEN=hush\0EQUALS=a=b\0",
    )
    process(tmp_path, 3, cgroup="0::/init.scope\n", cmdline=b"init\0", environ=b"")
    (tmp_path / "meminfo").write_text("")
    (tmp_path / "stat").write_text("cpu  1 2\nbtime 1796060000\nprocesses 9\n")
    return tmp_path


def test_processes_of_a_unit(proc: Path) -> None:
    found = Processes(str(proc)).of_unit("hy3-serve.service", ["NCCL_IB_HCA", "EMPTY", "EQUALS", "UNSET"])
    assert found == [
        {
            "pid": 7,
            "title": "vllm",
            "user": os.getuid(),
            "started": 1796060002.0,
            "environment": {"NCCL_IB_HCA": "rocep1s0f1", "EMPTY": "", "EQUALS": "a=b"},
        },
        {
            "pid": 12,
            "title": "VLLM::Worker_TP0",
            "user": os.getuid(),
            "started": 1796060002.0,
            "environment": None,
        },
    ]


def test_argv_is_kept_byte_for_byte(proc: Path) -> None:
    argv = Processes(str(proc)).argv(7)
    assert argv == ["vllm", "serve", "", "--speculative-config", "{\"a b\": 'c'}", "\udcff"]
    assert os.fsencode(argv[-1]) == b"\xff"


def test_a_process_that_has_ended(proc: Path) -> None:
    processes = Processes(str(proc))
    assert (processes.argv(99), processes.environment(99, ["A"]), processes.memlock(99)) == ([], None, None)
    assert processes.started(99) is None


TEST_TICKS: list[tuple[str, str, int | None]] = [
    ("plain", f"7 (raylet) S {'0 ' * 18}4242 9", 4242),
    ("name with spaces", f"7 (VLLM::Worker 0) S {'0 ' * 18}4242 9", 4242),
    ("name with parentheses", f"7 (a) S 1) R {'0 ' * 18}4242 9", 4242),
    ("ended", "", None),
    ("cut", "7 (raylet) S 1", None),
]


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in TEST_TICKS], ids=[row[0] for row in TEST_TICKS])
def test_ticks_since_boot(text: str, expected: int | None) -> None:
    assert ticks_since_boot(text) == expected


def test_boot_time() -> None:
    assert (boot_time("cpu 1\nbtime 1796060000\n"), boot_time("cpu 1\n")) == (1796060000, 0)


def test_memlock(proc: Path) -> None:
    assert Processes(str(proc)).memlock(7) == 8388608


def test_the_real_kernel() -> None:
    processes = Processes()
    environment = processes.environment(os.getpid(), ["PATH"])
    assert environment is not None
    assert set(environment) <= {"PATH"}
    assert processes.argv(os.getpid())


def test_a_real_process_started_now() -> None:
    before = time.time()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        started = Processes().started(sleeper.pid)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert started is not None
    # The boot is rounded down to a second, the start to a tick.
    assert before - 1.1 < started <= time.time()
