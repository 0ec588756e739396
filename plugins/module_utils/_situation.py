# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""What a rule is, and the facts that its condition asks for. A fact that is missing or odd is unknown, never false."""

from __future__ import annotations

import json
import re
import typing as t
from dataclasses import dataclass

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)

# What the routed experts are stored in: "w4a16" is NVFP4 without activation scales, "fp8" may be block-wise.
FP4 = frozenset({"nvfp4", "w4a16"})
# Compute capability of GB10, https://developer.nvidia.com/cuda-gpus
GB10 = (12, 1)
# Values of load-format that read several shards at once through host buffers. vLLM and SGLang.
PARALLEL_FORMATS = frozenset({"fastsafetensors", "runai_streamer", "runai_streamer_sharded", "instanttensor"})


class Unknown(Exception):
    """A fact that a condition needs is not known; the text names it."""


@dataclass(frozen=True)
class Rule:
    """A setting that is known to be bad.

    The scope is data: ``engine``, ``since`` (that release and newer), ``until`` (older than that release) and
    ``schemes`` of the checkpoint's experts; empty means any. ``found`` is the condition: the value found, as the
    beginning of a sentence, or None. ``about`` says the condition in words, ``what`` what happens, ``fix`` the way out.
    """

    id: str
    severity: str
    found: t.Callable[[Situation], str | None]
    about: str
    what: str
    fix: str
    source: str
    engine: str = ""
    since: str = ""
    until: str = ""
    schemes: frozenset[str] = frozenset()


def release_of(version: object) -> tuple[int, ...]:
    """The numbers of a release (``0.24.0``, ``0.32.0+cpu``, ``0.5.15.post1``, ``580.95.05``). Raises Unknown."""
    match = re.match(r"v?(\d{1,9}(?:\.\d{1,9})*)", version) if isinstance(version, str) else None
    if not match:
        raise Unknown("a version that can be read" if version else "the version")
    return tuple(int(part) for part in match[1].split("."))


