# SPDX-License-Identifier: Apache-2.0
"""MuonClip: after a step, shrink the query and key rows of heads whose largest attention logit passed a threshold.

A head h with the largest logit S_h over the batch gets gamma_h = min(1, AIM tau / S_h), and its logits are to shrink
by gamma_h. (The paper has no AIM: its logits end above the threshold by what the step adds.) Where queries and keys
both belong to the head, each takes sqrt(gamma_h). Where one side is shared by several heads it stays as it is and the
other side takes all of gamma_h: the rotary part of multi-head latent attention, as the paper does, and, by the same
rule, the keys of grouped-query attention. So heads under the threshold never change.

The paper takes S_h from the forward passes before the update, so it bounds the logits of the old weights on the old
inputs. The update adds to them, and clipping one layer changes what the next one sees. `qk_clip_exact` measures
after the update instead, layer by layer in one more forward pass in which each layer already runs clipped.

References: Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..config import MuonConfig
from .finite_guard import Verdict
from .notices import warn_once
from .tensor_layout import is_owned, local_part, local_tensor

AIM = 0.99  # leaves room for the step itself, which S_h was measured before, and for the rounding of the weights
MAX_SWEEPS = 4  # over the micro-batches of one step: clipping for one of them lowers the logits of most others too

Agree = Callable[[Tensor], Tensor]  # elementwise maximum over the ranks that train the model; may work in place
React = Callable[[str, Tensor], Tensor]  # (module, its largest logits per head) -> factors on its logits
ForwardPass = Callable[[React], None]  # runs one forward pass of the step again


@dataclass(frozen=True)
class HeadRows:
    """Which output rows of a parameter belong to which head: per head, consecutive segments.

    Args:
        name: of a projection's weight (rows, in) or bias (rows,).
        segments: (number of rows, power of gamma) in the order of the rows of one head.
    """

    name: str
    segments: tuple[tuple[int, float], ...]

    def factors(self, gamma: Tensor) -> Tensor:
        """Return the factor of every row, for `gamma` of shape (heads,)."""
        parts = [gamma[:, None].pow(power).expand(-1, rows) for rows, power in self.segments]
        return torch.cat(parts, dim=1).reshape(-1)


@dataclass(frozen=True)
class AttentionLogits:
    """What one attention module showed since the last step.

    Args:
        name: of the module.
        largest: (heads,) float32, largest logit per head; -inf where nothing was seen.
        rows: what scales the logits.
    """

    name: str
    largest: Tensor
    rows: tuple[HeadRows, ...]


class LogitSource(Protocol):
    """Gives the largest logits since it was last asked, on this rank."""

    def take(self) -> Sequence[AttentionLogits]:
        """Return them, the same modules in the same order on every rank, and forget them."""

    def take_passes(self) -> Sequence[ForwardPass]:
        """Return the forward passes with gradients since the last call, and forget them; none unless it keeps them."""


class QKClip:
    """Clips by rescaling weights; attached to an optimizer as `optimizer.qk_clip`.

    Args:
        threshold: tau.
        source: of logits.
        exact: measure after the update, in forward passes of the source.
    """

    def __init__(self, threshold: float, source: LogitSource, exact: bool = False) -> None:
        self._threshold, self._source, self._exact = threshold, source, exact
        self._seen: Sequence[AttentionLogits] = ()
        self._passes: Sequence[ForwardPass] = ()
        self._num_passes = 0  # of the rank with the most
        self.largest: Tensor | None = None  # over all heads, before the last step; 0-dim

    def prepare(self, agree: Agree) -> None:
        """Take the logits of this step's forward passes and agree on them over ranks: one small reduction.

        Raises:
            RuntimeError: no attention was seen, or no forward pass to repeat; nothing has been changed.
        """
        self._seen, self._passes = self._source.take(), self._source.take_passes()
        if not self._seen:
            raise RuntimeError(
                "qk_clip must see the attention of the model; got no call of transformers' attention interface since"
                " the last step. This model computes attention by itself: leave qk_clip out."
            )
        values = [logits.largest for logits in self._seen]
        count = float(len(self._passes))
        together = agree(torch.cat([*values, values[0].new_tensor([count, -count])]))
        *largest, counts = together.split([*(value.numel() for value in values), 2])
        self._seen = [
            AttentionLogits(logits.name, value, logits.rows) for logits, value in zip(self._seen, largest, strict=True)
        ]
        self.largest = together[:-2].max()
        if self._exact:
            self._num_passes = int(counts[0])
            if counts[1] == 0:
                raise RuntimeError(
                    "qk_clip_exact must repeat the forward of the model; got a step without a call of the model itself"
                    " on some rank. Call the model that the optimizer was made for, not its parts, or leave"
                    " qk_clip_exact out."
                )

    @torch.no_grad()
    def apply_(self, params: Iterable[tuple[str, Tensor]], verdict: Verdict, agree: Agree) -> None:
        """Rescale rows in place; a skipped step, a non-finite logit or one under the threshold changes nothing.

        Collective where `exact`: forward passes, and one small reduction for each attention in them.

        Args:
            params: all parameters of the optimizer by name; this rank's part of each is changed.
            verdict: on the step.
            agree: makes measured logits agree over ranks.
        """
        passes, self._passes = self._passes, ()
        if verdict.skip:
            return
        by_name = dict(params)
        if self._exact:
            self._apply_exactly_(by_name, passes, verdict.mask, agree)
            return
        for logits in self._seen:
            gamma = self._gamma(logits.largest, verdict.mask)
            for rows in logits.rows:
                scale_rows_(by_name, rows, gamma)

    def _apply_exactly_(
        self, by_name: Mapping[str, Tensor], passes: Sequence[ForwardPass], mask: Tensor | None, agree: Agree
    ) -> None:
        """Repeat forward passes, each layer clipped as it runs, until every one was seen with the last weights.

        One pass settles a step without accumulation: a layer's inputs come from layers that are clipped already.
        """
        settled, turn = 0, 0
        while settled < self._num_passes:
            if turn == MAX_SWEEPS * self._num_passes:
                warn_once("qk_clip_exact: the micro-batches of a step still clip one another; some logits stay above.")
                return
            factors: dict[str, Tensor] = {}
            calls: list[str] = []

            def react(name: str, largest: Tensor, factors: dict = factors, calls: list = calls) -> Tensor:
                before = factors.get(name, torch.ones_like(largest))
                factors[name] = before * self._gamma(agree(before * largest), mask)
                calls.append(name)
                return factors[name]

            forget_copies(by_name.values())
            passes[turn % len(passes)](react)
            for logits in self._seen:
                for rows in logits.rows if logits.name in factors else ():
                    scale_rows_(by_name, rows, factors[logits.name])
            turn += 1
            repeated = len(calls) > len(factors)  # a module that runs twice was seen before its last factor
            if self._num_passes == 1 and not repeated:
                return
            clipped = any(bool((factor < 1).any()) for factor in factors.values())
            settled = int(not repeated) if clipped else settled + 1

    def _gamma(self, largest: Tensor, mask: Tensor | None) -> Tensor:
        aim = AIM * self._threshold
        over = (largest > aim) & largest.isfinite()
        if mask is not None:
            over = over & ~mask.to(over.device)
        return torch.where(over, aim / largest, 1.0)


def forget_copies(params: Iterable[Tensor]) -> None:
    """Let the next forward gather owned weights again: they have changed."""
    for param in params:
        if is_owned(param):
            cast(Any, param).owner_layout.version += 1


def scale_rows_(by_name: Mapping[str, Tensor], rows: HeadRows, gamma: Tensor) -> None:
    """Multiply the rows of one parameter by their factors, on the ranks that hold them."""
    param = by_name[rows.name]
    factors = rows.factors(gamma)
    whole = factors.reshape(-1, *(1,) * (param.ndim - 1))
    target = local_tensor(param)
    if target.numel():
        target.mul_(local_part(whole.to(target.device, torch.promote_types(target.dtype, torch.float32)), param))


def ready_clip(config: MuonConfig, clip: QKClip | None, agree: Agree) -> QKClip | None:
    """Return the clip that this step needs, prepared, or None where `qk_clip` is off.

    Raises:
        RuntimeError: `qk_clip` is on but nobody has shown the optimizer the model.
    """
    if config.qk_clip is None:
        return None
    if clip is None:
        raise RuntimeError(
            "qk_clip must see the attention of the model; got an optimizer that was built without it. Build it by"
            " hf_muon.OptimizerFactory, or call attach_qk_clip(model, optimizer) of"
            " hf_muon.integrations.transformers.attention_logits."
        )
    clip.prepare(agree)
    return clip
