"""E3: 300 GRPO steps whose microbatch counts and packed lengths differ, as rollouts make them.

    python benchmarks/rl_reality.py --out benchmarks/results/DEVICE --impl transformer_engine

Every step draws some responses of long-tailed lengths, packs them into microbatches, computes log-probabilities without
gradients, and trains. Without offloading, with ours, and with Megatron-Core's engine (Transformer Engine only), each on
the same steps. Before that, each takes the largest of the steps alone, over and over: what it needs then is what it may
need in the whole run. First the losses and gradients of three of the steps are compared bit by bit.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common import HAS_GPU, Sample, environment, give_back_memory, prepare_process, say, timed
from rollouts import Rollout, draw, figures, largest

from nemo_rl_offload.bench.process import deterministic

NUM_CHECKED = 3
NUM_ALONE = 4
"""Steps of the largest kind; the last two count."""
WRITE_EVERY = 25


def run_step(workload: Any, rollout: Rollout, seed: int) -> Sample:
    """Score and train on one rollout; the sample is of the training step."""
    batch = make_batch(workload, rollout, seed)
    return timed(lambda: workload.step(batch, rollout.split))


def make_batch(workload: Any, rollout: Rollout, seed: int) -> Any:
    from workload import random_batch

    batch = random_batch(rollout.lengths, workload.vocabulary_size, seed)
    return workload.complete(batch, rollout.split)


def check(workload: Any, variant: Any, entry: dict[str, Any], rollouts: list[Rollout]) -> None:
    """Whether the first steps of different sizes give the same losses and gradients with it as without anything."""
    from variants import nothing
    from workload import same

    with deterministic():
        workload.forget_trees()
        batches = [make_batch(workload, rollout, number) for number, rollout in enumerate(rollouts[:NUM_CHECKED])]
        outcomes = []
        for each in (nothing(), variant):
            with each.enter(workload):
                pairs = zip(batches, rollouts, strict=False)
                outcomes.append([workload.outcome(batch, rollout.split) for batch, rollout in pairs])
        workload.forget_trees()
    entry["bit_identical"] = all(same(left, right) for left, right in zip(*outcomes, strict=True))


def measure(workload: Any, variant: Any, entry: dict[str, Any], rollouts: list[Rollout], write: Any) -> None:
    """The largest step alone, then all steps with a new engine; fills the entry."""
    number = largest(rollouts)
    with variant.enter(workload) as probe:
        for _ in range(NUM_ALONE):
            entry["alone"].append(run_step(workload, rollouts[number], number) | memory(probe()))
    entry["alone"] = entry["alone"][-2:]
    give_back_memory()
    with variant.enter(workload) as probe:
        for step, rollout in enumerate(rollouts):
            entry["steps"].append(run_step(workload, rollout, step) | memory(probe()))
            if (step + 1) % WRITE_EVERY == 0 or step + 1 == len(rollouts):
                say(f"{variant.name}: step {step + 1} of {len(rollouts)}")
                entry["figures"] = figures(entry)
                write()


def memory(totals: Sample) -> Sample:
    return {key: value for key, value in totals.items() if key.endswith("_bytes")}


def run(options: argparse.Namespace) -> int:
    from variants import MODULE_SETS, attempt, megatron, nothing, ours
    from workload import Shape, Workload

    from nemo_rl_offload.bench.report import write_json

    longest = options.longest if HAS_GPU else 96
    rollouts = draw(options.steps, longest, seed=1)
    workload = Workload(Shape(options.layers, longest, 1, "grpo", options.impl))
    name = {"torch": "all", "transformer_engine": "attention"}[options.impl]
    modules = MODULE_SETS[options.impl][name]
    found = [nothing(), ours(name, modules)]
    if options.impl == "transformer_engine":
        found.append(megatron(name, modules))
    found = [each for each in found if options.variant in (None, each.kind)]
    entries = [{**each.entry(), "alone": [], "steps": []} for each in found]
    data = {
        "experiment": "E3",
        **environment(),
        **workload.describe(),
        "optimizer_ms": workload.optimizer_ms(),
        "rollouts": [{"lengths": each.lengths, "widths": each.split.widths} for each in rollouts],
        "variants": entries,
    }
    suffix = "" if options.variant is None else f"_{options.variant}"
    path = options.out / f"rl_reality_{options.impl}{suffix}.json"

    for variant, entry in zip(found, entries, strict=True):
        entry["check_error"] = attempt(partial(check, workload, variant, entry, rollouts))
        give_back_memory()
        entry["error"] = attempt(partial(measure, workload, variant, entry, rollouts, partial(write_json, path, data)))
        give_back_memory()
        write_json(path, data)
    return report(entries)


def report(entries: list[dict[str, Any]]) -> int:
    """Print the figures; returns 1 where ours failed or changed a bit."""
    for entry in entries:
        print(f"{entry['name']}: {entry['error'] or ''} bits: {entry['bit_identical']} {entry['check_error'] or ''}")
        for key, value in entry.get("figures", {}).items():
            print(f"    {key:42} {value:,.3f}")
    return 0 if all(each["bit_identical"] and not each["error"] for each in entries if each["kind"] == "ours") else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=300 if HAS_GPU else 8, metavar="N")
    parser.add_argument("--longest", type=int, default=4096, metavar="TOKENS", help="response, and microbatch")
    parser.add_argument("--layers", type=int, default=4 if HAS_GPU else 2, metavar="N")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    parser.add_argument("--variant", choices=("nothing", "ours", "megatron"))
    options = parser.parse_args()
    # Megatron-Core's engine needs it when Transformer Engine is imported: whatever imports that is imported later.
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    prepare_process()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
