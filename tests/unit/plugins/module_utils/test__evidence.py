# Copyright (c) The sparks.hy3 contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.sparks.hy3.plugins.module_utils._evidence import (
    logs_since,
    read_boot,
    read_memory,
    stalled_share,
)

PRESSURE = "some avg10=0.00 avg60=1.50 avg300=0.10 total=1\nfull avg10=0.00 avg60=61.10 avg300=0.00 total=9\n"


def write(directory: Path, name: str, age: float, text: str) -> None:
    path = directory / name
    path.write_text(text)
    os.utime(path, (10000 - age, 10000 - age))


def test_logs_of_this_start_and_of_the_newest_job(tmp_path: Path) -> None:
    write(tmp_path, "worker-aa-01000000-11.err", 500, "an earlier start")
    write(tmp_path, "worker-aa-02000000-12.err", 20, "rank 0")
    write(tmp_path, "worker-bb-02000000-13.out", 10, "rank 1")
    write(tmp_path, "worker-cc-ffffffff-14.out", 5, "an idle worker")
    write(tmp_path, "raylet.out", 15, "raylet")
    write(tmp_path, "nccl.77.log", 30, "nccl")
    write(tmp_path, "nccl.66.log", 5000, "nccl of yesterday")
    write(tmp_path, "something else", 1, "x")
    found = logs_since([str(tmp_path)], since=9000, now=10000)
    assert [lines[0].text for lines in found] == ["an idle worker", "rank 1", "raylet", "rank 0", "nccl"]
    assert len(logs_since([str(tmp_path)], since=None, now=10000)) == 6


def test_lines_without_times_are_as_old_as_their_file(tmp_path: Path) -> None:
    write(tmp_path, "nccl.77.log", 30, "no time\n[1970-01-02 00:00:00] one\nof it\n")
    [lines] = logs_since([str(tmp_path)], since=0, now=10000)
    assert lines[0].time == 9970
    assert lines[1].time == lines[2].time != 9970


def test_a_file_and_places_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path, "serve.log", 1, "x\r\ny")
    places = [str(tmp_path / "serve.log"), str(tmp_path / "none"), "/proc/1/mem\0", str(tmp_path / "serve.log/below")]
    assert [[line.text for line in lines] for lines in logs_since(places, since=0, now=10000)] == [["x", "y"]]


@pytest.mark.parametrize(("text", "share"), [(PRESSURE, 61.1), ("", None), ("full avg10=0 avg60=1.2.3", None)])
def test_pressure(text: str, share: float | None) -> None:
    assert stalled_share(text) == share


def test_memory_and_boot_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 10 kB\nSwapTotal: 8 kB\nSwapFree: 2 kB\n")
    assert read_memory(tmp_path) == {
        "total": 102400,
        "available": 10240,
        "swap_total": 8192,
        "swap_free": 2048,
        "pressure": None,
    }
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/memory").write_text(PRESSURE)
    assert read_memory(tmp_path)["pressure"] == 61.1
    assert read_boot(tmp_path) is None
    (tmp_path / "stat").write_text("cpu 1\nbtime 1796000000\n")
    assert read_boot(tmp_path) == 1796000000
