# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._node_facts import (
    CARRY_OVER,
    Node,
    capability_of,
    cuda_of_driver,
    driver_of,
    machine_of_wheel,
    names_withheld,
    read_venv,
    removes_ipc,
    torch_cuda_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs)\nGCC version: 13"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024"
SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
"""


@pytest.mark.parametrize(("text", "driver"), [(OPEN, "580.95.05"), (CLOSED, "535.183.01"), ("", ""), ("NVRM", "")])
def test_driver(text: str, driver: str) -> None:
    assert driver_of(text) == driver


# (head of nvidia-smi, driver, CUDA release)
CUDA: list[tuple[str | None, str, str | None]] = [
    (SMI, "580.95.05", "13.0"),
    ("| NVIDIA-SMI 595.10   KMD Version: 595.10     CUDA UMD Version: 13.2 |", "595.10", "13.2"),
    (None, "580.95.05", "13.0"),
    ("NVIDIA-SMI has failed because it couldn't communicate", "575.51.03", "12.9"),
    (None, "999.1", None),
]


@pytest.mark.parametrize(("summary", "driver", "cuda"), CUDA)
def test_cuda_of_driver(summary: str | None, driver: str, cuda: str | None) -> None:
    assert cuda_of_driver(summary, driver) == cuda


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("NVIDIA GB10, 12.1\n", [12, 1]),
        ("NVIDIA H200, 9.0\nNVIDIA H200, 9.0", [9, 0]),
        ("GB10, [N/A]", None),
        (None, None),
    ],
)
def test_capability(text: str | None, capability: list[int] | None) -> None:
    assert capability_of(text) == capability


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'\nhip = None", "13.0"),
        ('cuda = "12.9"', "12.9"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ""),
        ("", None),
    ],
)
def test_torch_cuda(text: str, cuda: str | None) -> None:
    assert torch_cuda_of(text) == cuda


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_aarch64\n", "aarch64"),
        ("Tag: py3-none-any\n", "any"),
        ("Tag: cp312-cp312-manylinux_2_17_x86_64\nTag: cp312-cp312-manylinux2014_x86_64\n", "x86_64"),
        ("Tag: cp312-cp312-linux_riscv64\n", None),
        ("", None),
    ],
)
def test_wheel(text: str, machine: str | None) -> None:
    assert machine_of_wheel(text) == machine


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        ([], True),
        (["[Login]\n#RemoveIPC=no\n"], True),
        (["[Login]\nRemoveIPC=no\n"], False),
        (["RemoveIPC=no", "RemoveIPC = yes"], True),
        (["RemoveIPC=no", "RemoveIPC="], True),
        (["RemoveIPC=perhaps"], None),
    ],
)
def test_removes_ipc(files: list[str], removes: bool | None) -> None:
    assert removes_ipc(files) is removes


@pytest.mark.parametrize(("text", "names"), [('["A", "B"]', ["A", "B"]), ('{"A": 1}', None), ("[", None), ("", None)])
def test_names_withheld(text: str, names: list[str] | None) -> None:
    assert names_withheld(text) == names


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_venv(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    write(site / "vllm-0.24.0.dist-info/WHEEL", "Tag: cp38-abi3-manylinux_2_28_aarch64")
    write(site / "nvidia_cutlass_dsl-4.5.2.dist-info/WHEEL")
    write(site / "nvidia_cuda_nvcc_cu12-12.8.93.dist-info/WHEEL")
    write(site / "requests-2.0.dist-info/WHEEL")
    write(site / "torch/version.py", "cuda: Optional[str] = '13.0'")
    assert read_venv(tmp_path, "vllm") == {
        "packages": {"vllm": "0.24.0", "nvidia-cutlass-dsl": "4.5.2", "nvidia-cuda-nvcc-cu12": "12.8.93"},
        "version": "0.24.0",
        "torch_cuda": "13.0",
        "wheel": "aarch64",
        "toolkits": {"nvidia-cuda-nvcc-cu12": "12.8.93", "torch": "13.0"},
    }


def test_a_container(tmp_path: Path) -> None:
    write(tmp_path / "lib/python3.12/dist-packages/vllm-0.24.0.dist-info/WHEEL")
    assert read_venv(tmp_path, "vllm")["version"] == "0.24.0"


def test_no_venv(tmp_path: Path) -> None:
    assert set(read_venv(tmp_path, "vllm").values()) == {None}


def answers(**printed: str) -> t.Callable[[list[str]], str | None]:
    def run(command: list[str]) -> str | None:
        asked = "smi" if len(command) == 1 else command[0].replace("-", "_")
        return printed.get(asked)

    return run


def test_a_spark(tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/version", OPEN)
    write(tmp_path / "proc/meminfo", "MemTotal: 1 kB\nCmaTotal:       0 kB\nCmaFree:  9742336 kB\n")
    write(tmp_path / "usr/lib/systemd/logind.conf", "RemoveIPC=no")
    write(tmp_path / "usr/lib/systemd/logind.conf.d/50-a.conf", "RemoveIPC=no")
    write(tmp_path / "etc/systemd/logind.conf.d/50-a.conf", "RemoveIPC=yes")
    write(tmp_path / "var/lib/systemd/linger/hy3")
    write(tmp_path / "usr/local/cuda/version.json", '{"cuda" : {"name" : "CUDA SDK", "version" : "13.0.2"}}')
    write(tmp_path / f"srv/hy3/.config/vllm/{CARRY_OVER}", '["HF_TOKEN"]')
    node = Node(answers(nvidia_smi="NVIDIA GB10, 12.1\n", smi=SMI, systemctl="active\ninactive\n"), root=str(tmp_path))
    facts = node.facts(user="hy3", uid=1001, home="/srv/hy3", environment={})
    assert (
        facts.items()
        >= {
            "driver": "580.95.05",
            "driver_cuda": "13.0",
            "capability": [12, 1],
            "gpus": 1,
            "remove_ipc": True,
            "linger": True,
            "guards": ["earlyoom"],
            "cma_total": 0,
            "cma_free": 9742336 * 1024,
            "carry_over": {"path": f"/srv/hy3/.config/vllm/{CARRY_OVER}", "exists": True, "names": ["HF_TOKEN"]},
        }.items()
    )
    assert node.toolkits({}) == {"/usr/local/cuda": "13.0"}
    assert node.toolkits({"CUDA_HOME": "/opt/cuda"}) == {}


@pytest.mark.parametrize(
    ("place", "venv", "run"),
    [
        (None, "/opt/venv", False),
        ("", "/opt/venv", False),
        ("/usr/local/cuda/bin/ptxas", None, True),
        ("/usr/local/cuda/bin", "/opt/venv", False),
        ("/usr/local/cuda/bin/text", "/opt/venv", False),
        ("/gone/ptxas", "/opt/venv", False),
        ("/gone/ptxas", "/proc/7/root" + "/opt/venv", True),
        ("\0", "/opt/venv", False),
    ],
)
def test_ptxas(tmp_path: Path, place: str | None, venv: str | None, run: bool) -> None:
    write(tmp_path / "usr/local/cuda/bin/ptxas")
    (tmp_path / "usr/local/cuda/bin/ptxas").chmod(0o755)
    write(tmp_path / "usr/local/cuda/bin/text")
    (tmp_path / "usr/local/cuda/bin/text").chmod(0o644)
    node = Node(answers(), root=str(tmp_path))
    assert node.ptxas(place, venv) == {"path": place or "", "run": run}


def test_a_host_with_two_gpus(tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/version", OPEN)
    run = answers(nvidia_smi="NVIDIA H200, 9.0\nNVIDIA H200, 9.0\n", smi=SMI)
    assert Node(run, root=str(tmp_path)).gpu()["gpus"] == 2
    assert Node(answers(), root=str(tmp_path)).gpu()["gpus"] is None


def test_a_bare_machine(tmp_path: Path) -> None:
    facts = Node(answers(), root=str(tmp_path)).facts(user=None, uid=None, home="/nonexistent", environment={})
    assert (facts["driver"], facts["capability"], facts["gpus"]) == ("", [], 0)
    assert (facts["linger"], facts["guards"]) == (None, None)
    assert (facts["remove_ipc"], facts["cma_free"], facts["carry_over"]["exists"]) == (None, None, False)


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"VLLM_CONFIG_ROOT": "/etc/hy3/vllm"}, f"/etc/hy3/vllm/{CARRY_OVER}"),
        ({"VLLM_CONFIG_ROOT": "~/c"}, f"/h/c/{CARRY_OVER}"),
        ({"XDG_CONFIG_HOME": "/x"}, f"/x/vllm/{CARRY_OVER}"),
    ],
)
def test_where_vllm_looks(tmp_path: Path, environment: dict[str, str], path: str) -> None:
    assert Node(answers(), root=str(tmp_path)).carry_over(environment, "/h")["path"] == path


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80) | st.text(alphabet="NVRM version:CUDA 0123456789.,\n='\"{}[]", max_size=80))
def test_any_text_is_read_without_a_traceback(text: str) -> None:
    driver_of(text)
    cuda_of_driver(text, text)
    capability_of(text)
    torch_cuda_of(text)
    machine_of_wheel(text)
    removes_ipc([text])
    names_withheld(text)
