# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the DeepSpeed tests run: tiny models, stock Trainer, `optim="dmuon"`, a DeepSpeed configuration."""

import contextlib
import copy
import os

import torch
from torch.utils.data import Dataset

import hf_muon

VOCABULARY = 67
STEPS = 3


class Tokens(Dataset):
    """Fixed random rows."""

    def __init__(self, rows=32, seed=3):
        self.rows = torch.randint(0, VOCABULARY, (rows, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def config_of(stage, **changes):
    """A DeepSpeed configuration; dotted keys change it."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": 10**9,
    }
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = value
    return config


def arguments(folder, deepspeed=None, *, accumulation=1, steps=STEPS, **options):
    """TrainingArguments with a global batch of 8 for any number of ranks."""
    from transformers import TrainingArguments

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    optim_args = options.pop("optim_args", "")
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8 // world_size // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=options.pop("learning_rate", 3e-3),
        weight_decay=options.pop("weight_decay", 0.1),
        lr_scheduler_type=options.pop("lr_scheduler_type", "linear"),
        optim=options.pop("optim", "dmuon"),
        optim_args=",".join(filter(None, ["ns_dtype=float32", optim_args])),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy=options.pop("save_strategy", "no"),
        seed=11,
        deepspeed=copy.deepcopy(deepspeed),
        use_cpu=deepspeed is None,
        **options,
    )


def load(folder, **options):
    """The saved tiny model; under ZeRO-3 `from_pretrained` partitions it while it loads (`zero.Init`)."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


@contextlib.contextmanager
def counted():
    """Count the matrices that each Newton-Schulz of the process orthogonalizes: ours, and DeepSpeed's own."""
    from hf_muon.integrations.deepspeed import exchange
    from hf_muon.optim import functional

    counts = {"ours": 0, "deepspeed": 0}
    undo = []

    def watch(module, name, kind, size):
        original = getattr(module, name)

        def counting(first, *args, **kwargs):
            counts[kind] += size(first)
            return original(first, *args, **kwargs)

        setattr(module, name, counting)
        undo.append((module, name, original))

    def many(matrices):
        return sum(matrix[..., 0, 0].numel() for matrix in matrices)

    for module in (exchange, functional):
        watch(module, "newton_schulz_many", "ours", many)
    with contextlib.suppress(ImportError):
        from deepspeed.runtime.zero.muon import original_muon

        for name in ("zeropower_via_gram_newtonschulz", "zeropower_via_newtonschulz5"):
            watch(original_muon, name, "deepspeed", lambda matrix: matrix[..., 0, 0].numel())
    try:
        yield counts
    finally:
        for module, name, original in undo:
            setattr(module, name, original)


def train(folder, model_folder, deepspeed=None, *, zero_init=False, resume=None, dtype=None, **options):
    """Train through the stock Trainer; return losses, logs, weights, counts and the bytes of state on this rank."""
    from transformers import Trainer

    if zero_init:
        args = arguments(folder, deepspeed, **options)
        model = load(model_folder)
        assert all(hasattr(parameter, "ds_shape") for parameter in model.parameters())
    else:
        model = load(model_folder, **({"dtype": dtype} if dtype else {}))
        args = arguments(folder, deepspeed, **options)
    with counted() as counts:
        trainer = Trainer(model, args, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer, counts)


def outcome(trainer, counts):
    """What a test looks at."""
    from hf_muon.integrations.transformers.callback import find_muon

    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    optimizer = find_muon(trainer.optimizer)
    states = (
        [] if optimizer is None else [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    )
    return {
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: value.detach().float().clone() for name, value in (weights or {}).items()},
        "counts": counts,
        "class": type(optimizer).__name__,
        "momentum_dtypes": sorted({str(state.dtype) for state in states}),
        "momentum_elements": sum(state.numel() for state in states),
        "groups": [(g["use_muon"], list(g["param_names"]), g["lr"]) for g in optimizer.param_groups]
        if optimizer
        else [],
    }


def num_matrices(folder, **options):
    """Return (matrices, elements) on Muon of a saved model."""
    rows = [row for row in hf_muon.explain_parameters(load(folder), **options) if row.is_muon]
    matrices = sum(batch for row in rows for batch, _, _ in row.view.matrix_shapes(row.shape))
    return matrices, sum(row.count for row in rows)
