"""Which engine gets which request when, and what becomes of updates and faults; engines are faked."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.errors import ConfigError, ResourceError, WorkerError
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.continuous import ContinuousEngines, VllmStream
from nemo_rl_offload.generation.vllm.settings import Request
from nemo_rl_offload.generation.vllm.worker import _explained, versions_of

LONGEST = 100


class Group:
    """Each call makes one step; a request ends after as many as its prompt's first token says."""

    def __init__(self, world_size: int = 2, ranks_per_engine: int = 1) -> None:
        self.world_size, self.ranks_per_engine = world_size, ranks_per_engine
        self.under_way: list[dict[int, tuple[int, Request]]] = [{} for _ in range(world_size)]
        self.given: list[list[Request]] = [[] for _ in range(world_size)]
        self.calls: dict[int, tuple[int, Sequence[Request]]] = {}
        self.steps = 0
        self.is_broken = False

    def begin(self, rank: int, method: Callable[..., Any], requests: Sequence[Request]) -> int:
        assert method.__name__ == "advance"
        assert rank not in [each for each, _ in self.calls.values()], "one call at a time"
        self.given[rank] += requests
        call = self.steps = self.steps + 1
        self.calls[call] = rank, requests
        return call

    def ended(self, calls: Mapping[int, int]) -> dict[int, list[tuple[int, Response]]]:
        time.sleep(0.001)
        if self.is_broken:
            raise WorkerError("gone")
        call = random.choice(list(calls))
        rank, requests = self.calls.pop(call)
        assert rank == calls[call]
        self.under_way[rank] |= {request.number: (request.prompt[0], request) for request in requests}
        done, left = [], {}
        for number, (steps, request) in self.under_way[rank].items():
            if steps > 1:
                left[number] = steps - 1, request
            else:
                done.append((number, Response([*request.prompt, request.seed, request.place], [], finished=True)))
        self.under_way[rank] = left
        return {call: [] if rank % self.ranks_per_engine else done}


@pytest.fixture
def started() -> Iterator[tuple[Group, ContinuousEngines]]:
    group: Any = Group()
    engines = ContinuousEngines(group)
    yield group, engines
    engines.stop()
    assert not engines._thread.is_alive()


def test_each_response_comes_to_who_asked_when_it_has_ended(started: tuple[Group, ContinuousEngines]) -> None:
    _, engines = started
    streams = [VllmStream(engines, Sampling(8), LONGEST) for _ in range(2)]
    streams[0].submit([0, 1, 2], [[40, 0], [1, 1], [20, 2]], 7)
    streams[1].submit([0], [[3, 3]], 8)
    assert streams[1].take() == [(0, Response([3, 3, 8, 0], [], finished=True))]
    assert streams[1].take() == []
    order = []
    while ended := streams[0].take():
        order += ended
        if order[-1][0] == 1 and len(order) == 1:
            streams[0].submit([1], [[2, 4]], 9)  # its next turn, while others are under way
    assert [(place, response.tokens[:2]) for place, response in order] == [
        (1, [1, 1]), (1, [2, 4]), (2, [20, 2]), (0, [40, 0])
    ]  # fmt: skip
    assert order[1][1].tokens[2:] == [9, 1]


def test_engines_have_as_many_tokens_each_and_one_prompt_stays_together(
    started: tuple[Group, ContinuousEngines],
) -> None:
    group, engines = started
    stream = VllmStream(engines, Sampling(8), LONGEST)
    prompts = [[1] * 40] * 2 + [[2] * 3] * 2 + [[3] * 3] * 2 + [[4] * 60]
    stream.submit(range(7), prompts, 1)
    taken = 0
    while ended := stream.take():
        taken += len(ended)
    assert taken == 7
    firsts = [sorted(request.prompt[0] for request in given) for given in group.given]
    assert sorted(firsts) == [[1, 1], [2, 2, 3, 3, 4]]


def test_ranks_of_an_engine_are_called_alike() -> None:
    group: Any = Group(4, ranks_per_engine=2)
    engines = ContinuousEngines(group, ranks_per_engine=2)
    stream = VllmStream(engines, Sampling(8), LONGEST)
    stream.submit(range(20), [[1 + place % 7, place] for place in range(20)], 1)
    found: list[int] = []
    while ended := stream.take():
        found += [place for place, _ in ended]
    engines.stop()
    assert sorted(found) == list(range(20))
    assert group.given[0] == group.given[1] != group.given[2] == group.given[3]
    assert group.calls == {}


def test_a_prompt_without_room_is_named(started: tuple[Group, ContinuousEngines]) -> None:
    stream = VllmStream(started[1], Sampling(8), LONGEST)
    with pytest.raises(ConfigError, match="max_model_len: 100"):
        stream.submit([0, 1], [[1], [1] * LONGEST], 1)
    assert stream.take() == []


def test_weights_change_between_steps_and_requests_stay(started: tuple[Group, ContinuousEngines]) -> None:
    group, engines = started
    stream = VllmStream(engines, Sampling(8), LONGEST)
    stream.submit(range(4), [[200 + place, place] for place in range(4)], 1)
    while group.steps < 10:
        time.sleep(0.001)
    with engines.between_steps():
        steps = group.steps
        late = VllmStream(engines, Sampling(8), LONGEST)
        late.submit([0], [[1, 1]], 1)
        time.sleep(0.02)
        assert group.steps == steps
        assert group.calls == {}
        assert sum(map(len, group.under_way)) == 4
    assert len(late.take()) == 1
    assert len(stream.take()) >= 1


def test_a_fault_reaches_whoever_waits(started: tuple[Group, ContinuousEngines]) -> None:
    group, engines = started
    stream = VllmStream(engines, Sampling(8), LONGEST)
    stream.submit([0], [[10_000]], 1)
    threading.Timer(0.02, lambda: setattr(group, "is_broken", True)).start()
    with pytest.raises(WorkerError, match="gone"):
        stream.take()
    with pytest.raises(WorkerError, match="gone"):
        engines.check()
    with pytest.raises(WorkerError, match="gone"), engines.between_steps():
        pass


@pytest.mark.parametrize(
    ("num_tokens", "updates", "expected"),
    [
        (3, [4], [4, 4, 4]),
        (4, [0, 1, 3], [0, 1, 1, 2]),
        (2, [0, 0], [1, 1]),
        (3, [2, 1, 1], [2, 4, 4]),
        (2, [1, 5], [1, 1]),
    ],
)
def test_each_token_has_the_updates_before_it(num_tokens: int, updates: list[int], expected: list[int]) -> None:
    assert versions_of(num_tokens, updates) == expected


def test_a_neighbour_that_takes_memory_while_an_engine_falls_asleep_is_told() -> None:
    """As vLLM 0.26.0 says it; its other asserts stay what they are."""
    phase = "falling asleep"
    with pytest.raises(ResourceError, match=f"while {phase}, vLLM .* Give this run the GPU alone"), _explained(phase):
        raise AssertionError("Memory usage increased after sleeping.")
    with pytest.raises(AssertionError, match="another"), _explained(phase):
        raise AssertionError("another")
