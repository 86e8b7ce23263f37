"""What it costs that something waits in host memory between its uses.

    python benchmarks/residency.py --part optimizer --out benchmarks/results/DEVICE
    python benchmarks/residency.py --part phase --out benchmarks/results/DEVICE

Part `optimizer`: an optimizer step of Qwen2.5-1.5B's parameters (bfloat16 weights, float32 gradients, main weights and
Adam's state) with everything on the device, and with main weights and state on the host. The bound is 1.15 times what
12 bytes a parameter take each way, at the link's rate with both directions busy, which is measured beside it. Weights
and state must be equal bit for bit.

Part `phase`: a training phase of 64 microbatches of that model with its optimizer step, state on the device and on the
host, each in a process of its own. How much the longer step of the optimizer costs depends on
how long the microbatches are. The bound is 1/0.97 of the time on the device.

On a CPU a small case shows that it works, and its figures mean nothing.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import HAS_GPU, environment, prepare_process, say
from constants import OPTIMIZERS
from torch import Tensor

from nemo_rl_offload.bench.report import write_json
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.base import Backend
from nemo_rl_offload.offload.backends.cuda import MAX_PIECE_BYTES, CudaBackend
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.policy.residency.streamed_optimizer import BUCKET_BYTES, Parameter, StreamedOptimizer

DEVICE = "cuda" if HAS_GPU else "cpu"
BYTES_PER_PARAMETER = 12
BOUND = 1.15
NUM_STEPS = 9
NUM_MICROBATCHES = 64
PHASE_BOUND = 1 / 0.97
LENGTHS = (1536, 4096, 16_384) if HAS_GPU else (16, 48)
"""Tokens of each microbatch in the part `phase`."""
NUM_PHASES = 2
PLACES = OPTIMIZERS[:2]
LINK_BYTES = 4 << 30 if HAS_GPU else 1 << 22
"""Moved each way in a measurement of the link."""


def shapes(num_layers: int, hidden: int, ffn: int, key_values: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Of a dense model's weights as Megatron-Core has them, embeddings tied."""
    attention = [(hidden + 2 * key_values, hidden), (hidden + 2 * key_values,), (hidden, hidden)]
    layer = [*attention, (2 * ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *(layer * num_layers), (hidden,)]


SHAPES = shapes(28, 1536, 8960, 256, 151_936) if HAS_GPU else shapes(2, 64, 128, 16, 1000)


def make_backend() -> Backend:
    """As a worker's."""
    return CudaBackend(max_piece_out_bytes=MAX_PIECE_BYTES) if HAS_GPU else HostBackend()


def elapsed_ms(work: Callable[[], object]) -> float:
    """Of work that has ended when the device is synchronized."""
    _synchronize()
    start = time.perf_counter()
    work()
    _synchronize()
    return (time.perf_counter() - start) * 1e3


def _synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def make_optimizer(main_weights: list[Tensor]) -> Any:
    """Transformer Engine's Adam where it is installed, as Megatron-Core does, else torch's."""
    if HAS_GPU:
        try:
            from transformer_engine.pytorch.optimizers import FusedAdam

            return FusedAdam(main_weights, lr=1e-3, weight_decay=0.01, adam_w_mode=True)
        except ImportError:
            pass
    return torch.optim.AdamW(main_weights, lr=1e-3, weight_decay=0.01)


class Training:
    """Weights, gradients and an optimizer, which take steps on the device or with the optimizer on the host."""

    def __init__(self, arena: HostArena | None, bucket_bytes: int) -> None:
        numbers = torch.Generator(DEVICE).manual_seed(0)
        self.models = [torch.randn(shape, generator=numbers, device=DEVICE).bfloat16() for shape in SHAPES]
        self.main_weights = [model.float() for model in self.models]
        for weight in self.main_weights:
            weight.grad = torch.randn(weight.shape, generator=numbers, device=DEVICE)
        self.optimizer = make_optimizer(self.main_weights)
        self.is_on_host = arena is not None
        if arena is not None:
            parameters = [
                Parameter(weight, 0, partial(model.view, -1))
                for weight, model in zip(self.main_weights, self.models, strict=True)
            ]
            StreamedOptimizer(self.optimizer, arena, parameters, bucket_bytes=bucket_bytes)

    @torch.no_grad()
    def step(self) -> None:
        """With the copy of the main weights to the model's."""
        self.optimizer.step()
        if not self.is_on_host:
            torch._foreach_copy_(self.models, self.main_weights)

    def digest(self) -> str:
        """Of weights and state, bit for bit."""
        found = hashlib.sha256()
        for model, main in zip(self.models, self.main_weights, strict=True):
            state = self.optimizer.state[main]
            for tensor in (model, main, state["exp_avg"], state["exp_avg_sq"]):
                found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        return found.hexdigest()


def measure_steps(arena: HostArena | None, bucket_bytes: int) -> dict[str, Any]:
    """Times, memory and bits of one place."""
    training = Training(arena, bucket_bytes)
    training.step()
    _synchronize()
    held_bytes = torch.cuda.memory_allocated() if HAS_GPU else None
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    samples = [elapsed_ms(training.step) for _ in range(NUM_STEPS)]
    return {
        "step_ms": statistics.median(samples),
        "step_ms_samples": samples,
        "held_bytes": held_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated() if HAS_GPU else None,
        "host_bytes": 0 if arena is None else arena.held_bytes,
        "digest": training.digest(),
    }


def link_bytes_per_ms(backend: Backend, arena: HostArena) -> list[float]:
    """Bytes/ms of each direction while both are busy, in blocks of a bucket's size, by the backend's own copies."""
    size = min(BUCKET_BYTES, LINK_BYTES // 4)
    blocks = [arena.hold(size) for _ in range(4)]
    assert None not in blocks, "no room for the link's measurement"
    sources = [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]

    def both_ways() -> None:
        kept = []
        for number in range(LINK_BYTES // size):
            out, back = blocks[number % 2], blocks[2 + number % 2]
            assert out is not None
            assert back is not None
            tensors, arrival = backend.copy_in([back], [])
            departure = backend.copy_out([(sources[number % 2].untyped_storage(), out)])
            kept.append((tensors, arrival, departure))
            if len(kept) > 2:
                for event in kept.pop(0)[1:]:
                    backend.compute_wait(event)
        backend.synchronize()

    both_ways()
    rates = [LINK_BYTES // size * size / elapsed_ms(both_ways) for _ in range(NUM_STEPS)]
    for block in blocks:
        assert block is not None
        arena.release(block)
    return rates


def optimizer_part(bucket_bytes: int) -> dict[str, Any]:
    """The step on the device, on the host, and the link's rate."""
    num_parameters = sum(torch.Size(shape).numel() for shape in SHAPES)
    arena = HostArena(make_backend(), BYTES_PER_PARAMETER * num_parameters + (4 << 30))
    rates = link_bytes_per_ms(arena.backend, arena)
    say(f"link, both directions busy: {statistics.median(rates) / 1e6:.1f} GB/s each way")
    on_device = measure_steps(None, bucket_bytes)
    say(f"on the device: {on_device['step_ms']:.1f} ms")
    on_host = measure_steps(arena, bucket_bytes)
    rates += link_bytes_per_ms(arena.backend, arena)  # before and after: a link that slowed down meanwhile shows
    least_ms = BYTES_PER_PARAMETER * num_parameters / statistics.median(rates)
    say(f"on the host: {on_host['step_ms']:.1f} ms, {on_host['step_ms'] / least_ms:.3f} of what the link takes")
    return {
        **environment(),
        "num_parameters": num_parameters,
        "bucket_bytes": bucket_bytes,
        "link_bytes_per_ms_each_way": statistics.median(rates),
        "link_bytes_per_ms_samples": rates,
        "on_device": on_device,
        "on_host": on_host,
        "least_ms": least_ms,
        "ratio": on_host["step_ms"] / least_ms,
        "bound": BOUND,
        "is_within_bound": on_host["step_ms"] <= BOUND * least_ms,
        "same_bits": on_host["digest"] == on_device["digest"],
    }


def measure_phases(place: str, impl: str) -> None:
    """In a process of its own: print one line of JSON for each length."""
    prepare_process()
    from workload import Shape, Workload, random_batch

    shape = Shape(
        28 if HAS_GPU else 2,
        max(LENGTHS),
        NUM_MICROBATCHES,
        algorithm="sft",
        transformer_impl=impl,
        vocabulary_size=151_936 if HAS_GPU else 256,
        model="Qwen/Qwen2.5-1.5B",
        optimizer=place,
    )
    workload = Workload(shape)
    workload.step(random_batch([LENGTHS[0]] * 2, workload.vocabulary_size, 2))
    for length in LENGTHS:
        batch = random_batch([length] * NUM_MICROBATCHES, workload.vocabulary_size, 3)
        workload.step({name: tensor[:2] for name, tensor in batch.items()})
        samples = [elapsed_ms(partial(workload.step, batch)) for _ in range(NUM_PHASES)]
        alone = [elapsed_ms(workload.model.optimizer.step) for _ in range(NUM_PHASES)]
        found = {"ms": min(samples), "samples": samples, "optimizer_ms": min(alone)}
        print(json.dumps({"place": place, "length": length, **found}), flush=True)


def phase_part(impl: str) -> dict[str, Any]:
    """Every length, in every place in turn."""
    found: list[dict[str, Any]] = []
    for place in PLACES:
        command = [sys.executable, __file__, "--out", ".", "--part", "phase", "--impl", impl, "--place", place]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        say("\n".join(f"{each['place']}, {each['length']}: {each['ms']:.0f} ms" for each in found[-len(LENGTHS) :]))
    rows = []
    for length in LENGTHS:
        on_device, on_host = (
            [each for each in found if each["length"] == length and each["place"] == place] for place in OPTIMIZERS[:2]
        )
        ratio = min(each["ms"] for each in on_host) / min(each["ms"] for each in on_device)
        rows.append({"length": length, "ratio": ratio, "bound": PHASE_BOUND, "is_within_bound": ratio <= PHASE_BOUND})
    return {**environment(), "transformer_impl": impl, "num_microbatches": NUM_MICROBATCHES, "lengths": rows} | {
        "measured": found
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("optimizer", "phase"), default="optimizer")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch", help="layers of `phase`")
    parser.add_argument("--place", choices=OPTIMIZERS, help=argparse.SUPPRESS)
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_BYTES / (1 << 20))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    if options.place:
        measure_phases(options.place, options.impl)
        return 0
    is_phase = options.part == "phase"
    data = phase_part(options.impl) if is_phase else optimizer_part(int(options.bucket_mib * (1 << 20)))
    write_json(options.out / f"residency_{options.part}.json", data)
    print(json.dumps({key: value for key, value in data.items() if not key.endswith("samples")}, indent=1))
    return 0 if is_phase or data["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
