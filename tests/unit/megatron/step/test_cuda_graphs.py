"""Which shapes are captured when, and which graphs layers have for a microbatch; Megatron's helper is a fake."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.transformer.cuda_graphs import _set_capture_start, is_graph_capturing
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.step import cuda_graphs
from nemo_rl_offload.megatron.step.cuda_graphs import MAX_SHAPES, PATIENCE_STEPS, LayerGraphs, ShapeCounts

WIDE, NARROW, OTHER = (2, 64), (2, 32), (1, 8)


def test_a_shape_is_wanted_after_so_many_steps_that_had_it() -> None:
    counts = ShapeCounts(warmup_steps=2)
    assert counts.begin_step([WIDE, WIDE, NARROW]) == []
    assert counts.begin_step([WIDE, OTHER]) == [], "microbatches of one step count once"
    assert counts.begin_step([NARROW, WIDE]) == [WIDE]
    assert counts.begin_step([NARROW, WIDE, NARROW]) == [NARROW, WIDE]
    assert counts.begin_step([OTHER]) == []


def test_no_more_shapes_are_wanted_than_there_is_memory_for() -> None:
    counts = ShapeCounts(warmup_steps=1)
    shapes = [(1, width) for width in range(1, MAX_SHAPES + 3)]
    counts.begin_step(shapes)
    assert counts.begin_step(shapes) == shapes[:MAX_SHAPES]
    assert counts.begin_step(reversed(shapes)) == shapes[:MAX_SHAPES][::-1]


def test_shapes_that_keep_changing_are_told_once() -> None:
    counts = ShapeCounts(warmup_steps=1)
    told = []
    for step in range(3 * PATIENCE_STEPS):
        counts.begin_step([(1, 8 + step)])
        told.append(counts.problem)
    (text,) = filter(None, told)
    assert text == told[PATIENCE_STEPS]
    assert f"in {PATIENCE_STEPS + 1} steps microbatches had {PATIENCE_STEPS + 1} shapes" in text
    assert "Round them: a larger sequence_length_round of policy.dynamic_batching or policy.sequence_packing" in text
    steady = ShapeCounts(warmup_steps=1)
    assert not any([steady.begin_step([WIDE]), steady.problem][1] for _ in range(3 * PATIENCE_STEPS))


def test_captured_shapes_that_come_no_more_are_told() -> None:
    counts = ShapeCounts(warmup_steps=1)
    for _ in range(3):
        counts.begin_step([WIDE, NARROW])
    told = []
    for _ in range(3 * PATIENCE_STEPS):
        assert counts.begin_step([OTHER]) == []
        told.append(counts.problem)
    (text,) = filter(None, told)
    assert text == told[PATIENCE_STEPS]
    assert f"in the last {PATIENCE_STEPS + 1} none of the 2 that are captured" in text


class Graph:
    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape, self.is_reset = shape, False

    def reset(self) -> None:
        self.is_reset = True


class Layer(torch.nn.Linear):
    """A layer with what Megatron's have of graphs."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.cuda_graphs: list[Graph] = []
        self.config = SimpleNamespace(
            context_parallel_size=1, sequence_parallel=False, tensor_model_parallel_size=1, hidden_size=2
        )
        self.mlp = torch.nn.Identity()

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
        raise AssertionError("makes a mask")


class Chunk(torch.nn.Module):
    def __init__(self, position_embedding_type: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.position_embedding_type = position_embedding_type


class Helper:
    """Stands in the place of `TECudaGraphHelper`."""

    made: list[tuple[int, int]] = []

    def __init__(self, model: list[Chunk], config: Any, seq_length: int, micro_batch_size: int) -> None:
        assert num_microbatches_calculator.get_num_microbatches() == 1
        self.flattened_callables = list(model[0].layers)
        self._shape = micro_batch_size, seq_length
        assert all(layer.training and not layer.cuda_graphs for layer in self.flattened_callables)

    def create_cudagraphs(self) -> None:
        self.made.append(self._shape)
        for layer in self.flattened_callables:
            inputs = layer.get_layer_static_inputs(self._shape[1], self._shape[0])
            assert {name: tuple(each.shape) for name, each in inputs.items()} == {
                "hidden_states": (self._shape[1], self._shape[0], 2)
            }
            layer.cuda_graphs = [Graph(self._shape)]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> LayerGraphs:
    return make_graphs(monkeypatch)


def make_graphs(patch: pytest.MonkeyPatch, *parts: CudaGraphModule, positions: str = "rope") -> LayerGraphs:
    patch.setattr(cuda_graphs, "TECudaGraphHelper", Helper)
    patch.setattr(Helper, "made", [])
    patch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    patch.setattr(torch.distributed, "get_rank", lambda: 1)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    config: Any = SimpleNamespace(cuda_graph_modules=list(parts), cuda_graph_warmup_steps=1)
    return LayerGraphs([Chunk(positions)], config)  # type: ignore[list-item]


def layers_of(graphs: LayerGraphs) -> list[Layer]:
    chunk: Any = graphs._chunks[0]
    return list(chunk.layers)


def shapes_in_use(graphs: LayerGraphs) -> list[list[tuple[int, int]]]:
    return [[graph.shape for graph in layer.cuda_graphs] for layer in layers_of(graphs)]


def test_layers_have_the_graphs_of_a_microbatchs_shape_or_none(graphs: LayerGraphs) -> None:
    graphs.begin_step([WIDE, NARROW])
    assert graphs.select(WIDE) is None
    assert (shapes_in_use(graphs), Helper.made) == ([[], []], [])
    graphs.begin_step([WIDE, NARROW, OTHER])
    assert Helper.made == [WIDE, NARROW]
    for shape in (WIDE, NARROW, WIDE):
        mask = graphs.select(shape)
        assert mask is not None
        assert mask.numel() == 1
        assert shapes_in_use(graphs) == [[shape], [shape]]
    assert graphs.select(OTHER) is None
    assert shapes_in_use(graphs) == [[], []]
    assert graphs.metrics() == {"cuda_graph_microbatches": 3.0}
    graphs.begin_step([WIDE])
    assert graphs.metrics() == {"cuda_graph_microbatches": 0.0}
    assert Helper.made == [WIDE, NARROW], "once"
    assert layers_of(graphs)[0].get_layer_static_inputs.__func__ is Layer.get_layer_static_inputs


def test_no_mask_is_passed_to_attention_that_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, CudaGraphModule.mlp)
    for _ in range(2):
        graphs.begin_step([WIDE])
    assert graphs.select(WIDE) is None
    assert shapes_in_use(graphs) == [[WIDE], [WIDE]]


