"""What the model said: kept once for each step, whatever becomes of the run, and shown so that it can do no harm."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fakes import END_ID, FakeEnvironment, FakePolicy, Recorder
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_offload.algorithms.grpo import GRPO
from nemo_rl_offload.algorithms.samples import spread
from nemo_rl_offload.cluster.signals import Termination
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.observability.sample_text import outcome, sample_lines, visible
from nemo_rl_offload.runs.run_files import SampleRecord
from nemo_rl_offload.runs.samples import LONGEST_TEXT, SampleLog, shortened

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
    "logger.num_samples_to_keep=5",
    "logger.sample_period=3",
)
SAMPLE: SampleRecord = {
    "step": 4,
    "prefix": "validation",
    "prompt": "2+2?\n",
    "response": "4<|im_end|>",
    "reward": 1.0,
    "truncated": False,
    "num_tokens": 2,
    "num_turns": 1,
}


class Asks(FakeEnvironment):
    """Goes on, once."""

    def step(self, episodes: Any) -> list[Score]:
        return [
            Score(1.0, False, False, "more?" if len(episode.messages) == 2 else None)
            for episode in map(Episode._make, episodes)
        ]


class AsksTwice(FakeEnvironment):
    """Goes on until a third turn, at length the second time."""

    def step(self, episodes: Any) -> list[Score]:
        asked = {2: "more?", 4: "more? " * 20}
        return [Score(1.0, False, False, asked.get(len(episode.messages))) for episode in map(Episode._make, episodes)]


def play(run_dir: Path, tokenizer: Any, *overrides: str, environment: Any = None) -> tuple[GRPO, Recorder]:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*SMALL, *overrides])
    prompts = prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, config["grpo"]["seed"])
    run_dir.mkdir(exist_ok=True)
    pool: Any = environment or FakeEnvironment()
    loop = GRPO(config, FakePolicy(), pool, tokenizer, {END_ID}, prompts, run_dir)
    recorder: Any = Recorder()
    loop.resume()
    loop.run(recorder, recorder, Termination(0))
    return loop, recorder


def kept(run_dir: Path) -> list[SampleRecord]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def test_samples_of_validations_and_of_every_third_step(tokenizer: Any, tmp_path: Path) -> None:
    _, recorder = play(tmp_path, tokenizer)
    samples = kept(tmp_path)
    steps = [(0, "validation"), (2, "validation"), (3, "train"), (4, "validation"), (6, "train"), (6, "validation")]
    assert [(each["step"], each["prefix"]) for each in samples] == [key for key in steps for _ in range(5)]
    validations = [[each["prompt"] for each in samples if (each["step"], each["prefix"]) == key] for key in steps]
    assert validations[0] == validations[1] == validations[3], "the same problems each time"
    assert len(set(validations[2])) == 3, "of all prompts of the step"
    for each in samples:
        said = [ord(letter) for letter in each["response"].replace(tokenizer.decode([END_ID]), "")]
        assert all(100 <= token < 120 for token in said)
        assert each["num_tokens"] == len(said) + (not each["truncated"])
        assert each["reward"] == (END_ID + sum(said)) % 4 / 3 * (not each["truncated"])
    shown = [line for line in recorder.shown if line.startswith("validation")]
    figures = [recorder.logged[step, "validation"] for step in (0, 2, 4, 6)]
    assert shown == [
        f"validation at step {step}  accuracy {each['accuracy']:.3g}  reward {each['reward']:.3g}"
        for step, each in zip((0, 2, 4, 6), figures, strict=True)
    ]
    assert recorder.shown.count("2 of 10 responses:") == 4
    rewards = [float(line.split()[1].strip(",")) for line in recorder.shown if line.startswith("  reward")]
    logged = recorder.logged[0, "validation"]
    assert rewards[0] <= logged["reward"] <= rewards[1], "the lowest and the highest"


@pytest.mark.parametrize("removed", [("step_6",), ("step_3", "step_6")])
def test_a_run_that_goes_on_has_each_step_once(removed: tuple[str, ...], tokenizer: Any, tmp_path: Path) -> None:
    play(tmp_path, tokenizer)
    path = tmp_path / "samples.jsonl"
    whole = path.read_text()
    for name in removed:
        shutil.rmtree(tmp_path / "checkpoints" / name)
    with path.open("a") as file:
        file.write('{"step": 3, "prefix": "tr')
    play(tmp_path, tokenizer)
    assert path.read_text() == whole
    play(tmp_path, tokenizer)
    assert path.read_text() == whole, "nothing is left to do"


@pytest.mark.parametrize(
    ("overrides", "prefixes", "shown"),
    [
        (("num_samples_to_keep=0",), set(), True),
        (("sample_period=0", "num_val_samples_to_print=0"), {"validation"}, False),
        (("sample_period=100",), {"validation"}, True),
    ],
)
def test_what_is_not_asked_for_is_not_kept(
    overrides: tuple[str, ...], prefixes: set[str], shown: bool, tokenizer: Any, tmp_path: Path
) -> None:
    _, recorder = play(tmp_path, tokenizer, *(f"logger.{each}" for each in overrides))
    found = kept(tmp_path) if (tmp_path / "samples.jsonl").exists() else []
    assert {each["prefix"] for each in found} == prefixes
    assert any("responses" in line for line in recorder.shown) == shown


def test_what_was_said_between_turns_is_in_the_response(tokenizer: Any, tmp_path: Path) -> None:
    play(tmp_path, tokenizer, "grpo.max_num_steps=1", "grpo.max_rollout_turns=3", environment=Asks())
    samples = [each for each in kept(tmp_path) if each["num_turns"] == 2]
    assert samples
    assert all("more?" in each["response"] for each in samples)
    assert all(each["num_tokens"] < len(each["response"]) - len("more?") + 10 for each in samples)
    assert "2 turns" in outcome(samples[0])


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_file_that_cannot_be_written_ends_no_run(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text(json.dumps(SAMPLE | {"step": 9}) + "\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if kind == "link":
        (run_dir / "samples.jsonl").symlink_to(private)
    else:
        (run_dir / "samples.jsonl").mkdir()
    before = private.read_text()
    loop, recorder = play(run_dir, tokenizer)
    assert loop.step == 6
    told = [note for note in recorder.notes if "samples.jsonl" in note]
    assert len(told) == 2, "of the old lines, and of the new ones once"
    assert private.read_text() == before


def test_others_lines_stay_and_the_end_that_a_kill_cut_off_goes(tmp_path: Path) -> None:
    lines = [json.dumps(SAMPLE | {"step": step}) for step in (1, 2, 3)]
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join([lines[0], "cut", "[1]", '{"step": "x"}', lines[1], lines[2], lines[1][:20]]))
    assert SampleLog(tmp_path).forget_after(2) == []
    assert path.read_text() == "\n".join([lines[0], "[1]", '{"step": "x"}', lines[1], ""])
    assert SampleLog(tmp_path).forget_after(None) == []
    assert path.read_text() == ""
    path.unlink()
    assert SampleLog(tmp_path).forget_after(None) == []
    assert not path.exists()


HOSTILE = [
    "\x1b[2J\x1b]0;title\x07",
    "done\rreward 1",
    "a\nb\tc",
    "\u202egnp.exe",
    "\x9b31m",
    "null\x00",
    "\u2028\u2029\u0085",
    "</pre><script>alert(1)</script>",
    "日本語 größer 🙂",
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_kept_as_it_is_and_shown_without_harm(text: str, tmp_path: Path) -> None:
    record: SampleRecord = {**SAMPLE, "prompt": text, "response": text}
    SampleLog(tmp_path).append([record])
    (line,) = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert line.isprintable()
    assert json.loads(line) == record
    assert ("größer" in line) == ("größer" in text), "as people read it"
    shown = list(sample_lines([record], 1))
    assert len(shown) == 4
    assert all(part.isprintable() for part in shown)
    assert "[red]" in visible("[red]")


@pytest.mark.slow
@given(st.text())
def test_visible_text_prints_and_what_prints_stays(text: str) -> None:
    seen = visible(text)
    assert all(letter.isprintable() or letter.isspace() for letter in seen)
    assert not set(seen) & set("\x1b\r\n\t\x9b\u2028\u2029\u202e")
    if text.isprintable():
        assert seen == text
    assert len(seen.encode()) >= len(text), "no half of a character"


@given(st.text(), st.integers(1, 30))
def test_a_text_is_shortened_in_its_middle(text: str, size: int) -> None:
    short = shortened(text, size)
    if len(text) <= size:
        assert short == text
        return
    begin, _, rest = short.partition(" [... ")
    number, _, end = rest.partition(" characters ...] ")
    assert text.startswith(begin)
    assert len(begin) + len(end) + int(number) == len(text)
    assert text.endswith(end)


def test_lines_are_bounded(tmp_path: Path) -> None:
    record: SampleRecord = {**SAMPLE, "prompt": "日" * 10 * LONGEST_TEXT, "response": "r" * 10 * LONGEST_TEXT}
    SampleLog(tmp_path).append([record])
    assert (tmp_path / "samples.jsonl").stat().st_size < 5 * LONGEST_TEXT
    assert all(len(line) < 500 for line in sample_lines([record], 1))


@given(st.integers(0, 40), st.integers(0, 40))
def test_rows_are_spread_from_the_first_to_the_last(size: int, count: int) -> None:
    rows = spread(size, count)
    assert len(rows) == len(set(rows)) == min(size, count)
    assert rows == sorted(rows)
    assert set(rows) <= set(range(size))
    if count > 1 and size > 1:
        assert (rows[0], rows[-1]) == (0, size - 1)


class Grades(FakeEnvironment):
    """Rewards between 0 and 1, of which each above 0 counts as right, as of a function that returns numbers."""

    def __init__(self, *rewards: float) -> None:
        self._rewards = rewards

    def step(self, episodes: Any) -> list[Score]:
        given = [self._rewards[number % len(self._rewards)] for number in range(len(episodes))]
        return [Score(reward, reward > 0, False) for reward in given]


@pytest.mark.parametrize(
    ("rewards", "metric"), [((0.25, 0.5), "reward"), ((0.0, -1.0), "reward"), ((0.0, 1.0), "accuracy")]
)
def test_graded_rewards_are_what_a_run_is_judged_by(
    rewards: tuple[float, ...], metric: str, tokenizer: Any, tmp_path: Path
) -> None:
    loop, recorder = play(tmp_path, tokenizer, environment=Grades(*rewards))
    last = recorder.logged[6, "validation"]
    assert loop.summary()["validation_metric"] == metric
    assert loop.validation["last"] == last[metric]
    ranked = json.loads((tmp_path / "checkpoints/step_6/training_info.json").read_text())["metric"]
    assert ranked == last[metric]
    told = [note for note in recorder.notes if "some rewards are neither 0 nor 1" in note]
    assert len(told) == (metric == "reward"), "once"
    assert all("ranked by it, not by val:accuracy" in note for note in told)
    again, _ = play(tmp_path, tokenizer, "grpo.max_num_steps=7", "grpo.val_at_end=false", environment=Grades(*rewards))
    assert again.summary()["validation_metric"] == metric, "also of a run that went on without a validation"


def test_a_run_whose_grades_all_become_whole_is_still_judged_by_them(tokenizer: Any, tmp_path: Path) -> None:
    """Rewards of the resumed part are all 1, and its figures those of a run that never stopped."""
    first, _ = play(tmp_path, tokenizer, environment=Grades(0.25, 0.5))
    again, _ = play(tmp_path, tokenizer, "grpo.max_num_steps=7", environment=Grades(1.0))
    assert again.summary()["validation_metric"] == "reward"
    assert again.summary()["validation"] == {"first": first.validation["first"], "last": 1.0}


class GradesLater(Grades):
    """Right and wrong at first, grades from some call on."""

    def step(self, episodes: Any) -> list[Score]:
        scores = super().step(episodes)
        self._rewards = (0.25, 0.5)
        return scores


def test_grades_that_come_later_have_the_rewards_of_the_first_validation_beside_them(
    tokenizer: Any, tmp_path: Path
) -> None:
    loop, recorder = play(tmp_path, tokenizer, environment=GradesLater(0.0, 1.0, 1.0))
    first, last = (recorder.logged[step, "validation"] for step in (0, 6))
    assert loop.summary()["validation_metric"] == "reward"
    assert loop.validation == {"first": first["reward"], "last": last["reward"]}


@pytest.mark.parametrize(("metric_name", "key"), [("val:accuracy", "reward"), ("train:loss", None)])
def test_another_metric_stays_what_checkpoints_are_ranked_by(
    metric_name: str, key: str | None, tokenizer: Any, tmp_path: Path
) -> None:
    loop, recorder = play(
        tmp_path, tokenizer, f"checkpointing.metric_name={metric_name}", environment=Grades(0.25, 0.5)
    )
    assert loop.ranked_by() == ("val:reward" if key else metric_name)
    assert any("ranked by it" in note for note in recorder.notes) == (key is not None)


def test_right_and_wrong_beside_grades_stay_the_figure(tokenizer: Any, tmp_path: Path) -> None:
    """The stand-in's rewards are thirds, and right is 1 alone."""
    loop, recorder = play(tmp_path, tokenizer)
    assert loop.summary()["validation_metric"] == "accuracy"
    assert not any("neither 0 nor 1" in note for note in recorder.notes)


