"""Samples of fixed data: read, checked and encoded before training, then drawn in a reproducible order.

A sample is a tuple of rows: one for supervised data, chosen and rejected for preferences.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Literal

import torch

from nemo_rl_offload.batching.batch import Batch, pad_sequences
from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.schema import DataConfig, MasterConfig, PolicyConfig
from nemo_rl_offload.data.columns import text_around, training_records, validation_records
from nemo_rl_offload.data.forms import (
    REPEATS_PROMPT,
    BadRecordError,
    Message,
    UndecidedPairError,
    parse_conversation,
    parse_preference,
    parse_tools,
    repeats_prompt,
)
from nemo_rl_offload.data.prompts import problem_sets
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.records import Record, report_bad_records
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.data.turns import ChatEncoder, Row, TurnCounts
from nemo_rl_offload.errors import DataError, all_or_none

Sample = tuple[Row, ...]
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")


@dataclass
class DataCounts:
    """What happened to records on the way."""

    num_samples: int = 0
    num_truncated: int = 0
    """Samples cut to `policy.max_total_sequence_length`."""
    num_dropped: int = 0
    """Samples left out since they teach nothing: the sum of the next three."""
    num_too_long: int = 0
    """Samples of which truncation left nothing to learn, or two equal answers."""
    num_ties: int = 0
    """Pairs of which neither answer is rated higher."""
    num_identical: int = 0
    """Pairs of twice the same answer."""
    num_bad_records: int = 0
    """Records that could not be used (`data.on_bad_line: skip`)."""


def sample_sets(
    config: MasterConfig, tokenizer: Tokenizer, end_ids: Sequence[int], seed: int
) -> tuple["SampleStream", list[Sample], dict[str, DataCounts]]:
    """Build the training stream and the validation samples of ``sft`` and ``dpo``, with counts for both.

    ``tokenizer`` and ``end_ids`` are as ``load_policy_tokenizer`` returns them.

    Raises:
        DataError: data that cannot be read or used, or fewer samples than a global batch.
    """
    data, batch_size = config["data"], config["policy"]["train_global_batch_size"]
    reader = _Reader(config, tokenizer, end_ids)
    if data["train"]["path"] is None:
        train, validation = reader.problems(data, config)
    else:
        train, validation = reader.files(data)
    if len(train) < batch_size:
        raise DataError(
            f"data.train: {len(train)} samples do not fill a batch of policy.train_global_batch_size {batch_size}. "
            f"Lower it{_with_microbatch(len(train), config['policy'])}, or give more data."
        )
    known = set(map(_tokens, validation)).intersection(map(_tokens, train))
    if num_known := sum(_tokens(sample) in known for sample in validation):
        warnings.warn(
            f"data.validation: of its {len(validation)} samples, data.train has {num_known} too, so that it says less "
            "of what the model has not seen. data.train.split_validation_size holds records of a file back.",
            stacklevel=2,
        )
    stream = SampleStream(train, batch_size, shuffle=data["shuffle"], seed=seed)
    return stream, validation, reader.counts


def _tokens(sample: Sample) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row.token_ids) for row in sample)


def _with_microbatch(num_samples: int, policy: PolicyConfig) -> str:
    """What has to be lowered together with the global batch, if it is to be a multiple of it."""
    micro = policy["train_micro_batch_size"]
    by_tokens = policy["sequence_packing"]["enabled"] or policy["dynamic_batching"]["enabled"]
    return f", and policy.train_micro_batch_size {micro} with it" if micro > num_samples and not by_tokens else ""


class _Reader:
    def __init__(self, config: MasterConfig, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        data = config["data"]
        self._skips_bad = config["data"]["on_bad_line"] == "skip"
        self._max_length = config["policy"]["max_total_sequence_length"]
        self._encoder = ChatEncoder(
            tokenizer,
            data["prompt_template"],
            end_ids,
            adds_end=data["add_eos"],
            adds_beginning=data["add_bos"],
            num_tokens=self._max_length + 1,
        )
        self._around = text_around(data["prompt_file"])
        is_pair = ALGORITHMS[config["algorithm"]].learns_from == "pairs"
        self._encode = self._pair if is_pair else self._turns
        self._answer = None if is_pair else "completion"
        self.counts: dict[str, DataCounts] = {}
        self._turn_counts: dict[str, TurnCounts] = {}
        self._bad: dict[str, dict[str, list[tuple[str, str]]]] = {
            name: {} for name in ("data.train", "data.validation")
        }
        """Place and reason of records, by the section whose files have them and by the one that they are for."""

    def files(self, data: DataConfig) -> tuple[list[Sample], list[Sample]]:
        """Samples of files: for training and for validation."""
        sections = (data["train"], *data["train"]["further"])
        if not any(section["split_validation_size"] for section in sections):
            train, validation = all_or_none(partial(self._training, data), partial(self._validation, data))
            return train, validation
        (records, drawn), others = all_or_none(
            partial(training_records, data["train"], self._answer),
            partial(validation_records, data["validation"], self._answer),
        )
        repeat = _most_repeat_the_prompt([*records, *drawn])
        train = self._samples(records, "data.train", repeat=repeat)
        validation = self._samples(drawn, "data.validation", "data.train", repeat=repeat)
        validation += self._samples(others, "data.validation")
        self._report("data.train", "data.validation")
        return train, validation

    def _training(self, data: DataConfig) -> list[Sample]:
        samples = self._samples(training_records(data["train"], self._answer)[0], "data.train")
        self._report("data.train")
        return samples

    def _validation(self, data: DataConfig) -> list[Sample]:
        if data["validation"]["path"] is None:
            return []
        samples = self._samples(validation_records(data["validation"], self._answer), "data.validation")
        self._report("data.validation")
        return samples

    def problems(self, data: DataConfig, config: MasterConfig) -> tuple[list[Sample], list[Sample]]:
        """Samples of reasoning-gym's problems and their answers; no question is in both sets."""
        train, validation = problem_sets(data, config["env"]["reasoning_gym"])
        sets = (("data.train", train), ("data.validation", validation))
        parts = [self._samples([_record(problem) for problem in problems], name) for name, problems in sets]
        self._report("data.train", "data.validation")
        return parts[0], parts[1]

    def _samples(
        self, records: Sequence[Record], name: str, source: str | None = None, *, repeat: bool | None = None
    ) -> list[Sample]:
        """Samples for the section `name`, of records in the files of `source`, or its own; `_report` is to follow.

        `repeat` says whether answers of the whole data set repeat the prompt, where these are a part of it.
        """
        counts = self.counts.setdefault(name, DataCounts())
        self._encoder.counts = self._turn_counts.setdefault(name, TurnCounts())
        bad: list[tuple[str, str]] = []
        samples = []
        refuses_repeats = _most_repeat_the_prompt(records) if repeat is None else repeat
        for record in records:
            try:
                if isinstance(record.content, str):
                    raise BadRecordError(record.content)
                if refuses_repeats and repeats_prompt(record.content):
                    raise BadRecordError(REPEATS_PROMPT)
                whole = self._encode(record.content)
                if not all(map(_teaches, whole)):
                    raise BadRecordError("has no token to learn: the template makes nothing of its answer")
                if _is_identical(whole):
                    raise UndecidedPairError("identical")
            except UndecidedPairError as error:
                counts.num_ties += error.why == "tie"
                counts.num_identical += error.why == "identical"
                continue
            except BadRecordError as error:
                bad.append((record.place, str(error)))
                continue
            counts.num_truncated += any(len(row.token_ids) > self._max_length for row in whole)
            sample = tuple(Row(row.token_ids[: self._max_length], row.is_learned[: self._max_length]) for row in whole)
            if all(map(_teaches, sample)) and not _is_identical(sample):
                samples.append(sample)
            else:
                counts.num_too_long += 1
        counts.num_dropped = counts.num_too_long + counts.num_ties + counts.num_identical
        counts.num_samples += len(samples)
        counts.num_bad_records += len(bad)
        if bad:
            self._bad[source or name][name] = bad
        return samples

    def _report(self, *names: str) -> None:
        """Warn of what happened to the records. Raises DataError where they cannot be used."""
        all_or_none(*(partial(self._report_one, name) for name in names))

    def _report_one(self, name: str) -> None:
        bad, counts = self._bad[name], self.counts[name]
        num_good = min((self.counts[use].num_samples for use in bad), default=0)
        every = [each for found in bad.values() for each in found]
        report_bad_records(name, every, num_good=num_good, skips_bad=self._skips_bad)
        undecided = [
            f"{num} {what}"
            for num, what in (
                (counts.num_ties, "with answers rated the same"),
                (counts.num_identical, "with chosen and rejected the same"),
            )
            if num
        ]
        if not counts.num_samples:
            if counts.num_bad_records:  # all of `data.train`, of which it is told there
                return
            too_long = (
                f"{counts.num_too_long} had nothing to learn within policy.max_total_sequence_length "
                f"{self._max_length}. Raise it."
            )
            why = [*undecided, *([too_long] if counts.num_too_long else [])]
            raise DataError(f"{name}: no samples" + (f": {', '.join(why)}" if why else ". Give some."))
        if undecided:
            warnings.warn(f"{name}: dropped pair(s) that teach nothing: {', '.join(undecided)}.", stacklevel=2)
        if counts.num_truncated:
            warnings.warn(
                f"{name}: {counts.num_truncated} sample(s) cut to policy.max_total_sequence_length {self._max_length}; "
                f"{counts.num_too_long} of them dropped, with nothing left to learn.",
                stacklevel=2,
            )
        _report_turns(name, self._turn_counts[name], says_where=not self._encoder.always_elsewhere)

    def _turns(self, content: Mapping[str, object]) -> Sample:
        messages = self._asked(parse_conversation(content))
        return (self._encoder(messages, tools=parse_tools(content)),)

    def _pair(self, content: Mapping[str, object]) -> Sample:
        prompt, chosen, rejected = parse_preference(content)
        prompt = self._asked(prompt)
        tools = parse_tools(content)
        return tuple(
            self._encoder([*prompt, *answer], len(prompt), tools, counts_given=answer is chosen)
            for answer in (chosen, rejected)
        )

    def _asked(self, messages: list[Message]) -> list[Message]:
        """The messages with the text of `data.prompt_file` around the first of a user."""
        first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None or self._around == "{}":
            return messages
        changed = {**messages[first], "content": self._around.format(messages[first]["content"])}
        return [*messages[:first], changed, *messages[first + 1 :]]  # type: ignore[list-item]


