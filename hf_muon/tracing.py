# SPDX-License-Identifier: Apache-2.0
"""Names for what takes time: ranges in the traces of torch.profiler, and spans for a timeline while one is recorded.

A profiler cannot see an asynchronous collective on the CPU: it runs on threads of the backend. So whoever starts and
awaits one notes it here as a `Span`, if `record_spans` is active; else nothing is kept. Times are the host's: on CUDA
they say when work was issued, and the profiler says when it ran.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class Span:
    """A stretch of time on one rank; seconds of `time.perf_counter`, which the processes of one machine share.

    Attributes:
        kind: broadcast, reduce, ... for collectives; forward, backward, newton_schulz for work.
        name: of the unit, or the shape.
        peer: index of the collective's root in its group; -1 for work.
        begin: when it was issued or began.
        waited: when somebody began to wait for it.
        done: when the backend was done with it, where it says so.
        end: when the wait, or the work, was over.
    """

    kind: str
    name: str
    peer: int = -1
    begin: float = 0.0
    waited: float | None = None
    done: float | None = None
    end: float | None = None

    def wait(self) -> None:
        """Note that somebody waits from now on."""
        self.waited = time.perf_counter()

    def finish(self) -> None:
        """Note the end, once."""
        if self.end is None:
            self.end = time.perf_counter()

    def arrive(self, _: torch.futures.Future) -> None:
        """Note that the backend is done; called on its thread."""
        self.done = time.perf_counter()


_spans: list[Span] | None = None


@contextlib.contextmanager
def record_spans() -> Iterator[list[Span]]:
    """Record the spans of this process into the list that is given out, in the order they began."""
    global _spans
    before, _spans = _spans, []
    try:
        yield _spans
    finally:
        _spans = before


def begin_span(kind: str, name: str, peer: int = -1) -> Span | None:
    """Begin a span; None while nothing is recorded."""
    if _spans is None:
        return None
    span = Span(kind, name, peer, time.perf_counter())
    _spans.append(span)
    return span


def begin_flight(kind: str, name: str, peer: int, start: Callable[[], Any]) -> tuple[Any, Span | None]:
    """Start an asynchronous collective; return its handle, and its span while spans are recorded."""
    span = begin_span(kind, name, peer)
    work = start()
    if span is not None:
        work.get_future().add_done_callback(span.arrive)
    return work, span


@contextlib.contextmanager
def trace(kind: str, name: str) -> Iterator[None]:
    """Show what runs inside as `hf_muon::kind name` in a profiler's trace; record it as a span of work."""
    span = begin_span(kind, name)
    try:
        with record_function(f"hf_muon::{kind} {name}"):
            yield
    finally:
        if span is not None:
            span.finish()


def traced(kind: str, describe: Callable[..., str]) -> Callable[[F], F]:
    """Trace every call of a function; `describe` makes the name out of its arguments."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with trace(kind, describe(*args, **kwargs)):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
