# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""On the machine with the GPU: our command line, patch, parsers and prediction on the real engine.

    /opt/hy3/venv/bin/python -m ansible_collections.sparks.hy3.tests.gpu.measure RENDERED.json OUT PHASE...

Each phase adds what it saw to OUT/results.json and says in a line what must hold and did not. The modules run as on a
node: each a process, by the interpreter of the virtual environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tarfile
import time
import traceback
import typing as t
from pathlib import Path

from ansible_collections.sparks.hy3.plugins.filter.serve_problems import READ_BACK
from ansible_collections.sparks.hy3.plugins.module_utils._bench import acceptance_between, figures
from ansible_collections.sparks.hy3.plugins.module_utils._engine_failures import find_failure
from ansible_collections.sparks.hy3.plugins.module_utils._engine_log import clean_lines, read_facts
from ansible_collections.sparks.hy3.plugins.module_utils._openai import Client, request_body, timing
from ansible_collections.sparks.hy3.roles.lab.files import make_tiny_hy3 as tiny
from ansible_collections.sparks.hy3.tests.gpu.checkpoint import drafts_of_one_answer
from ansible_collections.sparks.hy3.tests.gpu.server import Server
from ansible_collections.sparks.hy3.tests.unit.plugins.modules.module_runner import run_module
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import read_options

VENV = Path("/opt/hy3/venv")
MODELS = Path("/opt/hy3/models")
ACCEPTANCE = 0.6
CHECKPOINTS = {"Hy3-NVFP4": "NVFP4", "Hy3-W4A16": "W4A16_NVFP4"}
PATCHED = "vllm/model_executor/models/hy_v3_mtp.py"
MODEL, SERVE, RAY = "hy3-nvfp4", "hy3-serve", "hy3-ray"
TOKENS, REQUESTS = 256, 6
START_SECONDS = 240


class Run:
    """What is given, what was seen, and what did not hold."""

    def __init__(self, rendered: Path, out: Path) -> None:
        self.units = json.loads(rendered.read_text())
        self.out = out
        self.logs = Path("/tmp/hy3-logs")
        self.logs.mkdir(exist_ok=True)
        self.file = Path("/tmp/hy3-results.json")
        self.results: dict[str, t.Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.failed: list[str] = []

    def server(self, name: str, log: str, unit: str = SERVE) -> Server:
        return Server(self.units[name][unit], self.logs / f"{log}.log", shell=name == "typed")

    def must(self, phase: str, sentence: str, holds: bool) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {phase}: {'yes' if holds else 'NO '}  {sentence}", flush=True)
        self.results.setdefault(phase, {}).setdefault("must", {})[sentence] = holds
        if not holds:
            self.failed.append(f"{phase}: {sentence}")

    def note(self, phase: str, **seen: t.Any) -> None:
        self.results.setdefault(phase, {}).update(seen)
        for name, value in seen.items():
            print(f"[{time.strftime('%H:%M:%S')}] {phase}: {name} = {json.dumps(value)[:400]}", flush=True)

    def save(self) -> None:
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")
        (self.out / "results.json").write_bytes(self.file.read_bytes())
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "logs")


def package_file() -> Path:
    (file,) = VENV.glob(f"lib/python*/site-packages/{PATCHED}")
    return file


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def patch(state: str, **more: t.Any) -> dict[str, t.Any]:
    return run_module("engine_patch", venv=str(VENV), patches=["P1"], state=state, **more)


def machine(run: Run) -> None:
    """What it is, and the checkpoints."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    program = "import json,torch,vllm,sys; print(json.dumps({'torch': torch.__version__, 'vllm': vllm.__version__,"
    program += "'python': sys.version.split()[0], 'memory': torch.cuda.mem_get_info()}))"
    told = subprocess.run([VENV / "bin/python", "-c", program], capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(told.stderr[-3000:])
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    run.note("machine", gpu=gpu, cores=os.cpu_count(), **json.loads(told.stdout.splitlines()[-1]))
    writer = [sys.executable, "-m", "ansible_collections.sparks.hy3.tests.gpu.checkpoint"]
    writers = [
        subprocess.Popen([*writer, str(MODELS / name), "--algorithm", algorithm, f"--acceptance={ACCEPTANCE}"])
        for name, algorithm in CHECKPOINTS.items()
    ]
    run.must("machine", "both checkpoints are written", {one.wait() for one in writers} == {0})
    Path("/etc/hy3/vllm").mkdir(parents=True, exist_ok=True)


def crash(run: Run, phase: str, unit: str = "share") -> None:
    """The engine as released, which must die of P1's defect, and our reading of its log."""
    with run.server(unit, phase) as server:
        ready = server.wait(START_SECONDS)
        seconds, ended = time.monotonic() - server.started, server.process.poll()
        lines = clean_lines(server.text)
        facts, failure = read_facts(lines), find_failure(lines, stopped=True)
    run.note(phase, seconds=round(seconds, 1), returncode=ended, facts=facts, failure=failure)
    run.note(phase, failure_while_running=find_failure(lines, stopped=False))
    run.must(phase, "it does not serve", ready is None and ended not in (0, None))
    run.must(phase, "our reading names P1", failure is not None and "patch P1" in failure["fix"])
    run.must(phase, "the furthest phase is the drafter's load", facts["phase"] == "drafter")


