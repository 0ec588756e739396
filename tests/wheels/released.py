# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engines' files as they were released. Of a wheel only those that the catalogue names are kept, in a cache.

The first run fetches about 3.5 GB in whole wheels, one after the other, and keeps about 2 MB.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.module_utils._patch import CATALOGUE

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparks-hy3" / "wheels"

# The wheels are only read, so the same ones are taken whatever this machine and its Python are.
WHEELS_FOR = ("--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3")
PLATFORMS = tuple(f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 34, 35))


@dataclass(frozen=True)
class Release:
    """One wheel for x86_64, and the state of each patch in it; every other state of its engine is ``defect``."""

    engine: str
    version: str
    sha256: str
    fixed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people and for directories."""
        return f"{self.engine}-{self.version}"

    def state(self, patch: str) -> str:
        """The expected state of ``patch``."""
        return "upstream_fixed" if patch in self.fixed else "defect"

    def files(self) -> dict[str, bytes]:
        """Path to content, of the files that the catalogue names."""
        directory = CACHE / self.name
        if not (directory / "sha256").is_file():
            self._fetch(directory)
        assert (directory / "sha256").read_text().split()[0] == self.sha256, f"another wheel: {directory}"
        return {file: (directory / file).read_bytes() for file in self._wanted()}

    def _wanted(self) -> list[str]:
        patches = [patch for twins in CATALOGUE.values() for patch in twins]
        return sorted({patch.file for patch in patches if patch.engine == self.engine})

    def _fetch(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
            command += ["--only-binary=:all:", *WHEELS_FOR, *PLATFORMS, f"--dest={place}"]
            subprocess.run([*command, f"{self.engine}=={self.version}"], check=True)
            (wheel,) = Path(place).glob("*.whl")
            with wheel.open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").hexdigest()
            with zipfile.ZipFile(wheel) as archive:
                for file in self._wanted():
                    archive.extract(file, directory)
        # Last, so that a killed run fetches again.
        (directory / "sha256").write_text(f"{digest}\n")


RELEASES = (
    Release("vllm", "0.20.0", "24d28892e210200f6e1bd13f699c42a74cd2bb7364c11248e2348f677c7f6dfb"),
    Release("vllm", "0.22.1", "cc50536c93827a577b2bc45f038b8b866c31ed220631008521a337c9b2558f4d"),
    Release("vllm", "0.23.0", "872aeb7c36a1ea942216af067ce870ffdf960804e829367e1b4eb36d4831c03c"),
    Release("vllm", "0.24.0", "2d2831aeba311292250df0132dbc4d8e9f42c654536eaec48e6fe58acb1822cf"),
    Release("vllm", "0.25.1", "16fc7a28df1576eb6f7ca0455026551b8f9adb674c19c66059359ef3e964bd1e", ("P2",)),
    Release("vllm", "0.26.0", "adb1e4c9b46d0dfdb094121ae5aad670a42412dd813ed4e5db069ed6a15006de", ("P2",)),
    Release("vllm", "0.28.0", "addb0ffdaafd8155d75e9b3f5ddb3da28fdee9e8a7097ede91f7db2e9e1a3889", ("P2",)),
    Release("vllm", "0.29.0", "09d48617fc2be9c6cdcd5db480651ab0d84817b257204f2cc2e3ecbb70bbb635", ("P2", "P7")),
    Release("vllm", "0.31.0", "39132b433967f0962d03d8a5f633b9bee6b32708f566c7d5637b79f8d0ef3433", ("P2", "P7")),
    Release("vllm", "0.33.0", "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa", ("P2", "P7")),
    Release("sglang", "0.5.11", "0cdf73e8d463df53010c33017c7baa68ce5f2d0bf7d015923d6b37b809ca7c50"),
    Release("sglang", "0.5.14", "4573aac774045ba926bab2f7efaaad7b120e4f84695ccf27c59d276f856deca8"),
    Release("sglang", "0.5.15.post1", "d1cf208d6ed6bd1d66e6c284635cb671519855dcdfe119e3c4011b6797c90679"),
    Release("sglang", "0.5.16", "b8ed16e72c7d6a643e31ba52e3ff106439e9dbb78543950e4c810158b826ea8e", ("P6",)),
    Release("sglang", "0.5.20", "ffaced7e91c3536c63077b16b08210b5c1a2f362418e9841a8767d5e019cf08a", ("P6",)),
    Release("sglang", "0.5.23", "8d257a319395b322bb1be327d05e5528859358153c8563b04c0a4a3c8af164b6", ("P6",)),
)
