"""The workers of one model: how work is cut for them, and how they sample.

Training and generation can have workers of their own (`policy.generation.colocated`), of this kind both. Weights go
from one to the other by Hugging Face's names: see `generation.weight_sync`.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart, VirtualCluster
from nemo_rl_offload.cluster.worker_group import Stored, WorkerGroup
from nemo_rl_offload.config.loader import path_of_quantization
from nemo_rl_offload.config.rules.parallel import data_parallel_size
from nemo_rl_offload.config.schema import MegatronConfig, PolicyConfig
from nemo_rl_offload.generation.interface import Generated, Told
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.weight_sync import SOURCE_RANK, DeviceBucket, Part, WeightBucket
from nemo_rl_offload.observability.start_clock import slowest
from nemo_rl_offload.policy.worker import PolicyWorker
from nemo_rl_offload.specs.allocator import EXPANDABLE, allocator_settings

PROCESS_BYTES = 1 << 30
"""Of a device, that a process takes besides what it asks for."""


def worker_env(config: PolicyConfig) -> dict[str, str]:
    """Environment variables of the workers: what their engine needs, and the user's `env_vars` over it."""
    cfg, env = config["megatron_cfg"], {}
    shares_layers = cfg["tensor_model_parallel_size"] * cfg["context_parallel_size"] > 1
    if cfg["activation_offload"]["engine"] == "megatron":
        # It hooks into Transformer Engine's first offloading interface, which is off by default.
        env["NVTE_CPU_OFFLOAD_V1"] = "1"
    elif cfg["fine_grained_activation_offloading"] and not shares_layers:
        # Streams of copies, of experts and of shared experts are more than the default's 8 hardware queues: kernels
        # wait behind copies that they have nothing to do with. With shared layers, Megatron-Core wants its own number.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    given = cfg["env_vars"] or {}
    name, there = allocator_settings(os.environ | given)
    if not there and cfg["cuda_graph_impl"] == "none":
        env[name] = EXPANDABLE
    return env | given


def without_offloading(config: PolicyConfig) -> PolicyConfig:
    """For workers that never train: they have no activations to offload, and capture no layers."""
    off: MegatronConfig = {
        **config["megatron_cfg"],
        "fine_grained_activation_offloading": False,
        "offload_modules": None,
        "delay_offload_until_cuda_graph": False,
        "cuda_graph_impl": "none",
        "cuda_graph_modules": None,
    }
    return {**config, "megatron_cfg": off}


