# SPDX-License-Identifier: Apache-2.0
"""`OwnedGradient`: the gradient of a matrix that one data-parallel rank owns, as every rank sees it.

The values are on the owner alone. What clipping, loss scaling and logging ask of a gradient has the same answer on
every rank all the same, from norms that the ranks exchanged when backward ended; so none of them communicates, and one
rank may ask alone. Everything else raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._compat import in_backward
from .._compat_ddp import empty_wrapper, plain_torch_function
from .streams import Pending


class NormTable:
    """The 2-norm and the largest absolute element of every matrix of a plan, on their way to all ranks.

    Args:
        table: shape (number of matrices, 2); valid after `pending`.
        pending: the all-reduce that fills it.
    """

    def __init__(self, table: Tensor, pending: Pending) -> None:
        self._table, self._pending = table, pending

    def row(self, index: int) -> Tensor:
        """Return a copy of one matrix's two norms."""
        self._pending.wait()
        return self._table[index].clone()


class Content:
    """What an owned gradient and its aliases share.

    Args:
        name: FQN of the parameter.
        owner: rank of the owner in the whole job.
        local: the values on the owner, None elsewhere.
        norms: a function that returns the two norms.
    """

    def __init__(self, name: str, owner: int, local: Tensor | None, norms: Callable[[], Tensor]) -> None:
        self.name, self.owner, self.local = name, owner, local
        self.unsent: Tensor | None = None  # gradients of later backward passes under no_sync, on this rank
        self._read_norms = norms
        self._norms: Tensor | None = None

    @property
    def norms(self) -> Tensor:
        """The 2-norm and the largest absolute element, shape (2,).

        Raises:
            RuntimeError: this rank has gradients that are in no norm yet.
        """
        if self.unsent is not None:
            raise RuntimeError(
                f"{self.name}.grad must be reduced before it is used; the last backward ran inside no_sync()."
                " Run the last micro-batch of a step outside it."
            )
        if self._norms is None:
            self._norms = self._read_norms()
        return self._norms

    def scale(self, factor: Any, operator_: Callable[[Tensor, Any], Tensor] = Tensor.mul_) -> None:
        """Multiply (or divide) values and norms by one number, which must be the same on all ranks."""
        operator_(self.norms, factor).abs_()
        if self.local is not None:
            operator_(self.local, factor)

    def clear(self) -> None:
        """Set everything to zero."""
        self.unsent = None
        self._norms = torch.zeros_like(self.norms)
        if self.local is not None:
            self.local.zero_()

    def copy(self) -> Content:
        """Return an independent copy."""
        norms = self.norms.clone()
        local = None if self.local is None else self.local.clone()
        return Content(self.name, self.owner, local, lambda: norms)


