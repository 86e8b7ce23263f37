"""Chats over HTTP, in OpenAI's form, answered by a run's own engines: for programs that lead episodes.

A server in a thread of the driver. Each request becomes a prompt (`chat_prompts`), a response of the engines that any
other prompt would get as well, and a message again (`vllm.chat_parsers`). With the message go the token ids and their
log-probabilities, as NeMo-Gym expects them, and the server keeps each response as the engines gave it.

Episodes belong to a round: what one call for a rollout asks for, with its seed and its sampling. Who leads an episode
sends its round and its number along (`identity`), so that a response is a function of weights, messages, seed and
number, in whatever order requests come. Requests without them, such as a judge's, belong to the newest round, and are
told apart by how often the same was asked: where two episodes ask for the same, who comes first has the first response.
All are sampled as the run samples.

Rejected: vLLM's own server, which needs its asynchronous engine (`vllm.continuous` says why there is none), would
encode what the model said anew, and knows no seeds of a run. The limits: one server, on this machine's own address,
however many engines there are; no streaming, no constrained sampling.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

from aiohttp import web

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.generation.chat_prompts import BadChatError, ChatPrompts
from nemo_rl_offload.generation.interface import ResponseStream
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.chat_parsers import ChatParsers
from nemo_rl_offload.specs.documents import parse_json

HOST = "127.0.0.1"
LARGEST_REQUEST_BYTES = 1 << 30
MAX_VALUES = 1 << 27
"""Of a chat, whose turns have their token ids."""
IDENTITY = "nemo_rl_offload_episode"
"""The key of a request's content that says whose it is."""
TEMPERATURE_TOLERANCE = 1e-6
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
}
"""By key of a request that no response follows, the values that ask for nothing."""
_START_S = 30.0


def identity(number: int, episode: int) -> dict[str, list[int]]:
    """What a request of an episode has in its content, beside a chat."""
    return {IDENTITY: [number, episode]}


@dataclass(frozen=True)
class Call:
    """A request that was answered."""

    prompt_ids: list[int]
    response: Response


@dataclass
class Round:
    """What one call for a rollout has to do with the server."""

    number: int
    stream: ResponseStream
    sampling: Sampling
    seed: int
    calls: dict[int, list[Call]] = field(default_factory=dict)
    """By episode, in the order in which they were answered."""
    num_tokens: int = 0
    """Of all responses."""
    times: Counter[bytes] = field(default_factory=Counter)
    """How often each prompt was asked, by its episode."""
    waiting: set["asyncio.Future[Response]"] = field(default_factory=set)


