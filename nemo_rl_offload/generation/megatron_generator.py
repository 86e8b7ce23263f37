"""Generation by the training model itself, or by workers that hold a model of the same kind.

The sampling in the workers is `generation.megatron_sampling`, which imports Megatron; this runs in the driver.
"""

from collections.abc import Sequence

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.generation.interface import GenerationWorkers, GeneratorSetup, Told
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.weight_sync import WeightSource


class MegatronGenerator:
    """Implements `Generator`. Colocated, weights and devices are those of training: there is nothing to hand over."""

    def __init__(self, setup: GeneratorSetup) -> None:
        self._setup = setup
        self._own_workers: GenerationWorkers | None = None
        self._training_workers: GenerationWorkers | None = None
        self.has_weights = True

    @property
    def _workers(self) -> GenerationWorkers:
        workers = self._own_workers or self._training_workers
        assert workers is not None, "started, and either has workers"
        return workers

    def prepare(self) -> None:
        """Nothing."""

    def start(self, training_workers: GenerationWorkers | None) -> None:
        """Start workers of its own where they have slots."""
        self._training_workers = training_workers
        if self._setup.slots is not None:
            self._own_workers = self._setup.start_workers(self._setup.slots, self._setup.config)
            self._own_workers.prepare_weight_update()

    def generate(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        sampling: Sampling,
        told: Told | None = None,
        places: Sequence[int] | None = None,
    ) -> list[Response]:
        """Sample one response for each prompt; a function of weights, arguments and number of shards."""
        return self._workers.generate(prompts, seed, self._setup.end_ids, sampling, told)

    def open_stream(self, sampling: Sampling) -> None:
        """None: it answers batches."""

    def update_weights(self, source: WeightSource) -> None:
        """Take over the weights, bucket by bucket."""
        if self._own_workers is not None:
            self._own_workers.load_weights(source.weight_buckets())

    def sleep(self) -> None:
        """Nothing: the cache ends with each call, and the weights are those of training or elsewhere."""

    def wake(self) -> None:
        """Nothing, as for `sleep`."""

    def lacking_bytes(self) -> list[int]:
        """None: what they need is torch's, which says so."""
        return []

    def start_seconds(self) -> dict[str, float]:
        """What building workers of its own took, by part; each part is that of the slowest."""
        return {}  # they are as the workers that train, and start with them

    def notices(self) -> list[list[str]]:
        """What the workers of its own have warned of since the last call, by rank."""
        return [] if self._own_workers is None else self._own_workers.notices()

    def stop(self) -> None:
        """Kill the workers of its own."""
        if self._own_workers is not None:
            self._own_workers.shutdown()
