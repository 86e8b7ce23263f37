"""The GRPO loop over stand-ins for policy and scorer, with real prompts, advantages and checkpoints."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import END_ID, FakeEnvironment, FakePolicy, Recorder, rows

from nemo_rl_offload.algorithms import distillation, grpo
from nemo_rl_offload.algorithms.grpo import DISAGREEMENT, GRPO
from nemo_rl_offload.algorithms.rollout import Rollout
from nemo_rl_offload.batching.batch import ROUTED_EXPERTS
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.signals import Termination
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.errors import DataError, WorkerError
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.losses.reduction import valid_tokens

SMALL = (
    "grpo.max_num_steps=6",
    "grpo.num_prompts_per_step=3",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=2",
    "grpo.max_val_samples=10",
    "grpo.val_batch_size=4",
    "data.train.size=60",
    "data.validation={seed: 10000000, size: 12, exclude: []}",
    "checkpointing.save_period=3",
    "checkpointing.keep_top_k=null",
)
Make = Callable[..., tuple[GRPO, FakePolicy]]


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path) -> Make:
    """Build a loop in the test's folder."""

    def make(*overrides: str, run_dir: Path = tmp_path) -> tuple[GRPO, FakePolicy]:
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*SMALL, *overrides])
        task, policy = config["env"]["reasoning_gym"], FakePolicy()
        prompts = prompt_sets(config["data"], task, tokenizer, config["grpo"]["seed"])
        environment: Any = FakeEnvironment()
        run_dir.mkdir(exist_ok=True)
        return GRPO(config, policy, environment, tokenizer, {END_ID}, prompts, run_dir), policy

    return make


@pytest.mark.parametrize(("exemplar", "module"), [("grpo_tiny", grpo), ("distillation_tiny", distillation)])
def test_problems_none_of_which_is_usable_are_told_before_anything_starts(
    exemplar: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training's file is validation's."""
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(20)))
    files = (f"data.train.path={path}", f"data.validation.path={path}", "data.env_name=math")
    config: Any = load_config(PROJECT_ROOT / f"examples/configs/{exemplar}.yaml", files)
    monkeypatch.setattr(module, "run_loop", lambda *_: pytest.fail("the run began"))
    with pytest.raises(DataError, match="none of 20 problems is usable: 20 are validation problems"):
        getattr(module, f"run_{config['algorithm']}")(config, tmp_path / "run", lambda _: None, None)


def run(loop: GRPO) -> Recorder:
    recorder: Any = Recorder()
    loop.run(recorder, recorder, Termination(0))
    return recorder  # type: ignore[no-any-return]


def test_what_happens_when(make: Make, tmp_path: Path) -> None:
    loop, policy = make()
    logged = run(loop).logged
    assert list(logged) == [
        (0, "validation"),
        (1, "train"),
        (2, "train"),
        (2, "validation"),
        (3, "train"),
        (4, "train"),
        (4, "validation"),
        (5, "train"),
        (6, "train"),
        (6, "validation"),
    ]
    assert policy.num_prompts == [4, 4, 2, 12, 12, 4, 4, 2, 12, 12, 4, 4, 2, 12, 12, 4, 4, 2]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_3", "step_6"}
    assert loop.validation["first"] == logged[0, "validation"]["accuracy"]
    assert loop.validation["last"] == logged[6, "validation"]["accuracy"]
    assert loop.validation["first"] != loop.validation["last"]
    assert [logged[step, "train"]["offloaded_bytes"] for step in range(1, 7)] == [1000] * 6
    assert policy.num_reference_calls == 0


def test_experts_that_generation_has_not_said_are_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of six responses comes without any, and is as long as the others; no last token has one."""
    responses = [Response([100, 101, END_ID], [-0.1] * 3, True) for _ in range(12)]
    monkeypatch.setattr(FakePolicy, "generate", lambda _, prompts, *__, **___: responses[: len(prompts)])
    on = "policy.router_replay.enabled=true"
    loop, _ = make(on)
    with pytest.raises(WorkerError, match="the experts of no response"):
        loop.train_step()
    loop, policy = make(on)
    with_routes = iter([None, *[np.zeros((99, 1, 2), np.int8)] * 5] * 2)
    said = Rollout.batch

    def batch(self: Rollout, pad_id: int) -> Any:
        pairs = zip(self.prompts, self.responses, with_routes, strict=True)
        routed = [
            replace(each, routed_experts=None if routes is None else routes[: len(prompt.token_ids) + 2])
            for prompt, each, routes in pairs
        ]
        return said(replace(self, responses=routed), pad_id)

    monkeypatch.setattr(Rollout, "batch", batch)
    metrics = loop.train_step()
    (trained,) = policy.batches
    expected = trained["input_lengths"] - 1
    missing = expected[[0, 6]].sum() / expected.sum()
    assert metrics["routed_experts_fallback_token_route_fraction"] == pytest.approx(float(missing))
    assert trained[ROUTED_EXPERTS].shape == (*trained["input_ids"].shape, 1, 2)


@pytest.mark.parametrize(
    ("overrides", "validations", "checkpoints"),
    [
        (["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"], [], [3, 6]),
        (["grpo.val_period=0", "grpo.val_at_start=false", "checkpointing.save_period=4"], [6], [4, 6]),
        (["grpo.val_period=4", "grpo.val_at_end=false", "checkpointing.enabled=false"], [0, 4], []),
    ],
)
def test_periods(
    overrides: list[str], validations: list[int], checkpoints: list[int], make: Make, tmp_path: Path
) -> None:
    loop, _ = make(*overrides)
    logged = run(loop).logged
    assert [step for step, prefix in logged if prefix == "validation"] == validations
    saved = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("checkpoints/*"))
    assert saved == checkpoints
    if not validations:
        assert loop.validation == {"first": None, "last": None}


