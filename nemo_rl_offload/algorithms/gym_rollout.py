"""Rollouts whose episodes NeMo-Gym leads: its agents ask for the model's turns, call tools, and say what all is worth.

Three sides meet here. Agents run in NeMo-Gym's processes (`environments.nemo_gym`), a record of the data for each
episode. They ask a server in this process for the model's turns (`generation.chat_server`), which asks the engines. And
what an agent returns says of which of those turns the episode is made: their tokens are learned, what came between them
is what the model was told, and nothing is encoded anew.

An episode that fails, in which the model was never asked, or whose agent has rewritten earlier turns, counts with its
reward (0 where there is none) among those of its record, and nothing is learned from it. Where that is so of all of the
first call, the run ends. NeMo-RL ends it at the first rewritten turn; here one that says nothing, which Gym's messages
leave out, would end a run in its first steps.
"""

import copy
import json
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from nemo_rl_offload.algorithms.rollout import NOTHING, Rollout
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.rules.nemo_gym import GYM, gym_python
from nemo_rl_offload.config.rules.vllm import context_length
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.tokenizer_files import chosen_template
from nemo_rl_offload.data.gym_rows import AGENT, PARAMS, question_of
from nemo_rl_offload.data.policy_tokenizer import ResponseEnds
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.environments.interface import Score
from nemo_rl_offload.environments.nemo_gym.process import GymProcess
from nemo_rl_offload.environments.nemo_gym.results import GymResult, read_result
from nemo_rl_offload.errors import ConfigError, DataError, WorkerError
from nemo_rl_offload.generation.chat_prompts import ChatPrompts
from nemo_rl_offload.generation.chat_server import MAX_VALUES, Call, ChatServer, identity
from nemo_rl_offload.generation.interface import Generated, Responds, Told
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.chat_parsers import ChatParsers
from nemo_rl_offload.runs.run_directory import SCORERS_FILE
from nemo_rl_offload.specs.documents import parse_json
from nemo_rl_offload.specs.process_limits import allow_open_files

LOOK_S = 1.0
"""How often it is looked whether engines and servers are still there."""
OPEN_FILES = 65_535
"""As many as NeMo-Gym's servers allow themselves."""
INVALID_TOOL_CALL, MALFORMED_THINKING = "invalid_tool_call", "malformed_thinking"


