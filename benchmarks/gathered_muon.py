# SPDX-License-Identifier: Apache-2.0
"""The peer of `fsdp2_step.py`: Muon under FSDP2 without owners, as well as it can be written.

Every rank gathers every update and orthogonalizes all matrices. The momentum stays sharded; updates travel packed, all
buckets on their way before the first is waited for; Newton-Schulz is hf-muon's own, batched over equal shapes; each
rank applies its own rows. No check for non-finite gradients: the peer is spared that cost.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

import hf_muon
from hf_muon.optim.functional import adjust_scale

MAX_BUCKET_BYTES = 32 * 2**20  # of gathered float32 updates
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor  # new name
NS_OPTIONS = ("ns_method", "ns_steps", "ns_coefficients", "ns_dtype")


class GatheredMuon(torch.optim.Optimizer):
    """Muon on tagged matrices, sharded by rows over one mesh axis; AdamW on the rest. `step` is collective.

    Args:
        named: named parameters after `fully_shard`, tagged by `hf_muon.tag_parameters`.
        config: options; what only `MuonWithAuxAdam` knows (variants) is left aside.
        fused: for AdamW.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        config: hf_muon.MuonConfig | None = None,
        fused: bool = False,
    ) -> None:
        params = [param for _, param in named]
        self.config = config = config or hf_muon.MuonConfig()
        muon = [param for param in params if param.use_muon]
        rest = [param for param in params if not param.use_muon]
        super().__init__(muon, {"lr": config.resolved_muon_lr})
        self.group = muon[0].device_mesh.get_group()
        decay = config.resolved_adam_weight_decay
        self.adam = torch.optim.AdamW(
            [
                {"params": [param for param in rest if param.ndim > 1], "weight_decay": decay},
                {"params": [param for param in rest if param.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.resolved_adam_lr,
            betas=config.betas or (0.9, 0.95),
            eps=config.eps or 1e-10,
            fused=fused or None,
        )
        self.momenta = {param: torch.zeros_like(param.to_local()) for param in muon}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter."""
        buckets = list(self._buckets())
        sent = [self._send(bucket) for bucket in buckets]
        for bucket, (whole, work) in zip(buckets, sent, strict=True):
            work.wait()
            self._apply(bucket, whole)
        self.adam.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        super().zero_grad(set_to_none)
        self.adam.zero_grad(set_to_none)

    def _buckets(self) -> Iterable[list[torch.Tensor]]:
        """Yield matrices with gradients, equal shapes next to each other, up to `MAX_BUCKET_BYTES` at once."""
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                by_shape.setdefault(param.shape, []).append(param)
        bucket: list[torch.Tensor] = []
        for param in (param for alike in by_shape.values() for param in alike):
            if bucket and 4 * sum(p.numel() for p in (*bucket, param)) > MAX_BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(param)
        if bucket:
            yield bucket

    def _send(self, bucket: list[torch.Tensor]) -> tuple[torch.Tensor, dist.Work]:
        """Fold gradients into the momenta; start to gather the updates."""
        ranks, momentum = self.group.size(), self.config.momentum
        gradients = [param.grad.to_local().float() for param in bucket]
        momenta = [self.momenta[param] for param in bucket]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, momenta, momentum) if self.config.nesterov else momenta
        # FSDP2's chunks are even but for the last ranks: their padding is gathered and then cut off.
        sizes = [-(-param.shape[0] // ranks) * param.shape[1] for param in bucket]
        packed = torch.empty(sum(sizes), device=updates[0].device)
        places = [place[: u.numel()].view_as(u) for place, u in zip(packed.split(sizes), updates, strict=True)]
        torch._foreach_copy_(places, updates)
        whole = packed.new_empty(ranks, packed.numel())
        return whole, all_gather(whole.view(-1), packed, group=self.group, async_op=True)

    def _apply(self, bucket: list[torch.Tensor], whole: torch.Tensor) -> None:
        """Orthogonalize all matrices of a bucket and apply this rank's rows."""
        ranks, config, lr = self.group.size(), self.config, self.param_groups[0]["lr"]
        sizes = [-(-param.shape[0] // ranks) * param.shape[1] for param in bucket]
        parts = zip(whole.split(sizes, dim=1), bucket, strict=True)
        matrices = [part.reshape(-1, param.shape[1])[: param.shape[0]] for part, param in parts]
        options = {name.removeprefix("ns_"): getattr(config, name) for name in NS_OPTIONS}
        steps = []
        for param, matrix in zip(bucket, hf_muon.orthogonalize.newton_schulz_many(matrices, **options), strict=True):
            chunk = -(-param.shape[0] // ranks)
            first = self.group.rank() * chunk
            rows = matrix[first : first + param.to_local().shape[0]]
            steps.append(rows * -(lr * adjust_scale(config.adjust_lr_fn, *param.shape)))
        weights = [param.to_local() for param in bucket]
        torch._foreach_mul_(weights, 1 - lr * config.resolved_muon_weight_decay)
        torch._foreach_add_(weights, steps)
