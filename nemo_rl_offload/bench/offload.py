"""Device memory against step time: this engine beside what else one would use, on one model in one process.

A Qwen2-shaped decoder with random weights takes forward and backward passes, several microbatches a step. Each variant
is first checked (loss and every gradient against no offloading, `torch.equal` under deterministic algorithms), then the
variants are measured in turn, round by round, so that a drifting clock hits all alike. Times come from the device's
events, memory from the allocator; medians over the rounds. On a CPU the same code runs a small case, to show that it
works: times there mean nothing, since copies on a CPU overlap with nothing.

Megatron-Core's engine works with Megatron's layers alone: `benchmarks/dense_rl.py` has it.
"""

import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TypedDict

import torch
from torch import Tensor, nn

from nemo_rl_offload.adapters.torch_modules import ActivationOffload, offload_activations
from nemo_rl_offload.bench.process import deterministic
from nemo_rl_offload.bench.variants import MODULE_SETS, PLAIN, Variant, variants
from nemo_rl_offload.offload.stats import OffloadStats


@dataclass(frozen=True)
class Shape:
    """The model and its input. `vocabulary_size` is small, so that activations rather than logits make the peak."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    vocabulary_size: int
    sequence_length: int
    micro_batch_size: int
    num_microbatches: int
    dtype: str


QWEN2_7B_LAYERS = Shape(12, 3584, 18944, 28, 4, 8192, 8192, 1, 2, "bfloat16")
"""Layers of Qwen2.5-7B."""
SMALL = Shape(3, 64, 160, 4, 2, 128, 48, 2, 2, "float32")
"""What a CPU does in a second."""


@dataclass
class Figures:
    """One variant's measurements; bytes and milliseconds, per step."""

    name: str
    bit_identical: bool | None = None
    step_ms: float = 0.0
    step_ms_rounds: list[float] = field(default_factory=list)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    saved_bytes: int = 0
    """Of the peak, against no offloading."""
    held_bytes: int = 0
    """Device memory asked for, when a microbatch's forward is over and every copy out has ended."""
    away_bytes: int = 0
    """Of what that forward saved, on the host alone then."""
    effectiveness: float | None = None
    """By how much less is held than without offloading, over the bytes away. In a step, copies under way at the peak,
    and what the backward at the peak reads, take device memory all the same."""
    bytes_out: int = 0
    host_capacity_bytes: int = 0
    stall_ms: float = 0.0
    overlap: float | None = None
    error: str | None = None


def _model(shape: Shape, device: torch.device) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.sequence_length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = Qwen2ForCausalLM(config).to(getattr(torch, shape.dtype)).train()
    return model


