"""E2: memory against step time of SFT and GRPO training steps on layers of Qwen2.5-7B, ours beside what else one uses.

    python benchmarks/dense_rl.py --out benchmarks/results/DEVICE --sequence 8192
    python benchmarks/dense_rl.py --out benchmarks/results/DEVICE --sequence 8192 --impl transformer_engine

All variants share one process, the weights with their gradients and Adam's state, and the inputs. First, on short
sequences, losses and gradients of each variant are compared bit by bit with those without it, under deterministic
algorithms; then variants are timed in turn, round by round. The result is written after each of them.

Megatron-Core's engine needs Transformer Engine's older offloading code (NVTE_CPU_OFFLOAD_V1), which a process chooses
once; so Transformer Engine's own offloading is measured by a further command (`--variant "Transformer Engine"`), beside
no offloading and ours again.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from common import (
    HAS_GPU,
    Sample,
    environment,
    give_back_memory,
    in_turn,
    medians,
    prepare_process,
    say,
    timed,
)
from frontier import figures
from planned_choices import named_choices

from nemo_rl_offload.bench.process import deterministic

NUM_LAYERS = {4096: 16, 8192: 14, 16384: 10, 32768: 6, 65536: 4}
"""As many as leave room without offloading on a device of 139 GiB, with a reserve, by the planner's word."""
CHECKED_SEQUENCE = 1024
TRANSFORMER_ENGINES = "Transformer Engine"
KINDS = ("nothing", "ours", "recompute", "megatron", "transformer_engine", "hooks")
"""In turn. The slowest, whose figures are farthest from a bar, come last, where a time limit cuts."""
KEEP_PINNED = ("ours", "transformer_engine", "hooks")
"""Kinds whose variants go on with the pinned memory of the one before; of Megatron-Core's each is to show its own."""


def plain_peak(workload: Any) -> tuple[int, int]:
    """Device memory between steps, and at the peak of a step without anything; the device's own where that is not
    enough. On a CPU, numbers that stand in."""
    from variants import attempt, nothing

    if not HAS_GPU:
        return 0, 1 << 20
    import torch

    peaks: list[int] = []

    def run() -> None:
        with nothing().enter(workload):
            peaks.extend(int(timed(workload.step)["peak_allocated_bytes"]) for _ in range(2))

    failed = attempt(run)
    give_back_memory()
    static_bytes = torch.cuda.memory_allocated()
    return static_bytes, torch.cuda.get_device_properties(0).total_memory if failed else peaks[-1]


def check(workload: Any, found: list[Any], entries: dict[str, Any]) -> None:
    """Compare two steps of each variant with one without anything; write `bit_identical`, or `check_error`: some
    kernels have no reproducible form, which is no reason not to measure.

    What an engine moved is written too: bits that stayed because nothing moved would say nothing.
    """
    from variants import attempt
    from workload import random_batch, same

    shape = workload.shape
    lengths = [min(shape.sequence, CHECKED_SEQUENCE)] * shape.num_microbatches
    reference: list[Any] = []

    def compare(variant: Any, entry: dict[str, Any]) -> None:
        with variant.enter(workload) as probe:
            if not reference:
                assert variant.kind == "nothing", "there is nothing to compare with"
                reference.extend(workload.outcome(batch))
            entry["bit_identical"] = all(same(workload.outcome(batch), reference) for _ in range(2))
            entry["checked_bytes_out"] = probe().get("bytes_out")

    with deterministic():
        workload.forget_trees()
        batch = workload.complete(random_batch(lengths, workload.vocabulary_size, 2))
        for variant in found:
            say(f"checking {variant.name}")
            entry = entries[variant.name]
            entry["check_error"] = attempt(partial(compare, variant, entry))
            give_back_memory()
        workload.forget_trees()


def measure(workload: Any, variant: Any, entry: dict[str, Any]) -> None:
    """Some steps after some others; adds to the entry's samples."""
    with variant.enter(workload) as probe:
        for _ in range(variant.num_warmup):
            workload.step()
        for _ in range(variant.num_steps):
            before = probe()
            sample = timed(workload.step)
            entry["samples"].append(sample | counted(before, probe()))
    entry["medians"] = medians(entry["samples"])


def counted(before: Sample, after: Sample) -> Sample:
    """An engine's figures of one step: totals become differences; memory on the host stays what it is."""
    return {key: after[key] if key.endswith("_bytes") else after[key] - before[key] for key in after}


