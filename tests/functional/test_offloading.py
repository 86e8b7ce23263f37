"""Activation offloading inside Megatron's layers changes no bit, moves what it says, and leaves nothing behind."""

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from models import make_batch, make_policy, offload, same_tensors, take_step, weights_of
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.generation.megatron_sampling import generate
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.schedule import to_device
from nemo_rl_offload.offload import OffloadEngine, OffloadStats
from nemo_rl_offload.specs.offload_modules import (
    DENSE_MLP_MODULES,
    DISCARDED_BY_RECOMPUTE,
    MOE_MODULES,
    SUPPORTED_MODULES,
)

pytestmark = pytest.mark.usefixtures("any_device_process_group")

NUM_SAMPLES = (2, 17, 8)
"""Of each step: one microbatch, nine with a last one that is not full, four."""
MODULES = {
    "qwen2": tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES),
    "qwen3_moe": tuple(name for name in SUPPORTED_MODULES if name not in (*DENSE_MLP_MODULES, "shared_experts")),
    "deepseek_v3_mtp": SUPPORTED_MODULES,
    "gemma3_text": tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES),
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
    "recompute_mlp_act": ("recompute_granularity=selective", "recompute_modules=[mlp_act]"),
    "recompute_both_activations": ("recompute_granularity=selective", "recompute_modules=[mlp_act,moe_act]"),
    "recompute_mlp_fc1": ("recompute_granularity=selective", "recompute_modules=[mlp_fc1]"),
    "recompute_some_mlps": (
        "recompute_granularity=selective",
        "recompute_modules=[mlp_act,mlp_fc1]",
        "recompute_num_layers=1",
    ),
}
ONLY_WITH_EXPERTS = ("allgather", "recompute_moe_act")
COMPILED = ("recompute_layernorm", "recompute_moe_act", "recompute_both_activations")


