"""Random training on the simulated device, against the same without offloading.

    python tests/unit/offload/random_cases.py --cases 10000

A case has a model of regions of several kinds (outputs saved by their own node, storages shared between regions,
views, memory freed by force), microbatches of random length in a random schedule (one after another, 1F1B, two
interleaved chunks, any order), passes without grad, graphs that are dropped, exceptions in forward, refused host
memory, and random caps, budgets and speeds. Gradients must be `torch.equal`, no hazard may be seen, and nothing may be
left.
"""

import argparse
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from simulated_backend import SimulatedBackend
from torch import Tensor

from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.selection import Selection

WIDTH = 6


class Work(torch.autograd.Function):
    """Takes time on the compute lane, forward and backward; otherwise a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: SimulatedBackend | None, ms: float) -> Tensor:
        ctx.backend, ctx.ms = backend, ms
        if backend is not None:
            backend.compute(ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.backend is not None:
            ctx.backend.compute(2 * ctx.ms)
        return grad, None, None


class PlantedError(Exception):
    """The planted exception of a forward."""


@dataclass
class Layer:
    weight: Tensor
    kinds: list[str]
    ms: list[float]


@dataclass
class Chunk:
    number: int
    layers: list[Layer]

    def forward(
        self, x: Tensor, engine: OffloadEngine | None, backend: SimulatedBackend | None, fail_at: int
    ) -> Tensor:
        for number, layer in enumerate(self.layers):
            for place, (kind, ms) in enumerate(zip(layer.kinds, layer.ms, strict=True)):
                if fail_at == 0:
                    raise PlantedError
                fail_at -= 1
                x = self._module(x, layer, kind, f"{self.number}.{number}.{place}", ms, engine, backend)
        return x

    def _module(
        self,
        x: Tensor,
        layer: Layer,
        kind: str,
        name: str,
        ms: float,
        engine: OffloadEngine | None,
        backend: SimulatedBackend | None,
    ) -> Tensor:
        x = Work.apply(x, backend, ms)
        if engine is None:
            return MODULES[kind](x, layer.weight)
        with engine.region(kind, name) as region:
            y = MODULES[kind](x, layer.weight)
        # `square` alone saves its input, which nobody else has: memory may go by force.
        return engine.commit(region, y, release=(x,) if kind == "square" else ())


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (x @ weight).repeat(1, 3).chunk(3, dim=1)
    return torch.softmax(q @ k.t(), -1) @ v * 0.1 + x


MODULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": lambda x, w: (x * 0.1).exp(),
    "square": lambda x, w: x.square() * 0.1,
    "linear": lambda x, w: (x @ w) * 0.3,
    "attention": attention,
    "gated": lambda x, w: torch.tanh(x[:, ::2]).repeat(1, 2) * torch.sigmoid(x @ w),
    "residual": lambda x, w: torch.tanh(x + (x @ w).square()),
    "norm": lambda x, w: torch.nn.functional.layer_norm(x, (WIDTH,)),
}


@dataclass
class Microbatch:
    x: Tensor
    chunk: Chunk
    fate: str  # train | no_grad | drop | fail
    fail_at: int


def order_of_work(chance: random.Random, count: int) -> list[tuple[str, int]]:
    """Forwards and backwards of `count` microbatches: each backward after its forward."""
    kind = chance.choice(["sequential", "pipeline", "any"])
    if kind == "sequential":
        return [(what, i) for i in range(count) for what in ("forward", "backward")]
    if kind == "pipeline":
        depth = chance.randint(1, count)
        work = [("forward", i) for i in range(depth)]
        for i in range(count):
            work.append(("backward", i))
            if depth + i < count:
                work.append(("forward", depth + i))
        return work
    work, waiting, started = [], [], 0
    while started < count or waiting:
        if started < count and (not waiting or chance.random() < 0.5):
            work.append(("forward", started))
            waiting.append(started)
            started += 1
        else:
            work.append(("backward", waiting.pop(chance.randrange(len(waiting)))))
    return work


def random_model(chance: random.Random) -> list[Chunk]:
    num_modules = chance.randint(1, 4)
    kinds = [chance.choice(list(MODULES)) for _ in range(num_modules)]
    chunks = []
    for number in range(chance.choice([1, 1, 2])):
        layers = []
        for _ in range(chance.randint(1, 3)):
            weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
            layers.append(Layer(weight, kinds, [chance.uniform(0.01, 1) for _ in kinds]))
        chunks.append(Chunk(number, layers))
    return chunks


def random_step(chance: random.Random, chunks: list[Chunk]) -> tuple[list[Microbatch], list[tuple[str, int]]]:
    count = chance.randint(1, 5)
    fates = chance.choices(["train", "no_grad", "drop", "fail"], [12, 1, 1, 1], k=count)
    batches = [
        Microbatch(torch.randn(chance.randint(1, 12), WIDTH), chance.choice(chunks), fate, chance.randint(0, 4))
        for fate in fates
    ]
    return batches, order_of_work(chance, count)


def run_step(
    batches: list[Microbatch],
    work: list[tuple[str, int]],
    engine: OffloadEngine | None,
    backend: SimulatedBackend | None,
) -> list[Tensor]:
    losses: dict[int, Tensor] = {}
    results = []
    for what, number in work:
        batch = batches[number]
        if what == "backward":
            if number in losses:
                loss = losses.pop(number)
                loss.backward()
                results.append(loss.detach())
            continue
        x = batch.x.clone().requires_grad_()
        fail_at = batch.fail_at if batch.fate == "fail" else -1
        try:
            with torch.set_grad_enabled(batch.fate != "no_grad"):
                loss = batch.chunk.forward(x, engine, backend, fail_at).square().mean()
        except PlantedError:
            continue
        if batch.fate in ("train", "fail"):
            losses[number] = loss
        del loss
    return results


def gradients(chunks: list[Chunk]) -> list[Tensor]:
    found = []
    for chunk in chunks:
        for layer in chunk.layers:
            found.append(torch.zeros(()) if layer.weight.grad is None else layer.weight.grad)
            layer.weight.grad = None
    return found


def random_engine(chance: random.Random, chunks: list[Chunk]) -> tuple[OffloadEngine, SimulatedBackend]:
    speed = 10 ** chance.uniform(1.5, 4.5)  # bytes/ms: a storage here has 24 to 864 bytes
    backend = SimulatedBackend(speed, speed * chance.uniform(0.5, 2), chance.choice([0.0, 0.3, 1e9]))
    if chance.random() < 0.1:
        backend.refuse_after_bytes = chance.choice([0, 4096])
    engine = OffloadEngine(
        backend,
        host_memory_budget_bytes=chance.choice([1 << 20, 1 << 20, 4096, 1024]),
        min_tensor_bytes=chance.choice([0, 0, 100]),
        max_inflight_bytes=chance.choice([0, 500, 1 << 20]),
        max_inflight_groups=chance.choice([None, None, 0, 1]),
        max_prefetch_bytes=chance.choice([0, 500, 1 << 20]),
        selection=Selection(
            fraction=chance.choice([1.0, 1.0, 0.5, 0.0]), kept_bytes_per_step=chance.choice([0, 0, 300])
        ),
    )
    engine.exclude(layer.weight for chunk in chunks for layer in chunk.layers)
    return engine, backend


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@dataclass
class Outcome:
    """What went wrong in a case, in words; and what it did, to see that cases are not empty."""

    faults: list[str]
    counts: Counter[str]


def run_case(seed: int) -> Outcome:
    """One case; the same seed gives the same case. The garbage collector is off meanwhile: memory must go without."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    chunks = random_model(chance)
    engine, backend = random_engine(chance, chunks)
    tell_steps = chance.random() < 0.5
    faults: list[str] = []
    with _no_collector():
        for _ in range(chance.randint(1, 4)):
            batches, work = random_step(chance, chunks)
            expected = run_step(batches, work, None, None) + gradients(chunks)
            got = run_step(batches, work, engine, backend) + gradients(chunks)
            if not all(same_bits(a, b) for a, b in zip(expected, got, strict=True)):
                faults.append("wrong tensor")
            if tell_steps:
                engine.end_step()
        stats = engine.stats()
    backend.synchronize()
    if stats.host_bytes or engine._slots or engine._copies.unused_bytes:
        faults.append("leak")
    faults += [f"hazard: {hazard}" for hazard in backend.hazards]
    engine.close()
    counts = Counter(
        offloaded=stats.bytes_out > 0,
        denied=stats.denied_bytes > 0,
        returned=stats.returned_bytes > 0,
        ineffective=stats.ineffective_bytes > 0,
        kept=stats.kept_bytes > 0,
        stalled=stats.stall_in_ms > 0,
    )
    return Outcome(faults, counts)


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    num_faulty = 0
    for seed in range(args.first_seed, args.first_seed + args.cases):
        outcome = run_case(seed)
        counts.update(outcome.counts)
        if outcome.faults:
            num_faulty += 1
            print(f"seed {seed}: {'; '.join(sorted(set(outcome.faults)))}")
    print(f"{args.cases} cases, {num_faulty} with a hazard, a leak or a wrong tensor")
    print("cases that: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 1 if num_faulty else 0


if __name__ == "__main__":
    sys.exit(main())
