"""Samples of files and of problems: counts, bad records, order, and the batch made of them."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config, resolve_tokenizer_path
from nemo_rl_offload.data.columns import training_records
from nemo_rl_offload.data.samples import DataCounts, SampleStream, collate, sample_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer, make_byte_tokenizer
from nemo_rl_offload.data.turns import Row
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
        "train": tiny["data"]["train"] | {"path": path, "seed": 5, "size": 60},
        "validation": tiny["data"]["validation"]
        | {"path": path, "seed": 10, "size": 12, "exclude": [{"seed": 0, "size": 3}]},
    }
    return tiny | {"algorithm": algorithm, "data": data | changes}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def texts(tokenizer: Any, row: Row) -> tuple[str, str]:
    split = row.is_learned.index(True)
    return tokenizer.decode(row.token_ids[:split]), tokenizer.decode(row.token_ids[split:])


def test_problems_with_their_answers(tokenizer: Any, tiny: dict[str, Any]) -> None:
    stream, validation, counts = sample_sets(configure(tiny, "sft", None), tokenizer, [tokenizer.eos_token_id], seed=1)
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
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)


def test_pairs(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tiny, "dpo", write(tmp_path / "a.jsonl", PAIR, PAIR | {"prompt": "b?"}), shuffle=False)
    stream, _, counts = sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    chosen, rejected = stream.next_batch()[1]
    assert texts(tokenizer, chosen) == ("b?\n", "yes<|im_end|>")
    assert texts(tokenizer, rejected) == ("b?\n", "no<|im_end|>")
    assert counts["data.train"] == DataCounts(num_samples=2)


QUESTION = {"role": "user", "content": "a?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
PAIR_FORMS: list[dict[str, Any]] = [
    PAIR,
    {"prompt": "a?", "chosen": [QUESTION, YES], "rejected": [QUESTION, NO], "messages": [QUESTION, YES]},
    {"chosen": [QUESTION, YES], "rejected": [QUESTION, NO], "score_chosen": 8.5},
    {"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]},
    {"chosen": "\n\nHuman: a?\n\nAssistant: yes", "rejected": "\n\nHuman: a?\n\nAssistant: no"},
    {"context": [QUESTION], "response1": "no", "response2": "yes", "overall_preference": 3, "domain": "general"},
    {"prompt": "a?", "response_1": "yes", "response_2": "no", "preference_strength": -1, "split": "train"},
    {"prompt": "a?", "response_0": "no", "response_1": "yes", "better_response_id": 1, "safer_response_id": 0},
    {"instruction": "a?", "completions": [{"response": r, "overall_score": s} for r, s in (("no", 1.0), ("yes", 7.5))]},
    {"context": [QUESTION], "completions": [{"rank": 0, "completion": [YES]}, {"rank": 1, "completion": [NO]}]},
    {"input": {"messages": [QUESTION], "tools": []}, "preferred_output": [YES], "non_preferred_output": [NO]},
]
CONVERSATION_FORMS: list[dict[str, Any]] = [
    {"messages": [QUESTION, YES]},
    {"prompt": "a?", "completion": "yes"},
    {"prompt": "a?", "completion": [QUESTION, YES]},
    {"prompt": [QUESTION], "completion": [YES]},
    {"prompt": "\n\nHuman: a?\n\nAssistant:", "completion": " yes"},
]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bytes")
    make_byte_tokenizer(folder)
    tokenizer: Any = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("algorithm", "form"),
    [*(("dpo", form) for form in PAIR_FORMS), *(("sft", form) for form in CONVERSATION_FORMS)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_public_forms_give_the_samples_of_the_plain_one(
    algorithm: str, form: dict[str, Any], suffix: str, tokenizer: Any, chat_tokenizer: Any, tiny: Any, tmp_path: Path
) -> None:
    if suffix == "jsonl":
        file = write(tmp_path / "a.jsonl", form, form)
    else:
        pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").Table.from_pylist([form, form]), file := tmp_path / "a.parquet"
        )
    config = configure(tiny, algorithm, file)
    stream, _, counts = sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    assert counts["data.train"] == DataCounts(num_samples=2)
    shown = [texts(tokenizer, row) for row in stream.next_batch()[0]]
    assert shown == [("a?\n", f"{answer}<|im_end|>") for answer in ("yes", "no")][: len(shown)]
    config["data"]["prompt_template"] = None
    shown = [
        texts(chat_tokenizer, row)
        for row in sample_sets(config, chat_tokenizer, [chat_tokenizer.eos_token_id], seed=1)[0].next_batch()[0]
    ]
    asked = "<user>a?<|im_end|><assistant>"
    assert shown == [(asked, f"{answer}<|im_end|>") for answer in ("yes", "no")][: len(shown)]


def test_dropped_pairs_are_counted_with_their_reason(
    chat_tokenizer: Any, tiny: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    tie = {"context": "a?", "response1": "yes", "response2": "no", "overall_preference": 0}
    long = "y" * 200
    records = [
        *[PAIR] * 2,
        *[tie] * 3,
        *[PAIR | {"rejected": "yes"}] * 2,
        PAIR | {"rejected": " yes"},  # the same where the template trims
        PAIR | {"chosen": long, "rejected": long + "no"},  # the same where both are cut
        PAIR | {"prompt": long},
        PAIR | {"chosen": long},
    ]
    config = configure(tiny, "dpo", write(tmp_path / "a.jsonl", *records), prompt_template=None)
    config["data"]["validation"]["path"] = None
    _, _, counts = sample_sets(config, chat_tokenizer, [chat_tokenizer.eos_token_id], seed=1)
    assert counts == {
        "data.train": DataCounts(
            num_samples=3, num_truncated=3, num_dropped=8, num_too_long=2, num_ties=3, num_identical=3
        )
    }
    limit = f"policy.max_total_sequence_length {config['policy']['max_total_sequence_length']}"
    assert [str(warning.message) for warning in recwarn] == [
        "data.train: dropped pair(s) that teach nothing: 3 with answers rated the same, "
        "3 with chosen and rejected the same.",
        f"data.train: 3 sample(s) cut to {limit}; 2 of them dropped, with nothing left to learn.",
    ]
    write(tmp_path / "a.jsonl", tie, tie, PAIR | {"rejected": "yes"}, PAIR | {"prompt": long})
    with pytest.raises(DataError) as caught:
        sample_sets(config, chat_tokenizer, [chat_tokenizer.eos_token_id], seed=1)
    assert str(caught.value) == (
        "data.train: no samples: 2 with answers rated the same, 1 with chosen and rejected the same, "
        f"1 had nothing to learn within {limit}. Raise it."
    )


def test_an_answer_without_a_token_to_learn_is_bad_and_not_too_long(
    chat_tokenizer: Any, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tokenizer, "chat_template", chat_tokenizer.chat_template.replace("<|im_end|>", ""))
    empty = {"prompt": "a?", "completion": ""}
    config = configure(tiny, "sft", write(tmp_path / "a.jsonl", *CONVERSATION_FORMS, empty), prompt_template=None)
    with pytest.raises(DataError, match=r"1 record\(s\) cannot be used\n.*:6: has no token to learn"):
        sample_sets(config, chat_tokenizer, [chat_tokenizer.eos_token_id], seed=1)


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_text_that_repeats_the_prompt_is_refused_where_most_does(
    algorithm: str, tokenizer: Any, tiny: dict[str, Any], tmp_path: Path
) -> None:
    def record(prompt: str, *answers: str) -> dict[str, str]:
        keys = ("chosen", "rejected") if algorithm == "dpo" else ("completion",)
        return {"prompt": prompt} | dict(zip(keys, answers, strict=False))

    repeating, plain = record("The sky is", "The sky is blue.", "The sky is green."), record("Say it", "yes", "no")
    file = tmp_path / "a.jsonl"
    for most in ([repeating] * 2, [repeating] * 3 + [plain] * 2, [repeating]):
        with pytest.raises(
            DataError, match=f"{most.count(repeating)} record.*\n.*:1[^:]*: begins its answers with the text"
        ):
            sample_sets(configure(tiny, algorithm, write(file, *most)), tokenizer, [tokenizer.eos_token_id], seed=1)
    mixed = [repeating] * 2 + [plain] * 2
    stream, _, counts = sample_sets(
        configure(tiny, algorithm, write(file, *mixed), shuffle=False), tokenizer, [tokenizer.eos_token_id], seed=1
    )
    assert counts["data.train"] == DataCounts(num_samples=4)
    assert texts(tokenizer, stream.next_batch()[0][0]) == ("The sky is\n", "The sky is blue.<|im_end|>")


def test_reasons_of_what_is_left_out_are_told_with_their_number(
    tokenizer: Any, tiny: dict[str, Any], tmp_path: Path
) -> None:
    lines = [PAIR, PAIR, {"prompt": "x"}, "3", "4", "5", PAIR | {"chosen": [QUESTION]}, PAIR | {"chosen": [QUESTION]}]
    file = write(tmp_path / "a.jsonl", *lines)
    config = configure(tiny, "dpo", file, on_bad_line="skip")
    config["data"]["validation"]["path"] = None
    with pytest.warns(UserWarning, match="bad record") as caught:
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    assert [str(warning.message) for warning in caught] == [
        "data.train: left 6 bad record(s) out; "
        f"3 from {file}:4 on: is int, not an object with keys; "
        f"2 from {file}:7 on: chosen adds no assistant turn to the prompt; "
        f"1 from {file}:3 on: has neither chosen and rejected nor another form of a pair (see docs/algorithms.md); "
        "it has prompt"
    ]
    write(file, PAIR, PAIR, *('"x' + "y" * length for length in range(9)), *({"n" * n: 1} for n in range(1, 9)))
    with pytest.warns(UserWarning, match=r"left 17 bad record\(s\) out; .*; and \d+ for other reasons$"):
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)


def test_bad_lines_end_the_run_or_are_counted(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PAIR, "{", {"prompt": "x"}, PAIR, *["1"] * 7)
    with pytest.raises(DataError) as caught:
        sample_sets(configure(tiny, "dpo", file), tokenizer, [tokenizer.eos_token_id], seed=1)
    head, *lines = str(caught.value).splitlines()
    assert head == "data.train: 9 record(s) cannot be used"
    assert lines[0].startswith(f"{file}:2: is not JSON")
    assert lines[1].startswith(f"{file}:3: has neither chosen and rejected")
    assert lines[2] == f"{file}:5, 6, 7, 8, 9 and 2 more: is int, not an object with keys"
    assert lines[3] == "data.validation: 9 record(s) cannot be used", "it is the same file"
    assert [line for line in lines if "Mend the data; " in line] == lines[-1:]
    with pytest.warns(UserWarning, match="left 9 bad"):
        _, _, counts = sample_sets(
            configure(tiny, "dpo", file, on_bad_line="skip"), tokenizer, [tokenizer.eos_token_id], seed=1
        )
    assert counts["data.train"] == DataCounts(num_samples=2, num_bad_records=9)
    with pytest.raises(DataError, match=r"1 record.*\n.*\nMend the data: without them, nothing is left for training"):
        sample_sets(
            configure(tiny, "dpo", write(file, "{"), on_bad_line="skip"), tokenizer, [tokenizer.eos_token_id], seed=1
        )


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_bad_records_of_a_file_that_is_split_are_told_once_in_its_order(
    tokenizer: Any, tiny: dict[str, Any], tmp_path: Path, on_bad_line: str
) -> None:
    file = write(tmp_path / "train.jsonl", *[PAIR] * 8, *["1"] * 5, {"prompt": "a"})
    config = configure(tiny, "dpo", file, on_bad_line=on_bad_line)
    config["data"]["train"]["split_validation_size"] = 0.5
    config["data"]["validation"]["path"] = None
    expected = [
        "data.train: 6 record(s) cannot be used",
        f"{file}:9, 10, 11, 12, 13: is int, not an object with keys",
        f"{file}:14: has neither chosen and rejected nor another form of a pair (see docs/algorithms.md); it has "
        "prompt",
        "Mend the data; data.on_bad_line=skip leaves out what is bad, as long as something is left.",
    ]
    if on_bad_line == "error":
        with pytest.raises(DataError) as caught:
            sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
        assert str(caught.value).splitlines() == expected
    else:
        with pytest.warns(UserWarning, match=r"left .* out") as warned:
            _, _, counts = sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
        (text,) = [str(each.message) for each in warned if "bad record" in str(each.message)]
        assert text.startswith(f"data.train: left 6 bad record(s) out; 5 from {file}:9 on: is int")
        assert sum(each.num_samples for each in counts.values()) == 8
        assert {name: each.num_bad_records > 0 for name, each in counts.items()} == dict.fromkeys(counts, True)


@pytest.fixture
def drawn_line(tiny: dict[str, Any], tmp_path: Path) -> tuple[Any, int]:
    """A configuration whose file of four pairs gives one for validation, and that one's line."""
    config = configure(tiny, "dpo", write(tmp_path / "train.jsonl", *[PAIR] * 4), on_bad_line="skip")
    config["data"]["train"]["split_validation_size"] = 1
    config["data"]["validation"]["path"] = None
    (drawn,) = training_records(config["data"]["train"], None)[1]
    return config, int(drawn.place.rpartition(":")[2])


