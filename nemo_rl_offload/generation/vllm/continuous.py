"""Engines that are kept busy: requests join what is under way, and each response leaves when it has ended.

vLLM's scheduler puts new requests between those that it works on, at any step. So an engine needs no event loop of its
own: its worker takes requests, makes a few steps, and returns the responses that ended (`VllmWorker.advance`). One
thread of the driver keeps one such call under way in each engine that has work. What was asked meanwhile goes along
with the next call, and what came back goes to the stream that asked. An episode's next turn thus starts while others
are generated, and so do the prompts of a later step.

Between two calls nothing computes, which is when weights can be exchanged (`between_steps`), also under requests that
have not ended. A call is its arguments and nothing else, no clock: processes that share an engine would make the same
steps of the same calls.

Rejected: `AsyncLLM`, whose engine is a process of its own that listens on ports, draws in the order of arrival, and
that an update of weights must pass messages to. The price: an ended response waits for the end of a call, a few steps.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.worker_group import WorkerGroup
from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.generation.interface import Give
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.settings import Request, check_room
from nemo_rl_offload.generation.vllm.worker import VllmWorker

LOOK_S = 1.0
"""How long a stream waits until it looks whether the engines have failed."""
END_S = 10.0
"""How long the end waits for calls under way."""


class ContinuousEngines:
    """Deals requests out to the engines of a group; of each engine's, as many tokens as of the others'."""

    def __init__(self, group: WorkerGroup[VllmWorker], ranks_per_engine: int = 1) -> None:
        """Neighbouring ranks that make an engine are called alike, and its first rank returns the responses."""
        self._group, self._ranks_per_engine = group, ranks_per_engine
        self._changed = threading.Condition()
        self._waiting: list[list[Request]] = [[] for _ in range(group.world_size // ranks_per_engine)]
        self._open: list[dict[int, tuple[int, Callable[[Response], None]]]] = [{} for _ in self._waiting]
        """By engine and request: its tokens at most, and who gets the response."""
        self._num_calls = self._num_holds = 0
        self._numbers = count()
        self._failure: Exception | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="vLLM requests", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[tuple[Request, int, Callable[[Response], None]]]) -> None:
        """Ask for a response to each request, whose tokens will be at most so many, and say who gets it.

        Neighbours with the same prompt go to one engine, which computes it once.
        """
        with self._changed:
            loads = [sum(tokens for tokens, _ in opened.values()) for opened in self._open]
            before, engine = None, 0
            for request, num_tokens, give in requests:
                if request.prompt != before:
                    engine = min(range(len(loads)), key=loads.__getitem__)
                before, number = request.prompt, next(self._numbers)
                loads[engine] += num_tokens
                self._waiting[engine].append(request._replace(number=number))
                self._open[engine][number] = num_tokens, give
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what the engines have failed with."""
        if self._failure is not None:
            raise self._failure

    def is_busy(self) -> bool:
        """Whether a request is under way."""
        with self._changed:
            return any(self._open)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """No engine computes meanwhile; requests that are under way stay so."""
        with self._changed:
            self._num_holds += 1
            while self._num_calls and self._failure is None:
                self._changed.wait(LOOK_S)
        try:
            self.check()
            yield
        finally:
            with self._changed:
                self._num_holds -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, and whoever waits for a response. May be called twice."""
        with self._changed:
            self._has_ended = True
            self._failure = self._failure or WorkerError("the vLLM engines have been stopped")
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _run(self) -> None:
        calls: dict[Any, int] = {}
        returned: list[list[tuple[int, Response]]] = [[] for _ in self._waiting]
        try:
            while self._begin(calls):
                for call, responses in self._group.ended(calls).items():
                    engine = calls.pop(call) // self._ranks_per_engine
                    returned[engine] += responses
                    if all(rank // self._ranks_per_engine != engine for rank in calls.values()):
                        ended, returned[engine] = returned[engine], []
                        self._deliver(engine, ended)
        except Exception as error:  # noqa: BLE001 - raised where responses are taken
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _begin(self, calls: dict[Any, int]) -> bool:
        """Wait until a call is under way, and begin those that can be; false at the end."""
        with self._changed:
            while not self._has_ended:
                if not self._num_holds:
                    busy = {rank // self._ranks_per_engine for rank in calls.values()}
                    for engine, opened in enumerate(self._open):
                        if opened and engine not in busy:
                            requests, self._waiting[engine] = self._waiting[engine], []
                            first = engine * self._ranks_per_engine
                            for rank in range(first, first + self._ranks_per_engine):
                                calls[self._group.begin(rank, VllmWorker.advance, requests)] = rank
                self._num_calls = len(calls)
                self._changed.notify_all()
                if calls:
                    return True
                self._changed.wait(LOOK_S)
            return False

    def _deliver(self, engine: int, responses: Sequence[tuple[int, Response]]) -> None:
        with self._changed:
            ended = [(self._open[engine].pop(number)[1], response) for number, response in responses]
        for give, response in ended:
            give(response)


class VllmStream:
    """Implements `ResponseStream`."""

    def __init__(self, engines: ContinuousEngines, sampling: Sampling, longest: int) -> None:
        """`longest`: tokens of prompt and response that an engine takes."""
        self._engines, self._sampling, self._longest = engines, sampling, longest
        self._ended: queue.SimpleQueue[tuple[int, Response]] = queue.SimpleQueue()
        self._under_way: Counter[int] = Counter()

    def submit(self, places: Sequence[int], prompts: Sequence[list[int]], seed: int) -> None:
        """Ask for one response to each prompt.

        Raises:
            ConfigError: a prompt leaves no room for a response in the engines' context.
        """
        check_room(prompts, self._sampling, self._longest)
        self._engines.submit(
            [
                (
                    Request(0, prompt, seed, place, self._sampling),
                    min(len(prompt) + self._sampling.max_new_tokens, self._longest),
                    partial(self._give, place),
                )
                for place, prompt in zip(places, prompts, strict=True)
            ]
        )
        self._under_way.update(places)

    def ask(self, prompt: list[int], seed: int, place: int, max_new_tokens: int, give: Give) -> None:
        """Ask for one response, which `give` gets; the prompt leaves room for one."""
        sampling = replace(self._sampling, max_new_tokens=min(max_new_tokens, self._sampling.max_new_tokens))
        num_tokens = min(len(prompt) + sampling.max_new_tokens, self._longest)
        self._engines.submit([(Request(0, prompt, seed, place, sampling), num_tokens, give)])

    def check(self) -> None:
        """Raise what the engines have failed with."""
        self._engines.check()

    def _give(self, place: int, response: Response) -> None:
        self._ended.put((place, response))

    def take(self) -> list[tuple[int, Response]]:
        """Wait until a response has ended; those that have, with their places. Nothing where none is under way.

        Raises:
            WorkerError: an engine failed; and what else `VllmWorker.advance` raises.
        """
        found: list[tuple[int, Response]] = []
        while self._under_way.total() > len(found) and not (found and self._ended.empty()):
            try:
                found.append(self._ended.get(timeout=LOOK_S))
            except queue.Empty:
                self._engines.check()
        self._under_way.subtract(place for place, _ in found)
        return found
