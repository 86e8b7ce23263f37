"""Prompts for training, in a reproducible order that can be resumed, and held-out prompts for validation.

Which prompt comes when is a pure function of the seed and a position in the raw problem set: resuming needs
two integers. Problems are generated, and unusable ones skipped, on the way, because generating a whole
training set first would keep a run of a slow task waiting. The price: how many prompts an epoch holds is
known only at its end.
"""

import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from random import Random
from typing import Any

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.schema import DataConfig, MasterConfig, ReasoningGymConfig, ValidationDataConfig
from nemo_rl_offload.data.columns import read_text_file, text_around, training_records, validation_records
from nemo_rl_offload.data.gym_rows import read_rows
from nemo_rl_offload.data.problem_files import read_problems
from nemo_rl_offload.data.prompt_tokens import encode_prompt
from nemo_rl_offload.data.reasoning_gym import Problem, ReasoningGymProblems
from nemo_rl_offload.data.records import Record
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.errors import DataError, all_or_none

NUM_CANDIDATES_PER_VALIDATION_PROBLEM = 20
LIMITS = "data.max_input_seq_length, or policy.max_total_sequence_length less one"
"""Of a prompt's tokens."""


@dataclass(frozen=True)
class Prompt:
    """A problem and the token ids of its prompt."""

    problem: Problem
    token_ids: list[int]


class PromptEncoder:
    """Encodes problems; ``num_too_long`` counts those it refused."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        max_input_seq_length: int,
        *,
        around: str = "{}",
        system: str | None = None,
    ) -> None:
        """``around`` is the text of a user's turn, with the question at `{}`; ``system`` that of a turn before it."""
        self._tokenizer = tokenizer
        self._around, self._system = around, system
        self._template = template
        self._max_input_seq_length = max_input_seq_length
        self.num_too_long = 0

    def __call__(self, problem: Problem) -> Prompt | None:
        """Return the prompt; None, counted and warned about once, where it has too many tokens."""
        most = self._max_input_seq_length
        question = self._around.format(problem.question)
        token_ids = encode_prompt(self._tokenizer, self._template, question, most + 1, system=self._system)
        if len(token_ids) <= most:
            return Prompt(problem, token_ids)
        if not self.num_too_long:
            warnings.warn(
                f"Dropping prompts of over {most} tokens ({LIMITS}); the first has "
                f"{len(token_ids) if len(token_ids) > most + 1 else 'more'}.",
                stacklevel=2,
            )
        self.num_too_long += 1
        return None