@pytest.mark.parametrize(
    ("finished", "num_turns", "why"),
    [
        (True, 1, "is the reward never given?"),
        (False, 2, "is the reward never given?"),
        (False, 1, "None of them ended within .*max_new_tokens"),
    ],
)
def test_a_run_that_begins_with_steps_that_teach_nothing_says_so_once(
    finished: bool, num_turns: int, why: str, make: Make
) -> None:
    """What was cut off in a second turn was scored in its first."""
    loop, _ = make("grpo.max_num_steps=6")
    told = []
    for step in range(1, 5):
        loop.step = step
        loop._watch_advantages(torch.zeros(2, 3), played(finished and step == 2, num_turns))
        told += loop._notes
        loop._notes.clear()
    (text,) = told
    assert re.match(f"in each of the first 3 steps all .*{why}", text)


def test_one_of_which_a_step_taught_something_does_not(make: Make) -> None:
    loop, _ = make("grpo.max_num_steps=6")
    for step, advantage in enumerate((0.0, 0.5, 0.0, 0.0), 1):
        loop.step = step
        loop._watch_advantages(torch.full((2, 3), advantage), played(finished=True))
    assert loop._notes == []


def played(finished: bool, num_turns: int = 1) -> Rollout:
    last = Response([1], [-0.1], finished, num_turns=num_turns)
    return Rollout([], [Response([1], [-0.1], False), last], [])


def test_training_batch(make: Make, tokenizer: Any) -> None:
    loop, policy = make("loss_fn.reference_policy_kl_penalty=0.1", "grpo.normalize_rewards=false")
    metrics = loop.train_step()
    (batch,) = policy.batches
    assert policy.num_reference_calls == 1
    assert batch["reference_policy_logprobs"].shape == batch["input_ids"].shape
    prompts = [tokenizer.decode(batch["input_ids"][row][batch["token_mask"][row] == 0]) for row in rows(batch)]
    questions = [text.split("\n")[0] for text in prompts]
    assert [questions.count(question) for question in dict.fromkeys(questions)] == [4, 4, 4]
    rewards = torch.zeros(12)
    for row in rows(batch):
        length = int(batch["input_lengths"][row])
        response = batch["token_mask"][row].nonzero().flatten().tolist()
        assert response == list(range(length - len(response), length))
        advantages = batch["advantages"][row]
        assert torch.equal(advantages != 0, (batch["token_mask"][row] == 1) & (advantages.abs().max() > 0))
        rewards[row] = advantages.sum() / max(len(response), 1)
    assert (rewards != 0).any()
    # Leave-one-out: deviations from the mean of the others add up to zero within a group.
    assert rewards.view(3, 4).sum(1).abs().max() < 1e-6
    assert metrics["num_tokens"] == batch["input_lengths"].sum()
    assert metrics["token_mult_prob_error"] == pytest.approx(1)
    assert metrics["advantages_zero_fraction"] == pytest.approx(float((rewards == 0).float().mean()))
    counted = valid_tokens(batch)
    assert torch.equal(batch["generation_logprobs"][counted], batch["prev_logprobs"][counted])


