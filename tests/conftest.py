# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares: no hub, few threads, one seed per test that pytest prints when it fails."""

import logging
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Trainer picks a CUDA device or a tracker by itself; tests run the same everywhere.
os.environ.setdefault("WANDB_DISABLED", "true")
# Threads that spin while they wait make tests on busy cores many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

torch.set_num_threads(1)  # models are tiny; results then do not depend on the number of cores


@pytest.fixture(autouse=True)
def seed(request):
    """Fresh random inputs each run; set HF_MUON_TEST_SEED to the printed number to repeat one."""
    value = int(os.environ.get("HF_MUON_TEST_SEED") or random.SystemRandom().randrange(2**31))
    random.seed(value)
    torch.manual_seed(value)
    request.node.user_properties.append(("seed", value))
    return value


@pytest.fixture(autouse=True)
def own_log():
    """Undo what the command line does to the package's logger when a test runs it in this process."""
    root = logging.getLogger("hf_muon")
    handlers, propagate = list(root.handlers), root.propagate
    yield
    root.handlers, root.propagate = handlers, propagate
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "hf_muon" and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)  # a run of a recipe turns parts of the package down


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the seed of a failed test."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        seed = dict(item.user_properties).get("seed")
        report.sections.append(("seed", f"HF_MUON_TEST_SEED={seed}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Skip the GPU tests where there is no device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
