"""Interrupts a step of training with offloading anywhere, thousands of times, and looks at what is left.

    python tests/attacks/interrupts.py [--cases N] [--seed S] [--models plain,simulated,...] [--every]

Three ways to interrupt, in turn:
- at a bytecode instruction of this project's code, whichever it is: also where CPython never looks for signals
  (`sys.monitoring` raises KeyboardInterrupt or MemoryError there);
- again, at an instruction of what comes next, which is where the engine mends itself;
- by a signal, once or in a storm, whenever it comes.

`--every` takes each instruction of a step once instead of a sample. What must hold afterwards: a graph that was alive
has its backward, the next step's results are `torch.equal` to those without offloading, every block of the arena is
free, the arena has not grown, no hooks are left, and another thread gets the lock.
"""

import argparse
import dis
import faulthandler
import gc
import inspect
import random
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("unit/offload", "functional", "..")]

from patience import PATIENCE_S
from simulated_backend import SimulatedBackend

from nemo_rl_offload.adapters.torch_modules import offload_activations
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.memory_budget import MemoryBudgetController

PACKAGE = str(Path(inspect.getfile(OffloadEngine)).parents[1])
TOOL = 4
POP_EXCEPT = dis.opmap["POP_EXCEPT"]
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Interrupter:
    """Raises `error` at the `at`-th instruction of this project's code from `arm` on, in whichever thread.

    Not at the end of an `except`: there nothing can be raised but by this, and Python then takes the exception for
    being handled for ever.
    """

    def __init__(self) -> None:
        self.count = 0
        self.at = -1
        self.error: type[BaseException] = KeyboardInterrupt

    def arm(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.count, self.at, self.error = 0, at, error
        sys.monitoring.set_events(TOOL, 0)
        for code in project_code():
            sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.INSTRUCTION)

    def disarm(self) -> None:
        self.at = -1

    def remove(self) -> None:
        """Nothing is called any more until it is armed."""
        for code in _codes:
            sys.monitoring.set_local_events(TOOL, code, 0)

    def __call__(self, code: types.CodeType, offset: int) -> None:
        if self.at >= 0 and code.co_code[offset] != POP_EXCEPT:
            self.count += 1
            if self.count == self.at:
                raise self.error(f"{code.co_qualname}:{offset}")


_codes: list[types.CodeType] = []


def project_code() -> list[types.CodeType]:
    """All code of the engine and its adapters that is loaded."""
    if not _codes:
        gc.collect()
        found = {each.__code__ for each in gc.get_objects() if type(each) is types.FunctionType}
        pending = [code for code in found if code.co_filename.startswith(PACKAGE)]
        while pending:
            code = pending.pop()
            if any(part in code.co_filename for part in ("/offload/", "/adapters/", "/paged_stash/")):
                _codes.append(code)
            pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return _codes


@contextmanager
def monitoring() -> Iterator[Interrupter]:
    """An interrupter that is in effect."""
    interrupter = Interrupter()
    sys.monitoring.use_tool_id(TOOL, "interrupts")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.INSTRUCTION, interrupter)
    try:
        yield interrupter
    finally:
        interrupter.remove()
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.INSTRUCTION, None)
        sys.monitoring.free_tool_id(TOOL)
        _codes.clear()


@dataclass
class Setup:
    """Something that trains: `forward` makes a loss, `engine` is what offloads, `parameters` get gradients."""

    forward: Callable[[int], Tensor]
    parameters: list[Tensor]
    engine: OffloadEngine | None
    close: Callable[[], object] = field(default=lambda: None)
    hazards: list[str] = field(default_factory=list)
    limit_bytes: int = 0

    def backward(self, loss: Tensor) -> list[Tensor]:
        """The loss and the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in self.parameters if each.grad is not None)]

    def step(self, number: int) -> list[Tensor]:
        """One microbatch."""
        return self.backward(self.forward(number))


class Block(nn.Module):
    """Saves its own output, views, and what the next module saves too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(hidden[:, :16] * torch.sigmoid(hidden))


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        return x if depth == 0 else torch.tanh(self.inner(self(x, depth - 1)))


def batch(number: int) -> Tensor:
    return torch.randn(3 + number % 2, 8, generator=torch.Generator().manual_seed(number))


def plain_model(modules: list[str], offloaded: bool) -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Recursive())
    active = offload_activations(model, modules, min_tensor_bytes=1) if offloaded else None

    def forward(number: int) -> Tensor:
        with torch.enable_grad():
            return model(batch(number)).square().mean()

    return Setup(forward, [*model.parameters()], active and active._engine, active.close if active else lambda: None)


