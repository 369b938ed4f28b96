# SPDX-License-Identifier: Apache-2.0
"""The panel of live diagnostics: nothing without them, one chart per figure with them."""

from hf_muon.cli.report.diagnostics import diagnostics_panel


def document(entries):
    run = {"optimizer": "muon", "seed": 7, "config": {"learning_rate": 0.1}}
    if entries:
        run["diagnostics"] = entries
    return {"runs": [run], "comparison": {"best": {"muon": {"learning_rate": 0.1}}}}


def test_no_panel_without_diagnostics():
    assert diagnostics_panel(document([])) == ""


def test_one_chart_per_figure_that_is_there():
    entries = [
        {"step": step, "stable_rank": 3.5 + step, "orthogonality_error": 0.25, "update_rms_group0": 2e-4}
        for step in (5, 10)
    ]
    panel = diagnostics_panel(document(entries))
    assert panel.count("<figure>") == 3
    assert "Largest attention logit" not in panel
    assert "step 10: 13.5" in panel and "seed 7" in panel
    entries[1]["max_attention_logit"] = 88.0
    assert diagnostics_panel(document(entries)).count("<figure>") == 4
