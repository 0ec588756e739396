# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each recipe in containers: what the units run there, against the same tables that hold without one.

No container engine runs here. Where docker's client is installed, it reads the words for a stand-in of its daemon.
"""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.tests.unit.plugins.module_utils.docker_daemon import DOCKER, created
from ansible_collections.sparks.hy3.tests.unit.roles import test_seed_000, test_seed_001, test_seed_002, test_seed_003
from ansible_collections.sparks.hy3.tests.unit.roles.golden import RAY, SERVE, Golden, Rendered, Table
from ansible_collections.sparks.hy3.tests.unit.roles.render import render_units
from ansible_collections.sparks.hy3.tests.unit.roles.unit_file import read_environment, split_words

IMAGE = f"registry.example/hy3@sha256:{'a' * 64}"
PREFIX = "/var/lib/hy3/images/0123456789ab-00000000"
SITE = "/usr/local/lib/python3.12/dist-packages"
PATCHED = "vllm/model_executor/models/hy_v3_mtp.py"
FACTS: dict[str, t.Any] = {
    "hy3_container": {
        "program": "/usr/bin/docker",
        "image": IMAGE,
        "site": SITE,
        "prefix": PREFIX,
        "copies": f"{PREFIX}/lib/python3.12/site-packages",
        "package_path": f"{PREFIX}/lib/python3.12/site-packages/vllm",
        "copied": True,
    },
    "hy3_patches": {
        "digest": "1" * 64,
        "patches": [
            {"id": "P1", "file": PATCHED, "state": "applied"},
            {"id": "P3", "file": "vllm/model_executor/layers/vocab_parallel_embedding.py", "state": "defect"},
        ],
    },
}
# What a unit's user brings, and an image does not know by its number.
HOME: Table = {"HOME": "/var/cache/hy3", "USER": "hy3", "LOGNAME": "hy3", "HF_HOME": "/var/cache/hy3/huggingface"}


class Contained(Rendered):
    """Units whose commands run in containers, read as if they did not."""

    def words(self, node: str, name: str) -> tuple[list[str], list[str]]:
        """The options of `docker run`, and the image with what follows."""
        argv = super().argv(node, name)
        assert argv[:2] == ["+/usr/bin/docker", "run"]
        at = argv.index(IMAGE)
        return argv[2:at], argv[at:]

    def argv(self, node: str, name: str) -> list[str]:
        options, (_image, *rest) = self.words(node, name)
        assert options[-2] == "--entrypoint"
        program = {"python3": "python"}.get(options[-1], options[-1])
        return [f"/opt/hy3/venv/bin/{program}", *rest]

    def environment(self, node: str, name: str) -> Table:
        options, _rest = self.words(node, name)
        given = [options[at + 1] for at, word in enumerate(options) if word == "--env"]
        assert given.pop(given.index("HY3_DIGEST")) == "HY3_DIGEST"
        found = dict(pair.split("=", 1) for pair in given)
        assert HOME.items() <= found.items()
        assert "PATH" not in found, "an image has its own"
        client = read_environment(self.unit(node, name)["Service.Environment"])
        assert client.pop("HOME") == "/root", "else root's client would read the settings of the engine's user"
        assert client.keys() == {"HY3_DIGEST"}
        venv = "/opt/hy3/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        hashes = {"HY3_DIGEST": "SHA256"} | ({"HY3_CHECKPOINT": "SHA256"} if "HY3_CHECKPOINT" in found else {})
        return {key: value for key, value in found.items() if key not in HOME} | hashes | {"PATH": venv}

    def before(self, node: str, name: str) -> list[list[str]]:
        *rest, remove = super().before(node, name)
        assert remove == self.after(node, name)
        assert remove[:2] == ["+/bin/sh", "-c"]
        return rest

    def after(self, node: str, name: str) -> list[str]:
        (line,) = self.unit(node, name)["Service.ExecStopPost"]
        return split_words(line, command=True)

    def settings(self, node: str, name: str) -> Table:
        found = super().settings(node, name)
        if not name.endswith(".service"):
            return found
        unit = name.removesuffix(".service")
        assert found.pop("Service.CacheDirectory") == "hy3"
        assert found.pop("Service.ExecStop") == f"+/usr/bin/docker stop -t 50 {unit}"
        del found["Service.ExecStopPost"]
        for key in ("Unit.BindsTo", "Unit.After"):
            assert found[key].endswith(" docker.service")
            found[key] = found[key].removesuffix(" docker.service")
        return found


class InContainer(Golden):
    """The tests of a recipe, with `hy3_launch: docker`."""

    packages = PREFIX
    variables: t.ClassVar[dict[str, t.Any]] = {
        "hy3_launch": "docker",
        "hy3_image": IMAGE,
        "hy3_engine_packages": [],  # which some inventories have
    }

    @classmethod
    def render(cls, root: Path, nodes: dict[str, t.Any]) -> Rendered:
        owned = {name: {**facts, "owner": "1001:1002"} for name, facts in nodes.items()}
        done = render_units(root, owned, inventory=cls.inventory, more=FACTS, **cls.variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return Contained(root)

    def test_only_ranks_get_the_fabric(self, rendered: Contained) -> None:
        for node, unit in self.units:
            options, _rest = rendered.words(node, f"{unit}.service")
            ranks = unit == self.ranks
            assert (f"/run/{unit}/fabric.env" in options) is ranks, (node, unit)
            assert ("/dev/infiniband" in options) is ranks, (node, unit)

    def test_the_cap_is_the_containers(self, rendered: Contained) -> None:
        for node, unit in self.units:
            options, _rest = rendered.words(node, f"{unit}.service")
            cap = rendered.settings(node, f"{unit}.service")["Service.MemoryMax"]
            size = str(int(cap.removesuffix("G")) * 1024**3) if cap.endswith("G") else cap
            assert options[options.index("--memory") + 1] == size, (node, unit)
            assert options[options.index("--memory-swap") + 1] == size, (node, unit)
            assert options[options.index("--cgroup-parent") + 1] == "hy3.slice", (node, unit)

    @pytest.mark.skipif(DOCKER is None, reason="docker's client is not installed here")
    def test_docker_understands_it(self, rendered: Contained, tmp_path: Path) -> None:
        for node, unit in self.units:
            options, rest = rendered.words(node, f"{unit}.service")
            (tmp_path / "fabric.env").write_text("NCCL_IB_GID_INDEX=3\n")
            words = [str(tmp_path / "fabric.env") if word.endswith("/fabric.env") else word for word in options]
            asked = created(["docker", "run", *words, *rest], tmp_path, {"HY3_DIGEST": "0" * 64})
            host = asked["HostConfig"]
            assert (asked["name"], asked["Image"], asked["Cmd"]) == (unit, IMAGE, rest[1:])
            assert (asked["User"], asked["WorkingDir"]) == ("1001:1002", "/")
            assert (host["CgroupParent"], host["AutoRemove"], host["Privileged"]) == ("hy3.slice", True, False)
            assert (host["NetworkMode"], host["IpcMode"], host["PidMode"]) == ("host", "host", "host")
            assert host["DeviceRequests"][0] | {"Options": {}} == {
                **{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}
            }
            assert {"Name": "memlock", "Hard": -1, "Soft": -1} in host["Ulimits"]
            environment = dict(pair.split("=", 1) for pair in asked["Env"])
            assert environment["HY3_DIGEST"] == "0" * 64
            assert ("NCCL_IB_GID_INDEX" in environment) is (unit == self.ranks)


class TestLibertai(InContainer, test_seed_000.TestSeed):
    def test_a_patched_file_lies_over_the_images(self, rendered: Contained) -> None:
        """And one that is not patched does not."""
        copies = FACTS["hy3_container"]["copies"]
        for node, unit in self.units:
            options, _rest = rendered.words(node, f"{unit}.service")
            over = [word for word in options if word.startswith(f"type=bind,source={PREFIX}")]
            assert over == [f"type=bind,source={copies}/{PATCHED},target={SITE}/{PATCHED},readonly"]

    def test_driver_and_raylet_share_what_they_meet_in(self, rendered: Contained) -> None:
        for unit in (RAY, SERVE):
            options, _rest = rendered.words("spark-1", f"{unit}.service")
            for place in ("/var/lib/hy3/ray", "/tmp", "/var/cache/hy3", f"/run/{unit}"):
                assert f"type=bind,source={place},target={place}" in options, (unit, place)
            for place in (self.model, "/etc/hy3/vllm", "/etc/hy3/ray_token_sparks"):
                assert f"type=bind,source={place},target={place},readonly" in options, (unit, place)


class TestKodelow(InContainer, test_seed_001.TestSeed):
    pass


class TestMarianbusoi(InContainer, test_seed_002.TestSeed):
    pass


class TestVroomfondel(InContainer, test_seed_003.TestSeed):
    pass


# ---- With a key, of another image, and without one

SENTINEL = "sentinel-0123456789-abcdef"
NODES = {name: {"fabric_env": {}, "owner": "1001:1002"} for name in ("spark-1", "spark-2")}


def digest(rendered: Rendered, unit: str) -> str:
    return read_environment(rendered.unit("spark-1", f"{unit}.service")["Service.Environment"])["HY3_DIGEST"]


def test_a_key_stays_in_its_file(tmp_path: Path) -> None:
    """Not in the client's environment nor in the container's settings, which `docker inspect` shows."""
    key = tmp_path / "api_key"
    key.write_text(f"{SENTINEL}\n")
    key.chmod(0o600)
    root = tmp_path / "units"
    root.mkdir()
    done = render_units(root, NODES, more=FACTS, hy3_launch="docker", hy3_api_key_file=str(key))
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = Contained(root)
    options, (_image, *rest) = rendered.words("spark-1", f"{SERVE}.service")
    assert options[-2:] == ["--entrypoint", "python3"]
    assert rest[:2] == ["-I", "-c"]
    assert rest[3:6] == ["/etc/hy3/api_key.env", "vllm", "serve"]
    assert "type=bind,source=/etc/hy3/api_key.env,target=/etc/hy3/api_key.env,readonly" in options
    assert "type=bind,source=/usr/local/lib/hy3/api,target=/usr/local/lib/hy3/api,readonly" in options
    assert "--env-file" not in options
    assert "Service.EnvironmentFile" not in rendered.unit("spark-1", f"{SERVE}.service")
    assert [file for file in root.rglob("*") if file.is_file() and SENTINEL in file.read_text(errors="replace")] == []

    other = tmp_path / "other"
    other.mkdir()
    image = FACTS | {"hy3_container": FACTS["hy3_container"] | {"image": IMAGE.replace("a" * 64, "b" * 64)}}
    done = render_units(other, NODES, more=image, hy3_launch="docker", hy3_api_key_file=str(key))
    assert done.returncode == 0, done.stdout + done.stderr
    for unit in (RAY, SERVE):
        assert digest(rendered, unit) != digest(Rendered(other), unit), "another image means a restart"


def test_a_profile_that_names_no_image_needs_one(tmp_path: Path) -> None:
    done = render_units(tmp_path, NODES, inventory="sparks-w4a16", more=FACTS, hy3_launch="docker")
    assert done.returncode != 0
    sentence = (
        "hy3_launch is docker, and profile kodelow_w4a16_tp2 names no image; set hy3_image to one of vllm that every "
        "node has. hy3_engine_packages is vllm==0.24.0, ray==2.60.0, and hy3_launch is docker, whose image pip leaves "
        "alone; leave it empty, and make an image that has them, as docs/container.md says."
    )
    assert sentence in " ".join(done.stdout.split())