def transformers_model(offloaded: bool) -> Setup:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=16, num_key_value_heads=1, max_position_embeddings=16, **sizes)
    model = LlamaForCausalLM(config)
    names = ["attn_norm", "core_attn", "attn_proj", "mlp_act"]
    active = offload_activations(model, names, min_tensor_bytes=1) if offloaded else None

    def forward(number: int) -> Tensor:
        return model(torch.arange(8).view(1, 8) + number % 2, use_cache=False).logits.square().mean()

    return Setup(forward, [*model.parameters()], active and active._engine, active.close if active else lambda: None)


class Work(torch.autograd.Function):
    """Takes a millisecond of the simulated device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: SimulatedBackend | None) -> Tensor:
        ctx.backend = backend
        if backend is not None:
            backend.compute(1.0)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.backend is not None:
            ctx.backend.compute(2.0)
        return grad, None


def simulated_model(offloaded: bool, auto: bool = False) -> Setup:
    """Regions on a device with a clock: reloads come ahead of time, and copies lag."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    backend = SimulatedBackend(60.0, 50.0, 0.3) if offloaded else None
    engine = None
    if backend is not None:
        budget = MemoryBudgetController(700, 1 << 20) if auto else None
        settings = {"min_tensor_bytes": 0, "max_inflight_bytes": 300, "max_prefetch_bytes": 400}
        engine = OffloadEngine(backend, host_memory_budget_bytes=1 << 20, auto=budget, **settings)
        engine.exclude(weights)

    def forward(number: int) -> Tensor:
        x = batch(number).requires_grad_()
        for layer, weight in enumerate(weights):
            x = Work.apply(x, backend)
            if engine is None:
                x = torch.tanh(x @ weight).exp() + x
                continue
            with engine.region("mlp", layer) as region:
                x = torch.tanh(x @ weight).exp() + x
            x = engine.commit(region, x)
        return x.square().mean()

    hazards = [] if backend is None else backend.hazards
    return Setup(forward, weights, engine, engine.close if engine else lambda: None, hazards)


def megatron_model(offloaded: bool) -> Setup:
    """Layers that open regions by Megatron's contract."""
    from nemo_rl_offload.adapters.megatron_core.interface import OffloadInterface, use_engine
    from nemo_rl_offload.offload import HostBackend

    torch.manual_seed(0)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    engine = None
    if offloaded:
        engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20, min_tensor_bytes=0, steps_are_told=True)
        engine.exclude(weights)
        use_engine(engine, ["mlp_act"])

    def forward(number: int) -> Tensor:
        if offloaded:
            OffloadInterface.init_chunk_handler(0, None, None)
        x = batch(number).requires_grad_()
        for weight in weights:
            if not offloaded:
                x = torch.tanh(x @ weight).exp() + x
                continue
            manager = OffloadInterface(True, x, "mlp_act")
            with manager as inner:
                inner = torch.tanh(inner @ weight).exp() + inner
            x = manager.group_offload(inner)
        return x.square().mean()

    def close() -> None:
        use_engine(None)
        if engine is not None:
            engine.close()

    return Setup(forward, weights, engine, close)


MODELS: dict[str, Callable[[bool], Setup]] = {
    "blocks": lambda offloaded: plain_model(["0", "1.*", "2"], offloaded),
    "nested": lambda offloaded: plain_model(["0", "0.up", "1", "2.inner"], offloaded),
    "simulated": simulated_model,
    "auto": lambda offloaded: simulated_model(offloaded, auto=True),
    "megatron": megatron_model,
    "transformers": transformers_model,
}


def is_free(lock: Any) -> bool:
    """Whether another thread gets the lock."""
    got = []

    def take() -> None:
        if lock.acquire(timeout=PATIENCE_S / 10):
            got.append(True)
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(got)


def left_behind(setup: Setup) -> list[str]:
    """What an engine without a graph still holds."""
    engine = setup.engine
    assert engine is not None
    gc.collect()
    stats = engine.stats()
    arena, copies = engine._arena, engine._copies
    free = sum(size for size, _ in arena._free._by_start.values())
    waiting = sum(block.reserved_bytes for blocks in arena._waiting.values() for block in blocks)
    found = {
        "host bytes": stats.host_bytes,
        "slots": len(engine._slots) + len(engine._alive),
        "blocks": arena.capacity_bytes - free - waiting,
        "growth": arena.capacity_bytes > setup.limit_bytes,
        "reloaded bytes": copies.unused_bytes,
        "resident bytes": copies.resident_bytes,
        "hooks": top_hooks(True) is not None,
        "unfinished": engine._changes.are_unfinished,
        "hazards": setup.hazards,
    }
    return [f"{name}: {value}" for name, value in found.items() if value]


