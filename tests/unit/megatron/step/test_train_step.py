"""Log-probabilities and metrics of the shipped model: exact, and the same however the batch is cut."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.plan import MicrobatchSplit, TokenBudget, plan_packed, plan_padded
from nemo_rl_offload.batching.sharding import shard_by_plan
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.step.head import gather_logprobs, token_entropy, topk_logits
from nemo_rl_offload.megatron.step.microbatches import Microbatch, split_into_microbatches
from nemo_rl_offload.megatron.step.train_step import (
    _apply,
    _forward_backward,
    compute_logprobs,
    compute_topk_logits,
    evaluate,
    token_logprobs,
    train_step,
)

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
        "input_ids": torch.randint(0, 264, (NUM_SAMPLES, WIDTH), generator=generator),
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


def plan(batch: Batch, *, is_packed: bool, num_tokens: int) -> tuple[Batch, MicrobatchSplit]:
    """The batch of the only rank, and how it is cut."""
    budget = TokenBudget(num_tokens, 1)
    packed = partial(plan_packed, budget=budget, algorithm="modified_first_fit_decreasing")
    division = shard_by_plan(
        batch, 1, packed if is_packed else partial(plan_padded, budget=budget), is_packed=is_packed
    )
    assert division.splits is not None
    return division.shards[0], division.splits[0]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_tokens", [14, 30, 100])
def test_microbatches_by_tokens_change_nothing(
    is_packed: bool, num_tokens: int, build: Callable[[], MegatronModel]
) -> None:
    batch = make_batch()
    piece, cutting = plan(batch, is_packed=is_packed, num_tokens=num_tokens)
    assert len(cutting.sizes) == {14: 4 if is_packed else 5, 30: 2, 100: 1}[num_tokens] or not is_packed
    fixed, planned = build(), build()
    logprobs = compute_logprobs(fixed, piece, 2, 0.7)
    other = compute_logprobs(planned, piece, cutting, 0.7)
    is_real = (torch.arange(WIDTH) < piece["input_lengths"][:, None]) & (torch.arange(WIDTH) > 0)
    assert logprobs is not None
    assert other is not None
    torch.testing.assert_close(other[is_real], logprobs[is_real], rtol=1e-5, atol=1e-5)
    loss, norm = build_loss("nll", {}), normalizers(batch)
    assert train_step(planned, piece, loss, norm, cutting, 0.7) == pytest.approx(
        train_step(fixed, batch, loss, norm, 2, 0.7), rel=1e-5
    )
    for weight, expected in zip(planned.modules[0].parameters(), fixed.modules[0].parameters(), strict=True):
        torch.testing.assert_close(weight.main_grad, expected.main_grad, rtol=1e-5, atol=1e-6)  # sums in another order


class HostReads(TorchFunctionMode):
    """Notes what asks for a tensor's content, for which a host waits until the device has come that far."""

    ASKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        masks = name == "__getitem__" and any(getattr(each, "dtype", None) == torch.bool for each in _flat(args[1]))
        if name in self.ASKS or masks:
            self.found.append(f"{name} in {''.join(traceback.format_stack(limit=3)[:1])}")
        return func(*args, **(kwargs or {}))