class TrainingPrompts:
    """An endless stream of prompts whose questions are not ``held_out``; every epoch has its own order."""

    def __init__(
        self,
        problems: Sequence[Problem] | ReasoningGymProblems,
        encoder: Callable[[Problem], Prompt | None],
        held_out: frozenset[str],
        *,
        shuffle: bool,
        seed: int,
    ) -> None:
        self._problems = problems
        self._encoder = encoder
        self._held_out = held_out
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        self._looked_at: tuple[int, int] | None = None
        self._is_at_end = False

    def problems(self) -> Iterator[Problem]:
        """All, those that are held out too."""
        return (self._problems[place] for place in range(len(self._problems)))

    @property
    def num_problems(self) -> int:
        """Problems in an epoch, unusable ones included."""
        return len(self._problems)

    @property
    def num_passes(self) -> int:
        """Passes over all problems that are complete: no usable one is left of them."""
        if self._looked_at != (place := (self._epoch, self._position)):
            rest = (self._problems[self._order[each]] for each in range(self._position, len(self._order)))
            self._looked_at, self._is_at_end = place, not any(map(self._usable, rest))
        return self._epoch + self._is_at_end

    def next_batch(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts.

        Raises:
            DataError: a whole epoch went by without a usable problem.
        """
        return [self._next_prompt() for _ in range(num_prompts)]

    def state_dict(self) -> dict[str, int]:
        """Return the place in the stream, for ``load_state_dict`` of a stream with the same arguments."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _next_prompt(self) -> Prompt:
        for _ in range(2 * len(self._order)):  # from anywhere, this covers one whole epoch
            if self._position >= len(self._order):  # beyond, where the data became fewer
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
            problem = self._problems[self._order[self._position]]
            self._position += 1
            if prompt := self._usable(problem):
                return prompt
        num = len(self._order)
        num_held = sum(self._problems[place].question in self._held_out for place in range(num))
        why = [f"{num_held} are validation problems"] if num_held else []
        why += [f"{num - num_held} have more tokens than {LIMITS}"] if num > num_held else []
        raise DataError(
            f"data.train: none of {num} problems is usable: {', and '.join(why) or 'there is none'}. "
            "Give further problems" + (", or raise these." if num > num_held else ".")
        )

    def _usable(self, problem: Problem) -> Prompt | None:
        return None if problem.question in self._held_out else self._encoder(problem)

    def check(self) -> None:
        """Raise the DataError of `next_batch` before anything is asked for."""
        place = self._epoch, self._position, self._order
        self._next_prompt()
        self._epoch, self._position, self._order = place

    def _epoch_order(self) -> "array[int]":
        order = array("I", range(len(self._problems)))
        if self._shuffle:
            Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def prompt_data(config: MasterConfig) -> DataConfig:
    """The section `data`, with prompts that leave room for a response."""
    data, most = config["data"], config["policy"]["max_total_sequence_length"] - 1
    return {**data, "max_input_seq_length": min(data["max_input_seq_length"], most)}


def prompt_sets(
    data: DataConfig, task: ReasoningGymConfig, tokenizer: Tokenizer, seed: int
) -> tuple[TrainingPrompts, list[Prompt]]:
    """Build the training stream and the validation prompts; no question occurs in both.

    Problems come from the files of ``data``, where it names some, and else from reasoning-gym.

    Args:
        data: the section ``data``.
        task: the section ``env.reasoning_gym``.
        tokenizer: as ``load_tokenizer`` returns it.
        seed: of the training order.

    Raises:
        DataError: unknown task, refused parameters, too few validation problems, or files that cannot be used.
    """
    if ENVIRONMENTS[data["env_name"]].leads_episodes:
        return _episodes(data, seed)
    system = data["system_prompt_file"]
    encoder = PromptEncoder(
        tokenizer,
        data["prompt_template"],
        data["max_input_seq_length"],
        around=text_around(data["prompt_file"]),
        system=None if system is None else read_text_file("data.system_prompt_file", system),
    )
    problems: Sequence[Problem] | ReasoningGymProblems
    if data["train"]["path"] is None:
        validation = _validation_set(data["validation"], task, encoder)
        problems = problems_of(task, data["train"]["seed"], data["train"]["size"])
    else:
        held, problems = _from_files(data)
        validation = [prompt for problem in held if (prompt := encoder(problem))]
    held_out = frozenset(prompt.problem.question for prompt in validation)
    return TrainingPrompts(problems, encoder, held_out, shuffle=data["shuffle"], seed=seed), validation


def _episodes(data: DataConfig, seed: int) -> tuple[TrainingPrompts, list[Prompt]]:
    """Prompts whose tokens nobody knows before an agent asks for a response."""
    skips_bad = data["on_bad_line"] == "skip"

    def training() -> tuple[list[Problem], list[Problem]]:
        kept, drawn = training_records(data["train"], None)
        held = read_rows(drawn, name="data.train", skips_bad=skips_bad) if drawn else []
        return read_rows(kept, name="data.train", skips_bad=skips_bad), held

    def validation() -> list[Problem]:
        records = validation_records(data["validation"], None)
        return read_rows(records, name="data.validation", skips_bad=skips_bad) if records else []

    held, (problems, drawn) = all_or_none(validation, training)
    held_out = [Prompt(problem, []) for problem in (*drawn, *held)]
    as_it_is = partial(Prompt, token_ids=[])
    return TrainingPrompts(problems, as_it_is, frozenset(), shuffle=data["shuffle"], seed=seed), held_out


def _from_files(data: DataConfig) -> tuple[list[Problem], list[Problem]]:
    """Problems for validation and for training."""
    train: Mapping[str, Any] = data["train"]
    validation: Mapping[str, Any] = data["validation"]
    shared = validation.keys() & train.keys() - {"seed", "size", "further"}
    draws = bool(train["split_validation_size"] or train["further"])
    draws |= train["max_samples"] is not None and train["seed"] != validation["seed"]
    if not draws and all(train[key] == validation[key] for key in shared):
        return 2 * (_validation_problems(data),)  # as in an evaluation; faults are told once
    held, (problems, drawn) = all_or_none(partial(_validation_problems, data), partial(_training_problems, data))
    return [*drawn, *held], problems


def _training_problems(data: DataConfig) -> list[list[Problem]]:
    """Those of `data.train`, and of these the ones for validation."""
    return _problems("data.train", data, *training_records(data["train"], "answer"))


def _validation_problems(data: DataConfig) -> list[Problem]:
    if data["validation"]["path"] is None:
        return []
    return _problems("data.validation", data, validation_records(data["validation"], "answer"))[0]


def _problems(name: str, data: DataConfig, *parts: list[Record]) -> list[list[Problem]]:
    spec, skips_bad = ENVIRONMENTS[data["env_name"]], data["on_bad_line"] == "skip"
    return read_problems(
        *parts, name=name, needs_answer=spec.needs_answer, needs_tests=spec.needs_tests, skips_bad=skips_bad
    )


def problems_of(task: ReasoningGymConfig, seed: int, size: int) -> ReasoningGymProblems:
    """Return problems of the section ``env.reasoning_gym``; the errors of ``ReasoningGymProblems``."""
    assert task["task"] is not None, "checked with the configuration"
    return ReasoningGymProblems(task["task"], task["params"], seed, size)


def problem_sets(data: DataConfig, task: ReasoningGymConfig) -> tuple[list[Problem], list[Problem]]:
    """Return training and validation problems; no question occurs in both.

    Raises:
        DataError: as ``prompt_sets``.
    """
    validation: list[Problem] = _validation_set(data["validation"], task, lambda problem: problem)
    held_out = {problem.question for problem in validation}
    problems = problems_of(task, data["train"]["seed"], data["train"]["size"])
    return [problem for problem in problems if problem.question not in held_out], validation


def _validation_set[T](
    validation: ValidationDataConfig, task: ReasoningGymConfig, accept: Callable[[Problem], T | None]
) -> list[T]:
    """Take the first ``size`` distinct problems from ``seed`` on that no excluded range holds and ``accept`` takes."""
    size = validation["size"]
    num_candidates = size * NUM_CANDIDATES_PER_VALIDATION_PROBLEM
    excluded = chain.from_iterable(problems_of(task, **range_) for range_ in validation["exclude"])
    seen = {problem.question for problem in excluded}
    accepted: list[T] = []
    num_refused = 0
    for problem in _distinct(problems_of(task, validation["seed"], num_candidates), seen):
        item = accept(problem)
        if item is None:
            num_refused += 1
        else:
            accepted.append(item)
        if len(accepted) == size:
            return accepted
    raise DataError(
        f"data.validation: only {len(accepted)} of {size} distinct problems of task '{task['task']}' outside "
        f"data.validation.exclude among {num_candidates} candidates. "
        + (f"{num_refused} have more tokens than {LIMITS}: raise these, or give " if num_refused else "Give ")
        + "a smaller size, fewer excluded problems, or parameters of the task that allow more questions."
    )


def _distinct(problems: ReasoningGymProblems, seen: set[str]) -> Iterator[Problem]:
    for problem in problems:
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem
