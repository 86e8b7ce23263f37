"""The backend that the configuration names, and what the Megatron backend does with its workers."""

from typing import Any, get_args

import pytest

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import check_config
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.interface import Generator, GeneratorSetup
from nemo_rl_offload.generation.megatron_generator import MegatronGenerator
from nemo_rl_offload.generation.registry import BACKENDS, make_generator
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.specs.generation import GenerationBackend

EXEMPLAR = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"


class Workers:
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def generate(self, prompts: Any, seed: int, end_ids: Any, sampling: Sampling, told: Any) -> list[Response]:
        self.calls.append(f"generate {prompts} {seed} {end_ids} at {sampling.temperature}")
        return []

    def prepare_weight_update(self) -> None:
        self.calls.append("prepare")

    def load_weights(self, buckets: Any) -> None:
        self.calls.append(f"load {list(buckets)}")

    def notices(self) -> list[list[str]]:
        return [[self.name]]

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def weight_buckets(self) -> Any:
        return iter(["first", "second"])


def make_setup(slots: Any) -> tuple[GeneratorSetup, Workers, list[tuple[Any, Workers]]]:
    config: Any = load_config(EXEMPLAR)["policy"]
    training, started = Workers("training"), list[tuple[Any, Workers]]()

    def start(slots: Any, config: Any) -> Workers:
        started.append((slots, Workers("own")))
        return started[-1][1]

    everything: Any = object()
    setup = GeneratorSetup(config, (9,), PROJECT_ROOT, everything, slots, start)
    return setup, training, started


def test_schema_and_registry_name_the_same_backends() -> None:
    assert set(get_args(GenerationBackend)) == set(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_can_be_made_of_a_setup(backend: GenerationBackend) -> None:
    setup, _, _ = make_setup(None)
    setup.config["generation"]["backend"] = backend
    generator = make_generator(setup)
    assert f"{type(generator).__module__}:{type(generator).__name__}" == BACKENDS[backend]
    assert not [name for name in vars(Generator) if not name.startswith("_") and not hasattr(generator, name)]


def test_another_backend_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"policy\.generation\.backend.*megatron"):
        check_config(load_config(EXEMPLAR, ["policy.generation.backend=vlm"]), "tiny.yaml", run_here=False)


def test_colocated_the_training_workers_generate() -> None:
    setup, training, started = make_setup(None)
    generator = MegatronGenerator(setup)
    generator.prepare()
    generator.start(training)  # type: ignore[arg-type]
    generator.wake()
    generator.update_weights(training)
    generator.generate([[1]], 3, Sampling(4, 0.5))
    generator.sleep()
    assert generator.notices() == [], "the policy asks them itself"
    generator.stop()
    assert training.calls == ["generate [[1]] 3 (9,) at 0.5"]
    assert not started


def test_apart_workers_of_its_own_take_the_weights_over() -> None:
    slots: Any = object()
    setup, training, started = make_setup(slots)
    generator = MegatronGenerator(setup)
    generator.prepare()
    generator.start(training)  # type: ignore[arg-type]
    ((given, own),) = started
    assert given is slots
    generator.update_weights(training)
    generator.generate([[1]], 3, Sampling(4, 0.5))
    assert generator.notices() == [["own"]]
    generator.stop()
    assert own.calls == ["prepare", "load ['first', 'second']", "generate [[1]] 3 (9,) at 0.5", "shutdown"]
    assert not training.calls
