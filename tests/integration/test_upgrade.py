# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Another engine and the way back, killed and not. Needs `make lab-up`, about 2 GB of disk and a quarter of an hour.

The other engines are environments of their own with a vLLM of their own, another version by its name and one of them
with a wrong answer. What vLLM needs besides they share with the lab's. The order matters: each test leaves what serves
to the next.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
from ansible_collections.sparks.hy3.tests.integration.lab import (
    NODES,
    ROOT,
    changed_nothing,
    command_of,
    kill,
    module,
    on,
    play,
)

OLD = "/var/lib/hy3-lab/venv"
NEXT, WRONG = "/srv/hy3/venv-next", "/srv/hy3/venv-wrong"
UNITS = (("spark-1", "hy3-ray"), ("spark-1", "hy3-serve"), ("spark-2", "hy3-ray"))
WAY_BACK = "/etc/hy3/way-back"
TOKEN = "/etc/hy3/ray_token_lab"

# A venv on its node. Its own site-packages come before those that it shares.
MAKE = f"""
set -e
python3 -m venv --without-pip $NEW
own=$(echo $NEW/lib/python3*/site-packages) shared=$(echo {OLD}/lib/python3*/site-packages)
cp -a $shared/vllm $own/
info=$own/vllm-0.32.1+cpu.dist-info
mkdir $info
sed 's/^Version: .*/Version: 0.32.1+cpu/' $shared/vllm-*+cpu.dist-info/METADATA > $info/METADATA
sed -i "s/'0\\.32\\.0'/'0.32.1'/" $own/vllm/_version.py
echo $shared > $own/shared.pth
for program in vllm ray; do
    sed "1s|.*|#!$NEW/bin/python3|" {OLD}/bin/$program > $NEW/bin/$program
    chmod 755 $NEW/bin/$program
done
"""
# It loads, it is healthy, and it says another word.
BREAK = """
set -e
models=$(echo $NEW/lib/python3*/site-packages/vllm/model_executor/models)
sed -i 's/^        return logits$/        return None if logits is None else logits.roll(1, -1)/' $models/hy_v3.py
grep -q 'logits.roll' $models/hy_v3.py
"""
# Patch P1 is about it.
MTP = "$(echo /srv/hy3/venv-next/lib/python3*/site-packages/vllm/model_executor/models/hy_v3_mtp.py)"


def with_venv(venv: str, **variables: object) -> tuple[str, str]:
    """Options that stand for the edit of the inventory."""
    return "-e", json.dumps({"hy3_venv": venv, **variables})


def show(node: str, unit: str, name: str) -> str:
    return on(node, f"systemctl show {unit} -P {name}").strip()


def starts() -> dict[tuple[str, str], str]:
    return {(node, unit): show(node, unit, "InvocationID") for node, unit in UNITS}


def digests() -> dict[tuple[str, str], str]:
    """What the live main processes carry."""
    script = "tr '\\0' '\\n' </proc/$(systemctl show {} -P MainPID)/environ | grep HY3_DIGEST"
    return {(node, unit): on(node, script.format(unit)).strip() for node, unit in UNITS}


def venvs() -> set[str]:
    """From where the units run."""
    found = {on(node, f"systemctl show {unit} -P ExecStart") for node, unit in UNITS}
    return {match[1] for text in found if (match := re.search(r"argv\[\]=(\S+)/bin/(?:vllm|ray) ", text))}


def tokens() -> set[str]:
    return {on(node, f"sha256sum {TOKEN}; stat -c '%a %U' {TOKEN}") for node in NODES}


def kept() -> list[str]:
    return [node for node in NODES if on(node, f"test -e {WAY_BACK} && echo kept || true").strip()]


def on_one_line(output: str) -> str:
    """Ansible breaks long messages."""
    return " ".join(output.split())


