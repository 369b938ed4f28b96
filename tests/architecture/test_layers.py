# SPDX-License-Identifier: Apache-2.0
"""Imports point down only: the contract in pyproject.toml, run as a test so that `pytest` alone shows a breach."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_import_contracts_hold():
    # A process of its own: the linter reconfigures logging for the whole process that calls it.
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 1 kept, 0 broken." in done.stdout
