"""How the driver deals out prompts and weights to engines, which are faked."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.generation.interface import Generated, GeneratorSetup
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm import generator as module
from nemo_rl_offload.generation.vllm.generator import VllmGenerator

SAMPLING = Sampling(8)


class Engine:
    """Answers a prompt with its number among all, if it is the first device of an engine."""

    def __init__(self, *, is_first: bool = True) -> None:
        self.is_first = is_first
        self.calls: list[Any] = []

    def generate(self, prompts: list[list[int]], seed: int, places: range, sampling: Sampling) -> list[Response]:
        assert sampling == SAMPLING
        self.calls.append(("generate", len(prompts), seed, places.start))
        return [Response([place], [0.0], True) for place in places] if self.is_first else []

    def load_weight_bucket(self, bucket: str) -> None:
        self.calls.append(bucket)

    def load_device_bucket(self, bucket: str) -> None:
        self.calls.append(bucket)

    def receive_bucket(self, parts: str) -> None:
        self.calls.append(parts)

    def join_weight_channel(self, address: tuple[str, int]) -> None:
        self.calls.append(address)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda **_: self.calls.append(name)


class Group:
    def __init__(self, slots: Any, worker_cls: type, *args: Any, **kwargs: Any) -> None:
        self.slots, self.env, self.can_sleep, self.name = slots, kwargs["env"], kwargs["can_sleep"], kwargs["name"]
        self.world_size, self.is_built = slots.world_size, kwargs["preloads"] is None
        vllm_cfg = args[0]["generation"]["vllm_cfg"]
        size = vllm_cfg["tensor_parallel_size"] * vllm_cfg["pipeline_parallel_size"]
        self.engines = [Engine(is_first=rank % size == 0) for rank in range(self.world_size)]

    def construct(self) -> None:
        self.is_built = True

    def run_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(engine, method.__name__)(*args, **kwargs) for engine in self.engines]

    def run_sharded(self, method: Callable[..., Any], shards: list[tuple[Any, ...]]) -> list[Any]:
        pairs = zip(self.engines, shards, strict=True)
        return [getattr(engine, method.__name__)(*shard) for engine, shard in pairs]

    def run_streamed(
        self, method: Callable[..., Any], shards: list[tuple[Any, ...]], take: Callable[[int, Generated], None]
    ) -> list[Any]:
        take(1, Generated(1, 2))
        take(0, Generated(2, 3))
        return self.run_sharded(method, shards)

    def shutdown(self) -> None:
        self.run_all(SimpleNamespace(__name__="shutdown"))  # type: ignore[arg-type]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[VllmGenerator, list[Engine]]]:
    def start(
        device: str = "cpu", *overrides: str, apart: bool = False, world_size: int = 2, training: Any = None
    ) -> tuple[VllmGenerator, list[Engine]]:
        monkeypatch.setattr(module, "WorkerGroup", Group)
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]
        slots: Any = SimpleNamespace(device=device, world_size=world_size, workers_per_node=world_size)
        own: Any = SimpleNamespace(**vars(slots)) if apart else None
        setup = GeneratorSetup(config, (9,), PROJECT_ROOT, slots, own, None)  # type: ignore[arg-type]
        generator = VllmGenerator(setup)
        generator.prepare()
        is_built: bool = generator._group.is_built  # type: ignore[attr-defined]
        assert apart or not is_built, "training comes first on a device that both have"
        generator.start(training)
        group: Any = generator._group
        assert group.slots is (own if apart else slots)
        return generator, group.engines

    return start


def source(*buckets: str) -> Any:
    of_ranks = [[f"{bucket} of rank {rank}" for rank in range(2)] for bucket in buckets]
    return SimpleNamespace(
        weight_buckets=lambda: iter(buckets),
        device_weight_buckets=lambda: iter(of_ranks),
        sent_weight_buckets=lambda: (f"sent {bucket}" for bucket in buckets),
    )


def test_an_engine_that_cannot_be_built_is_an_error_of_the_start(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ResourceError("no memory")

    monkeypatch.setattr(Group, "construct", refuse)
    for apart in (True, False):
        with pytest.raises(ResourceError, match="no memory"):
            started(apart=apart)


def test_responses_come_in_the_order_of_the_prompts(started: Any) -> None:
    generator, engines = started()
    prompts = [[3] * length for length in (60, 1, 1, 1, 1)]
    told: list[Generated] = []
    responses = generator.generate(prompts, 4, SAMPLING, told.append)
    assert [response.tokens for response in responses] == [[0], [1], [2], [3], [4]]
    assert [engine.calls for engine in engines] == [[("generate", 1, 4, 0)], [("generate", 4, 4, 1)]]
    assert told == [Generated(1, 2), Generated(3, 5), Generated(5, 5)]


def test_nobody_waits_for_engines_at_work_to_hear_what_they_warn_of(started: Any) -> None:
    generator, engines = started("cpu", "policy.generation.vllm_cfg.async_engine=true")
    for engine in engines:
        engine.take_notices = lambda engine=engine: engine.calls.append("asked") or [f"warning {len(engine.calls)}"]
    assert generator.notices() == [["warning 1"]] * 2, "of idle engines"
    work: Any = generator._continuous
    work.is_busy = lambda: True
    assert generator.notices() == []
    for engine in engines:
        engine.calls.clear()
    generator.update_weights(source("a"))
    assert [engine.calls[-1] for engine in engines] == ["asked"] * 2
    for engine in engines:
        engine.calls.clear()
    assert generator.notices() == [["warning 3"]] * 2, "from between their steps"
    assert generator.notices() == []
    assert [engine.calls for engine in engines] == [[], []]
    generator.update_weights(source("a"))
    work.is_busy = lambda: False
    assert generator.notices() == [["warning 3", "warning 4"]] * 2
    generator.stop()


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_the_devices_of_an_engine_are_asked_alike_and_answer_once(started: Any, kind: str) -> None:
    generator, devices = started("cpu", f"policy.generation.vllm_cfg.{kind}_parallel_size=2", world_size=4)
    assert generator._group.name == "device of the vLLM engines"
    told: list[Generated] = []
    responses = generator.generate([[3]] * 5, 4, SAMPLING, told.append)
    assert told == [Generated(2, 3), Generated(5, 5)], "of an engine's first device"
    assert [response.tokens for response in responses] == [[0], [1], [2], [3], [4]]
    calls = [device.calls for device in devices]
    assert calls[0] == calls[1] == [("generate", 2, 4, 0)]
    assert calls[2] == calls[3] == [("generate", 3, 4, 2)]


def test_devices_that_are_found_at_the_start_may_not_make_whole_engines(started: Any) -> None:
    with pytest.raises(ConfigError, match="do not divide the 3 that generate"):
        started("cpu", "policy.generation.vllm_cfg.tensor_parallel_size=2", world_size=3)


def test_a_prompt_that_leaves_no_room_is_named_before_an_engine_is_asked(started: Any) -> None:
    generator, engines = started()
    generator.generate([[3] * 95], 1, SAMPLING)
    with pytest.raises(ConfigError, match=r"max_model_len: 96 .* prompt of 96 .* Set at least 104"):
        generator.generate([[3], [3] * 96], 1, SAMPLING)
    assert sum(len(engine.calls) for engine in engines) == 2


def test_every_engine_takes_every_bucket(started: Any) -> None:
    generator, engines = started()
    generator.update_weights(source("first", "second"))
    assert all(engine.calls == ["first", "second", "finish_weight_update"] for engine in engines)


def test_apart_on_gpus_every_engine_joins_a_channel_and_takes_every_bucket_from_it(started: Any) -> None:
    opened: list[int] = []
    training = SimpleNamespace(open_weight_channel=lambda number: opened.append(number) or ("host", 7))
    generator, engines = started("cuda", apart=True, training=training)
    generator.update_weights(source("first", "second"))
    assert opened == [2]
    assert all(engine.calls == [("host", 7), "sent first", "sent second", "finish_weight_update"] for engine in engines)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_apart_without_a_channel_buckets_come_from_the_hosts_memory(started: Any, device: str) -> None:
    training: Any = None if device == "cuda" else SimpleNamespace()  # nothing trains, or on CPUs
    generator, engines = started(device, apart=True, training=training)
    generator.update_weights(source("all"))
    assert all(engine.calls == ["all", "finish_weight_update"] for engine in engines)


def test_beside_training_on_a_gpu_an_engine_sleeps_and_has_no_weights_until_the_next_update(started: Any) -> None:
    generator, (engine, other) = started("cuda")
    generator.wake()
    generator.generate([[1]], 1, SAMPLING)
    assert generator.has_weights
    generator.sleep()
    generator.sleep()
    assert not generator.has_weights
    generator.wake()
    assert not generator.has_weights, "memory for them, no more"
    generator.update_weights(source("all"))
    assert generator.has_weights
    for rank, calls in enumerate([engine.calls, other.calls]):
        words = [call for call in calls if isinstance(call, str)]
        assert words == ["sleep", "wake", f"all of rank {rank}", "finish_weight_update"]


@pytest.mark.parametrize(
    ("device", "apart", "expected"), [("cuda", False, [0.3]), ("cuda", True, []), ("cpu", False, [])]
)
def test_training_makes_room_before_an_engine_is_built_on_its_gpu(
    device: str, apart: bool, expected: list[float], started: Any
) -> None:
    shares: list[float] = []
    training = SimpleNamespace(make_room_for_share=shares.append, open_weight_channel=lambda _: ("host", 7))
    share = "policy.generation.vllm_cfg.gpu_memory_utilization=0.3"
    generator, engines = started(device, share, apart=apart, training=training)
    assert shares == expected
    for engine in engines:
        engine.lacking_bytes = lambda: 5
    assert generator.lacking_bytes() == ([5, 5] if expected else [])


@pytest.mark.parametrize(("device", "apart"), [("cpu", False), ("cpu", True), ("cuda", True)])
def test_nobody_else_sleeps(started: Any, device: str, apart: bool) -> None:
    generator, (engine, _) = started(device, apart=apart)
    generator.sleep()
    generator.wake()
    assert generator.has_weights
    assert engine.calls == []


def test_it_may_be_stopped_at_any_time(started: Any) -> None:
    generator, (engine, _) = started()
    generator.stop()
    assert engine.calls == ["shutdown"]
    VllmGenerator(generator._setup).stop()
