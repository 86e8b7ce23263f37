"""Episodes that NeMo-Gym leads: what its agents are told, and what is learned of what they return."""

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_offload.algorithms.grpo import GRPO
from nemo_rl_offload.algorithms.gym_rollout import (
    INVALID_TOOL_CALL,
    MALFORMED_THINKING,
    NemoGym,
    faults_of,
    response_of,
    row_of,
)
from nemo_rl_offload.algorithms.rollout import NOTHING, Rollout
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.environments.interface import Score
from nemo_rl_offload.environments.nemo_gym.results import GymResult, ModelTurn
from nemo_rl_offload.errors import DataError, WorkerError
from nemo_rl_offload.generation.chat_server import IDENTITY, Call, Round
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.sampling import Sampling

PARAMS, AGENT = "responses_create_params", "agent_ref"
SAMPLING = Sampling(9, temperature=0.7, top_p=0.9)
END_ID = 2


def row(entry: dict[str, Any], agents: Sequence[str] = ("asker",), place: int = 0) -> dict[str, Any]:
    return row_of(entry, agents, SAMPLING, number=5, place=place, num_generations=4)


def test_a_record_gets_the_runs_sampling_its_numbers_and_the_only_agent() -> None:
    entry = {PARAMS: {"input": "1?", "tools": [], "temperature": 0.1}, "answer": 1}
    found = row(entry, place=11)
    assert found[PARAMS].pop("metadata") == {"extra_body": json.dumps({IDENTITY: [5, 11]})}
    assert found == {
        PARAMS: {"input": "1?", "tools": [], "temperature": 0.7, "top_p": 0.9},
        AGENT: {"type": "responses_api_agents", "name": "asker"},
        "answer": 1,
        "_ng_task_index": 2,
        "_ng_rollout_index": 3,
    }
    assert entry == {PARAMS: {"input": "1?", "tools": [], "temperature": 0.1}, "answer": 1}


def test_what_a_records_metadata_asks_for_is_kept() -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}, IDENTITY: [0, 0]}
    entry = {PARAMS: {"input": "1?", "metadata": {"extra_body": json.dumps(body), "source": "mine"}}}
    metadata = row(entry, place=1)[PARAMS]["metadata"]
    assert metadata["source"] == "mine"
    assert json.loads(metadata["extra_body"]) == body | {IDENTITY: [5, 1]}
    assert json.loads(entry[PARAMS]["metadata"]["extra_body"]) == body  # type: ignore[index]


@pytest.mark.parametrize("nothing", [{}, {"metadata": None}, {"metadata": {"extra_body": ""}}])
def test_a_record_may_have_no_metadata(nothing: dict[str, Any]) -> None:
    metadata = row({PARAMS: {"input": "1?"} | nothing})[PARAMS]["metadata"]
    assert json.loads(metadata["extra_body"]) == {IDENTITY: [5, 0]}


@pytest.mark.parametrize(
    ("name", "agents", "said"),
    [
        (None, ("asker",), None),
        ("asker", ("asker",), None),
        ("solver", ("asker", "solver"), None),
        (None, ("asker", "solver"), "a record names no agent \\(agent_ref\\), and .* start asker, solver\\."),
        ("other", ("asker", "solver"), "a record names the agent other \\(agent_ref\\), and .* start asker, solver\\."),
        ("other", ("asker",), "a record names the agent other \\(agent_ref\\), and .* start asker\\."),
        (None, (), "a record names no agent \\(agent_ref\\), and .* start none\\."),
    ],
)
def test_a_record_has_one_of_the_agents(name: str | None, agents: Sequence[str], said: str | None) -> None:
    entry = {PARAMS: {"input": "1?"}, AGENT: None if name is None else {"name": name}}
    if said is None:
        assert row(entry, agents)[AGENT]["name"] == (name or "asker")
        return
    with pytest.raises(DataError, match=f"data: {said}.*It asks '1\\?'"):
        row(entry, agents)


def turn(prompt: list[int], tokens: list[int], *, call: bool = False, thinking: bool = False) -> ModelTurn:
    return ModelTurn(tuple(prompt), tuple(tokens), call, thinking)


