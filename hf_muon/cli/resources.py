# SPDX-License-Identifier: Apache-2.0
"""Find what ships beside the package: recipes, their data, the evaluation metrics.

A checkout keeps `recipes/` and `evaluation/` at the top of the tree; a wheel holds them inside `hf_muon`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]


def _shipped(name: str) -> Path:
    # The checkout comes first: an editable install may leave an older copy inside site-packages.
    for root in (PACKAGE.parent, PACKAGE):
        candidate = root / name
        if candidate.is_dir() and (root == PACKAGE or (root / "pyproject.toml").is_file()):
            return candidate
    raise FileNotFoundError(f"{name}/ is missing from this installation of hf-muon. Install it again.")


def recipes_dir() -> Path:
    """Return the folder of the shipped recipes."""
    return _shipped("recipes")


def load_evaluation(module: str) -> ModuleType:
    """Import `evaluation.<module>` under the name `hf_muon.evaluation.<module>`, wherever it lies."""
    package = "hf_muon.evaluation"
    if package not in sys.modules:
        folder = _shipped("evaluation")
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise FileNotFoundError("evaluation/ is missing from this installation of hf-muon. Install it again.")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[package] = loaded
        spec.loader.exec_module(loaded)
    return importlib.import_module(f"{package}.{module}")
