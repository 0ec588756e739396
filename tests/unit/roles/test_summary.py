# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the summary says beside the author's figures, of which one profile has all, one some and one none."""

from __future__ import annotations

import jinja2
import pytest
import yaml
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT

# As Ansible reads a template.
TEMPLATE = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False).from_string(  # noqa: S701 - no HTML
    (ROOT / "roles/report/templates/summary.txt.j2").read_text()
)
REPORT = {
    "ok": True,
    "check_mode": False,
    "healthy": True,
    "endpoint": "http://127.0.0.1:8000/v1",
    "model": "hy3",
    "profile": "x",
    "notice": None,
    "smoke": {},
    "start": {},
    "kv": {"tokens": 175552, "max_concurrency": 1.34, "request_tokens": 131072},
    "predicted": {"weights": None},
    "bench": None,
    "metrics": {"accepted": 61.0, "drafted": 100.0, "acceptance": 0.61},
    "ray": [],
    "nodes": {},
}
PLAN = {"head": {"name": "spark-1"}, "api": {"key_file": ""}, "smoke": {"question": "?"}}

# Profile, what stands behind the pool and behind the acceptance.
PUBLISHED: dict[str, tuple[str, str]] = {
    "libertai_nvfp4_tp2": (" (published: 176,784, 1.08x)", " (published: 61.3 %)"),
    "kodelow_w4a16_tp2": (" (published: 180,000)", " (published: 62.0 to 76.0 %)"),
    "marianbusoi_nvfp4_fp8_tp3": ("", ""),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    profile = yaml.safe_load((ROOT / f"roles/profile/files/profiles/{name}.yml").read_text())
    text = TEMPLATE.render(
        hy3_report=REPORT | {"expected": profile["expected"]},
        hy3_plan=PLAN,
        __hy3_report_file="x",
        __hy3_report_status={},
    )
    pool, drafts = PUBLISHED[name]
    lines = text.splitlines()
    assert f"  KV pool  175,552 tokens, 1.34x at 131,072 tokens{pool}" in lines
    assert f"  MTP      61 of 100 drafted tokens accepted, 61.0 %{drafts}" in lines


def test_a_profile_that_is_work_in_progress_says_so() -> None:
    notice = yaml.safe_load((ROOT / "roles/profile/files/profiles/vroomfondel_w4a4_tp4.yml").read_text())["notice"]
    report = REPORT | {"expected": {}, "notice": notice}
    text = TEMPLATE.render(hy3_report=report, hy3_plan=PLAN, __hy3_report_file="x", __hy3_report_status={})
    assert f"  Note     {notice}" in text.splitlines()
    assert "work in progress" in notice


def test_what_there_is_to_say_of_a_node_s_units() -> None:
    unit = {"load_state": "loaded", "active_state": "activating", "remarks": ["hy3-ray.service waits: x.", "And y."]}
    node = {"address": "10.77.0.2", "gid_index": None, "unreachable": False, "memory": None}
    nodes = {"spark-2": node | {"units": {"hy3-ray.service": unit}}, "spark-3": node | {"units": {}}}
    text = TEMPLATE.render(
        hy3_report=REPORT | {"expected": {}, "nodes": nodes},
        hy3_plan=PLAN,
        __hy3_report_file="x",
        __hy3_report_status={},
    )
    at = text.splitlines().index("  spark-2  10.77.0.2  hy3-ray.service activating")
    assert text.splitlines()[at + 1 : at + 4] == ["    hy3-ray.service waits: x.", "    And y.", "  spark-3  10.77.0.2"]
