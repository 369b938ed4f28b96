# SPDX-License-Identifier: Apache-2.0
"""MuonClip: after a step, shrink the query and key rows of heads whose largest attention logit passed a threshold.

A head h with the largest logit S_h over the batch gets gamma_h = min(1, AIM tau / S_h), and its logits are to shrink
by gamma_h. (The paper has no AIM: its logits end above the threshold by what the step adds.) Where queries and keys
both belong to the head, each takes sqrt(gamma_h). Where one side is shared by several heads it stays as it is and the
other side takes all of gamma_h: the rotary part of multi-head latent attention, as the paper does, and, by the same
rule, the keys of grouped-query attention. So heads under the threshold never change.

References: Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..config import MuonConfig
from .finite_guard import Verdict
from .tensor_layout import local_part, local_tensor

AIM = 0.99  # leaves room for the step itself, which S_h was measured before, and for the rounding of the weights


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


class QKClip:
    """Clips by rescaling weights; attached to an optimizer as `optimizer.qk_clip`.

    Args:
        threshold: tau.
        source: of logits.
    """

    def __init__(self, threshold: float, source: LogitSource) -> None:
        self._threshold = threshold
        self._source = source
        self._seen: Sequence[AttentionLogits] = ()
        self.largest: Tensor | None = None  # over all heads, before the last step; 0-dim

    def prepare(self) -> None:
        """Take the logits of this step's forward passes and agree on them over all ranks: one small all-reduce.

        Raises:
            RuntimeError: no attention was seen, on every rank alike; nothing has been changed.
        """
        self._seen = self._source.take()
        if not self._seen:
            raise RuntimeError(
                "qk_clip must see the attention of the model; got no call of transformers' attention interface since"
                " the last step. This model computes attention by itself: leave qk_clip out."
            )
        together = torch.cat([logits.largest for logits in self._seen])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MAX)
        sizes = [logits.largest.numel() for logits in self._seen]
        self._seen = [
            AttentionLogits(logits.name, largest, logits.rows)
            for logits, largest in zip(self._seen, together.split(sizes), strict=True)
        ]
        self.largest = together.max()

    @torch.no_grad()
    def apply_(self, params: Iterable[tuple[str, Tensor]], verdict: Verdict) -> None:
        """Rescale rows in place; a skipped step, a non-finite logit or one under the threshold changes nothing.

        Args:
            params: all parameters of the optimizer by name; this rank's part of each is changed.
            verdict: on the step.
        """
        if verdict.skip:
            return
        by_name = dict(params)
        for logits in self._seen:
            gamma = self._gamma(logits.largest, verdict.mask)
            for rows in logits.rows:
                scale_rows_(by_name, rows, gamma)

    def _gamma(self, largest: Tensor, mask: Tensor | None) -> Tensor:
        aim = AIM * self._threshold
        over = (largest > aim) & largest.isfinite()
        if mask is not None:
            over = over & ~mask.to(over.device)
        return torch.where(over, aim / largest, 1.0)


def scale_rows_(by_name: Mapping[str, Tensor], rows: HeadRows, gamma: Tensor) -> None:
    """Multiply the rows of one parameter by their factors, on the ranks that hold them."""
    param = by_name[rows.name]
    factors = rows.factors(gamma)
    whole = factors.reshape(-1, *(1,) * (param.ndim - 1))
    target = local_tensor(param)
    if target.numel():
        target.mul_(local_part(whole.to(target.device, torch.promote_types(target.dtype, torch.float32)), param))


def ready_clip(config: MuonConfig, clip: QKClip | None) -> QKClip | None:
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
    clip.prepare()
    return clip
