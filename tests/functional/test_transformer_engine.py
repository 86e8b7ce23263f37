"""Offloading inside Transformer Engine's layers, by this project's engine and by Megatron-Core's, changes no bit."""

import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from model_variants import HONOURED, LENGTH, Variant, loss_of, make_ids, write_variant
from models import make_batch, make_policy, offload, same_tensors, take_step, weights_of
from patience import PATIENCE_S
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.megatron.build.model import build_model, init_process_groups
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.offload import OffloadStats
from nemo_rl_offload.specs.model_families import needs_torch_layers
from nemo_rl_offload.specs.offload_modules import DENSE_MLP_MODULES, MEGATRON_MODULES

HAS_TRANSFORMER_ENGINE = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="needs a CUDA device and Transformer Engine"),
    pytest.mark.usefixtures("any_device_process_group"),
]

ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
EXPERTS = ("mlp_norm", "expert_fc1", "moe_act")
MODULES = {
    "qwen2": (*ATTENTION, *DENSE_MLP_MODULES),
    "qwen3_moe": (*ATTENTION, *EXPERTS),
    "deepseek_v3_mtp": ("attn_norm", *ATTENTION, *EXPERTS, *DENSE_MLP_MODULES),
}
SINGLE = [
    (family, ("core_attn", "attn_proj") if name == "attn_proj" else (name,))
    for family, modules in MODULES.items()
    for name in modules
]
TRANSFORMER_ENGINE = ("transformer_impl=transformer_engine", "attention_backend=unfused")
FP8 = (".precision=bfloat16", "fp8_cfg.enabled=true", "fp8_cfg.fp8=hybrid", "fp8_cfg.fp8_recipe=tensorwise")
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}

Outcome = tuple[list[dict[str, float]], dict[str, Tensor], OffloadStats]


@pytest.fixture(scope="module")
def train(model_folder: Callable[..., Path]) -> Callable[..., Outcome]:
    """A few steps of several microbatches on the batches of these numbers; each combination runs once."""
    outcomes: dict[tuple[object, ...], Outcome] = {}

    def run(
        family: str, *overrides: str, steps: tuple[int, ...] = (0, 1, 2), multiple: int = 1, **shape: int
    ) -> Outcome:
        key = (family, overrides, steps, multiple, tuple(shape.items()))
        if key not in outcomes:
            policy = make_policy(*TRANSFORMER_ENGINE, *overrides)
            engine = install_offloading(policy)
            model = build_model(policy, model_folder(family, **shape), num_steps=10)
            if engine is not None:
                exclude_parameters(engine, model.modules)
            metrics = [take_step(model, step, multiple=multiple) for step in steps]
            stats = OffloadStats() if engine is None else engine.stats()
            outcomes[key] = metrics, weights_of(model), stats
            use_engine(None)
            if engine is not None:
                engine.close()
        return outcomes[key]

    return run


def assert_same_training(outcome: Outcome, reference: Outcome) -> None:
    assert outcome[0] == reference[0]
    assert same_tensors(outcome[1], reference[1])
    assert all(metrics["grad_norm"] > 0 for metrics in reference[0])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "modules"), [*SINGLE, *MODULES.items()])
def test_our_engine_changes_no_bit(
    family: str, modules: tuple[str, ...], precision: str, train: Callable[..., Outcome]
) -> None:
    setting = f".precision={precision}"
    outcome = train(family, setting, *offload(modules))
    assert_same_training(outcome, train(family, setting))
    stats = outcome[2]
    assert all(stats.per_module[name].bytes_out > 0 for name in modules)
    assert stats.bytes_out == stats.bytes_in + stats.returned_bytes
    assert stats.host_bytes == 0


