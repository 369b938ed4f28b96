# SPDX-License-Identifier: Apache-2.0
"""`MuonConfig`: every option of hf-muon, its default, its help text and its checks, in one place."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MUON_LR = 0.02  # rules `original` and `none`: the step has a spectral norm of about lr
DEFAULT_ADAM_LR = 3e-4  # also Muon's under `match_rms_adamw`, whose steps have the size of AdamW's
DEFAULT_BETAS = (0.9, 0.95)
DEFAULT_EPS = 1e-10

_CHOICES: dict[str, tuple[str, ...]] = {
    "ns_method": ("gram", "standard"),
    "ns_dtype": ("auto", "float32", "bfloat16", "float16"),
    "adjust_lr_fn": ("match_rms_adamw", "original", "none"),
    "fused_adam": ("auto", "true", "false"),
    "matrix_split": ("auto", "none", "fused", "per_head"),
    "conv": ("adamw", "flatten"),
    "dmuon": ("auto", "z2", "z3", "off"),
    "momentum_dtype": ("float32", "bfloat16", "int8"),
    "offload": ("none", "cpu"),
    "stochastic_rounding": ("auto", "true", "false"),
}
_RATES = ("lr", "muon_lr", "adam_lr", "weight_decay", "muon_weight_decay", "adam_weight_decay", "eps")
_ALIASES = ("adam_beta1", "adam_beta2", "adam_epsilon")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class MuonConfig:
    """Options of the Muon + AdamW optimizer; the keys of `--optim_args` and of a recipe's `optimizer:` block.

    Frozen: use `dataclasses.replace` to change one. `None` means "take the Trainer's value, else the default".

    Raises:
        ValueError: a value is out of range; the message names the key, the value and what is allowed.
        TypeError: a value has the wrong kind.
        NotImplementedError: an option that this version documents but does not run yet.
    """

    lr: float | None = _option(None, "learning rate used where muon_lr or adam_lr is absent (Trainer: learning_rate)")
    muon_lr: float | None = _option(None, "learning rate of the Muon half; overrides lr")
    adam_lr: float | None = _option(None, "learning rate of the AdamW half; overrides lr")
    momentum: float = _option(0.95, "momentum of the Muon half, in [0, 1)")
    nesterov: bool = _option(True, "look ahead by one momentum step before orthogonalizing")
    weight_decay: float | None = _option(None, "decoupled weight decay of both halves; norms and biases never decay")
    muon_weight_decay: float | None = _option(None, "weight decay of the Muon half; overrides weight_decay")
    adam_weight_decay: float | None = _option(None, "weight decay of the AdamW half; overrides weight_decay")
    betas: tuple[float, float] | None = _option(None, "AdamW betas (also as adam_beta1, adam_beta2)")
    eps: float | None = _option(None, "AdamW epsilon (also as adam_epsilon)")
    ns_method: str = _option("gram", "gram or standard Newton-Schulz: same mathematics, gram where it is cheaper")
    ns_steps: int = _option(5, "Newton-Schulz iterations")
    ns_coefficients: str | tuple[tuple[float, float, float], ...] = _option(
        "keller", "keller, polar_express, or an explicit list of (a, b, c), one per step or one for all"
    )
    ns_dtype: str = _option("auto", "dtype of the Newton-Schulz products; always normalised in at least float32 first")
    adjust_lr_fn: str = _option(
        "match_rms_adamw", "match_rms_adamw: 0.2*sqrt(max(M, N)); original: sqrt(max(1, M/N)); none: 1"
    )
    fused_adam: str | bool = _option("auto", "fused AdamW where the device has it, else torch's default")
    matrix_split: str = _option(
        "auto", "none; fused: QKV and gate-up split into their matrices; per_head: Q, K, V by head too; auto = fused"
    )
    conv: str = _option("adamw", "convolution kernels: adamw; flatten: (out, in * kernel) matrices on Muon")
    qk_clip: float | None = _option(
        None, "MuonClip: threshold on the attention logit of a head, for instance 100; off"
    )
    qk_clip_exact: bool = _option(
        False, "true: qk_clip measures after the update, in one more forward pass; no logit stays above"
    )
    dmuon: str = _option("auto", "dedicated owners under FSDP2: auto, z2, z3 or off")
    rates: str | None = _option(None, "file of hf-muon calibrate: owners are balanced by measured seconds, not FLOPs")
    momentum_dtype: str = _option(
        "float32", "dtype the momentum rests in: float32; bfloat16, rounded stochastically; int8, by bitsandbytes"
    )
    offload: str = _option("none", "where the momentum rests: none (on the device) or cpu")
    stochastic_rounding: str | bool = _option(
        "auto", "true: bfloat16 weights without a float32 master are rounded stochastically; auto: to nearest, warns"
    )
    rounding_seed: int = _option(0, "seed of stochastic rounding, the same on all ranks")
    diagnostics: int = _option(0, "every so many steps, log update sizes, orthogonality, stable rank, largest logit")
    normuon: bool = _option(False, "NorMuon: bring the rows of the orthogonalized update to one size")
    normuon_beta2: float = _option(0.95, "decay of NorMuon's second moment per row, in [0, 1)")
    include: tuple[str, ...] = _option((), "regexes on parameter names that must be on Muon")
    exclude: tuple[str, ...] = _option((), "regexes on parameter names that must be on AdamW; wins over include")

    def __post_init__(self) -> None:
        """Normalise lists and check every value."""
        for name in ("include", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if self.betas is not None:
            object.__setattr__(self, "betas", _betas(self.betas))
        words = {"1": "true", "yes": "true", "0": "false", "no": "false"}
        for name in ("fused_adam", "stochastic_rounding"):
            object.__setattr__(self, name, words.get(text := str(getattr(self, name)).lower(), text))
        object.__setattr__(self, "ns_coefficients", _normalise_coefficients(self.ns_coefficients))
        self._check_choices()
        self._check_numbers()
        self._check_clip()
        self._check_rows()
        self._check_patterns()

    # ------------------------------------------------------------------ construction

    @classmethod
    def from_optim_args(cls, args: str | Mapping[str, Any] | None) -> MuonConfig:
        """Build a config from `"key=value,key=value"` or from a mapping whose values may be strings.

        Args:
            args: Trainer's `optim_args`. Commas inside brackets do not separate, so `betas=(0.9,0.95)` works;
                `;` separates the regexes of `include` and `exclude`.

        Raises:
            ValueError: an unknown key (the nearest valid one is named), a key given twice, or a bad value.
        """
        pairs = parse_key_values(args) if isinstance(args, str) else dict(args or {})
        return cls(**coerce_options(pairs))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-serialisable options; `MuonConfig.from_optim_args(d)` restores the config."""
        result = dataclasses.asdict(self)
        for key in ("betas", "include", "exclude"):
            result[key] = None if result[key] is None else list(result[key])
        if not isinstance(self.ns_coefficients, str):
            result["ns_coefficients"] = [list(row) for row in self.ns_coefficients]
        return result

    # ------------------------------------------------------------------ learning rates

    @property
    def resolved_muon_lr(self) -> float:
        """Return `muon_lr`, else `lr`, else 0.02 (3e-4 under `match_rms_adamw`)."""
        default = DEFAULT_ADAM_LR if self.adjust_lr_fn == "match_rms_adamw" else DEFAULT_MUON_LR
        return _first(self.muon_lr, self.lr, default)

    @property
    def resolved_adam_lr(self) -> float:
        """Return `adam_lr`, else `lr`, else 3e-4."""
        return _first(self.adam_lr, self.lr, DEFAULT_ADAM_LR)

    @property
    def resolved_muon_weight_decay(self) -> float:
        """Return `muon_weight_decay`, else `weight_decay`, else 0."""
        return _first(self.muon_weight_decay, self.weight_decay, 0.0)

    @property
    def resolved_adam_weight_decay(self) -> float:
        """Return `adam_weight_decay`, else `weight_decay`, else 0."""
        return _first(self.adam_weight_decay, self.weight_decay, 0.0)

    @property
    def resolved_matrix_split(self) -> str:
        """Return `matrix_split` with `auto` replaced by what it means."""
        return "fused" if self.matrix_split == "auto" else self.matrix_split

    def with_fallbacks(
        self,
        *,
        lr: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
    ) -> MuonConfig:
        """Fill the options that were not given with a trainer's values; given ones (also 0.0) stay."""
        return dataclasses.replace(
            self,
            lr=_first(self.lr, lr),
            weight_decay=_first(self.weight_decay, weight_decay),
            betas=_first(self.betas, betas),
            eps=_first(self.eps, eps),
        )

    # ------------------------------------------------------------------ checks

    def _check_choices(self) -> None:
        for name in _CHOICES:
            check_choice(name, getattr(self, name))

    def _check_numbers(self) -> None:
        for name in (*_RATES, "qk_clip"):
            if (value := getattr(self, name)) is not None:
                _check_number(name, value)
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{name} must be finite and not negative; got {value!r}.")
        for name in ("momentum", "normuon_beta2"):
            _check_number(name, value := getattr(self, name))
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must lie in [0, 1); got {value!r}.")
        for name in ("nesterov", "normuon", "qk_clip_exact"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false; got {getattr(self, name)!r}.")
        for name, least in (("ns_steps", 1), ("rounding_seed", 0), ("diagnostics", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}.")
        if self.betas is not None and (len(self.betas) != 2 or not all(0.0 <= b < 1.0 for b in self.betas)):
            raise ValueError(f"betas must be two numbers in [0, 1); got {self.betas!r}.")

    def _check_clip(self) -> None:
        if self.qk_clip == 0:
            raise ValueError("qk_clip must be above 0; got 0. Leave it out, or set it to off.")
        if self.qk_clip_exact and self.qk_clip is None:
            raise ValueError("qk_clip_exact must come with a threshold; got none. Set qk_clip=100, for instance.")

    def _check_rows(self) -> None:
        rows = self.ns_coefficients
        if not isinstance(rows, str) and 1 < len(rows) < self.ns_steps:
            raise ValueError(
                f"ns_coefficients must hold one row, or one per step ({self.ns_steps}); got {len(rows)} rows."
            )

    def _check_patterns(self) -> None:
        if self.rates is not None and not isinstance(self.rates, str):
            raise TypeError(f"rates must be the path of a file; got {self.rates!r}.")
        for name in ("include", "exclude"):
            for pattern in getattr(self, name):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{name} must hold regular expressions; got {pattern!r} ({error}).") from None


def check_choice(name: str, value: object) -> None:
    """Raise ValueError where `value` is not among the named values of option `name`."""
    allowed = _CHOICES[name]
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.{nearest(value, allowed)}")


def parse_key_values(text: str) -> dict[str, str]:
    """Split `"a=1,b=(0.9,0.95)"` into a mapping; commas inside brackets do not separate.

    Raises:
        ValueError: a piece has no `=`, or a key stands twice.
    """
    pairs: dict[str, str] = {}
    for piece in _split_outside_brackets(text):
        if not piece.strip():
            continue
        key, equals, value = piece.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"optim_args must be key=value pairs separated by commas; got {piece.strip()!r}.")
        if key in pairs:
            raise ValueError(f"optim_args names {key!r} twice. Keep one.")
        pairs[key] = value.strip()
    return pairs


def _split_outside_brackets(text: str) -> list[str]:
    pieces, depth = [""], 0
    for character in text:
        depth = max(0, depth + (character in "([{") - (character in ")]}"))
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def coerce_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys of `options`, fold the AdamW aliases in, and turn strings into the option's type.

    Raises:
        ValueError: an unknown key or a string that does not parse; the message names the key and the way out.
    """
    fields = {f.name: f for f in dataclasses.fields(MuonConfig)}
    result: dict[str, Any] = {}
    for key, value in options.items():
        if key not in fields and key not in _ALIASES:
            raise ValueError(f"{key!r} is not an option of hf-muon.{nearest(key, [*fields, *_ALIASES])}")
        kind = "float" if key in _ALIASES else str(fields[key].type)
        result[key] = _from_string(key, value, kind) if isinstance(value, str) else value
    beta1, beta2 = result.pop("adam_beta1", None), result.pop("adam_beta2", None)
    if beta1 is not None or beta2 is not None:
        if result.get("betas") is not None:
            raise ValueError("betas and adam_beta1/adam_beta2 were both given. Keep one of them.")
        result["betas"] = (_first(beta1, DEFAULT_BETAS[0]), _first(beta2, DEFAULT_BETAS[1]))
    if (epsilon := result.pop("adam_epsilon", None)) is not None:
        if result.get("eps") is not None:
            raise ValueError("eps and adam_epsilon were both given. Keep one of them.")
        result["eps"] = epsilon
    return result


def nearest(word: object, known: Sequence[str]) -> str:
    """Return `" Did you mean 'x'?"` or the list of valid names when nothing is close."""
    match = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else f" Valid: {', '.join(known)}."


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {value!r}.")


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = value.split(";") if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{name} must be a regular expression or a list of them; got {value!r}.")
    return tuple(pattern for pattern in patterns if pattern)


def _betas(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(beta, (int, float)) and not isinstance(beta, bool) for beta in value
    ):
        raise TypeError(f"betas must be two numbers; got {value!r}.")
    return tuple(value)


def _numbers(text: str) -> list[float]:
    return [float(piece) for piece in re.split(r"[\s,;()\[\]]+", text) if piece]


def _from_string(key: str, text: str, kind: str) -> Any:
    text = text.strip()
    if key in ("include", "exclude", "fused_adam", "stochastic_rounding"):
        return text if key in ("include", "exclude") else text.lower()
    if "None" in kind and text.lower() in ("none", "null", "", *(("off",) if key == "qk_clip" else ())):
        return None
    try:
        if key == "betas":
            return tuple(_numbers(text))
        if key == "ns_coefficients":
            return text if re.fullmatch(r"[A-Za-z_]+", text) else _numbers(text)
        if kind.startswith("bool"):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except (KeyError, ValueError):
        wanted = {"b": "true or false", "i": "a whole number", "f": "a number"}.get(kind[0], "numbers")
        raise ValueError(f"{key} must be {wanted}; got {text!r}.") from None
    return text


def _normalise_coefficients(value: Any) -> str | tuple[tuple[float, float, float], ...]:
    """Return a table name, or rows of three; a flat list of 3k numbers means k rows."""
    if isinstance(value, str):
        if value not in ("keller", "polar_express"):
            known = ("keller", "polar_express")
            raise ValueError(
                f"ns_coefficients must be keller, polar_express or numbers; got {value!r}.{nearest(value, known)}"
            )
        return value
    try:
        rows = list(value)
        if rows and not isinstance(rows[0], (list, tuple)):
            rows = [rows[i : i + 3] for i in range(0, len(rows), 3)]
        result = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    except (TypeError, ValueError):
        result = ()
    if not result or not all(math.isfinite(number) for row in result for number in row):
        raise ValueError(f"ns_coefficients must be finite (a, b, c) rows; got {value!r}.")
    return result
