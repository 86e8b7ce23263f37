"""Rollouts: which response belongs to which prompt, and the batch made of them."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.algorithms.rollout import Limits, Rollout, rollout
from nemo_rl_offload.batching.batch import NO_ROUTE, ROUTED_EXPERTS
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.data.policy_tokenizer import response_ends
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.sampling import Sampling

PAD_ID = 0


def make_prompt(token_ids: list[int]) -> Prompt:
    return Prompt(Problem("q", "a", {"ids": token_ids}), token_ids)


def make_response(tokens: list[int], finished: bool = True) -> Response:
    return Response(tokens, [-0.5 * token for token in tokens], finished)


TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(1, 9), max_size=5)), min_size=1, max_size=5))
def test_batch(pairs: list[tuple[list[int], list[int]]]) -> None:
    prompts, responses = [make_prompt(p) for p, _ in pairs], [make_response(r) for _, r in pairs]
    batch = Rollout(prompts, responses, [Score(0.0, False, False)] * len(pairs)).batch(PAD_ID)
    width = max(len(p) + len(r) for p, r in pairs)
    assert all(value.shape == (len(pairs), width) for name, value in batch.items() if value.ndim == 2)
    assert batch["sample_mask"].tolist() == [1] * len(pairs)
    for row, (prompt, response) in enumerate(pairs):
        padding = [0] * (width - len(prompt) - len(response))
        assert batch["input_ids"][row].tolist() == prompt + response + padding
        assert batch["input_lengths"][row] == len(prompt) + len(response)
        assert batch["token_mask"][row].tolist() == [0] * len(prompt) + [1] * len(response) + padding
        logprobs = [-0.5 * token for token in response]
        assert batch["generation_logprobs"][row].tolist() == [0] * len(prompt) + logprobs + padding


def test_a_batch_has_the_experts_that_generation_chose() -> None:
    """Of two layers, two experts; the last token has none yet, and one response comes without any."""
    routes = np.arange(4 * 2 * 2, dtype=np.int8).reshape(4, 2, 2)
    routes.flags.writeable = False  # as they come from a worker
    responses = [make_response([7]), replace(make_response([5, 6, 7]), routed_experts=routes)]
    batch = Rollout([make_prompt([3]), make_prompt([3, 4])], responses, [Score(0.0, False, False)] * 2).batch(PAD_ID)
    found = batch[ROUTED_EXPERTS]
    assert found.dtype == torch.int8
    assert found.shape == (2, 5, 2, 2)
    assert (found[0] == NO_ROUTE).all()
    assert torch.equal(found[1, :4], torch.tensor(routes))
    assert (found[1, 4] == NO_ROUTE).all()
    without = Rollout([make_prompt([3])], responses[:1], [Score(0.0, False, False)]).batch(PAD_ID)
    assert ROUTED_EXPERTS not in without


class InBatches:
    def open_stream(self, sampling: Sampling) -> None:
        """It answers batches."""


def test_rollout_repeats_prompts_side_by_side() -> None:
    class Policy(InBatches):
        def generate(
            self, prompts: list[list[int]], seed: int, sampling: Sampling, told: None, places: Any
        ) -> list[Response]:
            assert seed == 11
            return [make_response([prompt[0] + 1, index], index % 2 == 0) for index, prompt in enumerate(prompts)]

    class Tokenizer:
        def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
            assert skip_special_tokens
            return [str(sequence) for sequence in sequences]

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(character) for character in text]

    class Environment:
        def step(self, episodes: list[Episode]) -> list[Score]:
            assert [[message["role"] for message in each.messages] for each in episodes] == [["user", "assistant"]] * 4
            return [
                Score(entry["ids"][0] + 0.25 * done, messages[-1]["content"].startswith("[6"), False, "more")
                for entry, messages, done in episodes
            ]

    policy: Any = Policy()
    environment: Any = Environment()
    prompts = [make_prompt([3]), make_prompt([5, 5])]
    limits = Limits(1, 99)
    played = rollout(
        policy,
        environment,
        Tokenizer(),
        prompts,
        2,
        11,
        sampling=Sampling(9),
        ends_without_text={1},
        template="",
        limits=limits,
    )
    assert [prompt.token_ids for prompt in played.prompts] == [[3], [3], [5, 5], [5, 5]]
    assert [response.tokens for response in played.responses] == [[4, 0], [4, 1], [6, 2], [6, 3]]
    assert torch.equal(played.rewards, torch.tensor([3.25, 3.0, 5.25, 5.0]))
    assert played.metrics() == {
        "reward": pytest.approx(4.125),
        "accuracy": 0.5,
        "mean_prompt_length": 1.5,
        "mean_gen_tokens_per_sample": 2.0,
        "avg_turns_per_sample": 1.0,
        "unfinished_fraction": 0.5,
        "scorer_errors": 0.0,
    }


class Countdown(InBatches):
    """A game: the model says a number, the environment answers until it is 0. Rewards and replies are noted."""

    def __init__(self) -> None:
        self.inputs: list[list[list[int]]] = []
        self.seeds: list[int] = []

    def generate(
        self, prompts: list[list[int]], seed: int, sampling: Sampling, told: None, places: Any
    ) -> list[Response]:
        self.inputs.append(prompts)
        self.seeds.append(seed)
        return [Response([prompt[-1] - 1, END], [-1.0, -2.0], prompt[-1] != 42) for prompt in prompts]

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [str(sequence[0]) for sequence in sequences]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [OBSERVED, int(text)]

    def step(self, episodes: list[Episode]) -> list[Score]:
        said = [int(each.messages[-1]["content"]) for each in episodes]
        for each in episodes:
            assert [message["role"] for message in each.messages] == ["user", "assistant"] * (len(each.messages) // 2)
        return [Score(1.0, number == 0, number == 7, str(number) if number else None) for number in said]


class OneByOne(Countdown):
    """Gives one response at a time, the last that was asked for first; notes which turns were under way together."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[int, list[int]]] = []
        self.turns: list[set[int]] = []
        self.draws: dict[int, list[int]] = {}

    def open_stream(self, sampling: Sampling) -> Any:
        return self

    def submit(self, places: list[int], prompts: list[list[int]], seed: int) -> None:
        for place in places:
            self.draws.setdefault(place, []).append(seed)
        self.waiting += zip(places, prompts, strict=True)

    def take(self) -> list[tuple[int, Response]]:
        if not self.waiting:
            return []
        self.turns.append({len(self.draws[place]) for place, _ in self.waiting})
        place, prompt = self.waiting.pop()
        return [(place, self.generate([prompt], 0, Sampling(4), None, [place])[0])]


