# SPDX-License-Identifier: Apache-2.0
"""Doors of a model: `state_dict()` hands out ordinary sharded DTensors, `load_state_dict()` takes any layout back.

Owned parameters are a private layout; whoever reads a `state_dict` (Accelerate, `torch.distributed.checkpoint`,
`save_pretrained`, PEFT) expects the even row chunks of FSDP2. The hooks live on the modules that hold the parameters,
so state dicts of submodules are covered too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from ..distributed import OwnedDTensor, from_standard, to_standard

Owned = Mapping[str, OwnedDTensor]
_MARK = "_hf_muon_door_handles"


def owned_of(module: nn.Module) -> dict[str, OwnedDTensor]:
    """Return the owned parameters that `module` itself holds, by local name."""
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, OwnedDTensor)
    }


def install_model_doors(model: nn.Module) -> int:
    """Put the doors on every module of `model` that holds owned parameters; call it where they are at rest.

    Safe to call twice: doors of an earlier call are replaced.

    Returns:
        The number of modules with doors.

    Note:
        From then on `state_dict()` and `load_state_dict()` are collective over the training mesh: call them on all
        ranks, as `torch.distributed.checkpoint` and Accelerate do.
    """
    count = 0
    for module in model.modules():
        for handle in module.__dict__.pop(_MARK, ()):
            handle.remove()
        owned = owned_of(module)
        if not owned:
            continue
        handles = (
            module.register_state_dict_post_hook(_function(_hand_out, owned)),
            module.register_load_state_dict_pre_hook(_function(_take_in, owned)),
        )
        module.__dict__[_MARK] = handles
        count += 1
    return count


def remove_model_doors(model: nn.Module) -> None:
    """Take the doors off again."""
    for module in model.modules():
        for handle in module.__dict__.pop(_MARK, ()):
            handle.remove()


def _function(hook: Any, owned: Owned) -> Any:
    """Bind `owned` to `hook` as a plain function: torch marks hooks with an attribute, partials refuse some."""
    bound = partial(hook, owned)

    def call(*args: Any) -> None:
        bound(*args)

    return call


def _hand_out(owned: Owned, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    # The entry may be the gathered copy that a forward left in the module: the owned parameter is what counts.
    for name, parameter in owned.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = to_standard(parameter)


def _take_in(owned: Owned, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in owned.items():
        value = state_dict.get(prefix + name)
        if value is None:
            continue
        if value is not parameter:
            from_standard(parameter, value)
        # torch then copies the parameter onto itself, or assigns it to where it already is.
        setattr(module, name, parameter)
        state_dict[prefix + name] = parameter
