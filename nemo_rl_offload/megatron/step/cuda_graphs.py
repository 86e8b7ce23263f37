"""CUDA graphs of layers in training: a layer's kernels, recorded once, are launched together from then on.

Mechanism. Where a microbatch is small, the device waits for the host, which launches dozens of kernels for each layer
and direction. Megatron-Core captures a layer, or the parts of it that `cuda_graph_modules` lists, by Transformer
Engine's `make_graphed_callables` (`TECudaGraphHelper`): forward and backward of each layer become a graph each, which a
layer replays in training wherever its list `cuda_graphs` is not empty. A graph has one shape, and microbatches have
many. So shapes are counted, and one that was there in `cuda_graph_warmup_steps` steps is captured when the next step
begins, before there are gradients, which a capture loses. Each shape's graphs are kept here, and in front of every
microbatch's forward the layers get those of its shape, or none: other shapes run kernel by kernel as they always do,
and so does all that is no training. Without a pipeline a microbatch's backward ends before the next one's forward
begins, so one set of graphs a shape is enough.

Three things that are easy to get wrong:
- A graph reads the addresses that it has recorded. Weights have to stay where they are; their addresses are compared
  when a step begins, and where one has changed all graphs are dropped. What routers measure is added up in a tracker
  that this project makes anew for each step; with graphs it is one, which is emptied.
- What a replay does not run is Python. A dispatcher's sizes, which its preprocessing leaves behind, are those of
  whatever shape ran last, and are put back with the graphs.
- A static mask would cost [rows, 1, width, width] bytes a layer, and another choice of kernels than without one. The
  layers are captured without, as they run; what stands in a mask's place at a replay is not read.

Rejected: graphs for a few round widths, to which microbatches are padded here. `sequence_length_round` of dynamic
batches does it for whoever wants it. Megatron's own runner (`local`) captures whatever came first and asserts on other
shapes. Everything at once (`full_iteration`) has no place for losses and metrics that the host reads.

Limits: `MAX_SHAPES` shapes, each of which holds what captured parts of a microbatch save for backward, also while
nothing is trained; a capture itself takes about 10 forwards and backwards. Ranks capture on their own: what a graph
contains may wait for tensor-parallel ranks alone, which have the same microbatches.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper, _set_capture_end
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, set_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.protocols import ModelChunk

logger = logging.getLogger(__name__)

MAX_SHAPES = 2
PATIENCE_STEPS = 20
"""Steps without a capture, after which that is said."""
_STATIC_POSITIONS = ("rope", "learned_absolute", "none")
"""Kinds of positions of which Megatron hands captured attention what it needs."""
_SIZES_OF_DISPATCH = ("hidden_shape", "hidden_shape_before_permute", "num_out_tokens")
"""Attributes of Megatron's dispatchers that their preprocessing sets and that are no tensors."""

type Shape = tuple[int, int]
"""Of the model's input: rows and width, or 1 and a pack's tokens."""


class ShapeCounts:
    """In how many steps each shape of microbatches was there, and which are to be captured."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self._steps = Counter[Shape]()
        self._chosen: list[Shape] = []
        self._num_steps = 0
        self._num_idle_steps = 0
        """In a row, without a shape that is chosen."""

    def begin_step(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Count a step with microbatches of these shapes; those of them whose graphs are wanted from this step on."""
        found = list(dict.fromkeys(shapes))
        for shape in found:
            is_known = self._steps[shape] >= self._warmup_steps
            if is_known and shape not in self._chosen and len(self._chosen) < MAX_SHAPES:
                self._chosen.append(shape)
            self._steps[shape] += 1
        self._num_steps += 1
        wanted = [shape for shape in found if shape in self._chosen]
        self._num_idle_steps = 0 if wanted else self._num_idle_steps + 1
        return wanted

    @property
    def problem(self) -> str | None:
        """What is to be said, in the step in which it is to be said: that no shape comes again."""
        if self._num_idle_steps != self._warmup_steps + PATIENCE_STEPS:
            return None
        of_all = f"in {self._num_steps} steps microbatches had {len(self._steps)} shapes"
        why = (
            f"{of_all}, and in the last {self._num_idle_steps} none of the {len(self._chosen)} that are captured"
            if self._chosen
            else f"{of_all}, none of them in more than {self._warmup_steps} steps"
        )
        return (
            f"cuda_graph_impl has no effect now: {why}. Round them: a larger sequence_length_round of "
            "policy.dynamic_batching or policy.sequence_packing does"
        )


