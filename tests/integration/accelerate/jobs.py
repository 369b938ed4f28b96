# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the Accelerate tests run: tiny Llamas in raw loops. `run` calls them on pooled workers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_muon
from hf_muon.distributed import find_runtime
from tests.support import cpu_fsdp2
from tests.support.worker_pool import run_on_ranks

VOCABULARY = 131  # divisible by no number of ranks used here
LAYER = "LlamaDecoderLayer"


def run(job, world_size, *args, timeout=90, **kwargs):
    """Call `job` on every rank with Accelerate's singletons and torchrun's variables fresh.

    Starting workers and importing transformers in them is not part of the job's limit: it may take a minute on a busy
    machine, a job takes seconds.
    """
    run_on_ranks(world_size, _import_libraries, timeout=240)
    return run_on_ranks(world_size, _on_rank, job, args, kwargs, timeout=timeout)


def _import_libraries():
    import peft
    from transformers import Trainer

    return peft.__name__, Trainer.__name__


def _on_rank(job, args, kwargs):
    variables = {}
    world_size = torch.distributed.get_world_size()
    if world_size > 1:
        rank = str(torch.distributed.get_rank())
        variables = {"RANK": rank, "LOCAL_RANK": rank}
        variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with cpu_fsdp2.fresh_accelerate(**variables):
        return job(*args, **kwargs)


def tiny_llama(seed=0, tied=False, layers=2):
    """A Llama of odd sizes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=60,
        intermediate_size=77,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def batches(seed, steps, rows, world_size=1, rank=0):
    """`steps` batches of `rows` rows; the ranks share them evenly."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (rows, 12), generator=generator)
        result.append(tokens.chunk(world_size)[rank])
    return result


def muon(model, **options):
    """The optimizer of these tests: float32 Newton-Schulz, visible steps."""
    hf_muon.tag_parameters(model)
    options = {"lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "float32", **options}
    return hf_muon.MuonWithAuxAdam(model.named_parameters(), **options)


def fsdp_accelerator(mode="z3", state_dict_type="FULL_STATE_DICT", mixed_precision="no", ram_efficient=False, **more):
    """An Accelerator with `DMuonPlugin` on CPU ranks."""
    from accelerate import Accelerator

    cpu_fsdp2.enable()
    plugin = hf_muon.DMuonPlugin(
        reshard_after_forward=mode == "z3",
        state_dict_type=state_dict_type,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        cpu_ram_efficient_loading=ram_efficient,
        activation_checkpointing=more.pop("activation_checkpointing", False),
        dmuon=more.pop("dmuon", "auto"),
        rates=more.pop("rates", None),
    )
    if replicas := more.pop("replicas", None):
        from accelerate.parallelism_config import ParallelismConfig

        world_size = torch.distributed.get_world_size()
        more["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=replicas, dp_shard_size=world_size // replicas
        )
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=mixed_precision, **more)


def train(accelerator, model, optimizer, data, clip=1.0):
    """Train over `data`; return losses (averaged over ranks) and clipping norms."""
    losses, norms = [], []
    for tokens in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    return losses, norms


