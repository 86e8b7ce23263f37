"""Responses to prompts, and what an environment thinks of them."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from nemo_rl_offload.batching.batch import NO_ROUTE, ROUTED_EXPERTS, Batch, pad_sequences
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.data.turns import encode_observation
from nemo_rl_offload.environments.interface import UNFINISHED, Environment, Episode, Message, Score
from nemo_rl_offload.generation.interface import Generated, Responds, Told
from nemo_rl_offload.generation.sampling import Sampling

SEEDS_OF_A_TURN = 1_000_000_007
"""How far the seeds of an episode's successive turns are apart."""


@dataclass(frozen=True)
class Rollout:
    """Prompts, each repeated as often as it was answered, with responses and scores in the same order."""

    prompts: list[Prompt]
    responses: list[Response]
    scores: list[Score]
    answered: Counter[int] = field(default_factory=Counter)
    """By turn, episodes in which the environment answered it."""
    without_room: Counter[int] = field(default_factory=Counter)
    """Those of them that might have another turn, and have no room for it."""

    @classmethod
    def join(cls, parts: Sequence["Rollout"]) -> "Rollout":
        """One rollout of all parts, in order."""
        return cls(
            [prompt for part in parts for prompt in part.prompts],
            [response for part in parts for response in part.responses],
            [score for part in parts for score in part.scores],
            sum((part.answered for part in parts), Counter()),
            sum((part.without_room for part in parts), Counter()),
        )

    def groups(self, size: int) -> list["Rollout"]:
        """Cut into pieces of `size` responses, the generations of one prompt."""
        pieces = [slice(start, start + size) for start in range(0, len(self.responses), size)]
        return [Rollout(self.prompts[piece], self.responses[piece], self.scores[piece]) for piece in pieces]

    @property
    def rewards(self) -> torch.Tensor:
        """float32 [B]."""
        return torch.tensor([score.reward for score in self.scores])

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Several rewards by name, in the order of the alphabet: float32 [B], 0 where a response has none."""
        names = sorted({name for score in self.scores for name in score.parts or ()})
        return {name: torch.tensor([(score.parts or {}).get(name, 0.0) for score in self.scores]) for name in names}

    @property
    def is_graded(self) -> bool:
        """Whether rewards are no marks of right and wrong, and to be right says no more than a reward above 0."""
        has_grades = any(score.reward not in (0.0, 1.0) for score in self.scores)
        return has_grades and all(_is_right_by_reward(score) for score in self.scores)

    def metrics(self) -> dict[str, float]:
        """Means over the responses, under NeMo-RL's names where it has them."""
        count = len(self.scores)
        return {
            "reward": sum(score.reward for score in self.scores) / count,
            "accuracy": sum(score.is_correct for score in self.scores) / count,
            "mean_prompt_length": sum(len(prompt.token_ids) for prompt in self.prompts) / count,
            "mean_gen_tokens_per_sample": sum(response.num_generated for response in self.responses) / count,
            "avg_turns_per_sample": sum(response.num_turns for response in self.responses) / count,
            "unfinished_fraction": sum(not response.finished for response in self.responses) / count,
            "scorer_errors": float(sum(score.scorer_error for score in self.scores)),
            **self._drafts(),
            **self._of_turns(),
            **{f"reward/{name}": float(part.mean()) for name, part in self.parts.items()},
        }

    def _drafts(self) -> dict[str, float]:
        drafted = sum(response.num_drafted for response in self.responses)
        accepted = sum(response.num_accepted for response in self.responses)
        return {"draft_acceptance_rate": accepted / drafted} if drafted else {}

    def _of_turns(self) -> dict[str, float]:
        """The share of responses that each fault is in, and of those that are not learned from; where there are any."""
        faults = Counter(name for score in self.scores for name in score.faults or ())
        masked = sum(score.is_masked for score in self.scores)
        found = {f"{name}_fraction": num / len(self.scores) for name, num in sorted(faults.items())}
        return found | ({"masked_fraction": masked / len(self.scores)} if masked else {})

    def pass_at(self, size: int) -> dict[str, float]:
        """`pass_k`: the share of prompts of whose `size` responses, next to each other, one is right."""
        groups = self.groups(size)
        return {"pass_k": sum(any(score.is_correct for score in group.scores) for group in groups) / len(groups)}

    def batch(self, pad_id: int) -> Batch:
        """`input_ids`, `input_lengths`, `token_mask` (1 on sampled tokens), `sample_mask`, `generation_logprobs`.

        And `ROUTED_EXPERTS`, where generation says them of any response.
        """
        sequences = [p.token_ids + r.tokens for p, r in zip(self.prompts, self.responses, strict=True)]
        batch = pad_sequences(sequences, pad_id)
        batch["sample_mask"] = torch.tensor([float(not score.is_masked) for score in self.scores])
        batch["token_mask"] = torch.zeros_like(batch["input_ids"], dtype=torch.float32)
        batch["generation_logprobs"] = torch.zeros_like(batch["token_mask"])
        for row, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            begin, end = len(prompt.token_ids), len(sequences[row])
            batch["token_mask"][row, begin:end] = 1
            batch["token_mask"][row, [begin + place for place in sorted(response.observed)]] = 0
            batch["generation_logprobs"][row, begin:end] = torch.tensor(response.logprobs)
        for row, response in enumerate(self.responses):
            if response.routed_experts is not None:
                routes = torch.tensor(response.routed_experts)  # a copy: Ray's arrays are read-only
                if ROUTED_EXPERTS not in batch:
                    batch[ROUTED_EXPERTS] = routes.new_full((*batch["input_ids"].shape, *routes.shape[1:]), NO_ROUTE)
                batch[ROUTED_EXPERTS][row, : len(routes)] = routes
        return batch


