# SPDX-License-Identifier: Apache-2.0
"""The recipe schema: dataclasses that name every block and key, their meaning and their checks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from ...config import MuonConfig, coerce_options, nearest
from ..errors import UsageError

OPTIMIZERS = ("muon", "adamw")
BENCHMARKS = ("gsm8k", "mmlu", "mbpp", "mbpp_plus")
SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")


def _key(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class TaskBlock:
    """What is learned, and from which text."""

    kind: str = _key(
        "text",
        "text: next-token loss on packed text; addition: generated sums, answer-only loss; "
        "instruct: fine-tuning on prompts and answers, answer-only loss",
    )
    data: str = _key(
        "gsm8k",
        "text: a shipped data folder, or a local folder with train, validation and test .jsonl; instruct: also a file "
        "(.jsonl, .json, .csv, .parquet) or a hub id",
    )
    data_config: str = _key("", "instruct: configuration of a hub data set")
    data_split: str = _key("train", "instruct: split of a hub data set")
    shuffle_seed: int = _key(-1, "instruct: shuffle the rows with this seed before share is taken; -1 = as they come")
    share: float = _key(1.0, "instruct: the part of the rows that is used, from the front")
    held_out_share: float = _key(0.05, "instruct: part split off for validation and test loss where none is given")
    held_out_seed: int = _key(42, "instruct: seed of that split")
    max_length: int = _key(512, "instruct: tokens of prompt and answer; what is longer is cut")
    padding: str = _key("longest", "instruct: longest (of the batch) or max_length")
    append_eos: bool = _key(False, "instruct: end each answer with the tokenizer's end token")
    loss_rows: int = _key(200, "instruct: rows of each held-out split whose loss is taken; 0 = all")
    benchmarks: list[str] = field(
        default_factory=list, metadata={"help": "instruct: scored after training: gsm8k, mmlu, mbpp, mbpp_plus"}
    )
    eval_data: str = _key("", "instruct: a file for the benchmarks; empty = the shipped slice or the hub")
    eval_batch_size: int = _key(8, "instruct: prompts decoded together")
    max_new_tokens: int = _key(0, "instruct: tokens generated at most; 0 = the published setting of the benchmark")
    evaluate_base: bool = _key(True, "instruct: score the model before training too")
    block_size: int = _key(128, "text: tokens per training block")
    vocab_size: int = _key(2048, "text: size of the tokenizer that is trained on the training text")
    max_rows: int = _key(0, "text: use at most this many rows of each split; 0 = all")
    max_operand: int = _key(99, "addition: operands are drawn from 0 to this number")
    eval_rows: int = _key(
        500,
        "addition: rows of each held-out split that are scored; text: blocks; instruct: benchmark rows; 0 = all",
    )


@dataclass
class ModelBlock:
    """A pretrained model by name, or a Llama trained from random weights."""

    name: str = _key("", "instruct: a folder or hub id of a causal language model; empty = a Llama of the sizes below")
    trust_tokenizer_code: bool = _key(False, "run the tokenizer code that comes with the model (Moonlight needs it)")
    gradient_checkpointing: bool = _key(False, "recompute activations in backward")
    lora_rank: int = _key(
        0, "train LoRA adapters of this rank (alpha = 2 x rank) on all linear layers; 0 = all weights"
    )
    hidden_size: int = _key(128, "width")
    intermediate_size: int = _key(384, "width of the MLP")
    num_hidden_layers: int = _key(3, "decoder layers")
    num_attention_heads: int = _key(4, "attention heads")
    num_key_value_heads: int = _key(4, "key-value heads")
    tie_word_embeddings: bool = _key(False, "share the embedding with the output head")


@dataclass
class TrainingBlock:
    """What goes to TrainingArguments: the same for both optimizers."""

    steps: int = _key(100, "optimizer steps of each run")
    epochs: int = _key(0, "instruct: passes over the data; overrides steps; 0 = use steps")
    batch_size: int = _key(8, "rows or blocks per device and micro-batch")
    gradient_accumulation: int = _key(1, "micro-batches per optimizer step")
    warmup_steps: int = _key(10, "linear warm-up")
    scheduler: str = _key("linear", "linear, cosine, constant, constant_with_warmup, polynomial, inverse_sqrt")
    weight_decay: float = _key(0.0, "decoupled weight decay of both optimizers")
    max_grad_norm: float = _key(1.0, "clipping threshold on the raw gradients; 0 = off")
    eval_points: int = _key(4, "how often the held-out loss is taken, the end included")
    precision: str = _key("float32", "float32 or bfloat16 autocast")
    device: str = _key("auto", "auto (a GPU when there is one) or cpu")
    threads: int = _key(0, "CPU threads; 0 = torch's choice")
    keep_checkpoints: str = _key("best", "none, best (the chosen learning rates) or all")
    save_steps: int = _key(0, "steps between checkpoints from which a killed run continues; 0 = only at the end")
    launch: str = _key("none", "none, or an Accelerate file (its path or a name from recipes/accelerate)")
    num_processes: int = _key(0, "processes of a launched run; 0 = what the Accelerate file says")


@dataclass
class SearchBlock:
    """The grid: as many learning rates for one optimizer as for the other, and the seeds."""

    muon: list[float] = field(default_factory=lambda: [3e-3], metadata={"help": "learning rates of the Muon runs"})
    adamw: list[float] = field(default_factory=lambda: [1e-3], metadata={"help": "learning rates of the AdamW runs"})
    seeds: list[int] = field(
        default_factory=lambda: [0], metadata={"help": "seeds; the first one runs the whole grid"}
    )
    extra_seeds_for: str = _key("best", "best: later seeds repeat each optimizer's best rate; all: the whole grid")
    metric: str = _key("loss", "what chooses the best rate on the validation split: loss or exact_match")


@dataclass
class AdamWBlock:
    """AdamW of torch, the baseline."""

    adam_beta1: float = _key(0.9, "first beta")
    adam_beta2: float = _key(0.999, "second beta")
    adam_epsilon: float = _key(1e-8, "epsilon")


@dataclass
class MemoryBlock:
    """What the peak memory is predicted for; used by the memory recipe."""

    model: str = _key(
        "", "built-in name, folder, hub id, or `recipe` for the Llama of the model block; empty = no prediction"
    )
    world_size: int = _key(8, "ranks")
    micro_batch: int = _key(4, "sequences per rank and micro-batch")
    seq_len: int = _key(2048, "tokens per sequence")


@dataclass
class Recipe:
    """A resolved recipe: what `config.yaml` of a run holds."""

    name: str = _key("", "name of the recipe")
    title: str = _key("", "one line: what it shows")
    reproduces: str = _key("", "what it reproduces")
    needs: str = _key("", "hardware, downloads")
    time: str = _key("", "how long it takes, and where that was measured")
    shows: list[str] = field(default_factory=list, metadata={"help": "what a result does mean"})
    does_not_show: list[str] = field(default_factory=list, metadata={"help": "what a result does not mean"})
    task: TaskBlock = field(default_factory=TaskBlock)
    model: ModelBlock = field(default_factory=ModelBlock)
    training: TrainingBlock = field(default_factory=TrainingBlock)
    search: SearchBlock = field(default_factory=SearchBlock)
    adamw: AdamWBlock = field(default_factory=AdamWBlock)
    optimizer: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of MuonConfig for the Muon runs"}
    )
    memory: MemoryBlock = field(default_factory=MemoryBlock)
    published: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "the published numbers, shown beside the measured ones"}
    )
    variant: str = _key("", "the variant that was applied")
    variants: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "dotted overrides by name; variant=NAME applies one"}
    )
    tiny: dict[str, Any] = field(default_factory=dict, metadata={"help": "dotted overrides that --tiny applies"})

    def to_dict(self) -> dict[str, Any]:
        """Return plain YAML-ready data; `tiny` and `variants` are dropped, they have been applied or not."""
        data = dataclasses.asdict(self)
        data.pop("tiny")
        data.pop("variants")
        return data

    @property
    def num_runs(self) -> int:
        """Return how many training runs the search makes."""
        grid = len(self.search.muon) + len(self.search.adamw)
        extra = grid if self.search.extra_seeds_for == "all" else len(OPTIMIZERS)
        return grid + extra * (len(self.search.seeds) - 1)

    def check(self) -> None:
        """Check every value that the types alone do not.

        Raises:
            UsageError: a value is out of range; the message names the key and the way out.
        """
        self._check_choices()
        for key in ("steps", "batch_size", "gradient_accumulation", "eval_points"):
            _require(getattr(self.training, key) >= 1, f"training.{key}", "be at least 1", getattr(self.training, key))
        for key in (
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "threads",
            "epochs",
            "save_steps",
            "num_processes",
        ):
            value = getattr(self.training, key)
            _require(math.isfinite(value) and value >= 0, f"training.{key}", "be finite and not negative", value)
        self._check_model()
        for key in ("muon", "adamw"):
            rates = getattr(self.search, key)
            usable = bool(rates) and all(math.isfinite(rate) and rate > 0 for rate in rates)
            _require(usable, f"search.{key}", "hold positive learning rates", rates)
        seeds = self.search.seeds
        _require(len(set(seeds)) == len(seeds) > 0, "search.seeds", "hold at least one seed and none twice", seeds)
        _require(all(0 <= seed < 2**32 for seed in seeds), "search.seeds", "lie in 0 to 2**32 - 1", seeds)
        _require(self.training.threads <= 1024, "training.threads", "be at most 1024", self.training.threads)
        self._check_adamw()
        _require(self.task.block_size >= 8, "task.block_size", "be at least 8", self.task.block_size)
        _require(self.task.vocab_size >= 300, "task.vocab_size", "be at least 300", self.task.vocab_size)
        _require(9 <= self.task.max_operand <= 9999, "task.max_operand", "lie in 9 to 9999", self.task.max_operand)
        for key in ("max_rows", "eval_rows"):
            _require(getattr(self.task, key) >= 0, f"task.{key}", "not be negative", getattr(self.task, key))
        self._check_optimizer()
        if self.task.kind == "instruct":
            self._check_instruct()
        else:
            self._check_from_scratch()

    def _check_model(self) -> None:
        for key, value in dataclasses.asdict(self.model).items():
            least = 0 if key == "lora_rank" else 1
            _require(isinstance(value, (bool, str)) or value >= least, f"model.{key}", f"be at least {least}", value)
        model = self.model
        _require(
            model.name != "" or model.lora_rank == 0,
            "model.lora_rank",
            "be 0 without model.name: adapters change a pretrained model",
            model.lora_rank,
        )
        _require(
            model.hidden_size % (2 * model.num_attention_heads) == 0,
            "model.hidden_size",
            f"be a multiple of 2 x num_attention_heads = {2 * model.num_attention_heads}",
            model.hidden_size,
        )
        _require(
            model.num_attention_heads % model.num_key_value_heads == 0,
            "model.num_key_value_heads",
            f"divide num_attention_heads = {model.num_attention_heads}",
            model.num_key_value_heads,
        )

    def _check_choices(self) -> None:
        metrics = ("loss", "exact_match") if self.task.kind == "addition" else ("loss",)
        for key, value, allowed in (
            ("task.kind", self.task.kind, ("text", "addition", "instruct")),
            ("task.padding", self.task.padding, ("longest", "max_length")),
            *(("task.benchmarks", name, BENCHMARKS) for name in self.task.benchmarks),
            ("training.precision", self.training.precision, ("float32", "bfloat16")),
            ("training.scheduler", self.training.scheduler, SCHEDULERS),
            ("training.device", self.training.device, ("auto", "cpu")),
            ("training.keep_checkpoints", self.training.keep_checkpoints, ("none", "best", "all")),
            ("search.extra_seeds_for", self.search.extra_seeds_for, ("best", "all")),
            ("search.metric", self.search.metric, metrics),
        ):
            if value not in allowed:
                raise UsageError(f"{key} must be one of {', '.join(allowed)}; got {value!r}.{nearest(value, allowed)}")

    def _check_instruct(self) -> None:
        task = self.task
        _require(task.max_length >= 16, "task.max_length", "be at least 16", task.max_length)
        _require(task.eval_batch_size >= 1, "task.eval_batch_size", "be at least 1", task.eval_batch_size)
        _require(0 < task.share <= 1, "task.share", "lie in (0, 1]", task.share)
        _require(0 < task.held_out_share < 1, "task.held_out_share", "lie in (0, 1)", task.held_out_share)
        _require(task.shuffle_seed >= -1, "task.shuffle_seed", "be -1 or a seed", task.shuffle_seed)
        for key in ("held_out_seed", "loss_rows", "max_new_tokens"):
            _require(getattr(task, key) >= 0, f"task.{key}", "not be negative", getattr(task, key))
        for key in ("world_size", "micro_batch", "seq_len"):
            _require(getattr(self.memory, key) >= 1, f"memory.{key}", "be at least 1", getattr(self.memory, key))

    def _check_from_scratch(self) -> None:
        """Refuse what only task.kind: instruct reads, so that it is not silently without effect."""
        for key, value, unused in (
            ("model.name", self.model.name, ""),
            ("training.launch", self.training.launch, "none"),
            ("training.epochs", self.training.epochs, 0),
            ("task.benchmarks", self.task.benchmarks, []),
            ("memory.model", self.memory.model, ""),
        ):
            _require(value == unused, key, "stay out of a recipe whose task.kind is not instruct", value)

    def _check_adamw(self) -> None:
        for key in ("adam_beta1", "adam_beta2"):
            value = getattr(self.adamw, key)
            _require(0 <= value < 1, f"adamw.{key}", "lie in [0, 1)", value)
        epsilon = self.adamw.adam_epsilon
        _require(math.isfinite(epsilon) and epsilon >= 0, "adamw.adam_epsilon", "be finite and not negative", epsilon)

    def _check_optimizer(self) -> None:
        for key in ("lr", "muon_lr"):
            if self.optimizer.get(key) is not None:
                raise UsageError(
                    f"optimizer.{key} must stay out of a recipe; got {self.optimizer[key]!r}. "
                    "Set the learning rates of the grid: search.muon=[3e-3]."
                )
        try:
            config = MuonConfig(**coerce_options(self.optimizer))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UsageError(f"optimizer: {error}") from None
        for pattern in (*config.include, *config.exclude):
            # Trainer's own parser of optim_args splits at these before this package sees the text.
            _require(
                not set(",= ") & set(pattern), "optimizer.include and exclude", "hold no comma, = or space", pattern
            )


def _require(holds: bool, key: str, constraint: str, value: Any) -> None:
    if not holds:
        raise UsageError(f"{key} must {constraint}; got {value!r}.")