class NemoGym:
    """NeMo-Gym's servers, and the one that answers their agents. Leads the rollouts of a loop."""

    def __init__(
        self,
        config: MasterConfig,
        run_dir: Path,
        tokenizer: Tokenizer,
        ends: ResponseEnds,
        problems: Iterable[Problem] = (),
    ) -> None:
        """Begin to start them; `wait` does until they answer.

        Args:
            problems: all records of the run, whose agents must be there.

        Raises:
            ConfigError: there is no nemo-gym, or a parser of that name.
        """
        self._section, policy = config["env"]["nemo_gym"], config["policy"]
        cfg = policy["generation"]["vllm_cfg"]
        chat, own = cfg["http_server_serving_chat_kwargs"], copy.deepcopy(tokenizer)
        variables = {**(policy["tokenizer"]["chat_template_kwargs"] or {}), **chat["default_chat_template_kwargs"]}
        self._end_id, self._notices = ends.ids[0], list[str]()
        self._unchecked = problems
        allow_open_files(OPEN_FILES)  # each episode has a connection here, and one to its agent in the other process
        self._server = ChatServer(
            ChatPrompts(own, ends.ids, _template(chat["chat_template"]), variables),
            ChatParsers(cfg, own, policy["model_name"]),
            ends.without_text,
            min(context_length(policy), policy["max_total_sequence_length"]),
            variables,
        )
        told = {"policy_base_url": [self._server.base_url], "policy_api_key": "none", "policy_model_name": "policy"}
        try:
            self._process = GymProcess(
                gym_python(self._section["python"]), {**self._section["config"], **told}, run_dir / SCORERS_FILE
            )
        except BaseException:
            self._server.close()
            raise

    def wait(self) -> tuple[str, ...]:
        """Wait until the servers answer; the names of the agents.

        Raises:
            DataError: a record's agent is not there.
            WorkerError: the servers have ended, or do not answer in time.
        """
        agents = self._process.wait()
        for problem in self._unchecked:
            agent_of(problem.entry, agents)
        self._unchecked = ()
        return agents

    def play(
        self,
        policy: Responds,
        prompts: Sequence[Prompt],
        num_generations: int,
        seed: int,
        *,
        sampling: Sampling,
        told: Callable[[int], Told] | None = None,
    ) -> Rollout:
        """Have `num_generations` episodes of each prompt's record led, next to each other; arguments as of `rollout`.

        Raises:
            DataError: a record's agent is not there.
            WorkerError: the servers have ended, or none of the first episodes has anything to learn from.
        """
        repeated = [prompt for prompt in prompts for _ in range(num_generations)]
        agents, stream = self.wait(), policy.open_stream(sampling)
        assert stream is not None, "checked with the configuration"
        hear, begun = None if told is None else told(len(repeated)), self._server.begin(stream, sampling, seed)
        answers: queue.SimpleQueue[tuple[int, Mapping[str, Any]]] = queue.SimpleQueue()
        found: dict[int, tuple[Prompt, Response, Score]] = {}
        try:
            rows = [
                row_of(prompt.problem.entry, agents, sampling, begun.number, place, num_generations)
                for place, prompt in enumerate(repeated)
            ]
            places = {self._process.ask(row, answers): place for place, row in enumerate(rows)}
            while len(found) < len(repeated):
                try:
                    number, answer = answers.get(timeout=LOOK_S)
                except queue.Empty:
                    stream.check()
                    self._process.check()
                else:
                    place = places[number]
                    found[place] = self._episode(repeated[place], answer, begun.calls.pop(place, []))
                if hear is not None:
                    hear(Generated(len(found), begun.num_tokens))
            stream.check()  # where engines have failed, all episodes have
            answered = self._server.finish(begun)
            while not answered.done():
                wait([answered], LOOK_S)
                stream.check()
                self._process.check()
        finally:
            self._server.end(begun)
        episodes = [found[place] for place in range(len(repeated))]
        self._some_had_turns |= any(response is not NOTHING for _, response, _ in episodes)
        if not self._some_had_turns:
            raise WorkerError(
                f"{GYM}: none of the first {len(episodes)} episodes has anything to learn from. Of the last: "
                f"{self._last_fault}"
            )
        return Rollout(*map(list, zip(*episodes, strict=True)))  # type: ignore[arg-type]

    _unchecked: Iterable[Problem] = ()
    _last_fault = ""
    _some_had_turns = False
    _told_faults: frozenset[str] = frozenset()

    def _note(self, fault: str, text: str) -> None:
        """Keep why an episode is not learned from; of each fault the first is told."""
        self._last_fault = text
        if fault not in self._told_faults:
            self._told_faults |= {fault}
            self._notices.append(text)

    def _episode(
        self, prompt: Prompt, answer: Mapping[str, Any], calls: Sequence[Call]
    ) -> tuple[Prompt, Response, Score]:
        nothing = Prompt(prompt.problem, [self._end_id])
        error, result = answer.get("error"), None
        if error is None:
            patterns, tags = (self._section[key] for key in ("invalid_tool_call_patterns", "thinking_tags"))
            try:
                result = read_result(parse_json(answer["result"], max_values=MAX_VALUES), patterns, tags)
            except (WorkerError, AttributeError, LookupError, TypeError, ValueError) as fault:
                error = f"its result cannot be read: {fault}"
        if result is None:
            self._note(
                "failed",
                f"an episode failed, counts 0, and is not learned from, as others like it (scorer_errors): {error}",
            )
            return nothing, NOTHING, Score(0.0, is_correct=False, scorer_error=True, is_masked=True)
        is_masked = result.is_flagged and self._section["mask_flagged_samples"]
        if result.is_rewritten:
            self._note(
                "rewritten",
                "an episode's turns do not continue each other, so that it is no conversation, and is not learned "
                "from (masked_fraction): its agent has rewritten earlier turns, or left out one that said nothing.",
            )
        elif not result.turns:
            self._note(
                "silent",
                "an episode ended without a turn of the model, and is not learned from: its first messages may leave "
                "no room in policy.max_total_sequence_length, or its agent failed.",
            )
        score = Score(
            result.reward,
            result.reward > 0,
            scorer_error=False,
            parts=result.parts,
            is_masked=is_masked or not result.turns,
            faults=faults_of(result),
        )
        if not result.turns:
            return nothing, NOTHING, score
        return Prompt(prompt.problem, list(result.turns[0].prompt_ids)), response_of(result, calls), score

    def notices(self) -> list[str]:
        """What to warn of, once."""
        found, self._notices = self._notices, []
        return [*found, *self._server.notices()]

    def shutdown(self, *, at_once: bool = False) -> None:
        """End all servers. May be called twice."""
        self._process.stop(at_once=at_once)
        self._server.close()


