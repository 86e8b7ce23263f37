"""Stop strings are found with the token that completes them, however a text is cut, as decoding the whole shows."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from nemo_rl_offload.generation.stop_strings import StopStrings

CORPUS = [
    "the answer is 42</answer> and nothing else",
    "stop here. STOP there\n\nQuestion: größer?",
    "日本語 émile 🙂 ok",
]
SPECIAL, ADDED = "<|end|>", "</tool>"


def make_tokenizer(kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    if kind == "pieces":  # SentencePiece's kind: spaces in front of words, and bytes for what is in no piece
        tokenizer = FastTokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = sorted({*"".join(CORPUS[:2]), "▁"})
    else:
        tokenizer = FastTokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = {"bytes": 256, "merges": 420, "pieces": 100}[kind]
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(CORPUS[:2] * 5, trainer)
    if kind == "pieces":
        model = json.loads(tokenizer.to_str())["model"]
        vocabulary = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
        tokenizer.model = models.BPE(vocabulary, [(left, right) for left, right in model["merges"]], byte_fallback=True)
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


TOKENIZERS = {kind: make_tokenizer(kind) for kind in ("bytes", "merges", "pieces")}
STOPS = ["</answer>", "STOP", "\n\n", "Question:", "größ", "日本", "🙂", " é", ADDED, "e", "x" * 30, "is 42</"]


def first_completed(tokenizer: Any, tokens: list[int], strings: list[str]) -> int | None:
    """How many tokens there are when the decoded text first holds one of the strings."""
    for end in range(1, len(tokens) + 1):
        if any(text in tokenizer.decode(tokens[:end], skip_special_tokens=True) for text in strings):
            return end
    return None


def cut_at_random(tokenizer: Any, text: str, rng: random.Random) -> list[int]:
    """A text's tokens, cut anew at random places, with special tokens and others without text in between."""
    tokens: list[int] = []
    while text:
        length = rng.randrange(1, 8)
        piece, text = text[:length], text[length:]
        ids = tokenizer.encode(piece, add_special_tokens=False)
        tokens += ids if tokenizer.decode(tokens + ids).endswith(piece) else []
        tokens += rng.choice([[], [], [], [tokenizer.eos_token_id], [len(tokenizer) + 5] * 12])
    return tokens


def completed_at(watched: StopStrings, tokens: list[int]) -> int | None:
    return next((end for end, token in enumerate(tokens, 1) if watched.completed([token], [True])[0]), None)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=25)
@given(
    strings=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
    words=st.lists(st.sampled_from([*STOPS, *CORPUS, "ab ", "</ans", "ST", "g", "\n"]), max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_the_completing_token_is_found(kind: str, strings: list[str], words: list[str], seed: int) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = cut_at_random(tokenizer, "".join(words), random.Random(seed))
    known = [token for token in tokens if token < len(tokenizer)]
    end = completed_at(StopStrings(tokenizer, strings, 1), tokens)
    found = None if end is None else len([token for token in tokens[:end] if token < len(tokenizer)])
    assert found == first_completed(tokenizer, known, strings)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=20)
@given(tokens=st.lists(st.integers(0, 440), max_size=60), letter=st.sampled_from("aeis0<\n "))
def test_tokens_that_are_no_text_do_no_harm(kind: str, tokens: list[int], letter: str) -> None:
    """Halves of characters, and whatever an untrained model says."""
    tokenizer = TOKENIZERS[kind]
    known = [token for token in tokens if token < len(tokenizer)]
    assert completed_at(StopStrings(tokenizer, [letter], 1), known) == first_completed(tokenizer, known, [letter])


def test_rows_do_not_know_of_each_other() -> None:
    tokenizer = TOKENIZERS["bytes"]
    watched = StopStrings(tokenizer, ["ab"], 3)
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    assert watched.completed([a, b, a], [True, True, True]) == [False] * 3
    assert watched.completed([b, b, b], [True, True, False]) == [True, False, False]
    assert watched.completed([a, a, b], [False, True, True]) == [False, False, True]
    assert watched.completed([a, b, b], [False, True, False]) == [False, True, False]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_string_of_as_many_tokens_as_bytes_and_of_others_in_between(kind: str) -> None:
    """A blank at the beginning of what is decoded may be lost; special tokens are no part of the text."""
    tokenizer = TOKENIZERS[kind]
    blank = tokenizer.encode("ab é", add_special_tokens=False)
    assert completed_at(StopStrings(tokenizer, [" é"], 1), blank) == len(blank)
    letters = [tokenizer.encode(f"x{letter}", add_special_tokens=False)[-1] for letter in "ST"]
    apart = [letters[0], *[tokenizer.eos_token_id] * 20, letters[1]]
    assert completed_at(StopStrings(tokenizer, ["ST"], 1), apart) == len(apart)
