# SPDX-License-Identifier: Apache-2.0
"""The page that compares ours with DeepSpeed's own Muon says what they do now."""

import pytest

from tests.support import deepspeed_table


@pytest.mark.slow
def test_the_page_is_up_to_date(llama):
    assert deepspeed_table.TABLE.read_text() == deepspeed_table.render(llama), (
        "run: python -m tests.support.deepspeed_table"
    )
