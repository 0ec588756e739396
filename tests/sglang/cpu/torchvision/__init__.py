# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real torchvision, after two of its operators are declared that its CUDA library cannot bring on a CPU.

SGLang imports it when it starts; a model of text calls neither operator.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

here = Path(__file__).parents[1]
spec = PathFinder.find_spec("torchvision", [path for path in sys.path if Path(path) != here])
assert spec is not None
assert spec.loader is not None
real = importlib.util.module_from_spec(spec)
# An import returns what stands here in the end.
sys.modules["torchvision"] = real
spec.loader.exec_module(real)
