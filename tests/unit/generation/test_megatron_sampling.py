"""Filters against plain Python, the distribution of samples, and batches that do not know of each other."""

import contextlib
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_offload.config.loader import resolve_tokenizer_path
from nemo_rl_offload.generation import megatron_sampling
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.megatron_sampling import filter_logits, generate, generating, sample
from nemo_rl_offload.generation.sampling import Sampling


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kept(logits: list[float], top_k: int | None, top_p: float) -> set[int]:
    """The tokens that remain, one by one from the likeliest; all logits differ."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    probabilities = softmax([logits[token] for token in order])
    nucleus: set[int] = set()
    mass = 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if mass >= top_p:
            break
        nucleus.add(token)
        mass += probability
    return nucleus


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=8, unique=True),
    st.none() | st.integers(1, 10),
    st.sampled_from([1.0, 0.97, 0.8, 0.5, 0.123, 1e-6]),
)
def test_filters_keep_what_plain_python_keeps(values: list[int], top_k: int | None, top_p: float) -> None:
    logits = [value / 10 for value in values]
    filtered = filter_logits(torch.tensor([logits, logits[::-1]]), top_k, top_p)
    expected = [kept(logits, top_k, top_p), {len(logits) - 1 - token for token in kept(logits, top_k, top_p)}]
    for row, tokens, original in zip(filtered.tolist(), expected, (logits, logits[::-1]), strict=True):
        assert {token for token, logit in enumerate(row) if logit > -math.inf} == tokens
        assert all(row[token] == pytest.approx(original[token]) for token in tokens)


def test_a_nucleus_that_is_reached_exactly_takes_no_more() -> None:
    filtered = filter_logits(torch.zeros(1, 4), None, 0.5)
    assert int((filtered > -math.inf).sum()) == 2


@pytest.mark.parametrize(
    ("changes", "tempered", "allowed"),
    [
        ({}, 1.0, {0, 1, 2, 3}),
        ({"temperature": 0.5}, 0.5, {0, 1, 2, 3}),
        ({"temperature": 2.0, "top_k": 2}, 2.0, {1, 3}),
        ({"top_p": 0.9}, 1.0, {0, 1, 3}),
    ],
)
def test_samples_follow_the_filtered_distribution(changes: dict[str, Any], tempered: float, allowed: set[int]) -> None:
    logits = [0.0, 1.0, -1.0, 2.0]
    num_samples = 20_000
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs = sample(torch.tensor([logits]).expand(num_samples, -1), Sampling(4, **changes), generator)
    scaled = [logit / tempered for logit in logits]
    weights = {token: math.exp(scaled[token]) for token in allowed}
    counts = Counter(tokens.tolist())
    assert counts.keys() == allowed
    for token in allowed:
        # Five standard deviations of a binomial frequency are at most 5 * 0.5 / sqrt(20000) = 0.018.
        assert counts[token] / num_samples == pytest.approx(weights[token] / sum(weights.values()), abs=0.018)
    # Log-probabilities are those at the temperature, before the filters.
    expected = [math.log(probability) for probability in softmax(scaled)]
    assert logprobs.tolist() == pytest.approx([expected[token] for token in tokens.tolist()], abs=1e-5)


def test_the_same_generator_gives_the_same_samples() -> None:
    logits = torch.zeros(50, 8)
    first, again, other = (
        sample(logits, Sampling(4), torch.Generator().manual_seed(seed))[0].tolist() for seed in (3, 3, 4)
    )
    assert first == again != other


class Counting(torch.nn.Module):
    """Says "the sum of all tokens so far, modulo 7" and checks positions; 7 prompts of any length share batches."""

    pre_process = post_process = True
    config = SimpleNamespace(sequence_parallel=False, context_parallel_size=1, fine_grained_activation_offloading=False)

    def __init__(self) -> None:
        super().__init__()
        self.sums: Tensor | None = None

    def forward(self, ids: Tensor, positions: Tensor, mask: None, *, inference_context: Any, **_: Any) -> Tensor:
        start = inference_context.sequence_len_offset
        assert positions.tolist() == [list(range(start, start + ids.shape[1]))] * len(ids)
        if start == 0:
            self.sums = torch.zeros(len(ids), dtype=torch.int64)
        assert self.sums is not None
        sums = self.sums[:, None] + ids.cumsum(1)
        self.sums = sums[:, -1]
        return torch.nn.functional.one_hot(sums % 7, 7).float() * 100


def count_up(prompt: list[int], max_new_tokens: int, end_ids: list[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens and (len(tokens) == len(prompt) or tokens[-1] not in end_ids):
        tokens.append(sum(tokens) % 7)
    return tokens[len(prompt) :]


@pytest.mark.usefixtures("process_group")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), min_size=1, max_size=7),
    st.integers(1, 8),
    st.integers(1, 6),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_every_row_sees_its_own_tokens(
    prompts: list[list[int]], batch_size: int, max_new_tokens: int, end_ids: list[int]
) -> None:
    sampling = Sampling(max_new_tokens, top_k=1)
    responses = generate([Counting()], prompts, sampling, batch_size=batch_size, end_ids=end_ids, seed=0)
    expected = [count_up(prompt, max_new_tokens, end_ids) for prompt in prompts]
    assert [response.tokens for response in responses] == expected
    assert [response.finished for response in responses] == [tokens[-1] in end_ids for tokens in expected]
    assert all(len(response.logprobs) == len(response.tokens) for response in responses)
    assert all(abs(value) < 1e-5 for response in responses for value in response.logprobs)


class Reciting(Counting):
    """Answers a prompt of one token, a number, with the text of that number, as bytes."""

    def __init__(self, texts: list[bytes]) -> None:
        super().__init__()
        self.texts = texts
        self.rows: list[int] = []

    def forward(self, ids: Tensor, positions: Tensor, mask: None, *, inference_context: Any, **_: Any) -> Tensor:
        start = inference_context.sequence_len_offset
        if start == 0:
            self.rows = ids[:, 0].tolist()
        said = [[self.texts[row][place] for place in positions[0].tolist()] for row in self.rows]
        return torch.nn.functional.one_hot(torch.tensor(said), 264).float() * 100


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("strings", "said", "finished"),
    [
        (("END",), ["so it is END", "never ends: EN D", "größer als", "END"], [True, False, False, True]),
        (("ö", "D"), ["so it is END", "never ends: EN D", "grö", "END"], [True, True, True, True]),
        (("it", "is"), ["so it", "never ends: EN D", "größer als", "ENDEND END"], [True, False, False, False]),
        ((), ["so it is END now ", "never ends: EN D", "größer als", "ENDEND END"], [False, False, False, False]),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_a_stop_string_is_the_end_of_a_response(
    strings: tuple[str, ...], said: list[str], finished: list[bool], batch_size: int
) -> None:
    """Tokens and log-probabilities end with the byte that completes it."""
    texts = [b"so it is END now ...", b"never ends: EN D ...", "größer als das ...".encode(), b"ENDEND END ..........."]
    num_tokens = [17, 16, 12, 10]
    folder = resolve_tokenizer_path("examples/models/tiny_speller")
    for row, (text, longest) in enumerate(zip(said, num_tokens, strict=True)):
        assert len(text.encode()) == longest or finished[row]
    responses = []
    for row, longest in enumerate(num_tokens):
        sampling = Sampling(longest, top_k=1, stop_strings=strings, tokenizer=folder)
        prompts = [[number] for number in range(4)]
        both = generate([Reciting(texts)], prompts, sampling, batch_size=batch_size, end_ids=[256], seed=0)
        responses.append(both[row])
    assert [bytes(response.tokens) for response in responses] == [text.encode() for text in said]
    assert [len(response.logprobs) for response in responses] == [len(text.encode()) for text in said]
    assert [response.finished for response in responses] == finished
    assert all(response.logprobs == pytest.approx([0.0] * len(response.tokens)) for response in responses)


def test_temperature_0_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0], [5.0, 1.0, 3.0, 2.0]])
    tokens, logprobs = sample(logits, Sampling(4, temperature=0, top_p=0.1, top_k=2), None)
    assert tokens.tolist() == [2, 0]
    expected = [math.log(softmax(row)[token]) for row, token in zip(logits.tolist(), (2, 0), strict=True)]
    assert logprobs.tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("process_group")
def test_progress_counts_responses_and_tokens_of_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_sampling, "TOLD_EVERY_S", 0.0)
    texts = [b"ab\x00......", b"abcdef......", b"a\x00.......", b"\x00......."]
    told = []
    stream = generating(
        [Reciting(texts)], [[0], [1], [2], [3]], Sampling(5, top_k=1), batch_size=2, end_ids=[0], seed=0
    )
    with contextlib.suppress(StopIteration):
        while True:
            told.append(next(stream))
    assert told == [Generated(*each) for each in [(0, 2), (0, 4), (1, 6), (1, 7), (3, 10)]]
