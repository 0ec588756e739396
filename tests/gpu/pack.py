# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packs what a machine with one NVIDIA GPU and no registry needs to run this directory: the engine, and what to run.

The wheels are fetched once (450 MB) into a cache outside the repository, and the pieces are written there. PyTorch does
not travel: the machine must have it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ansible_collections.sparks.hy3.tests.gpu import fatbin

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparks-hy3" / "gpu"
# Python and C libraries of the machine, not of this one.
WHEELS_FOR = (
    *("--only-binary=:all:", "--no-deps", "--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3"),
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17, 5)),
    *("--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"),
)
# Without their CUDA code, the first three are what this engine runs for this checkpoint.
BLANKED = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C")
# Large, and asked for by nothing that runs here.
LEFT_OUT = (
    *("vllm/vllm-rs", "vllm/third_party/fmha_sm100", "vllm/third_party/deep_gemm"),
    *("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "ray/jars", "ray/rllib", "ray/dashboard/client", "ray/cpp"),
    *("xgrammar/lib", "pycountry/locales", "ansible_test", "bin"),
)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def unpack(architecture: int) -> Path:
    """The directory of all packages, with code for one architecture."""
    wheels, site = CACHE / "wheels", CACHE / "site"
    done = wheels / "complete"
    if not done.is_file() or done.read_text() != REQUIREMENTS.read_text():
        shutil.rmtree(wheels, ignore_errors=True)
        pip("download", "--no-cache-dir", *WHEELS_FOR, f"--dest={wheels}", f"--requirement={REQUIREMENTS}")
        done.write_text(REQUIREMENTS.read_text())
    shutil.rmtree(site, ignore_errors=True)
    pip(
        *("install", "--no-index", "--no-compile", *WHEELS_FOR, f"--target={site}"),
        *(str(wheel) for wheel in sorted(wheels.glob("*.whl"))),
    )
    for name in LEFT_OUT:
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name in BLANKED:
        library = site / f"vllm/{name}.abi3.so"
        print(f"{name}: {library.stat().st_size} bytes, {fatbin.blank(library, library, architecture)} of them blanked")
    programs = [path for path in site.rglob("*") if path.suffix == ".so" or path.name in ("raylet", "gcs_server")]
    for path in programs:
        if not any(path.match(f"*{name}.abi3.so") for name in BLANKED):
            subprocess.run(["strip", "--strip-debug", str(path)], check=False, stderr=subprocess.DEVNULL)
    return site


def pack(site: Path, piece_bytes: int) -> list[Path]:
    """The pieces of one compressed archive."""
    out = CACHE / "pieces"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tar = f"tar -C {site} --owner=0 --group=0 --sort=name -cf - ."
    command = f"{tar} | xz -T1 -6 | split -b {piece_bytes} -d -a 1 - {out}/piece."
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)
    return sorted(out.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack the engine for a machine with one NVIDIA GPU.")
    parser.add_argument("--sm", type=int, default=90, help="architecture of that GPU, as 90 for an H200 (default: 90)")
    parser.add_argument("--piece-bytes", type=int, default=60_000_000, help="largest size of a piece (default: 60 MB)")
    options = parser.parse_args()
    for piece in pack(unpack(options.sm), options.piece_bytes):
        print(piece, piece.stat().st_size)


if __name__ == "__main__":
    main()
