"""Buffers of fixed size, the paged stash and steps that run again change no bit of a training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MICRO_BATCH_SIZE, make_batch, make_policy, offload, same_tensors, weights_of
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.layers import static_experts
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.paged_stash.kernels import Pool

pytestmark = pytest.mark.usefixtures("megatron_process_group")

# The second has shared experts and a router bias.
FAMILIES = ("qwen3_moe", pytest.param("deepseek_v3_mtp", marks=pytest.mark.slow))
NUM_SAMPLES = (6, 2, 8, 4)  # so the number of microbatches changes
ROOMY = "moe_expert_rank_capacity_factor=2"
STASH = (ROOMY, "moe_paged_stash=true", "moe_paged_stash_page_size=8", "moe_paged_stash_buffer_size_factor_cuda=1.5")
SPILL = ("moe_paged_stash_buffer_size_factor_cuda=0.3", "moe_paged_stash_buffer_size_factor_cpu=1.5")
MOST_SEEN = ("moe_paged_stash_buffer_size_factor_cuda=-1.5",)
RECOMPUTE = ("recompute_granularity=selective", "recompute_modules=[moe_act,layernorm]")
OFFLOAD = offload(("attn_norm", "core_attn", "attn_proj", "mlp_norm"))
DROPOUT = "model_overrides={hidden_dropout: 0.1}"


@dataclass
class Outcome:
    """What a short training run leaves."""

    metrics: list[dict[str, float]]
    reruns: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    model: MegatronModel


Sabotage = Callable[[MegatronModel, int], None]
Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def train(model_folder: Callable[[str], Path]) -> Train:
    """Steps of changing microbatch counts with a forward-only pass after each."""

    def run(family: str, *overrides: str, sabotage: Sabotage | None = None) -> Outcome:
        policy = make_policy(*overrides)
        engine = install_offloading(policy)
        model = build_model(policy, model_folder(family), num_steps=10)
        torch.manual_seed(5)  # after what draws numbers itself: building, and writing the folder
        if engine is not None:
            exclude_parameters(engine, model.modules)
        metrics, gradients = [], []
        for step, number in enumerate(NUM_SAMPLES):
            if sabotage is not None:
                sabotage(model, step)
            batch = make_batch(step, number)
            norm = normalizers(batch)
            metrics.append(
                train_step(model, batch, build_loss("nll", {}), norm, MICRO_BATCH_SIZE, LogitsHeadFactory(1.0))
            )
            gradients.append({name: weight.main_grad.clone() for name, weight in model.modules[0].named_parameters()})
            compute_logprobs(model, batch, MICRO_BATCH_SIZE, LogitsHeadFactory(1.0))
        reruns = [each.pop("paged_stash/reruns", 0.0) for each in metrics]
        weights = weights_of(model) | {f"buffer {name}": value for name, value in model.modules[0].named_buffers()}
        if engine is not None:
            assert engine.stats().host_bytes == 0
            assert engine.stats().bytes_out > 0
            use_engine(None)
            engine.close()
        return Outcome(metrics, reruns, gradients, weights, model)

    return run


@pytest.fixture(scope="module")
def plain(train: Train) -> Callable[..., Outcome]:
    """A training without limits; each combination runs once."""
    outcomes: dict[tuple[str, ...], Outcome] = {}

    def of(family: str, *overrides: str) -> Outcome:
        if (family, *overrides) not in outcomes:
            outcomes[family, *overrides] = train(family, *overrides)
        return outcomes[family, *overrides]

    return of


def assert_same_training(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.metrics == reference.metrics
    assert all(map(same_tensors, outcome.gradients, reference.gradients))
    assert same_tensors(outcome.weights, reference.weights)
    assert all(metrics["grad_norm"] > 0 for metrics in reference.metrics)


def assert_all_pages_are_free(outcome: Outcome) -> None:
    assert outcome.model.guard is not None
    stash = outcome.model.guard.stash
    assert stash is not None
    for pool in stash.pools.values():
        counters = pool.counters()
        assert counters["tail_device"] - counters["head_device"] == pool.num_device
        assert counters["tail_host"] - counters["head_host"] == pool.num_host
        assert sorted(pool.ring.tolist()) == list(range(pool.num_device + pool.num_host))
        assert counters["head_device"] + counters["head_host"] > 0, "nothing was stashed"


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_fixed_size_change_no_bit(family: str, train: Train, plain: Train) -> None:
    outcome = train(family, ROOMY)
    assert_same_training(outcome, plain(family))
    assert sum(outcome.reruns) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param((), id="device", marks=pytest.mark.slow),
        pytest.param(SPILL, id="spill"),
        pytest.param(MOST_SEEN, id="most seen", marks=pytest.mark.slow),
    ],
)
def test_a_stash_changes_no_bit(family: str, setting: tuple[str, ...], train: Train, plain: Train) -> None:
    outcome = train(family, *STASH, *setting)
    assert_same_training(outcome, plain(family))
    assert_all_pages_are_free(outcome)
    assert outcome.model.guard is not None
    assert (outcome.model.guard.counts.spilled > 0) == (setting == SPILL)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "beside", [pytest.param(OFFLOAD, id="offload"), pytest.param(RECOMPUTE, id="recompute", marks=pytest.mark.slow)]
)
def test_a_stash_beside_other_means_changes_no_bit(
    family: str, beside: tuple[str, ...], train: Train, plain: Train
) -> None:
    outcome = train(family, *STASH, *beside)
    assert_same_training(outcome, plain(family, *(RECOMPUTE if beside == RECOMPUTE else ())))
    assert_all_pages_are_free(outcome)


def fill(pages: float) -> Sabotage:
    """Before the second and third steps, and the last one: shrink the stash to this share of its pages."""

    def shrink(model: MegatronModel, step: int) -> None:
        assert model.guard is not None
        assert model.guard.stash is not None
        if step != 0:
            pools = model.guard.stash.pools
            for width, pool in pools.items():
                pools[width] = Pool(width, pool.page_size, int(pool.num_device * pages), 0, torch.device("cpu"))

    return shrink


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pages", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_a_full_stash_loses_no_step(family: str, pages: float, train: Train, plain: Train) -> None:
    outcome = train(family, *STASH, DROPOUT, sabotage=fill(pages))
    assert_same_training(outcome, plain(family, DROPOUT))
    assert outcome.model.guard is not None
    assert outcome.reruns[0] == 0
    assert outcome.model.guard.counts.reruns == outcome.model.guard.counts.overflows == sum(outcome.reruns) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3_mtp"])
def test_too_small_buffers_lose_no_step(
    family: str, train: Train, plain: Train, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = train(family, "moe_expert_rank_capacity_factor=0.5", DROPOUT)
    assert_same_training(outcome, plain(family, DROPOUT))
    assert outcome.reruns == [1.0] * len(NUM_SAMPLES)
    assert "the experts' buffers were too small; to avoid it, set moe_expert_rank_capacity_factor: 1.05" in caplog.text


@pytest.mark.slow
def test_a_rerun_without_what_it_puts_back_would_differ(
    train: Train, plain: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(model: MegatronModel, step: int) -> None:
        assert model.guard is not None
        monkeypatch.setattr(model.guard, "_save", lambda: lambda: None)

    outcome = train("deepseek_v3_mtp", "moe_expert_rank_capacity_factor=0.5", sabotage=forget)
    bias = {name for name in outcome.weights if name.endswith("expert_bias")}
    reference = plain("deepseek_v3_mtp").weights
    assert bias
    assert any(not torch.equal(outcome.weights[name], reference[name]) for name in bias)


@pytest.fixture
def poisoned_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead rows are NaN wherever a tensor of rows is made: dispatch, grouped products, restored tensors."""
    gather, grouped_mm, restore = static_experts._Gather.forward, F.grouped_mm, Pool.restore

    def poisoned_gather(ctx: Any, values: Tensor, index: Tensor, is_live: Tensor) -> Tensor:
        rows = gather(ctx, values, index, is_live)
        rows[~is_live] = torch.nan
        return rows

    def poisoned_grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        product: Tensor = grouped_mm(a, b, offs=offs)
        if b.ndim == 3:
            product[int(offs[-1]) :] = torch.nan
        return product

    def poisoned_restore(pool: Pool, target: Tensor, record: Tensor) -> None:
        target.fill_(0xFF)  # NaN in every float
        restore(pool, target, record)

    monkeypatch.setattr(static_experts._Gather, "forward", staticmethod(poisoned_gather))
    monkeypatch.setattr(F, "grouped_mm", poisoned_grouped_mm)
    monkeypatch.setattr(Pool, "restore", poisoned_restore)


@pytest.mark.usefixtures("poisoned_tails")
@pytest.mark.parametrize("family", FAMILIES)
def test_dead_rows_never_reach_a_result(family: str, train: Train, plain: Train) -> None:
    outcome = train(family, *STASH)
    assert_same_training(outcome, plain(family))
    assert_all_pages_are_free(outcome)


@pytest.mark.usefixtures("poisoned_tails")
def test_unmasked_dead_rows_would_be_seen(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_experts, "_zero_tail", lambda rows, is_live: rows)
    assert any(metrics["skipped_updates"] for metrics in train("qwen3_moe", ROOMY).metrics)
