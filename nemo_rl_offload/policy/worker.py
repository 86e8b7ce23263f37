"""One rank of a policy: what runs inside a Ray actor.

Megatron is imported when the worker is built, not with this module, so that the driver can name the class without
paying for the import.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.worker_group import Stored
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import ResourceError
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.weight_sync import (
    SOURCE_RANK,
    DeviceBucket,
    Part,
    WeightBucket,
    WeightExport,
    WeightLoader,
)
from nemo_rl_offload.observability.memory_trace import MemoryTrace
from nemo_rl_offload.observability.notices import Notices
from nemo_rl_offload.observability.start_clock import StartClock
from nemo_rl_offload.offload.host_memory import give_back_free_memory
from nemo_rl_offload.policy.garbage import freeze_gc
from nemo_rl_offload.policy.out_of_memory import CHECKPOINTING, device_use, explained, out_of_memory
from nemo_rl_offload.policy.residency.phases import DevicePeaks, PhasePeaks, cuda_counter
from nemo_rl_offload.specs.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nemo_rl_offload.generation.weight_channel import OpenChannel
    from nemo_rl_offload.losses.reduction import Normalizers
    from nemo_rl_offload.megatron.build.model import MegatronModel
    from nemo_rl_offload.megatron.checkpoint.distributed import Save
    from nemo_rl_offload.megatron.step.head import HeadFactory
    from nemo_rl_offload.observability.step_profile import Span, StepProfile
    from nemo_rl_offload.offload.stats import OffloadStats
    from nemo_rl_offload.offload.waiting_weights import DepartingWeights, WaitingWeights
    from nemo_rl_offload.paged_stash.stats import StashStats
    from nemo_rl_offload.runs.manifest import Manifest
    from nemo_rl_offload.runs.run_files import MemorySample


@dataclass(frozen=True)
class Placement:
    """A rank's part in the work: which shard of a batch it gets, and whether its results are its shard's."""

    data_parallel_rank: int
    is_source: bool


class PolicyWorker:
    """Trains, scores and samples with this rank's part of the model.

    Every method is called on all ranks with the same arguments, or with the shard of a batch that this rank's
    data-parallel rank gets. Results stand on the last pipeline stage.
    """

    def __init__(
        self, policy: PolicyConfig, model_path: Path, *, seed: int, num_steps: int | None, keep_reference: bool
    ) -> None:
        self._notices, self._clock = Notices(), StartClock()
        from nemo_rl_offload.megatron.runtime.affinity import bind

        bind(policy["megatron_cfg"]["cpu_affinity"])  # before there is a CUDA context or host memory to be misplaced
        with self._clock.part("imports"):
            from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support
            from nemo_rl_offload.megatron.runtime.optional_packages import (
                leave_out_broken_packages,
                warn_of_broken_packages,
            )

            leave_out_broken_packages()
            warn_of_broken_packages()
            install_cpu_support()
            from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters
            from nemo_rl_offload.megatron.build.model import build_model, init_process_groups
            from nemo_rl_offload.megatron.build.offload import install_offloading, make_arena
            from nemo_rl_offload.offload.waiting_weights import WaitingWeights
            from nemo_rl_offload.policy.residency.away_state import AwayState
            from nemo_rl_offload.policy.residency.kept_weights import keep_weights
            from nemo_rl_offload.policy.residency.megatron_optimizer import keep_what_waits_on_host

        self._policy = policy
        self._model_path = model_path
        self._phases = PhasePeaks(cuda_counter())
        with explained("loading the model", policy):
            with self._clock.part("process groups"):
                init_process_groups(policy, seed)
            with self._clock.part("host memory"):
                self._arena = make_arena(policy)
                self._engine = install_offloading(policy, self._arena)
            keep = partial(keep_what_waits_on_host, policy, self._arena)
            self._model = build_model(policy, model_path, num_steps, keep_optimizer=keep, clock=self._clock)
        if self._engine is not None:
            exclude_parameters(self._engine, self._model.modules)
        self._departed: DepartingWeights | None = None
        self._away = AwayState(self._arena, self._model)
        self._model.measure = self._phases.phase
        self._free_gradients()
        self._save: Save | None = None
        self._profile: StepProfile | None = None
        self._export: WeightExport | None = None
        self._loader: WeightLoader | None = None
        self._channel: OpenChannel | None = None
        self._has_trained = False
        self._device_bytes: dict[str, int] = {}
        self._reference: WaitingWeights | None = None
        if keep_reference and not self._model.has_adapters:
            with self._clock.part("reference weights"):
                self._reference = keep_weights(WaitingWeights, self._arena, self._whole_model().modules, "reference's")

    def start_seconds(self) -> dict[str, float]:
        """What building this worker took, by part."""
        return self._clock.seconds

    def placement(self) -> Placement:
        """Where this rank stands in Megatron's groups."""
        from megatron.core import parallel_state

        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        return Placement(
            parallel_state.get_data_parallel_rank(),
            is_first and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        )

    def _whole_model(self) -> MegatronModel:
        """The model with the last step's weights on every rank, for everything but the next step."""
        self._model.gather_weights()
        return self._model

    def train(
        self,
        batch: Batch,
        loss_name: str,
        loss_config: Mapping[str, object],
        norm: Normalizers,
        split: MicrobatchSplit | None = None,
    ) -> dict[str, float]:
        """One optimizer step on this rank's shard of a global batch, which `norm` counts as a whole.

        `split` says what the microbatches are; without one they have the configured number of samples.
        """
        from nemo_rl_offload.megatron.step.train_step import train_step
        from nemo_rl_offload.policy.residency.gradients import restore_gradients
        from nemo_rl_offload.policy.residency.model_tensors import resident_bytes

        with self._phases.phase("train"):
            try:
                restore_gradients(self._model)
                metrics = self._with_loss(train_step, batch, loss_name, loss_config, norm, split)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise self._out_of_memory(loss_name, error) from error
        if not self._has_trained:
            self._device_bytes = resident_bytes(self._model, self._arena)
        self._free_gradients()
        give_back_free_memory()
        if not self._has_trained:
            self._has_trained = True
            freeze_gc()
        return metrics

    def _out_of_memory(self, loss_name: str, error: RuntimeError) -> ResourceError:
        import torch.distributed as dist

        from nemo_rl_offload.losses.registry import rows_per_sample

        world_size, rows = dist.get_world_size(), rows_per_sample(loss_name)
        return out_of_memory(self._policy, self._model_path, world_size, device_use(error), rows)

    def evaluate(
        self,
        batch: Batch,
        loss_name: str,
        loss_config: Mapping[str, object],
        norm: Normalizers,
        split: MicrobatchSplit | None = None,
    ) -> dict[str, float]:
        """The loss and its metrics on this rank's shard of a batch, which `norm` counts as a whole."""
        from nemo_rl_offload.megatron.step.train_step import evaluate

        self._model.gather_weights()
        with self._phases.phase("validation"), explained("evaluating", self._policy):
            return self._with_loss(evaluate, batch, loss_name, loss_config, norm, split)

    def _with_loss(
        self,
        function: Callable[..., dict[str, float]],
        batch: Batch,
        loss_name: str,
        loss_config: Mapping[str, object],
        norm: Normalizers,
        split: MicrobatchSplit | None,
    ) -> dict[str, float]:
        from nemo_rl_offload.losses.registry import build_loss

        loss = build_loss(loss_name, loss_config)
        microbatches = split or self._policy["train_micro_batch_size"] * loss.rows_per_sample
        return function(self._model, batch, loss, norm, microbatches, self._heads())

    def _heads(self) -> HeadFactory:
        from nemo_rl_offload.megatron.step.head_factory import make_heads

        return make_heads(self._policy, self._model)

    def get_logprobs(self, batch: Batch, split: MicrobatchSplit | None = None) -> NDArray[np.float32] | None:
        """Log-probabilities of this rank's shard, float32 [B, S]; None before the last pipeline stage.

        Megatron changes how tensors are pickled, such that unpickling one imports Megatron: an array travels instead.
        """
        with self._phases.phase("logprobs"):
            return self._logprobs(batch, split)

    def _logprobs(self, batch: Batch, split: MicrobatchSplit | None) -> NDArray[np.float32] | None:
        from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs

        microbatches = split or self._policy["logprob_batch_size"]
        with explained("computing log-probabilities", self._policy):
            logprobs = compute_logprobs(self._whole_model(), batch, microbatches, self._heads())
        self._empty_cache(from_level=2)
        return None if logprobs is None else logprobs.numpy()

    def get_reference_policy_logprobs(
        self, batch: Batch, split: MicrobatchSplit | None = None
    ) -> NDArray[np.float32] | None:
        """The same with the start weights, which take the place of the current ones meanwhile.

        They are those beside the adapters where there are any.
        """
        if self._model.has_adapters:
            from nemo_rl_offload.megatron.build.lora import adapters_off

            with self._phases.phase("reference_logprobs"), adapters_off(self._model.modules):
                return self._logprobs(batch, split)
        assert self._reference is not None, "built with keep_reference=False"
        self._model.gather_weights()
        room_bytes = self._phases.room_bytes(within="train", beside="logprobs")
        with (
            self._phases.phase("reference_logprobs"),
            explained("computing log-probabilities", self._policy),
            self._reference.in_place(room_bytes),
        ):
            return self._logprobs(batch, split)

    def get_topk_logits(
        self, batch: Batch, k: int, num_tokens: int, split: MicrobatchSplit | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
        """The largest logits of this rank's shard and their ids, [B, S, K]; None before the last pipeline stage."""
        from nemo_rl_offload.megatron.step.log_probabilities import compute_topk_logits
        from nemo_rl_offload.policy.residency.eight_bits import free_copies

        microbatches = split or self._policy["logprob_batch_size"]
        presence = nullcontext() if self._departed is None else self._departed.on_device()
        with self._phases.phase("teacher_logits"), explained("computing log-probabilities", self._policy), presence:
            top = compute_topk_logits(self._whole_model(), batch, microbatches, self._heads(), k, num_tokens)
        if self._departed is not None:
            free_copies(self._model.modules)
        self._empty_cache(from_level=2 if self._departed is None else 0)
        return None if top is None else (top[0].numpy(), top[1].numpy())

    def leave_device(self) -> None:
        """Let weights that are never trained wait in host memory but for `get_topk_logits`, where there is a GPU.

        Raises ConfigError where the host's budget has no room for them.
        """
        import torch

        from nemo_rl_offload.offload.waiting_weights import DepartingWeights
        from nemo_rl_offload.policy.residency.kept_weights import keep_weights

        if torch.cuda.is_available():
            self._departed = keep_weights(DepartingWeights, self._arena, self._model.modules, "teacher's")
            self._empty_cache(from_level=0)

    def make_room(self, num_bytes: int, keeps_weights: bool) -> bool:
        """Let what training alone needs leave the device, as far as fewer bytes are free there than that.

        With `keeps_weights` they stay, for an engine that is to read them.
        Returns whether something is away; then `come_back` comes before all that needs the model. Raises ConfigError
        where the host's budget has no room.
        """
        self._model.gather_weights()
        return self._away.make_room(num_bytes, keeps_weights=keeps_weights)

    def come_back(self, *, weights_alone: bool) -> None:
        """What has left is on the device again; with `weights_alone` the optimizer's part stays where it is."""
        with explained("bringing back what training needs", self._policy):
            if weights_alone:
                self._away.bring_weights()
            else:
                self._away.bring_all()

    def hand_back_memory(self) -> None:
        """Leave what this process does not use of the device to others."""
        self._empty_cache(from_level=0)

    def start_weight_export(self, *, on_device: bool = False) -> None:
        """Begin to read out the current weights, into host memory or to where an engine on the same GPU reads them."""
        if on_device:  # what training keeps for its next step is not there for the engine otherwise
            self._empty_cache(from_level=0)
        with explained("handing over weights", self._policy):
            self._export = WeightExport(self._whole_model(), on_device=on_device)

    def next_weight_bucket(self) -> Stored[WeightBucket] | None:
        """The next weights, on the first rank; None elsewhere, and when all have been read."""
        assert self._export is not None, "start_weight_export comes first"
        with explained("handing over weights", self._policy):
            bucket = self._export.next_bucket()
        return None if bucket is None else Stored.put(bucket)

    def next_device_weight_bucket(self) -> DeviceBucket | None:
        """The next weights on this rank's GPU; None when all have been read."""
        assert self._export is not None, "start_weight_export comes first"
        with explained("handing over weights", self._policy):
            return self._export.next_device_bucket()

    def open_weight_channel(self, num_receivers: int) -> tuple[str, int] | None:
        """On the first rank, open a channel for weights; the address where receivers find it."""
        import torch.distributed as dist

        from nemo_rl_offload.generation.weight_channel import OpenChannel

        if dist.get_rank() != SOURCE_RANK:
            return None
        self._channel = OpenChannel(num_receivers)
        return self._channel.address

    def next_sent_weight_bucket(self) -> tuple[Part, ...] | None:
        """Begin to send the next weights over the channel; what they are, or None when all have been sent."""
        assert self._export is not None, "start_weight_export comes first"
        with explained("handing over weights", self._policy):
            return self._export.next_sent_bucket(None if self._channel is None else self._channel.channel)

    def prepare_weight_update(self) -> None:
        """Find where each weight goes; raises ConfigError when one cannot come by its Hugging Face name."""
        self._loader = WeightLoader(self._model)

    def load_weight_bucket(self, bucket: Stored[WeightBucket]) -> None:
        """Take over the next weights."""
        assert self._loader is not None, "prepare_weight_update comes first"
        with explained("handing over weights", self._policy):
            self._loader.load(bucket.get())

    def finish_weight_update(self) -> None:
        """End an update, all of whose buckets have been loaded."""
        assert self._loader is not None, "prepare_weight_update comes first"
        self._loader.finish()

    def generate(
        self, prompts: list[list[int]], seed: int, end_ids: Sequence[int], sampling: Sampling
    ) -> Generator[Generated, None, list[Response]]:
        """Sample one response for each prompt; yields now and then how far that is."""
        from nemo_rl_offload.generation.megatron_sampling import generating

        with self._phases.phase("generation"), explained("generating", self._policy):
            responses = yield from generating(
                self._whole_model().modules,
                prompts,
                sampling,
                batch_size=self._policy["generation_batch_size"],
                end_ids=end_ids,
                seed=seed,
                max_length=self._policy["max_total_sequence_length"],
            )
        self._empty_cache(from_level=2)
        return responses

    def _free_gradients(self) -> None:
        import torch

        from nemo_rl_offload.policy.residency.eight_bits import free_copies
        from nemo_rl_offload.policy.residency.gradients import free_gradients

        if torch.cuda.is_available() and self._policy["megatron_cfg"]["empty_unused_memory_level"] >= 1:
            free_gradients(self._model)
            free_copies(self._model.modules)
        self._empty_cache(from_level=1)

    def _empty_cache(self, from_level: int) -> None:
        import torch

        if torch.cuda.is_available() and self._policy["megatron_cfg"]["empty_unused_memory_level"] >= from_level:
            torch.cuda.empty_cache()

    def start_checkpoint(self, folder: Path, *, in_background: bool, with_optimizer: bool = True) -> None:
        """Begin to write this rank's part of a checkpoint, from a copy where training goes on meanwhile."""
        from nemo_rl_offload.megatron.checkpoint.distributed import Save

        with explained(CHECKPOINTING, self._policy):
            self._save = Save(self._whole_model(), folder, copies=in_background, with_optimizer=with_optimizer)

    def checkpoint_is_written(self) -> bool:
        """Whether this rank's part is on the disk."""
        return self._save is not None and self._save.is_written

    def finish_checkpoint(self) -> Manifest:
        """Complete the checkpoint with the other ranks; returns the files of this one."""
        assert self._save is not None, "start_checkpoint comes first"
        save, self._save = self._save, None
        with explained(CHECKPOINTING, self._policy):
            return save.finish()

    def load_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        """Read this rank's part of a checkpoint, once all its files are found to be what was written."""
        from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint

        checkpoint.verify(folder, manifest)
        with explained(CHECKPOINTING, self._policy):
            checkpoint.load(self._whole_model(), folder)

    def load_start_weights(self, folder: Path, manifest: Manifest) -> None:
        """Read the weights alone of a checkpoint, likewise; the reference model, where there is one, has them too."""
        from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint

        checkpoint.verify(folder, manifest)
        with explained(CHECKPOINTING, self._policy):
            model = self._whole_model()
            if self._reference is not None:
                with self._reference.in_place(room_bytes=0):  # so that what is read then goes where they wait
                    checkpoint.load_weights(model, folder)
            checkpoint.load_weights(model, folder)

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        from nemo_rl_offload.megatron.build.model import export_hf

        export_hf(self._whole_model(), self._model_path, folder)

    def offload_stats(self) -> OffloadStats | None:
        """Totals of this rank's engine; None when offloading is off."""
        return None if self._engine is None else self._engine.stats()

    def take_notices(self) -> list[str]:
        """What this process has warned of since the last call."""
        return self._notices.take()

    def paged_stash_stats(self) -> StashStats | None:
        """Counts of steps that ran again, and the stash's sizes, on this rank; None where experts have no limits."""
        return None if self._model.guard is None else self._model.guard.stats()

    def device_peaks(self) -> DevicePeaks:
        """Highest device memory that torch has allocated, by phase, and reserved; none on a CPU."""
        return self._phases.peaks

    def device_bytes(self) -> dict[str, int]:
        """Of the device, what stands there throughout a training step, by what it is; none before the first."""
        return self._device_bytes

    def host_bytes(self) -> dict[str, int]:
        """Of the arena, by what waits there: held all the time, but for the most that activations have taken."""
        reference_bytes, teacher_bytes = (
            0 if each is None else each.num_bytes for each in (self._reference, self._departed)
        )
        sizes = {
            "activations": self._arena.peak_bytes,
            "optimizer": self._arena.held_bytes - reference_bytes - teacher_bytes - self._away.num_bytes,
            "reference_weights": reference_bytes,
            "teacher": teacher_bytes,
            "while_vllm_generates": self._away.num_bytes,
        }
        return {name: size for name, size in sizes.items() if size}

    def device(self) -> tuple[str, int]:
        """The driver's name for the device, and its memory in bytes; "cpu" and 0 without one."""
        import torch

        if not torch.cuda.is_available():
            return "cpu", 0
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]

    def start_profile(self, *, all_ranks: bool) -> None:
        """Begin to record this rank, if it is meant."""
        import torch.distributed as dist

        if all_ranks or dist.get_rank() == 0:
            from nemo_rl_offload.observability.step_profile import StepProfile

            self._profile = StepProfile()

    def finish_profile(self, folder: Path, step: int, spans: Sequence[Span]) -> str | None:
        """Write what was recorded, where this rank was; returns why that could not be written."""
        import torch.distributed as dist

        profile, self._profile = self._profile, None
        try:
            if profile is not None:
                profile.finish(folder / f"step_{step}_rank_{dist.get_rank()}.json.gz", spans)
        except ResourceError as error:
            return str(error)
        return None

    def start_memory_trace(self) -> None:
        """Begin to sample this rank's memory."""
        import psutil
        import torch

        def used_bytes() -> int:
            if torch.cuda.is_available():
                return torch.cuda.memory_allocated()
            return int(psutil.Process().memory_info().rss)

        engine = self._engine
        self._trace = MemoryTrace(lambda: (used_bytes(), 0 if engine is None else engine.stats().host_bytes))

    def finish_memory_trace(self) -> list[MemorySample]:
        """The samples since."""
        return self._trace.finish()

    def shutdown(self) -> None:
        """Leave the process group and free the host arena."""
        import torch.distributed as dist

        self._notices.close()
        if self._model.graphs is not None:
            self._model.graphs.clear()  # before the communicators that they use
        if self._engine is not None:
            self._engine.close()
        self._arena.close()
        dist.destroy_process_group()
