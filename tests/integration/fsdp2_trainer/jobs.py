# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the Trainer tests run: a tiny Llama, `optim="dmuon"`, a stock FSDP2 configuration."""

import json
import os

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_muon.distributed import find_runtime
from tests.integration.accelerate.jobs import LAYER, VOCABULARY, run, tiny_llama
from tests.support import cpu_fsdp2

__all__ = ["resume", "run", "train"]


class Tokens(Dataset):
    """Fixed random rows."""

    def __init__(self, rows=64, seed=3):
        self.rows = torch.randint(0, VOCABULARY, (rows, 10), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class KeepLosses(TrainerCallback):
    """Collects what Trainer logs at every step."""

    def __init__(self):
        self.losses, self.norms, self.eval_losses = [], [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])
        if "eval_loss" in logs:
            self.eval_losses.append(logs["eval_loss"])


def arguments(folder, steps, global_batch=8, accumulation=1, mode="z3", kind="FULL_STATE_DICT", **options):
    """TrainingArguments with the same global batch for any number of ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fsdp = {}
    if world_size > 1 and mode != "ddp":
        cpu_fsdp2.enable()
        fsdp["fsdp"] = True
        fsdp["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": mode == "z3",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [LAYER],
            "state_dict_type": kind,
            "cpu_ram_efficient_loading": options.pop("ram_efficient", False),
        }
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=global_batch // world_size // accumulation,
        gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=8,
        learning_rate=3e-3,
        weight_decay=0.1,
        lr_scheduler_type=options.pop("lr_scheduler_type", "linear"),
        optim="dmuon",
        optim_args="ns_dtype=float32" + options.pop("optim_args", ""),
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=0,
        save_strategy=options.pop("save_strategy", "no"),
        seed=11,
        **fsdp,
        **options,
    )


def build(model, args, **kwargs):
    """A Trainer that keeps its losses."""
    keep = KeepLosses()
    trainer = Trainer(model, args, train_dataset=Tokens(), callbacks=[keep], **kwargs)
    return trainer, keep


def outcome(trainer, keep):
    """Losses, norms, evaluation losses, final weights (rank 0), whether owners were used."""
    state = trainer.accelerator.get_state_dict(trainer.model)
    owned = find_runtime(trainer.model) is not None
    return {
        "losses": keep.losses,
        "norms": keep.norms,
        "eval_losses": keep.eval_losses,
        "weights": {name: value.clone() for name, value in state.items()},
        "owned": owned,
        "diagnostics": [
            {key: value for key, value in entry.items() if key.startswith("diag_")}
            for entry in trainer.state.log_history
            if "diag_stable_rank" in entry
        ],
        "best": trainer.state.best_model_checkpoint,
    }


def lora_llama(seed=0):
    """A tiny Llama with LoRA matrices; the base is the same for every seed, only the adapter differs."""
    from peft import LoraConfig, get_peft_model

    base = tiny_llama(seed=0)
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # starts at zero, which would hide errors
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def train_lora(folder, steps=4, checkpoint=None, seed=0, **options):
    """Train adapters, from scratch or from `checkpoint`."""
    trainer, keep = build(lora_llama(seed), arguments(folder, steps, **options))
    trainer.train(resume_from_checkpoint=checkpoint)
    return outcome(trainer, keep)


def smollm2(layers=2):
    """The shapes of SmolLM2-135M, with fewer layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def train_smollm2(folder, steps=4, **options):
    """A few steps at real shapes; only the curve comes back."""
    trainer, keep = build(smollm2(), arguments(folder, steps, **options))
    trainer.train()
    return keep.losses, keep.norms, find_runtime(trainer.model) is not None


def train(folder, steps=6, tied=False, evaluate=False, **options):
    """Train from scratch."""
    if evaluate:
        options |= {"eval_strategy": "steps", "eval_steps": 2}
    args = arguments(folder, steps, **options)
    trainer, keep = build(tiny_llama(tied=tied), args, eval_dataset=Tokens(8, seed=4) if evaluate else None)
    trainer.train()
    return outcome(trainer, keep)


def resume(folder, checkpoint, steps=6, **options):
    """Resume in a model of other weights."""
    args = arguments(folder, steps, **options)
    trainer, keep = build(tiny_llama(seed=5), args)
    trainer.train(resume_from_checkpoint=checkpoint)
    return outcome(trainer, keep)


def read_best(folder):
    """What trainer_state.json in a checkpoint says is the best."""
    with open(os.path.join(folder, "trainer_state.json")) as file:
        return json.load(file)["best_model_checkpoint"]


def train_twice(folder, **options):
    """Call `train()` again on the same Trainer, then evaluate and predict."""
    trainer, keep = build(tiny_llama(), arguments(folder, 2, lr_scheduler_type="constant", **options))
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train()
    evaluated = trainer.evaluate(Tokens(8, seed=4))["eval_loss"]
    predicted = trainer.predict(Tokens(8, seed=4)).predictions
    return {**outcome(trainer, keep), "eval_loss": evaluated, "predictions": torch.as_tensor(predicted)}


def train_without_registration(folder, **options):
    """The public route `optimizer_cls_and_kwargs`."""
    from hf_muon import OptimizerFactory

    args = arguments(folder, 6, **options)
    args.optim, args.optim_args = "adamw_torch", None
    options = {"lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "float32", "betas": (0.9, 0.999), "eps": 1e-8}
    route = (OptimizerFactory, options)
    trainer, keep = build(tiny_llama(), args, optimizer_cls_and_kwargs=route)
    trainer.train()
    return outcome(trainer, keep)


def message_of_resume(folder, checkpoint, **options):
    """What resuming raises on this rank."""
    trainer, _ = build(tiny_llama(seed=5), arguments(folder, 6, **options))
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except ValueError as error:
        return str(error)