def test_a_split_that_is_all_bad_is_refused(tokenizer: Any, drawn_line: tuple[Any, int], tmp_path: Path) -> None:
    config, line = drawn_line
    file = write(tmp_path / "train.jsonl", *[PAIR] * (line - 1), "1", *[PAIR] * (4 - line))
    with pytest.raises(DataError) as caught:
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    assert str(caught.value).startswith(f"data.train: 1 record(s) cannot be used\n{file}:{line}: is int")
    assert "no samples" not in str(caught.value)


def test_whether_answers_repeat_the_prompt_is_told_from_the_whole_file(
    tokenizer: Any, drawn_line: tuple[Any, int], tmp_path: Path
) -> None:
    config, line = drawn_line
    by_chance = PAIR | {"chosen": "a? yes", "rejected": "a? no"}
    write(tmp_path / "train.jsonl", *[PAIR] * (line - 1), by_chance, *[PAIR] * (4 - line))
    _, validation, _ = sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    assert len(validation) == 1


def test_truncation_is_counted(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    limit = tiny["policy"]["max_total_sequence_length"]
    long_answer = PAIR | {"chosen": "y" * 200}
    file = write(tmp_path / "a.jsonl", PAIR, long_answer, PAIR | {"prompt": "p" * 200})
    with pytest.warns(UserWarning, match=rf"2 sample\(s\) cut to policy.max_total_sequence_length {limit}; 1 of them"):
        stream, validation, counts = sample_sets(
            configure(tiny, "dpo", file), tokenizer, [tokenizer.eos_token_id], seed=1
        )
    assert counts["data.train"] == DataCounts(num_samples=2, num_truncated=2, num_dropped=1, num_too_long=1)
    assert max(len(row.token_ids) for pair in validation for row in pair) == limit
    assert stream.num_batches == 1


def test_both_files_are_told_of_at_once(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tiny, "dpo", write(tmp_path / "train.jsonl", "{"))
    config["data"]["validation"]["path"] = str(write(tmp_path / "validation.txt"))
    with pytest.raises(DataError) as caught:
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    text = str(caught.value)
    assert text.startswith("data.train: 1 record(s) cannot be used\n")
    assert f"\ndata.validation.path: {tmp_path}/validation.txt: unknown kind of file" in text
    config["data"]["train"]["path"] = str(write(tmp_path / "train.jsonl"))
    config["data"]["validation"]["path"] = str(write(tmp_path / "validation.jsonl", PAIR | {"prompt": "p" * 200}))
    with pytest.raises(DataError) as caught:
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    assert str(caught.value).splitlines() == [
        "data.train: no samples. Give some.",
        "data.validation: no samples: 1 had nothing to learn within policy.max_total_sequence_length 96. Raise it.",
    ]


def test_too_few_samples(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PAIR)
    with pytest.raises(DataError, match=r"1 samples do not fill a batch of policy\.train_global_batch_size 2"):
        sample_sets(configure(tiny, "dpo", file), tokenizer, [tokenizer.eos_token_id], seed=1)


def test_too_few_samples_for_a_microbatch_either(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tiny, "dpo", write(tmp_path / "a.jsonl", PAIR))
    config["policy"] = tiny["policy"] | {"train_global_batch_size": 32, "train_micro_batch_size": 16}
    with pytest.raises(DataError, match=r"Lower it, and policy\.train_micro_batch_size 16 with it, or give more data"):
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    config["policy"]["dynamic_batching"] = tiny["policy"]["dynamic_batching"] | {"enabled": True}
    with pytest.raises(DataError, match=r"Lower it, or give more data"):
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)


