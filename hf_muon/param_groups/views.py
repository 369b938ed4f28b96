# SPDX-License-Identifier: Apache-2.0
"""`MatrixView`: how the storage of one parameter maps to the matrices that Muon orthogonalizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MatrixView:
    """Describe the matrices inside a parameter, always with the whole (unsharded) shape in mind.

    The steps run in the order of the fields below; the default is "the last two axes are one (out, in) matrix,
    leading axes are a batch". Holds plain numbers only, so it hashes, pickles and survives a move between devices.

    Attributes:
        flatten: the axes after the first are one (a convolution kernel (out, in, k, k) as (out, in*k*k)).
        stack: the rows hold this many matrices one above the other: (stack*m, n) is read as (stack, m, n).
        transposed: the storage is (..., in, out), as in transformers' `Conv1D` and the GPT-OSS experts.
        groups: the output rows come as this many equal blocks (heads, tensor-parallel slices) ...
        parts: ... each of them holding consecutive parts of these many rows. Part i of every block together is
            matrix i. Empty: one matrix.
    """

    transposed: bool = False
    groups: int = 1
    parts: tuple[int, ...] = ()
    stack: int = 1
    flatten: bool = False

    def __post_init__(self) -> None:
        """Check the numbers once, so that the optimizer can trust them."""
        if self.groups < 1 or self.stack < 1 or any(rows < 1 for rows in self.parts):
            raise ValueError(f"MatrixView must have groups, stack and parts of at least 1; got {self}.")

    @property
    def is_plain(self) -> bool:
        """Return whether the storage itself is the one matrix (or a batch of them)."""
        return self == MatrixView()

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices of `tensor`, output dimension first.

        Args:
            tensor: whole tensor in storage layout, any dtype and device (also meta).

        Returns:
            One `(..., m_i, n)` tensor per part; views wherever strides allow (grouped parts are copied).

        Raises:
            ValueError: the shape does not fit the view.
        """
        matrix = self._output_first(tensor)
        if not self.parts:
            return [matrix]
        self._check_rows(matrix.shape[-2], tensor.shape)
        *lead, _, columns = matrix.shape
        if self.groups == 1:
            return list(matrix.split(self.parts, dim=-2))
        blocks = matrix.reshape(*lead, self.groups, sum(self.parts), columns)  # rows -> (group, row in group)
        return [
            part.reshape(*lead, self.groups * rows, columns)
            for part, rows in zip(blocks.split(self.parts, dim=-2), self.parts, strict=True)
        ]

    def assemble(self, matrices: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
        """Put `matrices` back into the storage layout: the inverse of `matrices()`.

        Args:
            matrices: what `matrices()` returned, or results of the same shapes.
            like: a tensor with the storage shape; needed for `flatten` views of more than two axes, and where
                given the result gets its dtype.

        Returns:
            A tensor of the storage shape. It may share memory with a single given matrix.

        Raises:
            ValueError: the number of matrices is wrong, or `like` is missing where the shape depends on it.
        """
        if len(matrices) != max(1, len(self.parts)):
            raise ValueError(f"assemble must get {max(1, len(self.parts))} matrices; got {len(matrices)}.")
        matrix = matrices[0]
        if self.parts:
            blocks = [
                part.reshape(*part.shape[:-2], self.groups, rows, part.shape[-1])
                for part, rows in zip(matrices, self.parts, strict=True)
            ]
            joined = torch.cat(blocks, dim=-2)
            matrix = joined.reshape(*joined.shape[:-3], -1, joined.shape[-1])
        storage = matrix.mT if self.transposed else matrix
        if self.stack > 1:
            storage = storage.reshape(-1, storage.shape[-1])
        if like is not None:
            storage = storage.reshape(like.shape).to(like.dtype)
        elif self.flatten:
            raise ValueError("assemble must get `like` for a flattened view. Pass the parameter.")
        return storage

    def matrix_shapes(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return `(batch, m, n)` of each matrix that a parameter of this `shape` holds; m is the output dimension."""
        result = []
        for matrix in self.matrices(torch.empty(tuple(shape), device="meta")):
            *lead, rows, columns = matrix.shape
            batch = 1
            for size in lead:
                batch *= size
            result.append((batch, rows, columns))
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serialisable fields; `from_dict` restores the view."""
        return {
            "transposed": self.transposed,
            "groups": self.groups,
            "parts": list(self.parts),
            "stack": self.stack,
            "flatten": self.flatten,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MatrixView:
        """Build a view from `to_dict()` output; absent fields take their defaults."""
        return cls(**{**data, "parts": tuple(data.get("parts", ()))})

    def _output_first(self, tensor: Tensor) -> Tensor:
        matrix = tensor.flatten(1) if self.flatten else tensor
        if matrix.ndim < 2:
            raise ValueError(f"MatrixView must see at least two axes; got shape {tuple(tensor.shape)}.")
        if self.stack > 1:
            if matrix.ndim != 2 or matrix.shape[0] % self.stack:
                raise ValueError(
                    f"MatrixView must see rows in {self.stack} equal matrices; got shape {tuple(tensor.shape)}."
                )
            matrix = matrix.unflatten(0, (self.stack, -1))
        return matrix.mT if self.transposed else matrix

    def _check_rows(self, rows: int, shape: Sequence[int]) -> None:
        if self.groups * sum(self.parts) != rows:
            raise ValueError(
                f"MatrixView must cover all output rows ({self.groups} x {self.parts}); got shape {tuple(shape)}. "
                "Use whole tensors, never local rows."
            )
