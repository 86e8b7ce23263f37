"""The driver's handle: how it cuts work for the ranks and puts results together. Workers are plain objects here."""

import subprocess
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.batching.batch import ROUTED_EXPERTS, Batch, num_samples
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.losses.reduction import normalizers, valid_tokens
from nemo_rl_offload.offload.stats import ModuleStats, OffloadStats
from nemo_rl_offload.policy import model_workers as ranks_module
from nemo_rl_offload.policy.driver import Policy
from nemo_rl_offload.policy.residency.phases import DevicePeaks
from nemo_rl_offload.policy.worker import Placement


class FakeWorker:
    """Computes simple functions of what it receives. Ranks are laid out as Megatron does: tensor, data, pipeline."""

    def __init__(self, rank: int, world_size: int, cfg: Any) -> None:
        self.rank = rank
        tensor_size, num_stages = cfg["tensor_model_parallel_size"], cfg["pipeline_model_parallel_size"]
        stage, rest = divmod(rank, world_size // num_stages)
        self.place = Placement(rest // tensor_size, rest % tensor_size == 0 and stage == num_stages - 1)
        self.export: list[Any] = []
        self.weights = ["start"]
        self.loaded: list[str] | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.splits: list[MicrobatchSplit | None] = []

    def placement(self) -> Placement:
        return self.place

    def train(
        self, batch: Batch, loss_name: str, loss_config: Any, norm: Any, split: MicrobatchSplit | None = None
    ) -> dict[str, float]:
        self.calls.append((batch, loss_name, loss_config, norm))
        self.splits.append(split)
        return {"loss": float(norm.global_valid_tokens), "lr": float(len(self.calls))}

    def evaluate(
        self, batch: Batch, loss_name: str, loss_config: Any, norm: Any, split: MicrobatchSplit | None = None
    ) -> dict[str, float]:
        return self.train(batch, loss_name, loss_config, norm, split)

    def get_topk_logits(
        self, batch: Batch, k: int, num_tokens: int, split: MicrobatchSplit | None = None
    ) -> tuple[np.ndarray[Any, Any], ...]:
        ids = batch["input_ids"][..., None].expand(-1, -1, k).numpy()
        return ids.astype(np.float32) * num_tokens, ids

    def get_logprobs(self, batch: Batch, split: MicrobatchSplit | None = None) -> np.ndarray[Any, Any] | None:
        if not self.place.is_source:
            return None
        assert set(batch) <= {"input_ids", "input_lengths", ROUTED_EXPERTS}
        replayed = int(batch[ROUTED_EXPERTS].sum()) if ROUTED_EXPERTS in batch else 0
        return -batch["input_ids"].float().numpy() - replayed

    def get_reference_policy_logprobs(
        self, batch: Batch, split: MicrobatchSplit | None = None
    ) -> np.ndarray[Any, Any] | None:
        logprobs = self.get_logprobs(batch, split)
        return None if logprobs is None else logprobs - 1

    def generate(
        self, prompts: list[list[int]], seed: int, end_ids: tuple[int, ...], sampling: Sampling
    ) -> Generator[Generated, None, list[Response]]:
        self.calls.append((prompts, seed))
        for number in range(len(prompts)):
            yield Generated(number, 10 * number)
        return [Response([*prompt, end_ids[0]], [0.0] * (len(prompt) + 1), True) for prompt in prompts]

    def start_weight_export(self) -> None:
        self.export = [f"bucket {number} after {len(self.calls)} steps" for number in range(3)]

    def next_weight_bucket(self) -> Any:
        bucket = self.export.pop(0) if self.export else None
        return SimpleNamespace(get=lambda: bucket) if bucket and self.rank == 0 else None

    def prepare_weight_update(self) -> None:
        self.loaded = []

    def load_weight_bucket(self, bucket: Any) -> None:
        assert self.loaded is not None
        self.loaded.append(bucket.get())

    def finish_weight_update(self) -> None:
        assert self.loaded is not None
        self.weights, self.loaded = self.loaded, []

    def offload_stats(self) -> OffloadStats | None:
        moved = 5 + self.rank
        return OffloadStats(bytes_out=moved, per_module={"core_attn": ModuleStats(bytes_out=moved, num_groups=1)})

    def take_notices(self) -> list[str]:
        return ["of all", f"of {self.rank}"]

    def paged_stash_stats(self) -> dict[str, Any] | None:
        factors = {"needed_capacity_factor": 1.0 + self.rank / 2, "needed_stash_factor": [None, 1.25][self.rank % 2]}
        sizes = {"device_bytes": 100 + self.rank, "host_bytes": self.rank, "peak_bytes": 9}
        return {"steps": 7, "reruns": 2, **factors, **sizes}

    def device_peaks(self) -> DevicePeaks:
        return DevicePeaks({"train": 100 + self.rank}, 120)

    def device(self) -> tuple[str, int]:
        return "a GPU", 1000 if self.rank else 0

    def make_room(self, num_bytes: int, keeps_weights: bool) -> bool:
        self.calls.append(("make_room", num_bytes, keeps_weights))
        return self.rank == 1 and num_bytes > 3

    def come_back(self, *, weights_alone: bool) -> None:
        self.calls.append(("come_back", weights_alone))

    def export_hf(self, folder: Path) -> None:
        self.calls.append(("export_hf",))

    def start_checkpoint(self, folder: Path, **how: bool) -> None:
        self.calls.append(("start_checkpoint",))

    def load_checkpoint(self, folder: Path, manifest: object) -> None:
        self.calls.append(("load_checkpoint",))

    def load_start_weights(self, folder: Path, manifest: object) -> None:
        self.calls.append(("load_start_weights",))

    def hand_back_memory(self) -> None:
        self.calls.append(("hand_back_memory",))

    def device_bytes(self) -> dict[str, int]:
        return {"weights": 40 + self.rank, "gradients": 30 - self.rank} if self.rank else {"gradients": 30}

    def host_bytes(self) -> dict[str, int]:
        return {"activations": 10 + self.rank, "reference_weights": 5}


SAMPLING = Sampling(4)


class FakeGroup:
    def __init__(self, cluster: Any, worker_cls: type, *args: Any, **kwargs: Any) -> None:
        cfg, self.world_size = args[0]["megatron_cfg"], cluster.world_size
        self.workers = [FakeWorker(rank, cluster.world_size, cfg) for rank in range(cluster.world_size)]

    def run_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(worker, method.__name__)(*args, **kwargs) for worker in self.workers]

    def run_sharded(self, method: Callable[..., Any], shards: list[tuple[Any, ...]]) -> list[Any]:
        pairs = zip(self.workers, shards, strict=True)
        return [getattr(worker, method.__name__)(*shard) for worker, shard in pairs]

    def run_streamed(self, method: Callable[..., Any], shards: Any, take: Callable[[int, Any], None]) -> list[Any]:
        return [result_of(stream, partial(take, rank)) for rank, stream in enumerate(self.run_sharded(method, shards))]


def result_of(stream: Any, take: Callable[[Any], None]) -> Any:
    while True:
        try:
            take(next(stream))
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="module")
def make() -> Any:
    """Build a policy over fake workers; returns it and them."""

    def make(world_size: int, *overrides: str, num_generators: int = 0) -> tuple[Policy, list[FakeWorker]]:
        changes = ["policy.train_global_batch_size=12", "policy.train_micro_batch_size=2", *overrides]
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", changes)["policy"]
        cluster: Any = SimpleNamespace(world_size=world_size)
        slots: Any = SimpleNamespace(world_size=num_generators) if num_generators else None
        arguments: Any = {"seed": 1, "num_steps": 1, "keep_reference": False, "generation_slots": slots}
        policy = Policy(cluster, config, Path("model"), (9,), **arguments)
        group: Any = policy._workers
        return policy, group.workers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "WorkerGroup", FakeGroup)
        yield make


