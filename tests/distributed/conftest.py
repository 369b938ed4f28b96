# SPDX-License-Identifier: Apache-2.0
"""One thread here as in the workers: two threads split matrix products differently, which moves the last bits."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
