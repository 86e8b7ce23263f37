"""The planner's table of `transformer_impl: torch` on a CPU gives, per module, the bytes that the engine counts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from models import count_step, make_policy, write_model
from planned_bytes import LAYOUTS, predict, random_case
from ranks import Ranks

from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.build.offload import install_offloading

NUM_CASES = 110
DEFAULT_SEEDS = 3

ON_RANKS = [(layout, seed) for layout in LAYOUTS if layout != "one" for seed in range(3 if "etp2" in layout else 6)]


@pytest.mark.sampled(DEFAULT_SEEDS)
@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_predicted_bytes_are_the_counted_ones(seed: int, tmp_path: Path) -> None:
    case = random_case(seed)
    folder = write_model(case.family, tmp_path, **case.shape)
    policy = make_policy(*case.overrides())
    engine = install_offloading(policy)
    assert engine is not None
    counted = count_step(build_model(policy, folder, num_steps=1), engine, case.num_microbatches, case.sequence)
    assert counted == predict(case, folder), case


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("layout", "seed"), ON_RANKS)
def test_predicted_bytes_are_those_of_every_rank(
    layout: str, seed: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    case = random_case(seed, layout)
    folder = write_model(case.family, tmp_path, **case.shape)
    work = (folder, tuple(case.overrides()), case.num_microbatches, case.sequence)
    counted = ranks(case.layout.world).run("count", *work)
    per_stage = case.layout.world // case.layout.pipeline
    assert counted == [predict(case, folder, rank // per_stage) for rank in range(case.layout.world)], case
