# SPDX-License-Identifier: Apache-2.0
"""The prepared check for one GPU: dry on the CPU everywhere, in earnest where there is a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_check(tmp_path, *options):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu_check.py"),
        "--json",
        str(tmp_path / "out.json"),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "out.json").read_text())["rows"]


def test_the_check_passes_dry(tmp_path):
    verdicts = [row["passed"] for row in run_check(tmp_path, "--dry-run") if row["passed"] is not None]
    assert verdicts == [True] * 13  # five of plain Muon, eight of its variants


@pytest.mark.gpu
def test_the_check_passes_on_the_device(tmp_path):
    rows = run_check(tmp_path)
    assert sum(row["passed"] is True for row in rows) == 16
