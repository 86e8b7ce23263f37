"""Two data-parallel workers compute what one computes: losses, gradients, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cpu_processes import cpu_cluster
from ranks import relative_error

from nemo_rl_offload.batching.batch import Batch, shard
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.cluster.worker_group import WorkerGroup
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.policy.worker import PolicyWorker

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays = dict[str, "NDArray[np.float32]"]
NUM_STEPS = 3
DDP = "distributed_data_parallel_config"
TOLERANCE = 1e-5
pytestmark = pytest.mark.slow
EXEMPLAR = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"


class OpenWorker(PolicyWorker):
    """Shows its weights and gradients, and starts anew with another configuration."""

    def rebuild(self, policy: Any) -> None:
        from nemo_rl_offload.megatron.build.model import build_model

        self._policy = policy
        self._model = build_model(policy, self._model_path, num_steps=NUM_STEPS)

    def gradients(self) -> Arrays:
        """Of the last step; with the distributed optimizer, put together from what each rank holds."""
        import torch.distributed as dist

        if self._policy["megatron_cfg"]["optimizer"]["use_distributed_optimizer"]:
            for bucket in (b for chunk in self._model.chunks for buffer in chunk.buffers for b in buffer.buckets):
                shards = list(bucket.grad_data.chunk(dist.get_world_size()))
                parts = [torch.empty_like(part) for part in shards]
                dist.all_gather(parts, shards[dist.get_rank()].clone())
                bucket.grad_data.copy_(torch.cat(parts))
        return {name: weight.main_grad.numpy().copy() for name, weight in self._named_parameters()}

    def weights(self) -> Arrays:
        return {name: weight.detach().numpy().copy() for name, weight in self._named_parameters()}

    def _named_parameters(self) -> list[tuple[str, Any]]:
        return [named for module in self._whole_model().modules for named in module.named_parameters()]


def make_policy(*overrides: str) -> Any:
    fixed = (
        "policy.train_micro_batch_size=2",
        "policy.logprob_batch_size=2",
        "policy.megatron_cfg.fine_grained_activation_offloading=false",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        "policy.megatron_cfg.optimizer.clip_grad=0",
    )
    changes = [f"policy.megatron_cfg.{text if text.startswith(DDP) else f'optimizer.{text}'}" for text in overrides]
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*fixed, *changes])["policy"]


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[Group, Group]]:
    """One worker, and two."""
    model = PROJECT_ROOT / "examples/models/tiny_speller"
    with cpu_cluster(1) as single, VirtualCluster(1, 2) as double:
        arguments = {"seed": 1, "num_steps": NUM_STEPS, "keep_reference": False}
        groups = [WorkerGroup(cluster, OpenWorker, make_policy(), model, **arguments) for cluster in (single, double)]
        yield groups[0], groups[1]


def recorded_batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    width = 14
    lengths = torch.randint(5, width + 1, (size,), generator=generator)
    positions = torch.arange(width)
    mask = (positions >= 3) & (positions < lengths[:, None])
    return {
        "input_ids": torch.randint(3, 250, (size, width), generator=generator) * (positions < lengths[:, None]),
        "input_lengths": lengths,
        "token_mask": mask.float(),
        "sample_mask": torch.ones(size),
        "advantages": torch.randn(size, 1, generator=generator) * mask,
    }


Group = WorkerGroup[OpenWorker]


def run_sharded(group: Group, method: Callable[..., Any], batch: Batch, *rest: Any) -> list[Any]:
    return group.run_sharded(method, [(piece, *rest) for piece in shard(batch, group.world_size)])


def three_steps(group: Group, policy: Any, batch: Batch, loss: dict[str, Any]) -> tuple[Any, ...]:
    """Return the steps' metrics, the first gradients, and the weights before and after."""
    group.run_all(OpenWorker.rebuild, policy)
    before = group.run_all(OpenWorker.weights)[0]
    metrics, gradients = [], []
    for _ in range(NUM_STEPS):
        metrics.append(run_sharded(group, OpenWorker.train, batch, "clipped_pg", loss, normalizers(batch))[0])
        gradients.append(group.run_all(OpenWorker.gradients))
    for rank_weights in (weights := group.run_all(OpenWorker.weights)):
        assert all(np.array_equal(rank_weights[name], weights[0][name]) for name in weights[0])
    return metrics, gradients[0][0], before, weights[0]