def agent_of(entry: Mapping[str, Any], agents: Sequence[str]) -> Mapping[str, Any]:
    """A record's agent.

    Raises:
        DataError: it names an agent that is not there, or none where there are several.
    """
    agent: Mapping[str, Any] | None = entry.get(AGENT) or (
        {"type": "responses_api_agents", "name": agents[0]} if len(agents) == 1 else None
    )
    if agent is None or agent["name"] not in agents:
        named = "names no agent" if agent is None else f"names the agent {agent['name']}"
        raise DataError(
            f"data: a record {named} ({AGENT}), and {GYM}.config.config_paths start {', '.join(agents) or 'none'}. "
            f"Give others, or records for these. It asks {question_of(entry)[:80]!r}."
        )
    return agent


def row_of(
    entry: Mapping[str, Any],
    agents: Sequence[str],
    sampling: Sampling,
    number: int,
    place: int,
    num_generations: int,
) -> dict[str, Any]:
    """A record as its agent gets it: with the run's sampling, and what tells its requests from others.

    Raises:
        DataError: it names an agent that is not there, or none where there are several.
    """
    agent = agent_of(entry, agents)
    params = dict(entry[PARAMS])
    metadata = dict(params.get("metadata") or {})
    extra = parse_json(metadata.get("extra_body") or "{}")
    metadata["extra_body"] = json.dumps(extra | identity(number, place))
    params |= {"metadata": metadata, "temperature": sampling.temperature, "top_p": sampling.top_p}
    numbers = {"_ng_task_index": place // num_generations, "_ng_rollout_index": place % num_generations}
    return {**entry, AGENT: agent, PARAMS: params, **numbers}


def response_of(result: GymResult, calls: Sequence[Call]) -> Response:
    """All turns of an episode as one response, as the engines gave them.

    Raises:
        WorkerError: a turn is not of this run's model.
    """
    known = {(tuple(call.prompt_ids), tuple(call.response.tokens)): call.response for call in calls}
    whole, seen = NOTHING, result.turns[0].prompt_ids
    for turn in result.turns:
        reply = known.get((turn.prompt_ids, turn.token_ids))
        if reply is None:
            raise WorkerError(
                f"{GYM}: an episode has a turn that this run's model did not say: its agent has another model, or did "
                "not send the record's metadata along. Its model server must be policy_model."
            )
        whole = whole.then(list(turn.prompt_ids[len(seen) :]), reply)
        seen = turn.prompt_ids + turn.token_ids
    return whole


def faults_of(result: GymResult) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """By fault, begin and end of the turns that have it, counted from the first turn's begin."""
    found: dict[str, list[tuple[int, int]]] = {INVALID_TOOL_CALL: [], MALFORMED_THINKING: []}
    begin = len(result.turns[0].prompt_ids) if result.turns else 0
    for turn in result.turns:
        span = len(turn.prompt_ids) - begin, len(turn.prompt_ids) - begin + len(turn.token_ids)
        for name, is_there in (
            (INVALID_TOOL_CALL, turn.has_invalid_tool_call),
            (MALFORMED_THINKING, turn.has_malformed_thinking),
        ):
            found[name] += [span] if is_there else []
    return {name: tuple(spans) for name, spans in found.items() if spans}


def _template(given: str | None) -> str | None:
    if given is None:
        return None
    try:
        return chosen_template(given, {})
    except ConfigError as error:
        key = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template"
        raise ConfigError(f"{key}: {error}") from error
