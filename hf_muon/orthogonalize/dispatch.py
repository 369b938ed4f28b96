# SPDX-License-Identifier: Apache-2.0
"""Which dtype the products run in, and whether a batch is one batched product or a loop, per device."""

from __future__ import annotations

import functools
import logging
import time

import torch

from ..config import nearest

logger = logging.getLogger("hf_muon.orthogonalize")

PRODUCT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16")  # names in torch.cpu.get_capabilities()
_PROBE_SIDE = 256
_MIN_GAIN = 1.5  # bfloat16 costs digits: take it only for a clear gain in speed
# From this size on BLAS alone keeps the cores of a CPU busy with one product.
_LOOP_ELEMENTS = 256 * 1024
# A stack that stays in the caches of the cores beats a longer one: measured with one thread per matrix, 16x576 51
# against 43 us (16 and 64 in a stack), 64x576 565 against 1,261 us (2 and 64), 16x4096 284 against 547 us (8 and 16).
_CPU_STACK_ELEMENTS_PER_THREAD = 128 * 1024
_STACK_ELEMENTS = 16 * 2**20  # elsewhere: 64 MiB of float32


def resolve_dtype(
    dtype: str | torch.dtype | None, device: torch.device | str, input_dtype: torch.dtype = torch.float32
) -> torch.dtype:
    """Return the dtype of the Newton-Schulz products.

    `None` and `auto` mean: float64 for float64 input; on CUDA bfloat16 from compute capability 8, else float32; on
    a CPU bfloat16 where the processor has bfloat16 instructions and one short measurement, kept for the life of the
    process, finds it at least 1.5x faster than float32; float32 elsewhere.

    Args:
        dtype: a name, a torch dtype, or None.
        device: where the matrix lives.
        input_dtype: dtype of the matrix.

    Raises:
        ValueError: an unknown or unsupported dtype.
    """
    if isinstance(dtype, torch.dtype):
        if dtype in PRODUCT_DTYPES.values():
            return dtype
        raise ValueError(f"dtype must be auto or one of {', '.join(PRODUCT_DTYPES)}; got {dtype}. Use auto.")
    if dtype is not None and dtype != "auto":
        if dtype not in PRODUCT_DTYPES:
            known = ("auto", *PRODUCT_DTYPES)
            raise ValueError(f"dtype must be one of {', '.join(known)}; got {dtype!r}.{nearest(dtype, known)}")
        return PRODUCT_DTYPES[dtype]
    if input_dtype == torch.float64:
        return torch.float64
    device = torch.device(device)
    if device.type == "cuda":
        return _cuda_dtype(device.index)
    if device.type == "cpu":
        return _cpu_dtype()
    return torch.float32


def loops_over_matrices(m: int, n: int, device_type: str) -> bool:
    """Return True where a batch of (m, n) matrices runs faster one by one than as batched products."""
    return device_type == "cpu" and m * n > _LOOP_ELEMENTS


def stack_size(m: int, n: int, device_type: str) -> int:
    """Return how many (m, n) matrices at most go into one stack, at least 1."""
    if loops_over_matrices(m, n, device_type):
        return 1
    cpu = device_type == "cpu"
    elements = _CPU_STACK_ELEMENTS_PER_THREAD * torch.get_num_threads() if cpu else _STACK_ELEMENTS
    return max(1, elements // max(1, m * n))


def cpu_has_native_bfloat16() -> bool:
    """Return True if torch reports bfloat16 instructions; False where this torch cannot tell."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(feature, False) for feature in _BF16_FEATURES)


@functools.cache
def _cuda_dtype(index: int | None) -> torch.dtype:
    major, _ = torch.cuda.get_device_capability(index)
    return torch.bfloat16 if major >= 8 else torch.float32


@functools.cache
def _cpu_dtype() -> torch.dtype:
    if not cpu_has_native_bfloat16():
        logger.info("Newton-Schulz products run in float32: this processor reports no bfloat16 instructions.")
        return torch.float32
    gain = _probe_seconds(torch.float32) / _probe_seconds(torch.bfloat16)
    chosen = torch.bfloat16 if gain >= _MIN_GAIN else torch.float32
    logger.info("Newton-Schulz products run in %s: bfloat16 was measured at %.1fx float32.", chosen, gain)
    return chosen


def _probe_seconds(dtype: torch.dtype) -> float:
    """Return the best of a few timings of one small product; constant input leaves random states alone."""
    square = torch.full((_PROBE_SIDE, _PROBE_SIDE), 0.5, dtype=dtype)
    out = torch.empty_like(square)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        torch.mm(square, square, out=out)
        best = min(best, time.perf_counter() - begin)
    return best