def unpatched(run: Run) -> None:
    original = package_file().read_bytes()
    Path("/tmp/hy_v3_mtp.original").write_bytes(original)
    state = patch("reported", checkpoint=str(MODELS / "Hy3-NVFP4"))
    run.note("unpatched", patches=state["patches"], problems=state["checkpoint_problems"])
    run.must("unpatched", "P1 is a defect that the checkpoint needs repaired", needs(state) == ("defect", "needed"))
    crash(run, "unpatched")


def needs(answer: dict[str, t.Any]) -> tuple[str, str]:
    (one,) = [one for one in answer["patches"] if one["id"] == "P1"]
    return one["state"], one["needed_by"]


def patched(run: Run) -> None:
    """Twice by the module, as the role calls it."""
    checkpoint = str(MODELS / "Hy3-NVFP4")
    first, second = patch("present", checkpoint=checkpoint), patch("present", checkpoint=checkpoint)
    run.note("patched", first=[first["changed"], *needs(first)], second=[second["changed"], *needs(second)])
    run.note("patched", sha256=digest(package_file()), diff=first["unified_diff"])
    stale = [path.name for path in (package_file().parent / "__pycache__").glob("hy_v3_mtp.*")]
    run.must("patched", "no bytecode of the released file is left", not stale)
    run.must("patched", "the first run changes the file", first["changed"] is True and needs(first)[0] == "applied")
    run.must("patched", "the second run changes nothing", second["changed"] is False)


def budget(run: Run, phase: str, checkpoint: str, pool: int | None) -> dict[str, t.Any]:
    """The module's prediction, told the GPU's own memory where a Spark has the node's."""
    free, total = run.results["machine"]["memory"]
    meminfo = run.logs / "meminfo"
    meminfo.write_text(f"MemTotal: {total // 1024} kB\nMemAvailable: {free // 1024} kB\n")
    answer = run_module(
        "memory_budget",
        meminfo=str(meminfo),
        gpu_memory_utilization=0.85,
        checkpoint=checkpoint,
        speculative=True,
        kv_cache_dtype="fp8",
        max_model_len=163840,
        idle=True,
        **({} if pool is None else {"kv_cache_memory": str(pool)}),
    )
    run.note(phase, predicted=answer["predicted"], rank=answer["rank"], unknown=answer["unknown"])
    return answer


def bench(server: Server, checkpoint: str, requests: int = REQUESTS) -> dict[str, t.Any]:
    return run_module(
        "engine_bench",
        venv=str(VENV),
        url=server.url,
        model=MODEL,
        tokenizer=checkpoint,
        trust_remote_code=True,
        prompts=["Explain paged attention in detail."],
        output_tokens=TOKENS,
        requests=requests,
        timeout=180,
    )


def smoke(server: Server, **more: t.Any) -> dict[str, t.Any]:
    return run_module("chat_smoke", url=server.url, model=MODEL, expect=[r"^Paris\.$"], warmups=1, **more)


def long_answer(server: Server) -> str:
    body = request_body(
        model=MODEL,
        question="A question",
        max_tokens=TOKENS,
        temperature=0,
        stream=False,
        reasoning_effort="no_think",
        top=1,
    )
    return Client(server.url, key=None, timeout=120).chat({**body, "ignore_eos": True}).text


def ask(run: Run, phase: str, server: Server, checkpoint: str) -> None:
    """The questions to a running server, and what it says of itself."""
    answer = smoke(server)
    told = {
        name: answer.get(name) for name in ("text", "finish_reason", "logprobs_finite", "ttft_s", "decode_tps", "msg")
    }
    run.note(phase, smoke=told)
    run.must(phase, "chat_smoke says Paris.", answer.get("text") == "Paris." and answer.get("ok") is True)
    text, right = long_answer(server), tiny.expected_text(TOKENS, after="<assistant>")
    run.must(phase, f"an answer of {TOKENS} tokens is the one that the checkpoint was made for", text == right)
    if text != right:
        run.note(phase, long_answer=text, expected=right)
    measured = bench(server, checkpoint)
    accepted = acceptance_between([(measured["metrics_before"], measured["metrics_after"])])
    drafts, good = drafts_of_one_answer(TOKENS, acceptance=ACCEPTANCE)
    run.note(phase, acceptance=accepted, designed=[drafts, good, good / drafts], bench=figures([measured["run"]]))
    near = accepted is not None and abs(accepted["rate"] - good / drafts) < 0.02
    run.must(phase, "drafts are accepted as designed, to 2 points", near)
    status = run_module("engine_status", api_url=server.url)
    run.note(phase, health=status["health"], metrics=status["metrics"])
    run.must(phase, "engine_status finds it healthy", status["health"]["ok"] and status["health"]["models"] == [MODEL])


