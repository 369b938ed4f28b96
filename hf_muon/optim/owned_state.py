# SPDX-License-Identifier: Apache-2.0
"""State of owned parameters on its way out: everybody else reads the even row chunks of FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

from .tensor_layout import is_owned, on_mesh_device


def come_to_rest(params: Iterable[Tensor]) -> None:
    """Free what forwards without a backward left gathered in the models of owned `params`. No communication.

    `torch.distributed.checkpoint` finds an optimizer's parameters by those registered in the model, and an evaluation
    leaves gathered copies there.
    """
    owned = [param for param in params if is_owned(param)]
    if owned:
        from ..distributed import reshard_models_of

        reshard_models_of(owned)


def in_standard_layout(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return `state` of a state dict with owned tensors as FSDP2 would hold them; new dicts, the rest shared.

    Collective over the training mesh where anything is owned: keys are walked in one order on all ranks.

    Args:
        state: parameter number (or any other key) to that parameter's state.
    """
    if not any(isinstance(v, Tensor) and is_owned(v) for values in state.values() for v in _values(values)):
        return state
    from ..distributed import OwnedDTensor, to_standard

    def standard(value: OwnedDTensor) -> Tensor:
        return to_standard(cast(OwnedDTensor, on_mesh_device(value))).to(value.device)

    def converted(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: standard(value) if isinstance(value, OwnedDTensor) else value for key, value in values.items()}

    numbers = sorted(key for key in state if isinstance(key, int))
    others = [key for key in state if not isinstance(key, int)]
    return {key: converted(state[key]) for key in (*numbers, *others)}


def _values(values: Any) -> Iterable[Any]:
    return values.values() if isinstance(values, dict) else ()
