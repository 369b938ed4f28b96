# SPDX-License-Identifier: Apache-2.0
"""Where words go: results on stdout, everything else on stderr; third-party chatter is turned down."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console

# stderr carries progress and notes, so that stdout can be piped.
notes = Console(stderr=True, highlight=False, soft_wrap=True)
# A pipe has no width: tables are then written without folding.
results = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def say(text: str) -> None:
    """Print one note for a person, on stderr."""
    notes.print(text, markup=False)


def print_json(document: Any) -> None:
    """Print exactly one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def quiet_third_parties() -> None:
    """Keep progress bars, advice and warnings of other libraries off the terminal.

    The settings that libraries read once, at import, go in as defaults: a user's own setting stays.
    """
    for name, value in (
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("DATASETS_VERBOSITY", "error"),
        ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module=r"torch\.utils\.data")
    for name in ("accelerate", "datasets", "transformers", "torch", "fsspec"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Hold the garbage collector while large libraries are imported: it would walk all of them many times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def route_own_log(level: int = logging.INFO) -> None:
    """Send the package's own log lines to stderr through the console (once)."""
    logger = logging.getLogger("hf_muon")
    if not any(isinstance(handler, _NoteHandler) for handler in logger.handlers):
        logger.addHandler(_NoteHandler())
        logger.propagate = False
    logger.setLevel(level)


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        say(prefix + record.getMessage())