def _flat(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_microbatch_asks_the_device_for_nothing(is_packed: bool, build: Callable[[], MegatronModel]) -> None:
    """Each question would let the host wait for all work queued there, and for the copies of offloading besides."""
    model, batch = build(), make_batch()
    piece, cutting = plan(batch, is_packed=is_packed, num_tokens=30)
    loss, norm = build_loss("nll", {}), normalizers(batch)
    pieces = split_into_microbatches(piece, cutting, model.config)

    def process(logits: torch.Tensor, each: Microbatch) -> Any:
        return _apply(loss, logits, each, norm, 1.0, 4)

    reads = HostReads()
    with reads:
        outputs = _forward_backward(model, pieces, process)
    assert len(outputs) == len(pieces)
    assert reads.found == []


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunks_of_the_sequence_change_nothing(chunk_size: int, build: Callable[[], MegatronModel]) -> None:
    """Log-probabilities, entropy and top-k, and a step on them."""
    batch = make_batch() | {name: torch.randn(NUM_SAMPLES, WIDTH) for name in ("prev_logprobs", "advantages")}
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["loss_fn"] | {"entropy_coeff": 0.1}
    loss, norm = build_loss("clipped_pg", config), normalizers(batch)
    models = [build(), build()]
    whole, chunked = (
        train_step(m, batch, loss, norm, 2, 0.7, size) for m, size in zip(models, (None, chunk_size), strict=True)
    )
    assert chunked == pytest.approx(whole, rel=1e-5)
    for weight, expected in zip(models[1].modules[0].parameters(), models[0].modules[0].parameters(), strict=True):
        torch.testing.assert_close(weight.main_grad, expected.main_grad, rtol=1e-5, atol=1e-7)
    logits, ids = compute_topk_logits(models[0], batch, 2, 0.7, 5, 264, chunk_size)
    torch.testing.assert_close((logits, ids), compute_topk_logits(models[0], batch, 2, 0.7, 5, 264))


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
            token_logprobs(logits, ids, 0.7, chunk_size)
        return sum(saved)

    assert num_saved(None) >= 2 * 8 * 50
    assert num_saved(2) < 50


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
    assert metrics == pytest.approx(
        {"loss": loss.item(), "grad_norm": norm.item(), "lr": 0.25, "skipped_updates": 0.0}, rel=1e-5
    )
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


def test_evaluation_is_the_loss_of_a_step_and_changes_nothing(build: Callable[[], MegatronModel]) -> None:
    model, batch = build(), make_batch()
    before = [parameter.detach().clone() for parameter in model.modules[0].parameters()]
    loss, norm = build_loss("nll", {}), normalizers(batch)
    evaluated = evaluate(model, batch, loss, norm, 2, 0.7)
    assert all(map(torch.equal, before, model.modules[0].parameters()))
    metrics = train_step(model, batch, loss, norm, 3, 0.7)
    assert evaluated == pytest.approx({"loss": metrics["loss"]}, rel=1e-6)


@pytest.mark.parametrize("kl_type", ["forward", "reverse"])
def test_a_model_distilled_from_itself(kl_type: str, build: Callable[[], MegatronModel]) -> None:
    """The teacher's logits line up with the student's, so that nothing is left to learn but what top-k leaves out."""
    model, batch = build(), make_batch()
    logits, ids = compute_topk_logits(model, batch, 2, 0.7, k=200, num_tokens=264)
    assert logits.shape == ids.shape == (NUM_SAMPLES, WIDTH, 200)
    assert (logits[:, 0] == 0).all()
    batch |= {"teacher_topk_logits": logits, "teacher_topk_indices": ids}
    config = {"kl_type": kl_type, "mixed_kl_weight": 0.5, "zero_outside_topk": False}
    loss = build_loss("distillation", config)
    norm = normalizers(batch)
    assert evaluate(model, batch, loss, norm, 3, 0.7)["loss"] == pytest.approx(0, abs=1e-5)
    shifted = batch | {"teacher_topk_indices": ids.roll(1, dims=-1)}
    assert train_step(model, shifted, loss, norm, 3, 0.7)["loss"] > 0.1
    assert evaluate(model, batch, loss, norm, 3, 0.7)["loss"] > 1e-3


def test_a_model_that_is_never_trained_has_no_optimizer(make_policy: Callable[..., Any]) -> None:
    policy, batch = make_policy("fine_grained_activation_offloading=false"), make_batch()
    teacher = build_model(policy, MODEL, num_steps=None)
    assert teacher.optimizer is None
    assert teacher.chunks == teacher.modules  # not wrapped, so without gradient buffers
    trained = build_model(policy, MODEL, num_steps=4)
    assert torch.equal(compute_logprobs(teacher, batch, 2, 1.0), compute_logprobs(trained, batch, 2, 1.0))
