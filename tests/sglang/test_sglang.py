# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each patch of SGLang in the running SGLang 0.5.23: the fault without it, and the right answers with it.

The checkpoint is the lab's, with known answers, named as ModelOpt names what it exports from transformers (see
``checkpoint``). Operators for the CPU are stand-ins, see ``cpu``.
"""

from __future__ import annotations

import math
import shutil
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.filter.engine_argv import engine_argv
from ansible_collections.sparks.hy3.plugins.filter.serve_problems import RANK_TITLES
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines, read_facts
from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny
from ansible_collections.sparks.hy3.tests.sglang.checkpoint import write
from ansible_collections.sparks.hy3.tests.sglang.engine import (
    HERE,
    PYTHON,
    VENV,
    Server,
    copied,
    free_port,
    install,
    ranks,
    serving,
)
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from ansible_collections.sparks.hy3.tests.unit.roles.golden import Rendered
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT, render_units
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import read_environment
from ansible_collections.sparks.hy3.tests.wheels.released import RELEASES

QUESTION = "capital of France? one word"
PROMPT, COUNT = " w000", 40
NEXTN = "srt/models/hunyuan_v3_nextn.py"


@pytest.fixture(scope="module")
def original() -> Path:
    """The package as it was released."""
    return install()


@pytest.fixture
def package(original: Path) -> Iterator[Path]:
    with copied(original) as package:
        yield package


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint"))


def patch(package: Path, *patches: str) -> None:
    done = run_module("engine_patch", engine="sglang", package_path=str(package), patches=list(patches))
    assert {entry["state"] for entry in done["patches"]} == {"applied"}


def says_right(server: Server) -> bool:
    """The known answer and the known text, with a likelihood for each token."""
    text, logprobs = server.complete(PROMPT, COUNT)
    finite = all(logprob is not None and math.isfinite(logprob) for logprob in logprobs)
    assert server.chat(QUESTION) == "Paris."
    return finite and text == tiny.expected_text(COUNT, PROMPT)


def test_what_the_checkpoint_needs(package: Path, checkpoint: Path) -> None:
    done = run_module("engine_patch", engine="sglang", package_path=str(package), checkpoint=str(checkpoint))
    states = {(entry["id"], entry["file"].rpartition("/")[2], entry["state"]) for entry in done["patches"]}
    assert states == {
        ("P4", "hunyuan_v3.py", "applied"),
        ("P4", "hunyuan_v3_nextn.py", "applied"),
        ("P5", "hunyuan_v3_nextn.py", "applied"),
        ("P6", "hunyuan_v3_nextn.py", "upstream_fixed"),
        ("P8", "hunyuan_v3.py", "applied"),
    }
    with serving(package, checkpoint) as server:
        assert says_right(server)
        assert server.acceptance() > 0.9


def test_without_p4(package: Path, checkpoint: Path) -> None:
    """Every sign of health, and no answer."""
    patch(package, "P5", "P8")
    with serving(package, checkpoint) as server:
        assert server.get("/health") == ""
        assert server.chat(QUESTION) == ""
        text, logprobs = server.complete(PROMPT, COUNT)
        assert text == ""
        assert not any(logprobs), "NaN comes as null"


def test_without_p4_in_the_drafter(package: Path, checkpoint: Path, original: Path) -> None:
    patch(package, "P4", "P8")
    (package / NEXTN).unlink()
    shutil.copy(original / NEXTN, package / NEXTN)
    patch(package, "P5")
    with serving(package, checkpoint) as server:
        assert says_right(server)
        assert server.acceptance() < 0.1


def test_without_p5(package: Path, checkpoint: Path) -> None:
    patch(package, "P4", "P8")
    with serving(package, checkpoint) as server:
        log = server.log.read_text()
    assert "hunyuan_v3_nextn.py" in log
    assert "The size of tensor a (256) must match the size of tensor b (512)" in log
    assert "ready to roll" not in log


@pytest.mark.parametrize("repaired", [False, True], ids=["without", "with"])
def test_p6(package: Path, checkpoint: Path, repaired: bool) -> None:
    """SGLang 0.5.23 has the repair. The drafter's file of 0.5.15.post1, which has not, runs in it, too."""
    (older,) = (release for release in RELEASES if release.name == "sglang-0.5.15.post1")
    (package / NEXTN).unlink()
    (package / NEXTN).write_bytes(older.files()[f"sglang/{NEXTN}"])
    patch(package, "P4", "P5", "P8", *(["P6"] if repaired else []))
    with serving(package, checkpoint) as server:
        assert says_right(server)
        assert (server.acceptance() > 0.9) is repaired


