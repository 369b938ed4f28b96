# SPDX-License-Identifier: Apache-2.0
"""The faults users of Muon meet, and the tests that hold each one shut. Rewrites the table in docs/field_cases.md.

Run `python -m tests.support.field_cases` after adding a test named `test_case_NN_...`.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "field_cases.md"
CASES = {
    1: "Embeddings under other names (`wte`, `shared`, `embed_in`, `word_embeddings`) routed to Muon",
    2: "A tied head reaches Muon through its alias",
    3: "Batched experts of transformers 5 left to AdamW, or flattened into one matrix",
    4: "Routers, shared-expert gates, depthwise convolutions and state-space parameters treated as hidden matrices",
    5: "Classification heads and patch convolutions on Muon, or a crash",
    6: "`Conv1D` weights are (in, out): the learning-rate rule sees the wrong side",
    7: "A frozen part leaves a group empty: a crash, or other groups on other ranks",
    8: "Flat or sharded parameters: nothing on Muon, silently",
    9: "Biases and norms in no optimizer at all",
    10: "The caller's own groups thrown away",
    11: "Tiny or huge gradients: an epsilon shrinks the update",
    12: "Zero, rank-1, one-row, empty matrices, LoRA at step 0: NaN or noise",
    13: "One infinite gradient poisons momentum and weights",
    14: "A fused QKV projection orthogonalized as one matrix",
    15: "Pure bf16 weights lose small updates",
    16: "A weight-decay error hides under a loose tolerance",
    17: "One scheduler overwrites both learning rates",
    18: "`optim_args` strings: wrong types, dropped zeros, ignored typos",
    19: "Schedulers that need `defaults['lr']`, plateau, polynomial",
    20: "Clipping applied to the orthogonalized update, or to one half only",
    21: "A matrix with fewer rows than ranks",
    22: "A layer unused on one rank, a gradient None on one rank",
    23: "Accumulation runs Newton-Schulz per micro-batch",
    24: "Newton-Schulz on row shards",
    25: "Every replica repeats every Newton-Schulz",
    26: "Parameter objects swapped by Accelerate",
    27: "A fresh optimizer under DCP; a parameter that never had a gradient",
    28: "Momentum in another dtype than the gradient at resume",
    29: "FULL, then SHARDED, other rank counts, an evaluation in between",
    30: "Embedding rows not divisible by the ranks",
    31: "More than eight matrix shapes under `torch.compile`",
    32: "`training_args.bin` opened where hf_muon was never imported",
    33: "A rescaled LoRA pair changes the update",
    34: "A second adapter loaded into a used slot inherits old momentum",
}


def find_tests() -> dict[int, list[str]]:
    """Return, per case, `file::test` of every test function named after it."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_cases?_((?:\d\d_)+)", node.name)):
                for number in match[1].strip("_").split("_"):
                    found.setdefault(int(number), []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def render() -> str:
    """Return the page: a row per case with links to its tests."""
    tests = find_tests()
    rows = ["# Faults users of Muon meet, and the tests that cover them", ""]
    rows += ["Made by `python -m tests.support.field_cases`; a test fails when it is out of date.", ""]
    rows += ["| # | fault | tests |", "|---|---|---|"]
    for number, fault in CASES.items():
        links = [f"[`{t.split('::')[1]}`](../{t.split('::')[0]})" for t in tests.get(number, [])]
        rows.append(f"| {number} | {fault} | {'<br>'.join(links)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    TABLE.write_text(render())
