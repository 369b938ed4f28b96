# SPDX-License-Identifier: Apache-2.0
"""Does a gauge-aware step help LoRA? AdamW, Muon on the factors, and two rules that see the product, on one task.

    OMP_NUM_THREADS=1 python benchmarks/lora_rule.py --json benchmarks/results/lora_rule.json

LoRA adds `s B A` to a frozen (m, n) weight; `(B C, C^-1 A)` is the same model for every invertible r x r `C`, the
gauge. Steps of AdamW and Muon on the factors depend on it: Muon's `dB = -lr O` moves the product by `s dB A`, which
grows with `A`. Let `G` be the gradient of the weight, so that the factors get `G_B = s G A^T` and `G_A = s B^T G`.

`spectral`: among the steps of `B` that move the weight by at most `eta` in spectral norm, take the one along which the
loss falls fastest. With `A A^T = L L^T` (Cholesky), `A = L Q` and `Q` has orthonormal rows, so the weight moves by
`s dB L Q`, of the norm of `X = s dB L`. The loss changes by `<G_B, dB> = <G_B L^-T, X> / s`, least at
`X = -eta msign(G_B L^-T)`: so `dB = -(eta / s) msign(G_B L^-T) L^-1`. In the same way, with `B^T B = K K^T`,
`dA = -(eta / s) K^-T msign(K^-1 G_A)`. Another gauge has `L' = C^-1 L U` with an orthogonal `U`, with which msign
commutes: the weight moves the same. `s` drops out as well. Momentum of the factors' gradients changes with a constant
`C` as they do.

`tangent`: orthogonalize what the two gradients know of `G` together, its projection on the directions in which the
product can move: `T = P_B G + G P_A - P_B G P_A`, all three parts from `G_B` and `G_A`. The weight moves along
`D = msign(T)`, projected once more: `dB = -(eta / s) D A^+`, `dA = -(eta / s) B^+ D (1 - P_A)`.

`B` starts at zero, where `K^-1` has no bounds: `B^T B` gets `(c eta / s)^2 r / |A|_F^2` on its diagonal. That is what
`c` steps make of `B`, it follows every scalar gauge, and it bounds a step of `A` by `1 / c` of `A`. Of 5, 20 and 80
the best over the ranks together was taken for each rule.

Both are of a known family: scaled gradients (Riemannian preconditioned LoRA, arXiv:2402.02347), LoRA-RITE
(arXiv:2410.20625), Riemannion (arXiv:2507.12142), LoRA-Muon (arXiv:2606.12921, whose rule `spectral` is in essence).

The task: a two-layer tanh network whose weights have moved by matrices with singular values falling like 1/k; inputs
of uneven variance. Every method gets the best rate of its grid at the base scale; then `s` and `A` are scaled, with
that rate and with the best one there. All seeds and rates run as one batch of matrices. The loss is that of fresh
inputs, as a share of the loss without an adapter. The product rules do not see the scale: they run at two settings
only.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_muon.optim.functional import adjust_scale
from hf_muon.orthogonalize import newton_schulz

WIDTH, OUT, BATCH, STEPS, SEEDS = 96, 48, 64, 120, 3
RANKS = (4, 16, 64)
MOMENTUM = 0.95
RATES = [0.08 / 2**k for k in range(7)]
DAMPING = {"spectral": 20.0, "tangent": 5.0}  # c above


@dataclass(frozen=True)
class Setting:
    """How an adapter is scaled: `s` of the product, and a factor on PEFT's initial `A`."""

    s: float = 2.0
    gauge: float = 1.0


SETTINGS = {
    "base": Setting(),
    "s / 4": Setting(s=0.5),
    "s x 4": Setting(s=8.0),
    "A / 4": Setting(gauge=0.25),
    "A x 4": Setting(gauge=4.0),
}
METHODS = {
    "adamw": list(SETTINGS),
    "muon": list(SETTINGS),
    "spectral": ["base", "A x 4"],
    "tangent": ["base", "A x 4"],
}


