# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Role bench with runs recorded from a real load generator: its verdicts, its summary and its page."""

from __future__ import annotations

import json
import subprocess
import typing as t
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from ansible_collections.sparks.hy3.plugins.module_utils._bench import read_result
from ansible_collections.sparks.hy3.plugins.module_utils._metrics import read_metrics
from ansible_collections.sparks.hy3.tests.unit.roles.render import ROOT, run_playbook

RECORDED = json.loads((ROOT / "tests/unit/plugins/module_utils/vllm_bench_serve.json").read_text())
GIB = 1073741824
WORKLOADS = {
    one["id"]: one for one in yaml.safe_load((ROOT / "roles/bench/vars/main.yml").read_text())["__hy3_bench_workloads"]
}
UNIT = {"load_state": "loaded", "active_state": "active", "remarks": []}


def metrics(drafted: int, accepted: int) -> dict[str, t.Any]:
    page = f"""\
vllm:spec_decode_num_drafts_total {drafted}
vllm:spec_decode_num_draft_tokens_total {drafted}
vllm:spec_decode_num_accepted_tokens_total {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}
vllm:num_requests_running 0
"""
    return dict(read_metrics(page))


def slower(recorded: t.Mapping[str, t.Any], times: float) -> dict[str, t.Any]:
    """The recorded result of a machine that takes so many times as long."""
    return {
        **recorded,
        "duration": recorded["duration"] * times,
        "output_throughput": recorded["output_throughput"] / times,
        "ttfts": [times * ttft for ttft in recorded["ttfts"]],
        "itls": [[times * gap for gap in gaps] for gaps in recorded["itls"]],
    }


def result(workload: str, number: int, run: t.Mapping[str, t.Any], **changes: t.Any) -> dict[str, t.Any]:
    one = {**WORKLOADS.get(workload, {**WORKLOADS["one_256"], "id": workload, "streams": 2}), "sized": []}
    return {
        "item": [one | changes, number],
        "run": read_result(json.dumps(run)),
        "metrics_before": metrics(1000 * number, 613 * number),
        "metrics_after": metrics(1000 * (number + 1), 613 * (number + 1)),
    }


# As fast as LibertAI's: 228 tokens per second were recorded for one stream. The warm-up is far off, and must not count.
LIKE_A_SPARK = 11.5
RESULTS = [
    result("one_256", 0, slower(RECORDED["one_256"], 90)),
    *(result("one_256", number, slower(RECORDED["one_256"], LIKE_A_SPARK + number / 10)) for number in (1, 2, 3)),
    result("streams_2", 1, slower(RECORDED["streams_2"], 12), sized=["2 streams instead of <6>"]),
]
STATUS = {
    "units": {"hy3-ray.service": UNIT},
    "memory": {"total": int(121.69 * GIB), "available": 12 * GIB},
    "log": {"version": "0.24.0", "kv": {"tokens": 176784, "max_concurrency": 1.08, "request_tokens": 163840}},
    "metrics": metrics(5000, 3065),
    "failure": None,
}
SMOKE = {"ok": True, "text": "Paris.", "finish_reason": "stop", "usage": {"total_tokens": 11}}
SERVED = {"time": "2026-12-01T01:00:00Z", "predicted": {"kv_tokens": 171000, "weights": 90 * GIB}}


