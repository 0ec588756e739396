# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster with secrets that can be searched for, and with an API that one network may reach.

Needs a lab (`make lab-up`). Leaves a cluster that serves as the inventory says.
"""

from __future__ import annotations

import base64
import http.client
import json
import shlex
import socket
import subprocess
import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import (
    NODES,
    ROOT,
    changed_nothing,
    command_of,
    module,
    on,
    play,
)

KEY = "hy3-sentinel-key-0123456789abcdef"
TOKEN = "hy3SentinelToken0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL"
SECRETS = [text for secret in (KEY, TOKEN) for text in (secret, base64.b64encode(secret.encode()).decode())]

MANAGEMENT = {"spark-1": "198.18.10.1", "spark-2": "198.18.10.2"}
FABRIC = {"spark-1": "198.18.20.1", "spark-2": "198.18.20.2"}
PEER = {"spark-1": "spark-2", "spark-2": "spark-1"}
NODE_MANAGER_PORT, API_PORT = 6380, 8000
# The fewest requests: two to warm up and one that counts.
BENCH = json.dumps({"hy3_bench_workloads": ["one_256"], "hy3_bench_runs": 1})


class Served(t.NamedTuple):
    """The variables of a cluster, what each play on it said, and where they cached facts and wrote reports."""

    variables: tuple[str, str]
    outputs: dict[str, str]
    facts: Path
    reports: Path


def controller_address() -> str:
    """The address from which this machine, the controller, reaches the nodes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((MANAGEMENT["spark-1"], 22))
        return str(probe.getsockname()[0])