def test_without_p8(package: Path, checkpoint: Path) -> None:
    patch(package, "P4", "P5")
    with serving(package, checkpoint) as server:
        log = server.log.read_text()
    assert "ready to roll" not in log
    assert "in load_merged_column_weight" in log


# ---- What role sglang_serve renders

PROFILE = yaml.safe_load((ROOT / "roles/profile/files/profiles/vroomfondel_w4a4_tp4.yml").read_text())
# What no CPU can do is left out or replaced, and a server this small needs little.
ON_A_CPU: dict[str, Any] = {
    "tensor-parallel-size": 2,
    "device": "cpu",
    "attention-backend": None,
    "prefill-attention-backend": "intel_amx",
    "decode-attention-backend": "intel_amx",
    "moe-runner-backend": "marlin",
    "kv-cache-dtype": None,
    "context-length": 512,
    "max-total-tokens": 4096,
    "mem-fraction-static": 0.3,
    "decode-log-interval": 4,
}


def asked(arguments: list[str]) -> dict[str, Any]:
    environment = {"PYTHONPATH": str(HERE / "cpu"), "SGLANG_USE_CPU_ENGINE": "1"}
    return run_module(
        "engine_options",
        engine="sglang",
        version="0.5.23",
        venv=str(VENV),
        environment=environment,
        arguments=arguments,
    )


def test_the_parser_takes_the_profile(original: Path) -> None:
    speculative = PROFILE["engine_args"] | PROFILE["speculative_args"] | {"speculative-adaptive": True}
    done = asked(engine_argv(speculative | {"nnodes": 4, "node-rank": 3, "dist-init-addr": "192.168.100.1:29501"}))
    assert (done["problems"], done["unknown"]) == ([], None)


def test_the_parser_refuses_the_cards_flags(original: Path) -> None:
    done = asked(["--cuda-graph-max-bs", "32", "--disable-piecewise-cuda-graph", "--trust-remote-code"])
    assert done["problems"] == [
        "hy3_engine_args or the profile has --cuda-graph-max-bs 32 --disable-piecewise-cuda-graph, and the parser of "
        "sglang 0.5.23 does not have them; write --cuda-graph-max-bs-decode 32 --disable-prefill-cuda-graph instead "
        "(null in hy3_engine_args takes an option of the profile out)."
    ]


def units(home: Path, checkpoint: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Argument list and environment of each rank of two, as the role gives them to systemd, speculation on."""
    done = render_units(
        home,
        {f"spark-{n}": {"fabric_env": {}} for n in (1, 2)},
        hy3_profile="vroomfondel_w4a4_tp4",
        hy3_speculative=True,
        hy3_engine_args=ON_A_CPU,
        hy3_checkpoint_dir=str(checkpoint),
        hy3_venv=str(PYTHON.parents[1]),
        hy3_api_port=free_port(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = Rendered(home)
    found = []
    for number in (1, 2):
        argv = rendered.argv(f"spark-{number}", "hy3-serve.service")
        environment = read_environment(rendered.unit(f"spark-{number}", "hy3-serve.service")["Service.Environment"])
        # Both ranks are on this machine, where the addresses of two nodes do not exist.
        argv = [word.replace("192.168.100.1", "127.0.0.1") for word in argv]
        found.append((argv, environment | {"SGLANG_HOST_IP": "127.0.0.1"}))
    port = found[1][0].index("--port") + 1
    found[1][0][port] = str(free_port())
    return found


def titles(group: int) -> list[str]:
    """First arguments of the processes of a session."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
            title = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:  # gone meanwhile
            continue
        if session == group:
            found.append(title)
    return found


def test_two_ranks_as_the_role_starts_them(package: Path, checkpoint: Path, tmp_path: Path) -> None:
    patch(package, "P4", "P5", "P8")
    with ranks(package, units(tmp_path, checkpoint)) as running:
        (first, head), (second, worker) = running
        assert says_right(first)
        assert first.acceptance() > 0.9

        # What the roles take for a rank is one in each unit, and rank 1's health says nothing.
        for process in (head, worker):
            assert len([title for title in titles(process.pid) if title.startswith(RANK_TITLES)]) == 1
        assert second.get("/health") == ""
        with pytest.raises(urllib.error.HTTPError, match="404"):
            second.get("/v1/models")

        facts = read_facts(clean_lines(first.log.read_text()))
        assert facts["phase"] == "ready"
        assert facts["config"] == {
            "quantization": "modelopt_fp4",
            "moe_backend": "marlin",
            "kv_cache_dtype": "auto",
            "max_seq_len": 512,
            "tensor_parallel_size": 2,
            "enforce_eager": None,
            "speculative_method": "EAGLE",
            "speculative_tokens": 2,
        }

        # Rank 0 first, as stop_hy3 does; the other ends by itself.
        head.terminate()
        head.wait(60)
        worker.wait(60)
