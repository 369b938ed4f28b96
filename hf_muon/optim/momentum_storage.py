# SPDX-License-Identifier: Apache-2.0
"""Where the momentum rests between steps, and how it comes to the update and goes back.

The update always works in at least float32 on the parameter's device. Plain momentum is updated where it lies; in
bfloat16 it is stored with stochastic rounding, as int8 to the nearest code; offloaded it lies in CPU memory and its
copies run beside the Newton-Schulz iterations of the batch before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .quantized import dequantize, quantize
from .rounding import Rounding
from .tensor_layout import local_tensor


class MomentumOwner(Protocol):
    """What a store needs of one parameter of a step."""

    @property
    def param(self) -> Tensor:
        """The parameter."""

    @property
    def momentum(self) -> Tensor:
        """Its momentum, in the layout of `param`."""

    @property
    def name(self) -> str:
        """Its name, for random bits."""

    @property
    def scales(self) -> Tensor | None:
        """The scales of this rank's part where the momentum rests as codes."""


class MomentumStore:
    """Momentum that is updated where it rests."""

    def fetch(self, entries: Sequence[MomentumOwner]) -> None:
        """Start bringing the momenta of the next batch."""

    def take(self, entry: MomentumOwner) -> Tensor:
        """Return this rank's momentum to work on, in at least float32 on the parameter's device."""
        return local_tensor(entry.momentum)

    def put(self, entry: MomentumOwner, momentum: Tensor) -> None:
        """Bring what `take` returned, now updated, to rest."""


class RestingMomentum(MomentumStore):
    """Momentum that rests in bfloat16 or as int8 codes, on the CPU, or both.

    Args:
        rounding: random bits of this step; None where momentum rests in the dtype it is worked in.
        lane: how tensors are copied; None chooses by where momentum and parameter lie.
    """

    def __init__(self, rounding: Rounding | None, lane: CopyLane | None = None) -> None:
        self._rounding = rounding
        self._lane = lane
        self._coming: dict[int, list[Tensor]] = {}

    def fetch(self, entries: Sequence[MomentumOwner]) -> None:
        """Start copies to the device."""
        for entry in entries:
            self._coming[id(entry)] = self._bring(entry)

    def take(self, entry: MomentumOwner) -> Tensor:
        """Wait for the copy on the device and widen it."""
        arrived = self._coming.pop(id(entry), None) or self._bring(entry)
        for tensor in arrived:
            self._lane_of(entry).arrive(tensor)
        if len(arrived) > 1:
            return dequantize(*arrived)
        return arrived[0].to(torch.promote_types(arrived[0].dtype, torch.float32))

    def put(self, entry: MomentumOwner, momentum: Tensor) -> None:
        """Round on the device and start the copy back."""
        resting = local_tensor(entry.momentum)
        if entry.scales is not None:
            momentum, scales = quantize(momentum)
            self._lane_of(entry).send(scales, entry.scales)
        elif self._rounding is not None and resting.dtype != momentum.dtype:
            rounded = torch.empty_like(momentum, dtype=resting.dtype)
            self._rounding.store_(rounded, momentum, f"momentum of {entry.name}", entry.param)
            momentum = rounded
        self._lane_of(entry).send(momentum, resting)

    def _bring(self, entry: MomentumOwner) -> list[Tensor]:
        """Start copies of what rests of one momentum: itself, or codes and scales."""
        resting = [local_tensor(entry.momentum), *([] if entry.scales is None else [entry.scales])]
        return [self._lane_of(entry).bring(tensor, _device(entry)) for tensor in resting]

    def _lane_of(self, entry: MomentumOwner) -> CopyLane:
        if self._lane is not None:
            return self._lane
        return lane_between(local_tensor(entry.momentum).device, _device(entry))


class CopyLane(Protocol):
    """Copies between the place of rest and the device of the update."""

    def bring(self, resting: Tensor, device: torch.device) -> Tensor:
        """Start copying `resting` to `device` and return the new tensor."""

    def arrive(self, moved: Tensor) -> None:
        """Make the update wait until the tensor that `bring` returned is there."""

    def send(self, moved: Tensor, resting: Tensor) -> None:
        """Start copying `moved` into `resting`; the caller lets `moved` go."""


class DirectLane:
    """Copies at once: for momentum that lies on the device of its parameter."""

    def bring(self, resting: Tensor, device: torch.device) -> Tensor:
        """Copy, also within one device."""
        return resting.to(device, copy=True)

    def arrive(self, moved: Tensor) -> None:
        """Nothing is on its way."""

    def send(self, moved: Tensor, resting: Tensor) -> None:
        """Copy back."""
        resting.copy_(moved)


class StreamLane:
    """Copies between pinned CPU memory and a CUDA device on a stream of their own.

    Args:
        device: of the update.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def bring(self, resting: Tensor, device: torch.device) -> Tensor:
        """Start the copy; in order after earlier copies of the same memory, which are on this stream too."""
        with torch.cuda.stream(self._stream):
            return resting.to(device, non_blocking=True, copy=True)

    def arrive(self, moved: Tensor) -> None:
        """Let the stream of the update wait for all copies so far."""
        current = torch.cuda.current_stream(moved.device)
        current.wait_stream(self._stream)
        moved.record_stream(current)

    def send(self, moved: Tensor, resting: Tensor) -> None:
        """Start the copy once the update has written `moved`; its memory is not reused before that is done."""
        self._stream.wait_stream(torch.cuda.current_stream(moved.device))
        with torch.cuda.stream(self._stream):
            resting.copy_(moved, non_blocking=True)
        moved.record_stream(self._stream)

    def settle(self) -> None:
        """Wait on the host until nothing is on its way."""
        self._stream.synchronize()


@functools.cache
def _stream_lane(device: torch.device) -> StreamLane:
    lane = StreamLane(device)
    _LANES.append(lane)
    return lane


_LANES: list[StreamLane] = []
_DIRECT = DirectLane()


def lane_between(rest: torch.device, work: torch.device) -> CopyLane:
    """Return how to copy: on one stream per CUDA device where the two differ, else at once."""
    return _stream_lane(work) if work.type == "cuda" and rest != work else _DIRECT


def settle_copies() -> None:
    """Wait until offloaded momenta are in CPU memory: before the host reads them. Free where nothing is offloaded."""
    for lane in _LANES:
        lane.settle()


def _device(entry: MomentumOwner) -> torch.device:
    return local_tensor(entry.param).device
