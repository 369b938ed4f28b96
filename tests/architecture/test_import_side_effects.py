# SPDX-License-Identifier: Apache-2.0
"""`import hf_muon` is quick and quiet, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGET_SECONDS = 0.3


def report(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_neither_transformers_nor_cuda():
    found = report(
        "import json, logging, os, random, sys, torch\n"
        "before = set(sys.modules), dict(os.environ), random.getstate(), torch.get_rng_state()\n"
        "handlers, threads = list(logging.getLogger().handlers), torch.get_num_threads()\n"
        "import hf_muon\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before[0]}\n"
        "print(json.dumps({'new': sorted(new), 'cuda': torch.cuda.is_initialized(),\n"
        "  'same': before[1] == dict(os.environ) and before[2] == random.getstate()\n"
        "          and torch.equal(before[3], torch.get_rng_state())\n"
        "          and handlers == logging.getLogger().handlers and threads == torch.get_num_threads()}))\n"
    )
    assert not {"transformers", "accelerate", "datasets", "peft", "typer", "rich", "deepspeed"} & set(found["new"])
    assert "hf_muon" in found["new"]
    assert not found["cuda"]
    assert found["same"]


def test_import_stays_within_its_time():
    code = (
        "import json, time, torch\n"
        "start = time.process_time()\n"
        "import hf_muon\n"
        "print(json.dumps({'seconds': time.process_time() - start}))\n"
    )
    # Processor time of the best of three: other work on the machine does not count.
    assert min(report(code)["seconds"] for _ in range(3)) <= BUDGET_SECONDS


@pytest.mark.parametrize("first", ["hf_muon", "transformers.training_args", "transformers.trainer"])
def test_registration_works_in_either_order(first):
    other = "transformers.trainer" if first == "hf_muon" else "hf_muon"
    found = report(
        f"import json, {first}, {other}\n"
        "from transformers import TrainingArguments\n"
        "import transformers.trainer as trainer\n"
        "args = TrainingArguments('unused', optim='dmuon', use_cpu=True)\n"
        "chosen, options = trainer.Trainer.get_optimizer_cls_and_kwargs(args)\n"
        "print(json.dumps({'class': chosen.__name__, 'options': options,\n"
        "  'callbacks': [c.__name__ for c in trainer.DEFAULT_CALLBACKS]}))\n"
    )
    assert found["class"] == "OptimizerFactory"
    assert found["options"] == {"lr": 5e-5, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
    assert found["callbacks"].count("MuonCallback") == 1
