# SPDX-License-Identifier: Apache-2.0
"""`OptimizerFactory`: a whole model in, one ready `MuonWithAuxAdam` out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...config import DEFAULT_BETAS, DEFAULT_EPS, MuonConfig, parse_key_values
from ...optim import MuonWithAuxAdam
from ...param_groups import ParameterRow, apply_tags, build_param_groups, check_coverage, explain_parameters
from .attention_logits import attach_qk_clip
from .backends import Backend, check_supported, detect_backend, find_ddp
from .trainer_options import asks_for_dmuon, config_from_options

logger = logging.getLogger("hf_muon.integrations.transformers")

# What decided each parameter, for the table the callback prints; not kept with the optimizer's own state.
_routing: weakref.WeakKeyDictionary[MuonWithAuxAdam, list[ParameterRow]] = weakref.WeakKeyDictionary()


class OptimizerFactory:
    """Build `MuonWithAuxAdam` for a model: route every trainable tensor, make the groups, make the optimizer.

    Trainer calls it as `OptimizerFactory()(model, **options)`, other trainers as `(model, training_args, **options)`.

    Args:
        config: options; single ones given at the call override it.

    Raises:
        TypeError: `config` is not a `MuonConfig`.
    """

    def __init__(self, config: MuonConfig | None = None) -> None:
        if config is not None and not isinstance(config, MuonConfig):
            raise TypeError(f"config must be a MuonConfig; got {type(config).__name__}. Pass options at the call.")
        self.config = config

    def __call__(self, model: nn.Module, training_args: Any = None, **options: Any) -> MuonWithAuxAdam:
        """Return the optimizer; writes `use_muon` and `muon_view` on the parameters of `model`.

        Groups come in this order, empty ones left out: Muon, AdamW with weight decay, AdamW without. Each trainable
        tensor is in exactly one.

        Args:
            model: the model as it will train; not yet wrapped for FSDP2. A DistributedDataParallel module gets owners
                at once, which is collective; names are those of the model inside.
            training_args: `TrainingArguments`; supplies `learning_rate`, `weight_decay`, betas and epsilon where no
                option does, and `optim_args` where its `optim` is "dmuon".
            **options: keys of `MuonConfig`; strings are parsed.

        Raises:
            ValueError, TypeError: a wrong option, nothing to train, nothing on Muon.
            NotImplementedError: a kind of parallelism or parameter that this version does not train; attention that
            `qk_clip` cannot rescale.
        """
        if asks_for_dmuon(training_args):
            options = {**parse_key_values(training_args.optim_args or ""), **options}
        backend = detect_backend(model)
        if backend is Backend.DEEPSPEED:
            from ..deepspeed.trainer_start import factory_options, settle

            options = factory_options(options, self.config)
        config = config_from_options(options, training_args, self.config)
        if training_args is None:
            _warn_without_rate(config)
        check_supported(model, backend, config)
        kind: type[MuonWithAuxAdam] = MuonWithAuxAdam
        if backend is Backend.DEEPSPEED:
            from ..deepspeed.optimizer import PartitionedOptimizer as kind

            settle(config)
        elif backend is Backend.FSDP2:
            from ..accelerate import activate

            activate()
        replicas = find_ddp(model)
        if model in replicas:
            model = replicas[0].module
        rows = explain_parameters(
            model,
            include=config.include,
            exclude=config.exclude,
            matrix_split=config.resolved_matrix_split,
            conv=config.conv,
        )
        check_coverage(rows)
        apply_tags(model, rows)
        optimizer = kind(
            build_param_groups(rows, model, muon=_muon_options(config), adamw=_adamw_options(config)), config
        )
        _routing[optimizer] = rows
        if config.qk_clip is not None:
            attach_qk_clip(model, optimizer)
        for ddp in replicas:
            optimizer.dedicate_matrices(ddp)
        return optimizer


def _warn_without_rate(config: MuonConfig) -> None:
    if config.lr is config.muon_lr is config.adam_lr is None:
        logger.warning(
            "No learning rate was given: Muon runs with %g, AdamW with %g. Pass lr, or training_args to take the"
            " Trainer's.",
            config.resolved_muon_lr,
            config.resolved_adam_lr,
        )


def routing_of(optimizer: MuonWithAuxAdam) -> Sequence[ParameterRow]:
    """Return the routing rows of an optimizer that a factory built in this process, else an empty list."""
    return _routing.get(optimizer, [])


def _muon_options(config: MuonConfig) -> dict[str, Any]:
    names = ("momentum", "nesterov", "ns_method", "ns_steps", "ns_coefficients", "ns_dtype", "adjust_lr_fn")
    options = {name: getattr(config, name) for name in names}
    return {"lr": config.resolved_muon_lr, "weight_decay": config.resolved_muon_weight_decay, **options}


def _adamw_options(config: MuonConfig) -> dict[str, Any]:
    return {
        "lr": config.resolved_adam_lr,
        "weight_decay": config.resolved_adam_weight_decay,
        "betas": config.betas or DEFAULT_BETAS,
        "eps": DEFAULT_EPS if config.eps is None else config.eps,
    }