def whole_state(accelerator, model):
    """The weights as Accelerate gathers them; empty on other ranks than 0."""
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def one_process(steps=6, rows=8, seed=1, **options):
    """The reference: plain torch, one process."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, muon(model, **options))
    losses, norms = train(accelerator, model, optimizer, batches(seed, steps, rows))
    return losses, norms, whole_state(accelerator, model)


def dedicated(mode="z3", steps=6, rows=8, seed=1, **settings):
    """The same training with owners."""
    accelerator = fsdp_accelerator(mode, **settings)
    model = tiny_llama(seed=0 if accelerator.is_main_process or not settings.get("ram_efficient") else 9)
    model, optimizer = accelerator.prepare(model, muon(model))
    data = batches(seed, steps, rows, accelerator.num_processes, accelerator.process_index)
    losses, norms = train(accelerator, model, optimizer, data)
    return losses, norms, whole_state(accelerator, model)


def _prepared(mode, model_seed=0, **settings):
    accelerator = fsdp_accelerator(mode, **settings)
    model = tiny_llama(seed=model_seed)
    return accelerator, *accelerator.prepare(model, muon(model))


def save_in_the_middle(folder, mode="z3", evaluate=False, **settings):
    """Train 3 steps, save, train 3 more; return the later losses and the final weights."""
    accelerator, model, optimizer = _prepared(mode, **settings)
    data = batches(1, 6, 8, accelerator.num_processes, accelerator.process_index)
    train(accelerator, model, optimizer, data[:3])
    if evaluate:
        model.eval()
        with torch.no_grad():
            model(input_ids=data[0])
        model.train()
    accelerator.save_state(folder)
    losses, _ = train(accelerator, model, optimizer, data[3:])
    return losses, whole_state(accelerator, model)


def resume(folder, mode="z3", corrupt=True, **settings):
    """Start from other weights (and deliberately wrong optimizer state), load, train the last 3 steps."""
    accelerator, model, optimizer = _prepared(mode, model_seed=5, **settings)
    if corrupt:
        for state in optimizer.state.values():
            for value in state.values():
                value.fill_(7.0)
    accelerator.load_state(folder)
    data = batches(1, 6, 8, accelerator.num_processes, accelerator.process_index)
    losses, _ = train(accelerator, model, optimizer, data[3:])
    return losses, whole_state(accelerator, model)


def resume_in_one_process(folder):
    """The same without FSDP, through `load_whole_model` and `load_whole_optimizer`."""
    from accelerate import Accelerator

    from hf_muon.checkpoint import load_whole_model, load_whole_optimizer, read_model, read_optimizer

    accelerator = Accelerator(cpu=True)
    model = tiny_llama(seed=5)
    model, optimizer = accelerator.prepare(model, muon(model))
    load_whole_model(model, read_model(folder))
    load_whole_optimizer(optimizer.optimizer, read_optimizer(folder))
    losses, _ = train(accelerator, model, optimizer, batches(1, 6, 8)[3:])
    return losses, whole_state(accelerator, model)


def accumulated(mode, micro_batches, seed=1, steps=3):
    """`steps` optimizer steps of 16 rows in `micro_batches` pieces, through `accelerator.accumulate`."""
    accelerator = fsdp_accelerator(mode, gradient_accumulation_steps=micro_batches)
    model, optimizer = accelerator.prepare(*_model_and_muon())
    data = batches(seed, steps, 16, accelerator.num_processes, accelerator.process_index)
    pieces = [piece for tokens in data for piece in tokens.chunk(micro_batches)]
    hf_muon.comm_stats(model, reset=True)
    _, norms = train(accelerator, model, optimizer, pieces)
    return norms, hf_muon.comm_stats(model), whole_state(accelerator, model)


def _model_and_muon(**options):
    model = tiny_llama()
    return model, muon(model, **options)


def public_state(folder):
    """Look at every door: types, shapes and finiteness, and a saved model read back."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.tensor import DTensor, Shard

    from hf_muon.distributed import OwnedDTensor

    accelerator, model, optimizer = _prepared("z3")
    data = batches(1, 2, 8, accelerator.num_processes, accelerator.process_index)
    train(accelerator, model, optimizer, data)
    owned = sum(isinstance(parameter, OwnedDTensor) for parameter in model.parameters())
    optimizer_state = get_optimizer_state_dict(model, optimizer)["state"]
    tensors = {**model.state_dict(), **{f"{n}.{k}": v for n, s in optimizer_state.items() for k, v in s.items()}}
    for name, tensor in tensors.items():
        assert type(tensor) is DTensor or tensor.ndim == 0, name
        assert tensor.ndim == 0 or tuple(tensor.placements) == (Shard(0),), name
        assert bool(torch.isfinite(tensor.full_tensor() if tensor.ndim else tensor).all()), name
    whole = whole_state(accelerator, model)
    accelerator.save_model(model, folder)
    if accelerator.is_main_process:
        saved = load_file(f"{folder}/model.safetensors")
        assert all(torch.equal(saved[name], whole[name]) for name in saved)
        assert {name: value.shape for name, value in whole.items()} == {
            name: value.shape for name, value in tiny_llama().state_dict().items()
        }
    return owned, len(tensors)


def message_of_load(folder, **settings):
    """What `load_state` says on this rank, and whether the weights are untouched."""
    accelerator, model, _ = _prepared("z3", **settings)
    before = whole_state(accelerator, model)
    try:
        accelerator.load_state(folder)
    except ValueError as error:
        after = whole_state(accelerator, model)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return None, None


def message_of_prepare(**settings):
    """What `prepare` raises for these settings."""
    accelerator = fsdp_accelerator(**{key: value for key, value in settings.items() if key != "optimizer"})
    model = tiny_llama()
    try:
        accelerator.prepare(model, muon(model, **settings.get("optimizer", {})))
    except (NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}", len(list(model.parameters()))
    return None, None


def costs_of_owners(rates_of_plugin, rates_of_optimizer):
    """The costs that the owner plan of a prepared model was made from."""
    accelerator = fsdp_accelerator(rates=rates_of_plugin)
    model = tiny_llama()
    model, _ = accelerator.prepare(model, muon(model, rates=rates_of_optimizer))
    return [(matrix.shape, matrix.cost) for matrix in hf_muon.ownership(model).matrices]


def offloaded_message():
    """What `prepare` raises when the plugin offloads parameters."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    accelerator = fsdp_accelerator()
    accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy()
    model = tiny_llama()
    try:
        accelerator.prepare(model, muon(model))
    except NotImplementedError as error:
        return str(error)


def sharded_before_message():
    """What `prepare` raises for a model that holds DTensors already."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    accelerator = fsdp_accelerator()
    model = tiny_llama()
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    optimizer = muon(model)
    norm = model.model.norm
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Shard(0)]))
    try:
        accelerator.prepare(model, optimizer)
    except NotImplementedError as error:
        return str(error)


def mixed(mode="z3"):
    """Train in bf16 from a model that was loaded in bf16."""
    accelerator = fsdp_accelerator(mode, mixed_precision="bf16")
    model = tiny_llama().to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, muon(model))
    data = batches(1, 4, 8, accelerator.num_processes, accelerator.process_index)
    losses, norms = train(accelerator, model, optimizer, data)
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    runtime = find_runtime(model)
    gathered = {str(unit.param_dtype) for unit in runtime.units if unit.matrices}
    return losses, norms, dtypes, gathered
