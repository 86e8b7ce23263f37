"""The output head: log-probabilities, entropy and top-k of logits, and another head in its place."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from step_batches import NUM_SAMPLES, WIDTH, head_of, make_batch

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.step.head import (
    LogitsHead,
    LogitsHeadFactory,
    OutputHead,
    gather_logprobs,
    token_entropy,
    topk_logits,
)
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs, compute_topk_logits
from nemo_rl_offload.megatron.step.microbatches import Microbatch
from nemo_rl_offload.megatron.step.train_step import train_step

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_token_logprobs_are_a_log_softmax_gathered(temperature: float) -> None:
    logits = torch.randn(3, 6, 11) * 5
    ids = torch.randint(0, 11, (3, 6))
    expected = torch.zeros(3, 6)
    distribution = (logits / temperature).log_softmax(-1)
    for row in range(3):
        for position in range(1, 6):
            expected[row, position] = distribution[row, position - 1, ids[row, position]]
    logprobs = head_of(logits.clone(), ids, temperature).predict(ids).logprobs
    torch.testing.assert_close(logprobs, expected)
    assert torch.equal(logprobs[:, 0], torch.zeros(3))
    assert head_of(logits.bfloat16(), ids, temperature).predict(ids).logprobs.dtype == torch.float32


def test_entropy_and_chosen_logprobs_are_those_of_a_softmax() -> None:
    logits = (torch.randn(2, 3, 11, dtype=torch.float64) * 5).requires_grad_()
    ids = torch.randint(0, 11, (2, 3, 4))
    logprobs = logits.log_softmax(-1)
    expected_entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(token_entropy(logits), expected_entropy)
    torch.testing.assert_close(gather_logprobs(logits, ids), logprobs.gather(-1, ids))
    weights = torch.rand(2, 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * token_entropy(logits)).sum(), logits)
    (expected,) = torch.autograd.grad((weights * expected_entropy).sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    (gradient,) = torch.autograd.grad((weights[..., None] * gather_logprobs(logits, ids)).sum(), logits)
    (expected,) = torch.autograd.grad((weights[..., None] * logprobs.gather(-1, ids)).sum(), logits)
    torch.testing.assert_close(gradient, expected)


def test_topk_leaves_the_padding_of_the_vocabulary_out() -> None:
    logits = torch.randn(2, 3, 11)
    values, ids = topk_logits(logits, 4, num_tokens=9)
    expected = logits[..., :9].topk(4, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)
    assert topk_logits(logits, 50, num_tokens=11)[0].shape == (2, 3, 11)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chunk_size", [4, 1, 100])
def test_chunks_of_the_sequence_change_nothing(chunk_size: int, build: Callable[[], MegatronModel]) -> None:
    """Log-probabilities, entropy and top-k, and a step on them."""
    batch = make_batch() | {name: torch.randn(NUM_SAMPLES, WIDTH) for name in ("prev_logprobs", "advantages")}
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["loss_fn"] | {"entropy_coeff": 0.1}
    loss, norm = build_loss("clipped_pg", config), normalizers(batch)
    models = [build(), build()]
    whole, chunked = (
        train_step(m, batch, loss, norm, 2, LogitsHeadFactory(0.7, size))
        for m, size in zip(models, (None, chunk_size), strict=True)
    )
    assert chunked == pytest.approx(whole, rel=1e-5)
    for weight, expected in zip(models[1].modules[0].parameters(), models[0].modules[0].parameters(), strict=True):
        torch.testing.assert_close(weight.main_grad, expected.main_grad, rtol=1e-5, atol=1e-7)
    logits, ids = compute_topk_logits(models[0], batch, 2, LogitsHeadFactory(0.7, chunk_size), 5, 264)
    torch.testing.assert_close((logits, ids), compute_topk_logits(models[0], batch, 2, LogitsHeadFactory(0.7), 5, 264))


def test_chunks_are_not_kept_for_the_backward_pass() -> None:
    logits, ids = torch.randn(2, 9, 50, requires_grad=True), torch.randint(0, 50, (2, 9))

    def num_saved(chunk_size: int | None) -> int:
        """Elements saved beside the logits themselves."""
        saved: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
            saved.append(tensor.numel() * own)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            head_of(logits, ids, 0.7, chunk_size).predict(ids)
        return sum(saved)

    assert num_saved(None) >= 2 * 8 * 50
    assert num_saved(2) < 50


class HiddenStatesFactory:
    """Heads that get hidden states and the output weight, and make the logits themselves."""

    forward_kwargs: Mapping[str, object] = {
        "output_processor": lambda *, hidden_states, output_layer, output_weight, **_: (
            hidden_states,
            output_layer.weight if output_weight is None else output_weight,
        )
    }

    def build(self, output: Any, microbatch: Microbatch) -> OutputHead:
        hidden_SBH, weight_VH = output
        return LogitsHead((hidden_SBH @ weight_VH.T).transpose(0, 1).contiguous(), microbatch, 0.7)


def test_another_head_takes_the_place_of_logits(build: Callable[[], MegatronModel]) -> None:
    batch, norm = make_batch(), normalizers(make_batch())
    results = []
    for heads in (LogitsHeadFactory(0.7), HiddenStatesFactory()):
        model = build()
        logprobs = compute_logprobs(model, batch, 2, heads)
        metrics = train_step(model, batch, build_loss("nll", {}), norm, 2, heads)
        results.append([logprobs, metrics, [weight.main_grad for weight in model.modules[0].parameters()]])
    torch.testing.assert_close(results[1][0], results[0][0])
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)
    torch.testing.assert_close(results[1][2], results[0][2])
