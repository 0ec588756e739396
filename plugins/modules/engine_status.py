#!/usr/bin/python
# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_status
short_description: Read what a node's engine does - units, processes, log, API, Ray membership
version_added: 0.1.0
description:
  - Reads systemd units and their processes, with the limits that the kernel really applies to them.
  - Reads the engine's log of its current (or last) start and, where it failed, says why and what to do.
  - Optionally asks the engine's API for its health, models and metrics, and Ray for its members by address.
  - A node where nothing was ever deployed is no error; its units are V(not-found).
  - Needs C(become) to see the environment and the journal of another user's units.
author: The sparks.hy3 contributors (@sparks-hy3)
extends_documentation_fragment:
  - sparks.hy3._attributes
  - sparks.hy3._attributes.info
options:
  units:
    description: Names of the systemd units to report, with their suffix.
    type: list
    elements: str
    default: []
  log_unit:
    description:
      - The unit whose log is read; one of O(units).
      - Only the log of one start is read, by the unit's invocation id. Of a start longer than an hour ago, that
        first hour and the newest 2000 lines are read.
    type: str
  environment:
    description:
      - Names of environment variables to report for each process, as it was started with.
      - Names that look like secrets (with C(KEY), C(TOKEN), C(SECRET) or C(PASSW)) are refused.
    type: list
    elements: str
    default: []
  find_engines:
    description:
      - Look for engine processes (vLLM, SGLang, Ray) of any owner, however they were started, and read what their logs
        say. Secrets in their arguments and variables are masked.
    type: bool
    default: false
  api_url:
    description:
      - Base URL of the engine's API as the node reaches it, for example V(http://127.0.0.1:8000).
      - C(/health), C(/v1/models) and C(/metrics) are asked.
    type: str
  api_key:
    description: Key of the API, if it has one.
    type: str
  ray_python:
    description: Path of the Python interpreter of the engine's virtual environment. Required with O(ray_address).
    type: path
  ray_launcher:
    description:
      - Words before O(ray_python) that run it where Ray is, for instance V([docker, exec, hy3-ray]). None
        if Ray runs on the node itself.
    type: list
    elements: str
    default: []
  ray_address:
    description: Address and port of the Ray head, for example V(192.168.100.1:6379).
    type: str
  ray_token_file:
    description: File with the cluster's token, where Ray authenticates by token.
    type: path
  timeout:
    description: Seconds to wait for each answer of the API and for Ray as a whole.
    type: int
    default: 20
"""

EXAMPLES = r"""
---
- name: Read the state of the engine on the head
  sparks.hy3.engine_status:
    units: [hy3-ray.service, hy3-serve.service]
    log_unit: hy3-serve.service
    environment: [NCCL_IB_GID_INDEX, NCCL_IB_HCA, VLLM_HOST_IP]
    api_url: http://127.0.0.1:8000
    ray_python: /opt/hy3/venv/bin/python
    ray_address: 192.168.100.1:6379
  register: status

- name: Show what is wrong
  ansible.builtin.debug:
    msg: "{{ status.failure.cause }}. {{ status.failure.fix }}"
  when: status.failure is not none