def _report_turns(name: str, turns: TurnCounts, *, says_where: bool) -> None:
    """Warn, once each, of what the chat template makes of the turns that are learned.

    Raises:
        DataError: no turn is learned with its end, so that the model would learn never to end one.
    """
    if turns.num_turns and turns.num_open == turns.num_turns:
        raise DataError(
            f"{name}: no assistant turn that is learned ends with an end token, since the chat template writes none "
            "behind it: the model would learn never to end. Set data.add_eos=true, or give another "
            "policy.tokenizer.chat_template."
        )
    for number, text in (
        (turns.num_open, "no end token behind them: their end is not learned. data.add_eos=true ends the last one"),
        (
            turns.num_shortened,
            "a part left out by the chat template, such as thinking or a call: it is not learned. Another "
            "policy.tokenizer.chat_template may keep it",
        ),
        (
            turns.num_elsewhere * says_where,
            "another beginning in the chat template than its generation prompt; they are learned there",
        ),
    ):
        if number:
            warnings.warn(f"{name}: {number} of {turns.num_turns} assistant turns have {text}.", stacklevel=2)
    if turns.num_unheard:
        warnings.warn(
            f"{name}: the chat template leaves out or rewrites {turns.num_unheard} of {turns.num_others} turns of "
            "systems, users and tools. Another policy.tokenizer.chat_template may keep them.",
            stacklevel=2,
        )