def refused(*options: str) -> str:
    """What an upgrade says that fails."""
    done = subprocess.run(
        command_of("upgrade-hy3", *options),
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode != 0, output[-4000:]
    assert "Traceback" not in output
    return on_one_line(output)


def report() -> dict[str, object]:
    path = max((ROOT / "reports/lab").glob("*-upgrade.json"), key=lambda path: path.stat().st_mtime_ns)
    found: dict[str, object] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[None]:
    """Both other engines on each node, unpatched, beside the one that serves."""
    for node in NODES:
        on(node, f"rm -rf {NEXT} {WRONG} {WAY_BACK}")
        for venv in (NEXT, WRONG):
            on(node, f"NEW={venv}; {MAKE}")
            module(node, "sparks.hy3.engine_patch", f"venv={venv} patches=P1 state=absent")
        on(node, f"NEW={WRONG}; {BREAK}")
    play("serve-hy3")
    yield
    play("serve-hy3")
    for node in NODES:
        on(node, f"rm -rf {NEXT} {WRONG}")


def test_check_mode_says_what_would_happen() -> None:
    before = starts()
    output = on_one_line(play("upgrade-hy3", "--check", "--diff", *with_venv(NEXT)))
    assert f"From {OLD} (vllm 0.32.0" in output
    assert f"to {NEXT} (vllm 0.32.1+cpu, ray " in output
    assert "A run would stop what serves" in output
    assert 'prefix="lm_head",' in output
    assert (starts(), kept()) == (before, [])


PACKAGES = {"hy3_engine_packages": ["vllm==9.9"]}
# Variables, and what is refused while the old engine serves.
REFUSED: dict[str, tuple[tuple[str, str], str]] = {
    "into the one that serves": (
        with_venv(OLD, **PACKAGES),
        f"hy3_venv is {OLD}, from which the engine on spark-1 was started, and installing vllm==9.9 there would leave "
        f"nothing to go back to; set hy3_venv to another path, for instance {OLD}-vllm-9.9.",
    ),
    "an option that it does not take": (
        with_venv(NEXT, hy3_engine_args={"no-such-option": 1}),
        "has --no-such-option 1, and the parser of vllm 0.32.1+cpu does not have it",
    ),
    "an environment that is not there": (
        with_venv("/nowhere"),
        "hy3_venv is /nowhere, which on spark-1 has no bin/python that user hy3 can run;",
    ),
    "another checkpoint": (
        with_venv(NEXT, hy3_checkpoint_dir="/srv/hy3/models/other"),
        "change one thing at a time: run serve_hy3 with the old engine first.",
    ),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_stops(options: tuple[str, str], sentence: str) -> None:
    before = starts()
    on("spark-1", "cp -a /srv/hy3/models/Hy3-tiny /srv/hy3/models/other; echo >> /srv/hy3/models/other/config.json")
    try:
        assert sentence in refused(*options)
    finally:
        on("spark-1", "rm -rf /srv/hy3/models/other")
    assert starts() == before


def test_nodes_that_differ_are_refused_before_anything_stops() -> None:
    before = starts()
    on("spark-2", f"cp -a {MTP} /tmp/mtp.py; echo '# of another build' >> {MTP}")
    try:
        text = refused(*with_venv(NEXT))
    finally:
        module("spark-2", "sparks.hy3.engine_patch", f"venv={NEXT} patches=P1 state=absent")
        on("spark-2", f"cp -a /tmp/mtp.py {MTP}; rm /tmp/mtp.py")
    assert "spark-2 has another vllm/model_executor/models/hy_v3_mtp.py than spark-1" in text
    assert starts() == before


def test_a_wrong_answer_goes_back_to_the_old_digest() -> None:
    before, secrets = digests(), tokens()
    text = refused(*with_venv(WRONG))
    assert f"The upgrade from {OLD} to {WRONG} failed in 'Ask a question' on spark-1:" in text
    assert (
        f"{OLD} serves, with its old digest, and the inventory still names {WRONG}, which the next serve_hy3 would "
        f"start; set hy3_venv back to {OLD}, or mend {WRONG} and run upgrade_hy3 again."
    ) in text
    assert (digests(), venvs(), tokens(), kept()) == (before, {OLD}, secrets, [])
    found = report()
    assert (found["ok"], found["healthy"]) == (False, True)
    assert "-> Paris." in play("status-hy3")
    assert changed_nothing(play("serve-hy3"))
    assert digests() == before


def test_killed_when_the_old_engine_had_stopped() -> None:
    """The next upgrade still goes back to it."""
    before = digests()
    kill(
        command_of("upgrade-hy3", *with_venv(WRONG)),
        at=r"^TASK \[sparks\.hy3\.ray_cluster : Make the directory of vLLM's own settings",
    )
    assert {show(node, unit, "ActiveState") for node, unit in UNITS} == {"inactive"}
    assert kept() == list(NODES)
    text = refused(*with_venv(WRONG))
    assert f"An upgrade that did not end is gone on with: from {OLD} (vllm 0.32.0" in text
    assert f"{OLD} serves, with its old digest" in text
    assert (digests(), kept()) == (before, [])
    assert changed_nothing(play("serve-hy3"))


def test_killed_while_the_new_engine_starts() -> None:
    """The play that everybody knows converges, and leaves nothing to go back to."""
    kill(command_of("upgrade-hy3", *with_venv(NEXT)), at=r"^TASK \[sparks\.hy3\.serve_unit : Wait until it answers")
    assert kept() == list(NODES)
    assert "-> Paris." in play("serve-hy3", *with_venv(NEXT))
    assert (venvs(), kept()) == ({NEXT}, [])
    assert changed_nothing(play("serve-hy3", *with_venv(NEXT)))
    # Back, by an upgrade as well.
    assert f"Hy3 is served from {OLD}." in on_one_line(play("upgrade-hy3", *with_venv(OLD)))
    assert venvs() == {OLD}


def test_upgrade() -> None:
    before, secrets = digests(), tokens()
    output = on_one_line(play("upgrade-hy3", *with_venv(NEXT)))
    assert f"Hy3 is served from {NEXT}. What served before, {OLD}, stays on every node and holds" in output
    assert f"-m ansible.builtin.file -a 'path={OLD} state=absent'" in output
    assert "-> Paris." in output
    after = digests()
    assert not set(after.values()) & set(before.values())
    assert (venvs(), tokens(), kept()) == ({NEXT}, secrets, [])
    for node in NODES:
        assert 'prefix="lm_head",' in on(node, f"cat {MTP}")

    for again in ("upgrade-hy3", "serve-hy3"):
        assert changed_nothing(play(again, *with_venv(NEXT)))
    assert digests() == after
