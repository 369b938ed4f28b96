# SPDX-License-Identifier: Apache-2.0
"""What the wheel ships beside the code: recipes with their data, evaluation, the report's files, configurations."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_wheel_ships_recipes_evaluation_and_the_report(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "recipes/demo.yaml",
        "recipes/addition.yaml",
        "recipes/data/gsm8k/LICENSE",
        "recipes/data/gsm8k/train.jsonl",
        "recipes/data/mmlu/LICENSE",
        "recipes/data/mmlu/train.csv",
        "recipes/data/mbpp/README.md",
        "recipes/gsm8k.yaml",
        "cli/report/prediction.html",
        "evaluation/exact_match.py",
        "evaluation/sandbox/guard.py",
        "cli/report/template.html",
        "cli/report/report.css",
        "cli/report/report.js",
        "planning/configs/Qwen2.5-3B.json",
    ):
        assert f"hf_muon/{name}" in names