class Bench:
    """One model, and what it takes to measure a variant on it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = _model(shape, device)
        generator = torch.Generator().manual_seed(1)
        size = (shape.num_microbatches, shape.micro_batch_size, shape.sequence_length)
        self.tokens = torch.randint(0, shape.vocabulary_size, size, generator=generator).to(device)

    def step(self, offload: ActivationOffload | None = None) -> Tensor:
        """Forward and backward of all microbatches; gradients add up. Returns the losses."""
        losses = []
        for tokens in self.tokens:
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.detach())
        if offload is not None:
            offload.end_step()
        return torch.stack(losses)

    def plain_peak_bytes(self) -> int:
        """Device memory that a step takes without offloading; on a CPU, what its backward keeps."""
        if self.device.type == "cuda":
            self.step()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        with offload_activations(self.model, MODULE_SETS["all"], min_tensor_bytes=0) as offload:
            self.step(offload)
            return offload.stats().peak_host_bytes

    def check(self, variant: Variant, reference: tuple[Tensor, list[Tensor]]) -> bool:
        """Whether losses and gradients equal the reference's bit for bit, over two steps."""
        with variant.enter(self.model) as offload:
            return all(_same(self.outcome(offload), reference) for _ in range(2))

    def outcome(self, offload: ActivationOffload | None = None) -> tuple[Tensor, list[Tensor]]:
        """Losses, and copies of all gradients on the host."""
        self.model.zero_grad(set_to_none=True)
        losses = self.step(offload)
        return losses.cpu(), [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]

    def measure(self, variant: Variant, figures: Figures, num_warmup: int, num_steps: int) -> None:
        """Some steps after some others; adds to `figures`."""
        with variant.enter(self.model) as offload:
            for _ in range(num_warmup):
                self.step(offload)
            self._synchronize()
            before = None if offload is None else offload.stats()
            peaks = [self._timed(figures, offload) for _ in range(num_steps)]
            figures.step_ms = statistics.median(figures.step_ms_rounds)
            figures.peak_allocated_bytes = max(figures.peak_allocated_bytes, *peaks)
            if self.device.type == "cuda":
                figures.peak_reserved_bytes = max(figures.peak_reserved_bytes, torch.cuda.max_memory_reserved())
            if offload is not None and before is not None:
                self._add_stats(figures, before, offload.stats(), num_steps)
            if self.device.type == "cuda" and (offload is not None or figures.name == PLAIN):
                self._add_held(figures, offload)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _add_stats(self, figures: Figures, before: OffloadStats, after: OffloadStats, num_steps: int) -> None:
        figures.bytes_out = (after.bytes_out - before.bytes_out) // num_steps
        figures.host_capacity_bytes = max(figures.host_capacity_bytes, after.host_capacity_bytes)
        stalls = [each.stall_in_ms + each.stall_out_ms for each in (before, after)]
        figures.stall_ms = (stalls[1] - stalls[0]) / num_steps
        figures.overlap = after.overlap

    def _add_held(self, figures: Figures, offload: ActivationOffload | None) -> None:
        before = None if offload is None else offload.stats()
        tokens = self.tokens[0]
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self._synchronize()
        if offload is not None and before is not None:
            offload.end_step()
            after = offload.stats()
            returned = [each.bytes_in + each.returned_bytes for each in (before, after)]
            figures.away_bytes = after.bytes_out - before.bytes_out - (returned[1] - returned[0])
        figures.held_bytes = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
        del loss

    def _timed(self, figures: Figures, offload: ActivationOffload | None) -> int:
        """One step; returns its highest device memory."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            self.step(offload)
            figures.step_ms_rounds.append((time.perf_counter() - start) * 1e3)
            return 0
        torch.cuda.reset_peak_memory_stats()
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start_event.record()
        self.step(offload)
        end_event.record()
        torch.cuda.synchronize()
        figures.step_ms_rounds.append(float(start_event.elapsed_time(end_event)))
        return torch.cuda.max_memory_allocated()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _same(outcome: tuple[Tensor, list[Tensor]], reference: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(outcome[0], reference[0]) and all(
        torch.equal(a, b) for a, b in zip(outcome[1], reference[1], strict=True)
    )


def run(
    shape: Shape,
    device: torch.device,
    *,
    num_rounds: int = 5,
    num_warmup: int = 4,
    num_steps: int = 2,
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[list[Figures]], object] = lambda figures: None,
) -> list[Figures]:
    """Check and measure every variant; one that fails says so in its `error` and is left out afterwards. `keep` is
    given all figures after each round."""
    variants(device, 0, names)  # so that a wrong name is said before the model is built
    if device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        with suppress(*_FAILURES):  # its variants say so
            importlib.import_module("transformer_engine.pytorch")  # while it can still choose the cuDNN that torch uses
    bench = Bench(shape, device)
    chosen = variants(device, bench.plain_peak_bytes(), names)
    figures = {each.name: Figures(each.name) for each in chosen}
    with deterministic():
        reference = bench.outcome()
        for variant in chosen:
            progress(f"checking {variant.name}")
            with _failing_into(figures[variant.name]):
                figures[variant.name].bit_identical = bench.check(variant, reference)
    for number in range(num_rounds):
        for variant in chosen:
            entry = figures[variant.name]
            if entry.error is None:
                progress(f"round {number + 1} of {num_rounds}: {variant.name}")
                with _failing_into(entry):
                    bench.measure(variant, entry, num_warmup, num_steps)
        _compare(list(figures.values()))
        keep(list(figures.values()))
    return list(figures.values())


_FAILURES = (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError, AssertionError)
"""Of other people's code, or for want of memory."""


@contextmanager
def _failing_into(figures: Figures) -> Iterator[None]:
    """A failure here is a result too."""
    try:
        yield
    except _FAILURES as error:
        figures.error = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        return
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()  # Transformer Engine's context leaves its own behind
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compare(figures: Sequence[Figures]) -> None:
    plain = figures[0]
    for each in figures[1:]:
        if plain.peak_allocated_bytes and each.peak_allocated_bytes:
            each.saved_bytes = plain.peak_allocated_bytes - each.peak_allocated_bytes
            if plain.held_bytes and each.away_bytes:
                each.effectiveness = (plain.held_bytes - each.held_bytes) / each.away_bytes


class Results(TypedDict):
    """What a bench writes: on what it ran, and its figures."""

    device: str
    versions: dict[str, str | None]
    shape: dict[str, object]
    variants: list[dict[str, object]]


def to_json(shape: Shape, figures: Sequence[Figures], device: torch.device) -> Results:
    """Everything, for machines."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    return {"device": name, "versions": versions, "shape": asdict(shape), "variants": [asdict(f) for f in figures]}
