# SPDX-License-Identifier: Apache-2.0
"""The tree itself: sizes, licence lines, where the environment and private names may be touched, public names."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

import hf_muon

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FILES = sorted((ROOT / "hf_muon").rglob("*.py")) + sorted((ROOT / "evaluation").rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
PUBLIC_NAMES = {
    "DMuonPlugin",
    "ownership",
    "dedicate_params",
    "comm_stats",
    "MuonConfig",
    "MuonWithAuxAdam",
    "OptimizerFactory",
    "explain_parameters",
    "newton_schulz",
    "plan",
    "tag_parameters",
}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check():
    assert len(PACKAGE_FILES) > 20
    assert len(TEST_FILES) > 10


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=_name)
def test_files_and_functions_are_short(path):
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("path", PACKAGE_FILES + TEST_FILES, ids=_name)
def test_files_start_with_the_licence_line(path):
    text = path.read_text()
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_the_environment_is_read_only_at_the_edges():
    allowed = {ROOT / "hf_muon" / "_compat.py"}
    for path in PACKAGE_FILES:
        if path in allowed or "cli" in path.relative_to(ROOT).parts or path.is_relative_to(ROOT / "evaluation"):
            continue
        assert not re.search(r"os\.environ|os\.getenv", path.read_text()), _name(path)


def test_private_upstream_names_live_in_compat():
    pattern = re.compile(
        r"^\s*(?:from|import)\s+(?:torch|transformers|accelerate|peft)\b[^\n#]*(?:\._|import\s+\(?\s*_)", re.MULTILINE
    )
    for path in PACKAGE_FILES:
        if not path.name.startswith("_compat"):
            assert not pattern.search(path.read_text()), _name(path)


def test_no_room_is_called_utils():
    vague = {"utils", "helpers", "common", "misc", "manager"}
    for path in PACKAGE_FILES:
        assert not vague & set(path.relative_to(ROOT).with_suffix("").parts), _name(path)


def test_public_names_are_frozen():
    assert set(hf_muon.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(hf_muon, name).__module__.startswith("hf_muon.")


def test_no_path_of_a_machine_is_in_the_tree():
    # Written in pieces so that this file does not find itself.
    pattern = r"(^|[^a-zA-Z_.}/])/" + r"(root|home|opt|wo" + r"rk)/[a-z]"
    found = subprocess.run(
        ["git", "grep", "-nIE", pattern, "--", ".", ":!*.jsonl", ":!*.json"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 1, found.stdout