def private(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def failed(playbook: str, *options: str) -> str:
    """Output of a playbook, which must fail."""
    done = subprocess.run(
        command_of(playbook, *options), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> t.Iterator[Served]:
    """A cluster with our token and key, served in vain, served, and asked, with all that Ansible can say."""
    directory = tmp_path_factory.mktemp("secrets")
    facts, reports = directory / "facts", directory / "reports"
    settings = {
        "hy3_api_key_file": str(private(directory / "api_key", KEY + "\n")),
        "hy3_api_host": "0.0.0.0",
        "hy3_api_sources": [controller_address() + "/32"],
        "hy3_reports_dir": str(reports),
    }
    variables = ("-e", json.dumps(settings))
    play("stop-hy3")
    for node in NODES:
        on(node, "mkdir -p /etc/hy3; rm -f /etc/hy3/ray_token_lab")
    # Not by a command line: sudo logs those.
    token = private(directory / "token", TOKEN)
    module("spark-1", "copy", f"src={token} dest=/etc/hy3/ray_token_lab owner=hy3 mode=0600")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSIBLE_CACHE_PLUGIN", "jsonfile")
        patch.setenv("ANSIBLE_CACHE_PLUGIN_CONNECTION", str(facts))
        # With both secrets in use. The engine goes on starting, and the next play waits for it.
        verbose = (*variables, "-vvvv", "--diff")
        outputs = {"a start that fails": failed("serve-hy3", *verbose, "-e", "hy3_start_timeout=1")}
        for name in ("serve-hy3", "status-hy3", "doctor-hy3", "bench-hy3"):
            outputs[name] = play(name, *verbose, "-e", BENCH)
        # Our plays gather no facts, so that without this there would be no cache.
        outputs["setup"] = module("sparks", "setup", "gather_subset=all")
    yield Served(variables, outputs, facts, reports)
    for node in NODES:
        on(node, "rm -f /etc/hy3/ray_token_lab")
    play("serve-hy3")


def hits(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


# ---- Where the secrets are not


# What each play must have said, or it has shown nothing.
SAID = {
    "a start that fails": "hy3-serve.service is not ready after",
    "serve-hy3": "-> Paris.",
    "status-hy3": "-> Paris.",
    "doctor-hy3": "Faults: ",
    "bench-hy3": "-bench.html",
    "setup": "ansible_env",
}


@pytest.mark.parametrize(("name", "said"), SAID.items(), ids=SAID)
def test_not_in_the_output(served: Served, name: str, said: str) -> None:
    assert said in served.outputs[name]
    assert name == "setup" or "SSH: EXEC" in served.outputs[name]
    assert hits(served.outputs[name]) == []


def test_not_in_reports_and_fact_caches(served: Served) -> None:
    reports = sorted((file.stem.rpartition("-")[2], file.suffix) for file in served.reports.glob("lab/*"))
    kinds = [("bench", ".html"), *((kind, ".json") for kind in ("bench", "doctor", "serve", "serve", "status"))]
    assert reports == kinds
    serves = sorted(served.reports.glob("lab/*-serve.json"))
    assert [json.loads(file.read_text())["ok"] for file in serves] == [False, True]
    for directory, has in ((served.facts, "_hostname"), (served.reports, "hy3-tiny")):
        texts = {file: file.read_text(errors="replace") for file in directory.rglob("*") if file.is_file()}
        assert [file for file, text in texts.items() if has in text]
        assert [file for file, text in texts.items() if hits(text)] == []


class View(t.NamedTuple):
    """What a user of the node, or a collector of logs, could see, and what it must show lest it show nothing."""

    command: str
    has: tuple[str, ...]
    on_head: tuple[str, ...] = ()


# Parts of the secrets: sudo logs these commands.
PARTS = " ".join(f"-e {secret[4:20]}" for secret in SECRETS)
VIEWS = {
    "journal": View(
        "journalctl --all --output=export --no-pager", ("UNIT=hy3-ray.service",), ("UNIT=hy3-serve.service",)
    ),
    "arguments": View("cat /proc/[0-9]*/cmdline 2>/dev/null", ("/raylet/raylet",), ("--port", "/bin/vllmserve")),
    "units": View(
        "systemctl show hy3-ray hy3-serve hy3-firewall; systemctl cat hy3-ray hy3-serve hy3-firewall",
        ("Id=hy3-ray.service", "# /etc/systemd/system/hy3-ray.service", "RAY_AUTH_TOKEN_PATH=/etc/hy3/ray_token_lab"),
        ("# /etc/systemd/system/hy3-serve.service",),
    ),
    # A program that everybody may read; what the user itself runs.
    "another user": View(
        "cd /; runuser -u nobody -- sh -c 'grep -rsa . "
        "/etc/hy3 /usr/local/lib/hy3 /var/lib/hy3 /run/hy3-ray /run/hy3-serve /proc/self/environ /proc/[0-9]*/environ'",
        ("/usr/local/lib/hy3/roce.py:", "/proc/self/environ:"),
    ),
    "what Ray leaves in files": View(
        f"find /var/lib/hy3/ray -type f; grep -rsahF -e main.cc {PARTS} /var/lib/hy3/ray /tmp /var/log",
        ("/logs/raylet.", "main.cc:"),
    ),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("node", NODES)
def test_not_in_a_view_of_a_node(served: Served, node: str, view: View) -> None:
    seen = on(node, f"{{ {view.command}; }} | tr -cd '[:print:]\\n'")
    wanted = view.has + (view.on_head if node == "spark-1" else ())
    assert [text for text in wanted if text not in seen] == []
    assert hits(seen) == []


@pytest.mark.parametrize(("node", "count"), [("spark-1", 2), ("spark-2", 1)])
def test_where_the_secrets_are(served: Served, node: str, count: int) -> None:
    assert on(node, "stat -c '%a %U %n' /etc/hy3/ray_token_lab").split() == ["600", "hy3", "/etc/hy3/ray_token_lab"]
    assert on(node, "cat /etc/hy3/ray_token_lab") == TOKEN
    names = on(node, "ls /etc/hy3").split()
    assert len({"ray_token_lab", "api_key.env"} & set(names)) == count
    if "api_key.env" in names:
        assert on(node, "stat -c '%a %U' /etc/hy3/api_key.env").split() == ["600", "root"]


def test_second_run_changes_nothing(served: Served) -> None:
    assert changed_nothing(play("serve-hy3", *served.variables))


# ---- The key


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models", None, 401),
        ("/v1/models", "k" * 33, 401),
        ("/v1/models", KEY, 200),
        ("/metrics", None, 401),
        ("/metrics", KEY, 200),
        ("/invocations", None, 401),
        ("/version", None, 401),
        ("/docs", KEY, 404),
        ("/openapi.json", KEY, 404),
        ("/health", None, 200),
        ("/ping", None, 200),
    ],
)
def test_every_route_but_two_wants_the_key(served: Served, path: str, key: str | None, status: int) -> None:
    connection = http.client.HTTPConnection(MANAGEMENT["spark-1"], API_PORT, timeout=20)
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
    assert connection.getresponse().status == status
    connection.close()


# ---- The firewall


def connects(address: str, port: int) -> bool:
    """Whether this machine, the controller, gets a connection over the management network."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def node_connects(node: str, address: str, port: int) -> bool:
    """Whether a node gets a connection."""
    program = f"import socket; socket.create_connection(('{address}', {port}), 2)"
    return on(node, f'python3 -c "{program}" 2>/dev/null && echo yes || echo no').strip() == "yes"


@pytest.mark.parametrize("node", NODES)
def test_table_is_loaded(served: Served, node: str) -> None:
    table = on(node, "nft list table inet hy3_lab")
    assert 'iifname "' in table
    assert f"ip saddr {FABRIC[PEER[node]]} accept" in table
    assert ("chain api" in table) is (node == "spark-1")


@pytest.mark.parametrize("node", NODES)
def test_rays_ports_answer_the_other_node_only(served: Served, node: str) -> None:
    assert node_connects(PEER[node], FABRIC[node], NODE_MANAGER_PORT)
    assert node_connects(node, FABRIC[node], NODE_MANAGER_PORT)
    assert not connects(MANAGEMENT[node], NODE_MANAGER_PORT)
    assert not node_connects(PEER[node], MANAGEMENT[node], NODE_MANAGER_PORT)


def listening(node: str) -> set[int]:
    """The ports on which the engine's user listens on all addresses or on the fabric's."""
    found = set()
    for line in on(node, "ss -Hltne | grep -w uid:$(id -u hy3)").splitlines():
        address, _colon, port = line.split()[3].rpartition(":")
        if address.strip("[]").removeprefix("::ffff:") in ("0.0.0.0", "*", "::", FABRIC[node]):
            found.add(int(port))
    return found


@pytest.mark.parametrize("node", NODES)
def test_no_port_of_the_engine_answers_a_stranger(served: Served, node: str) -> None:
    """Also those that the kernel picked: the rendezvous of the ranks listens on all addresses."""
    before = listening(node)
    assert [port for port in before if 32768 <= port <= 60999], "nothing to prove"
    assert {port for port in before if connects(MANAGEMENT[node], port)} == ({API_PORT} & before)
    silent = {port for port in before - {API_PORT} if not node_connects(PEER[node], FABRIC[node], port)}
    # A worker of Ray's may have ended meanwhile.
    assert silent & listening(node) == set()


def test_api_answers_its_sources_only(served: Served) -> None:
    assert connects(MANAGEMENT["spark-1"], API_PORT)
    assert not node_connects("spark-2", MANAGEMENT["spark-1"], API_PORT)
    assert not node_connects("spark-2", FABRIC["spark-1"], API_PORT)


def test_what_is_not_ours_stays_open(served: Served) -> None:
    for node in NODES:
        assert connects(MANAGEMENT[node], 22)
        assert node_connects(PEER[node], FABRIC[node], 22)
    on("spark-2", "systemd-run --unit=not-ours --uid=nobody python3 -m http.server 45678 --directory /usr/share/doc")
    try:
        on("spark-2", "for try in $(seq 50); do ss -Hltn sport = 45678 | grep -q . && break; sleep 0.1; done")
        assert connects(MANAGEMENT["spark-2"], 45678)
    finally:
        on("spark-2", "systemctl stop not-ours")


def test_flushed_table_comes_back_without_a_restart(served: Served) -> None:
    pids = "systemctl show -p MainPID --value hy3-ray"
    before = on("spark-2", pids)
    on("spark-2", "nft delete table inet hy3_lab")
    play("serve-hy3", *served.variables)
    assert "chain nodes" in on("spark-2", "nft list table inet hy3_lab")
    assert on("spark-2", pids) == before


# ---- The token


def as_engine_user(node: str, arguments: str, *, mode: str = "token", file: str = "/run/join-token") -> str:
    """Output and exit status of a program of the engine's venv: all that it may lack of an engine is the token."""
    script = (
        f"cd /; HOME=/tmp RAY_AUTH_MODE={mode} RAY_AUTH_TOKEN_PATH={file} timeout 60 "
        f"/var/lib/hy3-lab/venv/bin/{arguments} 2>&1; echo status $?"
    )
    on(node, f"umask 077; printf %s {TOKEN[::-1]} >/run/join-token; chown hy3 /run/join-token")
    try:
        return on(node, f"runuser -u hy3 -- sh -c {shlex.quote(script)}")
    finally:
        on(node, "rm -f /run/join-token")


MEMBERS = (
    f"""python -I -c 'import ray; ray.init(address="{FABRIC["spark-1"]}:6379"); print("joined", len(ray.nodes()))'"""
)


@pytest.mark.parametrize(
    ("mode", "file", "joins"),
    [("token", "/etc/hy3/ray_token_lab", True), ("token", "/run/join-token", False), ("disabled", "", False)],
    ids=["the cluster's token", "another token", "no token"],
)
def test_who_may_join(served: Served, mode: str, file: str, joins: bool) -> None:
    seen = as_engine_user("spark-1", MEMBERS, mode=mode, file=file)
    assert ("joined 2" in seen) is joins, seen[-2000:]


def test_worker_with_another_token_stays_outside(served: Served) -> None:
    seen = as_engine_user(
        "spark-2", f"ray start --address {FABRIC['spark-1']}:6379 --node-ip-address {FABRIC['spark-2']}"
    )
    assert "InvalidAuthToken" in seen
    assert "status 0" not in seen
    assert "with 2 GPUs" in play("status-hy3", *served.variables)


# ---- Stop


def test_stop_takes_the_table_away(served: Served) -> None:
    play("stop-hy3")
    for node in NODES:
        assert "hy3_lab" not in on(node, "nft list tables")
    assert changed_nothing(play("stop-hy3"))
