# SPDX-License-Identifier: Apache-2.0
"""The prepared speed measurement for one GPU: dry on the CPU everywhere, in earnest where there is a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def measured(tmp_path, *options):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_speed.py"), "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["what"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}


@pytest.mark.slow
def test_everything_but_the_device_runs_dry(tmp_path):
    rows = measured(tmp_path, "--dry-run", "--repeats", "1")
    for shape in ("(32, 32)", "(32, 172)", "(64, 224)"):
        for batch in (1, 8):
            assert rows[f"Newton-Schulz {batch} x {shape}, share of the ceiling"]["value"] > 0
    assert rows["muon: step of 64 tokens"]["value"] > rows["muon: optimizer alone"]["value"] > 0
    assert [row["value"] for row in rows.values()].count("needs a GPU") == 2


@pytest.mark.gpu
def test_no_bound_is_missed_on_the_device(tmp_path):
    rows = measured(tmp_path)
    assert sum(row["passed"] is True for row in rows.values()) == 3
