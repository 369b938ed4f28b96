# SPDX-License-Identifier: Apache-2.0
"""A second opinion: the same model under lm-eval, which keeps its own prompts, shots and extraction.

References: the command line of lm-eval 0.4 and the `results_*.json` files that it writes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .rows import DataError

# Task and metric there.
_LM_EVAL = {
    "gsm8k": ("gsm8k", "exact_match,strict-match"),
    "mmlu": ("mmlu", "acc,none"),
    "mbpp": ("mbpp", "pass_at_1,none"),
    "mbpp_plus": ("mbpp_plus", "pass_at_1,none"),
}


def lm_eval_command(
    task: str, model: str, output: Path, *, limit: int = 0, batch_size: int = 16, dtype: str = "auto", device: str = ""
) -> list[str]:
    """Return the command that evaluates `model` without examples in the prompt."""
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype={dtype}"]
    command += ["--tasks", _LM_EVAL[task][0], "--num_fewshot", "0", "--batch_size", str(batch_size)]
    command += ["--output_path", str(output)]
    command += ["--limit", str(limit)] if limit else []
    command += ["--device", device] if device else []
    return [*command, "--confirm_run_unsafe_code"] if task.startswith("mbpp") else command


def evaluate_with_lm_eval(task: str, model: str, **options: Any) -> dict[str, Any]:
    """Run lm-eval in a process of its own and return the document of `hf-muon eval --json`.

    Programs of MBPP then run under lm-eval, without this package's containment.

    Raises:
        DataError: lm-eval is not installed.
        RuntimeError: it failed, or wrote no result.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise DataError('--harness lm-eval must find lm-eval; it is not installed. Run: pip install "hf-muon[eval]"')
    with tempfile.TemporaryDirectory(prefix="hf-muon-lm-eval-") as name:
        command = lm_eval_command(task, model, Path(name), **options)
        environment = {**os.environ, "HF_ALLOW_CODE_EVAL": "1"} if task.startswith("mbpp") else None
        ended = subprocess.run(command, stdout=sys.stderr, env=environment)
        files = sorted(Path(name).rglob("results_*.json"))
        if ended.returncode or not files:
            raise RuntimeError(
                f"lm-eval must end with a result; it left with {ended.returncode} and wrote {len(files)}."
            )
        return read_lm_eval(task, model, json.loads(files[-1].read_text(encoding="utf-8")))


def read_lm_eval(task: str, model: str, results: dict[str, Any]) -> dict[str, Any]:
    """Return the document of one lm-eval result file.

    Raises:
        RuntimeError: the task's metric is not in it.
    """
    name, metric = _LM_EVAL[task]
    scores = results.get("results", {}).get(name, {})
    if metric not in scores:
        raise RuntimeError(f"lm-eval must report {metric} of {name}; got {', '.join(scores) or 'nothing'}.")
    samples = results.get("n-samples", {})
    members = [name] if name in samples else [key for key in samples if key.startswith(f"{name}_")]
    count = sum(int(samples[key]["effective"]) for key in members)
    stderr = scores.get(metric.replace(",", "_stderr,"))
    return {
        "task": task,
        "model": model,
        "n": count,
        "correct": round(scores[metric] * count),
        "score": scores[metric],
        "stderr": stderr if isinstance(stderr, float) else None,
        "settings": {"harness": "lm-eval", "task": name, "metric": metric, "few_shot": 0},
        "samples_file": None,
    }