def result(*turns: ModelTurn, reward: float = 1.0) -> GymResult:
    return GymResult(turns, reward, None, False)


def reply(tokens: list[int], version: int, *, finished: bool = True) -> Response:
    logprobs = [-token - version / 8 for token in tokens]
    return Response(tokens, logprobs, finished, versions=[version] * len(tokens))


THREE_TURNS = result(turn([3, 4], [5, 6]), turn([3, 4, 5, 6, 7, 8], [9]), turn([3, 4, 5, 6, 7, 8, 9], [10, 11]))
CALLS = [
    Call([3, 4, 5, 6, 7, 8, 9], reply([10, 11], 2, finished=False)),
    Call([3, 4], reply([6, 6], 0)),
    Call([3, 4], reply([5, 6], 0)),
    Call([3, 4, 5, 6, 7, 8], reply([9], 1)),
]


def test_all_turns_are_one_response_as_the_engines_gave_them() -> None:
    found = response_of(THREE_TURNS, CALLS)
    assert found.tokens == [5, 6, 7, 8, 9, 10, 11]
    assert found.observed == {2, 3}
    assert found.logprobs == [-5, -6, 0, 0, -9.125, -10.25, -11.25]
    assert found.versions == [0, 0, 1, 1, 1, 2, 2]
    assert found.num_turns == 3
    assert not found.finished


def test_an_episode_of_one_turn_is_its_response() -> None:
    assert response_of(result(turn([3, 4], [5, 6])), CALLS) == reply([5, 6], 0)


@pytest.mark.parametrize(
    "unknown", [turn([3, 4], [5]), turn([3], [5, 6]), turn([3, 4], [5, 7]), turn([3, 4, 5, 6, 7], [9])]
)
def test_a_turn_that_the_engines_did_not_say_ends_the_run(unknown: ModelTurn) -> None:
    with pytest.raises(WorkerError, match=r"has a turn that this run's model did not say.*must be policy_model"):
        response_of(result(unknown), CALLS)
    with pytest.raises(WorkerError, match="did not say"):
        response_of(THREE_TURNS, CALLS[1:])


@pytest.mark.parametrize(
    ("turns", "faults"),
    [
        ([], {}),
        ([turn([3, 4], [5, 6])], {}),
        ([turn([3, 4], [5, 6], call=True)], {INVALID_TOOL_CALL: ((0, 2),)}),
        (
            [turn([3, 4], [5, 6], thinking=True), turn([3, 4, 5, 6, 7, 8], [9], thinking=True, call=True)],
            {MALFORMED_THINKING: ((0, 2), (4, 5)), INVALID_TOOL_CALL: ((4, 5),)},
        ),
        ([turn([3, 4], [5, 6]), turn([3, 4, 5, 6], [9, 9], call=True)], {INVALID_TOOL_CALL: ((2, 4),)}),
    ],
)
def test_faults_have_the_places_of_their_turns(turns: list[ModelTurn], faults: dict[str, Any]) -> None:
    assert faults_of(result(*turns)) == faults


def make_prompt(token_ids: list[int], question: str = "1?") -> Prompt:
    return Prompt(Problem(question, None, {PARAMS: {"input": question}}), token_ids)


def played(*scores: Score) -> Rollout:
    """An episode of three turns, and one of a turn behind a longer prompt."""
    prompts = [make_prompt([3, 4]), make_prompt([3, 4, 5, 6, 7])]
    return Rollout(prompts, [response_of(THREE_TURNS, CALLS), reply([8, 9], 0)], list(scores))


def score(faults: Mapping[str, tuple[tuple[int, int], ...]] | None = None, *, is_masked: bool = False) -> Score:
    return Score(1.0, is_correct=True, scorer_error=False, is_masked=is_masked, faults=faults)


BOTH = {INVALID_TOOL_CALL: ((0, 2), (4, 5)), MALFORMED_THINKING: ((4, 5), (5, 7))}


