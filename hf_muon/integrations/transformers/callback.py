# SPDX-License-Identifier: Apache-2.0
"""`MuonCallback`: says once which tensors are on Muon, and adds both learning rates and update sizes to the logs."""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ...optim import MuonWithAuxAdam
from .factory import routing_of
from .routing_table import fine_tuning_advice, render_routing, show_once, warn_once
from .trainer_options import asks_for_dmuon

logger = logging.getLogger("hf_muon.integrations.transformers")


class MuonCallback(TrainerCallback):
    """Inert unless the optimizer is a `MuonWithAuxAdam`.

    Adds to each training log entry `muon_lr`, `adam_lr`, `muon_update_rms`, `adam_update_rms` and `skipped_steps`,
    in place and before the callbacks of trackers run. Learning rates are those the last step used, as
    `learning_rate` is. Update sizes are of this rank's part of the last step, weight decay aside; they are measured
    only in steps that end in a log entry. With `diagnostics=N` an entry that follows such a step also has `diag_*`.
    """

    def __init__(self) -> None:
        self._optimizer: MuonWithAuxAdam | None = None
        self._rates: dict[str, float] = {}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Settle a DeepSpeed configuration: whose Muon it means, and whether that can work."""
        if getattr(args, "hf_deepspeed_config", None) is not None:
            from ..deepspeed.trainer_start import prepare_trainer

            prepare_trainer(args, kwargs.get("model"), ours=asks_for_dmuon(args))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the optimizer and print the routing table on the main process."""
        self._optimizer = find_muon(kwargs.get("optimizer"))
        self._rates = {}
        if self._optimizer is None or not state.is_world_process_zero:
            return
        rows = routing_of(self._optimizer)
        show_once(render_routing(self._optimizer, rows), to_stderr=not args.disable_tqdm)
        if rows and (advice := fine_tuning_advice(kwargs["model"], rows)):
            warn_once(advice)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the step when a log entry follows; DeepSpeed steps before `on_pre_optimizer_step`."""
        if self._optimizer is not None:
            self._optimizer.track_update_rms = _log_follows(args, state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the rates of this step."""
        if self._optimizer is not None:
            self._rates = learning_rates(self._optimizer)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the values to a training entry and to its copy in `state.log_history`."""
        if self._optimizer is None or not logs or not ("learning_rate" in logs or "train_runtime" in logs):
            return
        values: dict[str, Any] = {"skipped_steps": int(self._optimizer.num_skipped_steps)}
        if "learning_rate" in logs:
            sizes = self._optimizer.update_rms()
            names = {"muon": "muon_update_rms", "adamw": "adam_update_rms"}
            values = {**self._rates, **{names[half]: float(size) for half, size in sizes.items()}, **values}
            values |= {f"diag_{name}": value for name, value in self._optimizer.diagnostics().items()}
        values = {key: value for key, value in values.items() if math.isfinite(value)}  # JSON has no NaN
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let go of the optimizer."""
        if self._optimizer is not None:
            self._optimizer.track_update_rms = False
        self._optimizer = None


def find_muon(optimizer: Any) -> MuonWithAuxAdam | None:
    """Return the `MuonWithAuxAdam` inside Accelerate's wrapper, or None."""
    for _ in range(4):  # wrappers around wrappers
        if isinstance(optimizer, MuonWithAuxAdam):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def learning_rates(optimizer: MuonWithAuxAdam) -> dict[str, float]:
    """Return `muon_lr` and `adam_lr`; groups of one half with other rates are added as `muon_lr_2`, ..."""
    rates: dict[str, float] = {}
    for use_muon, name in ((True, "muon_lr"), (False, "adam_lr")):
        found = [float(group["lr"]) for group in optimizer.param_groups if group["use_muon"] is use_muon]
        for index, rate in enumerate(dict.fromkeys(found)):
            rates[name if index == 0 else f"{name}_{index + 1}"] = rate
    return rates


def _log_follows(args: Any, state: Any) -> bool:
    step = state.global_step + 1
    if args.logging_strategy == IntervalStrategy.EPOCH:
        return True  # the last step of an epoch is not known here
    if args.logging_strategy == IntervalStrategy.NO:
        return False
    return bool(step % max(1, int(state.logging_steps)) == 0 or (step == 1 and args.logging_first_step))
