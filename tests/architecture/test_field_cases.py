# SPDX-License-Identifier: Apache-2.0
"""Every known fault has a test of its kind, and the page that says so is up to date."""

import pytest

from tests.support.field_cases import CASES, TABLE, find_tests, render


@pytest.mark.parametrize("number", CASES)
def test_each_fault_has_a_test(number):
    assert find_tests().get(number), f"no test_case_{number:02d}_... for: {CASES[number]}"


def test_every_named_case_is_in_the_list():
    assert set(find_tests()) <= set(CASES)


def test_the_page_is_up_to_date():
    assert TABLE.read_text() == render(), "run: python -m tests.support.field_cases"
