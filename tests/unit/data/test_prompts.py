"""Training and validation never share a question; the training order is reproducible and resumable."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.config.schema import DataConfig, ReasoningGymConfig, TrainingDataConfig, ValidationDataConfig
from nemo_rl_offload.config.types import defaults_of
from nemo_rl_offload.data.prompts import Prompt, PromptEncoder, TrainingPrompts, prompt_sets
from nemo_rl_offload.data.reasoning_gym import Problem, ReasoningGymProblems
from nemo_rl_offload.data.tokenizer import load_tokenizer, make_byte_tokenizer
from nemo_rl_offload.errors import DataError

TASK: ReasoningGymConfig = {
    "task": "spell_backward",
    "params": {"min_word_len": 3, "max_word_len": 4},
    "num_workers": 1,
    "binary_reward": True,
    "correct_threshold": 0.999,
}


def data_config(**changes: Any) -> DataConfig:
    config = defaults_of(DataConfig) | {
        "env_name": "reasoning_gym",
        "on_bad_line": "error",
        "shuffle": True,
        "max_input_seq_length": 80,
        "prompt_template": "{question}\n",
        "train": defaults_of(TrainingDataConfig) | {"seed": 10_000_030, "size": 400},  # overlaps validation
        "validation": defaults_of(ValidationDataConfig)
        | {"seed": 10_000_000, "size": 60, "exclude": [{"seed": 0, "size": 300}]},
    }
    return config | changes  # type: ignore[return-value]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("bytes")
    make_byte_tokenizer(folder)
    return load_tokenizer(folder)


def asked(prompts: list[Prompt]) -> list[str]:
    return [prompt.problem.question for prompt in prompts]


def all_questions(seed: int, size: int) -> list[str]:
    return [p.question for p in ReasoningGymProblems(TASK["task"], TASK["params"], seed, size)]


def test_validation_is_distinct_outside_the_excluded_ranges_and_outside_training(tokenizer: Any) -> None:
    train, validation = prompt_sets(data_config(), TASK, tokenizer, seed=1)
    held_out = set(asked(validation))
    assert len(validation) == len(held_out) == 60
    supervised, raw_training = set(all_questions(0, 300)), all_questions(10_000_030, 400)
    assert held_out.isdisjoint(supervised)
    expected = [question for question in raw_training if question not in held_out]
    assert len(expected) < len(raw_training), "the raw sets must overlap, else this shows nothing"
    assert Counter(asked(train.next_batch(len(expected)))) == Counter(expected)
    raw_validation = all_questions(10_000_000, 200)
    chosen = [q for q in dict.fromkeys(raw_validation) if q not in supervised]
    assert asked(validation) == chosen[:60]
    assert tokenizer.decode(validation[0].token_ids) == validation[0].problem.question + "\n"


def test_every_epoch_is_a_new_order_of_the_same_problems(tokenizer: Any) -> None:
    train, _ = prompt_sets(data_config(), TASK, tokenizer, seed=1)
    size = len(set(all_questions(10_000_030, 400)))
    assert size > 100
    state_size = 0
    epochs: list[list[str]] = [[]]
    while train.state_dict()["epoch"] < 2:
        question = asked(train.next_batch(1))[0]
        epoch = train.state_dict()["epoch"]
        if epoch == len(epochs):
            epochs.append([])
        epochs[epoch].append(question)
        state_size = max(state_size, len(train.state_dict()))
    assert state_size == 2
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]
    plain, _ = prompt_sets(data_config(shuffle=False), TASK, tokenizer, seed=1)
    in_order = [q for q in all_questions(10_000_030, 400) if q in set(epochs[0])]
    assert asked(plain.next_batch(len(epochs[0]))) == in_order


class OneUsable(PromptEncoder):
    """Refuses every problem but those that are listed."""

    def __init__(self, usable: set[str]) -> None:
        self.usable = usable
        self.num_too_long = 0

    def __call__(self, problem: Problem) -> Prompt | None:
        return Prompt(problem, [1]) if problem.question in self.usable else None


@pytest.mark.slow
@given(seed=st.integers(0, 5000), skip=st.integers(0, 40), take=st.integers(1, 30), size=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_resuming_continues_where_the_stream_was_left(seed: int, skip: int, take: int, size: int) -> None:
    """Also with a single usable problem, wherever the two orders of neighboring epochs put it."""
    problems = ReasoningGymProblems(TASK["task"], TASK["params"], 0, size)

    def stream(seed: int) -> TrainingPrompts:
        encoder = OneUsable({problems[size // 2].question, problems[0].question})
        return TrainingPrompts(problems, encoder, frozenset({problems[0].question}), shuffle=True, seed=seed)

    if problems[size // 2].question == problems[0].question:
        with pytest.raises(DataError, match="none of"):
            stream(seed).next_batch(1)
        return
    first, second = stream(seed), stream(seed)
    first.next_batch(skip)
    second.load_state_dict(first.state_dict())
    assert asked(first.next_batch(take)) == asked(second.next_batch(take)) == [problems[size // 2].question] * take
    assert first.state_dict() == second.state_dict()


def test_the_order_depends_on_the_seed(tokenizer: Any) -> None:
    orders = [asked(prompt_sets(data_config(), TASK, tokenizer, seed)[0].next_batch(50)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_prompts_that_are_too_long_are_dropped_counted_and_warned_about_once(tokenizer: Any) -> None:
    longest = len("Spell this word backward (example: sun -> nus): abc\n")
    encoder = PromptEncoder(tokenizer, "{question}\n", longest)
    problems = ReasoningGymProblems(TASK["task"], TASK["params"], 0, 100)
    with pytest.warns(UserWarning, match=f"{longest} tokens") as caught:
        prompts = [encoder(problem) for problem in problems]
    assert len(caught) == 1
    assert encoder.num_too_long == prompts.count(None)
    lengths = [len(problem.question) + 1 for problem in problems]
    assert [prompt is None for prompt in prompts] == [length > longest for length in lengths]
    assert 0 < encoder.num_too_long < 100


@pytest.mark.filterwarnings("ignore:Dropping prompts")
@pytest.mark.parametrize(
    ("longest", "held", "why"),
    [
        (200, 10, "10 are validation problems. Give further problems."),
        (3, 0, "10 have more tokens than data.max_input_seq_length, .* or raise these."),
        (3, 4, "4 are validation problems, and 6 have more tokens than .* or raise these."),
    ],
)
def test_problems_none_of_which_is_usable_are_told_at_once(longest: int, held: int, why: str, tokenizer: Any) -> None:
    problems = list(ReasoningGymProblems(TASK["task"], TASK["params"], 0, 10))
    held_out = frozenset(problem.question for problem in problems[:held])
    encoder = PromptEncoder(tokenizer, "{question}\n", longest)
    stream = TrainingPrompts(problems, encoder, held_out, shuffle=True, seed=1)
    with pytest.raises(DataError, match=f"none of 10 problems is usable: {why}"):
        stream.check()


@pytest.mark.parametrize("seed", range(12))
def test_a_pass_is_complete_when_no_usable_problem_is_left_of_it(seed: int, tokenizer: Any) -> None:
    """Where the order ended with problems that are held out, a step of the next pass was needed to see it."""
    problems = list(
        {problem.question: problem for problem in ReasoningGymProblems(TASK["task"], TASK["params"], 0, 30)}.values()
    )[:10]
    held_out = frozenset(problem.question for problem in problems[:4])
    encoder = PromptEncoder(tokenizer, "{question}\n", 200)
    stream = TrainingPrompts(problems, encoder, held_out, shuffle=True, seed=seed)
    passes = []
    for _ in range(4):
        stream.next_batch(3)
        passes.append(stream.num_passes)
    assert passes == [0, 1, 1, 2]


def test_the_rest_of_a_pass_is_looked_at_once(tokenizer: Any) -> None:
    problems = list(ReasoningGymProblems(TASK["task"], TASK["params"], 0, 30))
    asked_of: list[Problem] = []

    def refuses_the_last(problem: Problem) -> Prompt | None:
        asked_of.append(problem)
        return None if problem in problems[5:] else Prompt(problem, [1])

    stream = TrainingPrompts(problems, refuses_the_last, frozenset(), shuffle=False, seed=1)
    stream.next_batch(5)
    assert [stream.num_passes for _ in range(3)] == [1, 1, 1]
    assert len(asked_of) == 30


@pytest.mark.parametrize(("seeds", "most"), [((1, 2), 20), ((1, 1), 20), ((1, 2), None)])
def test_draws_from_one_file_are_each_by_their_seed(
    seeds: tuple[int, int], most: int | None, tokenizer: Any, tmp_path: Path
) -> None:
    """Draws of equal size were taken for the same problems, so that none was left to train."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"problem": f"{n}?", "expected_answer": str(n)}) + "\n" for n in range(40)))
    read = {"path": str(file), "max_samples": most}
    train, validation = (
        defaults_of(section) | read | {"seed": seed}
        for section, seed in zip((TrainingDataConfig, ValidationDataConfig), seeds, strict=True)
    )
    config = data_config(env_name="math", train=train, validation=validation)
    if most is None or seeds[0] == seeds[1]:
        with pytest.raises(DataError, match="problems is usable: "):
            prompt_sets(config, TASK, tokenizer, seed=1)[0].check()
    else:
        stream, held = prompt_sets(config, TASK, tokenizer, seed=1)
        assert len(held) == stream.num_problems == 20
        assert not set(asked(stream.next_batch(5))) & set(asked(held))


def test_a_check_takes_no_prompt(tokenizer: Any) -> None:
    first, second = (prompt_sets(data_config(), TASK, tokenizer, 1)[0] for _ in range(2))
    first.check()
    assert asked(first.next_batch(5)) == asked(second.next_batch(5))


@pytest.mark.filterwarnings("ignore:Dropping prompts")
def test_sets_that_cannot_be_filled_say_what_was_found(tokenizer: Any) -> None:
    validation = {"seed": 10_000_000, "size": 1500, "exclude": []}
    short: ReasoningGymConfig = {**TASK, "params": {"min_word_len": 3, "max_word_len": 3}}
    with pytest.raises(DataError, match=r"only \d+ of 1500 distinct problems of task 'spell_backward'"):
        prompt_sets(data_config(validation=validation), short, tokenizer, seed=1)
    with pytest.raises(DataError, match=r"only 0 of 60 .* more tokens than data\.max_input_.* raise these"):
        prompt_sets(data_config(max_input_seq_length=10), TASK, tokenizer, seed=1)
