"""Samples of files and of problems: counts, bad records, order, and the batch made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config, resolve_tokenizer_path
from nemo_rl_offload.data.chat import Row
from nemo_rl_offload.data.samples import DataCounts, SampleStream, collate, sample_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.errors import DataError

PAIR = {"prompt": "a?", "chosen": "yes", "rejected": "no"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_tokenizer_path("examples/models/tiny_speller"))


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", ["policy.train_global_batch_size=2"])


def configure(tiny: dict[str, Any], algorithm: str, train: Path | None, **changes: Any) -> Any:
    path = train and str(train)
    data = tiny["data"] | {
        "train": {"path": path, "split": None, "seed": 5, "size": 60},
        "validation": {"path": path, "split": None, "seed": 10, "size": 12, "exclude": [{"seed": 0, "size": 3}]},
    }
    return tiny | {"algorithm": algorithm, "data": data | changes}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def texts(tokenizer: Any, row: Row) -> tuple[str, str]:
    split = row.is_learned.index(True)
    return tokenizer.decode(row.token_ids[:split]), tokenizer.decode(row.token_ids[split:])


def test_problems_with_their_answers(tokenizer: Any, tiny: dict[str, Any]) -> None:
    stream, validation, counts = sample_sets(configure(tiny, "sft", None), tokenizer, seed=1)
    train = [sample for _ in range(stream.num_batches) for sample in stream.next_batch()]
    asked = [[texts(tokenizer, row) for (row,) in samples] for samples in (train, validation)]
    for prompt, answer in asked[0] + asked[1]:
        assert prompt.endswith("\n")
        assert answer == prompt.split()[-1][::-1] + "<|im_end|>"
    assert not set(asked[0]) & set(asked[1])
    assert len(set(asked[1])) == 12
    assert counts["data.validation"] == DataCounts(num_samples=12)
    assert counts["data.train"].num_samples < 60  # seeds 10 to 64 are in both ranges


def test_a_task_without_single_answers_is_refused(tokenizer: Any, tiny: dict[str, Any]) -> None:
    config = configure(tiny, "sft", None)
    config["env"] = {"reasoning_gym": tiny["env"]["reasoning_gym"] | {"task": "graph_color", "params": {}}}
    with pytest.raises(DataError, match=r"data\.train: \d+ record.*\nproblem .* has no single answer"):
        sample_sets(config, tokenizer, seed=1)


def test_pairs(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tiny, "dpo", write(tmp_path / "a.jsonl", PAIR, PAIR | {"prompt": "b?"}), shuffle=False)
    stream, _, counts = sample_sets(config, tokenizer, seed=1)
    chosen, rejected = stream.next_batch()[1]
    assert texts(tokenizer, chosen) == ("b?\n", "yes<|im_end|>")
    assert texts(tokenizer, rejected) == ("b?\n", "no<|im_end|>")
    assert counts["data.train"] == DataCounts(num_samples=2)


def test_bad_lines_end_the_run_or_are_counted(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PAIR, "{", {"prompt": "x"}, PAIR, *["1"] * 7)
    with pytest.raises(DataError) as caught:
        sample_sets(configure(tiny, "dpo", file), tokenizer, seed=1)
    head, *lines = str(caught.value).splitlines()
    assert head == "data.train: 9 record(s) cannot be used"
    assert lines[0].startswith(f"{file}:2: is not JSON")
    assert lines[1].startswith(f"{file}:3: has neither chosen and rejected")
    assert lines[5] == "... and 4 more"
    with pytest.warns(UserWarning, match="left 9 bad"):
        _, _, counts = sample_sets(configure(tiny, "dpo", file, on_bad_line="skip"), tokenizer, seed=1)
    assert counts["data.train"] == DataCounts(num_samples=2, num_bad_records=9)
    with pytest.raises(DataError, match="1 record"):
        sample_sets(configure(tiny, "dpo", write(file, "{"), on_bad_line="skip"), tokenizer, seed=1)


def test_truncation_is_counted(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    limit = tiny["policy"]["max_total_sequence_length"]
    long_answer = PAIR | {"chosen": "y" * 200}
    file = write(tmp_path / "a.jsonl", PAIR, long_answer, PAIR | {"prompt": "p" * 200})
    with pytest.warns(UserWarning, match=rf"2 sample\(s\) cut to policy.max_total_sequence_length {limit}; 1 of them"):
        stream, validation, counts = sample_sets(configure(tiny, "dpo", file), tokenizer, seed=1)
    assert counts["data.train"] == DataCounts(num_samples=2, num_truncated=2, num_dropped=1)
    assert max(len(row.token_ids) for pair in validation for row in pair) == limit
    assert stream.num_batches == 1


def test_both_files_are_told_of_at_once(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tiny, "dpo", write(tmp_path / "train.jsonl", "{"))
    config["data"]["validation"]["path"] = str(write(tmp_path / "validation.txt"))
    with pytest.raises(DataError) as caught:
        sample_sets(config, tokenizer, seed=1)
    text = str(caught.value)
    assert text.startswith("data.train: 1 record(s) cannot be used\n")
    assert f"\ndata.validation.path: {tmp_path}/validation.txt: unknown kind of file" in text
    config["data"]["train"]["path"] = str(write(tmp_path / "train.jsonl"))
    config["data"]["validation"]["path"] = str(write(tmp_path / "validation.jsonl", PAIR | {"prompt": "p" * 200}))
    with pytest.raises(DataError) as caught:
        sample_sets(config, tokenizer, seed=1)
    assert str(caught.value).splitlines() == [
        "data.train: no samples. Give some.",
        "data.validation: no samples: 1 had nothing to learn within policy.max_total_sequence_length 96. Raise it.",
    ]


def test_too_few_samples(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PAIR)
    with pytest.raises(DataError, match=r"1 samples do not fill a batch of policy\.train_global_batch_size 2"):
        sample_sets(configure(tiny, "dpo", file), tokenizer, seed=1)


@given(num_samples=st.integers(1, 20), size=st.integers(1, 5), skip=st.integers(0, 20), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_order_and_resuming(num_samples: int, size: int, skip: int, seed: int) -> None:
    samples = [(Row([n], [True]),) for n in range(num_samples)]
    if num_samples < size:
        return

    def stream() -> SampleStream:
        return SampleStream(samples, size, shuffle=True, seed=seed)

    first, second = stream(), stream()
    epochs = [[first.next_batch() for _ in range(first.num_batches)] for _ in range(2)]
    for epoch in epochs:
        seen = [row.token_ids[0] for batch in epoch for (row,) in batch]
        assert len(seen) == len(set(seen)) == num_samples // size * size
    drawn = [second.next_batch() for _ in range(skip)]
    assert drawn[: 2 * first.num_batches] == (epochs[0] + epochs[1])[:skip]
    third = stream()
    third.load_state_dict(second.state_dict())
    assert [third.next_batch() for _ in range(5)] == [second.next_batch() for _ in range(5)]
    assert third.state_dict() == second.state_dict()


def test_collate() -> None:
    samples = [
        (Row([1, 2, 3], [False, True, True]), Row([4], [True])),
        (Row([5, 6], [False, True]), Row([7, 8], [True, False])),
    ]
    batch = collate(samples, pad_id=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 8, 0]]
    assert batch["token_mask"].tolist() == [[0, 1, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]]
    assert batch["input_lengths"].tolist() == [3, 1, 2, 2]
    assert torch.equal(batch["sample_mask"], torch.ones(4))
