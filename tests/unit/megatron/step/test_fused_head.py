"""The head without logits in a whole model, beside the one of logits."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_batches import NUM_SAMPLES, WIDTH, make_batch

from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.lora import adapters_off
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.step.fused_head import FusedHeadFactory
from nemo_rl_offload.megatron.step.head import HeadFactory, LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs, compute_topk_logits
from nemo_rl_offload.megatron.step.train_step import evaluate, train_step

VOCABULARY = 264
PLAIN = LogitsHeadFactory(0.7)
FUSED = {
    "whole": FusedHeadFactory(0.7, VOCABULARY),
    "tokens": FusedHeadFactory(0.7, VOCABULARY, chunk_tokens=5),
    "positions": FusedHeadFactory(0.7, VOCABULARY, chunk_positions=3),
}
# Sums in another order: 1e-6 of each tensor's norm, but up to 1.3e-6 where gradients all but cancel (biases of keys,
# chunks of positions, distillation). The head alone is held to 1e-6 in `test_fused_linear.py`.
ROUNDING = 5e-6
SPLITS = {"rows": 2, "packs": MicrobatchSplit((2, 3), (20, 32), is_packed=True)}


def loss_named(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A loss and what it needs beside the batch."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_SAMPLES, WIDTH)
    if name == "distillation":
        config: dict[str, Any] = {"kl_type": "mixed", "mixed_kl_weight": 0.4, "zero_outside_topk": True}
        ids = torch.rand(*shape, VOCABULARY, generator=generator).topk(6, dim=-1).indices
        logits = torch.randn(*shape, 6, generator=generator)
        return build_loss(name, config), {"teacher_topk_indices": ids, "teacher_topk_logits": logits}
    if name == "nll":
        return build_loss(name, {}), {}
    config = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["loss_fn"] | {"entropy_coeff": 0.1}
    names = ("prev_logprobs", "advantages")
    return build_loss(name, config), {key: torch.randn(*shape, generator=generator) for key in names}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["nll", "clipped_pg", "distillation"])
@pytest.mark.parametrize("how", FUSED)
def test_a_step_is_that_of_logits(how: str, name: str, split: str, build: Callable[[], MegatronModel]) -> None:
    loss, further = loss_named(name)
    batch = make_batch() | further
    norm = normalizers(batch)
    results: list[tuple[dict[str, float], list[torch.Tensor], Any]] = []
    heads: tuple[HeadFactory, HeadFactory] = (PLAIN, FUSED[how])
    for each in heads:
        model = build()
        values = compute_logprobs(model, batch, 2, each), *(compute_topk_logits(model, batch, 2, each, 7, 250) or ())
        before = evaluate(model, batch, loss, norm, 2, each)
        metrics = train_step(model, batch, loss, norm, SPLITS[split], each)
        assert metrics["loss"] == pytest.approx(before["loss"], rel=1e-5)
        results.append((metrics, [weight.main_grad for weight in model.modules[0].parameters()], values))
    torch.testing.assert_close(results[1][2], results[0][2])
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5, abs=1e-7)
    for gradient, expected in zip(results[1][1], results[0][1], strict=True):
        assert float((gradient - expected).norm()) <= ROUNDING * max(float(expected.norm()), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nll", "distillation"])
@pytest.mark.parametrize("how", FUSED)
def test_a_step_with_an_adapted_output_layer_is_that_of_logits(
    how: str, name: str, build_adapted: Callable[[], MegatronModel]
) -> None:
    loss, further = loss_named(name)
    batch = make_batch() | further
    results: list[tuple[dict[str, float], dict[str, torch.Tensor], list[Any]]] = []
    for heads in (PLAIN, FUSED[how]):
        model = build_adapted()
        values = [compute_logprobs(model, batch, 2, heads), compute_topk_logits(model, batch, 2, heads, 7, 250)]
        with adapters_off(model.modules):
            values.append(compute_logprobs(model, batch, 2, heads))
            values.append(compute_topk_logits(model, batch, 2, heads, 7, 250))
        metrics = train_step(model, batch, loss, normalizers(batch), SPLITS["rows"], heads)
        named = {name: weight for name, weight in model.modules[0].named_parameters() if weight.requires_grad}
        results.append((metrics, {name: weight.main_grad for name, weight in named.items()}, values))
    torch.testing.assert_close(results[1][2], results[0][2])
    assert not torch.allclose(results[1][2][0], results[1][2][2], atol=1e-2), "the adapter has a say"
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5, abs=1e-7)
    assert sum(name.startswith("output_layer.adapter.") for name in results[0][1]) == 2
    for name, expected in results[0][1].items():
        assert float((results[1][1][name] - expected).norm()) <= ROUNDING * float(expected.norm()), name


def test_padding_of_the_vocabulary_is_left_out(build: Callable[[], MegatronModel]) -> None:
    batch = make_batch() | {"input_ids": make_batch()["input_ids"] % 200}
    results = []
    for padding in (0.0, 5.0):
        model = build()
        with torch.no_grad():
            model.modules[0].shared_embedding_or_output_weight()[200:] = padding
        results.append(compute_logprobs(model, batch, 2, FusedHeadFactory(1.0, 200)))
    assert results[0] is not None
    torch.testing.assert_close(results[1], results[0])


def test_rows_of_one_token_have_nothing_to_predict(build: Callable[[], MegatronModel]) -> None:
    batch = {"input_ids": torch.tensor([[3], [5]]), "input_lengths": torch.tensor([1, 1])}
    for heads in (PLAIN, FUSED["whole"]):
        logprobs, top = (
            compute_logprobs(build(), batch, 2, heads),
            compute_topk_logits(build(), batch, 2, heads, 3, 264),
        )
        assert logprobs is not None
        assert top is not None
        assert torch.equal(logprobs, torch.zeros(2, 1))
        assert top[0].shape == (2, 1, 3)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operator returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.of_shape = defaultdict[tuple[int, ...], set[int]](set)
        """Addresses of tensors of each shape."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.of_shape[tuple(tensor.shape)].add(tensor.untyped_storage().data_ptr())
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["nll", "clipped_pg", "distillation"])
def test_logits_of_all_tokens_never_exist(
    name: str, build: Callable[[], MegatronModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is 128 wide, so that nothing is as wide as the vocabulary."""
    from nemo_rl_offload.megatron.step import fused_linear, hidden_states

    loss, further = loss_named(name)
    batch = make_batch() | further
    monkeypatch.setattr(hidden_states, "Head", lambda **how: fused_linear.Head(**how, block_bytes=1))
    largest = []
    for heads in (PLAIN, FUSED["whole"]):
        model = build()
        with Watch() as watch:
            compute_logprobs(model, batch, 2, heads)
            compute_topk_logits(model, batch, 2, heads, 5, VOCABULARY)
            train_step(model, batch, loss, normalizers(batch), 2, heads)
        largest.append(watch.largest)
    assert largest[0] >= 2 * (WIDTH - 1) * VOCABULARY
    assert largest[1] == 0


def test_with_an_adapter_neither_logits_nor_a_merged_weight_exist(
    build_adapted: Callable[[], MegatronModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl_offload.megatron.step import fused_linear, hidden_states

    monkeypatch.setattr(hidden_states, "Head", lambda **how: fused_linear.Head(**how, block_bytes=1))
    model, batch, loss = build_adapted(), make_batch(), loss_named("nll")[0]
    weight = model.modules[0].output_layer.to_wrap.weight
    with Watch() as watch:
        compute_logprobs(model, batch, 2, FUSED["whole"])
        train_step(model, batch, loss, normalizers(batch), 2, FUSED["whole"])
    assert watch.largest == 0
    assert watch.of_shape[tuple(weight.shape)] <= {weight.untyped_storage().data_ptr()}
