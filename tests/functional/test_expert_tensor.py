"""Experts whose widths ranks share train as whole ones do, whatever else is set, and offloading changes no bit.

Of layouts alone: `test_parallel_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from ranks import Ranks, relative_error
from test_parallel_layouts import LAYOUTS, SGD, TOLERANCE, assert_same_bits

if TYPE_CHECKING:
    from rank_work import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.sampled]

FAMILY = "deepseek_v3"
"""It has shared experts, which follow tensor parallelism."""
WHOLE, SHARED = "tp2-sp", "tp2-sp-etp2"
ADAM = ("optimizer.optimizer=adam", "optimizer.lr=1e-2", "optimizer.adam_eps=1e-3", "optimizer.clip_grad=0.05")
SELECTIVE = "recompute_granularity=selective"
STEPS = ((0, 4), (1, 8))
Train = Callable[..., "list[Outcome]"]


@pytest.fixture(scope="module")
def train(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Two steps in a layout, each combination once; the outcomes of both ranks."""
    (folder,) = ranks(1).run("write", FAMILY, tmp_path_factory.mktemp(FAMILY), num_hidden_layers=2)
    outcomes: dict[tuple[Any, ...], list[Outcome]] = {}

    def train_in(layout: str, *overrides: str) -> list[Outcome]:
        if (key := (layout, *overrides)) not in outcomes:
            num_ranks, settings = LAYOUTS[layout]
            outcomes[key] = ranks(num_ranks).run("train", folder, (*SGD, *settings, *overrides), STEPS)
        return outcomes[key]

    return train_in


@pytest.mark.parametrize(
    "overrides",
    [
        ("moe_router_load_balancing_type=aux_loss", "moe_aux_loss_coeff=0.1"),
        ("moe_router_load_balancing_type=sinkhorn",),
        ("moe_shared_expert_overlap=true",),
        ("moe_token_dispatcher_type=allgather",),
        (*ADAM, "optimizer.use_distributed_optimizer=true"),
        (*ADAM, "optimizer.use_distributed_optimizer=true", "optimizer.optimizer_cpu_offload=true"),
    ],
    ids=["aux loss", "sinkhorn", "overlap", "allgather", "distributed adam, clipped", "adam on the host"],
)
def test_shared_widths_train_as_whole_experts_do(overrides: tuple[str, ...], train: Train) -> None:
    wholes, outcomes = train(WHOLE, *overrides), train(SHARED, *overrides)
    for expected, metrics in zip(wholes[-1].metrics, outcomes[-1].metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-7)
    if ADAM[0] not in overrides:  # which leaves each rank its part of them
        assert relative_error(outcomes[0].gradients, wholes[0].gradients) < TOLERANCE
    assert relative_error(outcomes[0].weights, wholes[0].weights) < TOLERANCE


@pytest.mark.parametrize(
    ("recompute", "modules"),
    [
        ((SELECTIVE, "recompute_modules=[moe_act]"), ("expert_fc1", "moe_act")),
        ((SELECTIVE, "recompute_modules=[moe]"), ("attn_norm",)),
        (("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"), ("attn_norm",)),
    ],
    ids=["moe_act", "moe", "full"],
)
def test_recomputation_and_offloading_change_no_bit(
    recompute: tuple[str, ...], modules: tuple[str, ...], train: Train
) -> None:
    plain = train(SHARED)
    assert_same_bits(train(SHARED, *recompute), plain)
    offload = ("fine_grained_activation_offloading=true", f"offload_modules=[{','.join(modules)}]")
    outcomes = train(SHARED, *recompute, *offload)
    assert_same_bits(outcomes, plain)
    assert all(outcome.bytes_out[name] > 0 for outcome in outcomes for name in modules)
