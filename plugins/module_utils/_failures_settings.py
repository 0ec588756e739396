# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Note that this module util is **PRIVATE** to the collection. It can have breaking changes at any time.
"""Failures of arguments, packages, ports, files and rights."""

from __future__ import annotations

from ansible_collections.sparks.hy3.plugins.module_utils._failure import RECIPE, SUSPECT, SYMPTOM, Rule, rule

_OPTIONS = "Take it out or spell it as this release does (hy3_engine_args; `--help=all` of the engine lists them)"

SETTINGS_RULES: tuple[Rule, ...] = (
    rule(
        "sglang-graph-flag",
        r"(?:ambiguous option|unrecognized arguments):.*?(?P<flag>--cuda-graph-max-bs"
        r"|--disable-piecewise-cuda-graph)\b",
        "This SGLang has no option {flag} any more",
        "Write cuda-graph-max-bs-decode and disable-prefill-cuda-graph instead, as of 0.5.20",
        "SGLang 0.5.23, run; against seed 003",
    ),
    rule(
        "json-argument",
        r"argument (?P<flag>[\w/-]+): (?:Value (?P<value>.{0,80}) cannot be converted to|invalid (?:JSON|loads) "
        r"(?:value: )?)",
        "The value of {flag} is no JSON",
        "Write it as a dictionary in hy3_engine_args, which becomes JSON; single quotes are Python's",
        "vLLM arg_utils; field case B123",
    ),
    rule(
        "argument",
        r"error: (?P<why>(?:unrecognized arguments|ambiguous option|argument|the following arguments are required|"
        r"unexpected arguments?)\b.{0,160})",
        "The engine refused its command line: {why}",
        _OPTIONS,
        "argparse",
    ),
    rule(
        "config-refused",
        r"Value error, (?P<why>.{1,240})",
        "The engine refused its settings: {why}",
        "Correct that setting in hy3_engine_args",
        "vLLM, pydantic",
        fatal=False,
    ),
    rule(
        "address",
        r"\[Errno 99\]|[Cc]annot assign requested address|EADDRNOTAVAIL",
        "An address that the engine was given is not on this node: the fabric's interface lost it, or VLLM_HOST_IP or "
        "the API's host is another node's",
        "See that `ip address` shows the node's fabric address; netplan brings it back",
        "Linux",
        fatal=False,
    ),
    rule(
        "port",
        r"\[Errno 98\]|error while attempting to bind on address|EADDRINUSE",
        "The API port is taken by another process on the head",
        "Stop that process or set hy3_api_port",
        "uvicorn",
        unless=r"\[Errno 13\]",
    ),
    rule(
        "other-port",
        r"\b(?P<name>\w{1,40}) at (?P<port>\d{1,5}) is not available|Port (?P<other>\d{1,5}) is already in use",
        "A port that the ranks meet at is taken ({name} {port}{other}), most likely by an earlier engine",
        "End that process (`ss -ltnp` names it), or wait until its memory and ports are free",
        "SGLang wait_port_available",
    ),
    rule(
        "name",
        r"\[Errno -[23]\]|Name or service not known|Temporary failure in name resolution|getaddrinfo failed",
        "A name does not resolve on that node",
        "Write addresses instead of names for Ray, VLLM_HOST_IP and the rendezvous",
        "Linux; field case B28",
        unless=r"https?://|huggingface|usage|telemetry|INFO|WARNING",
        fatal=False,
    ),
    rule(
        "no-flashinfer",
        r"ModuleNotFoundError: No module named 'flashinfer",
        "vLLM's sampler wants flashinfer, which is not installed",
        "Install flashinfer or set VLLM_USE_FLASHINFER_SAMPLER=0 (hy3_engine_env)",
        "vLLM 0.24.0, reproduced",
    ),
    rule(
        "flashinfer-import",
        r"cannot import name '\w+' from '(?:cutlass|flashinfer)|No module named 'cutlass"
        r"|module 'cutlass[\w.]*' has no attribute",
        "flashinfer and nvidia-cutlass-dsl are of releases that do not fit (4.4.2 of the latter breaks its import)",
        "Install both as the engine pins them (tag engine); to escape b12x serve with moe_backend marlin instead",
        RECIPE,
        fatal=False,
    ),
    rule(
        "no-module",
        r"(?:ModuleNotFoundError|ImportError): No module named '(?P<name>[\w.]+)'",
        "A package is missing in the engine's venv on that node: {name}",
        "Install the same packages on every node (tag engine); the unit's program must be that venv's",
        "Python; field case B83",
        fatal=False,
    ),
    rule(
        "library",
        r"(?:ImportError|OSError): (?P<file>\S+?\.so[\w.]*): (?P<why>cannot open shared object file|undefined symbol|"
        r"version \S+ not found|ELF).{0,80}|undefined symbol: (?P<symbol>\w+)|version `(?P<libc>GLIBC\w*_[\d.]+)' "
        r"not found",
        "A library of the engine does not fit the others or this system ({file}{symbol}{libc})",
        "Reinstall the engine's pinned packages in one step (tag engine); do not upgrade torch or CUDA packages by "
        "themselves",
        "the dynamic linker",
        unless=r"Failed to import|WARNING|INFO",
        fatal=False,
    ),
    rule(
        "torch-operator",
        r"operator \S+ does not exist",
        "torch and a package that extends it are of different releases",
        "Reinstall the engine's pinned packages in one step (tag engine)",
        "torchvision 0.28.0 with torch 2.13.0, run",
        fatal=False,
    ),
    rule(
        "pickle",
        r"Can't get attribute '(?P<name>\w+)' on <module|unexpected keyword argument '(?P<other>\w+)'.*RayWorker"
        r"|Can't deserialize object|ModuleNotFoundError: .*pickle",
        "Two nodes run different code of the engine ({name}{other})",
        "Install the same packages and patches on every node (tags engine and patch)",
        "Ray and vLLM; field case B83",
        fatal=False,
    ),
    rule(
        "disk-full",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]",
        "A disk is full",
        "`df -h` on that node names it; the engine needs room for its caches below hy3_user's home and for its log",
        "Linux",
        fatal=False,
    ),
    rule(
        "read-only",
        r"Read-only file system|\[Errno 30\]",
        "A file system is read-only",
        "See the kernel's log for errors of the disk; a path that the engine writes to may not lie in a read-only "
        "place",
        "Linux",
        fatal=False,
    ),
    rule(
        "open-files",
        r"Too many open files|\[Errno 24\]",
        "A process may not open more files",
        "Set LimitNOFILE=1048576 in its unit",
        "Linux",
        fatal=False,
    ),
    rule(
        "threads",
        r"can't start new thread|pthread_create failed|Resource temporarily unavailable.{0,40}(?:thread|fork)"
        r"|BlockingIOError: \[Errno 11\]",
        "A process may not start more threads",
        "Raise TasksMax and LimitNPROC of its unit, or lower OMP_NUM_THREADS",
        "Linux",
        fatal=False,
    ),
    rule(
        "permission",
        r"(?:PermissionError|Permission denied|\[Errno 13\])(?:.*?'(?P<path>/[^']*)')?",
        "The engine's user may not use a file ({path})",
        "Give it to hy3_user; it is often what an earlier start as root left in a cache or in /tmp",
        "Linux",
        unless=r"INFO|WARNING|DEBUG",
        fatal=False,
    ),
    rule(
        "fabric",
        r"(?P<sentence>(?:No RoCE v2 GID|No HCA of this node matches|This node has no interface|HCA selector '|"
        r"In a ring NCCL chooses|The HCAs have no usable GID)\b.{0,300})",
        "The fabric of this node is not as planned: {sentence}",
        "See that the link is up and has its address, and run serve_hy3 again, which resolves it",
        "this collection's roce.py, which runs before each start",
    ),
    rule(
        "peer-silent",
        r"(?P<sentence>\S{1,60}:\d{1,5} did not accept a connection within [\d.e+]+ s.{0,200})",
        "The unit's own check refused its start: {sentence}",
        "See that the unit on that node runs and that the link between them is up",
        "this collection's roce.py and port.py",
        kind=SUSPECT,
        peers=True,
        fatal=False,
    ),
    rule(
        "ready-timeout",
        r"Timed out waiting for engine (?:core processes|s) to|did not respond within.*VLLM_ENGINE_READY_TIMEOUT_S"
        r"|Timed out waiting for engines to send initial message",
        "vLLM's API server did not wait long enough for the engine core",
        'Set VLLM_ENGINE_READY_TIMEOUT_S to "3600" (hy3_engine_env)',
        "vLLM core_client; tonyd2wild pull request 14",
        kind=SYMPTOM,
        peers=True,
    ),
)