Make = Callable[..., tuple[Policy, list[FakeWorker]]]


class Beside:
    """A generator that has the training workers' GPUs."""

    def __init__(self, lacking_bytes: int, calls: list[tuple[Any, ...]]) -> None:
        self.calls, self.has_weights, self._lacking_bytes = calls, True, lacking_bytes

    def lacking_bytes(self) -> list[int]:
        return [self._lacking_bytes] * 2

    def sleep(self) -> None:
        self.calls.append(("sleep",))
        self.has_weights = False

    def wake(self) -> None:
        """It takes memory for weights."""

    def update_weights(self, source: Any) -> None:
        self.has_weights = True

    def generate(self, *args: object) -> list[Response]:
        return []

    def stop(self) -> None:
        """Nothing is left."""


@pytest.mark.parametrize("lacking_bytes", [3, 4])
@pytest.mark.parametrize(
    "name",
    ["get_logprobs", "export_hf", "start_checkpoint", "load_checkpoint", "load_start_weights", "hand_back_memory"],
)
def test_what_training_needs_is_away_while_an_engine_generates_where_that_lacks_room(
    name: str, lacking_bytes: int, make: Make, tmp_path: Path
) -> None:
    """And the engine sleeps before it comes back."""
    policy, workers = make(2)
    calls, anything = workers[0].calls, cast("Any", policy)
    anything._generator = Beside(lacking_bytes, calls)
    arguments: dict[str, tuple[Any, ...]] = {
        "get_logprobs": (make_batch(12),),
        "export_hf": (tmp_path,),
        "hand_back_memory": (),
    }
    first, room = ("make_room", lacking_bytes, True), ("make_room", lacking_bytes, False)
    weights, all_of_it = ("come_back", True), ("come_back", False)
    is_away = lacking_bytes > 3
    policy.train(make_batch(12), "clipped_pg", {"ratio_clip_min": 0.1})
    for number in range(2):
        calls.clear()
        policy.generate([[1]], 3, SAMPLING)
        assert calls == ([first, weights, room] if is_away else [first, room])
        calls.clear()
        if name == "start_checkpoint":
            policy.start_checkpoint(tmp_path / str(number), in_background=False)
        else:
            getattr(policy, name)(*arguments.get(name, (tmp_path, {})))
        back = {"hand_back_memory": [], "get_logprobs": [weights]}.get(name, [all_of_it])
        own = [(name,)] if name != "get_logprobs" else []
        assert calls == [("sleep",), *(back if is_away else []), *own]
        policy.evaluate(make_batch(12), "clipped_pg", {"ratio_clip_min": 0.1})


