# SPDX-License-Identifier: Apache-2.0
"""The page about the Trainer: its table is made from the options, its example runs."""

import os
import re
import subprocess
import sys

from tests.support.option_table import PAGE, render, with_table


def test_the_option_table_is_up_to_date():
    text = PAGE.read_text()
    assert with_table(text) == text, "run: python -m tests.support.option_table"
    assert render() in text


def test_the_example_runs(tmp_path):
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    root = str(PAGE.parents[1])
    code = f"import sys; sys.path.insert(0, {root!r})\n" + example
    # What a user's shell has: the command line, run earlier in this process, turns transformers quiet by environment.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRANSFORMERS_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "'muon_lr'" in done.stdout and "hf-muon routing" in done.stderr
