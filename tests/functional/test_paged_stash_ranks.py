"""The paged stash under expert parallelism: no bit changes, also where one rank alone runs out of pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ranks import Ranks

if TYPE_CHECKING:
    from rank_work import Outcome

pytestmark = pytest.mark.slow

SGD = ("optimizer.optimizer=sgd", "optimizer.lr=0.3", "optimizer.clip_grad=0", "scheduler.lr_warmup_iters=0")
EP = ("expert_model_parallel_size=2", "moe_token_dispatcher_type=allgather")
ETP = ("expert_tensor_parallel_size=2", "moe_token_dispatcher_type=allgather")
VPP = (
    "pipeline_model_parallel_size=2",
    "virtual_pipeline_model_parallel_size=2",
    "overlap_p2p_comm=true",
    "batch_p2p_comm=false",
)
CAPACITY = "moe_expert_rank_capacity_factor=1.8"
STASH = (CAPACITY, "moe_paged_stash=true", "moe_paged_stash_page_size=4", "moe_paged_stash_buffer_size_factor_cuda=3")
OFFLOAD = ("fine_grained_activation_offloading=true", "offload_modules=[attn_norm,core_attn,mlp_norm]")
STEPS = ((0, 8), (1, 16), (2, 4), (3, 8))


@pytest.fixture(scope="module")
def train(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Outcome]]:
    """Four steps of changing microbatch counts on two ranks; each combination runs once."""
    folders: dict[str, Path] = {}
    outcomes: dict[Any, list[Outcome]] = {}

    def run(family: str, layout: tuple[str, ...], *overrides: str, full_at: Any = ()) -> list[Outcome]:
        if family not in folders:
            folders[family] = ranks(2).run("write", family, tmp_path_factory.mktemp(family))[0]
        key = (family, layout, overrides, full_at)
        if key not in outcomes:
            outcomes[key] = ranks(2).run("train", folders[family], (*SGD, *layout, *overrides), STEPS, full_at)
        return outcomes[key]

    return run


def assert_same_bits(outcomes: list[Outcome], references: list[Outcome]) -> None:
    for outcome, reference in zip(outcomes, references, strict=True):
        assert outcome.digests == reference.digests
        of_both = zip(outcome.metrics, reference.metrics, strict=True)
        assert all({**mine, "paged_stash/reruns": 0} == {**theirs, "paged_stash/reruns": 0} for mine, theirs in of_both)
    assert len(set(references[0].digests)) == len(references[0].digests), "every step has gradients of its own"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3_moe", EP), ("deepseek_v3", EP), ("qwen3_moe", VPP), ("qwen3_moe", ETP)),
        ("qwen3_moe", (*EP, "context_parallel_size=2")),
    ],
    ids=["ep2", "ep2-shared-experts", "pp2-vpp2", "etp2", "cp2-ep2"],
)
def test_a_stash_changes_no_bit(family: str, layout: tuple[str, ...], train: Callable[..., list[Outcome]]) -> None:
    outcomes = train(family, layout, *STASH)
    assert_same_bits(outcomes, train(family, layout))
    assert all(each.stash is not None and each.stash["peak_bytes"] > 0 for each in outcomes)


def test_a_stash_beside_offloading_changes_no_bit(train: Callable[..., list[Outcome]]) -> None:
    outcomes = train("qwen3_moe", EP, *STASH, *OFFLOAD)
    assert_same_bits(outcomes, train("qwen3_moe", EP))
    assert all(min(each.bytes_out.values()) > 0 and each.host_bytes == 0 for each in outcomes)


def test_a_full_stash_on_one_rank_loses_no_step(train: Callable[..., list[Outcome]]) -> None:
    full_at = ((0, 1), (0, 2), (1, 3))  # two in a row on rank 0 alone, then rank 1 alone
    outcomes = train("deepseek_v3", EP, *STASH, full_at=full_at)
    assert_same_bits(outcomes, train("deepseek_v3", EP))
    for each in outcomes:
        assert each.stash is not None
        reruns = [metrics["paged_stash/reruns"] for metrics in each.metrics]
        assert reruns == [0.0, 1.0, 1.0, 1.0]
        assert each.stash["reruns"] == each.stash["overflows"] == 3


def test_buffers_too_small_lose_no_step(train: Callable[..., list[Outcome]]) -> None:
    outcomes = train("deepseek_v3", EP, "moe_expert_rank_capacity_factor=0.9")
    assert_same_bits(outcomes, train("deepseek_v3", EP))
    assert all(each.stash is not None and each.stash["over_budget"] == len(STEPS) for each in outcomes)