@pytest.mark.parametrize("modules", ["[mlp_act]", "[mlp_fc1]", "[mlp_act,mlp_fc1]"])
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3_mtp"])
def test_recomputing_parts_of_mlps_changes_no_bit(family: str, modules: str, train: Callable[..., Outcome]) -> None:
    """Beside offloading of what is left, and of some layers alone."""
    number = "1" if "," in modules else "null"
    selective = "recompute_granularity=selective", f"recompute_modules={modules}", f"recompute_num_layers={number}"
    plain = train(family, ".precision=bfloat16")
    assert_same_training(train(family, ".precision=bfloat16", *selective), plain)
    beside = train(family, ".precision=bfloat16", *selective, *offload(("core_attn", "mlp_fc1")))
    assert_same_training(beside, plain)
    assert beside[2].per_module["mlp_fc1"].bytes_out > 0
    assert beside[2].ineffective_bytes == 0


@pytest.mark.usefixtures("no_clock")
def test_eight_bit_tensors_move_as_they_are_stored(train: Callable[..., Outcome]) -> None:
    in_eights = {"multiple": 8, **SHAPE}  # products of 8 bits want multiples of 16, of tokens of two samples too
    outcome = train("qwen2", *FP8, *offload(("qkv_linear",)), **in_eights)
    assert_same_training(outcome, train("qwen2", *FP8, **in_eights))
    in_bfloat16 = train("qwen2", ".precision=bfloat16", *offload(("qkv_linear",)), **in_eights)
    assert 0 < outcome[2].bytes_out < in_bfloat16[2].bytes_out


def _train_with_megatrons_engine(folder: Path, overrides: tuple[str, ...], pipe: Connection) -> None:
    """In a process of its own: our class, once put into Megatron's place, stays there."""
    os.environ |= {"NVTE_CPU_OFFLOAD_V1": "1", "RANK": "0", "WORLD_SIZE": "1"}
    torch.use_deterministic_algorithms(True)
    policy = make_policy(*TRANSFORMER_ENGINE, *overrides)
    init_process_groups(policy, seed=1)
    assert install_offloading(policy) is None
    model = build_model(policy, folder, num_steps=10)
    compute_logprobs(model, make_batch(0), 2, LogitsHeadFactory(1.0))  # would spoil the warm-up
    metrics = []
    for step in (0, 0, 0):  # lengths that stay: Megatron-Core's schedule is that of the first step
        metrics.append(take_step(model, step))
        compute_logprobs(model, make_batch(0), 2, LogitsHeadFactory(1.0))
    manager = PipelineOffloadManager.get_instance()
    weights = {name: weight.float().cpu().numpy() for name, weight in weights_of(model).items()}
    pipe.send((metrics, weights, dict(manager.offload_summary_bytes)))


@pytest.mark.parametrize(("family", "modules"), MODULES.items())
def test_megatrons_engine_changes_no_bit_and_is_spared_forward_only_passes(
    family: str, modules: tuple[str, ...], model_folder: Callable[..., Path], train: Callable[..., Outcome]
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    modules = tuple(name for name in modules if name in MEGATRON_MODULES)
    overrides = (*offload(modules), "activation_offload.engine=megatron")
    process = context.Process(target=_train_with_megatrons_engine, args=(model_folder(family), overrides, theirs))
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE_S)
    metrics, weights, offloaded_bytes = ours.recv()
    process.join()
    reference = train(family, steps=(0, 0, 0))
    assert metrics == reference[0]
    assert weights.keys() == reference[1].keys()
    same = {name: torch.equal(torch.from_numpy(weights[name]), reference[1][name].float().cpu()) for name in weights}
    assert [name for name in same if not same[name]] == []
    assert all(offloaded_bytes[name] > 0 for name in modules)


@pytest.mark.parametrize("variant", [one for one in HONOURED if needs_torch_layers(one.content) is None], ids=str)
def test_config_keys_are_honoured(variant: Variant, tmp_path: Path) -> None:
    """The loss is that of transformers on the CPU, but for the products' TF32."""
    reference = write_variant(variant, tmp_path)
    policy = make_policy(*TRANSFORMER_ENGINE, f".max_total_sequence_length={LENGTH}")
    model = build_model(policy, tmp_path, num_steps=None).modules[0].eval()
    ids = make_ids()
    with torch.no_grad():
        logits = model(ids.cuda(), torch.arange(LENGTH, device="cuda").expand_as(ids), None)
        assert loss_of(logits.cpu()) == pytest.approx(loss_of(reference(ids, use_cache=False).logits), abs=2e-3)
