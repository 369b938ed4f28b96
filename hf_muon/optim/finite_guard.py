# SPDX-License-Identifier: Apache-2.0
"""Skips a whole optimizer step when any gradient is inf or NaN, before any state is touched.

Two ways to act on the same flag: `HostSkip` reads it at once (free on a CPU); `DeviceSkip` keeps it on the device,
where the update masks itself, and reads it two steps later, so that a CUDA step never waits for the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .notices import logger
from .tensor_layout import is_dtensor, local_tensor

MAX_SKIPS_IN_A_ROW = 10
READ_LAG = 2  # steps; fixed, so that every rank raises at the same step
FiniteReducer = Callable[[Tensor], Tensor]
NamedGradients = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Verdict:
    """What a step shall do: leave at once (`skip`), or run masked by `mask` (0-dim bool tensor, true = skip)."""

    skip: bool
    mask: Tensor | None = None


class SkipPolicy(Protocol):
    """How the flag of a step becomes a decision."""

    def judge(self, flag: Tensor) -> Verdict:
        """Decide about this step."""

    def outcomes(self, lag: int) -> list[bool]:
        """Return, oldest first, which steps were skipped, of those at least `lag` steps old; each once."""


class HostSkip:
    """Reads the flag on the host at once."""

    def __init__(self) -> None:
        self._outcomes: list[bool] = []

    def judge(self, flag: Tensor) -> Verdict:
        """Wait for the flag and decide."""
        skip = bool(flag.item())
        self._outcomes.append(skip)
        return Verdict(skip)

    def outcomes(self, lag: int) -> list[bool]:
        """Return all outcomes not yet returned; `lag` does not matter here."""
        known, self._outcomes = self._outcomes, []
        return known


class DeviceSkip:
    """Leaves the flag on the device and copies it to the host in the background."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def judge(self, flag: Tensor) -> Verdict:
        """Return the mask and start the copy."""
        if flag.is_cuda:
            copy = torch.empty((), dtype=flag.dtype, pin_memory=True)
            copy.copy_(flag, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending.append((copy, event))
        else:
            self._pending.append((flag.detach().to("cpu", copy=True), None))
        return Verdict(False, flag > 0)

    def outcomes(self, lag: int) -> list[bool]:
        """Return outcomes at least `lag` steps old; waits for their copies, which ended long ago when lag > 0."""
        result = []
        while len(self._pending) > lag:
            copy, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            result.append(bool(copy.item()))
        return result


class SkipRecord:
    """Counts skipped steps, logs each, and raises after ten in a row."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        self.last = False
        self.offender: str | None = None

    def add(self, skipped: bool, offender: Callable[[], str | None]) -> None:
        """Enter the outcome of one step and log it when skipped; `offender` names the first bad gradient."""
        self.last = skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        self.total += 1
        self.offender = offender()
        where = f"{self.offender}.grad" if self.offender else "a gradient"
        logger.warning("Step skipped: %s holds inf or NaN (%d skipped so far).", where, self.total)

    def check(self) -> None:
        """Give up after ten skipped steps in a row.

        Raises:
            RuntimeError: parameters and state are as they were before the first of these steps.
        """
        if self.in_a_row >= MAX_SKIPS_IN_A_ROW:
            where = f"{self.offender}.grad" if self.offender else "a gradient"
            raise RuntimeError(
                f"{where} must be finite; got inf or NaN, and {self.in_a_row} steps in a row were skipped. Parameters"
                " and optimizer state are unchanged by them. Lower the learning rate, clip gradients, or check the"
                " data for bad samples."
            )


def named_gradients(
    params: Iterable[tuple[str, Tensor]], check: Callable[[str, Tensor], None] | None = None
) -> NamedGradients:
    """Return the gradients that are there, by name; `check` may refuse a parameter that has one.

    Raises:
        NotImplementedError: a sparse gradient.
    """
    result = []
    for label, param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.is_sparse or grad.layout != torch.strided:
            raise NotImplementedError(
                f"{label}.grad must be dense; got a sparse gradient. Build the embedding with sparse=False."
            )
        if check is not None:
            check(label, param)
        result.append((label, grad))
    return result


def nonfinite_flag(grads: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a 0-dim float32 tensor on `device`: 1 if any element on this rank is inf or NaN, else 0.

    Reads every gradient once and allocates nothing of their size: maxima carry inf and NaN along.
    """
    local = [part for part in map(local_tensor, grads) if part.numel()]
    if not local:
        return torch.zeros((), dtype=torch.float32, device=device)
    # The maximum norm takes five times as long as both bounds on a CPU, where reading them costs nothing.
    on_cpu = [part for part in local if part.is_cpu and type(part) is Tensor]
    is_finite = all(math.isfinite(bound.item()) for part in on_cpu for bound in torch.aminmax(part))
    others = [part for part in local if not part.is_cpu or type(part) is not Tensor]
    if not others or not is_finite:
        return torch.full((), 0.0 if is_finite else 1.0, dtype=torch.float32, device=device)
    largest = torch.nn.utils.get_total_norm(others, norm_type=math.inf)
    return largest.isfinite().logical_not().to(device=device, dtype=torch.float32)


def agree_over_meshes(flag: Tensor, params: Iterable[Tensor], op: Any = None) -> Tensor:
    """Return the elementwise largest flag over all ranks that share DTensor parameters; collective if there are any.

    Args:
        flag: values of this rank; overwritten where they are on the device of the meshes.
        params: all parameters.
        op: another reduction than the maximum.
    """
    from torch.distributed.tensor import DTensor

    meshes = []
    for param in params:
        if is_dtensor(param) and (mesh := cast(DTensor, param).device_mesh) not in meshes:
            meshes.append(mesh)
    for mesh in meshes:
        flag = flag.to(mesh.device_type)
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(flag, op=op or torch.distributed.ReduceOp.MAX, group=mesh.get_group(axis))
    return flag


def first_nonfinite(grads: NamedGradients) -> str | None:
    """Return the name of the first gradient that holds inf or NaN on this rank; reads them on the host."""
    for name, grad in grads:
        part = local_tensor(grad)
        if part.numel() and not bool(torch.isfinite(part).all()):
            return name
    return None


class StepGuard:
    """Decides about every step and remembers what was decided."""

    def __init__(self, record: SkipRecord | None = None) -> None:
        self.record = record or SkipRecord()
        self._policy: SkipPolicy | None = None

    def judge(
        self,
        grads: NamedGradients,
        params: list[Tensor],
        reducer: FiniteReducer | None,
        choose_policy: Callable[[], SkipPolicy],
    ) -> Verdict:
        """Return the verdict on a step with these gradients; collective if `reducer` or the parameters are.

        Args:
            grads: named gradients of this rank.
            params: all parameters, with and without gradient, so that every rank takes part in the same collectives.
            reducer: makes the flag agree over ranks; None agrees over the meshes of DTensor parameters.
            choose_policy: called once, at the first step after `reset_policy`.

        Raises:
            RuntimeError: ten skipped steps in a row.
        """
        device = local_tensor(grads[0][1] if grads else params[0]).device
        flag = nonfinite_flag((grad for _, grad in grads), device)
        if reducer is not None:
            flag = reducer(flag)
        elif any(is_dtensor(param) for param in params):
            flag = agree_over_meshes(flag, params)
        if self._policy is None:
            self._policy = choose_policy()
        verdict = self._policy.judge(flag)
        self.settle(READ_LAG, grads)
        self.record.check()
        return verdict

    def settle(self, lag: int = 0, grads: NamedGradients | None = None) -> SkipRecord:
        """Enter all outcomes at least `lag` steps old and return the record; waits for the device at lag 0."""
        if self._policy is not None:
            for skipped in self._policy.outcomes(lag):
                self.record.add(skipped, lambda: first_nonfinite(grads or []))
        return self.record

    def reset_policy(self) -> None:
        """Choose the policy anew at the next step: parameters may have moved to another device."""
        self.settle()
        self._policy = None