def _most_repeat_the_prompt(records: Sequence[Record]) -> bool:
    seen = [repeats_prompt(record.content) for record in records if not isinstance(record.content, str)]
    return 2 * seen.count(True) > seen.count(True) + seen.count(False)


def _teaches(row: Row) -> bool:
    return any(row.is_learned[1:]) or row.rest_is_learned


def _is_identical(sample: Sample) -> bool:
    """Whether it is a pair of the same tokens."""
    return len(sample) == 2 and sample[0] == sample[1]


def _record(problem: Problem) -> Record:
    question = problem.question.strip()
    place = f"problem {question[:60]!r}"
    if problem.answer is None:
        return Record(place, "has no single answer; choose another env.reasoning_gym.task")
    return Record(place, {"prompt": question, "completion": problem.answer})


class SampleStream:
    """An endless stream of batches; every epoch has its own order, and its incomplete last batch is left out."""

    def __init__(self, samples: Sequence[Sample], batch_size: int, *, shuffle: bool, seed: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = self._position = 0
        self._batches = self._epoch_batches()

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return len(self._samples) // self._batch_size

    def next_batch(self) -> list[Sample]:
        """Return the next samples."""
        if self._position >= self.num_batches:  # beyond, where the data became fewer
            self._epoch, self._position = self._epoch + 1, 0
            self._batches = self._epoch_batches()
        self._position += 1
        return next(self._batches)

    def state_dict(self) -> dict[str, int]:
        """Return the place in the stream, for ``load_state_dict`` of a stream with the same arguments."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        self._batches = islice(self._epoch_batches(), self._position, None)

    def _epoch_batches(self) -> Iterator[list[Sample]]:
        order = list(range(len(self._samples)))
        if self._shuffle:
            Random(f"{self._seed}/{self._epoch}").shuffle(order)
        for start in range(0, self.num_batches * self._batch_size, self._batch_size):
            yield [self._samples[index] for index in order[start : start + self._batch_size]]


def collate(samples: Sequence[Sample], pad_id: int) -> Batch:
    """Return `input_ids`, `input_lengths`, `token_mask` (1 on learned tokens) and `sample_mask`; rows of a sample
    stand next to each other."""
    rows = [row for sample in samples for row in sample]
    batch = pad_sequences([row.token_ids for row in rows], pad_id)
    batch["token_mask"] = torch.zeros_like(batch["input_ids"], dtype=torch.float32)
    for index, row in enumerate(rows):
        batch["token_mask"][index, : len(row.is_learned)] = torch.tensor(row.is_learned, dtype=torch.float32)
    batch["sample_mask"] = torch.ones(len(rows))
    return batch