@dataclass(frozen=True)
class _Captured:
    """The graphs of one shape."""

    layers: list[tuple[Any, list[Any]]]
    """Each layer with its list `cuda_graphs`."""
    sizes: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Each captured dispatcher with its sizes."""


class LayerGraphs:
    """The graphs of a model's layers, and which of them a microbatch uses.

    `chunks` are the model's chunks (one, without a pipeline), wrapped for data parallelism, `config` their
    TransformerConfig. Raises ConfigError for a model whose attention gets positions that no graph can be given.
    """

    def __init__(self, chunks: Sequence[ModelChunk], config: TransformerConfig) -> None:
        self._chunks, self._config = list(chunks), config
        parts = config.cuda_graph_modules
        self._has_attention = not parts or CudaGraphModule.attn in parts
        self._has_dispatch = CudaGraphModule.moe_preprocess in parts
        self._counts = ShapeCounts(config.cuda_graph_warmup_steps)
        self._captured: dict[Shape, _Captured] = {}
        self._layers: list[Any] = []
        self._addresses: list[int] = []
        self._tracker = MoEMetricsTracker()
        self._mask: Tensor | None = None
        self._num_replayed = 0
        self._has_told = False
        if self._has_attention:
            self._check_positions()

    def begin_step(self, shapes: Sequence[Shape]) -> None:
        """Capture what is due before a training step over microbatches of these shapes. Gradients are lost."""
        self._tracker.clear()
        set_moe_metrics_tracker(self._tracker)
        self._num_replayed = 0
        wanted = self._counts.begin_step(shapes)
        if (problem := self._counts.problem) is not None:
            logger.warning("%s", problem)
        if self._captured and self._addresses != self._addresses_of_weights():
            self.clear()
            if not self._has_told:
                self._has_told = True
                logger.warning("weights were moved, and the CUDA graphs that read them are captured anew")
        for shape in wanted:
            if shape not in self._captured:
                self._capture(shape)

    def select(self, shape: Shape) -> Tensor | None:
        """Let the layers use the graphs of a microbatch of this shape, or none, for its forward and backward.

        Returns what the model is to be called with as `attention_mask`: None, or what keeps Megatron from making a
        mask that no graph reads, bool [1].
        """
        captured = self._captured.get(shape)
        if captured is None:
            self._use_none()
            return None
        for layer, graphs in captured.layers:
            layer.cuda_graphs = graphs
        for dispatcher, sizes in captured.sizes:
            vars(dispatcher).update(sizes)
        self._num_replayed += 1
        return self._mask

    def metrics(self) -> dict[str, float]:
        """Of the last step: how many of this rank's microbatches were replayed."""
        return {"cuda_graph_microbatches": float(self._num_replayed)}

    def clear(self) -> None:
        """Drop all graphs, and what they hold of the device's memory."""
        self._use_none()
        for captured in self._captured.values():
            for _, graphs in captured.layers:
                for graph in graphs:
                    graph.reset()
        self._captured.clear()

    def _capture(self, shape: Shape) -> None:
        num_rows, width = shape
        _announce_num_microbatches()
        self._use_none()
        for chunk in self._chunks:
            chunk.train()
        helper = TECudaGraphHelper(self._chunks, self._config, seq_length=width, micro_batch_size=num_rows)
        self._layers = helper.flattened_callables
        assert self._layers, "the rules refuse models without such a layer"
        try:
            with _without_masks(self._layers):
                helper.create_cudagraphs()
        except BaseException:
            _set_capture_end()  # or layers would take every later forward for a capture
            raise
        self._captured[shape] = _Captured(
            [(layer, layer.cuda_graphs) for layer in self._layers],
            [(dispatcher, _sizes(dispatcher)) for dispatcher in self._dispatchers()],
        )
        self._addresses = self._addresses_of_weights()
        if self._has_attention and self._mask is None:
            self._mask = torch.zeros(1, dtype=torch.bool, device=torch.cuda.current_device())

    def _use_none(self) -> None:
        for layer in self._layers:
            layer.cuda_graphs = []

    def _dispatchers(self) -> Iterator[Any]:
        if self._has_dispatch:
            for layer in self._layers:
                if isinstance(layer.mlp, MoELayer):
                    yield layer.mlp.token_dispatcher

    def _addresses_of_weights(self) -> list[int]:
        """Of parameters and buffers of modules."""
        tensors = (
            tensor
            for chunk in self._chunks
            for module in chunk.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
        )
        return [tensor.data_ptr() for tensor in tensors if tensor is not None]

    def _check_positions(self) -> None:
        modules = [module for chunk in self._chunks for module in chunk.modules()]
        for kind in {getattr(module, "position_embedding_type", "none") for module in modules}:
            if kind not in _STATIC_POSITIONS:
                raise ConfigError(
                    f"policy.megatron_cfg.cuda_graph_modules: attention cannot be captured with positions of the kind "
                    f"{kind}, which Megatron-Core hands to no graph. Set others, or cuda_graph_impl to none."
                )


def _sizes(dispatcher: Any) -> dict[str, Any]:
    return {name: vars(dispatcher)[name] for name in _SIZES_OF_DISPATCH if name in vars(dispatcher)}


@contextmanager
def _without_masks(layers: Iterable[Any]) -> Iterator[None]:
    """Megatron's example inputs of these layers, but for the mask, which none of them gets."""

    changed = list(layers)
    for layer in changed:
        layer.get_layer_static_inputs = partial(GraphableMegatronModule.get_layer_static_inputs, layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.get_layer_static_inputs


def _announce_num_microbatches() -> None:
    """Megatron asks a calculator of the process for their number, to know how often layers have run by now."""
    calculator = num_microbatches_calculator
    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        sizes = dict.fromkeys(("global_batch_size", "micro_batch_size", "data_parallel_size"), 1)
        calculator.init_num_microbatches_calculator(dist.get_rank(), **sizes)
