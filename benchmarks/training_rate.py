"""The rate of training steps of a whole model with its own vocabulary, and what offloading costs of it.

    python benchmarks/training_rate.py --out benchmarks/results/DEVICE --model Qwen/Qwen2.5-1.5B --case packs

Cases are the microbatches of a step: `packs` of 16 sequences of 1,024 tokens; `rows`, eight padded rows of 184 tokens
at a time, as short answers make them; and `whole`, single sequences of `--length` tokens. Without offloading and with
it, by modules, steps take turns in one process; log-probabilities of the same sequences come after. CUDA graphs of
Transformer Engine's layers are variants, too: `graphs`, `graphs: attn`, `graphs: mlp`. Model FLOPs are those of
`planner.cost.flops`, without recomputation; the optimizer's step is apart. `copy_ms` is how long the copies took: where
half of it, one way, is more than the step without offloading, no engine can hide it. A profile of one step of each
tells what else is left.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import HAS_GPU, environment, give_back_memory, in_turn, medians, prepare_process, profiled, say, timed
from constants import OPTIMIZERS

STEPS = 3
"""Timed in a row, in each round."""
COUNTED = ("bytes_out", "bytes_in", "kept", "denied", "copy_ms", "stall_in_ms", "stall_out_ms")
"""Of the engine's totals."""


def make_case(options: argparse.Namespace) -> tuple[list[int], Any]:
    """Lengths of a step's sequences, and how they become microbatches."""
    from nemo_rl_offload.batching.plan import MicrobatchSplit

    length = 1024 if HAS_GPU else 8
    if options.case == "packs":
        sizes = (16,) * 4
        return [length] * 64, MicrobatchSplit(sizes, tuple(size * length for size in sizes), is_packed=True)
    if options.case == "rows":
        return [184 if HAS_GPU else 8] * 64, 8
    return [options.length if HAS_GPU else 32] * options.microbatches, 1


def make_variants(options: argparse.Namespace) -> list[Any]:
    from variants import ATTENTION, MODULE_SETS, graphs, nothing, ours, ours_with_recompute, plain_rotation

    sets = {**MODULE_SETS[options.impl], "attention": ATTENTION}
    made = {"nothing": nothing(), "ours: full recompute": ours_with_recompute()}
    made |= {f"ours: {name}": ours(name, modules) for name, modules in sets.items()}
    if options.impl == "transformer_engine":
        whole = [graphs(), graphs(["attn"])] if options.case != "packs" else []
        made |= {variant.name: variant for variant in (*whole, graphs(["mlp"]), plain_rotation())}
    if unknown := [name for name in options.variant if name not in made]:
        raise SystemExit(f"--variant: {', '.join(unknown)} is not one of {', '.join(made)}")
    return [made[name] for name in options.variant]


