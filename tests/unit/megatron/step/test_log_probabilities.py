"""Log-probabilities and top-k of the shipped model, without gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_batches import MODEL, NUM_SAMPLES, WIDTH, make_batch

from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs, compute_topk_logits
from nemo_rl_offload.megatron.step.train_step import evaluate, train_step

pytestmark = pytest.mark.usefixtures("process_group")

HEADS = LogitsHeadFactory(temperature=0.7)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
def test_compute_logprobs_equals_one_plain_forward(micro_batch_size: int, build: Callable[[], MegatronModel]) -> None:
    model, batch = build(), make_batch()
    logprobs = compute_logprobs(model, batch, micro_batch_size, HEADS)
    module = model.modules[0].eval()
    assert logprobs.shape == (NUM_SAMPLES, WIDTH)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            logits = module(ids, torch.arange(length)[None], None)
        expected = (logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        torch.testing.assert_close(logprobs[row, 1:length], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kl_type", ["forward", "reverse"])
def test_a_model_distilled_from_itself(kl_type: str, build: Callable[[], MegatronModel]) -> None:
    """The teacher's logits line up with the student's, so that nothing is left to learn but what top-k leaves out."""
    model, batch = build(), make_batch()
    logits, ids = compute_topk_logits(model, batch, 2, HEADS, k=200, num_tokens=264)
    assert logits.shape == ids.shape == (NUM_SAMPLES, WIDTH, 200)
    assert (logits[:, 0] == 0).all()
    batch |= {"teacher_topk_logits": logits, "teacher_topk_indices": ids}
    config = {"kl_type": kl_type, "mixed_kl_weight": 0.5, "zero_outside_topk": False}
    loss = build_loss("distillation", config)
    norm = normalizers(batch)
    assert evaluate(model, batch, loss, norm, 3, HEADS)["loss"] == pytest.approx(0, abs=1e-5)
    shifted = batch | {"teacher_topk_indices": ids.roll(1, dims=-1)}
    assert train_step(model, shifted, loss, norm, 3, HEADS)["loss"] > 0.1
    assert evaluate(model, batch, loss, norm, 3, HEADS)["loss"] > 1e-3


def test_a_model_that_is_never_trained_has_no_optimizer(make_policy: Callable[..., Any]) -> None:
    policy, batch = make_policy("fine_grained_activation_offloading=false"), make_batch()
    teacher = build_model(policy, MODEL, num_steps=None)
    assert teacher.optimizer is None
    assert teacher.chunks == teacher.modules  # not wrapped, so without gradient buffers
    trained = build_model(policy, MODEL, num_steps=4)
    assert torch.equal(
        compute_logprobs(teacher, batch, 2, HEADS),
        compute_logprobs(trained, batch, 2, HEADS),
    )