@pytest.mark.parametrize(
    ("call", "thinking", "wanted"),
    [
        (None, None, [0.5] * 9),
        (-5.0, None, [0.5, 0.5, -5, -5, 0.5, 0.5, -5, 0.5, 0.5]),
        (None, -3.0, [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, -3, -3, -3]),
        (-5.0, -3.0, [0.5, 0.5, -5, -5, 0.5, 0.5, -3, -3, -3]),
        (0.0, None, [0.5, 0.5, 0, 0, 0.5, 0.5, 0, 0.5, 0.5]),
    ],
)
def test_turns_with_a_fault_have_its_advantage(call: float | None, thinking: float | None, wanted: list[float]) -> None:
    """Malformed thinking comes last; what came between the turns, and the other episode, stay."""
    section = {"invalid_tool_call_advantage": call, "malformed_thinking_advantage": thinking}
    loop: Any = SimpleNamespace(config={"grpo": section})
    advantages = torch.tensor([[0.5] * 9, [-0.25] * 9])
    found = GRPO._penalized(loop, advantages, played(score(BOTH), score()))
    assert found.tolist() == [wanted, [-0.25] * 9]
    assert advantages.tolist() == [[0.5] * 9, [-0.25] * 9]
    found = GRPO._penalized(loop, advantages, played(score(), score({INVALID_TOOL_CALL: ((0, 2),)})))
    last = -0.25 if call is None else call
    assert found.tolist() == [[0.5] * 9, [-0.25] * 5 + [last] * 2 + [-0.25] * 2]