def test_the_optimizer_is_away_while_log_probabilities_are_computed_where_that_is_asked_for(make: Make) -> None:
    policy, workers = make(2, "policy.offload_optimizer_for_logprob=true")
    calls = workers[0].calls
    for _ in range(2):
        calls.clear()
        policy.get_logprobs(make_batch(12))
        policy.get_reference_policy_logprobs(make_batch(12))
        policy.evaluate(make_batch(12), "clipped_pg", {"ratio_clip_min": 0.1})
        leaves, weights, all_of_it = ("make_room", sys.maxsize, True), ("come_back", True), ("come_back", False)
        assert calls[:5] == [leaves, weights, leaves, weights, all_of_it]


@pytest.mark.parametrize(("lacking_bytes", "leaves"), [(4, True), (0, False)], ids=["asleep", "apart"])
def test_an_optimizer_that_leaves_for_log_probabilities_is_away_while_an_engine_beside_it_generates(
    lacking_bytes: int, leaves: bool, make: Make
) -> None:
    """An engine on other devices takes nothing of these."""
    policy, workers = make(2, "policy.offload_optimizer_for_logprob=true")
    calls, anything = workers[0].calls, cast("Any", policy)
    anything._generator = Beside(lacking_bytes, calls)
    policy.train(make_batch(12), "clipped_pg", {"ratio_clip_min": 0.1})
    for _ in range(2):
        calls.clear()
        policy.generate([[1]], 3, SAMPLING)
        asked = [call for call in calls if call[0] == "make_room"]
        room = [("make_room", lacking_bytes, True), ("make_room", lacking_bytes, False)] if lacking_bytes else []
        assert asked == [*([("make_room", sys.maxsize, True)] if leaves else []), *room]
        policy.evaluate(make_batch(12), "clipped_pg", {"ratio_clip_min": 0.1})
        assert (("come_back", False) in calls) == leaves


