# SPDX-License-Identifier: Apache-2.0
"""One code path for devices with streams and for the CPU: where communication is issued, and how it is awaited.

On CUDA a collective is issued under a high-priority side stream that first waits for the compute stream; waiting for
its handle makes the *compute stream* wait, never the host. On the CPU the handle of an asynchronous gloo operation
blocks the host. No tensor is recorded on a foreign stream: every buffer is allocated on the compute stream, and freed
only after the compute stream has waited for whatever used it elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..tracing import Span, trace


class CommunicationStream:
    """A side stream on CUDA, nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def issue(self) -> Iterator[None]:
        """Issue what runs inside on the side stream, after all work already queued on the compute stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> StreamMark:
        """Return a handle for everything issued so far, where no collective gives one (a group of one rank)."""
        return StreamMark(None if self._stream is None else self._stream.record_event())


class StreamMark:
    """Waits like the handle of a collective: the current stream for an event, the host never.

    Args:
        event: a CUDA event; None on the CPU, where nothing is left to wait for.
    """

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> None:
        """Make the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class Pending:
    """A collective under way: keeps its buffers alive, and turns a failure into an error that names the place.

    Args:
        what: for the message, for example "broadcast of model.layers.0".
        works: handles of `torch.distributed`; empty when there was nothing to send.
        keep: tensors that must outlive the operation.
        timeout: how long one wait may block the host (CPU backends only); None: the process group's own limit.
        spans: one per handle, while spans are recorded.
    """

    def __init__(
        self,
        what: str,
        works: Sequence[dist.Work | StreamMark],
        keep: tuple[torch.Tensor, ...] = (),
        timeout: timedelta | None = None,
        spans: Sequence[Span | None] = (),
    ) -> None:
        self._what, self._works, self._keep, self._timeout = what, works, keep, timeout
        self._spans = spans or [None] * len(works)

    def futures(self) -> list[torch.futures.Future]:
        """Return the futures of the collectives, for whoever waits in another way."""
        return [work.get_future() for work in self._works if not isinstance(work, StreamMark)]

    def wait(self) -> None:
        """Make later work on this device see the result. Safe to call twice.

        Raises:
            RuntimeError: a rank died, timed out, or ran other collectives than this one.
        """
        works, self._works = self._works, ()
        try:
            with trace("wait", self._what) if works else contextlib.nullcontext():
                for work, span in zip(works, self._spans, strict=False):
                    self._wait_for(work, span)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._what} must be joined by every rank; got {error}. "
                "A rank has ended or took another path through the model: look for the first error among the ranks."
            ) from error
        self._keep = ()

    def _wait_for(self, work: dist.Work | StreamMark, span: Span | None) -> None:
        if span is not None:
            span.wait()
        try:
            if self._timeout is None:
                work.wait()
            else:
                work.wait(self._timeout)
        finally:
            if span is not None:
                span.finish()