"""

RETURN = r"""
units:
  description: The units by the name that was given.
  returned: always
  type: dict
  contains:
    description:
      description: C(Description) of the unit, which for ours names the cluster; the unit's name where there is none.
      type: str
      returned: always
      sample: "Hy3: Ray head of cluster sparks"
    load_state:
      description: Whether systemd knows the unit; V(not-found) where it was never deployed.
      type: str
      returned: always
      sample: loaded
    active_state:
      description: C(ActiveState) of systemd.
      type: str
      returned: always
      sample: active
    sub_state:
      description: C(SubState) of systemd.
      type: str
      returned: always
      sample: running
    result:
      description: How the last run ended; V(success) while it runs.
      type: str
      returned: always
      sample: success
    exec_main_status:
      description: Exit status of the main process, V(0) while it runs.
      type: int
      returned: always
    main_pid:
      description:
        - Process id of the main process, or null. Of a unit that is the client of a container (docker, podman) it is
          the first process in the container, as the node counts it, and the same holds for all that follows.
      type: int
      returned: always
      sample: 4242
    invocation_id:
      description: Id of the current start, or of the last one if the unit has stopped; null if it never started.
      type: str
      returned: always
      sample: 0f2fb3c1b3ab4b0c9d59a0a6e5a8ad2e
    n_restarts:
      description: How often systemd has restarted it since it was started by hand.
      type: int
      returned: always
    active_since:
      description: Unix time in seconds at which it became active, or null.
      type: int
      returned: always
      sample: 1796063642
    started:
      description:
        - Unix time in seconds at which the main process really started, counted from the node's boot and up to a second
          early, or null.
      type: float
      returned: always
      sample: 1796063641.27
    digest:
      description: C(HY3_DIGEST) that the main process was started with, or null.
      type: str
      returned: always
    memory_current:
      description: Bytes charged to the unit now, or null where that is not accounted.
      type: int
      returned: always
    oom_kills:
      description:
        - How often the kernel has killed a process of this start for memory, or null where that is not counted. CUDA
          memory of a DGX Spark is probably not charged to a unit, so V(0) does not say that the node has enough.
      type: int
      returned: always
      sample: 0
    memory_max:
      description: The configured C(MemoryMax) in bytes, or null for none.
      type: int
      returned: always
      sample: 111669149696
    memory_limit:
      description:
        - The limit in bytes that the kernel applies to the main process; the smallest one on the way up its cgroups.
        - Null for none, also where the unit does not run.
      type: int
      returned: always
    memory_delegated:
      description:
        - Whether the unit has a control group of its own with the memory controller, of either version. Where it has
          not, systemd accepts a limit and nothing enforces it.
        - False where the unit does not run.
      type: bool
      returned: always
    swap_limit:
      description:
        - How many bytes of the main process the kernel may swap out, or null where nothing limits it. V(0) on a node
          without swap.
        - Null also where the unit does not run.
      type: int
      returned: always
      sample: 0
    memlock:
      description: Soft limit of locked memory of the main process in bytes, or null for unlimited.
      type: int
      returned: always
    scope:
      description: The systemd scope of the unit's container, or null where it has none that runs.
      type: str
      returned: always
      sample: docker-6f1c0e9d3b5a7c2e4d6f8091a2b3c4d5e6f70812a3b4c5d6e7f8091a2b3c4d5e.scope
    argv:
      description: Arguments of the main process, byte for byte; only the values of key flags are masked.
      type: list
      elements: str
      returned: always
    processes:
      description: All processes of the unit.
      type: list
      elements: dict
      returned: always
      contains:
        pid:
          description: Process id.
          type: int
          returned: always
        title:
          description: Its first argument, which an engine's process overwrites with its role.
          type: str
          returned: always
          sample: VLLM::Worker_TP0
        user:
          description: Numeric id of its user.
          type: int
          returned: always
        started:
          description: As RV(units.started), of this process.
          type: float
          returned: always
          sample: 1796063702.91
        environment:
          description:
            - The variables of O(environment) that it was started with, by name.
            - Null where they cannot be read; a process that renames itself, as the workers of Ray and vLLM do, writes
              its title over them. Read those of its parent (the raylet) instead.
          type: dict
          returned: always
