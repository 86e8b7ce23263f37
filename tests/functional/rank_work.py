"""What the ranks of a test do: build a policy's model in a parallel layout, train it, and show what came out."""

import gc
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import deep_ep_by_gloo
import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from models import VOCABULARY_SIZE, count_step, make_batch, make_policy, write_model
from numpy.typing import NDArray

from nemo_rl_offload.adapters.megatron_core.installation import make_backend
from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.batching.batch import NO_ROUTE, ROUTED_EXPERTS, shard
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.batching.sharding import ShardedBatch
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import CheckpointError
from nemo_rl_offload.generation import weight_sync
from nemo_rl_offload.generation.megatron_sampling import generate
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.weight_sync import WeightBucket, WeightExport, WeightLoader, cut_into_buckets
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.lora import adapters_off
from nemo_rl_offload.megatron.build.model import (
    MegatronModel,
    build_model,
    export_adapter,
    export_hf,
    init_process_groups,
)
from nemo_rl_offload.megatron.build.offload import install_offloading, make_arena
from nemo_rl_offload.megatron.build.vocabulary import exported_weights
from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint
from nemo_rl_offload.megatron.layers.quantization import named_linears
from nemo_rl_offload.megatron.layers.router_replay import routers_of
from nemo_rl_offload.megatron.step.fused_head import FusedHeadFactory
from nemo_rl_offload.megatron.step.head_factory import make_heads
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs, compute_topk_logits
from nemo_rl_offload.megatron.step.microbatches import split_into_microbatches
from nemo_rl_offload.megatron.step.router_replay import places_of_layers
from nemo_rl_offload.megatron.step.train_step import accumulate_gradients, evaluate, train_step
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.waiting_weights import WaitingWeights
from nemo_rl_offload.paged_stash.kernels import Pool
from nemo_rl_offload.policy import microbatches as token_microbatches
from nemo_rl_offload.policy.microbatches import shard_for_ranks
from nemo_rl_offload.policy.residency.kept_weights import keep_weights, lasting_tensors
from nemo_rl_offload.policy.residency.megatron_optimizer import keep_on_host
from nemo_rl_offload.runs.manifest import Manifest
from nemo_rl_offload.specs.lora import is_adapter

Arrays = dict[str, NDArray[np.float32]]
MICRO_BATCH_SIZE = 2
GREEDY = Sampling(6, top_k=1)


class Outcome(NamedTuple):
    """What a short training run leaves on one rank."""

    metrics: list[dict[str, float]]
    digests: list[str]
    """Of this rank's gradients after each step and its weights at the end, bit for bit."""
    gradients: Arrays
    """Of the last step, by the names of the model's folder; on rank 0."""
    weights: Arrays
    logprobs: NDArray[np.float32] | None
    """Of the last batch, or of its shard where ranks do not share it; on the last pipeline stage."""
    bytes_out: dict[str, int]
    host_bytes: int
    stash: dict[str, Any] | None
    """Counts of steps that ran again, and sizes."""


def write(family: str, folder: Path, **shape: Any) -> Path:
    """Write a family's model, of enough layers for two parts on each of two pipeline ranks."""
    return write_model(family, folder, **{"num_hidden_layers": 4} | shape)


def train(
    folder: Path,
    overrides: tuple[str, ...],
    steps: tuple[tuple[int, int], ...],
    full_at: tuple[tuple[int, int], ...] = (),
    *,
    packs_rows: bool = False,
    replays: bool | Literal["own"] = False,
) -> Outcome:
    """Train on batches given by (number for the generator and the lengths, number of samples over all ranks).

    `full_at`: ranks and numbers of steps whose paged stash has no page. `packs_rows`: the rows of each microbatch of a
    fixed number of samples are a pack. `replays`: routers take experts that were drawn for most of the tokens, or those
    that they choose themselves.
    """
    overrides = (*overrides, ".router_replay.enabled=true") if replays else overrides
    model, engine = _build(folder, overrides)
    policy = make_policy(*overrides)
    heads = make_heads(policy, model)
    metrics, digests = [], []
    for index, (number, num_samples) in enumerate(steps):
        if (torch.distributed.get_rank(), index) in full_at:
            _empty_stash(model)
        batch = make_batch(number, num_samples)
        if replays:
            routes = own_routes(model, batch) if replays == "own" else drawn_routes(batch, model.config)
            batch |= {ROUTED_EXPERTS: routes}
        sharded = _divide(batch, policy)
        mine, microbatches = _share(sharded)
        if packs_rows:
            microbatches = _pack_rows(mine["input_lengths"].tolist(), policy)
        metrics.append(train_step(model, mine, build_loss("nll", {}), normalizers(batch), microbatches, heads))
        digests.append(_digest([weight.main_grad for weight in _parameters(model) if weight.requires_grad]))
    digests.append(_digest([weight.detach() for weight in _parameters(model)]))
    logprobs = compute_logprobs(model, mine, microbatches, heads)
    if logprobs is not None:
        logprobs *= torch.arange(logprobs.shape[1]) < mine["input_lengths"][:, None]
        logprobs = sharded.gather([logprobs]) if len(sharded.shards) == 1 else logprobs
    stats = None if engine is None else engine.stats()
    outcome = Outcome(
        metrics,
        digests,
        _exported(model, gradients=True),
        _exported(model, gradients=False),
        None if logprobs is None else logprobs.numpy(),
        {} if stats is None else {name: each.bytes_out for name, each in stats.per_module.items() if each.num_groups},
        0 if stats is None else stats.host_bytes,
        None if model.guard is None else model.guard.stats(),
    )
    if engine is not None:
        use_engine(None)
        engine.close()
    return outcome