class Attack:
    """One model, attacked again and again."""

    def __init__(self, name: str, chance: random.Random, interrupter: Interrupter) -> None:
        self.name, self._chance, self._interrupter = name, chance, interrupter
        plain = MODELS[name](False)
        self._expected = [plain.step(number) for number in range(2)]
        plain.close()
        self._setup = MODELS[name](True)
        for number in (0, 1, 0, 1, 0):
            self._setup.step(number)
        pending = [self._setup.forward(number) for number in (0, 1, 0)]
        assert self._setup.engine is not None
        self._setup.limit_bytes = self._setup.engine.stats().host_capacity_bytes
        del pending
        assert self._setup.engine.stats().bytes_out > 0
        self.num_instructions = self._count()
        self.outcomes: Counter[str] = Counter()

    def _count(self) -> int:
        self._interrupter.arm(1 << 40)
        self._setup.step(1)
        self._interrupter.disarm()
        return self._interrupter.count

    def close(self) -> None:
        self._setup.close()

    def at_instruction(self, at: int) -> list[str]:
        """Interrupt at an instruction of a step, and sometimes at one of what comes next."""
        pending = self._setup.forward(0) if self._chance.random() < 0.5 else None
        error = self._chance.choice([KeyboardInterrupt, KeyboardInterrupt, MemoryError])
        interrupted = self._interrupted(at, error)
        self.outcomes["interrupted" if interrupted else "not reached"] += 1
        if interrupted and self._chance.random() < 0.5 and self._interrupted(self._chance.randint(1, 400), error):
            self.outcomes["again"] += 1
        return [f"{self.name} at {at}: {fault}" for fault in self._faults(pending, False)]

    def _interrupted(self, at: int, error: type[BaseException]) -> bool:
        self._interrupter.arm(at, error)
        try:
            self._setup.step(1)
        except error:
            return True
        finally:
            self._interrupter.disarm()
        if self._interrupter.count >= at:
            self.outcomes["swallowed"] += 1
        return False

    def by_signal(self, is_storm: bool) -> list[str]:
        """Interrupt by signals, whenever they come."""
        self._interrupter.remove()
        pending = self._setup.forward(0) if self._chance.random() < 0.5 else None
        code = Setup.step.__code__
        is_looking = False

        def interrupt(number: int, frame: types.FrameType | None) -> None:
            nonlocal is_looking
            if is_looking:  # the next signal came before this one was dealt with
                return
            is_looking = True
            while frame is not None and frame.f_code is not code:
                frame = frame.f_back
            is_looking = False
            if frame is not None:
                raise KeyboardInterrupt

        former = signal.signal(signal.SIGALRM, interrupt)
        delay = self._chance.uniform(1e-5, self._seconds())
        try:
            signal.setitimer(signal.ITIMER_REAL, delay, self._chance.uniform(2e-5, 5e-4) if is_storm else 0)
            for _ in range(3):
                self._setup.step(1)
        except KeyboardInterrupt:
            self.outcomes["storms" if is_storm else "signals"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
        return [f"{self.name} by a signal after {delay:.6f} s: {fault}" for fault in self._faults(pending, True)]

    def _seconds(self) -> float:
        begin = time.perf_counter()
        self._setup.step(1)
        return (time.perf_counter() - begin) * 1.2

    def _faults(self, pending: Tensor | None, by_signal: bool) -> list[str]:
        faults = []
        setup = self._setup
        try:
            assert setup.engine is not None
            if by_signal and not is_free(setup.engine._changes.lock):
                faults.append("the lock is held")
            if pending is not None and not self._same(setup.backward(pending), 0):
                faults.append("a graph that was alive has wrong results")
            del pending
            for number in (0, 1):
                if not self._same(setup.step(number), number):
                    faults.append("wrong results")
            faults += left_behind(setup)
            if not is_free(setup.engine._changes.lock):
                faults.append("the lock is held still")
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is a fault
            faults.append(f"{type(error).__name__}: {error}")
        return faults

    def _same(self, got: list[Tensor], number: int) -> bool:
        expected = self._expected[number]
        return len(got) == len(expected) and all(map(torch.equal, got, expected))


def attack(name: str, cases: int, seed: int, every: bool = False) -> tuple[list[str], Counter[str]]:
    """What was found wrong, and how often something was done."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    chance = random.Random(seed)
    faults: list[str] = []
    with monitoring() as interrupter:
        target = Attack(name, chance, interrupter)
        places = range(1, target.num_instructions + 1) if every else None
        for case in range(len(places) if places else cases):
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
            if places or case % 4 < 2:
                faults += target.at_instruction(places[case] if places else chance.randint(1, target.num_instructions))
            else:
                faults += target.by_signal(is_storm=case % 4 == 3)
            if len(faults) > 20:
                break
        target.close()
        target.outcomes["instructions"] = target.num_instructions
    faulthandler.cancel_dump_traceback_later()
    return faults, target.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=400, help="of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--every", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_faults, outcomes = 0, Counter[str]()
    for name in args.models.split(","):
        faults, counts = attack(name, args.cases, args.seed, args.every)
        for fault in faults:
            print(fault, flush=True)
        num_faults += len(faults)
        outcomes += counts
    print(f"{num_faults} faults; " + ", ".join(f"{what} {count}" for what, count in sorted(outcomes.items())))
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
