"""Random batches, and what is checked of every loss: finite differences, and invariance to cuts of the batch."""

import torch
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch, microbatches, shard
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import Loss

NUM_TOKENS = 7
NUM_TOPK = 3


def random_batch(seed: int, num_samples: int = 6, width: int = 6) -> Batch:
    """A float64 batch with random masks, lengths and logits; the last column is always padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_samples, width, *shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width, (num_samples,), generator=generator)
    inside = torch.arange(width) < lengths[:, None]
    teacher_logits, teacher_indices = normal(NUM_TOKENS).topk(NUM_TOPK, dim=-1)
    batch = {
        "input_ids": torch.randint(0, NUM_TOKENS, (num_samples, width), generator=generator),
        "input_lengths": lengths,
        "logits": normal(NUM_TOKENS),
        "advantages": normal(),
        "token_mask": inside & (torch.rand(num_samples, width, generator=generator) < 0.8),
        "sample_mask": (torch.rand(num_samples, generator=generator) < 0.8).float(),
        "teacher_topk_logits": teacher_logits,
        "teacher_topk_indices": teacher_indices,
    }
    logprobs = scores(batch["logits"], batch)[0]
    noise = {"prev": 0.3, "reference_policy": 0.5, "generation": 0.4}
    return batch | {f"{name}_logprobs": logprobs + scale * normal() for name, scale in noise.items()}


def scores(logits: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
    """Return the log-probabilities of the batch's tokens, and the batch with what else comes from the logits."""
    logprobs = logits.log_softmax(dim=-1)
    own = {
        "entropy": -(logprobs.exp() * logprobs).sum(dim=-1),
        "topk_logprobs": logprobs.gather(-1, batch["teacher_topk_indices"]),
    }
    return logprobs.gather(-1, batch["input_ids"][..., None]).squeeze(-1), batch | own


def evaluate(loss_fn: Loss, batch: Batch) -> tuple[float, dict[str, float]]:
    """The loss of a whole batch, and its metrics."""
    logprobs, scored = scores(batch["logits"], batch)
    loss, metrics = loss_fn(logprobs, scored, normalizers(batch))
    return loss.item(), {name: metric.item() for name, metric in metrics.items()}


def counted(batch: Batch) -> list[list[int]]:
    """For each valid sample, its token positions that count."""
    num_samples, width = batch["token_mask"].shape
    return [
        [t for t in range(1, width) if batch["token_mask"][i, t]] if batch["sample_mask"][i] else []
        for i in range(num_samples)
    ]


def average(values: dict[tuple[int, int], float], batch: Batch, token_level: bool) -> float:
    """The mean of a value per token over tokens, or over sequences of their means."""
    positions = counted(batch)
    if token_level:
        return sum(values.values()) / max(1, sum(map(len, positions)))
    means = [sum(values[i, t] for t in row) / len(row) for i, row in enumerate(positions) if row]
    return sum(means) / max(1, int(batch["sample_mask"].sum()))


def check_finite_differences(loss_fn: Loss, batch: Batch) -> None:
    norm = normalizers(batch)

    def loss(logits: Tensor) -> Tensor:
        logprobs, scored = scores(logits, batch)
        return loss_fn(logprobs, scored, norm)[0]

    assert torch.autograd.gradcheck(loss, (batch["logits"].clone().requires_grad_(),))


def check_invariance(loss_fn: Loss, batch: Batch, num_shards: int, num_samples_per_microbatch: int) -> None:
    """Gradients and metrics do not depend on how the batch is cut into shards and microbatches."""
    batch = batch | {"row": torch.arange(len(batch["input_ids"]))}
    rows = loss_fn.rows_per_sample
    parts = shard(batch, num_shards, rows)
    pieces = [piece for part in parts for piece in microbatches(part, num_samples_per_microbatch * rows)]
    gradient, totals = _gradient_and_metrics(loss_fn, pieces, batch)
    expected_gradient, expected_totals = _gradient_and_metrics(loss_fn, [batch], batch)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-13)
    assert totals.keys() == expected_totals.keys()
    for name, value in expected_totals.items():
        assert abs(totals[name] - value) <= 1e-9 * abs(value) + 1e-12, name


def _gradient_and_metrics(loss_fn: Loss, pieces: list[Batch], whole: Batch) -> tuple[Tensor, dict[str, float]]:
    norm = normalizers(whole)
    gradients, totals = torch.zeros_like(whole["logits"]), dict[str, float]()
    for piece in pieces:
        logits = piece["logits"].clone().requires_grad_()
        logprobs, scored = scores(logits, piece)
        loss, metrics = loss_fn(logprobs, scored, norm)
        (gradient_BSV,) = torch.autograd.grad(loss, logits)
        for row, gradient in zip(piece["row"], gradient_BSV, strict=True):
            gradients[row, : len(gradient)] += gradient
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0.0) + value.item()
    return gradients, totals