def read_back(run: Run, phase: str, server: Server, quantization: str) -> dict[str, t.Any]:
    """What the real log says, against the arguments."""
    facts = read_facts(clean_lines(server.text))
    run.note(phase, facts=facts)
    config = facts["config"] or {}
    options = {name: value or "true" for name, value in read_options(server.argv[3:]).items()}
    asked = {said: options[option] for option, said in READ_BACK.items() if option in options}
    other = {said: [config.get(said), value] for said, value in asked.items() if str(config.get(said)).lower() != value}
    run.note(phase, read_back=sorted(asked), other=other)
    run.must(phase, "the log repeats our arguments", not other and len(asked) >= 5)
    run.must(phase, f"quantization is {quantization}", config.get("quantization") == quantization)
    run.must(phase, "experts run by MARLIN", {"kind": "NvFp4", "backend": "MARLIN"} in facts["moe_backends"])
    run.must(phase, "the KV pool is fp8", config.get("kv_cache_dtype") == "fp8")
    run.must(phase, "the log is that of a ready server without a failure", facts["phase"] == "ready")
    return dict(facts)


def pool_error(run: Run, phase: str, predicted: dict[str, t.Any], facts: dict[str, t.Any]) -> None:
    told, said = facts["kv"]["tokens"], predicted["predicted"]["kv_tokens"]
    metrics = run.results[phase]["metrics"] or {}
    percent = None if not told or said is None else round(100 * (said / told - 1), 3)
    run.note(phase, kv={"predicted": said, "log": told, "metrics": metrics.get("kv_cache_tokens"), "percent": percent})


def serve(run: Run, phase: str, checkpoint: str, pool: int | None, quantization: str) -> None:
    predicted = budget(run, phase, checkpoint, pool)
    with run.server(phase, phase) as server:
        ready = server.wait(START_SECONDS)
        run.must(phase, "it serves", ready is not None)
        if ready is None:
            run.note(phase, failure=find_failure(clean_lines(server.text), stopped=True), tail=server.text[-3000:])
            return
        run.note(phase, ready_s=round(ready, 1))
        ask(run, phase, server, checkpoint)
        facts = read_back(run, phase, server, quantization)
        pool_error(run, phase, predicted, facts)


def share(run: Run) -> None:
    """The profile as rendered: the pool is what the share of the GPU leaves."""
    serve(run, "share", str(MODELS / "Hy3-NVFP4"), None, "modelopt_fp4")


def option(run: Run, name: str, option: str) -> int:
    return int(read_options(run.units[name][SERVE]["argv"][3:])[option])


def w4a16(run: Run) -> None:
    serve(run, "w4a16", str(MODELS / "Hy3-W4A16"), option(run, "w4a16", "kv-cache-memory-bytes"), "modelopt_fp4")


def ratio(run: Run, number: int = 1, pairs: int = 3) -> None:
    """Both servers at once, asked in turn: rendered, typed, typed, rendered, ..."""
    phase, checkpoint = f"ratio{number}", str(MODELS / "Hy3-NVFP4")
    with run.server("pool", f"{phase}-rendered") as rendered, run.server("typed", f"{phase}-typed") as typed:
        servers = {"rendered": rendered, "typed": typed}
        ready = {name: server.wait(START_SECONDS) for name, server in servers.items()}
        run.note(phase, ready_s=ready)
        run.must(phase, "both serve", None not in ready.values())
        if None in ready.values():
            return
        for server in servers.values():
            bench(server, checkpoint, requests=2)
        runs: dict[str, list[t.Any]] = {"rendered": [], "typed": []}
        for turn in range(pairs):
            for name in ("rendered", "typed") if turn % 2 == 0 else ("typed", "rendered"):
                runs[name].append(bench(servers[name], checkpoint)["run"])
        told = {name: read_facts(clean_lines(server.text)) for name, server in servers.items()}
        run.note(phase, kv={name: one["kv"] for name, one in told.items()})
        run.must(phase, "both say the same of themselves", told["rendered"]["config"] == told["typed"]["config"])
    found = {name: figures(some) for name, some in runs.items()}
    each = {
        name: [statistics.median(filter(None, (request["decode_tps"] for request in one["requests"]))) for one in some]
        for name, some in runs.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(each["rendered"], each["typed"], strict=True)]
    run.note(phase, figures=found, decode_tps=each, ratios=ratios, ratio=statistics.median(ratios))