class ModelWorkers:
    """One model on the slots of `cluster`, in `num_shards` copies. Arguments and errors as for `Policy`."""

    def __init__(
        self,
        cluster: VirtualCluster | ClusterPart,
        config: PolicyConfig,
        model_path: Path,
        *,
        seed: int,
        num_steps: int | None,
        keep_reference: bool,
    ) -> None:
        if config["quant_cfg"] is not None:  # workers have another current directory
            config = {**config, "quant_cfg": path_of_quantization(config["quant_cfg"])}
        self._config = config
        self.num_shards = data_parallel_size(config["megatron_cfg"], cluster.world_size)
        self.workers = WorkerGroup(
            cluster,
            PolicyWorker,
            config,
            model_path.resolve(),
            env=worker_env(config),
            seed=seed,
            num_steps=num_steps,
            keep_reference=keep_reference,
        )
        self._placements = self.workers.run_all(PolicyWorker.placement)
        self.are_away = False
        """Whether something that training needs is not on the devices: `make_room`."""

    def run_sharded[*Ts, R](
        self, method: Callable[[PolicyWorker, *Ts], R | None], shards: Sequence[tuple[*Ts]]
    ) -> list[R]:
        """Give each rank the shard of its data-parallel rank; returns one result for each shard."""
        return self._of_shards(self.workers.run_sharded(method, self._of_ranks(shards)), len(shards))

    def _of_ranks[T](self, shards: Sequence[T]) -> list[T]:
        return [shards[place.data_parallel_rank] for place in self._placements]

    def _of_shards[R](self, results: Sequence[R | None], num_shards: int) -> list[R]:
        sources = {
            place.data_parallel_rank: result
            for place, result in zip(self._placements, results, strict=True)
            if place.is_source and result is not None
        }
        return [sources[number] for number in range(num_shards)]

    def generate(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        end_ids: Sequence[int],
        sampling: Sampling,
        told: Told | None = None,
    ) -> list[Response]:
        """Sample one response for each prompt; a function of weights, arguments and number of shards.

        Ranks that hold each other's experts sample together, from the same prompts.
        """
        cfg = self._config["megatron_cfg"]
        num_of_a_shard = cfg["tensor_model_parallel_size"] * cfg["context_parallel_size"]
        num_of_experts = cfg["expert_tensor_parallel_size"] * cfg["expert_model_parallel_size"]
        num_alike = math.lcm(num_of_experts, num_of_a_shard) // num_of_a_shard
        num_shards = self.num_shards // num_alike
        size = -(-len(prompts) // num_shards)
        shards = [
            (list(prompts[number * size : (number + 1) * size]), seed * num_shards + number, end_ids, sampling)
            for number in range(num_shards)
            for _ in range(num_alike)
        ]
        progress = dict[int, Generated]()

        def take(rank: int, generated: Generated) -> None:
            place = self._placements[rank]
            if told is not None and place.is_source and place.data_parallel_rank % num_alike == 0:
                progress[rank] = generated
                told(Generated.total(progress.values()))

        results = self.workers.run_streamed(PolicyWorker.generate, self._of_ranks(shards), take)
        parts = self._of_shards(results, len(shards))[::num_alike]
        return [response for part in parts for response in part]

    def make_room(self, num_bytes: Sequence[int], *, keeps_weights: bool = False) -> None:
        """Let what training alone needs leave each rank's device, as far as fewer bytes are free there than that."""
        if any(num_bytes):
            calls = [(each, keeps_weights) for each in num_bytes]
            self.are_away = True  # some may be, where another fails
            self.are_away = any(self.workers.run_sharded(PolicyWorker.make_room, calls))

    def make_room_for_share(self, share: float) -> None:
        """The same for a share of the devices' whole memory, and a process that uses it."""
        sizes = [device_bytes for _, device_bytes in self.workers.run_all(PolicyWorker.device)]
        self.make_room([int(share * each) + PROCESS_BYTES if each else 0 for each in sizes])

    def send_optimizer_away(self) -> None:
        """Let the optimizer's state and main weights leave devices that are GPUs."""
        self.make_room([sys.maxsize] * len(self._placements), keeps_weights=True)

    def come_back(self, *, weights_alone: bool = False) -> None:
        """What has left is on the devices again; with `weights_alone` the optimizer's part stays away."""
        if self.are_away:
            self.workers.run_all(PolicyWorker.come_back, weights_alone=weights_alone)
            self.are_away = weights_alone

    def weight_buckets(self) -> Iterator[Stored[WeightBucket]]:
        """All weights by Hugging Face's names, once."""
        self.workers.run_all(PolicyWorker.start_weight_export)
        while (bucket := self.workers.run_all(PolicyWorker.next_weight_bucket)[SOURCE_RANK]) is not None:
            yield bucket

    def device_weight_buckets(self) -> Iterator[list[DeviceBucket]]:
        """The same on the ranks' GPUs, each bucket once on each of them."""
        self.workers.run_all(PolicyWorker.start_weight_export, on_device=True)
        while (buckets := self.workers.run_all(PolicyWorker.next_device_weight_bucket))[0] is not None:
            yield [bucket for bucket in buckets if bucket is not None]

    def open_weight_channel(self, num_receivers: int) -> tuple[str, int]:
        """Open a channel from the first rank to as many receivers; the address where they find it."""
        address = self.workers.run_all(PolicyWorker.open_weight_channel, num_receivers)[SOURCE_RANK]
        assert address is not None, "the first rank has it"
        return address

    def sent_weight_buckets(self) -> Iterator[tuple[Part, ...]]:
        """The parts of each bucket that the first rank is sending over the channel."""
        self.workers.run_all(PolicyWorker.start_weight_export, on_device=True)
        while (parts := self.workers.run_all(PolicyWorker.next_sent_weight_bucket)[SOURCE_RANK]) is not None:
            yield parts

    def prepare_weight_update(self) -> None:
        """Find where each weight goes; raises ConfigError when one cannot come by its Hugging Face name."""
        self.workers.run_all(PolicyWorker.prepare_weight_update)

    def load_weights(self, buckets: Iterable[Stored[WeightBucket]]) -> None:
        """Replace all weights."""
        for bucket in buckets:
            self.workers.run_all(PolicyWorker.load_weight_bucket, bucket)
        self.workers.run_all(PolicyWorker.finish_weight_update)

    def start_seconds(self) -> dict[str, float]:
        """What building the workers took, by part; each part is that of the slowest."""
        return slowest(self.workers.run_all(PolicyWorker.start_seconds))

    def notices(self) -> list[list[str]]:
        """What the workers have warned of since the last call, by rank."""
        return self.workers.run_all(PolicyWorker.take_notices)

    def shutdown(self) -> None:
        """Kill the workers. May be called twice."""
        self.workers.shutdown()
