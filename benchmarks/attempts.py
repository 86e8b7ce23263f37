"""Ways of this project and of TRL to do the same steps: each in a process of its own, with the highest memory of all.

Memory is the highest that NVML shows in use on the device, of all processes, less what was in use before; that of the
host is the system's, taken the same way.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
from common import HAS_GPU, environment, say

from nemo_rl_offload.runs.run_directory import ERROR_FILE

WARMUP_STEPS = 2
OUT_OF_MEMORY = "out of memory"
OUT_OF_MEMORY_WORDS = (OUT_OF_MEMORY, "out of device memory")
"""Of libraries, and of this project."""
KEPT_CHARACTERS = 20_000
"""Of what an attempt said last."""
POLL_S = 0.02


@dataclass(frozen=True)
class Ours:
    """One of this project's ways, as overrides of the exemplar."""

    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Theirs:
    """One of TRL's ways, as arguments of its configuration."""

    dtype: str
    uses_lora: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


class HighestMemory:
    """Asks the device and the host what is in use, many times a second, while the block runs."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._device = _device_memory() if HAS_GPU else None
        self._before = self._highest = self._used()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def bytes(self) -> dict[str, int]:
        """The highest over what was in use before the block."""
        names = ("peak_device_bytes", "peak_host_bytes")
        pairs = zip(names, self._before, self._highest, strict=True)
        return {name: highest - before for name, before, highest in pairs} | {"device_before_bytes": self._before[0]}

    def _used(self) -> tuple[int, int]:
        host = psutil.virtual_memory()
        return int(self._device().used) if self._device else 0, host.total - host.available

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            device, host = self._used()
            self._highest = max(self._highest[0], device), max(self._highest[1], host)


def add_card(parser: argparse.ArgumentParser) -> None:
    """The option that `measure_attempts` reads."""
    parser.add_argument(
        "--card-gib",
        type=float,
        help="of the device's memory for the attempts and their contexts; a process of its own takes the rest",
    )


@contextmanager
def smaller_card(card_gib: float | None) -> Iterator[None]:
    """A process takes what the device has beyond `card_gib`, by NVML's count, while the block runs."""
    if card_gib is None or not HAS_GPU:
        yield
        return
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(card_gib, ready), daemon=True)
    holder.start()
    while not ready.wait(1):
        assert holder.is_alive(), "the rest of the device could not be taken"
    try:
        yield
    finally:
        holder.terminate()
        holder.join()


def _hold(card_gib: float, ready: Any) -> None:
    """Take the memory until this process is ended, or its parent has."""
    import torch

    context = torch.empty(1, device="cuda")  # which takes memory itself
    memory = _device_memory()()
    excess = int(memory.total - memory.used - card_gib * 2**30)
    assert excess > 0, f"the device has no more than {card_gib} GiB"
    held = context.new_empty(excess, dtype=torch.uint8)
    ready.set()
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    del held


def _device_memory() -> Callable[[], Any]:
    """Asks NVML for the memory of the first visible device: it counts all of them, visible or not."""
    import pynvml

    pynvml.nvmlInit()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    by_place = first.isdecimal() or not first
    ask = pynvml.nvmlDeviceGetHandleByIndex if by_place else pynvml.nvmlDeviceGetHandleByUUID
    return partial(pynvml.nvmlDeviceGetMemoryInfo, ask(int(first or 0) if by_place else first))


def wait_for_device() -> None:
    """Nothing to wait for without one."""
    if HAS_GPU:
        import torch

        torch.cuda.synchronize()