def test_pairs_keep_their_answers_where_the_prompts_column_is_named(
    tokenizer: Any, tiny: dict[str, Any], tmp_path: Path
) -> None:
    usual = write(tmp_path / "a.jsonl", PAIR, PAIR)
    own = write(tmp_path / "b.jsonl", *[{"asked": "a?", "chosen": "yes", "rejected": "no"}] * 2)
    configs = configure(tiny, "dpo", usual), configure(tiny, "dpo", own)
    for section in ("train", "validation"):
        configs[1]["data"][section]["input_key"] = "asked"
    (_, expected, _), (_, found, _) = (
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1) for config in configs
    )
    assert found == expected


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


OPEN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "<think>x</think>b"))]


def chatting(tokenizer: Any, template: str) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_data_without_any_end_are_refused(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *[{"messages": TURNS}] * 3)
    config = configure(tiny, "sft", file, prompt_template=None)
    with pytest.raises(DataError) as caught:
        sample_sets(config, chatting(tokenizer, OPEN), [256], seed=1)
    assert [line.partition(" ends with an end token")[0] for line in str(caught.value).splitlines()] == [
        f"data.{name}: no assistant turn that is learned" for name in ("train", "validation")
    ]
    assert "Set data.add_eos=true" in str(caught.value)
    pairs = write(tmp_path / "b.jsonl", *[PAIR] * 3)
    with pytest.raises(DataError, match="never to end"):
        sample_sets(configure(tiny, "dpo", pairs, prompt_template=None), chatting(tokenizer, OPEN), [256], seed=1)


