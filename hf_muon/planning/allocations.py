# SPDX-License-Identifier: Apache-2.0
"""Count what a piece of work allocates, operator by operator, on any device: also on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._compat_planning import TorchDispatchMode, tree_leaves


class AllocationCounter(TorchDispatchMode):
    """Context manager: counts the bytes of storages that came to life inside and are still alive.

    What an operator allocates and frees within itself is not seen. Costs one sweep over what is alive per operator.

    Attributes:
        peak: the most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and note the storages of its results that it did not get."""
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := _storage(leaf)) not in given:
                self._alive[storage] = leaf.untyped_storage().nbytes()
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
