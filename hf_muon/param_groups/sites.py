# SPDX-License-Identifier: Apache-2.0
"""Walk a model once: every trainable tensor, every place that holds it, and what the model says of these places."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

# Containers that PEFT puts between a module and the weights that stand for it.
_WRAPPER = re.compile(
    r"\.(?:base_layer|original_module"
    r"|modules_to_save\.[^.]+"
    r"|lora_(?:A|B|embedding_A|embedding_B|magnitude_vector|dropout|bias)(?:\.[^.]+)?)$"
)
_TASK_MODEL = re.compile(
    r"For(?:\w*Classification|\w*QuestionAnswering|MultipleChoice|\w*Detection|\w*Segmentation|XVector|NextSentence"
    r"|\w*Regression|\w*Prediction|\w*Estimation|CTC)\w*$"
)


@dataclass(frozen=True)
class Site:
    """One place in a model that holds a parameter.

    Attributes:
        name: fully qualified name here.
        leaf: the attribute that holds it (`weight`, `gate_up_proj`, an adapter name).
        module: the module that holds it.
        ancestors: the modules around `module`, outermost first.
        logical_path: path of the module that these weights stand for, PEFT's wrappers taken out.
        logical_parent: the module that runs `logical_path` (it knows how a fused projection is split).
        lora: `A`, `B`, another adapter part, or an empty string.
        adapted: the parameter that an adapter on a bare parameter (PEFT's `target_parameters`) changes, where it
            stacks several matrices: the module that holds it, its attribute, and their number.
    """

    name: str
    leaf: str
    module: nn.Module
    ancestors: tuple[nn.Module, ...]
    logical_path: str
    logical_parent: nn.Module
    lora: str = ""
    adapted: tuple[nn.Module, str, int] | None = None


@dataclass
class TensorSites:
    """All the places of one trainable tensor; the first one gives its name."""

    parameter: nn.Parameter
    sites: list[Site] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name that `named_parameters()` gives."""
        return self.sites[0].name


def true_shape(parameter: Any) -> tuple[int, ...]:
    """Return the whole shape: DeepSpeed ZeRO-3 keeps it in `ds_shape` while the storage is partitioned."""
    return tuple(int(size) for size in getattr(parameter, "ds_shape", parameter.shape))


def class_names(module: nn.Module) -> list[str]:
    """Return the class names of `module`, its own first."""
    return [cls.__name__ for cls in type(module).__mro__]


def class_name(module: nn.Module) -> str:
    """Return the name of the module's class; FSDP2 makes a subclass that it calls `FSDP<name>`, which is undone."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and len(cls.__mro__) > 2:
        original = cls.__name__.removeprefix("FSDP")
        if any(base.__name__ == original for base in cls.__mro__[1:]):
            return original
    return cls.__name__


def collect_tensors(model: nn.Module) -> list[TensorSites]:
    """Return every trainable tensor of `model` once, in `named_parameters()` order, with all its places.

    Raises:
        ValueError: the parameters are flat views (FSDP1), so their true shapes are unknown.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors: dict[int, TensorSites] = {}
    for path, module in modules.items():
        _refuse_flat(path, module)
        for leaf, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            entry = tensors.setdefault(id(parameter), TensorSites(parameter))
            entry.sites.append(_site(modules, path, leaf, module))
    for entry in tensors.values():
        _check_shape(entry)
    return list(tensors.values())


def embedding_and_head_ids(model: nn.Module) -> dict[int, str]:
    """Return `{id(parameter): role}` for all that the model's own getters call input or output embeddings.

    `role` is `embedding` or `head`. Task models (`*ForSequenceClassification`, ...) add every module that stands
    beside their base model: these are the freshly initialised heads.
    """
    roles: dict[int, str] = {}
    for module in model.modules():
        for getter, role in (("get_input_embeddings", "embedding"), ("get_output_embeddings", "head")):
            found = _call_getter(module, getter)
            if found is not None and found is not module and isinstance(found, nn.Module):
                for parameter in found.parameters():
                    if role == "head" or _is_vocabulary(found):
                        roles.setdefault(id(parameter), role)
        for head in _task_heads(module):
            for parameter in head.parameters():
                roles.setdefault(id(parameter), "head")
    return roles


def _is_vocabulary(module: nn.Module) -> bool:
    """Tell whether an input embedding module is one; some models return a whole encoder here."""
    return not any(hasattr(child, "get_input_embeddings") for child in module.modules())


def _task_heads(module: nn.Module) -> Iterator[nn.Module]:
    prefix = getattr(type(module), "base_model_prefix", "")
    if not prefix or not _TASK_MODEL.search(type(module).__name__):
        return
    base = getattr(module, prefix, None)
    if not isinstance(base, nn.Module):
        return
    yield from (child for child in module.children() if child is not base)


def _call_getter(module: nn.Module, name: str) -> Any:
    getter = getattr(module, name, None)
    if getter is None:
        return None
    try:
        return getter()
    except (NotImplementedError, AttributeError, TypeError):
        return None  # models without a vocabulary say so by raising


def _site(modules: dict[str, nn.Module], path: str, leaf: str, module: nn.Module) -> Site:
    pieces = path.split(".") if path else []
    ancestors = tuple(modules[".".join(pieces[:i])] for i in range(len(pieces)))
    logical, lora = path, ""
    if match := re.search(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?=\.|$)", path):
        lora = match.group(1)
    while (shorter := _WRAPPER.sub("", logical)) != logical:
        logical = shorter
    parent = logical.rpartition(".")[0]
    return Site(
        name=f"{path}.{leaf}" if path else leaf,
        leaf=leaf,
        module=module,
        ancestors=ancestors,
        logical_path=logical,
        logical_parent=modules.get(parent, module),
        lora=lora,
        adapted=_adapted_parameter(ancestors) if lora else None,
    )


def _adapted_parameter(ancestors: tuple[nn.Module, ...]) -> tuple[nn.Module, str, int] | None:
    """Return what the innermost PEFT wrapper around a bare parameter adapts, by the attributes it carries."""
    for module in reversed(ancestors):
        leaf, count = getattr(module, "parameter_name", None), getattr(module, "num_experts", None)
        if isinstance(leaf, str) and isinstance(count, int) and count > 1 and hasattr(module, "get_base_layer"):
            return module.get_base_layer(), leaf, count  # type: ignore[operator]
    return None


def _refuse_flat(path: str, module: nn.Module) -> None:
    for cls in type(module).__mro__:
        if cls.__name__ == "FullyShardedDataParallel" and cls.__module__.startswith("torch.distributed.fsdp"):
            raise ValueError(
                f"{path or 'the model'} must not be wrapped by FSDP1, whose flat parameters hide the "
                f"matrices; got {type(module).__name__}. Use FSDP2 (fsdp_version: 2) or tag before wrapping."
            )


def _check_shape(entry: TensorSites) -> None:
    site, shape = entry.sites[0], true_shape(entry.parameter)
    flat = any(cls.__name__ == "FlatParameter" for cls in type(entry.parameter).__mro__)
    matrix_expected = site.leaf == "weight" and isinstance(site.module, (nn.Linear, nn.Embedding))
    if flat or (matrix_expected and len(shape) != 2):
        raise ValueError(
            f"{entry.name} must have its true shape, two axes in a {type(site.module).__name__}; got {shape}. "
            "Tag the model before it is flattened or partitioned, or use FSDP2 or DeepSpeed, which keep shapes."
        )