log:
  description: What the log of O(log_unit) says, or null if there is no such unit or it never started.
  returned: always
  type: dict
  contains:
    phase:
      description: The furthest phase of the start that the log shows; V(failed) if RV(failure) is not null.
      type: str
      returned: always
      choices: [starting, engine_init, loading, drafter, kv_cache, warmup, ready, failed]
    version:
      description: The engine's version, or null.
      type: str
      returned: always
      sample: 0.24.0
    config:
      description:
        - What the engine says it runs with, or null before it does. Values are null where unset.
        - The names are C(quantization), C(moe_backend), C(kv_cache_dtype), C(max_seq_len) in tokens,
          C(tensor_parallel_size), C(enforce_eager) (null for SGLang), C(speculative_method) and C(speculative_tokens).
      type: dict
      returned: always
    moe_backends:
      description: The MoE backends that the engine chose, as C(kind) of weights and C(backend).
      type: list
      elements: dict
      returned: always
      sample: [{kind: NvFp4, backend: MARLIN}]
    shards:
      description: C(loaded) and C(total) checkpoint files for V(target) and V(drafter), null before their load.
      type: dict
      returned: always
      sample: {target: {loaded: 12, total: 99}, drafter: null}
    kv:
      description:
        - The KV pool as logged, with nulls before it is. C(tokens) it holds, C(derived) if they were computed from
          blocks, and C(max_concurrency) for requests of C(request_tokens) tokens.
      type: dict
      returned: always
      sample: {tokens: 176784, derived: false, max_concurrency: 1.08, request_tokens: 163840}
    available_kv_gib:
      description: Memory for the KV pool in GiB, or null.
      type: float
      returned: always
    weights_gib:
      description: Memory of the weights on the fullest rank in GiB, or null.
      type: float
      returned: always
    acceptance:
      description:
        - The last line about draft acceptance, or null. C(rate) is 0 to 1, C(accepted) and C(drafted) are tokens,
          C(mean_length) is tokens per step, C(per_position) a list of rates.
      type: dict
      returned: always
    ranks:
      description: The ranks with their C(ip), which is null for a rank on the node of the engine itself.
      type: list
      elements: dict
      returned: always
      sample: [{rank: 0, ip: null}, {rank: 1, ip: 192.168.100.2}]
    timings:
      description: Seconds of C(read_weights_s), C(load_model_s) and C(init_engine_s), null where not logged.
      type: dict
      returned: always
    tail:
      description: The last lines of the log.
      type: list
      elements: str
      returned: always
failure:
  description: Why the engine does not come up or ended, or null.
  returned: always
  type: dict
  contains:
    cause:
      description: What went wrong.
      type: str
      returned: always
    fix:
      description: What to do.
      type: str
      returned: always
    source:
      description: Where this is known from.
      type: str
      returned: always
    line:
      description: The log line that it stands on.
      type: str
      returned: always
    fatal:
      description: Whether an engine that logged this never comes up.
      type: bool
      returned: always
engines:
  description:
    - Engine processes of any owner, or null without O(find_engines).
    - What a process changed in itself after its start cannot be seen from outside. RV(engines[].changes) is what its
      log says of that.
  returned: always
  type: list
  elements: dict
  contains:
    pid:
      description: Process id.
      type: int
      returned: always
    kind:
      description: What it is. V(driver) is the API server, V(ray_start) the command that keeps Ray up.
      type: str
      returned: always
      choices: [driver, engine_core, worker, ray_start, raylet, gcs]
    engine:
      description: Whose process it is.
      type: str
      returned: always
      choices: [vllm, sglang, ray]
    user:
      description: Numeric id of its user.
      type: int
      returned: always
    unit:
      description: The systemd unit that it runs in, or an empty text.
      type: str
      returned: always
      sample: session-3.scope
    user_unit:
      description: Whether that belongs to a user's own systemd, which ends with the user's last session.
      type: bool
      returned: always
    root:
      description: Where its files are found; empty unless it runs in a container.
      type: str
      returned: always
      sample: /proc/4242/root
    venv:
      description: Its virtual environment, below RV(engines[].root), or null.
      type: str
      returned: always
      sample: /opt/hy3/venv
    argv:
      description: Its arguments with secrets masked; only the title of a process that has renamed itself.
      type: list
      elements: str
      returned: always
    arguments:
      description:
        - Options by name, without leading dashes, of V(driver), V(ray_start) and V(raylet); null for others.
        - C(model) is also the first word without dashes.
      type: dict
      returned: always
      sample: {model: /opt/hy3/models/Hy3-NVFP4, tensor-parallel-size: "2", enforce-eager: true}
    environment:
      description: Variables of engine, Ray and NCCL that it was started with, or null where they cannot be read.
      type: dict
      returned: always
      sample: {NCCL_IB_GID_INDEX: "3", VLLM_API_KEY: "********"}
    memlock:
      description: Soft limit of locked memory in bytes, or null for unlimited.
      type: int
      returned: always
    memory_limit:
      description: The smallest memory limit in bytes on the way up its cgroups, or null for none.
      type: int
      returned: always
    log:
      description: The file or directory it logs to, V(journal), or null where that cannot be known.
      type: str
      returned: always
      sample: /tmp/ray/session_latest/logs
    changes:
      description: Variables that its log says were overwritten, or null without a log that can be read.
      type: list
      elements: dict
      returned: always
      sample: [{variable: NCCL_IB_GID_INDEX, before: "6", after: "3", log: worker-1.out}]
    failure:
      description: As RV(failure), from the log of a V(driver); null for others.
      type: dict
      returned: always