class ChatServer:
    """A server in a thread. Its methods may be called by several threads."""

    def __init__(
        self,
        prompts: ChatPrompts,
        parsers: ChatParsers,
        end_ids: Collection[int],
        longest: int,
        variables: Mapping[str, Any],
    ) -> None:
        """Start it.

        Args:
            prompts: encodes chats.
            parsers: read responses.
            end_ids: tokens at a response's end that are no part of its text.
            longest: the most tokens of prompt and response.
            variables: the template's, by default.
        """
        self._prompts, self._parsers = prompts, parsers
        self._end_ids, self._longest, self._variables = frozenset(end_ids), longest, dict(variables)
        self._notices, self._told = list[str](), set[str]()
        self._rounds: dict[int, Round] = {}
        self._finishing: list[Round] = []
        self._num_rounds = 0
        self._changed = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self.port = 0
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="chats", daemon=True)
        self._thread.start()
        assert started.wait(_START_S), "a server on the own machine starts at once"

    @property
    def base_url(self) -> str:
        """Where OpenAI's clients find it."""
        return f"http://{HOST}:{self.port}/v1"

    def begin(self, stream: ResponseStream, sampling: Sampling, seed: int) -> Round:
        """Begin a round, whose requests are answered by `stream`."""
        with self._changed:
            begun = Round(self._num_rounds, stream, sampling, seed)
            self._num_rounds += 1
            self._rounds[begun.number] = begun
            return begun

    def finish(self, ended: Round) -> "Future[None]":
        """End a round whose episodes are over; done when the engines have answered all that was asked.

        An agent that has given up leaves requests behind, which engines would go on with while the policy trains.
        """
        with self._changed:
            self._rounds.pop(ended.number, None)
            self._finishing = [each for each in self._finishing if each.waiting] + [ended]
        return asyncio.run_coroutine_threadsafe(self._answered(ended), self._loop)

    @staticmethod
    async def _answered(ended: Round) -> None:
        if ended.waiting:
            await asyncio.wait(ended.waiting)

    def end(self, ended: Round) -> None:
        """End a round; whoever still waits for a response of it hears that there is none."""
        with self._changed:
            self._rounds.pop(ended.number, None)
        self._loop.call_soon_threadsafe(lambda: [future.cancel() for future in list(ended.waiting)])

    def notices(self) -> list[str]:
        """What to warn of, once."""
        found, self._prompts.notices, self._notices = [*self._notices, *self._prompts.notices], [], []
        return found

    def close(self) -> None:
        """End the server, and all rounds. May be called twice."""
        with self._changed:
            left = [*self._rounds.values(), *self._finishing]
        if self._thread.is_alive():
            for each in left:
                self.end(each)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_START_S)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, HOST, 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        started.set()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _answer(self, request: web.Request) -> web.Response:
        status = HTTPStatus.BAD_REQUEST
        try:
            asked = parse_json((await request.read()).decode(), max_values=MAX_VALUES)
            return web.json_response(await self._complete(asked))
        except BadChatError as error:
            message = str(error)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"not a chat: {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - told whoever asks; where engines have failed, `NemoGym.play` raises it
            message, status = f"{type(error).__name__}: {error}", HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "InternalServerError"
        content = {"object": "error", "message": message, "type": kind, "code": status}
        return web.json_response(content, status=status)

    async def _complete(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if asked.get("stream"):
            raise BadChatError("nothing is streamed here. Set stream to false")
        if asked.get("n") not in (None, 1):
            raise BadChatError("a chat has one response. Set n to 1")
        self._parsers.check(asked)
        of_round, episode = self._round_of(asked)
        messages, tools = asked["messages"], asked.get("tools") or None
        variables = self._variables | (asked.get("chat_template_kwargs") or {})
        prompt_ids = self._prompts(messages, tools, variables)
        num_left = self._longest - len(prompt_ids)
        if num_left < 1:
            raise BadChatError(  # NeMo-Gym knows it by these words
                f"This model's maximum context length is {self._longest} tokens, and the messages have "
                f"{len(prompt_ids)}. Please reduce the length of the messages."
            )
        place, seed = self._draw(of_round, episode, prompt_ids)
        wanted = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or num_left)
        if wanted < 1:
            raise BadChatError(f"a response has at least one token, not {wanted}")
        response = await self._response(of_round, prompt_ids, seed, place, min(wanted, num_left))
        with self._changed:
            of_round.num_tokens += len(response.tokens)
            if episode is not None:
                of_round.calls.setdefault(episode, []).append(Call(prompt_ids, response))
        return self._completion(asked, variables, prompt_ids, response)

    def _round_of(self, asked: Mapping[str, Any]) -> tuple[Round, int | None]:
        known = asked.get(IDENTITY)
        with self._changed:
            number = max(self._rounds, default=-1) if known is None else int(known[0])
            found = self._rounds.get(number)
        if found is None:
            raise BadChatError("no rollout is under way that this belongs to")
        for key, fault in _faults_of_sampling(asked, found.sampling):
            if known is not None:
                raise BadChatError(fault)
            if key not in self._told:
                self._told.add(key)
                self._notices.append(
                    f"a request of no episode, such as a judge's, is answered by the run's sampling: {fault}."
                )
        return found, None if known is None else int(known[1])

    @staticmethod
    def _draw(of_round: Round, episode: int | None, prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Place and seed of a response: by its episode, or none, what it continues, and how often that was asked."""
        digest = blake2b(repr((episode, prompt_ids)).encode(), digest_size=8).digest()
        of_round.times[digest] += 1
        return of_round.times[digest], of_round.seed ^ int.from_bytes(digest)

    async def _response(
        self, of_round: Round, prompt_ids: list[int], seed: int, place: int, max_new_tokens: int
    ) -> Response:
        future: asyncio.Future[Response] = self._loop.create_future()
        of_round.waiting.add(future)

        def give(response: Response) -> None:
            self._loop.call_soon_threadsafe(_set, future, response)

        try:
            of_round.stream.check()
            of_round.stream.ask(prompt_ids, seed, place, max_new_tokens, give)
            return await future
        finally:
            of_round.waiting.discard(future)

    def _completion(
        self, asked: Mapping[str, Any], variables: Mapping[str, Any], prompt_ids: list[int], response: Response
    ) -> dict[str, Any]:
        tokens = response.tokens
        said = tokens[:-1] if tokens and tokens[-1] in self._end_ids else tokens
        found = self._parsers(said, asked, variables)
        message = found.message() | {
            "prompt_token_ids": prompt_ids,
            "generation_token_ids": tokens,
            "generation_log_probs": response.logprobs,
        }
        finish = "length" if not response.finished else "tool_calls" if found.tool_calls else "stop"
        return {
            "id": f"chatcmpl-{blake2b(repr((prompt_ids, tokens)).encode(), digest_size=12).hexdigest()}",
            "object": "chat.completion",
            "created": 0,
            "model": str(asked.get("model") or ""),
            "choices": [{"index": 0, "finish_reason": finish, "message": message, "logprobs": None}],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(tokens),
                "total_tokens": len(prompt_ids) + len(tokens),
            },
        }


def _faults_of_sampling(asked: Mapping[str, Any], sampling: Sampling) -> Iterator[tuple[str, str]]:
    """What a request asks for of its sampling that it does not get, by key."""
    for key in ("temperature", "top_p"):
        value, own = asked.get(key), getattr(sampling, key)
        if value is not None and abs(float(value) - own) > TEMPERATURE_TOLERANCE:
            yield key, f"{key} {value} is not the run's {own}, by which log-probabilities are computed"
    stops, top_k = asked.get("stop") or [], asked.get("top_k")
    if stops and tuple([stops] if isinstance(stops, str) else stops) != sampling.stop_strings:
        yield "stop", f"stop {stops!r} is not the run's {list(sampling.stop_strings)}"
    if top_k is not None and (None if top_k in (-1, 0) else top_k) != sampling.top_k:
        yield "top_k", f"top_k {top_k} is not the run's {sampling.top_k}"
    for key, nothing in _WITHOUT_EFFECT.items():
        if asked.get(key) not in nothing:
            yield key, f"{key} {asked[key]!r} is not supported. Leave it out"


def _set(future: "asyncio.Future[Response]", response: Response) -> None:
    if not future.done():
        future.set_result(response)