class Page(HTMLParser):
    """Tags, what they load, and the words between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += f" {data.strip()}"


def bench(home: Path, **variables: t.Any) -> tuple[subprocess.CompletedProcess[str], dict[str, t.Any], str]:
    reports = home / "reports/sparks"
    reports.mkdir(parents=True)
    (reports / "2026-12-01T010000Z-serve.json").write_text(json.dumps(SERVED))
    (reports / "2026-11-01T010000Z-serve.json").write_text(json.dumps({"predicted": None}))
    given = {
        "bench_results": RESULTS,
        "bench_status": STATUS,
        "bench_smoke": SMOKE,
        "hy3_reports_dir": str(home / "reports"),
        "hy3_profile": "libertai_nvfp4_tp2",
    }
    done = run_playbook("bench", home, {**given, **variables})
    report, page = list(reports.glob("*-bench.json")), list(reports.glob("*-bench.html"))
    return done, json.loads(report[0].read_text()) if report else {}, page[0].read_text() if page else ""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, t.Any], str]:
    done, report, page = bench(tmp_path_factory.mktemp("bench"))
    assert done.returncode == 0, done.stdout
    return done.stdout, report, page


def test_the_report_has_all_figures(measured: tuple[str, dict[str, t.Any], str]) -> None:
    one, two = measured[1]["bench"]["workloads"]
    assert (one["id"], len(one["runs"]), one["failed"], one["shortest"]) == ("one_256", 3, 0, 256)
    rate = 1000 / RECORDED["one_256"]["mean_tpot_ms"]
    assert one["decode_tps"] == {
        "median": pytest.approx(rate / 11.7, rel=1e-3),
        "min": pytest.approx(rate / 11.8, rel=1e-3),
        "max": pytest.approx(rate / 11.6, rel=1e-3),
    }
    assert (one["acceptance"]["rate"], one["acceptance"]["per_position"]) == (0.613, [0.613])
    assert (two["id"], two["streams"]) == ("streams_2", 2)


def test_each_published_figure_has_a_verdict(measured: tuple[str, dict[str, t.Any], str]) -> None:
    verdicts = {one["figure"]: one["verdict"] for one in measured[1]["bench"]["verdicts"]}
    assert verdicts == {
        "decode_tokens_per_s": "within",
        "ttft_ms": "above",
        "draft_acceptance": "within",
        "kv_cache_tokens": "within",
        "max_concurrency": "within",
    }


def test_the_summary_is_a_table(measured: tuple[str, dict[str, t.Any], str]) -> None:
    said = measured[0]
    assert "one_256     256  1     496   19.5 (19.3-19.7)    18.8 (18.7-19.0)   61 %" in said
    assert "2 streams instead of <6>" in said
    assert "within: decode_tokens_per_s 19.34 to 19.67 (published: 19.5)" in said
    assert "within: kv_cache_tokens 176,784 (published: 176,784)" in said
    assert "published: single stream, 256 tokens, temperature 0, MTP k=1" in said


def test_the_page_stands_alone(measured: tuple[str, dict[str, t.Any], str]) -> None:
    page = Page(measured[2])
    assert page.tags.count("svg") == 5
    assert (page.loaded, "script" in page.tags, "link" in page.tags) == ([], False, False)
    # Nothing but the name space of SVG looks like an address on the net, and the endpoint's own.
    assert measured[2].count("http") == page.tags.count("svg") + 1
    for words in (
        "vllm 0.24.0",
        *("predicted", "real", "published"),
        *("171,000 tokens", "176,784 tokens", "109.7 of 121.7 GiB", "2 streams instead of <6>"),
    ):
        assert words in page.words


def test_the_page_escapes(measured: tuple[str, dict[str, t.Any], str]) -> None:
    assert "<6>" not in measured[2]


def test_other_arguments_are_not_compared(tmp_path: Path) -> None:
    done, report, page = bench(tmp_path, hy3_engine_args={"max-num-seqs": 6, "moe-backend": None})
    assert done.returncode == 0, done.stdout
    why = {one["why"] for one in report["bench"]["verdicts"]}
    assert why == {"max-num-seqs is 6 and not 2; moe-backend is left out and not marlin"}
    assert "not comparable" in page


def test_a_sick_cluster_is_refused(tmp_path: Path) -> None:
    smoke = {"ok": False, "failed": True, "msg": "The answer is empty"}
    done, report, page = bench(tmp_path, bench_smoke=smoke)
    assert done.returncode != 0
    (failure, *_others) = report["failures"]
    assert failure["msg"] == (
        "http://127.0.0.1:8000 on spark-1 does not answer as a healthy model (The answer is empty), and only a healthy "
        "one is measured; run serve-hy3.yml, or doctor-hy3.yml to see what is wrong."
    )
    assert (report["ok"], report["bench"], page) == (False, None, "")


def test_a_benchmark_of_nothing_is_refused(tmp_path: Path) -> None:
    done, report, _page = bench(tmp_path, hy3_bench_runs=0)
    assert done.returncode != 0
    assert report["failures"][0]["msg"].startswith(
        "hy3_bench_runs is 0 and hy3_bench_streams [], and each number must be"
    )


def test_workloads_are_those_that_a_user_can_choose() -> None:
    specs = yaml.safe_load((ROOT / "roles/profile/meta/argument_specs.yml").read_text())
    choices = specs["argument_specs"]["main"]["options"]["hy3_bench_workloads"]["choices"]
    assert list(WORKLOADS) == choices


@pytest.mark.parametrize(
    "path", sorted((ROOT / "roles/profile/files/profiles").glob("*.yml")), ids=lambda path: path.stem
)
def test_profiles_name_workloads_that_exist(path: Path) -> None:
    profile = yaml.safe_load(path.read_text())
    expected = profile["expected"]
    named = {expected[key] for key in ("workload", "aggregate_workload") if key in expected}
    assert named <= set(WORKLOADS)
    # A constructed checkpoint, which no repository has, drafts right whatever it is asked.
    if "repository" in profile["checkpoint"] and {"decode_tokens_per_s", "ttft_ms", "draft_acceptance"} & set(expected):
        assert "workload" in expected
    if "aggregate_tokens_per_s" in expected:
        assert "aggregate_workload" in expected
