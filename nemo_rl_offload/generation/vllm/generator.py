"""Generation by vLLM: engines of one or several devices each, which share the prompts.

Each device has an actor beside a training worker, in its slot, or in a slot of its own (`colocated.enabled: false`).
Neighbours make an engine, and are told the same (`worker`).

Weights come from training by Hugging Face's names, bucket by bucket, and are written in place: a device holds its own
part, a bucket, and one weight on its way. On a GPU that both have buckets stay there, and the actor beside each rank
opens that rank's bucket by CUDA IPC. Apart they go from GPU to GPU over NCCL (`weight_channel`), and on CPUs through
Ray's store. After each update an engine forgets its prefix cache.

Colocated on a GPU an engine sleeps while the trainer works, and gives up weights and cache alike (vLLM's level 2): the
next update brings the weights. Where there is no room for its cache, what training alone needs leaves the GPU until
training has its turn again (`policy.residency.away_state`). On a CPU nobody sleeps. Rejected: level 1, which keeps a
copy of weights in host memory that the next update replaces. Limit: a step waits for its longest response.

A request's random numbers are a function of the seed and of its place among all prompts, so that two engines draw what
one draws. On a CPU prompts are read whole: vLLM cannot read them in pieces there beside seeds of their own.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.background import in_background
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart
from nemo_rl_offload.cluster.worker_group import WorkerGroup
from nemo_rl_offload.config.rules.vllm import context_length
from nemo_rl_offload.config.rules.vllm_devices import num_engines
from nemo_rl_offload.generation.interface import Generated, GenerationWorkers, GeneratorSetup, ResponseStream, Told
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.continuous import ContinuousEngines, VllmStream
from nemo_rl_offload.generation.vllm.settings import check_room, divide, engine_env
from nemo_rl_offload.generation.vllm.worker import VllmWorker
from nemo_rl_offload.generation.weight_sync import WeightSource
from nemo_rl_offload.observability.start_clock import slowest

SILENCE_S = 600.0
"""Longer than any step of an engine, update of its weights, or capture of a graph takes."""
DEVICES_OF_CHANNELS = ("cuda",)
"""Where weights for engines apart go from device to device. CPUs share their memory through Ray's store."""


