# SPDX-License-Identifier: Apache-2.0
"""Break each numeric rule of the package, one at a time, and see that a quick unit test notices.

Run `python -m tests.support.mutation_check [NAME ...]`: prints a table, ends with 1 when a mutant survives. Every
mutant is one replacement in a temporary copy of `hf_muon`; the working tree is not touched. A minute or two on two
cores (POSIX: it forks); continuous integration runs two mutants and checks that every pattern still applies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0  # seconds; a mutant that hangs is killed as well, by this

UPDATE = "tests/unit/optim/test_optim_update.py"
VIEWS = "tests/unit/optim/test_optim_views.py"
NONFINITE = "tests/unit/optim/test_optim_nonfinite.py"
ADAMW = "tests/unit/optim/test_optim_adamw.py"
LAYOUT = "tests/unit/param_groups/test_views.py"
HEADS = "tests/unit/param_groups/test_heads.py"
CONVOLUTIONS = "tests/unit/param_groups/test_convolutions.py"
TAGGING = "tests/unit/param_groups/test_tagging.py"
NS = "tests/unit/orthogonalize/test_newton_schulz.py"
INT8 = "tests/unit/optim/test_optim_int8.py"
CONSTRUCTION = "tests/unit/optim/test_optim_construction.py"

FUNCTIONAL = "hf_muon/optim/functional.py"
ADAM = "hf_muon/optim/auxiliary_adam.py"
VIEW = "hf_muon/param_groups/views.py"
NEWTON_SCHULZ = "hf_muon/orthogonalize/newton_schulz.py"
QUANTIZED = "hf_muon/optim/quantized.py"
ITERATION = "hf_muon/orthogonalize/iteration.py"
COEFFICIENTS = "hf_muon/orthogonalize/coefficients.py"


@dataclass(frozen=True)
class Mutant:
    """One broken rule: in `file`, `old` (which must stand there once) becomes `new`; `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    # the update
    Mutant("sign of the step", FUNCTIONAL, "alpha, decay = -options.lr,", "alpha, decay = options.lr,", UPDATE),
    Mutant(
        "decay without lr", FUNCTIONAL, "1.0 - options.lr * options.weight_decay", "1.0 - options.weight_decay", UPDATE
    ),
    Mutant(
        "decay grows",
        FUNCTIONAL,
        "1.0 - options.lr * options.weight_decay",
        "1.0 + options.lr * options.weight_decay",
        UPDATE,
    ),
    Mutant(
        "decay after the step",
        FUNCTIONAL,
        "weight.add_(direction, alpha=alpha)",
        "weight.add_(direction, alpha=alpha * decay)",
        UPDATE,
    ),
    Mutant(
        "momentum weights swapped",
        FUNCTIONAL,
        "momentum.lerp_(grad, 1.0 - options.momentum)",
        "momentum.lerp_(grad, options.momentum)",
        UPDATE,
    ),
    Mutant(
        "momentum without damping",
        FUNCTIONAL,
        "momentum.lerp_(grad, 1.0 - options.momentum)",
        "momentum.mul_(options.momentum).add_(grad)",
        UPDATE,
    ),
    Mutant(
        "nesterov reversed",
        FUNCTIONAL,
        "if options.nesterov else momentum",
        "if not options.nesterov else momentum",
        UPDATE,
    ),
    Mutant(
        "nesterov order",
        FUNCTIONAL,
        "torch.lerp(grad, momentum, options.momentum)",
        "torch.lerp(momentum, grad, options.momentum)",
        UPDATE,
    ),
    Mutant("adjust: smaller side", FUNCTIONAL, "0.2 * math.sqrt(max(m, n))", "0.2 * math.sqrt(min(m, n))", UPDATE),
    Mutant("adjust: another RMS", FUNCTIONAL, "0.2 * math.sqrt(max(m, n))", "0.21 * math.sqrt(max(m, n))", UPDATE),
    Mutant("adjust: ratio upside down", FUNCTIONAL, "max(1.0, m / n)", "max(1.0, n / m)", UPDATE),
    Mutant(
        "adjust: sides swapped",
        FUNCTIONAL,
        "matrix.shape[-2], matrix.shape[-1]))",
        "matrix.shape[-1], matrix.shape[-2]))",
        UPDATE,
    ),
    Mutant("skipped step moves momentum", FUNCTIONAL, "masked_fill_(skip, 0.0)", "masked_fill_(skip, 0.5)", VIEWS),
    Mutant("skipped step decays", FUNCTIONAL, "masked_fill_(skip, 1.0)", "masked_fill_(skip, decay)", VIEWS),
    Mutant("idle experts reversed", FUNCTIONAL, "idle = ~entry.view", "idle = entry.view", VIEWS),
    Mutant("experts never idle", FUNCTIONAL, "if not entry.view.routed:", "if True:", VIEWS),
    Mutant("update size without lr", FUNCTIONAL, ".mul(alpha).square()", ".square()", UPDATE),
    # storage and matrices
    Mutant("transpose on the way in", VIEW, "return matrix.mT if self.transposed else matrix", "return matrix", VIEWS),
    Mutant(
        "transpose on the way out",
        VIEW,
        "storage = matrix.mT if self.transposed else matrix",
        "storage = matrix",
        LAYOUT,
    ),
    Mutant(
        "order of parts",
        VIEW,
        "list(matrix.split(self.parts, dim=-2))",
        "list(matrix.split(self.parts[::-1], dim=-2))",
        UPDATE,
    ),
    Mutant(
        "groups and rows swapped",
        VIEW,
        "self.groups, sum(self.parts), columns)  #",
        "sum(self.parts), self.groups, columns).transpose(-3, -2)  #",
        LAYOUT,
    ),
    Mutant(
        "heads interleaved",
        VIEW,
        "parts[i].unflatten(-2, (-1, rows))",
        "parts[i].unflatten(-2, (rows, -1)).transpose(-3, -2)",
        HEADS,
    ),
    Mutant(
        "one expert speaks for all", VIEW, "flags.flatten(1).any(dim=1)[", "flags.any().expand(flags.shape[0])[", VIEWS
    ),
    Mutant(
        "stack read by columns",
        VIEW,
        "matrix.unflatten(0, (self.stack, -1))",
        "matrix.unflatten(0, (-1, self.stack)).transpose(0, 1)",
        VIEWS,
    ),
    Mutant(
        "transposed kernel as a plain one",
        "hf_muon/param_groups/rules.py",
        "transposed=isinstance(module, _TRANSPOSED)",
        "transposed=False",
        CONVOLUTIONS,
    ),
    Mutant("norms decay", "hf_muon/param_groups/groups.py", '**adamw, "weight_decay": 0.0}', "**adamw}", TAGGING),
    Mutant(
        "AdamW's rate on Muon",
        "hf_muon/optim/group_layout.py",
        "lr=config.resolved_muon_lr",
        "lr=config.resolved_adam_lr",
        CONSTRUCTION,
    ),
    # Newton-Schulz
    Mutant("no normalisation", NEWTON_SCHULZ, "scaled.div_(torch.where(norm == 0, 1.0, norm))", "scaled", NS),
    Mutant("zero matrix divided by zero", NEWTON_SCHULZ, "torch.where(norm == 0, 1.0, norm)", "norm", NS),
    Mutant(
        "squares overflow", NEWTON_SCHULZ, "torch.where(largest == 0, 1.0, largest)", "torch.ones_like(largest)", NS
    ),
    Mutant("Keller's b", COEFFICIENTS, "-4.7750", "-4.6750", UPDATE),
    Mutant(
        "rows in reverse", COEFFICIENTS, "rows[min(step, len(rows) - 1)]", "rows[max(len(rows) - 1 - step, 0)]", NS
    ),
    Mutant(
        "standard: a and b",
        ITERATION,
        "_apply(square, x, beta=a, out=spare)",
        "_apply(square, x, beta=b, out=spare)",
        NS,
    ),
    Mutant(
        "standard: b and c",
        ITERATION,
        "_symmetric(gram, gram, base=gram, beta=b, alpha=c, out=square)",
        "_symmetric(gram, gram, base=gram, beta=c, alpha=b, out=square)",
        NS,
    ),
    Mutant(
        "gram: a missing in Q",
        ITERATION,
        ".diagonal(dim1=-2, dim2=-1).add_(a)",
        ".diagonal(dim1=-2, dim2=-1).add_(b)",
        NS,
    ),
    Mutant(
        "gram: R one product short", ITERATION, "_symmetric(z, t, base=t, beta=a, alpha=1.0, out=r)", "r.copy_(t)", NS
    ),
    Mutant(
        "gram of the long side",
        ITERATION,
        "(x, x.mT) if x.shape[-2] <= x.shape[-1] else (x.mT, x)",
        "(x.mT, x) if x.shape[-2] <= x.shape[-1] else (x, x.mT)",
        NS,
    ),
    Mutant(
        "gram: identity left out for small squares",
        ITERATION,
        "alpha=a, out=out)",
        "alpha=0.0, out=out)",
        NS,
    ),
    # what rests elsewhere, what is written in place
    Mutant(
        "the update overwrites the momentum", FUNCTIONAL, "in_place=options.nesterov and", "in_place=True and", UPDATE
    ),
    Mutant("codes one level off", QUANTIZED, "torch.arange(-128, 128,", "torch.arange(-127, 129,", INT8),
    Mutant("blocks cross experts", QUANTIZED, "shape[0] if len(shape) > 2 else 1", "1", INT8),
    # AdamW half
    Mutant("betas swapped", ADAM, "beta1=float(betas[0]),", "beta1=float(betas[1]),", ADAMW),
    Mutant("AdamW ascends", ADAM, "maximize=False", "maximize=True", ADAMW),
    Mutant(
        "moments swapped",
        ADAM,
        '[state["exp_avg"] for state in states],\n        [state["exp_avg_sq"] for state in states],',
        '[state["exp_avg_sq"] for state in states],\n        [state["exp_avg"] for state in states],',
        ADAMW,
    ),
]


CONTROL = Mutant("nothing broken", FUNCTIONAL, "decay = -options.lr", "decay = -options.lr", UPDATE)


def mutated_text(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the text of the mutant's file with the rule broken.

    Raises:
        ValueError: the pattern does not stand there exactly once.
    """
    text = (root / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.old!r} must stand once in {mutant.file}; found {count} times.")
    return text.replace(mutant.old, mutant.new)


def _run(mutant: Mutant, folder: str) -> None:
    """Run the mutant's test in this (forked) process and end with pytest's code; `hf_muon` comes from `folder`."""
    sys.path.insert(0, folder)
    import pytest

    import hf_muon  # before pytest puts the working tree first

    if not Path(hf_muon.__file__).is_relative_to(folder):
        os._exit(99)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        code = pytest.main(["-xq", "-p", "no:cacheprovider", str(ROOT / mutant.test)])
    os._exit(int(code))  # no exit handlers: they belong to the parent


def is_killed(mutant: Mutant, timeout: float = TIMEOUT) -> bool:
    """Return whether the mutant's test fails, in a forked process that sees a mutated copy of the package.

    Raises:
        RuntimeError: pytest could not run the test (nothing collected, a usage error): no verdict.
    """
    with tempfile.TemporaryDirectory(prefix="hf-muon-mutant-") as folder:
        shutil.copytree(ROOT / "hf_muon", Path(folder) / "hf_muon", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / mutant.file).write_text(mutated_text(mutant))
        process = multiprocessing.get_context("fork").Process(target=_run, args=(mutant, folder))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            return True
    if process.exitcode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {process.exitcode}; no verdict.")
    return process.exitcode == 1


def main(names: list[str]) -> int:
    """Run the control and the mutants with these names, or all; return the exit code."""
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"no mutant is called {sorted(unknown)}", file=sys.stderr)
        return 2
    import torch  # once, here: every fork inherits it
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    if is_killed(CONTROL):
        print(f"{CONTROL.test} fails on unbroken code: no verdict")
        return 1
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    for mutant in chosen:
        start = time.monotonic()
        killed = is_killed(mutant)
        survivors += not killed
        verdict = "killed" if killed else "SURVIVED"
        print(f"{verdict:9} {time.monotonic() - start:6.1f} s  {mutant.name:34} {mutant.test}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