@dataclass
class Outcome:
    """What a short training run leaves."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    stats: OffloadStats


def take_steps(model: MegatronModel) -> list[dict[str, float]]:
    return [take_step(model, step, num_samples) for step, num_samples in enumerate(NUM_SAMPLES)]


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
            metrics = take_steps(model)
            stats = engine.stats() if engine is not None else OffloadStats()
            outcomes[family, *overrides] = Outcome(metrics, weights_of(model), stats)
        return outcomes[family, *overrides]

    return run


def offered_bytes(stats: OffloadStats) -> int:
    """Moved, or kept: on a GPU, times decide between the two."""
    return stats.bytes_out + stats.kept_bytes


def assert_same_training(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.metrics == reference.metrics
    assert same_tensors(outcome.weights, reference.weights)
    assert all(metrics["grad_norm"] > 0 for metrics in reference.metrics)
    assert outcome.stats.host_bytes == 0


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("family", "modules"), [*SINGLE, *ALL])
def test_offloading_changes_no_bit(family: str, modules: tuple[str, ...], train: Train) -> None:
    outcome = train(family, *offload(modules))
    assert_same_training(outcome, train(family))
    stats = outcome.stats
    assert stats.per_module.keys() == set(modules)
    assert all(stats.per_module[name].bytes_out > 0 for name in modules)
    assert stats.bytes_out == stats.bytes_in + stats.returned_bytes
    assert stats.denied_bytes == 0


def beside() -> Iterator[Any]:
    """One family by default, without a compiler."""
    for setting in SETTINGS:
        for family, modules in ALL:
            is_slow = family != "qwen2" or setting in COMPILED
            yield pytest.param(
                setting,
                family,
                modules,
                marks=(pytest.mark.slow, pytest.mark.sampled) if is_slow else (),
                id=f"{setting}-{family}",
            )


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("setting", "family", "modules"), list(beside()))
def test_offloading_changes_no_bit_beside(setting: str, family: str, modules: tuple[str, ...], train: Train) -> None:
    if setting in ONLY_WITH_EXPERTS and family == "qwen2":
        pytest.skip("a setting of experts")
    if setting in COMPILED and family == "qwen3_moe" and not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("Megatron builds a C++ extension for it")
    discarded = DISCARDED_BY_RECOMPUTE.get(setting.removeprefix("recompute_"), ())
    modules = tuple(name for name in modules if name not in discarded)
    outcome = train(family, *SETTINGS[setting], *offload(modules))
    assert_same_training(outcome, train(family, *SETTINGS[setting]))
    assert outcome.stats.bytes_out == outcome.stats.bytes_in + outcome.stats.returned_bytes > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", ["recompute_mlp_act", "recompute_mlp_fc1", "recompute_some_mlps"])
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3_mtp"])
def test_recomputing_parts_of_mlps_changes_no_bit(family: str, setting: str, train: Train) -> None:
    assert_same_training(train(family, *SETTINGS[setting]), train(family))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "modules"), ALL)
def test_a_recomputed_layer_offloads_its_input_alone(family: str, modules: tuple[str, ...], build: Build) -> None:
    model, engine = build(family, *SETTINGS["recompute_full"], *offload(modules))
    assert engine is not None
    modules_of_model = [module for chunk in model.modules for module in chunk.modules()]
    predictors = [module for module in modules_of_model if isinstance(module, MultiTokenPredictionLayer)]
    inputs_bytes = []

    def count(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():  # when it is recomputed
            num_inputs = 2 if any(layer in predictor.modules() for predictor in predictors) else 1  # and embeddings
            inputs_bytes.append(num_inputs * (*args, *kwargs.values())[0].nbytes)

    for module in modules_of_model:
        if isinstance(module, TransformerLayer):
            module.register_forward_pre_hook(count, with_kwargs=True)
    take_steps(model)
    stats = engine.stats()
    assert stats.per_module.keys() == {"attn_norm"}
    assert stats.bytes_out > 0
    assert offered_bytes(stats) == sum(inputs_bytes)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "modules"), ALL)
def test_megatrons_knobs_leave_some_on_the_device(family: str, modules: tuple[str, ...], train: Train) -> None:
    whole = train(family, *offload(modules)).stats
    half = train(family, *offload(modules), "activation_offload_fraction=0.5")
    one_at_a_time = train(family, *offload(modules), "fine_grained_offloading_max_inflight_offloads=0")
    for outcome in (half, one_at_a_time):
        assert_same_training(outcome, train(family))
    assert offered_bytes(one_at_a_time.stats) == offered_bytes(whole)
    assert 0.3 * whole.bytes_out < half.stats.bytes_out < offered_bytes(whole)
    # The first passes of a step keep their groups only after one such pass has had its backward.
    assert offered_bytes(half.stats) == offered_bytes(whole)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "modules"), ALL)
@pytest.mark.parametrize("budget", ["1GiB", "64KiB"])
@pytest.mark.filterwarnings("ignore:gpu_memory_budget. .* cannot be met:UserWarning")
def test_auto_changes_no_bit(family: str, modules: tuple[str, ...], budget: str, train: Train) -> None:
    auto = ("fine_grained_activation_offloading=true", "offload_modules=auto")
    outcome = train(family, *auto, f'activation_offload.gpu_memory_budget="{budget}"')
    assert_same_training(outcome, train(family))
    whole = offered_bytes(train(family, *offload(modules)).stats)
    assert outcome.stats.per_module.keys() <= set(modules)
    # The first step offloads everything; what follows, as much as the budget asks for.
    assert 0 < outcome.stats.bytes_out <= (whole if budget == "64KiB" else 0.6 * whole)


@pytest.mark.slow
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
    ids = to_device(make_batch(0))["input_ids"]
    chunk: Any = model.chunks[0]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    loss: Tensor = chunk.train()(ids, positions, None).sum()
    return loss


@pytest.mark.sampled(2)
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
    metrics = take_steps(model)
    assert metrics == train(family).metrics
    assert same_tensors(weights_of(model), train(family).weights)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "modules"), ALL)
def test_forward_only_passes_move_nothing(family: str, modules: tuple[str, ...], build: Build, train: Train) -> None:
    model, engine = build(family, *offload(modules))
    assert engine is not None
    greedy = Sampling(3, top_k=1)

    def pass_forward_only() -> None:
        before = engine.stats().bytes_out
        compute_logprobs(model, make_batch(0), 2, LogitsHeadFactory(1.0))
        generate(model.modules, [[1, 2], [3]], greedy, batch_size=2, end_ids=[258], seed=0)  # type: ignore[arg-type]
        assert engine.stats().bytes_out == before

    pass_forward_only()
    metrics = []
    for step, num_samples in enumerate(NUM_SAMPLES):
        metrics.append(take_step(model, step, num_samples))
        pass_forward_only()
    assert metrics == train(family).metrics
    assert offered_bytes(engine.stats()) == offered_bytes(train(family, *offload(modules)).stats)