class VllmGenerator:
    """Implements `Generator`."""

    def __init__(self, setup: GeneratorSetup) -> None:
        self._setup = setup
        self._engines: WorkerGroup[VllmWorker] | None = None
        self._continuous: ContinuousEngines | None = None
        self._sleeps = False
        self._may_have_channel = self._has_channel = False
        self._built: Future[None] | None = None
        self._num_engines = 0
        self._kept_notices: list[list[str]] = []
        self.has_weights = True

    @property
    def _group(self) -> WorkerGroup[VllmWorker]:
        assert self._engines is not None, "start comes first"
        if self._continuous is not None:
            self._continuous.check()  # which says why the engines are gone
        return self._engines

    def prepare(self) -> None:
        """Start the engines' processes, which import vLLM, and on devices of their own build the engines.

        That takes as long as to build the workers that train, which goes on meanwhile.

        Raises:
            ConfigError: the slots cannot be shared among engines.
        """
        setup = self._setup
        slots = setup.slots or setup.training_slots
        vllm_cfg = setup.config["generation"]["vllm_cfg"]
        self._num_engines = num_engines(vllm_cfg, slots.world_size, slots.workers_per_node)
        device = slots.cluster.device if isinstance(slots, ClusterPart) else slots.device
        self._sleeps = setup.slots is None and device == "cuda"
        self._may_have_channel = setup.slots is not None and device in DEVICES_OF_CHANNELS
        self._engines = WorkerGroup(
            slots,
            VllmWorker,
            setup.config,
            setup.model_path,
            setup.end_ids,
            env=engine_env(setup.config["generation"], device),
            name="vLLM engine" if self._num_engines == slots.world_size else "device of the vLLM engines",
            preloads="vllm",
            silence_s=SILENCE_S,
            can_sleep=self._sleeps,
        )
        if setup.slots is not None:  # nobody else is on their devices
            self._built = in_background(self._engines.construct, "vLLM engines")

    def start(self, training_workers: GenerationWorkers | None) -> None:
        """Build the engines with the start model's weights, beside what training holds by now."""
        assert self._engines is not None, "prepare comes first"
        if self._sleeps and training_workers is not None:
            training_workers.make_room_for_share(self._setup.config["generation"]["vllm_cfg"]["gpu_memory_utilization"])
        if self._built is None:
            self._engines.construct()
        else:
            self._built.result()
        if self._may_have_channel and training_workers is not None:
            address = training_workers.open_weight_channel(self._engines.world_size)
            self._engines.run_all(VllmWorker.join_weight_channel, address)
            self._has_channel = True
        setup, slots = self._setup, self._setup.slots or self._setup.training_slots
        if setup.config["generation"]["vllm_cfg"]["async_engine"]:
            self._continuous = ContinuousEngines(self._engines, slots.world_size // self._num_engines)

    def generate(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        sampling: Sampling,
        told: Told | None = None,
        places: Sequence[int] | None = None,
    ) -> list[Response]:
        """Sample one response for each prompt; a function of weights and arguments, not of the engines' number.

        Raises:
            ConfigError: a prompt leaves no room for a response in the engine's context.
        """
        places = range(len(prompts)) if places is None else places
        if (stream := self.open_stream(sampling)) is not None:
            return _all_of(stream, places, prompts, seed)
        longest = context_length(self._setup.config)
        check_room(prompts, sampling, longest)
        costs = [min(len(prompt) + sampling.max_new_tokens, longest) for prompt in prompts]
        shards = divide(costs, self._num_engines)
        # Each device of an engine is told the same, and the first returns the responses.
        num_alike = self._group.world_size // self._num_engines
        shards = [shard for shard in shards for _ in range(num_alike)]
        calls = [(list(prompts[shard]), seed, places[shard], sampling) for shard in shards]
        progress = dict[int, Generated]()

        def take(rank: int, generated: Generated) -> None:
            if told is not None and rank % num_alike == 0:
                progress[rank] = generated
                told(Generated.total(progress.values()))

        parts = self._group.run_streamed(VllmWorker.generate, calls, take)
        responses = [response for part in parts for response in part]
        if told is not None:
            told(Generated(len(responses), sum(len(response.tokens) for response in responses)))
        return responses

    def open_stream(self, sampling: Sampling) -> VllmStream | None:
        """A stream of requests and responses with `vllm_cfg.async_engine`; None without."""
        if self._continuous is None:
            return None
        return VllmStream(self._continuous, sampling, context_length(self._setup.config))

    def update_weights(self, source: WeightSource) -> None:
        """Take over the weights, bucket by bucket, on the GPUs where training has the same; between engines' steps."""
        with nullcontext() if self._continuous is None else self._continuous.between_steps():
            self._update_weights(source)
            if self._continuous is not None:
                self._kept_notices = self._ask_for_notices()
        self.has_weights = True

    def _update_weights(self, source: WeightSource) -> None:
        if self._sleeps:
            for buckets in source.device_weight_buckets():
                self._group.run_sharded(VllmWorker.load_device_bucket, [(bucket,) for bucket in buckets])
        elif self._has_channel:
            for parts in source.sent_weight_buckets():
                self._group.run_all(VllmWorker.receive_bucket, parts)
        else:
            for bucket in source.weight_buckets():
                self._group.run_all(VllmWorker.load_weight_bucket, bucket)
        self._group.run_all(VllmWorker.finish_weight_update, recompute=self._setup.recomputes_cache)

    def sleep(self) -> None:
        """Give up weights and cache where training has the same GPUs."""
        if self._sleeps and self._engines is not None and self.has_weights:
            self._engines.run_all(VllmWorker.sleep)
            self.has_weights = False

    def wake(self) -> None:
        """Take memory for the weights again."""
        if not self.has_weights:
            self._group.run_all(VllmWorker.wake)

    def lacking_bytes(self) -> list[int]:
        """Of engines that sleep, weights and cache; of those that are half awake, the cache."""
        return self._group.run_all(VllmWorker.lacking_bytes) if self._sleeps else []

    def start_seconds(self) -> dict[str, float]:
        """What building workers of its own took, by part; each part is that of the slowest."""
        return slowest(self._group.run_all(VllmWorker.start_seconds))

    def notices(self) -> list[list[str]]:
        """What the engines have warned of since the last call, by rank.

        Those of engines that are at work come after the next update of weights: nobody waits for the end of a call.
        """
        if self._engines is None:
            return []
        is_busy = self._continuous is not None and self._continuous.is_busy()
        found = self._kept_notices if is_busy else self._ask_for_notices()
        self._kept_notices = []
        return found

    def _ask_for_notices(self) -> list[list[str]]:
        found = self._group.run_all(VllmWorker.take_notices)
        kept = self._kept_notices or [[] for _ in found]
        return [[*before, *texts] for before, texts in zip(kept, found, strict=True)]

    def stop(self) -> None:
        """Kill the engines."""
        if self._continuous is not None:
            self._continuous.stop()
        if self._engines is not None:
            self._engines.shutdown()


def _all_of(stream: ResponseStream, places: Sequence[int], prompts: Sequence[list[int]], seed: int) -> list[Response]:
    stream.submit(places, prompts, seed)
    responses: dict[int, Response] = {}
    while ended := stream.take():
        responses |= ended
    return [responses[place] for place in places]
