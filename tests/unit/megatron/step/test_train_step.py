"""Steps of the shipped model: exact, and the same however the batch is cut."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from step_batches import WIDTH, head_of, make_batch
from torch.overrides import TorchFunctionMode

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.plan import MicrobatchSplit, TokenBudget, plan_packed, plan_padded
from nemo_rl_offload.batching.sharding import shard_by_plan
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.microbatches import split_into_microbatches
from nemo_rl_offload.megatron.step.train_step import accumulate_gradients, evaluate, train_step

pytestmark = pytest.mark.usefixtures("process_group")

HEADS = LogitsHeadFactory(temperature=0.7)


def test_metrics_and_gradients_do_not_depend_on_the_microbatches(build: Callable[[], MegatronModel]) -> None:
    batch = make_batch()
    metrics, weights = [], []
    for micro_batch_size in (1, 2, 3, 5):
        model = build()
        metrics.append(train_step(model, batch, build_loss("nll", {}), normalizers(batch), micro_batch_size, HEADS))
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
    piece, split = plan(batch, is_packed=is_packed, num_tokens=num_tokens)
    assert len(split.sizes) == {14: 4 if is_packed else 5, 30: 2, 100: 1}[num_tokens] or not is_packed
    fixed, planned = build(), build()
    logprobs = compute_logprobs(fixed, piece, 2, HEADS)
    other = compute_logprobs(planned, piece, split, HEADS)
    is_real = (torch.arange(WIDTH) < piece["input_lengths"][:, None]) & (torch.arange(WIDTH) > 0)
    assert logprobs is not None
    assert other is not None
    torch.testing.assert_close(other[is_real], logprobs[is_real], rtol=1e-5, atol=1e-5)
    loss, norm = build_loss("nll", {}), normalizers(batch)
    assert train_step(planned, piece, loss, norm, split, HEADS) == pytest.approx(
        train_step(fixed, batch, loss, norm, 2, HEADS), rel=1e-5
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
    piece, split = plan(batch, is_packed=is_packed, num_tokens=30)
    loss, norm = build_loss("nll", {}), normalizers(batch)
    pieces = split_into_microbatches(piece, split, model.config)
    reads = HostReads()
    with reads:
        outputs = accumulate_gradients(model, pieces, loss, norm, LogitsHeadFactory(1.0, 4))
    assert len(outputs) == len(pieces)
    assert reads.found == []


def test_a_step_is_that_of_plain_torch(build: Callable[[], MegatronModel]) -> None:
    batch, model = make_batch(), build()
    reference = build().modules[0]
    logprobs = torch.cat(
        [
            head_of(reference(ids, torch.arange(WIDTH)[None], None), ids, 0.7).predict(ids).logprobs
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
    metrics = train_step(model, batch, build_loss("nll", {}), normalizers(batch), 2, HEADS)
    assert metrics == pytest.approx(
        {"loss": loss.item(), "grad_norm": norm.item(), "lr": 0.25, "skipped_updates": 0.0}, rel=1e-5
    )
    clip = min(1.0, 1.0 / norm.item())
    for name, parameter in model.modules[0].named_parameters():
        expected = parameters[name].detach() - 0.25 * clip * gradients[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


def test_before_its_first_update_alone_a_process_leaves_libraries_room(
    build: Callable[[], MegatronModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's communicators and kernels' code get nothing of what torch's cache holds."""
    model, loss, done = build(), build_loss("nll", {}), list[str]()
    assert model.optimizer is not None
    step = model.optimizer.step
    monkeypatch.setattr(model.optimizer, "step", lambda: (done.append("step"), step())[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    batch = make_batch()
    for _ in range(3):
        train_step(model, batch, loss, normalizers(batch), 4, HEADS)
    assert done == ["emptied", "step", "step", "step"]


def test_a_step_leaves_no_gradients_of_the_optimizers_own(build: Callable[[], MegatronModel]) -> None:
    """They are copies in float32 where a model's gradients are narrower: 4 bytes a parameter, until the next step."""
    model, batch = build(), make_batch()
    train_step(model, batch, build_loss("nll", {}), normalizers(batch), 4, HEADS)
    assert model.optimizer is not None
    weights = [weight for group in model.optimizer.param_groups for weight in group["params"]]
    assert weights
    assert not [weight for weight in weights if weight.grad is not None]


def test_masked_samples_and_padding_change_nothing(build: Callable[[], MegatronModel]) -> None:
    batch = make_batch()
    changed = {key: value.clone() for key, value in batch.items()}
    changed["input_ids"][2] = 7
    changed["input_ids"][1, 3:] = 9
    results = []
    for each in (batch, changed):
        results.append(train_step(build(), each, build_loss("nll", {}), normalizers(each), 2, HEADS))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_evaluation_is_the_loss_of_a_step_and_changes_nothing(build: Callable[[], MegatronModel]) -> None:
    model, batch = build(), make_batch()
    before = [parameter.detach().clone() for parameter in model.modules[0].parameters()]
    loss, norm = build_loss("nll", {}), normalizers(batch)
    evaluated = evaluate(model, batch, loss, norm, 2, HEADS)
    assert all(map(torch.equal, before, model.modules[0].parameters()))
    metrics = train_step(model, batch, loss, norm, 3, HEADS)
    assert evaluated == pytest.approx({"loss": metrics["loss"]}, rel=1e-6)
