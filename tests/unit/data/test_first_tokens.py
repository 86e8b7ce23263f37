"""The first tokens of a long text are those that the whole has, for tokenizers of many kinds."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data import first_tokens
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
from nemo_rl_offload.data.prompts import PromptEncoder
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.samples import DataCounts, sample_sets

TEXTS = [
    "the cat sat on the mat",
    "a b c  d\n\n e",
    "1234567 89",
    "été naïve e\u0301e\u0301",
    "\U0001f642\U0001f642 x",
    "aaaa aaaaaaaa",
]


def trained(model: Any, trainer: Any, pre: Any, normalizer: Any = None, decoder: Any = None) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def digits_from_the_end() -> Any:
    groups = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*\b)"), "isolated")
    pre = pre_tokenizers.Sequence([groups, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(models.BPE(), trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet), pre)


KINDS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.NFC(),
        decoders.ByteLevel(),
    ),
    "metaspace": lambda: trained(
        models.BPE(unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=100, special_tokens=["<unk>"]),
        pre_tokenizers.Metaspace(split=False),
    ),
    "words": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"]),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
    "unigram": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>"),
        pre_tokenizers.Metaspace(),
    ),
    "digits": digits_from_the_end,
}


def long_texts() -> list[str]:
    random = Random(0)
    words = ["the", "cat", "1234", "  ", "\n", "été", "\U0001f642", "zzz", "aaaa", "e\u0301"]
    mixed = ["".join(random.choice(words) + random.choice([" ", ""]) for _ in range(600)) for _ in range(6)]
    return [
        *mixed,
        "a" * 3000,
        " " * 3000 + "the",
        "x" + " " * 2999,
        "7" * 3001,
        "7" * 3002,
        "e" + "\u0301" * 2000,
        "q" * 2500,
    ]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few hundred characters are long ones."""
    monkeypatch.setattr(first_tokens, "WHOLE_CHARACTERS", 250)
    monkeypatch.setattr(first_tokens, "CHARACTERS_PER_TOKEN", 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("short")
def test_they_are_those_of_the_whole(kind: str) -> None:
    tokenizer = KINDS[kind]()
    num_shorter = 0
    for text in long_texts():
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for num in (1, 7, 30):
            found, end = first_tokens.first_tokens_and_places(tokenizer, text, num)
            size = len(found["input_ids"])
            assert found["input_ids"] == whole["input_ids"][:size]
            assert found["offset_mapping"] == whole["offset_mapping"][:size]
            assert size >= num or end == len(text)
            assert (end == len(text)) == (size == len(whole["input_ids"])) or text[end:].strip() == ""
            assert first_tokens.first_tokens(tokenizer, text, num)[0][:num] == whole["input_ids"][:num]
            num_shorter += end < len(text)
    assert num_shorter, "no text was encoded in part"


def records(random: Random) -> list[dict[str, Any]]:
    texts = ["a" * 2000, "word " * 300, "no", "yes <|im_end|> " * 200, " " * 900 + "x", "word " * 400]
    both = [{"prompt": random.choice(texts), "completion": random.choice(texts)} for _ in range(16)]
    talk = [
        {
            "messages": [
                {"role": role, "content": random.choice(texts)} for _ in range(3) for role in ("user", "assistant")
            ]
        }
        for _ in range(4)
    ]
    return [*both, *talk]


def pairs(random: Random) -> list[dict[str, Any]]:
    end = ["a" * 2000, "a" * 2000 + "b", "no", "a" * 1999 + "c" + "a" * 300, "word " * 400]
    return [
        {"prompt": random.choice([*end, "q"]), "chosen": random.choice(end), "rejected": random.choice(end)}
        for _ in range(40)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("template", ["null", "'{question} '"])
@pytest.mark.parametrize(("algorithm", "make"), [("sft", records), ("dpo", pairs)])
@pytest.mark.filterwarnings("ignore")
def test_samples_and_counts_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, make: Callable[[Random], list[Any]], template: str
) -> None:
    rows = make(Random(1))
    if template != "null":
        rows = [row for row in rows if "messages" not in row]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"data.train.path={file}", "policy.train_global_batch_size=2", f"data.prompt_template={template}"]
    overrides += ["data.validation.path=null"]
    config: Any = load_config(
        PROJECT_ROOT / f"examples/configs/{algorithm}_tiny.yaml", [*overrides, "data.on_bad_line=skip"]
    )
    tokenizer, end_ids = load_policy_tokenizer(config["policy"], config["data"]["prompt_template"])

    def read(whole_characters: int, max_length: int) -> tuple[list[Any], dict[str, DataCounts]]:
        monkeypatch.setattr(first_tokens, "WHOLE_CHARACTERS", whole_characters)
        monkeypatch.setattr(first_tokens, "CHARACTERS_PER_TOKEN", 4)
        config["policy"]["max_total_sequence_length"] = max_length
        stream, _, counts = sample_sets(config, tokenizer, end_ids, seed=0)
        return [stream.next_batch() for _ in range(stream.num_batches)], counts

    for max_length in (40, 200):
        cut, whole = read(100, max_length), read(1 << 40, max_length)
        assert cut == whole
        assert cut[1]["data.train"].num_truncated or algorithm == "dpo"


@pytest.mark.usefixtures("short")
def test_a_prompt_that_is_too_long_is_dropped_without_all_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")
    tokenizer, _ = load_policy_tokenizer(config["policy"], None)
    lengths: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **given: lengths.append(len(text)) or encode(text, **given))
    for template in (None, "{question}"):
        encoder = PromptEncoder(tokenizer, template, 60)
        with pytest.warns(UserWarning, match=r"Dropping prompts of over 60 tokens .*; the first has more\."):
            assert encoder(Problem("a " * 5000, "1", {})) is None
        assert encoder(Problem("a b", "1", {})) is not None
        assert encoder.num_too_long == 1
    assert max(lengths) < 2000
