# SPDX-License-Identifier: Apache-2.0
"""Find a model's configuration and build it without memory: built-in names, local folders, hub ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import nearest

CONFIGS = Path(__file__).resolve().parent / "configs"


class ModelNotFoundError(ValueError):
    """MODEL names nothing that can be built; the message says what to give instead."""


@dataclass(frozen=True)
class ModelSource:
    """A resolved model: its name, where the configuration came from, and the transformers config."""

    name: str
    origin: str  # "built-in", "folder" or "hub"
    config: Any


def built_in_names() -> list[str]:
    """Return the configuration names that ship with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def resolve_model(name: str) -> ModelSource:
    """Return the configuration that MODEL names.

    A folder wins over a built-in name, a built-in name (in any case, with or without its organisation) over the hub.

    Raises:
        ModelNotFoundError: a folder without a usable config.json, or a name that neither ships nor is on the hub.
    """
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # ~ of a user that does not exist
        folder = Path(name)
    if folder.is_dir():
        return ModelSource(name, "folder", _folder_config(folder))
    if folder.is_file():
        raise ModelNotFoundError(f"MODEL must be a folder, a hub id or a built-in name; got the file {name}.")
    by_name = {built_in.lower(): built_in for built_in in built_in_names()}
    if (key := name.rsplit("/", 1)[-1].lower()) in by_name:
        data = json.loads((CONFIGS / f"{by_name[key]}.json").read_text(encoding="utf-8"))
        return ModelSource(by_name[key], "built-in", _from_dict(data, by_name[key]))
    return ModelSource(name, "hub", _hub_config(name))


def build_meta_model(config: Any, device: str = "meta") -> Any:
    """Return the model of a configuration on the meta device: all modules and shapes, no memory.

    Causal language models where the architecture has one, else the class that `architectures` names.

    Args:
        config: a transformers configuration.
        device: another device where tensors are fake.

    Raises:
        ModelNotFoundError: transformers has no model class for the configuration.
    """
    import torch
    import transformers

    wanted = (getattr(config, "architectures", None) or [""])[0]
    auto = transformers.AutoModelForCausalLM
    with torch.device(device):
        model_class = getattr(transformers, wanted, None) if isinstance(wanted, str) and wanted else None
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return _build(model_class, config)
        try:
            return auto.from_config(config)
        except ValueError:
            pass
        try:
            return transformers.AutoModel.from_config(config)
        except ValueError:
            raise ModelNotFoundError(
                f"MODEL must have an architecture that transformers knows; got model_type={config.model_type!r}. "
                "Upgrade transformers, or give another model."
            ) from None


def _build(model_class: Any, config: Any) -> Any:
    try:
        return model_class(config)
    except Exception as error:  # sizes that do not fit each other: every architecture raises its own kind
        raise ModelNotFoundError(
            f"MODEL must have a configuration that {model_class.__name__} can build; got {_one_line(error)}."
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _folder_config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"MODEL must be a folder with a config.json; {folder} has none. Give a saved model.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelNotFoundError(f"{path} must be a JSON file; got an error: {error}. Save the model again.") from None
    return _from_dict(data, str(path))


def _from_dict(data: Any, where: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if not isinstance(data, dict) or "model_type" not in data:
        raise ModelNotFoundError(f"{where} must name its model_type; it does not. Give a transformers model.")
    options = dict(data)
    kind = options.pop("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelNotFoundError(
            f"{where} must name a model_type that transformers knows; got {kind!r}. Upgrade transformers."
        )
    try:
        return AutoConfig.for_model(kind, **options)
    except Exception as error:  # the validators of transformers raise kinds of their own
        raise ModelNotFoundError(f"{where} must hold a valid {kind} configuration; got {_one_line(error)}.") from None


def _hub_config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=not _hub_answers())
    except (OSError, ValueError):
        hint = nearest(name.rsplit("/", 1)[-1], built_in_names())
        raise ModelNotFoundError(
            f"MODEL must be a local folder, a hub id that can be reached, or a built-in name; got {name!r}.{hint}"
        ) from None


def _hub_answers() -> bool:
    """Return whether the hub can be reached: one short try, because its own client repeats for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=4)
    except Exception:  # whatever the HTTP library raises without a network: the local cache is asked then
        return False
    return True