@pytest.mark.parametrize("is_buffer", [False, True])
def test_weights_that_move_lead_to_new_graphs(
    is_buffer: bool, graphs: LayerGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    layer = layers_of(graphs)[1]
    layer.register_buffer("bias_of_experts", torch.zeros(3))
    for _ in range(2):
        graphs.begin_step([WIDE, NARROW])
    graphs.select(WIDE)
    old = layer.cuda_graphs[0]
    layer.weight.data.add_(1)  # other values in the same place
    graphs.begin_step([WIDE])
    assert (len(Helper.made), old.is_reset) == (2, False)
    for _ in range(2):
        kept = (layer.weight.data, layer.bias_of_experts)
        if is_buffer:
            layer.bias_of_experts = layer.bias_of_experts.clone()
        else:
            layer.weight.data = layer.weight.data.clone()
        with caplog.at_level(logging.WARNING):
            graphs.begin_step([WIDE])
        del kept
        assert graphs.select(NARROW) is None, "dropped as well, and captured anew in a step that has it"
        assert graphs.select(WIDE) is not None
    assert Helper.made == [WIDE, NARROW, WIDE, WIDE]
    assert old.is_reset
    assert [record.getMessage() for record in caplog.records] == [
        "weights were moved, and the CUDA graphs that read them are captured anew"
    ]


def test_cleared_graphs_are_reset(graphs: LayerGraphs) -> None:
    for _ in range(2):
        graphs.begin_step([WIDE])
    graphs.select(WIDE)
    (graph,) = layers_of(graphs)[0].cuda_graphs
    graphs.clear()
    assert graph.is_reset
    assert shapes_in_use(graphs) == [[], []]
    assert graphs.select(WIDE) is None


def test_what_routers_add_to_stays_at_its_address(graphs: LayerGraphs) -> None:
    graphs.begin_step([WIDE])
    tracker = get_moe_metrics_tracker()
    tracker.record("z_loss", torch.tensor(2.0), layer_number=1, num_layers=2)
    address = tracker.metrics["z_loss"].values.data_ptr()
    graphs.begin_step([WIDE])
    values = get_moe_metrics_tracker().metrics["z_loss"].values
    assert (values.data_ptr(), values.tolist()) == (address, [0.0, 0.0])


def test_a_dispatchers_sizes_are_put_back_with_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = make_graphs(monkeypatch, CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess)
    monkeypatch.setattr(cuda_graphs, "MoELayer", torch.nn.Module)
    dispatchers = [SimpleNamespace(), SimpleNamespace()]
    for layer, dispatcher in zip(layers_of(graphs), dispatchers, strict=True):
        layer.mlp.token_dispatcher = dispatcher  # type: ignore[assignment]
    create = Helper.create_cudagraphs

    def dispatch(helper: Helper) -> None:
        create(helper)
        for dispatcher in dispatchers:
            dispatcher.hidden_shape, dispatcher.num_out_tokens, dispatcher.probs = helper._shape, helper._shape[1], 0

    monkeypatch.setattr(Helper, "create_cudagraphs", dispatch)
    for _ in range(2):
        graphs.begin_step([WIDE, NARROW])
    for shape in (WIDE, NARROW, WIDE):
        for dispatcher in dispatchers:
            dispatcher.num_out_tokens, dispatcher.probs = -1, "of an eager microbatch"
        graphs.select(shape)
        assert [each.num_out_tokens for each in dispatchers] == [shape[1]] * 2
        assert [each.hidden_shape for each in dispatchers] == [shape] * 2
        assert [each.probs for each in dispatchers] == ["of an eager microbatch"] * 2


def test_positions_that_no_graph_is_given_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cuda_graph_modules: attention cannot be captured with .* kind yarn"):
        make_graphs(monkeypatch, CudaGraphModule.attn, positions="yarn")
    make_graphs(monkeypatch, CudaGraphModule.mlp, positions="yarn")


def test_a_capture_that_fails_is_over(graphs: LayerGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Helper) -> None:
        _set_capture_start()
        raise ValueError("no kernel can be captured")

    monkeypatch.setattr(Helper, "create_cudagraphs", fail)
    graphs.begin_step([WIDE])
    with pytest.raises(ValueError, match="no kernel"):
        graphs.begin_step([WIDE])
    assert not is_graph_capturing()
    assert shapes_in_use(graphs) == [[], []]
