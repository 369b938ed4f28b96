# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the DDP tests run: stock Trainer and raw Accelerate loops on tiny Llamas."""

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from transformers import TrainerCallback

import hf_muon
from hf_muon.distributed import find_replica_owners
from tests.integration.accelerate.jobs import batches, muon, tiny_llama
from tests.integration.accelerate.jobs import train as train_loop
from tests.integration.fsdp2_trainer.jobs import Tokens, arguments, build, lora_llama


class Stop(TrainerCallback):
    """Ends training as a kill does: after a step, without another save."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def outcome(trainer, keep):
    model = trainer.model_wrapped
    owners = find_replica_owners(model)
    return {
        "losses": keep.losses,
        "norms": keep.norms,
        "weights": {name: value.detach().clone() for name, value in trainer.model.named_parameters()},
        "owned": owners is not None,
        "traffic": None if owners is None else hf_muon.comm_stats(model),
        "muon": sum(p.numel() for p in trainer.model.parameters() if getattr(p, "use_muon", False)),
        "held": sum(
            value["momentum_buffer"].numel()
            for value in trainer.optimizer.optimizer.state.values()
            if "momentum_buffer" in value
        ),
    }


def train(folder, steps=6, lora=False, checkpoint=None, seed=0, stop=None, **options):
    """Train, from scratch or from `checkpoint`; `stop` ends it after that step."""
    args = arguments(folder, steps, mode="ddp", **options)
    trainer, keep = build(lora_llama(seed) if lora else tiny_llama(seed=seed), args)
    if stop is not None:
        trainer.add_callback(Stop(stop))
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        return None
    return outcome(trainer, keep)


def train_twice(folder):
    """Call `train()` again on the same Trainer and evaluate in between."""
    args = arguments(folder, 2, mode="ddp", lr_scheduler_type="constant")
    trainer, keep = build(tiny_llama(), args)
    trainer.train()
    trainer.evaluate(Tokens(8, seed=4))
    trainer.args.max_steps = 4
    trainer.train()
    return outcome(trainer, keep)


def raw_loop(folder, order="together", seed=0, load=None, steps=6, save_after=None, accumulation=1):
    """A loop of one's own under Accelerate's DDP, with its clipping, accumulation and checkpoints."""
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, gradient_accumulation_steps=accumulation)
    model = tiny_llama(seed=seed)
    if order == "together":
        model, optimizer = accelerator.prepare(model, muon(model))
    elif order == "optimizer first":
        optimizer, model = accelerator.prepare(muon(model), model)
    elif order == "one by one":
        optimizer = accelerator.prepare(muon(model))
        model = accelerator.prepare(model)
    else:  # the optimizer is made from the wrapped model
        model = accelerator.prepare(model)
        options = {"lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "float32"}
        optimizer = accelerator.prepare(hf_muon.OptimizerFactory()(model, **options))
    data = batches(1, steps, 8, accelerator.num_processes, accelerator.process_index)
    start = 0
    if load is not None:
        accelerator.load_state(load)
        start = save_after
    if accumulation > 1:
        data = [piece for tokens in data for piece in tokens.chunk(accumulation)]
    losses, norms = train_loop(accelerator, model, optimizer, data[start : save_after if load is None else None])
    if save_after is not None and load is None:
        accelerator.save_state(folder)
        more = train_loop(accelerator, model, optimizer, data[save_after:])
        losses, norms = losses + more[0], norms + more[1]
    inner = accelerator.unwrap_model(model)
    weights = {name: value.detach().clone() for name, value in inner.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights, "owned": find_replica_owners(model) is not None}