@dataclass(frozen=True)
class Limits:
    """How long a rollout may get."""

    max_rollout_turns: int
    max_total_sequence_length: int
    """Of prompt, all turns and observations."""


NOTHING = Response([], [], finished=False, num_turns=0)


@dataclass
class _Running:
    """One episode on its way."""

    prompt: Prompt
    messages: list[Message]
    response: Response = NOTHING
    """All turns so far."""
    last: Response = NOTHING
    """This turn."""
    score: Score = UNFINISHED
    observation: list[int] | None = None
    """What the next turn begins with; None when there is none."""

    @property
    def token_ids(self) -> list[int]:
        """What the next turn continues."""
        return self.prompt.token_ids + self.response.tokens + (self.observation or [])

    def go_on(self, reply: Response) -> None:
        """Add a turn."""
        self.response, self.last = self.response.then(self.observation or [], reply), reply


def rollout(
    policy: Responds,
    environment: Environment,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    num_generations: int,
    seed: int,
    *,
    sampling: Sampling,
    ends_without_text: Collection[int],
    template: str | None,
    limits: Limits,
    told: Callable[[int], Told] | None = None,
    scoring: AbstractContextManager[object] | None = None,
) -> Rollout:
    """Sample `num_generations` responses to each prompt, next to each other, and have them scored.

    Where the environment answers with an observation, the conversation goes on with another turn: until the environment
    ends an episode, a turn has no end, or a limit is reached. Episodes go on each by itself where the policy gives
    responses one by one (`policy.open_stream`), and else all in step; what is drawn for an episode's turn is a function
    of `seed`, the episode's number and the turn's. The reward is the sum over turns. A last token of
    `ends_without_text` is left out of what a response says. `template` is `data.prompt_template`, as observations are
    encoded. `told` makes for a number of prompts what hears of the progress.
    Tokenizer and environment are used within `scoring`, such as a lock.
    """
    repeated = [prompt for prompt in prompts for _ in range(num_generations)]
    stream = policy.open_stream(sampling) or _Batches(policy, sampling, told)
    episodes = [_Running(prompt, [{"role": "user", "content": prompt.problem.question}]) for prompt in repeated]
    longest = limits.max_total_sequence_length - sampling.max_new_tokens
    hear = None if told is None else told(len(repeated))
    num_responses = num_tokens = 0
    answered, without_room = Counter[int](), Counter[int]()
    stream.submit(range(len(episodes)), [each.token_ids for each in episodes], seed)
    while ended := stream.take():
        replied = [episodes[place] for place, _ in ended]
        for each, (_, reply) in zip(replied, ended, strict=True):
            each.go_on(reply)
        with scoring or nullcontext():
            _score(replied, environment, tokenizer, template, ends_without_text)
        by_turn: dict[int, list[int]] = {}
        for place, reply in ended:
            each, num_tokens = episodes[place], num_tokens + len(reply.tokens)
            turn = each.response.num_turns
            if each.observation is not None:
                answered[turn] += 1
                without_room[turn] += turn < limits.max_rollout_turns and len(each.token_ids) > longest
            if each.observation is None or len(each.token_ids) > longest or turn == limits.max_rollout_turns:
                num_responses += 1
            else:
                by_turn.setdefault(turn, []).append(place)
        if hear is not None and not isinstance(stream, _Batches):
            hear(Generated(num_responses, num_tokens))
        for turn, places in by_turn.items():
            stream.submit(places, [episodes[place].token_ids for place in places], seed + turn * SEEDS_OF_A_TURN)
    responses, scores = [each.response for each in episodes], [each.score for each in episodes]
    return Rollout(repeated, responses, scores, answered, without_room)