def test_what_the_template_makes_of_turns_is_said_once(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *[{"messages": TURNS * 2, "tools": [{"name": "add"}]}] * 3)
    config = configure(tiny, "sft", file, prompt_template=None, add_eos=True)
    config["data"]["validation"]["path"] = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stream, _, _ = sample_sets(config, chatting(tokenizer, OPEN), [256], seed=1)
    assert [str(warning.message).partition(", such")[0].partition(":")[2] for warning in caught] == [
        " 3 of 6 assistant turns have no end token behind them: their end is not learned. data.add_eos=true ends the "
        "last one.",
        " 6 of 6 assistant turns have a part left out by the chat template",
    ]
    ((row,), *_) = stream.next_batch()
    assert tokenizer.decode(row.token_ids) == '<user>a<assistant>b<user>a<assistant>b[{"name": "add"}]<|im_end|>'


@pytest.mark.parametrize(("ending", "is_said"), [("<assistant>", False), ("<assistant><think>", False), ("", True)])
def test_turns_that_begin_elsewhere_are_said_where_the_check_cannot(
    tokenizer: Any, tiny: dict[str, Any], tmp_path: Path, ending: str, is_said: bool
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}"
    )
    prompt = "<assistant>{% if messages | length > 1 %}!{% endif %}" if is_said else ending
    file = write(tmp_path / "a.jsonl", *[{"messages": TURNS * 2}] * 3)
    config = configure(tiny, "sft", file, prompt_template=None)
    config["data"]["validation"]["path"] = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sample_sets(config, chatting(tokenizer, template + prompt + "{% endif %}"), [256], seed=1)
    expected = ["data.train: 3 of 6 assistant turns have another beginning"] * is_said
    assert [str(warning.message).partition(" in the")[0] for warning in caught] == expected