kills:
  description:
    - Engines of any owner that earlyoom or the kernel killed for memory within a day, and whatever systemd-oomd killed,
      each as RV(failure). Null without O(find_engines).
  returned: always
  type: list
  elements: dict
  sample: []
health:
  description: What the API answers, or null without O(api_url).
  returned: always
  type: dict
  contains:
    ok:
      description: Whether C(/health) answered 200. It does so for a model that computes NaN, too.
      type: bool
      returned: always
    status:
      description: HTTP status of C(/health), or null if nothing answers.
      type: int
      returned: always
    models:
      description: Names of the served models.
      type: list
      elements: str
      returned: always
      sample: [hy3-nvfp4]
metrics:
  description:
    - Counters of the engine since its start, or null if it does not answer. A value it does not export is null.
    - C(drafted) and C(accepted) are tokens of C(drafts) drafts, C(accepted_per_position) has them by place in the
      draft, C(acceptance) is their ratio. C(kv_cache_tokens) and C(max_concurrency) describe the KV pool, C(running)
      and C(waiting) count requests.
  returned: always
  type: dict
  sample:
    {drafts: 1000, drafted: 1000, accepted: 613, accepted_per_position: [613], acceptance: 0.613,
     kv_cache_tokens: 176784, max_concurrency: 1.08, running: 0, waiting: 0}
ray:
  description: Members of the Ray cluster, or null without O(ray_address).
  returned: always
  type: dict
  contains:
    nodes:
      description: The members; null if the cluster does not answer.
      type: list
      elements: dict
      returned: always
      contains:
        address:
          description: Address by which it joined.
          type: str
          returned: always
        alive:
          description: Whether Ray counts it as alive.
          type: bool
          returned: always
        gpus:
          description: GPUs that it brought, V(0) for a dead one.
          type: int
          returned: always
        head:
          description: Whether it is the head.
          type: bool
          returned: always
    error:
      description: Why it does not answer, or null.
      type: str
      returned: always
memory:
  description: The node's memory (C(MemTotal) and C(MemAvailable)) in bytes.
  returned: always
  type: dict
  sample: {total: 130663661568, available: 118111600640}