class _Batches:
    """Implements `ResponseStream` by a policy that answers all that was submitted as one batch."""

    def __init__(self, policy: Responds, sampling: Sampling, told: Callable[[int], Told] | None) -> None:
        self._policy, self._sampling, self._told = policy, sampling, told
        self._submitted: tuple[Sequence[int], Sequence[list[int]], int] | None = None

    def submit(self, places: Sequence[int], prompts: Sequence[list[int]], seed: int) -> None:
        assert self._submitted is None, "all episodes are in step"
        self._submitted = places, prompts, seed

    def take(self) -> list[tuple[int, Response]]:
        if self._submitted is None:
            return []
        places, prompts, seed = self._submitted
        self._submitted = None
        told = self._told and self._told(len(prompts))
        responses = self._policy.generate(prompts, seed, self._sampling, told, places)
        return list(zip(places, responses, strict=True))


def _score(
    episodes: Sequence[_Running],
    environment: Environment,
    tokenizer: Tokenizer,
    template: str | None,
    ends_without_text: Collection[int],
) -> None:
    """Add the environment's scores of this turn, and what it answers."""
    ends = [next((token for token in each.last.tokens[-1:] if token in ends_without_text), None) for each in episodes]
    pairs = zip(episodes, ends, strict=True)
    said = [each.last.tokens if end is None else each.last.tokens[:-1] for each, end in pairs]
    texts = tokenizer.batch_decode(said, skip_special_tokens=True)  # an end token need not be a special one
    for each, text in zip(episodes, texts, strict=True):
        each.messages.append({"role": "assistant", "content": text})
    turns = [Episode(each.prompt.problem.entry, each.messages, each.last.finished) for each in episodes]
    for each, end, answer in zip(episodes, ends, environment.step(turns), strict=True):
        before = each.score
        each.score = Score(
            before.reward + answer.reward,
            answer.is_correct,
            before.scorer_error or answer.scorer_error,
            parts=_sum(before.parts, answer.parts),
            last_reward=answer.reward,
            answer=answer.answer,
        )
        each.observation = None
        if answer.observation is not None:
            each.messages.append({"role": "user", "content": answer.observation})
            each.observation = encode_observation(tokenizer, template, each.messages, end)


def _is_right_by_reward(score: Score) -> bool:
    judged = score.reward if score.last_reward is None else score.last_reward
    return score.is_correct == (judged > 0)


def _sum(before: Mapping[str, float] | None, now: Mapping[str, float] | None) -> Mapping[str, float] | None:
    if before is None or now is None:
        return before if now is None else now
    return {name: before.get(name, 0.0) + now.get(name, 0.0) for name in {**before, **now}}