class Task:
    """Frozen weights, targets and batches of all seeds; leading axes are (rates, seeds)."""

    def __init__(self, rates: int) -> None:
        self.rates, self.random = rates, torch.Generator().manual_seed(0)
        shapes = ((WIDTH, WIDTH), (OUT, WIDTH))
        self.frozen = [self._normal(SEEDS, *shape) / math.sqrt(shape[1]) for shape in shapes]
        self.moved = [weight + self._change(*weight.shape[1:]) for weight in self.frozen]
        self.spread = torch.arange(1, WIDTH + 1) ** -0.5 * 3
        self.test = self._normal(SEEDS, 512, WIDTH) * self.spread
        self.start_loss = self.loss(self.frozen, self.test)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _change(self, m: int, n: int) -> Tensor:
        left, _, right = torch.linalg.svd(self._normal(SEEDS, m, n), full_matrices=False)
        return left * (1.0 / torch.arange(1, min(m, n) + 1)) @ right

    def outputs(self, weights: list[Tensor], inputs: Tensor) -> Tensor:
        """Return what the network says."""
        return torch.tanh(inputs @ weights[0].mT) @ weights[1].mT

    def loss(self, weights: list[Tensor], inputs: Tensor) -> Tensor:
        """Return the mean squared error per batch entry."""
        return (self.outputs(weights, inputs) - self.outputs(self.moved, inputs)).square().mean((-2, -1))

    def batch(self, step: int) -> Tensor:
        """Return the inputs of a step, the same for every method and rate."""
        random = torch.Generator().manual_seed(1000 + step)
        return torch.randn(SEEDS, BATCH, WIDTH, generator=random) * self.spread

    def adapters(self, rank: int, setting: Setting) -> list[list[Tensor]]:
        """Return `[B, A]` per layer: zeros, and PEFT's uniform start times the factor of the setting."""
        random, pairs = torch.Generator().manual_seed(7), []
        for weight in self.frozen:
            m, n = weight.shape[1:]
            a = (torch.rand(SEEDS, rank, n, generator=random) * 2 - 1) / math.sqrt(n) * setting.gauge
            pairs.append([torch.zeros(self.rates, SEEDS, m, rank), a.expand(self.rates, -1, -1, -1).clone()])
        return pairs


def msign(matrix: Tensor) -> Tensor:
    """Return the orthogonalized matrices, in float32."""
    return newton_schulz(matrix, dtype="float32")


def spectral_step(
    b: Tensor, a: Tensor, g_b: Tensor, g_a: Tensor, eta: Tensor | float, s: float, sign: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the steps of `B` and `A`; see the top of this file."""
    lower, low_b = _root(a @ a.mT), _root(_damped(b, a, DAMPING["spectral"] * eta / s))
    x = sign(torch.linalg.solve_triangular(lower, g_b.mT, upper=False).mT)
    d_b = torch.linalg.solve_triangular(lower, x, upper=False, left=False)
    y = sign(torch.linalg.solve_triangular(low_b, g_a, upper=False))
    d_a = torch.linalg.solve_triangular(low_b.mT, y, upper=True)
    return -eta / s * d_b, -eta / s * d_a


def tangent_step(
    b: Tensor, a: Tensor, g_b: Tensor, g_a: Tensor, eta: Tensor | float, s: float, sign: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the steps of `B` and `A`; see the top of this file."""
    lower, low_b = _root(a @ a.mT), _root(_damped(b, a, DAMPING["tangent"] * eta / s))
    a_inverse = torch.cholesky_solve(a, lower).mT  # (n, r)
    b_inverse = torch.cholesky_solve(b.mT, low_b)  # (r, m)
    right = torch.cholesky_solve(g_b.mT, lower).mT @ a  # s G P_A
    left = b @ torch.cholesky_solve(g_a, low_b)  # s P_B G
    d = sign(left + right - b @ (b_inverse @ right))
    return -eta / s * d @ a_inverse, -eta / s * (b_inverse @ (d - d @ a_inverse @ a))


def _root(gram: Tensor) -> Tensor:
    """Return the Cholesky factor; 1e-6 of the mean diagonal is added, NaN comes where that is not enough."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.linalg.cholesky_ex(gram + 1e-6 * mean * torch.eye(gram.shape[-1]))[0]


def _damped(b: Tensor, a: Tensor, size: Tensor | float) -> Tensor:
    squares = a.square().sum((-2, -1), keepdim=True) / a.shape[-2]
    return b.mT @ b + size**2 / squares * torch.eye(b.shape[-1])


def muon_step(
    b: Tensor, a: Tensor, g_b: Tensor, g_a: Tensor, eta: Tensor | float, s: float, sign: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return Muon's steps as hf-muon makes them under `match_rms_adamw`."""
    return tuple(-eta * adjust_scale("match_rms_adamw", *g.shape[-2:]) * sign(g) for g in (g_b, g_a))


PRODUCT_RULES = {"spectral": spectral_step, "tangent": tangent_step}


class Averages:
    """Momentum of Muon (with its look-ahead) or the two averages of AdamW, of every factor."""

    def __init__(self) -> None:
        self.first: dict[int, Tensor] = {}
        self.second: dict[int, Tensor] = {}

    def momentum(self, place: int, grad: Tensor) -> Tensor:
        """Return Muon's update before it is orthogonalized."""
        kept = self.first.setdefault(place, torch.zeros_like(grad)).lerp_(grad, 1 - MOMENTUM)
        return torch.lerp(grad, kept, MOMENTUM)

    def adam(self, place: int, grad: Tensor, step: int) -> Tensor:
        """Return AdamW's update at rate 1."""
        first = self.first.setdefault(place, torch.zeros_like(grad)).lerp_(grad, 0.1)
        second = self.second.setdefault(place, torch.zeros_like(grad)).lerp_(grad.square(), 0.05)
        return first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)