@pytest.mark.parametrize(("length", "num_turns", "missed"), [(64, 2, 2), (64, 3, 2), (180, 3, 3), (400, 3, None)])
def test_episodes_without_room_for_a_turn_are_told_once(
    length: int, num_turns: int, missed: int | None, tokenizer: Any, tmp_path: Path
) -> None:
    overrides = (f"policy.max_total_sequence_length={length}", "policy.generation.max_new_tokens=60")
    turns = f"grpo.max_rollout_turns={num_turns}"
    _, recorder = play(tmp_path, tokenizer, turns, *overrides, environment=AsksTwice())
    told = [note for note in recorder.notes if "grpo.max_rollout_turns: " in note]
    assert len(told) == (missed is not None)
    for note in told:
        assert re.search(rf"max_rollout_turns: {num_turns}, but none of \d+ episodes had room for turn {missed}:", note)
        assert f"max_new_tokens (60) of policy.max_total_sequence_length ({length})" in note


@pytest.mark.parametrize(("environment", "is_told"), [(Asks, True), (FakeEnvironment, False)])
def test_observations_that_nobody_hears_are_told_once(
    environment: type[FakeEnvironment], is_told: bool, tokenizer: Any, tmp_path: Path
) -> None:
    _, recorder = play(tmp_path, tokenizer, environment=environment())
    told = [note for note in recorder.notes if "grpo.max_rollout_turns: 1, so that no model hears" in note]
    assert len(told) == is_told
