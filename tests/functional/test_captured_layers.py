"""Megatron's own capture and replay of layers around graphs that are none, on any device: a replay runs the layer's
Python again, with what a graph knows alone, and leaves nothing behind that a graph would not."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import cuda_graphs as megatrons
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.moe import moe_logging
from models import make_policy, make_rows, offload, same_tensors, weights_of
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build import transformer_config
from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.train_step import train_step

pytestmark = pytest.mark.usefixtures("megatron_process_group", "graphs_that_are_none")

COMMON = (".precision=bfloat16", "optimizer.lr=1e-3", "scheduler.lr_warmup_iters=0", "cuda_graph_warmup_steps=1")
WIDTHS = ((16, 12), (12, 16), (16, 9), (12, 16))
REPLAYED = [0.0, 2.0, 1.0, 2.0]
ROUTED = "[attn,moe_router,moe_preprocess]"


class Replay(torch.autograd.Function):
    """As Transformer Engine's: what a graph gives stands in the same memory each time, of which no version tells."""

    @staticmethod
    def forward(ctx: Any, graph: FakeGraph, num_inputs: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        own = [each.detach().requires_grad_(each.requires_grad) for each in inputs[:num_inputs]]
        with torch.enable_grad():
            outputs = graph.run(own)
        ctx.graph, ctx.own, ctx.outputs = graph, own, outputs
        for static, output in zip(graph.outputs, outputs, strict=True):
            static.data.copy_(output.detach())
        return tuple(static.detach() for static in graph.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = [(output, grad) for output, grad in zip(ctx.outputs, grads, strict=True) if output.requires_grad]
        wanted = [each for each in (*ctx.own, *ctx.graph.weights) if each.requires_grad]
        outputs, grad_outputs = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, grad_outputs))
        return None, None, *(next(found) if each.requires_grad else None for each in (*ctx.own, *ctx.graph.weights))