def drawn_routes(batch: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    """Random experts of each layer that has some, for all tokens but each row's last and some others."""
    random = torch.Generator().manual_seed(len(batch["input_lengths"]))
    num_layers = len(places_of_layers(config))
    scores = torch.rand(*batch["input_ids"].shape, num_layers, config.num_moe_experts, generator=random)
    routes = scores.topk(config.moe_router_topk).indices.to(torch.int8)
    has_routes = torch.arange(routes.shape[1]) < batch["input_lengths"][:, None] - 1
    has_routes &= torch.rand(has_routes.shape, generator=random) < 0.9
    return routes.masked_fill(~has_routes[..., None, None], NO_ROUTE)


def own_routes(model: MegatronModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the routers of a model on one rank choose by themselves, with all tokens in one microbatch."""
    found: list[torch.Tensor] = []
    routers = [router for module in model.modules for router in routers_of(module)]
    hooks = [
        router.register_forward_hook(lambda *made: found.append(made[-1][1].nonzero()[:, 1])) for router in routers
    ]
    compute_logprobs(model, batch, len(batch["input_ids"]), make_heads(make_policy(), model))
    for hook in hooks:
        hook.remove()
    num_rows, width = batch["input_ids"].shape
    assert len(found) == len(routers)
    routes_SBK = [each.view(width, num_rows, model.config.moe_router_topk) for each in found]
    return torch.stack(routes_SBK, 2).transpose(0, 1).to(torch.int8)


def routes_of(folder: Path, overrides: tuple[str, ...], step: tuple[int, int]) -> tuple[NDArray[np.int8], int]:
    """The experts that `train` draws for a batch, and how many there are."""
    config = _build(folder, overrides)[0].config
    return drawn_routes(make_batch(*step), config).numpy(), config.num_moe_experts


class Learned(NamedTuple):
    """What a loss says of a batch, and what it would change."""

    evaluated: dict[str, float]
    metrics: dict[str, float]
    gradients: Arrays


LOSSES: dict[str, dict[str, Any]] = {
    "clipped_pg": load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["loss_fn"]
    | {"reference_policy_kl_penalty": 0.1, "entropy_coeff": 0.05, "sequence_level_importance_ratios": True},
    "dpo": {
        "label_smoothing": 0.1,
        "reference_policy_kl_penalty": 0.1,
        "preference_loss_weight": 1.0,
        "preference_average_log_probs": False,
        "sft_loss_weight": 0.2,
        "sft_average_log_probs": False,
    },
    "distillation": {"kl_type": "mixed", "mixed_kl_weight": 0.4, "zero_outside_topk": True},
}
NUM_TOP = 5


def train_by_flex(folder: Path, overrides: tuple[str, ...], steps: tuple[tuple[int, int], ...]) -> Outcome:
    """The same with Megatron's flex dispatcher, and gloo in DeepEP's place."""
    with pytest.MonkeyPatch.context() as patch:
        deep_ep_by_gloo.install(patch)
        return train(folder, (*overrides, "moe_token_dispatcher_type=flex"), steps)


def learn(folder: Path, overrides: tuple[str, ...]) -> tuple[dict[str, Learned], list[NDArray[Any]] | None]:
    """What each loss makes of a batch, whose teacher is the model itself; and the teacher's logits and their tokens."""
    model, _ = _build(folder, overrides)
    policy = make_policy(*overrides)
    heads = make_heads(policy, model)
    batch = make_batch(0, 8)
    random = torch.Generator().manual_seed(1)
    for key in ("prev_logprobs", "reference_policy_logprobs", "advantages"):
        batch[key] = torch.rand(batch["input_ids"].shape, generator=random) * (1 if key == "advantages" else -6)
    batch["teacher_topk_logits"] = torch.rand(*batch["input_ids"].shape, NUM_TOP, generator=random)
    batch["teacher_topk_indices"] = torch.rand(*batch["input_ids"].shape, VOCABULARY_SIZE, generator=random).topk(
        NUM_TOP
    )[1]
    outcomes = {}
    for name, settings in LOSSES.items():
        loss, norm = build_loss(name, settings), normalizers(batch)
        (piece, split), *_ = shard_for_ranks(batch, policy, 1, "train", loss.rows_per_sample).with_splits()
        how = MICRO_BATCH_SIZE if split is None else split
        evaluated = evaluate(model, piece, loss, norm, how, heads)
        outputs = accumulate_gradients(model, split_into_microbatches(piece, how, model.config), loss, norm, heads)
        metrics = {key: float(sum(output[key] for output in outputs)) for key in (outputs[0] if outputs else ())}
        outcomes[name] = Learned(evaluated, metrics, _exported(model, gradients=True))
    sharded = shard_for_ranks(batch, policy, 1, "logprob")
    (piece, split), *_ = sharded.with_splits()
    top = compute_topk_logits(model, piece, split or MICRO_BATCH_SIZE, heads, NUM_TOP, VOCABULARY_SIZE)
    if top is None:
        return outcomes, None
    is_real = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    return outcomes, [(sharded.gather([each]) * is_real[..., None]).numpy() for each in top]


def _empty_stash(model: MegatronModel) -> None:
    assert model.guard is not None
    assert model.guard.stash is not None
    pools = model.guard.stash.pools
    for width, pool in pools.items():
        pools[width] = Pool(width, pool.page_size, 0, 0, torch.device("cpu"))


def count(folder: Path, overrides: tuple[str, ...], num_microbatches: int, sequence: int) -> dict[str, int]:
    """Take a step on microbatches of full length; the bytes per module that the engine counted."""
    model, engine = _build(folder, overrides)
    return count_step(model, engine, num_microbatches, sequence)


def sample(folder: Path, overrides: tuple[str, ...], prompts: list[list[int]]) -> list[list[int]]:
    """Generate greedily, and train afterwards: sampling leaves the model as it was."""
    model, _ = _build(folder, overrides)
    responses = generate(model.modules, prompts, GREEDY, batch_size=3, end_ids=[VOCABULARY_SIZE - 1], seed=0)
    batch = make_batch(0, 4)
    train_step(model, _shard(batch), build_loss("nll", {}), normalizers(batch), MICRO_BATCH_SIZE, _heads(model))
    return [response.tokens for response in responses]


def sample_trained(folder: Path, overrides: tuple[str, ...], prompts: list[list[int]], out: Path) -> list[Response]:
    """Take steps, write the merged model, and generate greedily."""
    model, _ = _build(folder, overrides)
    _steps(model, (0, 1, 2))
    export_hf(model, folder, out)
    return generate(model.modules, prompts, GREEDY, batch_size=3, end_ids=[VOCABULARY_SIZE - 1], seed=0)


def start_weights(folder: Path, overrides: tuple[str, ...]) -> tuple[Arrays, list[str]]:
    """What a model is built with, and the names of its linears as rules know them, of this rank."""
    model, _ = _build(folder, overrides)
    return _exported(model, gradients=False), [name for name, _ in named_linears(model.modules)]


def write_start(folder: Path, overrides: tuple[str, ...], out: Path) -> Path:
    """Write what a model is built with."""
    model, _ = _build(folder, overrides)
    export_hf(model, folder, out)
    return out


def main_weights(folder: Path, overrides: tuple[str, ...], num_steps: int) -> dict[str, tuple[Arrays, bool]]:
    """After steps with an optimizer that is not distributed: each linear's weight and its main weight by name, and
    whether the main weight has the bits that it had at the start."""
    model, _ = _build(folder, overrides)
    weights = {
        f"{name}.{key}": weight
        for name, linear in named_linears(model.modules)
        for key, weight in linear.named_parameters(recurse=False)
        if key.startswith("weight")
    }
    before = {name: weight.main_param.clone() for name, weight in weights.items()}
    _steps(model, tuple(range(num_steps)))
    return {
        name: (
            {"weight": weight.detach().float().numpy(), "main": weight.main_param.numpy()},
            torch.equal(weight.main_param, before[name]),
        )
        for name, weight in weights.items()
    }


def begin_with_a_checkpoint(
    folder: Path, overrides: tuple[str, ...], more: tuple[str, ...], checkpoint_folder: Path
) -> tuple[Arrays, Arrays]:
    """A plain run's weights after a step, and what a run with more settings begins with where it begins with them."""
    model, _ = _build(folder, overrides)
    _steps(model, (0,))
    plain = _exported(model, gradients=False)
    checkpoint.Save(model, checkpoint_folder, copies=True).finish()
    model, _ = _build(folder, (*overrides, *more))
    checkpoint.load_weights(model, checkpoint_folder)
    return plain, _exported(model, gradients=False)


Weights = dict[str, tuple[str, NDArray[np.uint8]]]
"""Type and bytes of each weight by the names of the model's folder; on rank 0."""


def train_and_hand_over(folder: Path, overrides: tuple[str, ...]) -> tuple[list[WeightBucket], Weights]:
    """Take two steps; the weights in buckets that cut most of them, and as Bridge exports them."""
    model, _ = _build(folder, overrides)
    _steps(model, (0, 1))
    for module in (module for chunk in model.modules for module in chunk.modules()):
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias += torch.arange(len(module.expert_bias))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sync, "cut_into_buckets", lambda weights, _: cut_into_buckets(weights, 1500))
        export = WeightExport(model)
    num_bytes = sum(weight.nbytes for _, weight in _named(model))
    buckets = [export.next_bucket() for _ in range(-(-num_bytes // 1500))]
    assert export.next_bucket() is None
    return [bucket for bucket in buckets if bucket is not None], _bytes(model)


def take_over(folder: Path, overrides: tuple[str, ...], buckets: list[WeightBucket]) -> Weights:
    """Load the buckets, twice, into a model that is never trained, whose own weights are gone."""
    model, _ = _build(folder, overrides, num_steps=None)
    loader = WeightLoader(model)
    for _ in range(2):
        for module in model.modules:
            for weight in module.state_dict(keep_vars=True).values():
                if isinstance(weight, torch.Tensor):
                    weight.data.fill_(torch.nan)
        for bucket in buckets:
            loader.load(bucket)
        loader.finish()
    return _bytes(model)


def pass_of_reference(folder: Path, overrides: tuple[str, ...], rooms: tuple[int, ...]) -> dict[str, bool]:
    """Train, with passes of the start weights in between; whether they say what they said, and leave every bit."""
    model, _ = _build(folder, overrides)
    batch, heads = make_batch(0, 4), _heads(model)

    def logprobs() -> torch.Tensor:
        model.gather_weights()
        found = compute_logprobs(model, batch, MICRO_BATCH_SIZE, heads)
        return torch.zeros(0) if found is None else found

    arena = make_arena(make_policy(*overrides))
    start, waiting = logprobs(), keep_weights(WaitingWeights, arena, model.modules, "reference's")
    is_start, is_kept, has_moved = [], [], []
    for number, room_bytes in enumerate(rooms):
        _steps(model, (number,))
        present = logprobs()
        digest = _digest(lasting_tensors(model.modules))
        with waiting.in_place(room_bytes):
            is_start.append(torch.equal(logprobs(), start))
        is_kept.append(_digest(lasting_tensors(model.modules)) == digest and torch.equal(logprobs(), present))
        has_moved.append(not torch.equal(present, start) or not start.numel())
    arena.close()
    return {"start": all(is_start), "kept": all(is_kept), "trained": all(has_moved)}


def _named(model: MegatronModel) -> Iterator[tuple[str, torch.Tensor]]:
    return exported_weights(model.auto_bridge, model.modules, model.config.vocab_size, cpu=True)


def _bytes(model: MegatronModel) -> Weights:
    exported = {
        name: (str(weight.dtype), weight.detach().contiguous().flatten().view(torch.uint8).numpy().copy())
        for name, weight in _named(model)
    }
    return exported if torch.distributed.get_rank() == 0 else {}


def follow(folder: Path, overrides: tuple[str, ...], out: Path, num_steps: int) -> list[float]:
    """Write the adapters as they begin, train, and write them and the merged model; the losses."""
    model, _ = _build(folder, overrides, num_steps)
    peft = make_policy(*overrides)["megatron_cfg"]["peft"]
    export_adapter(model, peft, str(folder), out / "first")
    losses = [metrics.get("loss", 0.0) for metrics in _steps(model, tuple(range(num_steps)))]
    export_adapter(model, peft, str(folder), out / "last")
    export_hf(model, folder, out / "merged")
    return losses


def count_trained(folder: Path, overrides: tuple[str, ...]) -> tuple[int, int]:
    """Elements of what is trained on this rank, adapters or all weights: those of experts, and others."""
    model, _ = _build(folder, overrides)
    named = [pair for module in model.modules for pair in module.named_parameters() if pair[1].requires_grad]
    of_experts = sum(weight.numel() for name, weight in named if ".experts." in name)
    return of_experts, sum(weight.numel() for _, weight in named) - of_experts


class Scored(NamedTuple):
    """Log-probabilities of a batch on the last pipeline stage."""

    first: Any
    trained: Any
    without: Any
    """Of the trained model with its adapters off."""
    again: Any
    """With the adapters on again."""
    frozen: str
    """Digest of the frozen weights that changed; empty where none did."""


def score(folder: Path, overrides: tuple[str, ...]) -> Scored:
    """Train adapters for two steps, and ask for log-probabilities before and after, with and without them."""
    model, _ = _build(folder, overrides)
    heads, batch = _heads(model), make_batch(7, 4)
    frozen = {name: weight.clone() for module in model.modules for name, weight in module.named_parameters()}
    first = compute_logprobs(model, batch, MICRO_BATCH_SIZE, heads)
    _steps(model, (0, 1))
    trained = compute_logprobs(model, batch, MICRO_BATCH_SIZE, heads)
    with adapters_off(model.modules):
        without = compute_logprobs(model, batch, MICRO_BATCH_SIZE, heads)
    again = compute_logprobs(model, batch, MICRO_BATCH_SIZE, heads)
    named = [pair for module in model.modules for pair in module.named_parameters()]
    assert all(weight.requires_grad == is_adapter(name) for name, weight in named)
    assert all(hasattr(weight, "main_grad") == is_adapter(name) for name, weight in named)
    changed = [name for name, weight in named if not is_adapter(name) and not torch.equal(weight, frozen[name])]
    return Scored(*(None if x is None else x.numpy() for x in (first, trained, without, again)), " ".join(changed))


class Resumed(NamedTuple):
    """What a run leaves on one rank from a checkpoint on."""

    at_checkpoint: Arrays
    """Weights by the names of the model's folder; on rank 0."""
    metrics: list[dict[str, float]]
    weights: Arrays
    digest: str
    """Of this rank's weights in the end, and of random numbers after them, bit for bit."""
    manifest: Manifest


def train_and_save(folder: Path, overrides: tuple[str, ...], checkpoint_folder: Path) -> Resumed:
    """Take two steps, write a checkpoint in the background of one step more, and take another."""
    model, _ = _build(folder, overrides)
    _steps(model, (0, 1))
    at_checkpoint = _exported(model, gradients=False)
    torch.rand(torch.distributed.get_rank() + 1)  # every rank at its own place in its random numbers
    save = checkpoint.Save(model, checkpoint_folder, copies=True)
    metrics = _steps(model, (2,))
    manifest = save.finish()
    return _resumed(model, at_checkpoint, metrics, manifest)


def load_and_train(folder: Path, overrides: tuple[str, ...], checkpoint_folder: Path, manifest: Manifest) -> Resumed:
    """Read the checkpoint in this layout, and take the same two steps from there."""
    model, _ = _build(folder, overrides)
    checkpoint.verify(checkpoint_folder, manifest)
    checkpoint.load(model, checkpoint_folder)
    at_checkpoint = _exported(model, gradients=False)
    return _resumed(model, at_checkpoint, _steps(model, (2,)), manifest)


def why_refused(folder: Path, overrides: tuple[str, ...], checkpoint_folder: Path) -> str:
    """What is said where the checkpoint is not read in this layout."""
    model, _ = _build(folder, overrides)
    with pytest.raises(CheckpointError) as refusal:
        checkpoint.load(model, checkpoint_folder)
    return str(refusal.value)


def _resumed(model: MegatronModel, at_checkpoint: Arrays, metrics: list[dict[str, float]], files: Manifest) -> Resumed:
    metrics += _steps(model, (3,))
    digest = _digest([*(weight.detach() for weight in _parameters(model)), torch.rand(8)])
    return Resumed(at_checkpoint, metrics, _exported(model, gradients=False), digest, files)


def _steps(model: MegatronModel, numbers: tuple[int, ...]) -> list[dict[str, float]]:
    return [
        train_step(model, _shard(batch), build_loss("nll", {}), normalizers(batch), MICRO_BATCH_SIZE, _heads(model))
        for batch in (make_batch(number, 8) for number in numbers)
    ]


def _build(folder: Path, overrides: tuple[str, ...], num_steps: int | None = 10) -> tuple[MegatronModel, Any]:
    torch.set_num_threads(1)
    policy = make_policy(*overrides)
    _leave_groups()
    init_process_groups(policy, seed=1)
    engine = install_offloading(policy)
    model = build_model(policy, folder, num_steps)
    if engine is not None:
        exclude_parameters(engine, model.modules)
    section = policy["megatron_cfg"]["optimizer"]
    if section["optimizer_cpu_offload"] and model.optimizer is not None:
        arena, share = HostArena(make_backend(), 1 << 28), section["optimizer_offload_fraction"]
        streamed = keep_on_host(model.optimizer, arena, share, bucket_bytes=1 << 14)
        assert arena.held_bytes == sum(each.host_bytes for each in streamed) > 0
    return model, engine


def _leave_groups() -> None:
    """Destroy all process groups but the world's. Each has three threads, and Megatron's make dozens a layout, which
    spin when a peer dies."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        gc.collect()
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            if group is not torch.distributed.group.WORLD:
                torch.distributed.destroy_process_group(group)
        del group
        gc.collect()


def _heads(model: MegatronModel) -> FusedHeadFactory:
    return FusedHeadFactory(1.0, model.config.vocab_size)


def _divide(batch: dict[str, torch.Tensor], policy: Any) -> ShardedBatch:
    return shard_for_ranks(batch, policy, parallel_state.get_data_parallel_world_size(), "train")


def _share(sharded: ShardedBatch) -> tuple[dict[str, torch.Tensor], int | MicrobatchSplit]:
    rank = parallel_state.get_data_parallel_rank()
    return sharded.shards[rank], MICRO_BATCH_SIZE if sharded.splits is None else sharded.splits[rank]


def _pack_rows(lengths: list[int], policy: Any) -> MicrobatchSplit:
    """Each two rows a pack, all packs of the width that the largest needs."""
    budget = token_microbatches._budget(policy["sequence_packing"], policy, 1, "train")
    pairs = [lengths[start : start + MICRO_BATCH_SIZE] for start in range(0, len(lengths), MICRO_BATCH_SIZE)]
    width = max(budget.width(budget.packed(pair)) for pair in pairs)
    return MicrobatchSplit((MICRO_BATCH_SIZE,) * len(pairs), (width,) * len(pairs), is_packed=True)


def _shard(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    number = parallel_state.get_data_parallel_world_size()
    return shard(batch, number)[parallel_state.get_data_parallel_rank()]


def _parameters(model: MegatronModel) -> list[Any]:
    return [weight for module in model.modules for weight in module.parameters()]


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _exported(model: MegatronModel, *, gradients: bool) -> Arrays:
    trained = [weight for weight in _parameters(model) if weight.requires_grad]
    own = [weight.data for weight in trained]
    if gradients:
        for weight in trained:
            weight.data = weight.main_grad.to(weight.dtype).clone()
    named = [] if gradients and model.has_adapters else list(_named(model))
    if model.has_adapters:
        named += model.auto_bridge.export_adapter_weights(model.modules, show_progress=False)
    arrays = {name: weight.detach().float().cpu().numpy().copy() for name, weight in named}
    for weight, data in zip(trained, own, strict=True):
        weight.data = data
    return arrays if torch.distributed.get_rank() == 0 else {}


def plain_gpt(changes: dict[str, Any], modules: tuple[str, ...]) -> Any:
    """Train a program of Megatron's own, without and with offloading."""
    import plain_gpt

    _leave_groups()
    outcome = plain_gpt.train(changes, ()), plain_gpt.train(changes, modules)
    _leave_groups()
    return outcome


def plain_gpts_one_after_another(*modules: tuple[str, ...]) -> Any:
    """Outcomes of models of one process."""
    import plain_gpt

    _leave_groups()
    outcome = plain_gpt.train_one_after_another(*modules)
    _leave_groups()
    return outcome


def plain_gpt_strictly(changes: dict[str, Any], modules: tuple[str, ...]) -> Any:
    """The same, where a warning of the engine's is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "offload_modules")
        return plain_gpt(changes, modules)