def final_losses(method: str, rank: int, setting: Setting) -> Tensor:
    """Train all rates and seeds at once; return (rates, seeds) shares of the start's loss, inf where it diverged."""
    task, rates = Task(len(RATES)), torch.tensor(RATES).view(-1, 1, 1, 1)
    pairs, averages, s = task.adapters(rank, setting), Averages(), setting.s
    alive = torch.ones(len(rates), SEEDS, dtype=torch.bool)
    for step in range(STEPS):
        factors = [factor.requires_grad_() for pair in pairs for factor in pair]
        weights = [w + s * (b @ a) for w, (b, a) in zip(task.frozen, pairs, strict=True)]
        grads = torch.autograd.grad(task.loss(weights, task.batch(step)).sum(), factors)
        rate = rates * (1 - step / STEPS)
        with torch.no_grad():
            for layer, (b, a) in enumerate(pairs):
                g_b, g_a = grads[2 * layer : 2 * layer + 2]
                if method == "adamw":
                    moves = [-rate * averages.adam(2 * layer + i, g, step + 1) for i, g in enumerate((g_b, g_a))]
                else:
                    g_b, g_a = (averages.momentum(2 * layer + i, g) for i, g in enumerate((g_b, g_a)))
                    rule = PRODUCT_RULES.get(method, muon_step)
                    size = adjust_scale("match_rms_adamw", b.shape[-2], a.shape[-1]) if method in PRODUCT_RULES else 1
                    moves = rule(b, a, g_b, g_a, rate * size, s, msign)
                for factor, move in zip((b, a), moves, strict=True):
                    alive &= (factor + move).abs().amax((-2, -1)) < 1e3  # also false for NaN
                    factor.copy_(torch.where(alive[..., None, None], factor + move, 0.0))
    with torch.no_grad():
        weights = [w + s * (b @ a) for w, (b, a) in zip(task.frozen, pairs, strict=True)]
        return torch.where(alive, task.loss(weights, task.test) / task.start_loss, math.inf)


def check_gauge() -> None:
    """Raise unless the weight moves the same from `(B C, C^-1 A)` and another `s`, in float64 without damping.

    msign is that of a singular value decomposition here: the iteration's error would hide the rule's.
    """
    random = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    b, a, grad, change = draw(9, 4), draw(4, 7), draw(9, 7), torch.eye(4) + draw(4, 4) / 4
    pairs = ((b, a, 1.0), (b @ change, torch.linalg.solve(change, a), 1.0), (b / 3, a, 3.0))
    damping, DAMPING["spectral"], DAMPING["tangent"] = dict(DAMPING), 0.0, 0.0
    for name, rule in PRODUCT_RULES.items():
        moves = []
        for b, a, s in pairs:
            d_b, d_a = rule(b, a, s * grad @ a.mT, s * b.mT @ grad, 0.1, s, exact_msign)
            moves.append(s * (d_b @ a + b @ d_a))
        gap = max(float((move - moves[0]).norm() / moves[0].norm()) for move in moves)
        if gap > 1e-4:  # 1e-6 is added to the diagonals
            raise RuntimeError(f"{name} must move the weight the same in every gauge; got a difference of {gap:.1e}.")
    DAMPING.update(damping)


def exact_msign(matrix: Tensor) -> Tensor:
    """Return the orthogonal polar factor; singular values that are zero stay zero."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left * (values > 1e-9 * values[..., :1])[..., None, :] @ right


def row_of(method: str, rank: int, found: dict[str, Tensor]) -> dict[str, Any]:
    """Return the figures of one method at one rank: means over seeds, and the spread between them."""
    best = int(found["base"].mean(1).argmin())
    return {
        "rank": rank,
        "method": method,
        "rate": RATES[best],
        "loss": float(found["base"][best].mean()),
        "deviation": float(found["base"][best].std()),
        "same_rate": {name: float(losses[best].mean()) for name, losses in found.items()},
        "best_rate": {name: float(losses.mean(1).min()) for name, losses in found.items()},
        "all": {name: [float(value) for value in losses.mean(1)] for name, losses in found.items()},
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table(title="Loss after 120 steps, share of the loss without an adapter (3 seeds)")
    for column in ("rank", "method", "best rate", "loss", "worst scale, same rate", "worst scale, its best rate"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(
            str(row["rank"]),
            row["method"],
            f"{row['rate']:.4g}",
            f"{row['loss']:.4f} ± {row['deviation']:.4f}",
            f"{max(row['same_rate'].values()):.4f}",
            f"{max(row['best_rate'].values()):.4f}",
        )
    Console().print(table)


def main() -> None:
    """Check the rules, run everything, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    check_gauge()
    rows = []
    for rank in RANKS:
        for method, names in METHODS.items():
            found = {name: final_losses(method, rank, SETTINGS[name]) for name in names}
            rows.append(row_of(method, rank, found))
    show(rows)
    if arguments.json:
        about = {"torch": torch.__version__, "rates": RATES, "damping": DAMPING}
        arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=1).replace("Infinity", "null") + "\n")


if __name__ == "__main__":
    main()