def test_tools_of_pairs_reach_the_template(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *[PAIR | {"tools": '[{"name": "add"}]'}] * 3)
    config = configure(tiny, "dpo", file, prompt_template=None, add_eos=True)
    stream, _, _ = sample_sets(config, chatting(tokenizer, OPEN), [256], seed=1)
    rows = stream.next_batch()[0]
    answers = ["yes", "no"]
    assert [tokenizer.decode(row.token_ids) for row in rows] == [
        f'<user>a?<assistant>{answer}[{{"name": "add"}}]<|im_end|>' for answer in answers
    ]


def test_turns_of_a_prompt_with_two_answers_count_once(tokenizer: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    """A prompt is written behind each of its answers: its turns were counted twice."""
    template = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content + eos_token }}{% endfor %}"
    prompt = [{"role": "system", "content": "Be brief."}, QUESTION]
    file = write(tmp_path / "a.jsonl", *[{"prompt": prompt, "chosen": [YES], "rejected": [NO]}] * 3)
    config = configure(tiny, "dpo", file, prompt_template=None)
    with pytest.warns(UserWarning, match=r"data\.train: the chat template leaves out or rewrites 3 of 6 turns"):
        sample_sets(config, chatting(tokenizer, template), [256], seed=1)


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_validation_that_is_trained_on_is_said(
    algorithm: str, tokenizer: Any, tiny: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    record = PAIR if algorithm == "dpo" else {"prompt": "a?", "completion": "yes"}
    train = write(tmp_path / "a.jsonl", *[record | {"prompt": f"{n}?"} for n in range(6)])
    config = configure(tiny, algorithm, train)
    for others, known in ((["4?", "5?", "5?", "6?"], 3), (["6?", "7?"], 0)):
        file = write(tmp_path / "b.jsonl", *[record | {"prompt": text} for text in others])
        config["data"]["validation"]["path"] = str(file)
        recwarn.clear()
        sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
        said = [str(warning.message).split(" too,")[0] for warning in recwarn.list]
        assert said == [f"data.validation: of its {len(others)} samples, data.train has {known}"] * bool(known)
