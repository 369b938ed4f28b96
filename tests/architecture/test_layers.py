# SPDX-License-Identifier: Apache-2.0
"""Imports point down only: the contract in pyproject.toml, run as a test so that `pytest` alone shows a breach."""

from pathlib import Path

from importlinter import cli

ROOT = Path(__file__).resolve().parents[2]


def test_import_contracts_hold(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    assert cli.lint_imports(config_filename="pyproject.toml") == cli.EXIT_STATUS_SUCCESS