class FakeGraph:
    """What `make_graphed_callables` returns for a layer."""

    num_made = 0

    def __init__(self, layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        FakeGraph.num_made += 1
        self._layer, self._inputs, self._names = layer, (*args, *kwargs.values()), list(kwargs)
        self._tracker = moe_logging.get_moe_metrics_tracker()
        outputs = layer(*args, **kwargs)
        with_grad = [each for each in outputs if each.requires_grad]
        torch.autograd.backward(with_grad, [torch.full_like(each, 100.0) for each in with_grad])
        self.outputs = [each.detach().clone() for each in outputs]
        self.weights = [weight for weight in layer.parameters() if weight.grad is not None]
        for weight in self.weights:
            weight.grad = None
        self._addresses = [weight.data_ptr() for weight in self.weights]

    def __call__(self, *args: Tensor, **kwargs: Any) -> Sequence[Tensor]:
        inputs = (*args, *(kwargs[name] for name in self._names))
        for given, known in zip(inputs, self._inputs, strict=True):
            assert (given.shape, given.dtype) == (known.shape, known.dtype)
        assert self._addresses == [weight.data_ptr() for weight in self.weights], "a graph would read no weight"
        outputs: Sequence[Tensor] = Replay.apply(self, len(inputs), *inputs, *self.weights)  # type: ignore[no-untyped-call]
        return outputs

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The layer's captured part, which leaves nothing behind in Python."""
        dispatcher = getattr(self._layer.mlp, "token_dispatcher", None)
        before = {} if dispatcher is None else dict(vars(dispatcher))
        current = moe_logging._MOE_METRICS_TRACKER
        moe_logging.set_moe_metrics_tracker(self._tracker)
        megatrons._set_capture_start()
        kwargs = dict(zip(self._names, inputs[1:], strict=True))
        try:
            outputs: Sequence[Tensor] = self._layer._te_cuda_graph_capture(inputs[0], **kwargs)
        finally:
            megatrons._set_capture_end()
            moe_logging._MOE_METRICS_TRACKER = current
            if dispatcher is not None:
                vars(dispatcher).clear()
                vars(dispatcher).update(before)
        return outputs

    def reset(self) -> None: ...


def make_fake_graphs(
    layers: tuple[Any, ...], sample_args: Sequence[Any], sample_kwargs: Sequence[Any], **_: object
) -> tuple[FakeGraph, ...]:
    made = zip(layers, sample_args, sample_kwargs, strict=True)
    return tuple(FakeGraph(layer, args, kwargs) for layer, args, kwargs in made)


@pytest.fixture
def graphs_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGraph, "num_made", 0)
    monkeypatch.setattr(megatrons, "HAVE_TE_GRAPHS", True)
    monkeypatch.setattr(megatrons, "make_graphed_callables", make_fake_graphs, raising=False)
    for module in (megatrons, transformer_layer):
        monkeypatch.setattr(module, "is_te_min_version", lambda version: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(transformer_config, "_check_layers", lambda policy, activations: None)


@dataclass
class Outcome:
    metrics: list[dict[str, float]]
    """Of each step, without the number of replays."""
    replayed: list[float | None]
    weights: dict[str, Tensor]
    logprobs: list[Tensor | None]
    bytes_out: dict[str, int]


def train(folder: Path, *overrides: str, moves_at: int | None = None) -> Outcome:
    policy = make_policy(*COMMON, *overrides)
    engine = install_offloading(policy)
    model = build_model(policy, folder, num_steps=10)
    if engine is not None:
        exclude_parameters(engine, model.modules)
    heads, metrics, replayed, logprobs = LogitsHeadFactory(1.0), [], [], []
    for step, widths in enumerate(WIDTHS):
        if step == moves_at:
            for weight in model.modules[0].decoder.parameters():
                weight.data = weight.data.clone()
        batch = make_rows(step, widths)
        with pytest.MonkeyPatch.context() as patch:  # which a layer imports before it replays
            for name in ("transformer_engine", "transformer_engine.pytorch"):
                patch.setitem(sys.modules, name, types.ModuleType(name))
            found = train_step(model, batch, build_loss("nll", {}), normalizers(batch), 2, heads)
        replayed.append(found.pop("cuda_graph_microbatches", None))
        metrics.append(found)
        logprobs.append(compute_logprobs(model, batch, 2, heads))
    if model.graphs is not None:
        num_shapes, num_layers = 2 + 2 * (moves_at is not None), len(model.modules[0].decoder.layers)
        assert FakeGraph.num_made == num_shapes * num_layers, "a layer is captured once for each shape"
    stats = {} if engine is None else engine.stats().per_module
    use_engine(None)
    if engine is not None:
        engine.close()
    bytes_out = {name: module.bytes_out for name, module in stats.items()}
    return Outcome(metrics, replayed, weights_of(model), logprobs, bytes_out)


def assert_same(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.metrics == reference.metrics
    assert (outcome.replayed, reference.replayed) == (REPLAYED, [None] * len(WIDTHS))
    assert same_tensors(outcome.weights, reference.weights)
    for found, expected in zip(outcome.logprobs, reference.logprobs, strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def captured(parts: str) -> tuple[str, ...]:
    return ("cuda_graph_impl=transformer_engine", f"cuda_graph_modules={parts}")


OF_EXPERTS = ("moe_aux_loss_coeff=0.01",)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen2", "null"),
        slow("qwen2", "[attn]"),
        slow("qwen2", "[mlp]"),
        slow("qwen3_moe", "[moe_router]"),
        ("qwen3_moe", ROUTED),
        slow("qwen3_moe_mixed", "[attn,mlp,moe_router,moe_preprocess]"),
    ],
)
def test_what_megatron_replays_is_what_it_runs(family: str, parts: str, model_folder: Callable[..., Path]) -> None:
    folder, others = model_folder(family), () if family == "qwen2" else OF_EXPERTS
    reference = train(folder, *others)
    assert_same(train(folder, *others, *captured(parts)), reference)
    assert all(metrics["moe/load_balancing_loss"] > 0 for metrics in reference.metrics if others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parts", "modules", "others"),
    [
        ("qwen2", "[attn]", ("mlp_fc1", "mlp_act"), ()),
        slow("qwen2", "[mlp]", ("qkv_linear", "core_attn", "attn_proj"), ()),
        slow("qwen3_moe", ROUTED, ("expert_fc1", "moe_act"), OF_EXPERTS),
        slow("qwen3_moe", ROUTED, ("expert_fc1", "moe_act"), (*OF_EXPERTS, "delay_offload_until_cuda_graph=true")),
    ],
)
def test_modules_beside_graphs_are_offloaded_in_every_step(
    family: str, parts: str, modules: tuple[str, ...], others: tuple[str, ...], model_folder: Callable[..., Path]
) -> None:
    folder = model_folder(family)
    outcome = train(folder, *others, *captured(parts), *offload(modules))
    assert_same(outcome, train(folder, *others))
    if "delay_offload_until_cuda_graph=true" in others:  # the last layer's has no graph behind it
        assert all(outcome.bytes_out[name] > 0 for name in modules)
    else:
        assert outcome.bytes_out == train(folder, *others, *offload(modules)).bytes_out


@pytest.mark.slow
def test_weights_at_other_addresses_are_captured_anew(model_folder: Callable[..., Path]) -> None:
    outcome = train(model_folder("qwen2"), *captured("null"), moves_at=3)
    assert_same(outcome, train(model_folder("qwen2")))
