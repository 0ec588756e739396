# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._engine_processes import (
    EngineProcesses,
    arguments_of,
    changes_in,
    kind_of,
    log_files,
    read_log,
    shown_environment,
    venv_of,
    without_secrets,
)
from ansible_collections.sparks.hy3.plugins.module_utils._units import MASK, mask_argv
from hypothesis import given, settings
from hypothesis import strategies as st

Kind = t.Optional[tuple[str, str]]  # noqa: UP045  # evaluated, and pylint judges it by Python 3.9

KINDS: list[tuple[str, str, Kind]] = [
    ("console script", "/v/bin/python /v/bin/vllm serve /m --moe-backend marlin", ("driver", "vllm")),
    ("isolated interpreter", "/v/bin/python3.12 -I -X dev /v/bin/vllm serve /m", ("driver", "vllm")),
    ("module", "python3 -m vllm.entrypoints.openai.api_server --model /m", ("driver", "vllm")),
    (
        "SGLang as its card starts it",
        "python3 -m sglang.launch_server --model-path m --tp-size 4",
        ("driver", "sglang"),
    ),
    ("SGLang's command", "/v/bin/python /v/bin/sglang serve --model-path m", ("driver", "sglang")),
    ("ray start --block", "/v/bin/python /v/bin/ray start --head --block", ("ray_start", "ray")),
    (
        "raylet",
        "/v/lib/python3.12/site-packages/ray/core/src/ray/raylet/raylet --node_ip_address=1.2.3.4",
        ("raylet", "ray"),
    ),
    ("GCS", "/v/lib/python3.12/site-packages/ray/core/src/ray/gcs/gcs_server --log_dir=/l", ("gcs", "ray")),
    ("a worker that renamed itself", "VLLM::Worker_TP0", ("worker", "vllm")),
    ("Ray's worker", "ray::RayWorkerProc.run", ("worker", "vllm")),
    ("engine core", "VLLM::EngineCore", ("engine_core", "vllm")),
    ("SGLang's scheduler", "sglang::scheduler_TP0", ("worker", "sglang")),
    ("ssh that carries it", "ssh node vllm serve /m", None),
    ("sudo", "sudo /v/bin/vllm serve /m", None),
    ("another command of vLLM", "/v/bin/python /v/bin/vllm bench serve", None),
    ("an editor", "vim vllm", None),
    ("nothing", "", None),
]


@pytest.mark.parametrize(("line", "kind"), [row[1:] for row in KINDS], ids=[row[0] for row in KINDS])
def test_kind(line: str, kind: Kind) -> None:
    assert kind_of(line.split()) == kind


def test_a_shell_that_carries_the_command_is_none() -> None:
    assert kind_of(["bash", "-lc", "env X=1 /v/bin/vllm serve /m"]) is None


