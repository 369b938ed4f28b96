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
        alternating: the columns hold this many matrices in turn, as PEFT stores the `B` of an adapter on a stack of
            experts: (m, r*alternating) is read as (alternating, m, r).
        head_rows: for each part (one entry where there are no parts) the rows of one attention head, 0 for a part
            that stays whole. The heads of a part come as a batch: (heads, head_rows, n).
        routed: the matrices of the batch are experts: one whose gradient is exactly zero had no token in this step
            and is left as it is, momentum included.
    """

    transposed: bool = False
    groups: int = 1
    parts: tuple[int, ...] = ()
    stack: int = 1
    flatten: bool = False
    alternating: int = 1
    head_rows: tuple[int, ...] = ()
    routed: bool = False

    def __post_init__(self) -> None:
        """Check the numbers once, so that the optimizer can trust them."""
        if min(self.groups, self.stack, self.alternating, *self.parts) < 1:
            raise ValueError(f"MatrixView must have groups, stack and parts of at least 1; got {self}.")
        if self.head_rows and (min(self.head_rows) < 0 or len(self.head_rows) != max(1, len(self.parts))):
            raise ValueError(f"MatrixView must have one entry of head_rows per part, 0 or more; got {self}.")

    @property
    def is_plain(self) -> bool:
        """Return whether the storage itself is the one matrix (or a batch of them)."""
        return self == MatrixView()

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices of `tensor`, output dimension first.

        Args:
            tensor: whole tensor in storage layout, any dtype and device (also meta).

        Returns:
            One `(..., m_i, n)` tensor per part, `(..., heads, head_rows, n)` for a part that is split by head; views
            wherever strides allow (grouped parts are copied).

        Raises:
            ValueError: the shape does not fit the view.
        """
        parts = self._parts_of(self._output_first(tensor), tensor.shape)
        for i, rows in enumerate(self.head_rows):
            if rows and parts[i].shape[-2] % rows:
                raise ValueError(
                    f"MatrixView must see whole heads of {rows} rows; got {parts[i].shape[-2]} rows in shape "
                    f"{tuple(tensor.shape)}. Use whole tensors, never local rows."
                )
            if rows:
                parts[i] = parts[i].unflatten(-2, (-1, rows))
        return parts

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
        matrices = [
            matrix.flatten(-3, -2) if rows else matrix
            for matrix, rows in zip(matrices, self.head_rows or (0,) * len(matrices), strict=True)
        ]
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
        if self.alternating > 1:
            storage = storage.movedim(0, -1).flatten(-2)
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
            "alternating": self.alternating,
            "head_rows": list(self.head_rows),
            "routed": self.routed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MatrixView:
        """Build a view from `to_dict()` output; absent fields take their defaults."""
        return cls(**{**data, **{name: tuple(data.get(name, ())) for name in ("parts", "head_rows")}})

    def per_matrix(self, flags: Tensor) -> Tensor:
        """Reduce true/false values in storage layout to "any in this matrix of the batch".

        Args:
            flags: bool, in the storage layout of a `routed` parameter: (E, ., .), (E*m, n) with `stack`, or (m, r*E)
                with `alternating`.

        Returns:
            Bool tensor that broadcasts against the storage: (E, 1, 1), (E*m, 1) or (1, r*E).
        """
        if self.alternating > 1:
            experts = flags.unflatten(1, (-1, self.alternating)).flatten(0, 1).any(dim=0)
            return experts.repeat(flags.shape[1] // self.alternating)[None]
        if self.stack == 1:
            return flags.flatten(1).any(dim=1)[(...,) + (None,) * (flags.ndim - 1)]
        experts = flags.unflatten(0, (self.stack, -1)).flatten(1).any(dim=1, keepdim=True)
        return experts.repeat_interleave(flags.shape[0] // self.stack, dim=0)

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
        if self.alternating > 1:
            if matrix.ndim != 2 or matrix.shape[1] % self.alternating:
                raise ValueError(
                    f"MatrixView must see columns of {self.alternating} equal matrices; got {tuple(tensor.shape)}."
                )
            matrix = matrix.unflatten(1, (-1, self.alternating)).movedim(-1, 0)
        return matrix.mT if self.transposed else matrix

    def _parts_of(self, matrix: Tensor, shape: Sequence[int]) -> list[Tensor]:
        if not self.parts:
            return [matrix]
        self._check_rows(matrix.shape[-2], shape)
        if self.groups == 1:
            return list(matrix.split(self.parts, dim=-2))
        *lead, _, columns = matrix.shape
        blocks = matrix.reshape(*lead, self.groups, sum(self.parts), columns)  # rows -> (group, row in group)
        return [
            part.reshape(*lead, self.groups * rows, columns)
            for part, rows in zip(blocks.split(self.parts, dim=-2), self.parts, strict=True)
        ]

    def _check_rows(self, rows: int, shape: Sequence[int]) -> None:
        if self.groups * sum(self.parts) != rows:
            raise ValueError(
                f"MatrixView must cover all output rows ({self.groups} x {self.parts}); got shape {tuple(shape)}. "
                "Use whole tensors, never local rows."
            )
