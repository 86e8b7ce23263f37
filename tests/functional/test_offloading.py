"""Activation offloading inside Megatron's layers changes no bit, moves what it says, and leaves nothing behind."""

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch, make_policy, offload, same_tensors, take_step, weights_of
from torch import Tensor

from nemo_rl_offload.megatron.generation import generate
from nemo_rl_offload.megatron.model import MegatronModel, build_model
from nemo_rl_offload.megatron.offload_interface import exclude_parameters, use_engine
from nemo_rl_offload.megatron.offload_setup import install_offloading
from nemo_rl_offload.megatron.train_step import compute_logprobs
from nemo_rl_offload.offload import OffloadEngine, OffloadStats
from nemo_rl_offload.planner.modules import DENSE_MLP_MODULES, MOE_MODULES, SUPPORTED_MODULES

pytestmark = pytest.mark.usefixtures("megatron_process_group")

NUM_STEPS = 3
MODULES = {
    "qwen2": tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES),
    "qwen3_moe": tuple(name for name in SUPPORTED_MODULES if name not in DENSE_MLP_MODULES),
}
# Megatron lets attn_proj be offloaded only beside core_attn.
SINGLE = [
    (family, ("core_attn", "attn_proj") if name == "attn_proj" else (name,))
    for family, modules in MODULES.items()
    for name in modules
]
ALL = list(MODULES.items())
SETTINGS = {
    "distributed_optimizer": ("optimizer.use_distributed_optimizer=true",),
    "sgd": ("optimizer.optimizer=sgd",),
    "bfloat16": (".precision=bfloat16",),
    "allgather": ("moe_token_dispatcher_type=allgather",),
    "recompute_full": ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"),
    "recompute_block": ("recompute_granularity=full", "recompute_method=block", "recompute_num_layers=1"),
    "recompute_core_attn": ("recompute_granularity=selective", "recompute_modules=[core_attn]"),
    "recompute_layernorm": ("recompute_granularity=selective", "recompute_modules=[layernorm]"),
    "recompute_moe_act": ("recompute_granularity=selective", "recompute_modules=[moe_act]"),
    "recompute_mlp": ("recompute_granularity=selective", "recompute_modules=[mlp]"),
}
ONLY_WITH_EXPERTS = ("allgather", "recompute_moe_act")
COMPILED = ("recompute_layernorm", "recompute_moe_act")


@dataclass
class Outcome:
    """What a short training run leaves."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    stats: OffloadStats


Build = Callable[..., tuple[MegatronModel, OffloadEngine | None]]
Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def build(model_folder: Callable[[str], Path]) -> Iterator[Build]:
    """Build a family's model and the engine of its policy, as a worker does."""
    engines = []

    def make(family: str, *overrides: str) -> tuple[MegatronModel, OffloadEngine | None]:
        policy = make_policy(*overrides)
        engine = install_offloading(policy)
        model = build_model(policy, model_folder(family), num_steps=10)
        if engine is not None:
            exclude_parameters(engine, model.modules)
            engines.append(engine)
        return model, engine

    yield make
    use_engine(None)
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def train(build: Build) -> Train:
    """A few steps of several microbatches, lengths changing with the step; each combination runs once."""
    outcomes: dict[tuple[str, ...], Outcome] = {}

    def run(family: str, *overrides: str) -> Outcome:
        if (family, *overrides) not in outcomes:
            model, engine = build(family, *overrides)
            metrics = [take_step(model, step) for step in range(NUM_STEPS)]
            stats = engine.stats() if engine is not None else OffloadStats()
            outcomes[family, *overrides] = Outcome(metrics, weights_of(model), stats)
        return outcomes[family, *overrides]

    return run