END, OBSERVED = 98, 99


def play(starts: list[int], max_turns: int, max_length: int = 50, game: Any = None) -> tuple[Rollout, Countdown]:
    game = game or Countdown()
    prompts = [make_prompt([start]) for start in starts]
    limits = Limits(max_turns, max_length)
    return rollout(
        game,
        game,
        game,
        prompts,
        1,
        5,
        sampling=Sampling(4),
        ends_without_text={END},
        template="{question}",
        limits=limits,
    ), game


def test_turns_follow_each_other_until_the_environment_ends_the_episode() -> None:
    played, game = play([1, 3, 8], max_turns=4)
    first, second, third = played.responses
    assert first.tokens == [0, END]
    assert second.tokens == [2, END, OBSERVED, 2, 1, END, OBSERVED, 1, 0, END]
    assert second.logprobs == [-1.0, -2.0, 0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -1.0, -2.0]
    assert second.observed == {2, 3, 6, 7}
    assert [response.num_turns for response in played.responses] == [1, 3, 4]
    assert third.tokens[-2:] == [4, END]
    assert played.rewards.tolist() == [1.0, 3.0, 4.0]
    assert [score.is_correct for score in played.scores] == [True, True, False]
    assert [score.scorer_error for score in played.scores] == [False, False, True]
    assert [len(inputs) for inputs in game.inputs] == [3, 2, 2, 1]
    assert len(set(game.seeds)) == 4
    assert game.inputs[2] == [
        [3, 2, END, OBSERVED, 2, 1, END, OBSERVED, 1],
        [8, 7, END, OBSERVED, 7, 6, END, OBSERVED, 6],
    ]
    metrics = played.metrics()
    assert metrics["avg_turns_per_sample"] == pytest.approx(8 / 3)
    assert metrics["mean_gen_tokens_per_sample"] == pytest.approx(16 / 3)