class OwnedGradient(Tensor):
    """A gradient whose values are on one rank. Put into `.grad` by `ReplicaOwners`.

    Norms (2 and infinity), multiplication and division by one number, `zero_`, `detach`, `clone`, `isfinite`, `isnan`
    and GradScaler's unscaling work alike on every rank, without communication.

    Attributes:
        content: the shared content; `content.local` is the averaged gradient on the owner, None elsewhere.
    """

    content: Content

    @staticmethod
    def __new__(cls, like: Tensor, content: Content) -> OwnedGradient:
        """Return a gradient that looks like `like`."""
        gradient: OwnedGradient = empty_wrapper(cls, like)
        gradient.content = content
        return gradient

    def __init__(self, like: Tensor, content: Content) -> None:
        pass  # all is done in __new__, as torch asks of tensor subclasses

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show where the values are."""
        return f"OwnedGradient({self.content.name}, shape={tuple(self.shape)}, owner=rank {self.content.owner})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickle would not hold the values."""
        raise _refusal(self, "pickling")

    def norm_of(self, order: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return the norm of this order as a 0-dim tensor, equal on all ranks."""
        if order not in (2, math.inf):
            raise _refusal(self, f"a norm of order {order}")
        return self.content.norms[0 if order == 2 else 1].to(dtype or self.dtype, copy=True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer `isfinite`, which torch would take apart; everything else is answered operator by operator."""
        if func in (torch.isfinite, Tensor.isfinite):
            return _everywhere(args[0], args[0].norm_of(math.inf).isfinite())
        return plain_torch_function(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operators that have an answer on every rank; refuse the others."""
        name = func.overloadpacket.__name__
        answer = _ANSWERS.get(name)
        if answer is None:
            raise _refusal(_first(args), name)
        return answer(func, *args, **(kwargs or {}))


def _refusal(gradient: OwnedGradient, what: str) -> RuntimeError:
    content = gradient.content
    return RuntimeError(
        f"{content.name}.grad must not be used in {what}: under DDP only its owner, rank {content.owner}, has the"
        " values. Norms of order 2 and inf, scaling by a number, zero_ and isfinite work on every rank;"
        " dmuon=off keeps whole gradients everywhere."
    )


def _first(args: Any) -> OwnedGradient:
    for arg in args:
        for item in arg if isinstance(arg, (list, tuple)) else [arg]:
            if isinstance(item, OwnedGradient):
                return item
    raise AssertionError("torch dispatches here only with an OwnedGradient among the arguments")


def _everywhere(gradient: OwnedGradient, answer: Tensor) -> Tensor:
    """Return a 0-dim answer in the shape of the gradient, so that `.all()` and `.any()` of it are right."""
    return answer.expand(gradient.shape)


def _vector_norm(
    func: Any, x: OwnedGradient, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if dim:
        raise _refusal(x, "a norm along some dimensions")
    return x.norm_of(order, dtype)


def _foreach_norm(func: Any, tensors: Any, order: Any = 2, dtype: Any = None) -> list[Tensor]:
    return [
        x.norm_of(order, dtype) if isinstance(x, OwnedGradient) else torch.linalg.vector_norm(x, order, dtype=dtype)
        for x in tensors
    ]


def _scale(operator_: Callable[[Tensor, Any], Tensor]) -> Callable[..., Any]:
    def run(func: Any, x: Any, factor: Any) -> Any:
        owned = [item for item in (x if isinstance(x, (list, tuple)) else [x]) if isinstance(item, OwnedGradient)]
        single = factor.dim() == 0 if isinstance(factor, Tensor) else isinstance(factor, (int, float))
        if not owned or not single or isinstance(factor, OwnedGradient):
            raise _refusal(_first((x, factor)), "multiplication by more than one number")
        for item in owned:
            item.content.scale(factor, operator_)
        if isinstance(x, (list, tuple)):
            if plain := [item for item in x if not isinstance(item, OwnedGradient)]:
                func(plain, factor)
            return None
        return x

    return run


def _zero(func: Any, x: Any) -> Any:
    for item in x if isinstance(x, (list, tuple)) else [x]:
        if isinstance(item, OwnedGradient):
            item.content.clear()
        else:
            item.zero_()
    return x


def _add(func: Any, x: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Take what autograd accumulates under no_sync()."""
    if not isinstance(x, OwnedGradient) or isinstance(other, OwnedGradient) or not in_backward():
        raise _refusal(_first((x, other)), "addition")
    content = x.content
    content.unsent = other.clone() if content.unsent is None else content.unsent.add_(other)
    return x


def _unscale(func: Any, tensors: Any, found_inf: Tensor, inverse: Tensor) -> None:
    """Do what GradScaler asks: note inf and NaN, then multiply. All ranks note the same."""
    plain = [x for x in tensors if not isinstance(x, OwnedGradient)]
    if plain:
        func(plain, found_inf, inverse)
    for x in tensors:
        if isinstance(x, OwnedGradient):
            bad = x.norm_of(math.inf).isfinite().logical_not()
            found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf)))
            x.content.scale(inverse.to(x.content.norms).reshape(()))


_ANSWERS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm": _foreach_norm,
    "mul_": _scale(Tensor.mul_),
    "_foreach_mul_": _scale(Tensor.mul_),
    "div_": _scale(Tensor.div_),
    "_foreach_div_": _scale(Tensor.div_),
    "zero_": _zero,
    "_foreach_zero_": _zero,
    "add_": _add,
    "detach": lambda func, x: OwnedGradient(x, x.content),
    "clone": lambda func, x, memory_format=None: OwnedGradient(x, x.content.copy()),
    "isnan": lambda func, x: _everywhere(x, x.norm_of(math.inf).isnan()),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