def as_mapping(value: object) -> dict[str, t.Any] | None:
    """A dictionary, given as one or as JSON text, or None."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return {str(name): one for name, one in value.items()} if isinstance(value, t.Mapping) else None


class Situation:
    """Typed access to the facts of one node and what it is to serve. What is not known raises :class:`Unknown`.

    Keys of the facts, each of which may be None: ``engine``, ``version``, ``packages`` (distribution: version, as of
    the venv), ``toolkits`` (where: CUDA release), ``torch_cuda`` (release, empty for none), ``wheel`` (machine of the
    engine's wheel), ``arguments`` (names with dashes and without leading ones), ``environment`` and
    ``ray_environment`` (of the driver and of the raylet), ``ray_arguments``, ``nodes`` (count), ``patches`` (ids),
    ``checkpoint`` (see ``_rule_facts.read_checkpoint``), ``node`` (see ``_rule_facts.read_node``) and ``processes``
    (see ``_engine_processes``).
    """

    def __init__(self, facts: t.Mapping[str, t.Any]) -> None:
        self._facts = facts

    def _fact(self, kind: type, *path: str) -> t.Any:
        value: object = self._facts
        for depth, name in enumerate(path, 1):
            value = value.get(name) if isinstance(value, t.Mapping) else None
            if value is None:
                raise Unknown(" ".join(path[:depth]).replace("_", " "))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise Unknown(" ".join(path).replace("_", " "))
        return value

    # ---- Engine

    @property
    def engine(self) -> str:
        """``vllm`` or ``sglang``."""
        return t.cast(str, self._fact(str, "engine"))

    @property
    def version(self) -> tuple[int, ...]:
        """The engine's release."""
        return release_of(self._fact(str, "version"))

    @property
    def named(self) -> str:
        """The engine and its version, to be read."""
        return f"{self.engine} {self._facts.get('version') or ''}".strip()

    def package(self, name: str) -> str | None:
        """Version of a distribution in the venv, None if it is not there."""
        version = self._fact(dict, "packages").get(name)
        return version if isinstance(version, str) else None

    def toolkits(self) -> dict[str, str]:
        """CUDA releases by where they are from; only those that can be read."""
        return {
            str(place): release
            for place, release in self._fact(dict, "toolkits").items()
            if isinstance(release, str) and re.match(r"\d", release)
        }

    @property
    def torch_cuda(self) -> str:
        """CUDA release that torch is built for, empty for a CPU build."""
        return t.cast(str, self._fact(str, "torch_cuda"))

    @property
    def wheel(self) -> str:
        """Machine that the engine's wheel is built for, ``any`` for all."""
        return t.cast(str, self._fact(str, "wheel"))

    def patched(self, patch: str) -> bool:
        """Whether a patch is in place or will be."""
        return patch in self._fact(list, "patches")

    # ---- Arguments

    def argument(self, *names: str) -> t.Any:
        """Value of an option under any of its names, None if it is not given."""
        arguments = self._fact(dict, "arguments")
        for name in names:
            if arguments.get(name) is not None:
                return arguments[name]
        if arguments.get("config"):
            raise Unknown(f"{names[0]}, which may stand in the file of --config")
        return None

    def switched_on(self, *names: str) -> bool:
        """Whether a switch is given and true."""
        value = self.argument(*names)
        return value is True or str(value).lower() == "true"

    def text(self, *names: str) -> str | None:
        """An option as lower-case text with ``_`` for ``-``, as engines compare their choices."""
        value = self.argument(*names)
        if value is None:
            return None
        if not isinstance(value, str):
            raise Unknown(f"{names[0]} as text")
        return value.strip().lower().replace("-", "_")

    def exact(self, *names: str) -> str:
        """An option as text as it is given, for what engines compare exactly; empty if it is not given."""
        value = self.argument(*names)
        if value is not None and not isinstance(value, str):
            raise Unknown(f"{names[0]} as text")
        return value or ""

    def number(self, *names: str) -> float | None:
        """An option as a number, None if it is not given."""
        value = self.argument(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,15}(\.\d{1,15})?", str(value).strip()):
            raise Unknown(f"{names[0]} as a number")
        return float(str(value))

    def count(self, *names: str) -> int:
        """An option that counts ranks or nodes, 1 if it is not given."""
        value = self.number(*names)
        if value is not None and (value < 1 or value != int(value)):
            raise Unknown(f"{names[0]} as a count")
        return 1 if value is None else int(value)

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share each tensor."""
        return self.count("tensor-parallel-size", "tp-size")

    @property
    def speculative(self) -> dict[str, t.Any]:
        """vLLM's drafter, empty without one."""
        given = self.argument("speculative-config")
        config = as_mapping(given) if given is not None else {}
        if config is None:
            raise Unknown("speculative-config as a dictionary")
        return config

    @property
    def mtp(self) -> bool:
        """Whether the checkpoint's own MTP layer drafts."""
        if self.engine == "sglang":
            return bool(self.text("speculative-algorithm"))
        config = self.speculative
        return str(config.get("method", "")).endswith("mtp") and not config.get("model")

    # ---- Cluster

    @property
    def nodes(self) -> int:
        """How many nodes serve together."""
        return t.cast(int, self._fact(int, "nodes"))

    @property
    def by_ray(self) -> bool:
        """Whether Ray places the ranks."""
        return self.engine == "vllm" and self.text("distributed-executor-backend") == "ray"

    def variable(self, name: str) -> str | None:
        """A variable of the driver, None if it is not set."""
        value = self._fact(dict, "environment").get(name)
        return None if value is None else str(value)

    def ray_variable(self, name: str) -> str | None:
        """A variable of the raylet, None if it is not set."""
        value = self._fact(dict, "ray_environment").get(name)
        return None if value is None else str(value)

    def ray_argument(self, name: str) -> t.Any:
        """An option of ``ray start``, None if it is not given."""
        return self._fact(dict, "ray_arguments").get(name)

    def variables(self) -> dict[str, str]:
        """All variables of the driver."""
        return {str(name): str(value) for name, value in self._fact(dict, "environment").items()}

    def processes(self) -> list[dict[str, t.Any]]:
        """The engine's processes on this node, as they run."""
        return [one for one in self._fact(list, "processes") if isinstance(one, dict)]

    # ---- Node and checkpoint

    def node(self, name: str, kind: type = str) -> t.Any:
        """A fact of the node."""
        return self._fact(kind, "node", name)

    @property
    def gb10(self) -> bool:
        """Whether the GPU is a GB10; False without any GPU."""
        capability = self._fact(list, "node", "capability")
        return tuple(capability) == GB10

    @property
    def scheme(self) -> str:
        """What the routed experts are stored in."""
        return t.cast(str, self._fact(str, "checkpoint", "scheme"))

    def checkpoint(self, name: str, kind: type = int) -> t.Any:
        """A fact of the checkpoint."""
        return self._fact(kind, "checkpoint", name)
