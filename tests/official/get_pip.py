# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ansible-test calls get_pip_VERSION.py and downloads, from the interpreter's own ensurepip and pip's index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    pip = Path(__file__).stem.removeprefix("get_").replace("_", "==", 1).replace("_", ".")
    # ansible-test's marker would run this file again.
    environment = {name: value for name, value in os.environ.items() if name != "GET_PIP"}
    for arguments in (["ensurepip"], ["pip", "install", "--quiet", pip]):
        command = [sys.executable, "-m", *arguments]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
