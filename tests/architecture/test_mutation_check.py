# SPDX-License-Identifier: Apache-2.0
"""The mutation check stays usable: every pattern still stands in the source, and two mutants are killed."""

import ast
import os
import subprocess
import sys

import pytest

from tests.support.mutation_check import MUTANTS, ROOT, Mutant, mutated_text


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_pattern_still_applies(mutant: Mutant) -> None:
    ast.parse(mutated_text(mutant))  # a mutant that does not compile would be killed by anything
    assert (ROOT / mutant.test).exists()


def test_a_pattern_that_is_gone_is_named() -> None:
    gone = Mutant("gone", "hf_muon/optim/functional.py", "no such line", "", "tests")
    with pytest.raises(ValueError, match="gone: 'no such line' must stand once"):
        mutated_text(gone)


@pytest.mark.slow
def test_mutants_are_killed_and_unbroken_code_is_not() -> None:
    command = [sys.executable, "-m", "tests.support.mutation_check", "order of parts", "AdamW ascends"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=280, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("2 of 2 mutants killed\n")
