# SPDX-License-Identifier: Apache-2.0
"""Turn down libraries that are already imported, for the time of a search."""

from __future__ import annotations

import logging


def quiet_loaded_libraries() -> None:
    """Silence transformers and datasets: their messages repeat for each of many short runs."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    for name in ("hf_muon.integrations", "hf_muon.optim"):
        logging.getLogger(name).setLevel(logging.WARNING)
