# SPDX-License-Identifier: Apache-2.0
"""Measure the rates of this device: Newton-Schulz by shape and form, products, copies, and collectives of the job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from ..distributed.rates import METHODS, NS_STEPS, DeviceRates, ShapeSeconds, device_name
from ..orthogonalize import newton_schulz, ns_flops, resolve_dtype, resolve_method

Clock = Callable[[], float]
SIDES = (64, 128, 256, 512, 1024, 2048, 4096)
ASPECTS = (1, 4)
BATCH_BYTES = 64 * 2**20  # a batch of equal matrices as owners have it, in float32
BATCH = 4
PRODUCT_SIDES = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
LINK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**28}
KINDS = ("all_gather", "reduce_scatter", "broadcast", "reduce")
_MIN_REPEATS, _MAX_REPEATS = 2, 50
_PRODUCT_SHARE = 0.1  # of the given time, for the product and the copy together


def calibrate(
    device: torch.device | str,
    *,
    seconds: float = 60.0,
    dtype: str = "auto",
    on_row: Callable[[ShapeSeconds], object] = lambda row: None,
) -> DeviceRates:
    """Measure this device; where a process group runs, on all its ranks at once, and its links too.

    Shapes go from small to large until the time is up: the largest that are missing are taken to run at the rate of
    the largest that was measured.

    Args:
        device: where to measure.
        seconds: time to spend, roughly.
        dtype: of the Newton-Schulz products; `auto` as in training.
        on_row: called after each shape.

    Raises:
        ValueError: `seconds` is not above 0, or an unknown dtype.
    """
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds must be a number above 0; got {seconds!r}.")
    device = torch.device(device)
    product_dtype = resolve_dtype(dtype, device)
    begin = time.perf_counter()
    flops = product_rate(device, product_dtype, seconds * _PRODUCT_SHARE / 2)
    memory = copy_rate(device, seconds * _PRODUCT_SHARE / 2)
    link_bytes, link_latency = link_rates(device)
    rows = []
    for row in _measure_shapes(device, product_dtype, flops, begin + seconds):
        rows.append(row)
        on_row(row)
    return DeviceRates(
        device=device_name(device),
        device_type=device.type,
        dtype=str(product_dtype).removeprefix("torch."),
        product_flops=flops,
        memory_bytes=memory,
        newton_schulz=tuple(rows),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        link_bytes=link_bytes,
        link_latency=link_latency,
    )


def product_rate(device: torch.device, dtype: torch.dtype, budget: float = 1.0) -> float:
    """Return the FLOP/s of a large square product."""
    side = PRODUCT_SIDES.get(device.type, 1024)
    a = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * side**3 / timed(lambda: torch.mm(a, a, out=out), device, budget)


def copy_rate(device: torch.device, budget: float = 1.0) -> float:
    """Return the bytes read and written per second by a large copy."""
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device, budget)


def link_rates(device: torch.device) -> tuple[float | None, float | None]:
    """Return (bytes/s, seconds per hop) of an all-gather over the running process group; None without one."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return None, None
    latency, per_byte = collective_line("all_gather", device)
    return (ranks - 1) / ranks / per_byte, max(latency, 1e-9) / (ranks - 1)


def collective_line(
    kind: str, device: torch.device, budget: float = 1.0, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """Return (seconds of the smallest one, seconds per byte of the whole buffer) of a collective. Collective.

    Args:
        kind: of `KINDS`.
        device: where the buffers live.
        budget: seconds to spend.
        clock: what counts the seconds; `time.process_time` for the CPU's.
    """
    ranks = dist.get_world_size()
    large = LINK_BYTES.get(device.type, LINK_BYTES["cpu"]) // (4 * ranks) * ranks
    times = [_collective_seconds(kind, elements, device, budget / 2, clock) for elements in (ranks, large)]
    found = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    small, whole = found.tolist()
    return small, max(whole - small, 1e-12) / (4 * large)


def _collective_seconds(kind: str, elements: int, device: torch.device, budget: float, clock: Clock) -> float:
    ranks = dist.get_world_size()
    whole = torch.zeros(elements, device=device)
    part = torch.zeros(elements // ranks, device=device)
    run = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "reduce": lambda: dist.reduce(whole, dst=0),
    }[kind]

    def one() -> None:
        run()
        if kind in ("broadcast", "reduce"):  # its source, or the ranks that give, may leave before the others
            dist.barrier()

    run()
    # Every rank repeats as often as the slowest of them can in the time.
    first = torch.tensor([timed(one, device, 0.0)], dtype=torch.float64, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(budget / max(first.item(), 1e-6))))
    seconds = statistics.median(_once(one, device, clock) for _ in range(repeats))
    if kind in ("broadcast", "reduce"):
        seconds -= statistics.median(_once(dist.barrier, device, clock) for _ in range(5))
    return seconds


def timed(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the median seconds of a call, repeated for `budget` seconds (twice at least, 50 times at most)."""
    run()
    end = time.perf_counter() + budget
    times: list[float] = []
    while len(times) < _MIN_REPEATS or (len(times) < _MAX_REPEATS and time.perf_counter() < end):
        times.append(_once(run, device))
    return statistics.median(times)


def _once(run: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    _synchronize(device)
    begin = clock()
    run()
    _synchronize(device)
    return clock() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_shapes(device: torch.device, dtype: torch.dtype, flops: float, deadline: float) -> Iterator[ShapeSeconds]:
    shapes = [
        (side, aspect * side, method)
        for side in SIDES
        for aspect in ASPECTS
        for method in METHODS
        if resolve_method(method, side, aspect * side, NS_STEPS, device_type=device.type) == method
    ]
    for index, (short, long, method) in enumerate(shapes):
        batch = max(1, min(BATCH, BATCH_BYTES // (4 * short * long)))
        expected = batch * ns_flops(short, long, steps=NS_STEPS, method=method, device_type=device.type) / flops
        left = deadline - time.perf_counter()
        if index and left < 3 * expected:
            return
        matrices = torch.randn(batch, short, long, device=device)
        budget = left / (len(shapes) - index) / 2
        seconds = timed(partial(newton_schulz, matrices, method=method, dtype=dtype), device, budget)
        yield ShapeSeconds(short, long, method, seconds / batch)
