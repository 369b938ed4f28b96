# SPDX-License-Identifier: Apache-2.0
"""The memory picture: every bar is as long as its number says."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

import hf_muon
from hf_muon.cli.report.memory_bars import LABELS, memory_bars, memory_page


@pytest.fixture(scope="module")
def plan():
    return hf_muon.plan("SmolLM2-135M", world_size=8, micro_batch=2, seq_len=512)


def test_bars_are_proportional_and_every_part_is_named(plan):
    root = ElementTree.fromstring(memory_bars(plan))
    groups = root.findall("{*}g")
    assert len(groups) == len(plan.memory)
    scales = set()
    for group, row in zip(groups, plan.memory, strict=True):
        rects = group.findall("{*}rect")
        assert [r.get("class") for r in rects] == [part for part in LABELS if getattr(row, part)]
        for rect in rects:
            size = getattr(row, rect.get("class")) / 2**30
            assert rect.find("{*}title").text.endswith(f"{size:.2f} GiB")
            if float(rect.get("width")) > 20:  # widths are rounded to a tenth
                scales.add(round(float(rect.get("width")) / size))
        assert f"{row.peak / 2**30:.2f}" in "".join(group.itertext())
    assert max(scales) - min(scales) <= 0.02 * max(scales)


def test_layouts_can_be_chosen(plan):
    chosen = ElementTree.fromstring(memory_bars(plan, ["fsdp2", "dmuon-z3"]))
    assert len(chosen.findall("{*}g")) == 3
    with pytest.raises(ValueError, match="layouts must name at least one of ddp, zero1"):
        memory_bars(plan, ["zero4"])


def test_the_page_needs_nothing_from_outside(plan):
    page = memory_page(plan)
    addresses = set(re.findall(r"https?://[^\"' )]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert "SmolLM2-135M on 8 ranks" in page and "Micro-batch 2 x 512 tokens" in page
