# SPDX-License-Identifier: Apache-2.0
"""The comparison of runs: chosen on validation, reported on test, at equal steps and at equal seconds."""

import math

import pytest

from hf_muon.cli.training.comparison import best_rate, compare, interpolate


def a_run(optimizer, rate, seed, validation, test, seconds=10.0):
    return {
        "optimizer": optimizer,
        "seed": seed,
        "config": {"learning_rate": rate},
        "steps": 4,
        "loss": [8.0, 7.0, 6.0, 5.0],
        "eval": {
            "loss": test,
            "validation": {"loss": validation},
            "curve": [{"step": 2, "seconds": seconds / 2, "loss": 6.0}, {"step": 4, "seconds": seconds, "loss": test}],
        },
        "seconds": seconds,
        "optimizer_seconds": 1.0,
        "peak_memory_bytes": 1,
        "optimizer_state_bytes": 1,
        "initial_weights": f"digest {seed}",
    }


def test_the_rate_is_chosen_on_validation_and_reported_on_test():
    runs = [
        a_run("muon", 1e-3, 0, validation=3.0, test=9.0),
        a_run("muon", 1e-2, 0, validation=4.0, test=1.0),  # better on test: must not be chosen
        a_run("adamw", 1e-3, 0, validation=5.0, test=5.0),
        a_run("muon", 1e-3, 1, validation=3.0, test=7.0),
        a_run("adamw", 1e-3, 1, validation=5.0, test=6.0),
    ]
    comparison = compare(runs, "loss")
    assert comparison["best"]["muon"]["learning_rate"] == 1e-3
    assert comparison["best"]["muon"]["at_edge_of_grid"]
    assert comparison["equal_steps"]["loss"]["muon"]["values"] == [9.0, 7.0]
    assert comparison["equal_steps"]["loss"]["muon_minus_adamw"] == pytest.approx(2.5)
    assert not comparison["equal_steps"]["loss"]["ranges_overlap"]
    assert comparison["same_start"]


def test_equal_seconds_reads_the_slower_optimizer_between_its_points():
    runs = [a_run("muon", 1e-3, 0, 3.0, 4.0, seconds=20.0), a_run("adamw", 1e-3, 0, 5.0, 5.0, seconds=15.0)]
    at = compare(runs, "loss")["equal_seconds"]
    assert (at["faster"], at["seconds"]) == ("adamw", 15.0)
    # Half way between (10 s, 6.0) and (20 s, 4.0).
    assert at["loss"]["muon"]["mean"] == pytest.approx(5.0)
    assert at["loss"]["adamw"]["mean"] == 5.0


def test_interpolation_starts_at_the_first_loss_and_ends_at_the_last_point():
    curve = [{"seconds": 10.0, "loss": 4.0}]
    assert [interpolate(curve, t, 8.0) for t in (0.0, 5.0, 10.0, 99.0)] == [8.0, 6.0, 4.0, 4.0]


def test_a_diverged_rate_is_never_the_best():
    for order in ((math.nan, 3.0), (3.0, math.nan)):
        runs = [a_run("muon", rate, 0, validation, 1.0) for rate, validation in zip((1.0, 2.0), order, strict=True)]
        assert best_rate(runs, "muon", "loss") == (1.0 if order[0] == 3.0 else 2.0)


def test_equal_exact_match_is_decided_by_the_loss():
    runs = [a_run("muon", rate, 0, validation=loss, test=1.0) for rate, loss in ((1.0, 0.5), (2.0, 0.1))]
    for run in runs:
        run["eval"]["validation"]["exact_match"] = 1.0
    assert best_rate(runs, "muon", "exact_match") == 2.0


def test_different_initial_weights_are_noticed():
    runs = [a_run("muon", 1.0, 0, 1.0, 1.0), a_run("adamw", 1.0, 0, 1.0, 1.0)]
    runs[1]["initial_weights"] = "other"
    assert not compare(runs, "loss")["same_start"]
