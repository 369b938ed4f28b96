# SPDX-License-Identifier: Apache-2.0
"""Read checkpoint folders of Trainer and Accelerate, whatever number of processes wrote them, as whole tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..optim.state_spec import ROW_STATISTICS
from .integrity import verify_file, verify_sharded

# Names that Accelerate's FSDP saving uses; `_0` is the index of the model or optimizer.
_FULL = {"model": "pytorch_model_fsdp.bin", "optimizer": "optimizer.bin"}
_SHARDED = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}
_PLAIN = {
    "model": ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin"),
    "optimizer": ("optimizer.pt", "optimizer.bin"),
}


@dataclass(frozen=True)
class CheckpointFolder:
    """Where the two halves of a checkpoint lie.

    Args:
        path: the folder.
        format: `full` (one file written by FSDP), `sharded` (a folder of `torch.distributed.checkpoint`) or `plain`
            (what one process or DDP writes).
        model: the file or folder of the weights.
        optimizer: the file or folder of the optimizer state; None if there is none.
    """

    path: Path
    format: str
    model: Path
    optimizer: Path | None

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP wrote it."""
        return self.format != "plain"


def find_checkpoint(folder: str | Path) -> CheckpointFolder | None:
    """Return what `folder` holds, or None when it holds no weights that this module can read."""
    path = Path(folder)
    for kind, names in (("full", _FULL), ("sharded", _SHARDED)):
        model, optimizer = path / names["model"], path / names["optimizer"]
        if model.exists():
            return CheckpointFolder(path, kind, model, optimizer if optimizer.exists() else None)
    models = [path / name for name in _PLAIN["model"] if (path / name).is_file()]
    if not models:
        return None
    optimizers = [path / name for name in _PLAIN["optimizer"] if (path / name).is_file()]
    return CheckpointFolder(path, "plain", models[0], optimizers[0] if optimizers else None)


def verify_checkpoint(folder: str | Path) -> None:
    """Check every file of a checkpoint folder that loading will read. No collective; see `integrity.agree`.

    Raises:
        ValueError: a file is truncated or missing, or weights and optimizer state are of different models; the file
            is named.
    """
    found = find_checkpoint(folder)
    if found is None:
        return
    for part in (found.model, found.optimizer):
        if part is not None:
            (verify_sharded if part.is_dir() else verify_file)(part)
    if found.optimizer is not None and found.is_fsdp:
        _check_that_halves_fit(found)


def _check_that_halves_fit(found: CheckpointFolder) -> None:
    weights = _shapes(found.model, "model")
    for name, shape in _shapes(cast(Path, found.optimizer), "optimizer").items():
        wanted = weights.get(name, shape)
        if shape != wanted:
            raise ValueError(
                f"{found.optimizer} must belong to the weights beside it; its state of {name} has the shape {shape},"
                f" the weights have {wanted}. Nothing was loaded. The folder mixes two checkpoints."
            )


def _shapes(part: Path, key: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight, or of every parameter's state, by FQN, without reading the values."""
    if part.is_dir():
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entries = FileSystemReader(part).read_metadata().state_dict_metadata
        sizes = {
            name.removeprefix(f"{key}."): tuple(entry.size)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if key == "model":
            return sizes
        keys = {name: name.removeprefix("state.").rpartition(".") for name in sizes if name.startswith("state.")}
        return {
            parameter: sizes[name] for name, (parameter, _, what) in keys.items() if sizes[name] and _is_shaped(what)
        }
    content = torch.load(part, map_location="cpu", weights_only=True, mmap=True)
    if key == "model":
        return {name: tuple(value.shape) for name, value in content.items()}
    return {
        str(name): tuple(value.shape)
        for name, values in content["state"].items()
        for what, value in values.items()
        if isinstance(value, Tensor) and value.ndim and _is_shaped(what)
    }


def _is_shaped(key: str) -> bool:
    """Return whether state under this key has its parameter's shape; NorMuon's has one number per row."""
    return key != ROW_STATISTICS


def read_model(folder: str | Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint folder as whole CPU tensors by FQN. Reads all of them into memory.

    Raises:
        FileNotFoundError: no weights there.
        ValueError: a file is truncated; it is named.
    """
    found = _found(folder)
    if found.model.suffix == ".safetensors":
        from safetensors.torch import load_file

        return _checked(found.model, lambda: load_file(found.model))
    return _unwrapped(_read(found.model), "model")


def read_optimizer(folder: str | Path) -> dict[str, Any]:
    """Return the optimizer state of a checkpoint folder, tensors whole on the CPU.

    State that FSDP wrote is keyed by FQN, other state by number with `param_names` in the groups;
    `MuonWithAuxAdam.load_state_dict` takes both and matches by name.

    Raises:
        FileNotFoundError: no optimizer state there.
        ValueError: a file is truncated; it is named.
    """
    found = _found(folder)
    if found.optimizer is None:
        raise FileNotFoundError(f"{folder} must hold optimizer state; got none. Was it saved with save_only_model?")
    return _unwrapped(_read(found.optimizer), "optimizer")


def _found(folder: str | Path) -> CheckpointFolder:
    found = find_checkpoint(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} must hold the weights of a checkpoint; got none that can be read.")
    return found


def _read(part: Path) -> Any:
    if not part.is_dir():
        return _checked(part, lambda: torch.load(part, map_location="cpu", weights_only=True))
    verify_sharded(part)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.pt"
        dcp_to_torch_save(part, whole)
        return torch.load(whole, map_location="cpu", weights_only=True)


def _checked(path: Path, read: Callable[[], Any]) -> Any:
    verify_file(path)
    return read()


def _unwrapped(content: dict[str, Any], key: str) -> dict[str, Any]:
    """Accelerate's sharded folders hold one more level, `{"model": ...}` or `{"optimizer": ...}`."""
    return content[key] if set(content) == {key} else content