def test_nothing_is_learned_from_masked_responses() -> None:
    batch = played(score(is_masked=True), score()).batch(0)
    assert batch["sample_mask"].tolist() == [0, 1]
    assert batch["token_mask"][0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert batch["generation_logprobs"][0].tolist() == [0, 0, -5, -6, 0, 0, -9.125, -10.25, -11.25]
    batch = Rollout([make_prompt([END_ID])], [NOTHING], [score(is_masked=True)]).batch(0)
    assert batch["input_ids"].tolist() == [[END_ID]]
    assert batch["token_mask"].sum() == batch["sample_mask"].sum() == 0


def test_faults_and_masked_responses_are_counted_by_response() -> None:
    metrics = played(score(BOTH), score({INVALID_TOOL_CALL: ((0, 2),)}, is_masked=True)).metrics()
    assert metrics["invalid_tool_call_fraction"] == 1
    assert metrics["malformed_thinking_fraction"] == 0.5
    assert metrics["masked_fraction"] == 0.5
    names = played(score(), score()).metrics()
    assert not [name for name in names if name.startswith(("invalid", "malformed", "masked"))]


class Servers:
    """In the place of NeMo-Gym's processes and of the server of chats: each episode is of one turn.

    `answers` are by question; they come in the opposite order, when all have been asked for.
    """

    def __init__(self, num_episodes: int, answers: Mapping[str, Mapping[str, Any]]) -> None:
        self.num_episodes, self.by_question = num_episodes, answers
        self.rows: list[Mapping[str, Any]] = []
        self.rounds: list[Round] = []
        self.num_ended, self.is_answered, self.num_looks = 0, False, 0
        self.fails_at: int | None = None

    def wait(self) -> tuple[str, ...]:
        return ("asker",)

    def ask(self, row: Mapping[str, Any], answers: "queue.SimpleQueue[tuple[int, Mapping[str, Any]]]") -> int:
        self.rows.append(row)
        if len(self.rows) == self.num_episodes:
            for place, each in reversed(list(enumerate(self.rows))):
                answers.put((100 + place, self._answer(place, each[PARAMS]["input"])))
        return 99 + len(self.rows)

    def _answer(self, place: int, question: str) -> Mapping[str, Any]:
        self.rounds[-1].calls[place] = [Call([3, 4], reply([5, 10 + place], 0))]
        self.rounds[-1].num_tokens += 2
        content = [{"type": "output_text", "text": "<tool_call>"}]
        ids = {"prompt_token_ids": [3, 4], "generation_token_ids": [5, 10 + place]}
        said = {"response": {"output": [{"type": "message", "content": content, **ids}]}}
        found = self.by_question.get(question, {})
        return found if "error" in found else {"result": json.dumps({"reward": 0.5, **said, **found})}

    def check(self) -> None:
        self.num_looks += 1
        if self.fails_at == self.num_looks:
            raise WorkerError("an engine has ended")

    def open_stream(self, sampling: Sampling) -> "Servers":
        return self

    def begin(self, stream: Any, sampling: Sampling, seed: int) -> Round:
        self.rounds.append(Round(5, stream, sampling, seed))
        return self.rounds[-1]

    def finish(self, ended: Round) -> "Future[None]":
        done: Future[None] = Future()
        threading.Timer(0.1, lambda: (setattr(self, "is_answered", True), done.set_result(None))).start()
        return done

    def end(self, ended: Round) -> None:
        self.num_ended += 1

    def notices(self) -> list[str]:
        return ["of the server"]


def play(servers: Servers, *questions: str, **section: Any) -> tuple[Rollout, list[str], list[Generated]]:
    gym: Any = object.__new__(NemoGym)
    gym._process = gym._server = servers
    defaults = {"invalid_tool_call_patterns": ["<tool_call>"], "thinking_tags": [], "mask_flagged_samples": True}
    gym._section, gym._end_id, gym._notices = defaults | section, END_ID, []
    told: list[Generated] = []
    prompts = [make_prompt([], question) for question in questions]
    found = gym.play(servers, prompts, 2, 77, sampling=SAMPLING, told=lambda _: told.append)
    return found, gym.notices(), told


def test_episodes_are_in_the_order_of_their_prompts_however_they_end() -> None:
    servers = Servers(4, {"2?": {"reward": 0, "reward_components": {"form": 1}}})
    found, notices, told = play(servers, "1?", "2?")
    assert [prompt.problem.question for prompt in found.prompts] == ["1?", "1?", "2?", "2?"]
    assert [prompt.token_ids for prompt in found.prompts] == [[3, 4]] * 4
    assert [response.tokens for response in found.responses] == [[5, 10], [5, 11], [5, 12], [5, 13]]
    faults = {INVALID_TOOL_CALL: ((0, 2),)}
    right = Score(0.5, is_correct=True, scorer_error=False, faults=faults)
    wrong = Score(0.0, is_correct=False, scorer_error=False, parts={"form": 1.0}, faults=faults)
    assert found.scores == [right, right, wrong, wrong]
    assert [(each["_ng_task_index"], each["_ng_rollout_index"]) for each in servers.rows] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [json.loads(each[PARAMS]["metadata"]["extra_body"])[IDENTITY] for each in servers.rows] == [
        [5, place] for place in range(4)
    ]
    assert servers.rounds[0].seed == 77
    assert servers.num_ended == 1
    assert notices == ["of the server"]
    assert told == [Generated(number, 8) for number in range(1, 5)]


def test_a_rollout_ends_when_engines_have_answered_all_that_was_asked() -> None:
    servers = Servers(4, {})
    play(servers, "1?", "2?")
    assert servers.is_answered


@pytest.mark.parametrize("look", [1, 2, 3])
def test_where_engines_have_failed_a_rollout_whose_episodes_have_ended_does_not(look: int) -> None:
    servers = Servers(4, {key: {"error": "HTTP 500"} for key in ("1?", "2?")})
    servers.fails_at = look
    with pytest.raises(WorkerError, match="an engine has ended"):
        play(servers, "1?", "2?")
    assert servers.num_ended == 1


def test_agents_of_all_records_are_looked_at_before_the_first_episode() -> None:
    gym: Any = object.__new__(NemoGym)
    servers = Servers(2, {})
    gym._process = gym._server = servers
    named = [make_prompt([], "1?").problem, make_prompt([], "2?").problem]
    gym._unchecked = [named[0], replace(named[1], entry=named[1].entry | {AGENT: {"name": "typo"}})]
    with pytest.raises(DataError, match=r"a record names the agent typo .* It asks '2\?'"):
        gym.play(servers, [make_prompt([], "1?")], 2, 77, sampling=SAMPLING)
    assert servers.rows == []


def test_episodes_that_fail_or_have_no_turn_are_not_learned_from() -> None:
    found, notices, _ = play(
        Servers(8, {"fails?": {"error": "HTTP 500"}, "silent?": {"response": {}}, "flagged?": {"mask_sample": True}}),
        "fails?", "silent?", "flagged?", "1?",
    )  # fmt: skip
    assert [each.is_masked for each in found.scores] == [True] * 6 + [False] * 2
    assert [each.scorer_error for each in found.scores] == [True] * 2 + [False] * 6
    assert [each.reward for each in found.scores] == [0, 0] + [0.5] * 6
    assert found.responses[:4] == [NOTHING] * 4
    assert [prompt.token_ids for prompt in found.prompts[:4]] == [[END_ID]] * 4
    silent, failed, _ = sorted(notices)
    assert silent.startswith("an episode ended without a turn of the model")
    assert failed.startswith("an episode failed, counts 0")
    assert failed.endswith("HTTP 500")


def test_an_episode_that_was_rewritten_is_not_learned_from_and_told_of_once() -> None:
    said = {"type": "message", "content": [], "generation_token_ids": [5]}
    turns = [{**said, "prompt_token_ids": [3, 4]}, {**said, "prompt_token_ids": [3, 9, 5]}]
    found, notices, _ = play(Servers(4, {"rewritten?": {"response": {"output": turns}}}), "rewritten?", "1?")
    assert [each.is_masked for each in found.scores] == [True, True, False, False]
    assert [each.reward for each in found.scores] == [0.5] * 4
    assert found.responses[:2] == [NOTHING] * 2
    (told, _) = notices
    assert told.startswith("an episode's turns do not continue each other")
    with pytest.raises(WorkerError, match=r"none of the first 2 episodes has anything to learn from.*do not continue"):
        play(Servers(2, {"rewritten?": {"response": {"output": turns}}}), "rewritten?")


def test_later_a_call_of_which_every_episode_fails_does_not_end_a_run() -> None:
    gym: Any = object.__new__(NemoGym)
    gym._section = {"invalid_tool_call_patterns": [], "thinking_tags": [], "mask_flagged_samples": True}
    gym._end_id, gym._notices = END_ID, []
    for question in ("1?", "fails?"):
        gym._process = gym._server = servers = Servers(2, {"fails?": {"error": "HTTP 500"}})
        found = gym.play(servers, [make_prompt([], question)], 2, 77, sampling=SAMPLING)
    assert [each.scorer_error for each in found.scores] == [True, True]
    assert found.batch(END_ID)["sample_mask"].tolist() == [0, 0]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null", '"x"'], ids=lambda text: text[:5])
def test_what_is_no_result_fails_its_episode_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Servers._answer
    odd = {"result": text}
    monkeypatch.setattr(Servers, "_answer", lambda *args: odd if args[2] == "odd?" else answered(*args))
    found, _, _ = play(Servers(4, {}), "odd?", "1?")
    assert [each.scorer_error for each in found.scores] == [True, True, False, False]


def test_flags_count_where_the_configuration_says_so() -> None:
    servers = Servers(2, {"flagged?": {"mask_sample": True}})
    found, _, _ = play(servers, "flagged?", mask_flagged_samples=False)
    assert [each.is_masked for each in found.scores] == [False, False]


def test_a_call_of_which_every_episode_fails_ends_the_run_and_its_round() -> None:
    servers = Servers(2, {"fails?": {"error": "HTTP 500"}})
    with pytest.raises(
        WorkerError, match=r"none of the first 2 episodes has anything to learn from. Of the last: .*HTTP 500"
    ):
        play(servers, "fails?")
    assert servers.num_ended == 1
    servers = Servers(2, {"1?": {"reward": None}})
    with pytest.raises(WorkerError, match=r"anything to learn from.*without a reward"):
        play(servers, "1?")
    assert servers.num_ended == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"reward": None},
        {"reward": float("nan")},
        {"reward_components": [1, 2]},
        {"reward_components": {"a": None}},
        {"response": {"output": ["x"]}},
        {"response": {"output": [{"generation_token_ids": [1]}]}},
        {"response": []},
    ],
    ids=str,
)
def test_a_result_that_cannot_be_read_fails_its_episode_alone(fault: Mapping[str, Any]) -> None:
    found, notices, _ = play(Servers(4, {"odd?": fault}), "odd?", "1?")
    if fault != {"response": []}:
        assert [each.scorer_error for each in found.scores] == [True, True, False, False]
        assert "its result cannot be read" in "".join(notices)
    assert [each.is_masked for each in found.scores] == [True, True, False, False]
