# SPDX-License-Identifier: Apache-2.0
"""Every numeric variant at once through Trainer and stock FSDP2: one process, two ranks, both checkpoint formats."""

import pytest

from tests.integration.fsdp2_trainer import jobs

# The tiny model's largest logit is about 0.03; clipping at a tenth of it works on every step.
ALL = ",qk_clip=0.003,qk_clip_exact=true,normuon=true,momentum_dtype={},offload=cpu,diagnostics=2"
ALL += ",stochastic_rounding=true"


@pytest.mark.parametrize(("kind", "dtype"), [("FULL_STATE_DICT", "bfloat16"), ("SHARDED_STATE_DICT", "int8")])
def test_all_variants_resume_to_the_bit_and_equal_one_process(tmp_path, kind, dtype):
    options = {"optim_args": ALL.format(dtype), "kind": kind, "steps": 4}
    alone = jobs.run(jobs.train, 1, str(tmp_path / "one"), **options)[0]
    plain = jobs.run(jobs.train, 1, str(tmp_path / "plain"), steps=4)[0]
    save = {"save_strategy": "steps", "save_steps": 2}
    whole = jobs.run(jobs.train, 2, str(tmp_path / "two"), **options, **save)[0]
    assert whole["owned"]
    assert whole["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert alone["losses"] != plain["losses"]
    assert len(whole["diagnostics"]) == len(alone["diagnostics"]) == 2
    for found, wanted in zip(whole["diagnostics"], alone["diagnostics"], strict=True):
        assert found.keys() == wanted.keys()
        for key in ("diag_update_rms_group0", "diag_update_rms_group1", "diag_max_attention_logit"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-3), key  # over both ranks, whoever owns what
        assert 0 < found["diag_orthogonality_error"] < 1 <= found["diag_stable_rank"]
    folder = str(tmp_path / "two/checkpoint-2")
    again = jobs.run(jobs.resume, 2, str(tmp_path / "again"), folder, **options)[0]
    assert again["losses"] == whole["losses"][2:]
    for name, wanted in whole["weights"].items():
        assert float((again["weights"][name] - wanted).abs().max()) == 0.0, name
    on_one = jobs.run(jobs.resume, 1, str(tmp_path / "fewer"), folder, **options)[0]
    assert on_one["losses"] == pytest.approx(whole["losses"][2:], abs=1e-5)
