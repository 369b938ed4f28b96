# SPDX-License-Identifier: Apache-2.0
"""Tell a whole checkpoint folder from a truncated or mixed one before any tensor is loaded.

Only sizes and tables of contents are read, so that a check costs milliseconds also for large checkpoints.
"""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

_HEADER = struct.Struct("<Q")


def verify_file(path: Path) -> None:
    """Check one weights or state file by its own table of contents.

    Raises:
        ValueError: the file is truncated or no file of its kind; it is named.
    """
    problem = (_problem_of_safetensors if path.suffix == ".safetensors" else _problem_of_archive)(path)
    if problem:
        raise ValueError(_message(path, problem))


def verify_sharded(folder: Path) -> None:
    """Check a folder of `torch.distributed.checkpoint`: the metadata, and that every piece it lists is there.

    Raises:
        ValueError: the metadata or a piece is missing or truncated; the file is named.
    """
    path = folder / ".metadata"
    if not path.is_file():
        raise ValueError(_message(path, "is missing: the save did not finish"))
    try:
        from torch.distributed.checkpoint import FileSystemReader

        metadata = FileSystemReader(folder).read_metadata()
    except (EOFError, pickle.UnpicklingError, AttributeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(_message(path, f"cannot be read ({type(error).__name__}: {error})")) from None
    ends: dict[str, int] = {}
    for piece in (metadata.storage_data or {}).values():
        end = int(piece.offset) + int(piece.length)
        ends[piece.relative_path] = max(end, ends.get(piece.relative_path, 0))
    for name, end in sorted(ends.items()):
        piece_path = folder / name
        if not piece_path.is_file():
            raise ValueError(_message(piece_path, "is missing although the metadata lists it"))
        if piece_path.stat().st_size < end:
            raise ValueError(_message(piece_path, f"has {piece_path.stat().st_size} bytes; the metadata lists {end}"))


def agree(check: Any, *args: Any) -> None:
    """Run `check(*args)` on rank 0 and raise its ValueError on every rank. Collective where ranks share the work.

    Without this one rank would raise while the others wait for it in a collective.
    """
    message: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            check(*args)
        except ValueError as error:
            message[0] = str(error)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise ValueError(message[0])


def _problem_of_safetensors(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
        if len(start) < _HEADER.size:
            return f"has {size} bytes, less than a header"
        length = _HEADER.unpack(start)[0]
        if _HEADER.size + length > size:
            return f"has {size} bytes; its header alone needs {_HEADER.size + length}"
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return "has no readable header"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted = _HEADER.size + length + max(ends, default=0)
    return None if size == wanted else f"has {size} bytes; its header lists {wanted}"


def _problem_of_archive(path: Path) -> str | None:
    # torch.save writes a zip archive, whose table of contents stands at the end.
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return "is truncated or was not written by torch.save"
    return None if any(name.endswith("data.pkl") for name in names) else "was not written by torch.save"


def _message(path: Path, problem: str) -> str:
    return (
        f"{path} must be a whole checkpoint file; it {problem}. Nothing was loaded. "
        "Resume from an earlier checkpoint, or copy this one again."
    )
