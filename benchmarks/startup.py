# SPDX-License-Identifier: Apache-2.0
"""Time what a user waits for before anything runs: the import, `hf-muon params` and `hf-muon plan` for 4,096 ranks.

Each command runs in a process of its own, in turn, again and again. Beside `params` stands its floor, the import of
torch and of the model class alone. The import of hf_muon is timed inside of processes that already have what it is
used with: transformers' Trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

IMPORT = """
import sys, time
from transformers import Trainer, TrainingArguments
begin = time.perf_counter()
import hf_muon
print(time.perf_counter() - begin)
"""
RUN = "import sys; from hf_muon.cli.app import main; sys.exit(main())"
COMMANDS = {
    "params Qwen2.5-3B": ([sys.executable, "-c", RUN, "params", "Qwen2.5-3B"], 5.0),
    "floor: import torch and Qwen2ForCausalLM": (
        [sys.executable, "-c", "import torch; from transformers import Qwen2ForCausalLM"],
        None,
    ),
    "plan Qwen2.5-3B, 4,096 ranks": (
        [sys.executable, "-c", RUN, "plan", "Qwen2.5-3B", "--world-size", "4096"],
        10.0,
    ),
}


def run(command: list[str]) -> tuple[float, str]:
    """Return the seconds a command takes, and what it prints."""
    begin = time.perf_counter()
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - begin, output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    adds = "import hf_muon, after transformers' Trainer"
    limits = {adds: 0.3} | {name: limit for name, (_, limit) in COMMANDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in limits}
    for _ in range(options.repeats):
        seconds[adds].append(float(run([sys.executable, "-c", IMPORT])[1]))
        for name, (command, _) in COMMANDS.items():
            seconds[name].append(run(command)[0])
    table = Table("what", "median s", "best s", "limit s")
    rows = []
    for name, values in seconds.items():
        row = {"name": name, "seconds": values, "median": statistics.median(values), "limit": limits[name]}
        rows.append(row)
        limit = "-" if limits[name] is None else f"{limits[name]:g}"
        table.add_row(name, f"{row['median']:.2f}", f"{min(values):.2f}", limit)
    Console(width=100).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"load_average": os.getloadavg(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