@pytest.mark.parametrize(("backend", "cause"), [("vllm", "kv_cache_dtype"), ("megatron", "dropout")])
def test_generation_that_disagrees_with_training_is_warned_of_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, backend: str, cause: str
) -> None:
    loop, policy = make(f"policy.generation.backend={backend}")
    get_logprobs, bound = policy.get_logprobs, DISAGREEMENT["float32"]
    before = set(loop.notices())
    for error, expected in ((bound - 1e-4, 0), (bound + 1e-3, 1), (bound + 1e-3, 0)):
        away = math.log(error)
        monkeypatch.setattr(policy, "get_logprobs", lambda batch, away=away: get_logprobs(batch) - away)
        loop.train_step()
        said = [text for text in loop.notices() if text not in before]
        assert len(said) == expected
        assert all("token_mult_prob_error" in text and cause in text for text in said)


def test_validation_does_not_touch_training(make: Make, tmp_path: Path) -> None:
    """Neither its prompts nor its random numbers: training is the same with and without validation."""
    with_validation, policy = make("grpo.val_period=1", run_dir=tmp_path / "a")
    run(with_validation)
    without, other = make(
        "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", run_dir=tmp_path / "b"
    )
    run(without)
    assert len(policy.batches) == len(other.batches) == 6
    for batch, expected in zip(policy.batches, other.batches, strict=True):
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[key], expected[key]) for key in batch)
    trained = set(other.seeds)
    assert len(trained) == 6
    validated = [seed for seed in policy.seeds if seed not in trained]
    assert len(validated) == 7 * 3  # seven validations in three parts each
    assert validated == validated[:3] * 7


def test_seed(make: Make, tmp_path: Path) -> None:
    first, second, third = (
        make(f"grpo.seed={seed}", run_dir=tmp_path / str(index)) for index, seed in enumerate((1, 1, 2))
    )
    logged = [run(loop).logged for loop, _ in (first, second, third)]
    assert logged[0] == logged[1] != logged[2]
    assert set(first[1].seeds) == set(second[1].seeds)
    assert not set(first[1].seeds) & set(third[1].seeds)


@pytest.mark.parametrize("stop", [3, 4, 5, 6])
def test_resuming_gives_the_same_run(stop: int, make: Make, tmp_path: Path) -> None:
    whole, policy = make(run_dir=tmp_path / "whole")
    expected = run(whole)

    stopped, _ = make(run_dir=tmp_path / "run")
    recorder: Any = Recorder()
    original = recorder.log

    def log(metrics: dict[str, float], step: int, prefix: str) -> None:
        original(metrics, step, prefix)
        if (step, prefix) == (stop, "train"):
            raise KeyboardInterrupt

    recorder.log = log
    with pytest.raises(KeyboardInterrupt):
        stopped.run(recorder, recorder, Termination(0))

    resumed, resumed_policy = make(run_dir=tmp_path / "run")
    folder = resumed.resume()
    assert folder == (tmp_path / "run/checkpoints/step_3" if stop > 3 else None)
    logged = run(resumed).logged
    assert {**recorder.logged, **logged} == expected.logged
    assert (resumed.step, resumed.validation, resumed.train_metrics["loss"]) == (
        whole.step,
        whole.validation,
        whole.train_metrics["loss"],
    )
    assert resumed_policy.weight == policy.weight == 6
    states = [
        json.loads((tmp_path / name / "checkpoints/step_6/training_info.json").read_text()) for name in ("whole", "run")
    ]
    assert states[0]["data"] == states[1]["data"]
    assert states[0]["validation"] == states[1]["validation"]


def test_a_finished_run_resumes_to_nothing(make: Make) -> None:
    loop, _ = make()
    run(loop)
    again, policy = make()
    assert again.resume() is not None
    assert run(again).logged == {}
    assert (again.step, again.validation, policy.batches) == (6, loop.validation, [])
    assert again.train_metrics["loss"] == loop.train_metrics["loss"]


@pytest.mark.parametrize(
    ("metric", "prefix", "name"),
    [
        ("val:accuracy", "validation", "accuracy"),
        ("train:loss", "train", "loss"),
        ("val:reward", "validation", "reward"),
    ],
)
def test_checkpoints_note_their_metric(metric: str, prefix: str, name: str, make: Make, tmp_path: Path) -> None:
    loop, _ = make(f"checkpointing.metric_name={metric}", "grpo.val_period=3")
    logged = run(loop).logged
    for step in (3, 6):
        state = json.loads((tmp_path / f"checkpoints/step_{step}/training_info.json").read_text())
        assert state["metric"] == logged[step, prefix][name]


