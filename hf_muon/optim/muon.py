# SPDX-License-Identifier: Apache-2.0
"""`MuonWithAuxAdam`: one torch optimizer, Muon for hidden matrices and AdamW for everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..config import MuonConfig, coerce_options
from .adam_step import step_adamw_
from .auxiliary_adam import has_fused_adamw, use_fused
from .data_parallel import SharedWork
from .diagnostics import StepDiagnostics
from .finite_guard import DeviceSkip, FiniteReducer, HostSkip, SkipPolicy, StepGuard, named_gradients
from .functional import MuonEntry, MuonOptions, muon_update_
from .group_layout import as_groups, check_lengths, label_of, split_group
from .momentum_storage import settle_copies
from .normuon import add_row_statistics
from .notices import logger, shorten, warn_once
from .owned_state import come_to_rest, in_standard_layout
from .parameter_state import adapt_state, fits, has_values, new_state, saved_state
from .qk_clip import QKClip, ready_clip
from .quantized import check_library, with_plain_momenta
from .rounding import STEP_KEY, warn_about_low_precision
from .state_loading import LoadPlan, make_plain, plan_load
from .state_spec import OPTIONAL_KEYS, StateSpec, specs_of
from .step_reports import StepReports
from .tensor_layout import needs_gather
from .update_size import UpdateSize
from .variants import muon_variants, step_rounding, uses_random_bits


class MuonWithAuxAdam(SharedWork, StepReports, torch.optim.Optimizer):
    """Optimize matrices with Muon and all other parameters with AdamW, in one optimizer.

    Groups carry `use_muon` and, where names are known, `param_names`. All state exists from construction:
    `momentum_buffer` (float32 unless `momentum_dtype` says otherwise) on Muon; `step`, `exp_avg`, `exp_avg_sq` on
    AdamW as in `torch.optim.AdamW`. A step with any inf or NaN in any gradient is skipped whole. Parameters without
    gradient are left alone.

    Attributes:
        finite_reducer: optional function that makes the 0/1 "some gradient is not finite" tensor agree over ranks;
            without one it is agreed over the meshes of DTensor parameters. Not pickled.
        track_update_rms: record what `update_rms()` needs; off by default.
        qk_clip: clips attention logits after the step, see `attach_qk_clip`. Not pickled.
        skip_on_device: decide about non-finite gradients without waiting for the device; None chooses it on CUDA
            whenever AdamW is fused there. Set it before the first step.

    Args:
        params_or_groups: parameters or (name, parameter) pairs tagged by `hf_muon.tag_parameters`; or groups with
            `use_muon`, or of tagged parameters (each is then split in two and keeps its options).
        config: options; default `MuonConfig()`.
        **options: single options of `MuonConfig`; they override `config`.

    Raises:
        ValueError: nothing to optimize, an untagged or duplicated parameter, a vector in a Muon group, a bad option.
        TypeError: a value of the wrong kind.
        NotImplementedError: a complex parameter.
        ImportError: `momentum_dtype=int8` without bitsandbytes.
    """

    finite_reducer: FiniteReducer | None = None
    qk_clip: QKClip | None = None
    track_update_rms: bool = False
    skip_on_device: bool | None = None
    _checked_precision: bool = False
    _config: MuonConfig
    _guard: StepGuard
    _sizes: UpdateSize
    _known: dict[str, Tensor]  # name -> parameter object, as of the last time state was in order

    def __init__(self, params_or_groups: Any, config: MuonConfig | None = None, **options: Any) -> None:
        if config is not None and not isinstance(config, MuonConfig):
            raise TypeError(f"config must be a MuonConfig; got {type(config).__name__}. Pass options by keyword.")
        self._config = dataclasses.replace(config or MuonConfig(), **coerce_options(options))
        if self._config.momentum_dtype == "int8":
            check_library()
        self._set_missing_attributes()
        self._check_rates()
        groups = as_groups(params_or_groups)
        base_lr = self._config.lr
        if base_lr is None:
            base_lr = groups[0].get("lr", self._config.resolved_muon_lr)
        # Schedulers read these: cosine_with_min_lr needs "lr"; cyclic momentum needs "momentum" and no "betas".
        defaults = {
            "lr": base_lr,
            "weight_decay": self._config.resolved_muon_weight_decay,
            "momentum": self._config.momentum,
        }
        super().__init__(groups, defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("params_or_groups must hold at least one parameter; got none. Is every parameter frozen?")

    @property
    def config(self) -> MuonConfig:
        """Return the options it was made with; groups may have their own since."""
        return self._config

    # ------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with `use_muon`, or of tagged parameters (it is then split by tag); state is made at once.

        Raises:
            ValueError: see the constructor; also a parameter that is already in another group.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict; got {type(param_group).__name__}.")
        parts = split_group(param_group, self._config)
        present = {id(param): label for label, param, _ in self._labelled_params()}
        for part in parts:
            for index, param in enumerate(part["params"]):
                if id(param) in present:
                    raise ValueError(
                        f"{label_of(part, len(self.param_groups), index)} must be in one group only; it is already"
                        f" there as {present[id(param)]}. Drop one."
                    )
        for part in parts:
            had_momentum = "momentum" in part
            super().add_param_group(part)
            if not had_momentum:
                part.pop("momentum", None)  # torch adds every default; AdamW has no use for this one
            self._start_state(part)
        self._complete_state()

    def rebuild_state(self, reset: Iterable[str] = ()) -> None:
        """Make the state fit the present parameters: call it after parameters in groups were replaced.

        A parameter object that is new under a known name (a wrapper replaced it) takes the old one's state where
        shape and layout are the same. A new name starts with zero state, also in a place that another parameter
        used before. State of parameters that are in no group any more is dropped.

        Args:
            reset: names whose state starts at zero again although the tensor stayed, for instance after another
                adapter was copied into the same parameters.

        Raises:
            ValueError: a name in `reset` that is not there, or `param_names` that do not fit `params`.
        """
        names = set(reset)
        if unknown := sorted(names - {label for label, _, _ in self._labelled_params()}):
            raise ValueError(f"reset must name parameters of this optimizer; got {shorten(unknown)}.")
        self._synchronize_state()
        for label, param, group in self._labelled_params():
            if label in names:
                self.state[param] = new_state(param, group["use_muon"], self._fused(param), self._spec(param))
        self._complete_state()
        self._guard.reset_policy()

    def state_dict(self) -> dict[str, Any]:
        """Return state by number and groups with names; plain values only (`torch.load(weights_only=True)`).

        `matrix_views` follow from the model, so None stands in their place; explicit `ns_coefficients` become one
        string, because torch.distributed.checkpoint takes nested lists apart. State of owned parameters comes as the
        even DTensors of FSDP2, which makes the call collective. Under DDP call `consolidate_state_dict` before.
        """
        self._synchronize_state()
        settle_copies()
        come_to_rest(param for group in self.param_groups for param in group["params"])
        result = super().state_dict()
        result["state"] = self._with_gathered(in_standard_layout(with_plain_momenta(result["state"])))
        for group in result["param_groups"]:
            make_plain(group)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state by parameter name where both sides have names, else by position.

        Order, grouping and number of parameters may differ when names are there. Momentum is cast to its dtype,
        values are copied, learning rates come from the matching saved group. See `plan_load` for the rules. Load
        hooks registered by others see the checkpoint as it is, before it is matched.

        Raises:
            ValueError: shapes or groups that do not fit. The optimizer is then unchanged.
        """
        self._synchronize_state()
        plans, before = list[LoadPlan](), dict(self.state)

        def match(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            plans.append(plan_load(self.param_groups, saved))
            return plans[0].as_state_dict()

        def fill(_: torch.optim.Optimizer) -> None:
            self._forget_gathered()
            for param, use_muon, saved in plans[0].states:
                fused, live, spec = self._fused(param), before.get(param) or {}, self._spec(param)
                made = saved_state(param, saved, live, use_muon, fused, spec) if saved else None
                self.state[param] = made or new_state(param, use_muon, fused, spec)
            self._complete_state()

        handles = [
            self.register_load_state_dict_pre_hook(match),
            self.register_load_state_dict_post_hook(fill, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Collective when parameters are DTensors. Waits for the device only where `skip_on_device` is off.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients on.

        Returns:
            What `closure` returned, else None.

        Raises:
            RuntimeError: ten steps in a row had a non-finite gradient.
            NotImplementedError: a sparse gradient, by name; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._synchronize_state()
        self._forget_gathered()
        named = [(label, param) for label, param, _ in self._labelled_params()]
        grads = named_gradients(named, self._check_reduced)
        self._sizes = UpdateSize()
        self._diagnostics.begin_step()
        clip = ready_clip(self._config, self.qk_clip, self._largest_over_ranks)
        params = [param for _, param in named]
        verdict = self._guard.judge(grads, params, self.finite_reducer, self._choose_policy)
        if not verdict.skip:
            if not self._checked_precision:
                self._checked_precision = True
                warn_about_low_precision(named, str(self._config.stochastic_rounding))
            for index, group in enumerate(self.param_groups):
                if group["use_muon"]:
                    self._step_muon(index, group, verdict.mask)
            sending = self._send_weights()
            for index, group in enumerate(self.param_groups):
                if not group["use_muon"]:
                    self._step_adam(index, group, verdict.mask)
            for exchange in sending:
                exchange.finish()
            self._diagnostics.add_ranks(len(self.param_groups), self._total_over_ranks)
        if clip is not None:
            clip.apply_(named, verdict, self._largest_over_ranks)
        return loss

    def _step_muon(self, index: int, group: dict[str, Any], mask: Tensor | None) -> None:
        labels = [label_of(group, index, place) for place in range(len(group["params"]))]
        states = [self.state[param] for param in group["params"]]
        entries = [
            MuonEntry(param, grad, state["momentum_buffer"], view, label, *(state.get(key) for key in OPTIONAL_KEYS))
            for param, state, view, label in zip(group["params"], states, group["matrix_views"], labels, strict=True)
            if (grad := self._gradient_to_apply(param)) is not None
        ]
        if any(needs_gather(entry.param) for entry in entries):
            warn_once(
                "Muon gathers sharded gradients on every rank and orthogonalizes each matrix there: right, but slow."
                " Dedicated owners (dmuon) do this work once per job."
            )
        for entry in entries:
            self._sizes.expect_muon(entry.param)
        self._diagnostics.choose(entries)
        squares: list[Tensor] | None = [] if self.track_update_rms or self._diagnostics.due else None
        variants = muon_variants(self._config, group, self._diagnostics)
        muon_update_(entries, MuonOptions.from_group(group), skip=mask, squares=squares, variants=variants)
        self._sizes.muon_squares += squares or []
        self._diagnostics.add_muon(index, squares or [], entries)

    def _step_adam(self, index: int, group: dict[str, Any], mask: Tensor | None) -> None:
        names = {param: label_of(group, index, place) for place, param in enumerate(group["params"])}
        for param in step_adamw_(group, self.state, names, self._fused, step_rounding(self._config, group), mask):
            if self.track_update_rms:
                self._sizes.add_adam(param, self.state[param], group)
            self._diagnostics.add_adam(index, param, self.state[param], group)

    def _choose_policy(self) -> SkipPolicy:
        self._say_if_repeated()
        on_device = self.skip_on_device
        if on_device is None:
            params = [param for _, param, _ in self._labelled_params()]
            adam_params = [param for _, param, group in self._labelled_params() if not group["use_muon"]]
            on_device = all(p.is_cuda for p in params) and all(self._fused(p) for p in adam_params)
        return DeviceSkip() if on_device else HostSkip()

    # ------------------------------------------------------------------ inner workings

    def _start_state(self, group: dict[str, Any]) -> None:
        """Make the state of a group that was just added, row statistics aside."""
        if uses_random_bits(self._config):
            group.setdefault(STEP_KEY, 0)
        for param in group["params"]:
            self.state[param] = new_state(param, group["use_muon"], self._fused(param), self._spec(param))

    def _fused(self, param: Tensor) -> bool:
        if self.skip_on_device and has_fused_adamw(param.device.type, param.dtype):
            return True
        return use_fused(str(self._config.fused_adam), param)

    def _spec(self, param: Tensor) -> StateSpec:
        return specs_of(self._config)[self._is_elsewhere(param)]

    def _complete_state(self) -> None:
        """Add row statistics where they are asked for and missing; remember the names."""
        for group in self.param_groups:
            if group["use_muon"] and self._config.normuon:
                add_row_statistics(group, self.state)
        self._remember_names()

    def _labelled_params(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                yield label_of(group, group_index, index), param, group

    def _remember_names(self) -> None:
        self._known = {
            name: param
            for group in self.param_groups
            for name, param in zip(group.get("param_names", ()), group["params"], strict=False)
        }

    def _synchronize_state(self) -> None:
        """Give every parameter fitting state and drop that of parameters which are gone; cheap when all is well."""
        count, fitting, specs = 0, True, specs_of(self._config)
        for group in self.param_groups:
            for param in group["params"]:
                count += 1
                spec = specs[self._is_elsewhere(param)]
                fitting = fitting and fits(param, self.state.get(param) or {}, group["use_muon"], spec)
        if fitting and count == sum(isinstance(key, Tensor) for key in self.state):
            return
        check_lengths(self.param_groups)
        old = dict(self.state)
        restarted: list[str] = []
        for label, param, group in self._labelled_params():
            state = old.get(param) or old.get(self._known.get(label, param)) or {}
            spec = specs[self._is_elsewhere(param)]
            if param in old and fits(param, state, group["use_muon"], spec):
                continue
            kind = (group["use_muon"], self._fused(param), spec)
            carried = adapt_state(param, state, *kind) if state else None
            if state and carried is None and has_values(state):
                restarted.append(label)
            self.state[param] = carried or new_state(param, *kind)
        present = {param for group in self.param_groups for param in group["params"]}
        for gone in [key for key in self.state if isinstance(key, Tensor) and key not in present]:
            del self.state[gone]
        self._sizes = UpdateSize()
        self._complete_state()
        if restarted:
            logger.warning(
                "Optimizer state of %s does not fit the parameter that replaced it: starts fresh.", shorten(restarted)
            )

    def _set_missing_attributes(self) -> None:
        """Make what `torch.optim.Optimizer` does not pickle, where it is not there yet."""
        for name, make in {"_config": MuonConfig, "_guard": StepGuard, "_known": dict, "_sizes": UpdateSize}.items():
            if name not in self.__dict__:
                self.__dict__[name] = make()
        self._diagnostics = StepDiagnostics(self._config.diagnostics)

    def __getstate__(self) -> dict[str, Any]:
        settle_copies()
        own = {"_config": self._config, "_guard": StepGuard(self._guard.settle())}
        switches = {"track_update_rms": self.track_update_rms, "skip_on_device": self.skip_on_device}
        return {**super().__getstate__(), **own, **switches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_missing_attributes()
        self._remember_names()
