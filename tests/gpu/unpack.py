# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""On the machine with the GPU: makes of the pieces what our roles would find on a node. Standard library only.

    unpack.py DIRECTORY

The virtual environment lies where the inventory of two Sparks has it. Of the Python that runs this it takes PyTorch and
what else is not in the pieces.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

VENV = Path("/opt/hy3/venv")
PROGRAMS = {"vllm": "vllm.entrypoints.cli.main", "ray": "ray.scripts.scripts"}


def main() -> None:
    pieces = sorted(Path(sys.argv[1]).glob("piece.*"))
    if not pieces:
        raise SystemExit(f"{sys.argv[1]} has no piece.0: carry what pack.py wrote")
    if (VENV / "unpacked").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)], check=True)
    (site,) = VENV.glob("lib/python*/site-packages")
    with (
        subprocess.Popen(["cat", *pieces], stdout=subprocess.PIPE) as joined,
        tarfile.open(fileobj=joined.stdout, mode="r|xz") as archive,
    ):
        archive.extractall(site, filter="tar")
    outer = Path(sysconfig.get_path("purelib"))
    (site / "outer.pth").write_text(f"import site; site.addsitedir({str(outer)!r})\n")
    for name, module in PROGRAMS.items():
        program = VENV / "bin" / name
        # As pip writes them: processes that are spawned import the program again.
        guarded = 'if __name__ == "__main__":\n    sys.exit(main())\n'
        program.write_text(f"#!{VENV}/bin/python\nimport sys\nfrom {module} import main\n\n{guarded}")
        program.chmod(0o755)
    # Seconds on all cores now, instead of minutes on one in each first start.
    directories = [site, *(outer / name for name in ("torch", "transformers", "triton", "numpy"))]
    command = [str(VENV / "bin/python"), "-m", "compileall", "-q", "-j", "0", *map(str, directories)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    (VENV / "unpacked").touch()


if __name__ == "__main__":
    main()