@pytest.mark.parametrize("max_length", [9, 50])
@pytest.mark.parametrize("max_turns", [1, 2, 4])
def test_episodes_that_go_on_by_themselves_are_the_same(max_turns: int, max_length: int) -> None:
    starts = [1, 3, 8, 43, 2, 3]
    in_step, batches = play(starts, max_turns, max_length)
    by_itself, game = play(starts, max_turns, max_length, OneByOne())
    assert by_itself == in_step
    assert isinstance(game, OneByOne)
    for place, seeds in game.draws.items():
        assert seeds == batches.seeds[: in_step.responses[place].num_turns], "of the seed, the place and the turn"
    if max_turns > 1:
        assert any(len(turns) > 1 for turns in game.turns), "turns of different number are under way together"


def test_only_sampled_tokens_are_learned() -> None:
    played, _ = play([3, 1], max_turns=2)
    batch = played.batch(PAD_ID)
    assert batch["input_ids"].tolist() == [[3, 2, END, OBSERVED, 2, 1, END], [1, 0, END, 0, 0, 0, 0]]
    assert batch["token_mask"].tolist() == [[0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0]]
    assert batch["generation_logprobs"].tolist() == [[0, -1, -2, 0, 0, -1, -2], [0, -1, -2, 0, 0, 0, 0]]


