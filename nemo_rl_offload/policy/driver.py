"""The driver's handle on a policy: cuts batches into shards for the ranks and puts results together."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_offload.batching.batch import ROUTED_EXPERTS, Batch, num_samples, select
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.batching.sharding import ShardedBatch
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart, VirtualCluster
from nemo_rl_offload.config.rules.parallel import check_ranks_have_samples, data_parallel_size, num_interleaved
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.interface import GeneratorSetup, ResponseStream, Told
from nemo_rl_offload.generation.registry import make_generator
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.losses.reduction import Normalizers, normalizers, valid_tokens
from nemo_rl_offload.losses.registry import rows_per_sample
from nemo_rl_offload.losses.updates import mean_of_updates
from nemo_rl_offload.observability.step_profile import Span
from nemo_rl_offload.paged_stash.stats import StashStats, stash_totals
from nemo_rl_offload.planner.cost.flops import training_flops
from nemo_rl_offload.policy.microbatches import is_planned, shard_for_ranks
from nemo_rl_offload.policy.model_workers import ModelWorkers, without_offloading
from nemo_rl_offload.policy.offload_totals import idle_modules, offload_totals
from nemo_rl_offload.policy.worker import PolicyWorker
from nemo_rl_offload.runs.manifest import Manifest
from nemo_rl_offload.runs.run_files import MemorySample, MemoryTotals, OffloadTotals
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.devices import recognise
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.parallel_layout import num_microbatches

LossMethod = Callable[
    [PolicyWorker, Batch, str, Mapping[str, object], Normalizers, MicrobatchSplit | None], dict[str, float]
]
LogprobsMethod = Callable[[PolicyWorker, Batch, MicrobatchSplit | None], NDArray[np.float32] | None]


class Policy:
    """A policy on the slots of `cluster`; implements `PolicyInterface`.

    Any of `end_ids` ends a response. `num_steps` is the number of optimizer steps that the learning-rate schedule
    spans; None for a policy that is never trained. With `keep_reference` each rank keeps a copy of the start weights in
    host memory. `generation_slots` are for workers that only generate; without any the training workers do it.
    `recomputes_cache` as in `GeneratorSetup`.

    Raises ConfigError when a global batch cannot be cut into whole micro batches over the ranks, or when Megatron
    refuses the configuration; WorkerError when a worker fails.
    """

    def __init__(
        self,
        cluster: VirtualCluster | ClusterPart,
        config: PolicyConfig,
        model_path: Path,
        end_ids: tuple[int, ...],
        *,
        seed: int,
        num_steps: int | None,
        keep_reference: bool,
        generation_slots: ClusterPart | None = None,
        recomputes_cache: bool = False,
    ) -> None:
        self._config = config
        num_shards = data_parallel_size(config["megatron_cfg"], cluster.world_size)
        whole, micro = config["train_global_batch_size"], config["train_micro_batch_size"]
        if is_planned(config):
            check_ranks_have_samples(whole, num_shards)
        else:
            num_microbatches(whole, micro, num_shards, num_interleaved(config["megatron_cfg"]))
        untrained = partial(ModelWorkers, model_path=model_path, seed=seed, num_steps=None, keep_reference=False)
        setup = GeneratorSetup(
            without_offloading(config),
            end_ids,
            model_path.resolve(),
            cluster,
            generation_slots,
            untrained,
            recomputes_cache,
        )
        self._generator = make_generator(setup)
        try:
            self._generator.prepare()
            self._trainers = ModelWorkers(
                cluster, config, model_path, seed=seed, num_steps=num_steps, keep_reference=keep_reference
            )
            self._workers = self._trainers.workers
            self._generator.start(self._trainers)
        except BaseException:
            self._generator.stop()  # nobody has this object to do it
            raise
        self._generator_is_behind = config["quant_cfg"] is not None  # engines begin with the folder's own weights
        self.num_refits = 0
        self._trained_flops = 0.0
        self._shape: ModelShape | None = None
        with suppress(ConfigError):  # of a family that the planner does not know
            self._shape = load_model_shape(config["model_name"], model_path, config["megatron_cfg"]["mtp_num_layers"])

    def train(self, batch: Batch, loss_name: str, loss_config: Mapping[str, object]) -> dict[str, float]:
        """Take one optimizer step for each `train_global_batch_size` samples; returns the steps' mean metrics.

        What a loss says is averaged over its tokens or sequences, so that a step without any counts for nothing.
        """
        rows = rows_per_sample(loss_name)
        size = self._config["train_global_batch_size"] * rows
        assert num_samples(batch) % size == 0, "checked with the configuration"
        if self._shape is not None:
            self._trained_flops += training_flops(
                self._shape,
                batch["input_lengths"].tolist(),
                is_frozen=self._config["megatron_cfg"]["peft"]["enabled"],
            )
        steps: list[dict[str, float]] = []
        num_tokens: list[int] = []
        num_sequences: list[int] = []
        for start in range(0, num_samples(batch), size):
            global_batch = select(batch, slice(start, start + size))
            steps.append(self._with_loss(PolicyWorker.train, global_batch, loss_name, loss_config))
            num_tokens.append(int(valid_tokens(global_batch).sum()))
            num_sequences.append(int(global_batch["sample_mask"].sum()))
        self._generator_is_behind = True
        token_level_loss = bool(loss_config.get("token_level_loss", True))
        return mean_of_updates(steps, num_tokens, num_sequences, token_level_loss=token_level_loss)

    def evaluate(self, batch: Batch, loss_name: str, loss_config: Mapping[str, object]) -> dict[str, float]:
        """The loss and its metrics over a batch of any size, without a step."""
        return self._with_loss(PolicyWorker.evaluate, batch, loss_name, loss_config)

    def _with_loss(
        self, method: LossMethod, batch: Batch, loss_name: str, loss_config: Mapping[str, object]
    ) -> dict[str, float]:
        sharded = shard_for_ranks(batch, self._config, self._trainers.num_shards, "train", rows_per_sample(loss_name))
        norm = normalizers(batch)
        shards = [(shard, loss_name, loss_config, norm, split) for shard, split in sharded.with_splits()]
        return self._run_sharded(method, shards)[0]

    def _run_sharded[*Ts, R](
        self, method: Callable[[PolicyWorker, *Ts], R | None], shards: Sequence[tuple[*Ts]]
    ) -> list[R]:
        self._take_devices()
        return self._trainers.run_sharded(method, shards)

    def _take_devices(self) -> None:
        """Whatever the workers do may need more memory than an engine leaves, a checkpoint's whole buckets too."""
        self._generator.sleep()
        self._trainers.come_back()

    def get_logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of every token under the current weights, float32 [B, S]; position 0 is 0."""
        return self._sharded_logprobs(PolicyWorker.get_logprobs, batch, replays=True)

    def get_reference_policy_logprobs(self, batch: Batch) -> Tensor:
        """The same under the weights that the run started from."""
        return self._sharded_logprobs(PolicyWorker.get_reference_policy_logprobs, batch)

    def _sharded_logprobs(self, method: LogprobsMethod, batch: Batch, *, replays: bool = False) -> Tensor:
        sharded = self._for_logprobs(batch, replays=replays)
        self._generator.sleep()
        if self._config["offload_optimizer_for_logprob"]:
            self._trainers.send_optimizer_away()
        self._trainers.come_back(weights_alone=True)
        parts = self._trainers.run_sharded(method, sharded.with_splits())
        return sharded.gather([torch.tensor(part) for part in parts])  # copies: Ray's arrays are read-only

    def _for_logprobs(self, batch: Batch, *, replays: bool = False) -> ShardedBatch:
        """`replays`: the generating policy's experts are those that it chose then; another model has its own."""
        keys = ("input_ids", "input_lengths", ROUTED_EXPERTS) if replays else ("input_ids", "input_lengths")
        inputs = {key: batch[key] for key in keys if key in batch}
        return shard_for_ranks(inputs, self._config, self._trainers.num_shards, "logprob")

    def get_topk_logits(self, batch: Batch, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The `k` largest logits that predict each token, over temperature, and their ids, [B, S, K]; position 0 is 0.

        Only the first `num_tokens` of the vocabulary count.
        """
        sharded = self._for_logprobs(batch)
        shards = [(shard, k, num_tokens, split) for shard, split in sharded.with_splits()]
        values, ids = zip(*self._run_sharded(PolicyWorker.get_topk_logits, shards), strict=True)
        return sharded.gather(list(map(torch.tensor, values))), sharded.gather(list(map(torch.tensor, ids)))

    def generate(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        sampling: Sampling,
        told: Told | None = None,
        places: Sequence[int] | None = None,
    ) -> list[Response]:
        """Sample one response for each prompt; a function of weights, arguments and the backend's layout."""
        self.refit()
        return self._generator.generate(prompts, seed, sampling, told, places)

    def leave_device(self) -> None:
        """Let the weights of a policy that is never trained wait in host memory but for `get_topk_logits`, on GPUs."""
        self._workers.run_all(PolicyWorker.leave_device)

    def hand_back_memory(self) -> None:
        """Leave what the workers do not use of their devices to others; an engine beside them sleeps."""
        self._generator.sleep()
        self._workers.run_all(PolicyWorker.hand_back_memory)

    def refit(self) -> None:
        """Give the trained weights to the generator, where it does not have them."""
        lacking_bytes = self._generator.lacking_bytes()
        if any(lacking_bytes) and self._config["offload_optimizer_for_logprob"]:  # one crossing serves both
            self._trainers.send_optimizer_away()
        self._trainers.make_room(lacking_bytes, keeps_weights=True)  # of which it reads them
        self._generator.wake()
        if self._generator_is_behind or not self._generator.has_weights:
            self._trainers.come_back(weights_alone=True)
            self._generator.update_weights(self._trainers)
            self._generator_is_behind = False
            self.num_refits += 1
        self._trainers.make_room(self._generator.lacking_bytes())

    def open_stream(self, sampling: Sampling) -> ResponseStream | None:
        """Responses one by one, by the weights of the last `refit`; None where the generator answers batches alone."""
        return self._generator.open_stream(sampling)

    def start_checkpoint(self, folder: Path, *, in_background: bool, with_optimizer: bool = True) -> None:
        """Begin to write weights, schedule and random numbers into a new folder, which all nodes share.

        The optimizer's state is among them if it is wanted.
        """
        folder.mkdir()
        self._take_devices()
        how = {"in_background": in_background, "with_optimizer": with_optimizer}
        self._workers.run_all(PolicyWorker.start_checkpoint, folder.resolve(), **how)

    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait."""
        return all(self._workers.run_all(PolicyWorker.checkpoint_is_written))

    def finish_checkpoint(self) -> Manifest:
        """Complete what `start_checkpoint` began; returns the files."""
        parts = self._workers.run_all(PolicyWorker.finish_checkpoint)
        return {name: digest for part in parts for name, digest in part.items()}

    def load_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        """Read what was written, with these files."""
        self._take_devices()
        self._workers.run_all(PolicyWorker.load_checkpoint, folder.resolve(), manifest)
        self._generator_is_behind = True

    def load_start_weights(self, folder: Path, manifest: Manifest) -> None:
        """Begin with the weights of a checkpoint with these files; a reference model has them too."""
        self._take_devices()
        self._workers.run_all(PolicyWorker.load_start_weights, folder.resolve(), manifest)
        self._generator_is_behind = True

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder, with the start model's configuration and tokenizer."""
        self._take_devices()
        self._workers.run_all(PolicyWorker.export_hf, folder.resolve())

    def offload_stats(self) -> OffloadTotals:
        """Totals of all ranks' engines: see `offload_totals`."""
        per_rank = self._workers.run_all(PolicyWorker.offload_stats)
        return offload_totals(self._config, [stats for stats in per_rank if stats is not None])

    def idle_modules(self) -> list[str]:
        """Which listed modules have offloaded nothing so far, and why."""
        return list(idle_modules(self._config, self.offload_stats()))

    def start_seconds(self) -> dict[str, float]:
        """What building the workers took, by part; parts of training and of generation overlap."""
        return {**self._trainers.start_seconds(), **self._generator.start_seconds()}

    def notices(self) -> list[str]:
        """What the workers have warned of since the last call, each text once."""
        ranks: dict[str, list[int]] = {}
        for group in (self._trainers, self._generator):
            for rank, texts in enumerate(group.notices()):
                for text in texts:
                    ranks.setdefault(text, []).append(rank)
        if self._workers.world_size == 1:
            return list(ranks)
        return [f"{text} (rank {', '.join(map(str, sorted(set(found))))})" for text, found in ranks.items()]

    def paged_stash_stats(self) -> StashStats | None:
        """Steps that ran again because experts' buffers or stash were too small, and what they needed at most.

        Sizes in bytes are sums over the ranks; None where the experts have no limits.
        """
        per_rank = [stats for stats in self._workers.run_all(PolicyWorker.paged_stash_stats) if stats is not None]
        return stash_totals(per_rank) if per_rank else None

    def memory(self) -> MemoryTotals:
        """Highest device memory of any rank, and host memory of all, by what waits there."""
        peaks = self._workers.run_all(PolicyWorker.device_peaks)
        by_phase: dict[str, int] = {}
        for phase, peak in (each for of_rank in peaks for each in of_rank.by_phase.items()):
            by_phase[phase] = max(peak, by_phase.get(phase, 0))
        of_the_fullest = max(self._workers.run_all(PolicyWorker.device_bytes), key=lambda sizes: sum(sizes.values()))
        host_bytes: Counter[str] = Counter()
        for sizes in self._workers.run_all(PolicyWorker.host_bytes):
            host_bytes.update(sizes)
        return {
            "peak_device_bytes": max(by_phase.values(), default=None),
            "peak_reserved_bytes": max((each.reserved for each in peaks if each.reserved is not None), default=None),
            "peak_device_bytes_by_phase": by_phase,
            "device_bytes": of_the_fullest,
            "host_bytes": dict(host_bytes),
        }

    @property
    def world_size(self) -> int:
        """Number of workers that train."""
        return self._workers.world_size

    def trained_flops(self) -> float | None:
        """Floating-point operations of all passes for training so far; None for a model of unknown shape."""
        return None if self._shape is None else self._trained_flops

    def peak_flops_per_s(self) -> float | None:
        """Peak rate of all devices together, in the policy's precision; None where one is not known."""
        if self._config["precision"] != "bfloat16":
            return None
        devices = self._workers.run_all(PolicyWorker.device)
        try:
            return sum(recognise(name, num_bytes).bf16_tflops * 1e12 for name, num_bytes in devices)
        except ConfigError:
            return None

    def start_profile(self, *, all_ranks: bool) -> None:
        """Begin to record the first worker that trains, or all of them."""
        self._workers.run_all(PolicyWorker.start_profile, all_ranks=all_ranks)

    def finish_profile(self, folder: Path, step: int, spans: Sequence[Span]) -> list[str]:
        """Write what was recorded into the folder, with the phases of the step; returns what could not be written."""
        failed = self._workers.run_all(PolicyWorker.finish_profile, folder.resolve(), step, spans)
        return [each for each in failed if each is not None]

    def start_memory_trace(self) -> None:
        """Begin to sample the memory of the first worker."""
        self._workers.run_all(PolicyWorker.start_memory_trace)

    def finish_memory_trace(self) -> list[MemorySample]:
        """The samples since."""
        return self._workers.run_all(PolicyWorker.finish_memory_trace)[0]

    def shutdown(self) -> None:
        """Kill the workers. May be called twice."""
        self._trainers.shutdown()
        self._generator.stop()
