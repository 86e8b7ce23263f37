"""A checkpoint of one parallel layout goes on in another as if it were the same, and in its own bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ranks import Ranks, relative_error

if TYPE_CHECKING:
    from rank_work import Resumed

pytestmark = pytest.mark.slow

TP = "tensor_model_parallel_size=2"
PP = "pipeline_model_parallel_size=2"
EP = "expert_model_parallel_size=2"
ETP = "expert_tensor_parallel_size=2"
VPP = (PP, "virtual_pipeline_model_parallel_size=2", "overlap_p2p_comm=true", "batch_p2p_comm=false")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "dp2": (2, ()),
    "tp2": (2, (TP,)),
    "tp2-sp": (2, ("tensor_model_parallel_size=2", "sequence_parallel=true")),
    "pp2": (2, (PP,)),
    "pp2-vpp2": (2, VPP),
    "ep2": (2, (EP,)),
    "etp2": (2, (ETP,)),
    "tp2-sp-etp2": (2, (TP, "sequence_parallel=true", ETP)),
}
# Adam, with a rate that shows in every weight within a step, and a schedule that shows where it stands.
SETTINGS = (
    "optimizer.lr=1e-2",
    "optimizer.weight_decay=0.1",
    "optimizer.adam_eps=1e-4",
    "scheduler.lr_warmup_iters=3",
    "moe_aux_loss_coeff=0",
    "moe_router_bias_update_rate=0",  # a sign, which one token more or less turns
)
# From float32 sums in another order. Adam divides by the gradient's size, but not by less than its large epsilon here.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Resumed]]:
    """Call a function of `rank_work` on the ranks of a layout, with the model of a family."""
    folders: dict[str, Path] = {}

    def on_ranks(layout: str, function: str, family: str, distributed: bool, *args: Any) -> list[Resumed]:
        if family not in folders:
            (folders[family],) = ranks(1).run("write", family, tmp_path_factory.mktemp(family))
        world_size, overrides = LAYOUTS[layout]
        optimizer = f"optimizer.use_distributed_optimizer={str(distributed).lower()}"
        return ranks(world_size).run(function, folders[family], (*SETTINGS, *overrides, optimizer), *args)

    return on_ranks


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "saved_in", "loaded_in", "distributed"),
    [
        ("qwen2", "tp2", ("tp2", "one", "pp2"), True),
        ("qwen2", "tp2", ("tp2", "one"), False),
        ("qwen2_odd", "tp2", ("tp2", "one"), True),
        ("llama_odd", "one", ("tp2",), False),
        ("qwen2", "pp2-vpp2", ("pp2-vpp2", "dp2", "tp2"), True),
        ("qwen2", "dp2", ("dp2", "one"), True),
        ("qwen3_moe", "ep2", ("ep2", "one", "pp2"), True),
        ("qwen3_moe", "one", ("ep2",), True),
        ("qwen3_moe", "etp2", ("etp2", "one", "ep2"), True),
        ("qwen3_moe", "tp2-sp", ("tp2-sp-etp2", "etp2"), True),
        ("deepseek_v3", "tp2-sp-etp2", ("tp2-sp-etp2", "tp2-sp", "one"), True),
        ("nemotron_h", "tp2-sp", ("tp2-sp", "one", "pp2"), True),
        ("qwen3_5_moe_text", "tp2-sp", ("tp2-sp", "one", "pp2"), True),
    ],
)
def test_a_checkpoint_goes_on_in_other_layouts(
    family: str,
    saved_in: str,
    loaded_in: tuple[str, ...],
    distributed: bool,
    run: Callable[..., list[Resumed]],
    tmp_path: Path,
) -> None:
    expected = run(saved_in, "train_and_save", family, distributed, tmp_path)
    manifest = {name: digest for rank in expected for name, digest in rank.manifest.items()}
    assert set(manifest) == {path.name for path in tmp_path.iterdir()}
    for layout in loaded_in:
        resumed = run(layout, "load_and_train", family, distributed, tmp_path, manifest)
        if layout == saved_in:
            assert [rank.metrics for rank in resumed] == [rank.metrics for rank in expected]
            assert [rank.digest for rank in resumed] == [rank.digest for rank in expected]
            continue
        assert resumed[0].at_checkpoint.keys() == expected[0].at_checkpoint.keys()
        assert all((resumed[0].at_checkpoint[name] == value).all() for name, value in expected[0].at_checkpoint.items())
        for found, wanted in zip(resumed[-1].metrics, expected[-1].metrics, strict=True):
            assert found == pytest.approx(wanted, rel=TOLERANCE)
        assert relative_error(resumed[0].weights, expected[0].weights) < TOLERANCE
        moved = relative_error(expected[0].weights, expected[0].at_checkpoint)
        assert moved > 100 * TOLERANCE, "the steps show"


@pytest.mark.parametrize(("saved_in", "loaded_in"), [("etp2", "one"), ("one", "ep2")])
def test_an_optimizer_that_is_not_distributed_keeps_experts_apart_or_not(
    saved_in: str, loaded_in: str, run: Callable[..., list[Resumed]], tmp_path: Path
) -> None:
    run(saved_in, "train_and_save", "qwen3_moe", False, tmp_path)
    for said in run(loaded_in, "why_refused", "qwen3_moe", False, tmp_path):
        assert f"{tmp_path} was written with other sizes of expert or tensor parallelism" in said
        assert "use_distributed_optimizer=true in both runs" in said
