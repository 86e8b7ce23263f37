"""Log-probabilities and metrics of the shipped model: exact, and the same however the batch is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.model import MegatronModel, build_model
from nemo_rl_offload.megatron.train_step import compute_logprobs, token_logprobs, train_step

pytestmark = pytest.mark.usefixtures("process_group")

MODEL: Path = PROJECT_ROOT / "examples/models/tiny_speller"
NUM_SAMPLES, WIDTH = 5, 14


@pytest.fixture
def build(process_group: None, make_policy: Callable[..., Any]) -> Callable[[], MegatronModel]:
    policy = make_policy(
        "scheduler.lr_warmup_iters=0",
        "optimizer.lr=0.25",
        "optimizer.optimizer=sgd",
        "fine_grained_activation_offloading=false",
    )
    return lambda: build_model(policy, MODEL, num_steps=4)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([14, 3, 9, 6, 11])
    token_mask = (torch.arange(WIDTH) < lengths[:, None]) & (torch.rand(NUM_SAMPLES, WIDTH, generator=generator) < 0.7)
    return {
        "input_ids": torch.randint(0, 259, (NUM_SAMPLES, WIDTH), generator=generator),
        "input_lengths": lengths,
        "token_mask": token_mask.long(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
    }


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_token_logprobs_are_a_log_softmax_gathered(temperature: float) -> None:
    logits = torch.randn(3, 6, 11) * 5
    ids = torch.randint(0, 11, (3, 6))
    expected = torch.zeros(3, 6)
    distribution = (logits / temperature).log_softmax(-1)
    for row in range(3):
        for position in range(1, 6):
            expected[row, position] = distribution[row, position - 1, ids[row, position]]
    logprobs = token_logprobs(logits.clone(), ids, temperature)
    torch.testing.assert_close(logprobs, expected)
    assert torch.equal(logprobs[:, 0], torch.zeros(3))
    assert token_logprobs(logits.bfloat16(), ids, temperature).dtype == torch.float32


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
def test_compute_logprobs_equals_one_plain_forward(micro_batch_size: int, build: Callable[[], MegatronModel]) -> None:
    model, batch = build(), make_batch()
    logprobs = compute_logprobs(model, batch, micro_batch_size, 0.7)
    module = model.modules[0].eval()
    assert logprobs.shape == (NUM_SAMPLES, WIDTH)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            logits = module(ids, torch.arange(length)[None], None)
        expected = (logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        torch.testing.assert_close(logprobs[row, 1:length], expected, rtol=1e-5, atol=1e-5)


def test_metrics_and_gradients_do_not_depend_on_the_microbatches(build: Callable[[], MegatronModel]) -> None:
    batch = make_batch()
    metrics, weights = [], []
    for micro_batch_size in (1, 2, 3, 5):
        model = build()
        metrics.append(train_step(model, batch, build_loss("nll", {}), normalizers(batch), micro_batch_size, 0.7))
        weights.append([parameter.detach().clone() for parameter in model.modules[0].parameters()])
    for other, other_weights in zip(metrics[1:], weights[1:], strict=True):
        assert other == pytest.approx(metrics[0], rel=1e-5)
        torch.testing.assert_close(other_weights, weights[0], rtol=1e-5, atol=1e-6)


def test_a_step_is_that_of_plain_torch(build: Callable[[], MegatronModel]) -> None:
    batch, model = make_batch(), build()
    reference = build().modules[0]
    logprobs = torch.cat(
        [
            token_logprobs(reference(ids, torch.arange(WIDTH)[None], None), ids, 0.7)
            for ids in batch["input_ids"].split(1)
        ]
    )
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    mask[:, 0] = 0
    loss = -(logprobs * mask).sum() / mask.sum()
    loss.backward()
    parameters = dict(reference.named_parameters())
    gradients = {name: parameter.main_grad for name, parameter in parameters.items()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    metrics = train_step(model, batch, build_loss("nll", {}), normalizers(batch), 2, 0.7)
    assert metrics == pytest.approx({"loss": loss.item(), "grad_norm": norm.item(), "lr": 0.25}, rel=1e-5)
    clip = min(1.0, 1.0 / norm.item())
    for name, parameter in model.modules[0].named_parameters():
        expected = parameters[name].detach() - 0.25 * clip * gradients[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


def test_masked_samples_and_padding_change_nothing(build: Callable[[], MegatronModel]) -> None:
    batch = make_batch()
    changed = {key: value.clone() for key, value in batch.items()}
    changed["input_ids"][2] = 7
    changed["input_ids"][1, 3:] = 9
    results = []
    for each in (batch, changed):
        results.append(train_step(build(), each, build_loss("nll", {}), normalizers(each), 2, 1.0))
    assert results[0] == pytest.approx(results[1], rel=1e-6)