@pytest.mark.parametrize(("max_length", "num_turns"), [(8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_turn_that_might_not_fit_is_not_begun(max_length: int, num_turns: int) -> None:
    """A prompt of 1, then 2 and 2 tokens for each turn and what is said to it, and room for 4."""
    played, _ = play([9], max_turns=5, max_length=max_length)
    assert played.responses[0].num_turns == num_turns
    assert played.scores[0].reward == num_turns


def test_join_keeps_the_order() -> None:
    parts = [Rollout([make_prompt([n])], [make_response([n])], [Score(float(n), n == 2, n == 3)]) for n in (1, 2, 3)]
    joined = Rollout.join(parts)
    assert joined.rewards.tolist() == [1.0, 2.0, 3.0]
    assert [prompt.token_ids for prompt in joined.prompts] == [[1], [2], [3]]
    assert joined.metrics()["accuracy"] == pytest.approx(1 / 3)
    assert joined.metrics()["scorer_errors"] == 1.0


class Speaker(InBatches):
    """Says "yo" and an end token; notes what it was given."""

    def __init__(self, end_id: int) -> None:
        self.end_id = end_id
        self.prompts: list[list[int]] = []

    def generate(
        self, prompts: list[list[int]], seed: int, sampling: Sampling, told: None, places: Any
    ) -> list[Response]:
        self.prompts += prompts
        return [Response([*b"yo", self.end_id], [0.0] * 3, True) for _ in prompts]


class Asks:
    """Notes conversations, and asks for another turn."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def step(self, episodes: list[Episode]) -> list[Score]:
        self.heard += [each.messages[-1]["content"] for each in episodes]
        return [Score(0.0, False, False, f"THE-TURN-0 next {len(each.messages)}") for each in episodes]


LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("end", ["<|im_end|>", "<over>"])
def test_turns_of_the_chat_template_have_one_end_each(tokenizer: Any, end: str) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<over>"])  # no special token
    tokenizer.chat_template = LLAMA_2.replace("eos_token", f"'{end}'")
    speaker: Any = Speaker(tokenizer.convert_tokens_to_ids(end))
    asks: Any = Asks()
    prompts = [make_prompt(tokenizer.encode("<|bos|>[INST] q [/INST]"))]
    played = rollout(
        speaker,
        asks,
        tokenizer,
        prompts,
        1,
        5,
        sampling=Sampling(4),
        ends_without_text={speaker.end_id},
        template=None,
        limits=Limits(3, 500),
    )
    spoken = [tokenizer.decode(ids) for ids in (*speaker.prompts, prompts[0].token_ids + played.responses[0].tokens)]
    first = f"<|bos|>[INST] q [/INST]yo{end}"
    second = f"{first}<|bos|>[INST] THE-TURN-0 next 2 [/INST]yo{end}"
    assert spoken[1:3] == [second.removesuffix(f"yo{end}"), f"{second}<|bos|>[INST] THE-TURN-0 next 4 [/INST]"]
    assert spoken[3] == f"{second}<|bos|>[INST] THE-TURN-0 next 4 [/INST]yo{end}"
    assert asks.heard == ["yo", "yo", "yo"]


@pytest.mark.parametrize(
    ("scores", "is_graded"),
    [
        ([Score(0.5, True, False), Score(0.0, False, False)], True),
        ([Score(0.3, True, False, last_reward=0.1), Score(0.1, False, False, last_reward=0.0)], True),  # cut off later
        ([Score(0.3, False, False, last_reward=0.1), Score(1.0, True, False, last_reward=1.0)], False),  # is_correct
        ([Score(0.5, False, False), Score(1.0, True, False)], False),
        ([Score(1.0, True, False, last_reward=1.0), Score(0.0, False, False, last_reward=0.0)], False),
    ],
)
def test_rewards_are_graded_where_right_says_no_more_than_they_do(scores: list[Score], is_graded: bool) -> None:
    played = Rollout([make_prompt([1])] * 2, [make_response([1])] * 2, scores)
    assert played.is_graded == is_graded


def test_the_share_of_drafts_that_were_taken_is_a_metric_where_there_were_drafts() -> None:
    score = Score(1.0, is_correct=True, scorer_error=False)
    drafted = [replace(make_response([1]), num_drafted=6, num_accepted=number) for number in (0, 3)]
    drafted.append(drafted[1].then([9], drafted[1]))
    played = Rollout([make_prompt([1])] * 3, drafted, [score] * 3)
    assert played.metrics()["draft_acceptance_rate"] == 9 / 24
    assert "draft_acceptance_rate" not in Rollout([make_prompt([1])], [make_response([1])], [score]).metrics()


@pytest.mark.parametrize(
    ("reply", "heard", "closing"),
    [
        ("call()</call>", "call()</call>", "<|im_end|>\n"),  # ended by a stop string, or by an ordinary stop token
        ("call()<over>", "call()<over>", "<|im_end|>\n"),
        ("call()<|im_end|>", "call()", "\n"),
        ("call()<|reserved_0|>", "call()", "\n"),  # special, in stop_token_ids: ends a turn as <|im_end|> does
        ("", "", "<|im_end|>\n"),
        ("<|im_end|>", "", "\n"),
    ],
)
def test_what_ended_a_turn_is_text_or_closes_it(tokenizer: Any, reply: str, heard: str, closing: str) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<over>"])  # no special token
    ids = tokenizer.encode(reply)

    class Says(InBatches):
        def generate(
            self, prompts: list[list[int]], seed: int, sampling: Sampling, told: None, places: Any
        ) -> list[Response]:
            return [Response(ids, [-0.5] * len(ids), True) for _ in prompts]

    says: Any = Says()
    asks: Any = Asks()
    section = {
        "stop_token_ids": tokenizer.convert_tokens_to_ids(["<over>", "<|reserved_0|>"]),
        "stop_strings": ["</call>"],
    }
    policy: Any = {"generation": section}
    ends = response_ends(policy, tokenizer, (256,))
    assert ends.ids == (256, *section["stop_token_ids"])
    prompts = [make_prompt([1, 2])]
    played = rollout(
        says, asks, tokenizer, prompts, 1, 5,
        sampling=Sampling(4), ends_without_text=ends.without_text, template=None, limits=Limits(2, 500),
    )  # fmt: skip
    assert asks.heard == [heard, heard]
    (response,) = played.responses
    observed = [response.tokens[place] for place in sorted(response.observed)]
    asked = "<|im_start|>user\nTHE-TURN-0 next 2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(observed) == closing + asked
    assert response.tokens == ids + observed + ids
    assert response.logprobs == [-0.5] * len(ids) + [0.0] * len(observed) + [-0.5] * len(ids)
    mask = played.batch(PAD_ID)["token_mask"][0].tolist()
    assert mask == [0] * 2 + [1] * len(ids) + [0] * len(observed) + [1] * len(ids)


def test_a_stop_string_that_the_tokenizer_never_writes_is_refused(tokenizer: Any) -> None:
    policy: Any = {"generation": {"stop_token_ids": None, "stop_strings": ["ok", "<|im_end|>"]}}
    with pytest.raises(ConfigError, match=r"stop_strings: '<\|im_end\|>' is a special token.*stop_token_ids=\[256\]"):
        response_ends(policy, tokenizer, (256,))