def test_workers_know_the_path_of_a_configuration_of_quantization(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an evaluation too, which has no trainer."""
    monkeypatch.chdir(tmp_path)
    name = "examples/modelopt/quant_configs/nvfp4_a16.yaml"
    policy, _ = make(2)
    config: Any = {**policy._config, "quant_cfg": name}
    arguments: Any = {"seed": 1, "num_steps": None, "keep_reference": False}
    workers = ranks_module.ModelWorkers(cast("Any", SimpleNamespace(world_size=2)), config, tmp_path, **arguments)
    assert workers._config["quant_cfg"] == str(PROJECT_ROOT / name)


def test_room_for_a_share_is_asked_of_devices_that_have_memory(make: Make) -> None:
    policy, workers = make(2)
    policy._trainers.make_room_for_share(0.25)
    assert [worker.calls for worker in workers] == [[("make_room", 0, False)], [("make_room", 250 + (1 << 30), False)]]
    assert policy._trainers.are_away


def make_batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(2, 8, (size,), generator=generator)
    return {
        "input_ids": torch.randint(1, 100, (size, 7), generator=generator),
        "input_lengths": lengths,
        "token_mask": (torch.arange(7) < lengths[:, None]).float(),
        "sample_mask": torch.ones(size),
    }


@pytest.mark.parametrize(("num_trainers", "num_generators"), [(4, 8), (8, 4)])
def test_generators_take_the_weights_over_after_each_change(num_trainers: int, num_generators: int, make: Any) -> None:
    sizes = [f"policy.megatron_cfg.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline")]
    policy, trainers = make(num_trainers, *sizes, num_generators=num_generators)
    generators = policy._generator._own_workers.workers.workers
    prompts = [[number] for number in range(5)]

    def generated() -> list[int]:
        assert [response.tokens for response in policy.generate(prompts, 3, SAMPLING)] == [
            [*prompt, 9] for prompt in prompts
        ]
        return [len(worker.calls) for worker in trainers]

    assert generated() == [0] * num_trainers, "the trainers do not generate"
    assert all(worker.weights == ["start"] for worker in generators)
    policy.train(make_batch(12), "clipped_pg", {"ratio_clip_min": 0.1})
    assert all(worker.weights == ["start"] for worker in generators), "not before they are needed"
    generated()
    for worker in generators:
        assert worker.weights == [f"bucket {number} after 1 steps" for number in range(3)]
        worker.weights = ["kept"]
    generated()
    assert all(worker.weights == ["kept"] for worker in generators), "not again without a step"


def test_generators_take_quantized_weights_before_they_answer(make: Any) -> None:
    """An engine begins with those of the folder, which are others."""
    cfg = ("policy.quant_cfg=W4A16_NVFP4_CFG", "policy.precision=bfloat16")
    policy, _ = make(1, *cfg, num_generators=1)
    (generator,) = policy._generator._own_workers.workers.workers
    for _ in range(2):
        policy.generate([[1]], 3, SAMPLING)
        assert generator.weights == [f"bucket {number} after 0 steps" for number in range(3)]
        assert policy.num_refits == 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_train_takes_a_step_for_each_global_batch(world_size: int, make: Make) -> None:
    policy, workers = make(world_size)
    batch, loss_config = make_batch(36), {"ratio_clip_min": 0.1}
    metrics = policy.train(batch, "clipped_pg", loss_config)
    steps = [{key: value[start : start + 12] for key, value in batch.items()} for start in (0, 12, 24)]
    counts = [float(valid_tokens(step).sum()) for step in steps]
    assert metrics == {"loss": pytest.approx(sum(count**2 for count in counts) / sum(counts)), "lr": 2.0}
    for index, step in enumerate(steps):
        shards = [worker.calls[index] for worker in workers]
        assert all(torch.equal(torch.cat([shard[0][key] for shard in shards]), step[key]) for key in step)
        assert all(num_samples(shard[0]) == 12 // world_size for shard in shards)
        assert all(shard[1:] == ("clipped_pg", loss_config, normalizers(step)) for shard in shards)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pairs_stay_together(world_size: int, make: Make) -> None:
    """A pair of rows is one sample of the global batch, and never cut."""
    policy, workers = make(world_size)
    batch = make_batch(48)
    policy.train(batch, "dpo", {})
    assert [len(worker.calls) for worker in workers] == [2] * world_size
    for step in (0, 1):
        pieces = [worker.calls[step][0]["input_ids"] for worker in workers]
        assert torch.equal(torch.cat(pieces), batch["input_ids"][24 * step : 24 * step + 24])
        assert all(len(piece) % 2 == 0 for piece in pieces)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_the_whole_batch(world_size: int, make: Make) -> None:
    policy, workers = make(world_size)
    batch = make_batch(10)
    assert policy.evaluate(batch, "dpo", {})["loss"] == float(valid_tokens(batch).sum())
    pieces = [worker.calls[0][0] for worker in workers]
    assert all(num_samples(piece) % 2 == 0 for piece in pieces)
    counted = torch.cat([piece["input_ids"][piece["sample_mask"] == 1] for piece in pieces])
    assert torch.equal(counted, batch["input_ids"])


@settings(deadline=None, max_examples=20)
@given(size=st.integers(1, 9), world_size=st.sampled_from([1, 2, 3, 6]))
def test_topk_logits_come_back_in_order(size: int, world_size: int, make: Make) -> None:
    policy, _ = make(world_size)
    batch = make_batch(size)
    values, ids = policy.get_topk_logits(batch, 3, 5)
    assert torch.equal(ids, batch["input_ids"][..., None].expand(-1, -1, 3))
    assert torch.equal(values, ids.float() * 5)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 9), world_size=st.sampled_from([1, 2, 3, 6]))
def test_logprobs_come_back_in_order(size: int, world_size: int, make: Make) -> None:
    policy, _ = make(world_size)
    batch = make_batch(size)
    assert torch.equal(policy.get_logprobs(batch), -batch["input_ids"].float())
    assert torch.equal(policy.get_reference_policy_logprobs(batch), -batch["input_ids"].float() - 1)


BY_TOKENS = {
    name: [
        f"policy.{name}.{setting}"
        for setting in ("enabled=true", "train_mb_tokens=16", "logprob_mb_tokens=24", "sequence_length_round=1")
    ]
    for name in ("dynamic_batching", "sequence_packing")
}


def test_the_policy_replays_generations_experts_and_its_reference_does_not(make: Make) -> None:
    policy, _ = make(1)
    batch = {"input_ids": torch.arange(6).view(2, 3), "input_lengths": torch.tensor([3, 3])}
    without = policy.get_logprobs(batch), policy.get_reference_policy_logprobs(batch)
    batch |= {ROUTED_EXPERTS: torch.ones(2, 3, 2, 2, dtype=torch.int8)}
    assert torch.equal(policy.get_logprobs(batch), without[0] - 24)
    assert torch.equal(policy.get_reference_policy_logprobs(batch), without[1])


@pytest.mark.parametrize("name", BY_TOKENS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_microbatches_by_tokens(name: str, world_size: int, make: Make) -> None:
    """Results come back in order; ranks get as many microbatches; any global batch will do, and pairs stay together."""
    policy, workers = make(world_size, *BY_TOKENS[name], "policy.train_global_batch_size=7")
    batch = make_batch(14)
    assert torch.equal(policy.get_logprobs(batch), -batch["input_ids"].float())
    assert torch.equal(policy.get_topk_logits(batch, 3, 5)[1], batch["input_ids"][..., None].expand(-1, -1, 3))
    policy.train(batch, "dpo", {})
    assert all(len(worker.calls) == 1 for worker in workers)
    splits = [worker.splits[0] for worker in workers]
    assert len({len(split.sizes) for split in splits if split is not None}) == 1
    assert [split is not None and split.is_packed for split in splits] == [name == "sequence_packing"] * world_size
    pieces = [worker.calls[0][0] for worker in workers]
    counted = torch.cat([piece["input_ids"][piece["sample_mask"] == 1] for piece in pieces])
    pairs = {tuple(map(tuple, pair)) for pair in counted.view(7, 2, -1).tolist()}
    assert pairs == {tuple(map(tuple, pair)) for pair in batch["input_ids"].view(7, 2, -1).tolist()}


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 9), world_size=st.sampled_from([1, 2, 3, 6]), seed=st.integers(0, 5))
def test_generation_comes_back_in_order(size: int, world_size: int, seed: int, make: Make) -> None:
    policy, workers = make(world_size)
    prompts = [[index] * (index + 1) for index in range(size)]
    responses = policy.generate(prompts, seed, SAMPLING)
    assert [response.tokens for response in responses] == [[*prompt, 9] for prompt in prompts]
    policy.generate(prompts, seed + 1, SAMPLING)
    seeds = [call[1] for worker in workers for call in worker.calls]
    assert len(set(seeds)) == 2 * world_size


@pytest.mark.parametrize(("override", "num_sources"), [(None, 4), ("tensor", 2), ("pipeline", 2), ("expert", 2)])
def test_the_progress_of_each_shard_counts_once(override: str | None, num_sources: int, make: Make) -> None:
    settings = [f"policy.megatron_cfg.{override}_model_parallel_size=2"] if override else []
    policy, _ = make(4, *settings, "policy.train_micro_batch_size=1")
    told: list[Generated] = []
    policy.generate([[1]] * 12, 3, SAMPLING, told.append)
    done = [each.num_responses for each in told]
    assert done == sorted(done)
    assert done[-1] == 12 - num_sources, "all but the last of each shard, of which the result tells"
    assert [each.num_tokens for each in told] == [10 * number for number in done]


TP, PP, EP = (f"policy.megatron_cfg.{name}_model_parallel_size=2" for name in ("tensor", "pipeline", "expert"))
ETP = "policy.megatron_cfg.expert_tensor_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "num_shards", "num_samplers"),
    [
        *(((TP,), 2, 2), ((PP,), 2, 2), ((TP, PP), 1, 1), ((EP,), 4, 2), ((ETP,), 4, 2), ((EP, ETP), 4, 1)),
        *(((TP, ETP), 2, 2), ((TP, EP, ETP), 2, 1), ((PP, ETP), 2, 1)),
    ],
)
def test_ranks_of_one_shard_get_the_same_and_one_of_them_answers(
    overrides: tuple[str, ...], num_shards: int, num_samplers: int, make: Make
) -> None:
    overrides = (*overrides, "policy.train_micro_batch_size=1")
    policy, workers = make(4, *overrides)
    batch = make_batch(12)
    assert torch.equal(policy.get_logprobs(batch), -batch["input_ids"].float())
    policy.train(batch, "nll", {})
    for worker in workers:
        shard_size = 12 // num_shards
        first = worker.place.data_parallel_rank * shard_size
        assert torch.equal(worker.calls[0][0]["input_ids"], batch["input_ids"][first : first + shard_size])
    prompts = [[index] * 2 for index in range(5)]
    assert [response.tokens for response in policy.generate(prompts, 3, SAMPLING)] == [
        [*prompt, 9] for prompt in prompts
    ]
    # Ranks that hold each other's experts, or parts of them, sample the same prompts with the same seed.
    samples = [str(worker.calls[1]) for worker in workers]
    assert len(set(samples)) == num_samplers


def test_shards_that_share_experts_by_way_of_others_sample_together(make: Make) -> None:
    """Three ranks have a model's experts, two each layer: no two groups of either kind are apart from the others."""
    three = EP.replace("=2", "=3")
    policy, workers = make(6, TP, three)
    policy.generate([[1], [2], [3]], 3, SAMPLING)
    assert len({str(worker.calls[0]) for worker in workers}) == 1


@pytest.mark.parametrize(
    ("world_size", "overrides", "words"),
    [
        (3, (TP,), r"does not divide 3 worker\(s\)"),
        (2, (TP, PP), "x context_parallel_size = 2 x 2 x 1 = 4 does not divide"),
        (3, ("policy.megatron_cfg.context_parallel_size=2",), r"does not divide 3 worker\(s\)"),
        (3, (EP,), "expert_model_parallel_size: 2 does not divide the 3 worker"),
        (3, (ETP,), "1 x expert_tensor_parallel_size 2 = 2 does not divide the 3 worker"),
        (
            2,
            (PP, "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2", "policy.train_micro_batch_size=4"),
            "a step's 3 microbatches must be a multiple of the 2 pipeline ranks",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_cluster(
    world_size: int, overrides: tuple[str, ...], words: str, make: Make
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(world_size, *overrides)


@pytest.mark.parametrize(("world_size", "micro"), [(5, 2), (2, 4), (1, 5)])
def test_a_global_batch_that_cannot_be_cut(world_size: int, micro: int, make: Make) -> None:
    with pytest.raises(ConfigError, match=f"12 is not a multiple .* = {micro} x {world_size} = {micro * world_size}"):
        make(world_size, f"policy.train_micro_batch_size={micro}")


def test_offload_stats_of_all_ranks(make: Make) -> None:
    policy, _ = make(2, "policy.megatron_cfg.offload_modules=[core_attn,mlp_norm]")
    stats = policy.offload_stats()
    assert (stats["engine"], stats["bytes_out"]) == ("native", 11)
    assert stats["per_module"]["core_attn"]["bytes_out"] == 11
    (line,) = policy.idle_modules()
    assert "nothing is offloaded of mlp_norm: " in line


def test_offload_stats_without_offloading(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = make(2, "policy.megatron_cfg.fine_grained_activation_offloading=false")
    monkeypatch.setattr(FakeWorker, "offload_stats", lambda self: None)
    stats = policy.offload_stats()
    assert (stats["engine"], stats["modules"], stats["per_module"], stats["bytes_out"]) == (None, [], {}, 0)


@pytest.mark.parametrize(
    ("world_size", "expected"), [(1, ["of all", "of 0"]), (2, ["of all (rank 0, 1)", "of 0 (rank 0)", "of 1 (rank 1)"])]
)
def test_notices_name_their_ranks(world_size: int, expected: list[str], make: Make) -> None:
    assert make(world_size)[0].notices() == expected


@pytest.mark.parametrize(
    ("peaks", "expected", "reserved", "by_phase"),
    [
        (
            (DevicePeaks({"train": 3, "logprobs": 2}, 9), DevicePeaks({"train": 1, "logprobs": 8}, 8)),
            *(8, 9, {"train": 3, "logprobs": 8}),
        ),
        (2 * (DevicePeaks({}, None),), None, None, {}),
    ],
)
def test_memory_of_all_ranks(
    peaks: tuple[DevicePeaks, ...],
    expected: int | None,
    reserved: int | None,
    by_phase: dict[str, int],
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, _ = make(2)
    monkeypatch.setattr(FakeWorker, "device_peaks", lambda self: peaks[self.rank])
    assert policy.memory() == {
        "peak_device_bytes": expected,
        "peak_reserved_bytes": reserved,
        "peak_device_bytes_by_phase": by_phase,
        "device_bytes": {"gradients": 29, "weights": 41},
        "host_bytes": {"activations": 21, "reference_weights": 10},
    }


def test_paged_stash_stats_of_all_ranks(make: Make) -> None:
    policy, _ = make(2)
    assert policy.paged_stash_stats() == {
        "steps": 7,
        "reruns": 2,
        "needed_capacity_factor": 1.5,
        "needed_stash_factor": 1.25,
        "device_bytes": 201,
        "host_bytes": 1,
        "peak_bytes": 18,
    }


def test_paged_stash_stats_without_limits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = make(2)
    monkeypatch.setattr(FakeWorker, "paged_stash_stats", lambda self: None)
    assert policy.paged_stash_stats() is None


@pytest.mark.slow
def test_a_driver_imports_what_it_needs_alone() -> None:
    """Megatron takes seconds, and says what it misses; workers import it. reasoning-gym is for its own problems."""
    code = (
        "import sys, nemo_rl_offload.algorithms.grpo, nemo_rl_offload.generation.vllm.worker\n"
        "heavy = {'megatron', 'reasoning_gym', 'transformer_engine', 'vllm'}\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