ARGUMENTS: list[tuple[str, list[str], dict[str, t.Any]]] = [
    (
        "seed 000",
        [
            "/v/bin/vllm",
            "serve",
            "/m",
            "--trust-remote-code",
            "--tensor-parallel-size",
            "2",
            "--enforce-eager",
            "--port",
            "8000",
        ],
        {"model": "/m", "trust-remote-code": True, "tensor-parallel-size": "2", "enforce-eager": True, "port": "8000"},
    ),
    ("underscores and equals", ["vllm", "serve", "--moe_backend=marlin"], {"moe-backend": "marlin"}),
    ("a switch before the model", ["vllm", "serve", "--enforce-eager", "/m"], {"enforce-eager": True, "model": "/m"}),
    (
        "a switch turned off",
        ["vllm", "serve", "/m", "--no-enforce-eager"],
        {"model": "/m", "no-enforce-eager": True, "enforce-eager": False},
    ),
    (
        "JSON",
        ["vllm", "serve", "/m", "--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'],
        {"model": "/m", "speculative-config": {"method": "mtp", "num_speculative_tokens": 1}},
    ),
    (
        "keys of JSON",
        ["vllm", "serve", "/m", "--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens=2"],
        {"model": "/m", "speculative-config": {"method": "mtp", "num_speculative_tokens": 2}},
    ),
    (
        "short names",
        ["vllm", "serve", "/m", "-tp", "2", "-pp=1"],
        {"model": "/m", "tensor-parallel-size": "2", "pipeline-parallel-size": "1"},
    ),
    (
        "SGLang",
        ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--tp", "4", "--disable-piecewise-cuda-graph"],
        {"model": "m", "tensor-parallel-size": "4", "disable-piecewise-cuda-graph": True},
    ),
    ("ray", ["/v/bin/ray", "start", "--address=10.0.0.1:6379", "--block"], {"address": "10.0.0.1:6379", "block": True}),
    (
        "raylet",
        ["/x/raylet", "--node_ip_address=10.0.0.2", "--maximum=-1"],
        {"node-ip-address": "10.0.0.2", "maximum": "-1"},
    ),
    ("a negative number", ["vllm", "serve", "--seed", "-1"], {"seed": "-1"}),
]


@pytest.mark.parametrize(("argv", "expected"), [row[1:] for row in ARGUMENTS], ids=[row[0] for row in ARGUMENTS])
def test_arguments(argv: list[str], expected: dict[str, t.Any]) -> None:
    assert arguments_of(argv) == expected


@pytest.mark.parametrize(
    ("line", "venv"),
    [
        ("/opt/v/bin/python /opt/v/bin/vllm serve", "/opt/v"),
        ("python3 -m vllm.entrypoints.openai.api_server", None),
        ("/opt/v/lib/python3.12/site-packages/ray/core/src/ray/raylet/raylet", "/opt/v"),
        ("/usr/local/lib/python3.12/dist-packages/ray/core/src/ray/gcs/gcs_server --x", "/usr/local"),
        ("/usr/bin/python3 /usr/local/bin/vllm serve /m", "/usr/local"),
        ("/opt/v/bin/python -m sglang.launch_server", "/opt/v"),
        ("/x/site-packages", None),
    ],
)
def test_venv(line: str, venv: str | None) -> None:
    assert venv_of(line.split()) == venv


# (what, argument list): the word hush must not show.
SECRETS: list[tuple[str, list[str]]] = [
    ("vLLM's key", ["--api-key", "hush"]),
    ("several keys", ["--api-key", "a", "hush"]),
    ("with an underscore", ["--api_key=hush"]),
    ("abbreviated", ["--api-k", "hush"]),
    ("SGLang's admin key", ["--admin-api-key=hush"]),
    ("Ray's password", ["--redis-password=hush"]),
    ("a password of a key file", ["--ssl-keyfile-password", "hush"]),
    ("a token", ["--hf_token", "hush"]),
    ("Ray's command for its workers", ["--python_worker_command=/v/bin/python w.py --redis-password=hush --x=1"]),
    ("a URL", ["--otlp-traces-endpoint", "http://me:hush@host:4317"]),
    ("an assignment", ["VLLM_API_KEY=hush"]),
]


@pytest.mark.parametrize("argv", [row[1] for row in SECRETS], ids=[row[0] for row in SECRETS])
def test_secrets_do_not_show(argv: list[str]) -> None:
    shown = [without_secrets(word) for word in mask_argv(argv)]
    assert "hush" not in " ".join(shown)
    assert MASK in " ".join(shown)


@pytest.mark.parametrize("flag", ["--tokenizer", "--max-tokens", "--tokenizer-mode", "--kv-cache-dtype"])
def test_what_is_no_secret_shows(flag: str) -> None:
    assert mask_argv([flag, "x"]) == [flag, "x"]


def test_environment() -> None:
    assert shown_environment(
        {
            "NCCL_IB_GID_INDEX": "3",
            "VLLM_API_KEY": "hush",
            "HF_TOKEN": "hush",
            "EDITOR": "vi",
            "HF_ENDPOINT": "http://u:hush@h",
        }
    ) == {
        "HF_ENDPOINT": f"http://{MASK}@h",
        "HF_TOKEN": MASK,
        "NCCL_IB_GID_INDEX": "3",
        "VLLM_API_KEY": MASK,
    }


def test_changes() -> None:
    line = "WARNING [system_utils.py:35] Overwriting environment variable %s from '%s' to '%s'"
    log = "\n".join([line % ("NCCL_IB_GID_INDEX", "6", "3")] * 2 + [line % ("HF_TOKEN", "hush", "hush")])
    assert changes_in(log, "worker-1.out") == [
        {"variable": "NCCL_IB_GID_INDEX", "before": "6", "after": "3", "log": "worker-1.out"},
        {"variable": "HF_TOKEN", "before": MASK, "after": MASK, "log": "worker-1.out"},
    ]


def test_log_files(tmp_path: Path) -> None:
    for number, name in enumerate(["worker-1.out", "worker-2.err", "raylet.out"]):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (number, number))
    assert [path.name for path in log_files(tmp_path)] == ["worker-2.err", "worker-1.out"]
    assert log_files(tmp_path / "worker-1.out") == [tmp_path / "worker-1.out"]
    assert log_files(tmp_path / "none") == []
    assert read_log(tmp_path / "none") == ""


def test_a_real_process_is_found(tmp_path: Path) -> None:
    program = tmp_path / "bin/vllm"
    program.parent.mkdir()
    program.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    log = tmp_path / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(program), "serve", "/models/Hy3", "--api-key", "hush", "--port", "8123"],
            stdout=out,
            env={"NCCL_IB_GID_INDEX": "3", "VLLM_API_KEY": "hush"},
        )
    try:
        deadline = time.monotonic() + 20
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        [found] = [one for one in EngineProcesses().find() if one["pid"] == process.pid]
    finally:
        process.kill()
        process.wait()
    assert "hush" not in repr(found)
    assert (found["kind"], found["engine"], found["user"], found["root"]) == ("driver", "vllm", os.getuid(), "")
    assert found["arguments"] == {"model": "/models/Hy3", "api-key": MASK, "port": "8123"}
    assert found["environment"] == {"NCCL_IB_GID_INDEX": "3", "VLLM_API_KEY": MASK}
    assert found["log"] == str(log)


WORDS = st.lists(
    st.text(max_size=12) | st.sampled_from(["vllm", "serve", "-m", "--a", "--a.b", "--no-", "-tp", "--x=", "python"]),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(argv=WORDS)
def test_any_command_line_is_read_without_a_traceback(argv: list[str]) -> None:
    kind_of(argv)
    arguments_of(argv)
    venv_of(argv)
    [without_secrets(word) for word in mask_argv(argv)]
