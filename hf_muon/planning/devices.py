# SPDX-License-Identifier: Apache-2.0
"""Devices for simulations: what one does per second, and how it is connected to others.

Presets hold what large kernels reach in practice, as a share of the vendor's data sheet: 0.75 of the dense bfloat16
FLOP/s, 0.8 of the memory's and of the links' bytes/s. They are assumptions; `--set` and `hf-muon calibrate` replace
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from ..config import nearest
from ..distributed.rates import DeviceRates
from ..orthogonalize import ns_flops
from .network import LinkNetwork, Network


@dataclass(frozen=True)
class SimulatedDevice:
    """One accelerator and its links.

    Args:
        name: for people.
        product_flops: FLOP/s of large matrix products.
        pass_share: share of that which forward and backward reach, communication apart.
        ns_share: share of that which the products of Newton-Schulz reach, where nothing was measured.
        memory_bytes: bytes/s read and written by elementwise kernels.
        intra_bytes: see `LinkNetwork`, as the next four.
        inter_bytes: of one machine.
        intra_latency: seconds.
        inter_latency: seconds.
        launch: seconds per collective.
        ranks_per_node: ranks of a machine.
        device_type: `cuda` or `cpu`, for the FLOP count of Newton-Schulz.
        overlaps: whether communication leaves the device free to compute.
        rates: measured Newton-Schulz seconds.
    """

    name: str
    product_flops: float
    memory_bytes: float
    intra_bytes: float
    inter_bytes: float
    pass_share: float = 0.6
    ns_share: float = 0.7
    intra_latency: float = 2e-6
    inter_latency: float = 6e-6
    launch: float = 10e-6
    ranks_per_node: int = 8
    device_type: str = "cuda"
    overlaps: bool = True
    rates: DeviceRates | None = None

    @cached_property
    def network(self) -> Network:
        """Return the seconds of collectives over the device's links."""
        return LinkNetwork(
            self.intra_bytes,
            self.inter_bytes,
            self.intra_latency,
            self.inter_latency,
            self.launch,
            self.ranks_per_node,
        )

    def orthogonalize_seconds(self, parts: Sequence[tuple[int, int, int]]) -> float:
        """Return the seconds to orthogonalize matrices given as (count, m, n)."""
        if self.rates is not None:
            return sum(self.rates.seconds(m, n, count) for count, m, n in parts)
        flops = sum(ns_flops(m, n, batch=count, device_type=self.device_type) for count, m, n in parts)
        return flops / (self.ns_share * self.product_flops)

    def with_rates(self, rates: DeviceRates) -> SimulatedDevice:
        """Return the device with everything that was measured in place of what was assumed."""
        measured = {"intra_bytes": rates.link_bytes, "intra_latency": rates.link_latency}
        return replace(
            self,
            name=rates.device,
            product_flops=rates.product_flops,
            memory_bytes=rates.memory_bytes,
            device_type=rates.device_type,
            overlaps=rates.device_type != "cpu",
            rates=rates,
            **{key: value for key, value in measured.items() if value is not None},  # type: ignore[arg-type]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; of the measured rates their name alone."""
        data = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "rates"}
        return {**data, "measured": self.rates is not None}


# Data sheets: dense bfloat16 FLOP/s, memory bytes/s, NVLink bytes/s in one direction, network bytes/s of a machine.
_SHEETS: Mapping[str, tuple[float, float, float, float]] = {
    "a100": (312e12, 2.0e12, 300e9, 8 * 25e9),
    "h100": (989e12, 3.35e12, 450e9, 8 * 50e9),
    "h200": (989e12, 4.8e12, 450e9, 8 * 50e9),
    "b200": (2250e12, 8.0e12, 900e9, 8 * 50e9),
}
PRESETS = {
    name: SimulatedDevice(name, 0.75 * flops, 0.8 * memory, 0.8 * intra, 0.8 * inter)
    for name, (flops, memory, intra, inter) in _SHEETS.items()
}
SETTABLE = tuple(item.name for item in fields(SimulatedDevice) if item.name not in ("name", "device_type", "rates"))


def find_device(name: str, overrides: Mapping[str, Any] | None = None) -> SimulatedDevice:
    """Return a preset with some of its figures replaced.

    Args:
        name: of `PRESETS`.
        overrides: fields of `SimulatedDevice`; values may be text.

    Raises:
        ValueError: an unknown preset or field, or a figure that is not above 0.
    """
    if name not in PRESETS:
        raise ValueError(f"device must be one of {', '.join(PRESETS)}; got {name!r}.{nearest(name, tuple(PRESETS))}")
    return replace_figures(PRESETS[name], overrides or {})


def replace_figures(device: SimulatedDevice, overrides: Mapping[str, Any]) -> SimulatedDevice:
    """Return the device with some of its figures replaced; see `find_device`."""
    figures: dict[str, Any] = {key: _figure(key, value) for key, value in overrides.items()}
    return replace(device, **figures)


def _figure(key: str, value: Any) -> float | int | bool:
    if key not in SETTABLE:
        raise ValueError(f"{key!r} is no figure of a device.{nearest(key, SETTABLE)}")
    if key == "overlaps":
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"overlaps must be true or false; got {value!r}.")
        return str(value).lower() == "true"
    try:
        number = int(value) if key == "ranks_per_node" else float(value)
    except (TypeError, ValueError):
        number = -1
    what, fits = "a number above 0", number > 0
    if key in ("intra_latency", "inter_latency", "launch"):
        what, fits = "a number of at least 0", number >= 0
    elif key == "ranks_per_node":
        what = "a whole number of at least 1"
    elif key.endswith("_share"):
        what, fits = "a share of product_flops, above 0 and at most 1", 0 < number <= 1
    if not (fits and math.isfinite(number)):
        raise ValueError(f"{key} must be {what}; got {value!r}.")
    return number
