"""GRPO's options around the rollouts: dynamic sampling, reward shaping, overlong filtering, epochs."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import END_ID, FakeEnvironment, FakePolicy

from nemo_rl_offload.algorithms.grpo import GRPO
from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.errors import DataError, WorkerError

SMALL = (
    "grpo.max_num_steps=4",
    "grpo.num_prompts_per_step=3",
    "grpo.num_generations_per_prompt=4",
    "data.train.size=200",
    "data.validation.size=4",
    "data.validation.exclude=[]",
)


class Graded(FakeEnvironment):
    """Every `period`-th prompt has responses of different rewards: one of ``high``, the others of ``low``."""

    def __init__(self, period: int, low: float = 0.0, high: float = 1.0) -> None:
        self._period = period
        self._rewards = (low, high)
        self.num_prompts = 0

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        scores = []
        for start in range(0, len(episodes), 4):
            self.num_prompts += 1
            differs = self._period > 0 and self.num_prompts % self._period == 0
            scores += [
                Score(self._rewards[differs and index == 0], False, False)
                for index in range(len(episodes[start : start + 4]))
            ]
        return scores


Make = Callable[..., tuple[GRPO, FakePolicy]]


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path) -> Make:
    def make(environment: Any, *overrides: str) -> tuple[GRPO, FakePolicy]:
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*SMALL, *overrides])
        prompts = prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, seed=1)
        policy = FakePolicy()
        return GRPO(config, policy, environment, tokenizer, {END_ID}, prompts, tmp_path), policy

    return make


def step(loop: GRPO, policy: FakePolicy) -> tuple[Batch, dict[str, float]]:
    loop.step += 1
    metrics = loop.train_step()
    return policy.batches[-1], metrics


@pytest.mark.parametrize(("multiplier", "num_batches", "size"), [(1, 6, 3), (2, 3, 6), (1.5, 4, 5)])
def test_dynamic_sampling_replaces_prompts_without_signal(
    multiplier: float, num_batches: int, size: int, make: Make
) -> None:
    environment = Graded(period=6)
    loop, policy = make(environment, "grpo.use_dynamic_sampling=true", f"grpo.batch_multiplier={multiplier}")
    batch, metrics = step(loop, policy)
    assert policy.num_prompts == [4 * size] * num_batches
    assert len(set(policy.seeds)) == num_batches
    assert metrics["num_gen_batches"] == num_batches
    assert metrics["kept_prompts_fraction"] == pytest.approx(environment.num_prompts // 6 / environment.num_prompts)
    assert len(batch["input_ids"]) == 12
    assert (batch["advantages"].view(3, -1).abs().amax(dim=1) > 0).all()
    first_seeds = set(policy.seeds)
    step(loop, policy)
    assert not first_seeds & set(policy.seeds[num_batches:])


def test_dynamic_sampling_compares_what_is_learned_from(make: Make) -> None:
    """Rewards that scaling makes equal were kept, and those of several parts judged by their sum alone."""
    sampling = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1")
    scaling = ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_max=1.0")
    loop, policy = make(Graded(period=1, low=1.0, high=3.0), *sampling, *scaling)
    with pytest.raises(DataError, match="after 1 batches only 0 of 3 prompts"):
        step(loop, policy)
    loop, policy = make(Graded(period=1, low=0.5, high=3.0), *sampling, *scaling)
    step(loop, policy)


class InParts(FakeEnvironment):
    """Each response has the next of `given`."""

    def __init__(self, *given: dict[str, float] | None) -> None:
        self._given = given

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        parts = [self._given[place % len(self._given)] for place in range(len(episodes))]
        failed = Score(0.0, is_correct=False, scorer_error=True)
        return [failed if part is None else Score(sum(part.values()), True, False, parts=part) for part in parts]


def ab(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"a": float(a), "b": float(b)} for a, b in pairs]


@pytest.mark.parametrize(
    ("others", "weights"),
    [
        ([None] * 4, "null"),
        ([{"c": 1.0}, {"c": 0.0}, {"c": 0.0}, {"c": 0.0}], "null"),
        ([{"c": 1.0, "d": 0.0}, *[{"c": 0.0, "d": 0.0}] * 3], "[1.0, 1.0, 1.0, 1.0]"),
    ],
)
def test_dynamic_sampling_judges_what_it_keeps_together(
    others: list[dict[str, float] | None], weights: str, make: Make
) -> None:
    """A prompt that no scorer can judge, or with rewards of other names, ended the run."""
    several = ("grpo.adv_estimator.name=gdpo", f"grpo.adv_estimator.reward_weights={weights}")
    given = [*ab((1, 0), (0, 0), (0, 0), (1, 1)), *others]
    loop, policy = make(InParts(*given), "grpo.use_dynamic_sampling=true", *several)
    _, metrics = step(loop, policy)
    assert metrics["num_gen_batches"] == (2 if None in others else 1)


def test_dynamic_sampling_needs_several_rewards_too(make: Make) -> None:
    loop, policy = make(Graded(period=1), "grpo.use_dynamic_sampling=true", "grpo.adv_estimator.name=gdpo")
    with pytest.raises(WorkerError, match="gdpo compares several rewards, and the environment reasoning_gym returned"):
        step(loop, policy)


@pytest.mark.parametrize(
    ("given", "weights", "teaches"),
    [
        ([(3, 0), (3, 0), (2, 1), (0, 3)], "[1.0, 3.0]", True),
        ([(1, 0), (0, 1)], "[2.0, 1.0]", True),
        ([(1, 0), (0, 1)], None, False),  # what is better in one is worse in the other by as much
        ([(1, 0), (1, 1)], "[1.0, 0.0]", False),
        ([(1, 0)], None, False),
    ],
)
def test_dynamic_sampling_compares_several_rewards_as_they_count(
    given: list[tuple[float, float]], weights: str | None, teaches: bool, make: Make
) -> None:
    sampling = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1")
    several = ("grpo.adv_estimator.name=gdpo", f"grpo.adv_estimator.reward_weights={weights or 'null'}")
    loop, policy = make(InParts(*ab(*given)), *sampling, *several)
    if teaches:
        batch, _ = step(loop, policy)
        assert bool(batch["advantages"].any())
    else:
        with pytest.raises(DataError, match="after 1 batches only 0 of 3 prompts"):
            step(loop, policy)


def test_dynamic_sampling_gives_up(make: Make) -> None:
    loop, policy = make(Graded(period=0), "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2")
    with pytest.raises(DataError, match="after 2 batches only 0 of 3 prompts of step 1"):
        step(loop, policy)
    assert policy.batches == []


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.1 + 0.2 - 0.3), (100.3, 100.30001), (0.3, 0.1 + 0.2)])
def test_rewards_that_differ_by_rounding_are_replaced_and_not_learned(low: float, high: float, make: Make) -> None:
    sampling = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1")
    loop, policy = make(Graded(period=1, low=low, high=high), *sampling)
    with pytest.raises(DataError, match="after 1 batches only 0 of 3 prompts"):
        step(loop, policy)
    loop, policy = make(Graded(period=1, low=low, high=high), "grpo.normalize_rewards=true")
    batch, metrics = step(loop, policy)
    assert (batch["advantages"] == 0).all()
    assert metrics["advantages_zero_fraction"] == 1


@pytest.mark.parametrize(("leave_one_out", "expected"), [(True, (2.0, -2 / 3)), (False, (1.5, -0.5))])
def test_one_divisor_a_group(leave_one_out: bool, expected: tuple[float, float], make: Make) -> None:
    baseline = f"grpo.use_leave_one_out_baseline={str(leave_one_out).lower()}"
    loop, policy = make(Graded(period=1, high=10.0), "grpo.normalize_rewards=true", baseline)
    batch, _ = step(loop, policy)
    advantages = batch["advantages"].sum(dim=1) / batch["token_mask"].sum(dim=1)
    high, low = expected
    assert advantages.tolist() == pytest.approx([high, low, low, low] * 3, rel=1e-5)


def test_without_dynamic_sampling_every_prompt_is_kept(make: Make) -> None:
    loop, policy = make(Graded(period=0))
    batch, metrics = step(loop, policy)
    assert (batch["advantages"] == 0).all()
    assert "num_gen_batches" not in metrics


def test_overlong_filtering_leaves_unfinished_responses_out(make: Make) -> None:
    for filtering in (True, False):
        loop, policy = make(FakeEnvironment(), f"grpo.overlong_filtering={str(filtering).lower()}", "grpo.seed=2")
        batch, metrics = step(loop, policy)
        ends = batch["input_ids"].gather(1, batch["input_lengths"][:, None] - 1).squeeze(1)
        is_finished = (ends == 2).float()
        assert 0 < is_finished.sum() < 12
        assert torch.equal(batch["sample_mask"], is_finished if filtering else torch.ones(12))
        assert metrics["unfinished_fraction"] == pytest.approx(float(1 - is_finished.mean()))


@pytest.mark.parametrize(
    ("longest", "overrides"),
    [(4, ["grpo.reward_shaping.max_response_length=4"]), (8, []), (8, ["grpo.max_rollout_turns=2"])],
    ids=["as it is set", "of one turn", "of one turn, where the key has no effect"],
)
def test_reward_shaping_changes_advantages_and_not_the_reported_reward(
    longest: int, overrides: list[str], make: Make
) -> None:
    buffer = longest - 2
    shaping = {"enabled": "true", "overlong_buffer_length": buffer, "overlong_buffer_penalty": 0.5}
    overrides = [*overrides, *(f"grpo.reward_shaping.{key}={value}" for key, value in shaping.items())]
    loop, policy = make(Graded(period=0), *overrides, "grpo.normalize_rewards=false")
    batch, metrics = step(loop, policy)
    assert metrics["reward"] == 0
    lengths = batch["token_mask"].sum(dim=1)
    penalties = 0.5 * ((lengths - 2) / buffer).clamp(0, 1)
    groups = penalties.view(3, 4)
    expected = (groups.sum(dim=1, keepdim=True) - groups) / 3 - groups
    assert (expected != 0).any()
    torch.testing.assert_close(batch["advantages"], expected.flatten()[:, None] * batch["token_mask"])


def test_several_epochs_train_on_the_same_batch(make: Make) -> None:
    loop, policy = make(FakeEnvironment(), "grpo.ppo_epochs=3")
    _, metrics = step(loop, policy)
    assert len(policy.batches) == 3
    assert all(batch is policy.batches[0] for batch in policy.batches)
    assert policy.num_prompts == [12]
    signal = float(policy.batches[0]["advantages"].sum())
    assert metrics["loss"] == pytest.approx(signal + 2)


@pytest.mark.parametrize(
    ("size", "epochs", "steps"), [(9, 1, 3), (10, 1, 3), (10, 4, 13), (2, 1, 1), (200, None, 50), (3, 100, 50)]
)
def test_a_run_has_the_whole_steps_of_its_passes(size: int, epochs: int | None, steps: int, make: Make) -> None:
    given = (f"data.train.size={size}", f"grpo.max_num_epochs={'null' if epochs is None else epochs}")
    loop, _ = make(Graded(period=1), "grpo.max_num_steps=50", *given)
    assert loop.num_steps == steps


@pytest.mark.parametrize("epochs", [1, 2])
def test_passes_end_a_run_whose_dynamic_sampling_takes_more_prompts(epochs: int, make: Make) -> None:
    sampling = ("grpo.use_dynamic_sampling=true", f"grpo.max_num_epochs={epochs}", "grpo.max_num_steps=50")
    loop, policy = make(Graded(period=2), *sampling, "data.train.size=18")  # two batches of 3 prompts a step
    assert loop.num_steps == 6 * epochs
    while not loop.has_taken_all():
        step(loop, policy)
    assert sum(policy.num_prompts) == 4 * 18 * epochs
    assert loop.step == 3 * epochs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ahead", ["false", "true"])
def test_passes_end_a_run_whose_problems_are_held_out_in_part(ahead: str, seed: int, make: Make) -> None:
    """Responses that are generated ahead were trained for more passes; so were those whose pass ends in others."""
    given = ("grpo.max_num_epochs=1", "grpo.max_num_steps=50", "data.train.size=18", f"grpo.async_grpo.enabled={ahead}")
    loop, policy = make(Graded(period=2), *given)
    problems = list(loop._train_prompts.problems())
    held = frozenset(problem.question for problem in problems[:6])
    usable = sum(problem.question not in held for problem in problems)
    loop._train_prompts._held_out = held
    while not loop.has_taken_all():
        step(loop, policy)
    assert loop.step == math.ceil(usable / 3)