def run(options: argparse.Namespace) -> int:
    from variants import attempt, every_variant, ours_planned
    from workload import Shape, Workload

    from nemo_rl_offload.bench.report import write_json

    sequence = options.sequence if HAS_GPU else 48
    num_layers = options.layers or (NUM_LAYERS[sequence] if HAS_GPU else 3)
    shape = Shape(num_layers, sequence, options.microbatches, options.algorithm, options.impl, options.vocabulary)
    workload = Workload(shape)
    static_bytes, peak_bytes = plain_peak(workload)
    host_bytes = options.host_memory << 30 if options.host_memory else psutil.virtual_memory().available
    found = every_variant(workload, static_bytes, peak_bytes, host_bytes)
    found = [each for each in found if is_wanted(each, options.variant)]
    found += [ours_planned(*each) for each in (named_choices(options.planned) if options.planned else ())]
    found.sort(key=lambda each: KINDS.index(each.kind))
    entries = {each.name: each.entry() for each in found}
    data = {
        "experiment": "E2",
        **environment(),
        **workload.describe(),
        "static_bytes": static_bytes,
        "optimizer_ms": workload.optimizer_ms(),
        "variants": list(entries.values()),
    }
    suffix = "_te_offload" if wants_transformer_engines(options.variant) else ""
    path = options.out / f"dense_{options.algorithm}_{sequence}_{options.impl}{suffix}.json"
    check(workload, found, entries)
    by_name = {each.name: each for each in found}
    kind = None
    for number, name in in_turn(list(entries), options.rounds):
        entry, variant = entries[name], by_name[name]
        if entry["error"] is None:
            say(f"round {number + 1} of {options.rounds}: {name}")
            give_back_memory(keeps_pinned=variant.kind == kind and kind in KEEP_PINNED)
            kind = variant.kind
            entry["error"] = attempt(partial(measure, workload, variant, entry))
        data["figures"] = figures(data["variants"])
        write_json(path, data)
    return report(data)


def is_wanted(variant: Any, names: list[str] | None) -> bool:
    """No offloading always takes part; Transformer Engine's own only where it is named, beside all of ours unless some
    are named."""
    if variant.kind == "nothing":
        return True
    is_named = names is not None and any(variant.name.startswith(name) for name in names)
    if wants_transformer_engines(names):
        names_ours = any(name.startswith("ours") for name in names or ())
        return is_named or (variant.kind == "ours" and not names_ours)
    return is_named or (names is None and variant.kind != "transformer_engine")


def wants_transformer_engines(names: list[str] | None) -> bool:
    return any(name.startswith(TRANSFORMER_ENGINES) for name in names or ())


def report(data: dict[str, Any]) -> int:
    """Print one line a variant; returns 1 where one of ours failed or changed a bit."""
    for entry in data["variants"]:
        middle = entry.get("medians", {})
        numbers = f"{middle.get('ms', 0):9.1f} ms  {middle.get('peak_allocated_bytes', 0) / 2**30:7.2f} GiB"
        print(f"{entry['name']:32} {entry['error'] or numbers}  bits: {entry['check_error'] or entry['bit_identical']}")
    ours = [entry for entry in data["variants"] if entry["kind"] == "ours"]
    return (
        0 if all(entry["bit_identical"] and entry["checked_bytes_out"] and not entry["error"] for entry in ours) else 1
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sequence", type=int, default=8192, choices=sorted(NUM_LAYERS), help="tokens")
    parser.add_argument("--algorithm", choices=("sft", "grpo"), default="grpo")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    parser.add_argument("--layers", type=int, metavar="N", help="instead of as many as leave room")
    parser.add_argument("--microbatches", type=int, default=2, metavar="N", help="per step")
    parser.add_argument("--vocabulary", type=int, default=8192, metavar="N")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument(
        "--host-memory", type=int, metavar="GIB", help="for those that move every tensor, instead of what is available"
    )
    parser.add_argument(
        "--variant", action="append", metavar="NAME", help="only those whose names begin so; again for more"
    )
    parser.add_argument(
        "--planned", type=Path, metavar="RESULT", help="also what `plan` chooses for the peaks of recomputation in it"
    )
    options = parser.parse_args()
    # Read when Transformer Engine is imported: whatever imports it is imported later.
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "0" if wants_transformer_engines(options.variant) else "1"
    prepare_process()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