def turns(run: Run, number: int = 1, pairs: int = 20) -> None:
    """The same without the load generator: one answer from each in turn, many times."""
    phase = f"turns{number}"
    body = {
        **request_body(
            model=MODEL,
            stream=True,
            top=0,
            question="A question",
            max_tokens=TOKENS,
            temperature=0,
            reasoning_effort="no_think",
        ),
        "ignore_eos": True,
        "logprobs": False,
    }
    del body["top_logprobs"]
    with run.server("pool", f"{phase}-rendered") as rendered, run.server("typed", f"{phase}-typed") as typed:
        servers = {"rendered": rendered, "typed": typed}
        ready = {name: server.wait(START_SECONDS) for name, server in servers.items()}
        run.note(phase, ready_s=ready)
        run.must(phase, "both serve", None not in ready.values())
        clients = {name: Client(server.url, key=None, timeout=60) for name, server in servers.items()}
        rates: dict[str, list[t.Any]] = {"rendered": [], "typed": []}
        for turn in range(pairs + 2):
            for name in ("rendered", "typed") if turn % 2 == 0 else ("typed", "rendered"):
                rate = timing(clients[name].chat(body))["decode_tps"]
                if turn >= 2:
                    rates[name].append(rate)
    ratios = [ours / theirs for ours, theirs in zip(rates["rendered"], rates["typed"], strict=True)]
    run.note(phase, decode_tps=rates, ratios=ratios, ratio=statistics.median(ratios))
    run.note(phase, of_medians=statistics.median(rates["rendered"]) / statistics.median(rates["typed"]))


def turns2(run: Run) -> None:
    turns(run, 2)


def reverted(run: Run) -> None:
    answer, again = patch("absent"), patch("absent")
    run.must("reverted", "the module takes the patch out", answer["changed"] is True and again["changed"] is False)
    same = package_file().read_bytes() == Path("/tmp/hy_v3_mtp.original").read_bytes()
    run.must("reverted", "the file is the released one, byte for byte", same)
    crash(run, "reverted")


def raylet(run: Run) -> Server:
    """The one that our unit would start."""
    for directory in ("/var/lib/hy3/ray", "/run/hy3-ray"):
        Path(directory).mkdir(parents=True, exist_ok=True)
    token = Path(run.units["ray"][RAY]["environment"]["RAY_AUTH_TOKEN_PATH"])
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    started = run.server("ray", "raylet", RAY)
    for _second in range(60):
        if "block" in started.text or started.process.poll() is not None:
            break
        time.sleep(1)
    return started


def ray_unpatched(run: Run) -> None:
    """Lines of the ranks come through Ray, and the driver's own do not: twice, as their order is a matter of luck."""
    with raylet(run):
        for number in (1, 2):
            crash(run, f"ray_unpatched{number}", "ray")
            run.save()


def ray(run: Run) -> None:
    """Raylet and driver as on two Sparks, both on this machine."""
    with raylet(run) as one:
        run.note("ray", raylet_ended=one.process.poll())
        serve(run, "ray", str(MODELS / "Hy3-NVFP4"), option(run, "ray", "kv-cache-memory-bytes"), "modelopt_fp4")
        seen = run_module(
            "engine_status",
            ray_python=str(VENV / "bin/python"),
            ray_address="127.0.0.1:6379",
            ray_token_file=run.units["ray"][RAY]["environment"]["RAY_AUTH_TOKEN_PATH"],
        )["ray"]
        run.note("ray", members=seen)
        nodes = seen["nodes"] or [{}]
        run.must("ray", "engine_status finds the one member with one GPU", [one.get("gpus") for one in nodes] == [1])


PHASES: dict[str, t.Callable[[Run], None]] = {
    phase.__name__: phase
    for phase in (machine, unpatched, patched, share, w4a16, ratio, turns, turns2, ray, reverted, ray_unpatched)
}


def main() -> int:
    rendered, out, *phases = sys.argv[1:]
    # The load generator imports the engine, which asks for it.
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    run = Run(Path(rendered), Path(out))
    for phase in phases:
        started = time.monotonic()
        try:
            PHASES[phase](run)
        except (Exception, SystemExit):  # the next phase may still tell something
            run.note(phase, broke=traceback.format_exc()[-3000:])
            run.failed.append(f"{phase} broke")
        run.note(phase, phase_s=round(time.monotonic() - started, 1))
        run.save()
    print("\n".join(["", "FAILED:", *run.failed] if run.failed else ["", "all held"]), flush=True)
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
