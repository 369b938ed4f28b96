# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the DeepSpeed tests run: tiny models in the stock Trainer, in Accelerate and in plain loops."""

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
    optim = options.pop("optim", "dmuon")
    optim_args = ",".join(filter(None, ["ns_dtype=float32", options.pop("optim_args", "")]))
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8 // world_size // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=options.pop("learning_rate", 3e-3),
        weight_decay=options.pop("weight_decay", 0.1),
        lr_scheduler_type=options.pop("lr_scheduler_type", "linear"),
        optim=optim,
        optim_args=optim_args if optim == "dmuon" else None,
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
    base = trainer.deepspeed.basic_optimizer if trainer.is_deepspeed_enabled else optimizer
    states = [state["momentum_buffer"] for state in base.state.values() if "momentum_buffer" in state]
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: value.detach().float().clone() for name, value in (weights or {}).items()},
        "counts": counts,
        "class": type(optimizer).__name__,
        "momentum_dtypes": sorted({str(state.dtype) for state in states}),
        "momentum_elements": sum(state.numel() for state in states),
        "groups": [(group["use_muon"], list(group["param_names"]), group["lr"]) for group in groups],
    }


def num_matrices(folder, **options):
    """Return (matrices, elements) on Muon of a saved model."""
    rows = [row for row in hf_muon.explain_parameters(load(folder), **options) if row.is_muon]
    matrices = sum(batch for row in rows for batch, _, _ in row.view.matrix_shapes(row.shape))
    return matrices, sum(row.count for row in rows)


def message(folder, model_folder, deepspeed, **options):
    """What a Trainer raises on this rank, at its construction or before its first step."""
    from transformers import Trainer

    try:
        trainer = Trainer(load(model_folder), arguments(folder, deepspeed, **options), train_dataset=Tokens())
    except Exception as error:  # any kind: the test asserts on its text
        return "construction", type(error).__name__, str(error)
    try:
        trainer.train()
    except Exception as error:  # any kind: the test asserts on its text
        return trainer.state.global_step, type(error).__name__, str(error)
    return None


def deepspeeds_own(folder, model_folder, deepspeed, **options):
    """Train with DeepSpeed's own Muon; return the outcome, what hf-muon warned, and DeepSpeed's norms."""
    import logging

    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_muon.deepspeed").addHandler(handler)
    try:
        result = train(folder, model_folder, deepspeed, optim="adamw_torch", **options)
    finally:
        logging.getLogger("hf_muon.deepspeed").removeHandler(handler)
    return result, said


LOOP_OPTIONS = {"muon_lr": 1e-2, "adam_lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "float32"}


def loop_config(stage, **changes):
    """A configuration without `auto`, for loops without Trainer."""
    fixed = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    return config_of(stage, **{**fixed, "bf16.enabled": False, **changes})


def batches():
    """This rank's batches, and whether the loss of each is spoiled."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    rows = Tokens().rows
    return [rows[8 * step : 8 * step + 8].chunk(world_size)[rank] for step in range(STEPS)]


def whole_weights(model):
    """Whole weights, also from ZeRO-3 partitions."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def one_process_loop(model_folder, **options):
    """The reference of the loops: `MuonWithAuxAdam` in one process."""
    model = load(model_folder)
    optimizer = hf_muon.OptimizerFactory()(model, **{**LOOP_OPTIONS, **options})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for tokens in batches():
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain_loop(model_folder, config, spoiled=(), **options):
    """`deepspeed.initialize` with what the factory returned; a scheduler made before stays connected."""
    import deepspeed

    torch.manual_seed(0)
    model = load(model_folder)
    optimizer = hf_muon.OptimizerFactory()(model, **{**LOOP_OPTIONS, **options})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    history = []
    with counted() as counts:
        for step, tokens in enumerate(batches()):
            loss = engine(input_ids=tokens, labels=tokens).loss
            # On one rank only: the others must skip the step as well.
            engine.backward(loss * float("nan") if step in spoiled and engine.global_rank == 0 else loss)
            engine.step()
            if step not in spoiled:
                scheduler.step()
            history.append(whole_weights(model))
    momenta = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    finite = all(bool(momentum.isfinite().all()) for momentum in momenta)
    return {
        "history": history,
        "counts": counts,
        "skipped": optimizer.num_skipped_steps,
        "last": optimizer.last_step_skipped,
        "finite": finite,
    }


def accelerate_loop(model_folder, config, **options):
    """Accelerate with a DeepSpeed plugin; options may stand in its optimizer block."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config)))
    model = load(model_folder)
    optimizer = hf_muon.OptimizerFactory()(model, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, optimizer = accelerator.prepare(model, optimizer)
    for tokens in batches():
        accelerator.backward(engine(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return whole_weights(model)