def assert_same_training(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.metrics == reference.metrics
    assert same_tensors(outcome.weights, reference.weights)
    assert all(metrics["grad_norm"] > 0 for metrics in reference.metrics)
    assert outcome.stats.host_bytes == 0


@pytest.mark.parametrize(("family", "modules"), [*SINGLE, *ALL])
def test_offloading_changes_no_bit(family: str, modules: tuple[str, ...], train: Train) -> None:
    outcome = train(family, *offload(modules))
    assert_same_training(outcome, train(family))
    stats = outcome.stats
    assert stats.per_module.keys() == set(modules)
    for name in modules:
        assert stats.per_module[name].bytes_out == stats.per_module[name].bytes_in > 0, name
    assert stats.denied_bytes == 0


@pytest.mark.parametrize(("family", "modules"), ALL)
@pytest.mark.parametrize("setting", SETTINGS)
def test_offloading_changes_no_bit_beside(setting: str, family: str, modules: tuple[str, ...], train: Train) -> None:
    if setting in ONLY_WITH_EXPERTS and family == "qwen2":
        pytest.skip("a setting of experts")
    if setting in COMPILED and family == "qwen3_moe" and not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("Megatron builds a C++ extension for it")
    outcome = train(family, *SETTINGS[setting], *offload(modules))
    assert_same_training(outcome, train(family, *SETTINGS[setting]))
    assert outcome.stats.bytes_out == outcome.stats.bytes_in > 0


@pytest.mark.parametrize(("family", "modules"), ALL)
def test_too_little_host_memory_keeps_the_rest_on_the_device(
    family: str, modules: tuple[str, ...], train: Train
) -> None:
    little = "activation_offload.host_memory_budget=64KiB"
    outcome = train(family, *offload(modules), little)
    assert_same_training(outcome, train(family))
    assert outcome.stats.denied_bytes > 0
    assert 0 < outcome.stats.peak_host_bytes <= outcome.stats.host_capacity_bytes <= 64 << 10


def test_small_tensors_stay(train: Train) -> None:
    outcome = train("qwen2", *offload(MODULES["qwen2"]), "min_offloaded_tensor_size=1500")
    assert_same_training(outcome, train("qwen2"))
    assert 0 < outcome.stats.bytes_out < train("qwen2", *offload(MODULES["qwen2"])).stats.bytes_out


def forward(model: MegatronModel) -> Tensor:
    ids = make_batch(0)["input_ids"]
    chunk: Any = model.chunks[0]
    loss: Tensor = chunk.train()(ids, torch.arange(ids.shape[1]).expand_as(ids), None).sum()
    return loss


@pytest.mark.parametrize(("family", "modules"), ALL)
def test_a_dropped_or_failed_forward_leaves_the_arena_empty(
    family: str, modules: tuple[str, ...], build: Build, train: Train
) -> None:
    model, engine = build(family, *offload(modules))
    assert engine is not None
    loss = forward(model)
    assert engine.stats().host_bytes > 0
    del loss
    assert engine.stats().host_bytes == 0

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    held_bytes = []
    before = (
        model.modules[0]
        .decoder.layers[1]
        .register_forward_pre_hook(lambda *_: held_bytes.append(engine.stats().host_bytes))
    )
    hooks = [model.modules[0].decoder.layers[1].mlp.register_forward_hook(fail), before]
    with pytest.raises(RuntimeError, match="planted"):
        take_step(model, 0)
    for hook in hooks:
        hook.remove()
    gc.collect()  # the traceback's frames
    assert held_bytes[0] > 0
    assert engine.stats().host_bytes == 0
    metrics = [take_step(model, step) for step in range(NUM_STEPS)]
    assert metrics == train(family).metrics
    assert same_tensors(weights_of(model), train(family).weights)


@pytest.mark.parametrize(("family", "modules"), ALL)
def test_forward_only_passes_move_nothing(family: str, modules: tuple[str, ...], build: Build, train: Train) -> None:
    model, engine = build(family, *offload(modules))
    assert engine is not None
    greedy = {"backend": "megatron", "max_new_tokens": 3, "temperature": 1.0, "top_k": 1, "top_p": 1.0}

    def pass_forward_only() -> None:
        before = engine.stats().bytes_out
        compute_logprobs(model, make_batch(0), 2, 1.0)
        generate(model.modules[0], [[1, 2], [3]], greedy, batch_size=2, end_id=258, seed=0)  # type: ignore[arg-type]
        assert engine.stats().bytes_out == before

    pass_forward_only()
    metrics = []
    for step in range(NUM_STEPS):
        metrics.append(take_step(model, step))
        pass_forward_only()
    assert metrics == train(family).metrics
    assert engine.stats().bytes_out == train(family, *offload(modules)).stats.bytes_out