def measure(options: argparse.Namespace, workload: Any, made: list[Any], result: dict[str, Any], write: Any) -> None:
    """Fills the result, and writes it after each round, so that a time limit loses nothing."""
    from workload import random_batch

    from nemo_rl_offload.planner.cost.flops import training_flops
    from nemo_rl_offload.specs.catalogue import load_model_shape

    lengths, how = make_case(options)
    batch = random_batch(lengths, workload.vocabulary_size, 1)
    flops = training_flops(load_model_shape(options.model, None), lengths)
    result |= {"lengths": sorted(set(lengths)), "num_sequences": len(lengths), "flops": flops, "rates": {}}
    workload.complete(batch, how)
    scored = medians([timed(lambda: workload.complete(batch, how)) for _ in range(STEPS)])["ms"]
    result["logprobs"] = {"ms": scored, "tflops": flops / 3 / scored / 1e9}  # a third is forward
    say(f"log-probabilities: {scored:.1f} ms, {result['logprobs']['tflops']:.1f} TFLOP/s")
    if options.profile:
        result["logprobs"]["profile"] = profile_of(lambda: workload.complete(batch, how), "log-probabilities")
    workload.step(batch, how)  # which makes Adam's state
    result["optimizer_ms"] = workload.optimizer_ms()
    variants = {variant.name: variant for variant in made}
    entries = result["rates"]
    for number, name in in_turn(list(variants), options.rounds, 1):
        entry = entries.setdefault(name, {"samples": []})
        if "out_of_memory" in entry:
            continue
        variant = variants[name]
        try:
            with variant.enter(workload) as probe:
                for _ in range(variant.num_warmup):
                    workload.step(batch, how)
                before = probe()
                samples = [timed(lambda: workload.step(batch, how)) for _ in range(STEPS)]
                moved = {key: value - before[key] for key, value in probe().items() if key in COUNTED}
                if number >= 0:
                    entry["samples"] += samples
                    entry["per_step"] = {key: value / STEPS for key, value in moved.items()}
                    sum_up(result, options.variant[0])
                    write()
                if number == options.rounds - 1 and options.profile:
                    entry["profile"] = profile_of(lambda: workload.step(batch, how), name)
                    write()
        except torch.OutOfMemoryError:
            entry["out_of_memory"] = True
        give_back_memory(keeps_pinned=True)
    for name, entry in entries.items():
        if entry["samples"]:
            figures = f"{entry['tflops']:.1f} TFLOP/s, cost {entry.get('cost', 0):.1%}"
            say(f"{name}: {entry['medians']['ms']:.1f} ms, {figures}")
            say(json.dumps({key: entry.get(key) for key in ("per_step", "profile")}))


def profile_of(work: Callable[[], object], name: str) -> dict[str, float]:
    """When its lanes were busy; a trace of so many layers is too large to keep."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, float] = profiled(work, Path(folder) / "trace.json.gz", name)["figures"]
    return found


def sum_up(result: dict[str, Any], first: str) -> None:
    """Rates, and times beside the first variant's, of the samples so far."""
    for entry in result["rates"].values():
        if not entry["samples"]:
            continue
        entry["medians"] = medians(entry["samples"])
        entry["tflops"] = result["flops"] / (entry["medians"]["ms"] - result["optimizer_ms"]) / 1e9
        if "medians" in (reference := result["rates"].get(first, {})):
            entry["cost"] = entry["medians"]["ms"] / reference["medians"]["ms"] - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B")
    parser.add_argument("--case", choices=("packs", "rows", "whole"), default="packs")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    parser.add_argument("--optimizer", choices=OPTIMIZERS[:2], default=OPTIMIZERS[0], help="where its state is")
    parser.add_argument("--length", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--microbatches", type=int, default=4, metavar="N")
    parser.add_argument("--variant", nargs="+", default=["nothing", "ours: attention", "ours: all"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help=f"of {STEPS} steps each, by turns")
    parser.add_argument("--profile", action="store_true", help="when lanes were busy in one step of each")
    options = parser.parse_args()
    prepare_process()
    variants = make_variants(options)  # before the workload binds the engine
    from workload import Shape, Workload

    from nemo_rl_offload.bench.report import write_json
    from nemo_rl_offload.megatron.build.model import prepare_captures
    from nemo_rl_offload.specs.catalogue import load_model_shape

    options.out.mkdir(parents=True, exist_ok=True)
    if any(variant.kind == "graphs" for variant in variants):
        prepare_captures()
    model = load_model_shape(options.model, None)
    num_layers, vocabulary = (model.num_layers, model.vocab_size) if HAS_GPU else (2, 256)
    lengths, _ = make_case(options)
    longest = max(lengths) * (16 if options.case == "packs" else 1)
    workload = Workload(
        Shape(num_layers, longest, 4, "sft", options.impl, vocabulary, options.model, options.optimizer)
    )
    result: dict[str, Any] = {"experiment": "training_rate", **environment(), "case": options.case}
    result |= {"model": options.model, "implementation": options.impl, "vocabulary_size": vocabulary}
    size = options.model.rsplit("-", 1)[-1].lower()
    result["optimizer"] = options.optimizer
    place = "" if options.optimizer == OPTIMIZERS[0] else "_optimizer_on_host"
    path = options.out / f"training_rate_{size}_{options.case}_{options.impl}{place}.json"
    measure(options, workload, variants, result, lambda: write_json(path, result))
    write_json(path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
