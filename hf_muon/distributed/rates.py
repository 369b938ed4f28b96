# SPDX-License-Identifier: Apache-2.0
"""Measured rates of one device: what `hf-muon calibrate` writes, and what owner plans and simulations read."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ..orthogonalize import cost, ns_flops, resolve_dtype

logger = logging.getLogger("hf_muon.distributed")

FORMAT = 1
METHODS = cost.METHODS
NS_STEPS = 5  # of the measured orthogonalizations; the ratio between shapes hardly depends on it


@dataclass(frozen=True)
class ShapeSeconds:
    """One measured orthogonalization.

    Args:
        short: short side of the matrix.
        long: long side.
        method: the form that ran, `gram` or `standard`.
        seconds: of one matrix, in a batch of a few.
    """

    short: int
    long: int
    method: str
    seconds: float


@dataclass(frozen=True)
class DeviceRates:
    """What one device does per second.

    Args:
        device: its name, as `device_name` gives it.
        device_type: `cpu` or `cuda`.
        dtype: of the Newton-Schulz products, `float32` or `bfloat16`, say.
        product_flops: FLOP/s of a large matrix product in that dtype.
        memory_bytes: bytes read and written per second by a large copy.
        newton_schulz: measured orthogonalizations.
        torch: version that measured.
        threads: CPU threads that measured.
        link_bytes: bytes/s between the ranks that measured together, as (N-1)/N B over the seconds of an all-gather.
        link_latency: seconds of the smallest collective divided by its N-1 hops. Both None from one process.
    """

    device: str
    device_type: str
    dtype: str
    product_flops: float
    memory_bytes: float
    newton_schulz: tuple[ShapeSeconds, ...]
    torch: str = ""
    threads: int = 1
    link_bytes: float | None = None
    link_latency: float | None = None
    _known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, m: int, n: int, batch: int = 1) -> float:
        """Return the seconds to orthogonalize `batch` matrices of shape (m, n), in the form that would be run.

        The FLOPs of `ns_flops` over a rate that is interpolated between the measured shapes of that form: linear in
        the logarithm of the short side, then in that of the aspect; the nearest measured one outside.
        """
        key = (min(m, n), max(m, n))
        if key not in self._known:
            self._known[key] = self._seconds(*key)
        return batch * self._known[key]

    def _seconds(self, short: int, long: int) -> float:
        if not short:
            return 0.0
        method = cost.resolve_method("gram", short, long, NS_STEPS, device_type=self.device_type)
        rows = [row for row in self.newton_schulz if row.method == method] or list(self.newton_schulz)
        aspects: dict[float, list[tuple[float, float]]] = {}
        for row in rows:
            rate = self._flops(row.short, row.long, row.method) / row.seconds
            aspects.setdefault(row.long / row.short, []).append((math.log(row.short), rate))
        rates = [(math.log(aspect), _between(line, math.log(short))) for aspect, line in aspects.items()]
        return self._flops(short, long, method) / _between(rates, math.log(long / short))

    def _flops(self, short: int, long: int, method: str) -> int:
        return ns_flops(short, long, steps=NS_STEPS, method=method, device_type=self.device_type)

    def digest(self) -> str:
        """Return a short text that differs whenever a figure differs."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the documented keys of the file."""
        names = (item.name for item in fields(self) if item.compare)
        data = {name: getattr(self, name) for name in names}
        return {"format": FORMAT, **data, "newton_schulz": [asdict(row) for row in self.newton_schulz]}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def read_rates(path: str | os.PathLike[str]) -> DeviceRates:
    """Read what `hf-muon calibrate` wrote.

    Raises:
        ValueError: no such file, or not one of ours; the message names the file and what is wrong.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no JSON"
        raise ValueError(
            f"rates must be a file that hf-muon calibrate wrote; got {os.fspath(path)} ({reason}). Run it once."
        ) from None
    try:
        return _from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"rates must be a file that hf-muon calibrate wrote; got {os.fspath(path)}: {what}. Run it again."
        ) from None


def device_name(device: torch.device) -> str:
    """Return the name that a file of rates carries: the GPU's own, or `cpu` with the machine's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}"


def warn_of_other_device(rates: DeviceRates, device: torch.device, dtype: str = "auto") -> bool:
    """Log once per call where the rates come from another device or dtype than the run's; return whether they do.

    Only the ratios between shapes count for owners, and no result depends on who owns what: no reason to stop a run.

    Args:
        rates: what was read.
        device: of this rank.
        dtype: of the run's Newton-Schulz products, `auto` included.
    """
    here = (device_name(device), str(resolve_dtype(dtype, device)).removeprefix("torch."))
    if here == (rates.device, rates.dtype):
        return False
    logger.warning(
        "rates were measured on %s in %s, but this run uses %s in %s: owners may be balanced less well. Run hf-muon "
        "calibrate here.",
        rates.device,
        rates.dtype,
        *here,
    )
    return True


def _from_dict(data: Mapping[str, Any]) -> DeviceRates:
    if data["format"] != FORMAT:
        raise ValueError(f"format must be {FORMAT}, not {data['format']!r}")
    rows = tuple(
        ShapeSeconds(int(row["short"]), int(row["long"]), str(row["method"]), float(row["seconds"]))
        for row in data["newton_schulz"]
    )
    if not rows:
        raise ValueError("newton_schulz must have at least one row")
    for row in rows:
        if row.method not in METHODS or not 0 < row.short <= row.long < 2**31 or not 1e-12 < row.seconds < math.inf:
            raise ValueError(f"newton_schulz must hold positive seconds of known forms, not {row}")
    numbers = {key: float(data[key]) for key in ("product_flops", "memory_bytes")}
    numbers |= {key: float(data[key]) for key in ("link_bytes", "link_latency") if data.get(key) is not None}
    for key, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{key} must be above 0, not {value}")
    return DeviceRates(
        device=str(data["device"]),
        device_type=str(data["device_type"]),
        dtype=str(data["dtype"]),
        newton_schulz=rows,
        torch=str(data.get("torch", "")),
        threads=int(data.get("threads", 1)),
        product_flops=numbers["product_flops"],
        memory_bytes=numbers["memory_bytes"],
        link_bytes=numbers.get("link_bytes"),
        link_latency=numbers.get("link_latency"),
    )


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at `at` of the line through sorted points, that of the nearest end outside."""
    points = sorted(points)
    before = max((p for p in points if p[0] <= at), default=points[0])
    after = min((p for p in points if p[0] >= at), default=points[-1])
    if before[0] == after[0]:
        return before[1]
    share = (at - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


__all__ = ["NS_STEPS", "DeviceRates", "ShapeSeconds", "device_name", "read_rates", "warn_of_other_device"]


def work_on(device_type: str, rates: DeviceRates | None) -> Callable[..., float]:
    """Return the cost of orthogonalizing `batch` matrices (m, n): measured seconds, else FLOPs of this kind of device.

    Kinds differ: a CPU computes large symmetric products by half.
    """
    return functools.partial(ns_flops, device_type=device_type) if rates is None else rates.seconds