def test_without_validation_a_checkpoint_has_no_metric(make: Make, tmp_path: Path) -> None:
    loop, _ = make("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
    run(loop)
    state = json.loads((tmp_path / "checkpoints/step_6/training_info.json").read_text())
    assert state["metric"] is None


def test_what_scorers_fail_on_is_told_with_the_workers_warnings(make: Make, tmp_path: Path) -> None:
    loop, policy = make()
    environment: Any = loop._environment
    policy.texts, environment.texts = ["no room"], ["late"]
    step = environment.step

    def fail_at_last(episodes: Any) -> Any:
        if loop.step == 6 and len(episodes) < 12:  # of the validation
            environment.texts = ["late at last"]
        return step(episodes)

    environment.step = fail_at_last
    assert run(loop).notes == ["warning: no room", "warning: late", "warning: late at last"]
    assert (tmp_path / "warnings.log").read_text().count("\n") == 3


def test_validation_samples_by_its_own_keys(make: Make) -> None:
    keys = ("temperature=0.7", "top_k=5", "val_temperature=0", "val_top_p=0.5", "stop_strings=[a]")
    loop, policy = make("grpo.max_num_steps=1", "grpo.val_at_start=true", *(f"policy.generation.{key}" for key in keys))
    run(loop)
    drawn = [(each.temperature, each.top_p, each.top_k, each.stop_strings) for each in policy.samplings]
    assert drawn[0] == (0, 0.5, 5, ("a",)), "validation comes first"
    assert (0.7, 1.0, 5, ("a",)) in drawn
    assert len(set(drawn)) == 2
    assert all(each.tokenizer is not None and each.tokenizer.is_absolute() for each in policy.samplings)


def test_validation_samples_as_training_by_default(make: Make) -> None:
    keys = ("temperature=0.7", "top_p=0.9", "top_k=5")
    loop, policy = make("grpo.max_num_steps=1", *(f"policy.generation.{key}" for key in keys))
    run(loop)
    assert len(policy.samplings) > 1
    assert set(policy.samplings) == {Sampling(8, 0.7, 0.9, 5)}


def test_progress_of_each_call_for_responses_is_shown(make: Make) -> None:
    loop, policy = make()
    assert run(loop).progress == [(size // 2, size, 3 * size) for size in policy.num_prompts]


def test_advantages_are_cut(make: Make, tmp_path: Path) -> None:
    loop, policy = make("grpo.advantage_clip_low=-0.25", "grpo.advantage_clip_high=0.5")
    whole, untouched = make(run_dir=tmp_path / "whole")
    loop.train_step()
    whole.train_step()
    batch, uncut = policy.batches[0], untouched.batches[0]["advantages"]
    assert uncut.min() < -0.25
    assert uncut.max() > 0.5
    assert torch.equal(batch["advantages"], uncut.clamp(-0.25, 0.5))


def test_responses_that_the_engines_disagree_on_are_not_learned(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, policy = make("grpo.seq_logprob_error_threshold=1.2")
    get_logprobs = policy.get_logprobs

    def away_in_two_rows(batch: Any) -> torch.Tensor:
        logprobs = get_logprobs(batch)
        logprobs[3] -= math.log(1.3)
        logprobs[7] += math.log(1.25)
        logprobs[8] -= math.log(1.1)
        return logprobs

    monkeypatch.setattr(policy, "get_logprobs", away_in_two_rows)
    metrics = loop.train_step()
    assert policy.batches[0]["sample_mask"].tolist() == [float(row not in (3, 7)) for row in range(12)]
    assert metrics["masked_by_logprob_error_fraction"] == pytest.approx(2 / 12)
    assert metrics["token_mult_prob_error"] > 1, "of all responses"


def test_scaled_rewards_are_compared(make: Make, tmp_path: Path) -> None:
    """Mapping 0..1 to -1..3 makes differences four times as large; what is reported stays as it was given."""
    scaling = [f"grpo.reward_scaling.{key}" for key in ("enabled=true", "target_min=-1.0", "target_max=3.0")]
    (loop, policy), (plain, unscaled) = (
        make(*overrides, "grpo.normalize_rewards=false", run_dir=tmp_path / str(len(overrides)))
        for overrides in (scaling, [])
    )
    metrics = loop.train_step()
    assert metrics["reward"] == plain.train_step()["reward"]
    torch.testing.assert_close(policy.batches[0]["advantages"], 4 * unscaled.batches[0]["advantages"])


@pytest.mark.parametrize("in_reward", [False, True])
def test_reinforce_plus_plus(make: Make, tmp_path: Path, in_reward: bool) -> None:
    """Rewards less their group's mean, less the divergence, are normalized over all tokens."""
    loop, policy = make(
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "loss_fn.reference_policy_kl_penalty=0.5",
        "loss_fn.reference_policy_kl_type=k2",
        f"loss_fn.use_kl_in_reward={in_reward}",
    )
    whole, _ = make(run_dir=tmp_path / "whole")
    loop.train_step()
    (batch,) = policy.batches
    rewards = whole._sample(_Untimed())[0].rewards.view(3, 4)  # type: ignore[arg-type]
    centered = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    tokens = [(row, t) for row in rows(batch) for t in batch["token_mask"][row].nonzero().flatten().tolist()]
    values = []
    for row, t in tokens:
        gap = (batch["prev_logprobs"] - batch["reference_policy_logprobs"])[row, t].item()
        values.append(centered[row].item() - (0.5 * gap**2 / 2 if in_reward else 0))
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    for (row, t), value in zip(tokens, values, strict=True):
        assert batch["advantages"][row, t].item() == pytest.approx((value - mean) / deviation, abs=1e-5)
    assert (batch["advantages"][batch["token_mask"] == 0] == 0).all()


def test_a_divergence_of_no_weight_needs_no_reference(make: Make) -> None:
    loop, policy = make(
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "loss_fn.reference_policy_kl_penalty=0.0",
        "loss_fn.use_kl_in_reward=true",
    )
    loop.train_step()
    assert policy.num_reference_calls == 0
    assert policy.batches[0]["advantages"].abs().max() > 0


def test_a_step_whose_responses_are_all_filtered_says_nothing_of_engines(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, policy = make("grpo.overlong_filtering=true")
    generate = policy.generate
    cut = lambda *given: [replace(response, finished=False) for response in generate(*given)]  # noqa: E731
    monkeypatch.setattr(policy, "generate", cut)
    before = set(loop.notices())
    metrics = loop.train_step()
    assert not policy.batches[0]["sample_mask"].any()
    assert metrics["token_mult_prob_error"] == 1
    assert set(loop.notices()) <= before


class _Untimed:
    def time(self, _phase: str, work: Callable[[], Any]) -> Any:
        return work()


def test_several_responses_in_validation(make: Make) -> None:
    loop, policy = make("grpo.val_num_generations_per_prompt=3")
    metrics = loop.measure()
    assert policy.num_prompts == [12, 12, 6]
    assert metrics["accuracy"] <= metrics["pass_k"] <= 3 * metrics["accuracy"]


@pytest.mark.parametrize(("bound", "last_step"), [(0.0, 0), (1.5, 6)])
def test_a_run_ends_when_validation_is_good_enough(make: Make, tmp_path: Path, bound: float, last_step: int) -> None:
    goal = ("grpo.stop_at_validation_metric=accuracy", f"grpo.stop_at_validation_threshold={bound}")
    loop, _ = make(*goal)
    run(loop)
    assert loop.step == last_step


def test_a_run_that_has_reached_its_goal_saves_and_does_not_go_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPO, "measure", lambda loop: {"accuracy": loop.step / 6})
    goal = ("grpo.stop_at_validation_metric=accuracy", "grpo.stop_at_validation_threshold=0.5")
    loop, _ = make(*goal)
    run(loop)
    assert loop.step == 4, "validated at 2 and at 4"
    assert (tmp_path / "checkpoints" / "step_4").is_dir()
    again, policy = make(*goal)
    again.resume()
    run(again)
    assert (again.step, policy.batches) == (4, [])


@pytest.mark.parametrize(("must_save_by", "last_step"), [("00:00:00:00", 1), ("99:00:00:00", 6)])
def test_a_run_ends_by_the_clock(make: Make, tmp_path: Path, must_save_by: str, last_step: int) -> None:
    loop, _ = make(f"checkpointing.checkpoint_must_save_by='{must_save_by}'")
    if last_step == 1:
        with pytest.raises(SystemExit):
            run(loop)
    else:
        run(loop)
    assert loop.step == last_step
    assert (tmp_path / "checkpoints" / f"step_{last_step}").is_dir()