@pytest.mark.sampled
@pytest.mark.parametrize("size", [8, 6, 5], ids=["whole", "short-last-microbatch", "odd"])
@pytest.mark.parametrize(
    "optimizer",
    [
        ("use_distributed_optimizer=false", "optimizer=sgd", "lr=0.005", "sgd_momentum=0.5"),
        # Megatron's distributed optimizer takes Adam only. A large epsilon keeps it from dividing noise by noise.
        ("use_distributed_optimizer=true", "optimizer=adam", "lr=0.01", "adam_eps=0.01"),
    ],
    ids=["sgd", "distributed-adam"],
)
def test_two_workers_compute_what_one_does(groups: tuple[Group, Group], optimizer: tuple[str, ...], size: int) -> None:
    policy, batch = make_policy(*optimizer), recorded_batch(size)
    groups[0].run_all(OpenWorker.rebuild, policy)
    logprobs = torch.tensor(run_sharded(groups[0], OpenWorker.get_logprobs, batch)[0])
    noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    batch["prev_logprobs"] = logprobs + 0.2 * noise
    loss = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["loss_fn"] | {
        "entropy_coeff": 0.01,
        "token_level_loss": size != 6,
    }
    one, two = (three_steps(group, policy, batch, loss) for group in groups)

    for expected, metrics in zip(one[0], two[0], strict=True):
        # Terms of a policy gradient's loss, of about 1, cancel to some thousandths.
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)
    assert relative_error(two[1], one[1]) < TOLERANCE
    assert relative_error(two[3], one[3]) < TOLERANCE
    assert relative_error(one[2], one[3]) > 100 * TOLERANCE, "the weights moved"


def test_weights_whose_gather_is_put_off_are_whole_before_they_are_used(
    groups: tuple[Group, Group],
) -> None:
    """`overlap_param_gather` leaves each rank its own part of a step until the next forward; others read before."""
    batch = recorded_batch(8)
    loss = load_config(EXEMPLAR)["loss_fn"]
    outcomes = []
    for overlap in ("false", "true"):
        ddp = [f"{DDP}.{key}={overlap}" for key in ("overlap_param_gather", "overlap_grad_reduce")]
        policy = make_policy("use_distributed_optimizer=true", "optimizer=adam", "lr=0.01", *ddp)
        groups[1].run_all(OpenWorker.rebuild, policy)
        batch["prev_logprobs"] = torch.zeros(8, 14)
        run_sharded(groups[1], OpenWorker.train, batch, "clipped_pg", loss, normalizers(batch))
        weights = groups[1].run_all(OpenWorker.weights)
        outcomes.append((run_sharded(groups[1], OpenWorker.get_logprobs, batch), weights))
    for expected, found in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert np.array_equal(expected, found)
    for expected, found in zip(outcomes[0][1], outcomes[1][1], strict=True):
        assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_logprobs_do_not_depend_on_the_number_of_workers(groups: tuple[Group, Group]) -> None:
    for group in groups:
        group.run_all(OpenWorker.rebuild, make_policy())
    batch = recorded_batch(7)
    one, two = (np.concatenate(run_sharded(group, OpenWorker.get_logprobs, batch))[:7] for group in groups)
    real = np.arange(batch["input_ids"].shape[1]) < batch["input_lengths"].numpy()[:, None]
    assert one[real] == pytest.approx(two[real], abs=1e-5)
    assert (one[real][:, None] != 0).mean() > 0.8