"""

import time
import typing as t
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.sparks.hy3.plugins.module_utils._container import (
    Inside,
    client_of,
    inspect_command,
    parse_inspect,
)
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import (
    Failure,
    find_failure,
    find_kills,
    guards_command,
    kills_of_engines,
)
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import Facts, clean_lines, read_facts
from ansible_collections.sparks.hy3.plugins.module_utils._engine_processes import (
    EngineProcesses,
    changes_in,
    log_files,
    read_log,
)
from ansible_collections.sparks.hy3.plugins.module_utils._errors import Hy3Error
from ansible_collections.sparks.hy3.plugins.module_utils._memory import (
    is_delegated,
    memory_charged,
    memory_limit,
    oom_kills,
    parse_meminfo,
    swap_limit,
)
from ansible_collections.sparks.hy3.plugins.module_utils._metrics import Metrics, read_metrics
from ansible_collections.sparks.hy3.plugins.module_utils._openai import Client, model_names
from ansible_collections.sparks.hy3.plugins.module_utils._ray import (
    membership_command,
    membership_environment,
    membership_error,
    parse_membership,
)
from ansible_collections.sparks.hy3.plugins.module_utils._units import (
    Processes,
    journal_commands,
    mask_argv,
    number,
    parse_show,
    refuse_secrets,
    show_command,
)

# How far back to look for an engine that is no longer there, in seconds.
LOOK_BACK = 24 * 3600


class EngineStatus:
    """Collects the parts; each is one method, so that a part that was not asked for costs nothing."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params: dict[str, t.Any] = module.params

    def _run(self, command: list[str]) -> str:
        try:
            rc, stdout, stderr = self.module.run_command(
                command, expand_user_and_vars=False, errors="surrogateescape", handle_exceptions=False
            )
        except OSError as error:
            raise Hy3Error(
                f"{command[0]} cannot be run on this node ({error.strerror}); see that it has systemd"
            ) from error
        if rc != 0:
            raise Hy3Error(f"{' '.join(command[:2])} failed with exit status {rc}: {stderr.strip() or 'no message'}")
        return stdout

    def properties(self) -> dict[str, dict[str, str]]:
        units = self.params["units"]
        return parse_show(self._run(show_command(units)), units) if units else {}

    def unit(self, name: str, shown: dict[str, str]) -> dict[str, t.Any]:
        processes = Processes()
        pid = number(shown["MainPID"]) or None
        # A container's processes are no children of the unit, and its client tells nothing about them.
        client = client_of(processes.argv(pid)) if pid else None
        inside = self.inside(*client) if client else None
        if client:
            pid = inside.pid if inside else None
        group = inside.scope if inside else name
        started_with = (processes.environment(pid, ["HY3_DIGEST"]) or {}) if pid else {}
        return {
            "description": shown.get("Description", name),
            "load_state": shown["LoadState"],
            "active_state": shown["ActiveState"],
            "sub_state": shown["SubState"],
            "result": shown.get("Result"),
            "exec_main_status": number(shown.get("ExecMainStatus", "")),
            "main_pid": pid,
            "invocation_id": shown.get("InvocationID") or None,
            "n_restarts": number(shown.get("NRestarts", "")),
            "active_since": number(shown.get("ActiveEnterTimestamp", "")),
            "started": processes.started(pid) if pid else None,
            "digest": started_with.get("HY3_DIGEST"),
            "memory_current": memory_charged(inside.pid, group) if inside else number(shown.get("MemoryCurrent", "")),
            "memory_max": number(shown.get("MemoryMax", "")),
            "oom_kills": oom_kills(pid, group) if pid else None,
            **self.limits(pid, group),
            "memlock": processes.memlock(pid) if pid else None,
            "scope": inside.scope if inside else None,
            "argv": mask_argv(processes.argv(pid)) if pid else [],
            "processes": processes.of_unit(group, self.params["environment"]),
        }

    def inside(self, program: str, name: str) -> Inside | None:
        """The container that a unit's client runs, None while there is none."""
        try:
            return parse_inspect(program, self._run(inspect_command(program, name)))
        except Hy3Error:
            return None

    @staticmethod
    def limits(pid: int | None, unit: str) -> dict[str, t.Any]:
        if pid is not None:
            try:
                limit, swap = memory_limit(pid).limit, swap_limit(pid)
                return {"memory_limit": limit, "memory_delegated": is_delegated(pid, unit), "swap_limit": swap}
            except ValueError:  # the process has ended since systemd named it
                pass
        return {"memory_limit": None, "memory_delegated": False, "swap_limit": None}

    def log(self, shown: dict[str, str]) -> tuple[Facts | None, Failure | None]:
        invocation = shown.get("InvocationID")
        if not invocation:
            return None, None
        started = number(shown.get("InactiveExitTimestamp", ""))
        commands = journal_commands(invocation, started=started, now=int(time.time()))
        lines = [line for command in commands for line in clean_lines(self._run(command))]
        facts = read_facts(lines)
        stopped = shown.get("Result") not in ("success", None)
        failure = find_failure(lines, stopped=stopped)
        if failure or stopped:
            # Who kills for memory writes elsewhere, and what the engine says then is the echo.
            killed = kills_of_engines(self._guards(started or int(time.time()) - LOOK_BACK))
            failure = find_failure([*killed, *lines], stopped=stopped)
        if failure:
            facts["phase"] = "failed"
        return facts, failure

    def _guards(self, since: int) -> list[str]:
        try:
            return self._run(guards_command(since)).splitlines()
        except Hy3Error:  # no journal, so nothing is known
            return []

    def kills(self) -> list[Failure] | None:
        if not self.params["find_engines"]:
            return None
        return find_kills(self._guards(int(time.time()) - LOOK_BACK))

    def engines(self) -> list[dict[str, t.Any]] | None:
        if not self.params["find_engines"]:
            return None
        found = EngineProcesses().find()
        read: dict[str, list[str]] = {}
        for one in found:
            place = one["invocation_id"] if one["log"] == "journal" else one["log"]
            if place and place not in read:
                read[place] = self._logs(place, journal=one["log"] == "journal")
            texts = read.get(place or "", [])
            one["changes"] = changes_in("\n".join(texts), log=one["log"]) if texts else None
            lines = [line for text in texts for line in clean_lines(text)] if one["kind"] == "driver" else []
            one["failure"] = find_failure(lines, stopped=False)
            del one["invocation_id"]
        return found

    def _logs(self, place: str, *, journal: bool) -> list[str]:
        if not journal:
            return [text for path in log_files(Path(place)) if (text := read_log(path))]
        try:
            return [self._run(command) for command in journal_commands(place, started=None, now=0)]
        except Hy3Error:
            return []

    def api(self) -> tuple[dict[str, t.Any] | None, Metrics | None]:
        if not self.params["api_url"]:
            return None, None
        client = Client(self.params["api_url"], key=self.params["api_key"], timeout=self.params["timeout"])
        try:
            status, _body = client.get("/health")
            models = model_names(client.get("/v1/models")[1])
            metrics_status, metrics = client.get("/metrics")
        except Hy3Error:
            return {"ok": False, "status": None, "models": []}, None
        health = {"ok": status == 200, "status": status, "models": models}
        return health, read_metrics(metrics.decode(errors="replace")) if metrics_status == 200 else None

    def ray(self) -> dict[str, t.Any] | None:
        address, timeout = self.params["ray_address"], self.params["timeout"]
        if not address:
            return None
        words = [*self.params["ray_launcher"], self.params["ray_python"]]
        asking = membership_command(self.params["ray_python"], address=address, timeout=timeout)
        try:
            rc, stdout, stderr = self.module.run_command(
                [*self.params["ray_launcher"], *asking],
                environ_update=membership_environment(self.params["ray_token_file"]),
                expand_user_and_vars=False,
                handle_exceptions=False,
            )
        except OSError as error:
            return {"nodes": None, "error": f"ray_python {' '.join(words)} cannot be run: {error.strerror}"}
        if rc != 0:
            return {"nodes": None, "error": membership_error(rc, stderr=stderr, address=address, timeout=timeout)}
        return {"nodes": parse_membership(stdout), "error": None}

    def collect(self) -> dict[str, t.Any]:
        refuse_secrets(self.params["environment"])
        log_unit = self.params["log_unit"]
        if log_unit and log_unit not in self.params["units"]:
            raise Hy3Error(f"log_unit {log_unit} is not in units: add it there")
        properties = self.properties()
        log, failure = self.log(properties[log_unit]) if log_unit else (None, None)
        health, metrics = self.api()
        memory = parse_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
        return {
            "units": {name: self.unit(name, shown) for name, shown in properties.items()},
            "log": log,
            "failure": failure,
            "health": health,
            "metrics": metrics,
            "ray": self.ray(),
            "engines": self.engines(),
            "kills": self.kills(),
            "memory": {"total": memory["MemTotal"], "available": memory["MemAvailable"]},
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "units": {"type": "list", "elements": "str", "default": []},
            "log_unit": {"type": "str"},
            "environment": {"type": "list", "elements": "str", "default": []},
            "find_engines": {"type": "bool", "default": False},
            "api_url": {"type": "str"},
            "api_key": {"type": "str", "no_log": True},
            "ray_python": {"type": "path"},
            "ray_launcher": {"type": "list", "elements": "str", "default": []},
            "ray_address": {"type": "str"},
            "ray_token_file": {"type": "path", "no_log": False},
            "timeout": {"type": "int", "default": 20},
        },
        required_by={"ray_address": ["ray_python"]},
        supports_check_mode=True,
    )
    try:
        result = EngineStatus(module).collect()
    except Hy3Error as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