def run_ours(algorithm: str, exemplar: Path, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """`nemo-rl-offload run`: what `metrics.jsonl` says of each phase, of steps after the first two."""
    command = [sys.executable, "-m", "nemo_rl_offload.cli", "run", algorithm, "--config", str(exemplar)]
    command += ["--run-dir", str(run_dir), "--format", "json", *overrides]
    begin = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall_s = time.time() - begin
    if done.returncode:
        if (log := run_dir / ERROR_FILE).exists():  # of which the command line tells one line
            sys.stderr.write(log.read_text(encoding="utf-8")[-KEPT_CHARACTERS:])
        raise SystemExit(f"the run ended with {done.returncode}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["prefix"] == "train"]
    steps = [record["metrics"] for record in records]
    steady = steps[WARMUP_STEPS:] or steps[-1:]
    kept = ("token_mult_prob_error", "tokens_per_s", "mfu", "loss")
    names = [name for name in steady[0] if name.startswith("timing/") or name in kept]
    return {
        "wall_s": wall_s,
        "until_first_step_s": records[0]["time"] - begin,
        "first_step_s": steps[0]["timing/step_s"],
        "medians": {name: statistics.median(step[name] for step in steady) for name in names},
        "steps": [{name: step.get(name) for name in names} for step in steps],
        "summary": {**json.loads(done.stdout), "run_dir": run_dir.name},
    }


def measure_attempt(
    script: str, name: str, attempt: Ours | Theirs, model: Path, options: argparse.Namespace, keys: Sequence[str]
) -> dict[str, Any]:
    """What `script` says of one attempt, in a process of its own that gets `keys` of the options, or how it ended
    without; with the highest memory while it ran."""
    with tempfile.TemporaryDirectory() as folder:
        own, inner = Path(folder) / "model", Path(folder) / "attempt.json"
        own.symlink_to(model.resolve())
        command = [sys.executable, script, "--out", str(options.out), "--attempt", name, "--model", str(own)]
        command += ["--inner", str(inner)]
        for key in keys:
            command += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
        command += ["--set", *options.set] if options.set else []
        with HighestMemory() as memory, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            last = ""
            for line in process.stderr:
                sys.stderr.write(line)
                last = (last + line)[-KEPT_CHARACTERS:]
        found = json.loads(inner.read_text()) if inner.exists() else None
    side = "ours" if isinstance(attempt, Ours) else "trl"
    about = {"name": name, "side": side, "memory": memory.bytes(), "error": None}
    if found:
        return {**about, **found}
    told = [line for line in last.splitlines() if line.strip()] or ["nothing was said"]
    of_memory = [line for line in told if any(words in line.lower() for words in OUT_OF_MEMORY_WORDS)]
    how = (
        {"error": OUT_OF_MEMORY, "said": " | ".join(line[:600] for line in of_memory[-2:])}
        if of_memory
        else {"error": told[-1][:300]}
    )
    return {**about, **how, "exit_code": process.returncode}


def measure_attempts(
    options: argparse.Namespace,
    path: Path,
    result: dict[str, Any],
    write_model: Callable[[Path], None],
    measure: Callable[[str, Path], dict[str, Any]],
) -> None:
    """Each attempt that the options name, one after another; the result is written after each."""
    options.out.mkdir(parents=True, exist_ok=True)
    result |= {"card_gib": options.card_gib, "attempts": []}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if not model.exists():
            say("writing a model")
            write_model(model)
        for name in options.attempt:
            say(f"attempt: {name}")
            with smaller_card(options.card_gib):
                result["attempts"].append(measure(name, model))
            result |= environment()  # after the first: to ask for the device takes some of its memory
            say(line_of(result["attempts"][-1]))
            path.write_text(json.dumps(result, indent=1) + "\n")


def line_of(attempt: dict[str, Any]) -> str:
    """For a person who waits."""
    if attempt["error"]:
        return f"{attempt['name']}: {attempt['error']}"
    seconds = {name[7:-2]: value for name, value in attempt["medians"].items() if name.startswith("timing/")}
    phases = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    peak_gib, host_gib = (attempt["memory"][f"peak_{where}_bytes"] / 2**30 for where in ("device", "host"))
    rate = f"{attempt['medians']['tokens_per_s']:,.0f} tokens/s"
    return f"{attempt['name']}: {phases} s; {rate}; device {peak_gib:.1f} GiB, host {host_gib:.1f} GiB"
