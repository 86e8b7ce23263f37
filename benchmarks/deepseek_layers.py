"""The first pipeline stage of Megatron-LM's PR 1913 on one GPU: DeepSeek-V3 layers, with offloading and without.

    python benchmarks/deepseek_layers.py --out benchmarks/results/DEVICE

Four layers (multi-latent attention, hidden 7168, experts of 2048, top-8, one shared expert), sequence 4096, bfloat16,
microbatches of one sequence. A rank of EP16 holds 16 of 256 experts and takes 4096 x 8 token copies when routing is
balanced; 16 experts in all, of which a token takes 8, give one GPU the same. The schedule is 1F1B as the first of four
stages runs it: three forwards ahead, then one forward and one backward in turn, over 32 microbatches: a global batch of
512 on 16 data-parallel ranks. As there, the stage stands still until the first gradient has come back through three
more stages, and between the last ones (`pipeline_waits`).

Correctness first: losses and gradients of two layers with offloading equal those without, bit for bit, under
deterministic algorithms. Then both are timed in turn, step by step, by the device's events; and with them steps without
offloading in which as many bytes are copied both ways (`bare_copies`), which no engine could be without, and, with
Transformer Engine, steps with Megatron-Core's own engine and the same modules.
"""

import argparse
import gc
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    HAS_GPU,
    Sample,
    environment,
    give_back_memory,
    in_turn,
    medians,
    prepare_process,
    profiled,
    say,
    timed,
)
from constants import NUM_AHEAD

from nemo_rl_offload.bench.report import write_json
from nemo_rl_offload.policy.garbage import freeze_gc

COPIES, MEGATRONS = "copies", "megatron"
NEEDED = ("off", "on")
FORWARD_KEYS = ("forward_ms", "forward_host_ms")
"""What a forward takes on the device, and how long the host works for it."""
PUBLISHED = {"tflops_lost_percent": 1.9, "saved_of_peak_percent": 17.8}


def measure(stage: Any, data: dict[str, Any], rounds: int, path: Path) -> None:
    """Time steps in each of the ways in turn; fills `data` and writes it after each round."""
    from megatrons_engine import forget_megatrons_steps
    from variants import attempt

    samples = data["samples"]
    stage.time_passes()
    data |= {"forward_ms": stage.waits.forward_ms, "backward_ms": stage.waits.backward_ms}
    data["activation_bytes_per_microbatch"] = stage.activation_bytes
    for number, name in in_turn(list(samples), rounds, num_warmup_rounds=1):
        if (number, name) == (0, "off"):
            freeze_gc()  # as workers do
        if name not in samples:
            continue
        found: list[Sample] = []
        take = partial(take_sample, stage, name, data["bytes_per_microbatch"], found)
        if name != MEGATRONS:
            take()
        elif (error := attempt(take)) is not None:
            data["megatrons_error"] = error
            del samples[name]
            forget_megatrons_steps()
            give_back_memory()
        if name == "on":
            data["bytes_per_microbatch"] = int(found[0]["bytes_out"]) // data["microbatches"]
        if number >= 0 and found:
            samples[name] += found
            say(f"round {number + 1} of {rounds}: {name} {found[0]['ms']:.1f} ms")
        if samples["off"] and samples["on"]:
            data["figures"] = derive(samples, data["microbatches"], data["activation_bytes_per_microbatch"])
            data["stats"] = asdict(replace(stage.engine.stats(), per_module={}))
            data["per_module"] = {name: asdict(each) for name, each in stage.engine.stats().per_module.items()}
            write_json(path, data)
    gc.unfreeze()


def take_sample(stage: Any, name: str, bytes_per_microbatch: int, found: list[Sample]) -> None:
    """Append a step's sample, and what the engine did in it."""
    from bare_copies import BareCopies
    from deepseek_stage import counters

    if name == MEGATRONS:
        stage.use_megatrons()
    else:
        bare_copies = BareCopies(bytes_per_microbatch) if name == COPIES else None
        stage.use(stage.engine if name == "on" else None, bare_copies)
    if HAS_GPU:
        torch.cuda.empty_cache()
    stage.step()  # after the other one: caches of the allocator, and the arena's first slabs
    stage.clock.take()
    before = counters(stage.engine)
    sample = timed(stage.step) | stage.clock.take()
    after = counters(stage.engine)
    found.append(sample | {key: after[key] - before[key] for key in after})


def trace(stage: Any, about: dict[str, Any], folder: Path) -> None:
    """A short step without and with offloading under torch's profiler, for https://ui.perfetto.dev, and its lanes."""
    stage.tokens = stage.tokens[: NUM_AHEAD + 2]
    steps = []
    for name, engine in (("off", None), ("on", stage.engine)):
        stage.use(engine)
        stage.step()
        steps.append(profiled(stage.step, folder / f"deepseek_{name}.trace.json.gz", f"offloading {name}"))
    title = f"{about['layers']} DeepSeek-V3 layers ({about['transformer_impl']}), {len(stage.tokens)} microbatches"
    data = {**environment(), "experiment": "profile", "title": title, "steps": steps}
    write_json(folder / "deepseek_profile.json", data, indent=None)


def derive(samples: dict[str, list[Sample]], num_microbatches: int, activation_bytes: int) -> dict[str, float]:
    """Figures beside the published ones. Of the bytes of a step, those of four microbatches are alive at once.
    `activation_bytes` is all that one saves; 0 where that is not known. Ways without a sample yet have no figures."""
    found = {name: medians(each) for name, each in samples.items() if each}
    off, on, copies = found["off"], found["on"], found.get(COPIES)
    live_bytes = on["bytes_out"] * NUM_AHEAD / num_microbatches
    saved = off["peak_allocated_bytes"] - on["peak_allocated_bytes"]
    return {
        "step_ms_off": off["ms"],
        "step_ms_on": on["ms"],
        **({"step_ms_copies": copies["ms"]} if copies else {}),
        "step_ms_spread": max(each["ms_spread"] for each in (off, on, copies) if each),
        "throughput_lost_percent": 100 * (1 - off["ms"] / on["ms"]),
        **({"throughput_lost_to_copies_percent": 100 * (1 - off["ms"] / copies["ms"])} if copies else {}),
        "saved_bytes": saved,
        "offloaded_bytes_alive_at_the_peak": live_bytes,
        **({"offloaded_share_of_activations": live_bytes / NUM_AHEAD / activation_bytes} if activation_bytes else {}),
        "saved_of_offloaded": saved / live_bytes,
        "saved_of_peak_percent": 100 * saved / max(1.0, off["peak_allocated_bytes"]),
        "peak_allocated_bytes_off": off["peak_allocated_bytes"],
        "peak_allocated_bytes_on": on["peak_allocated_bytes"],
        "peak_reserved_bytes_off": off["peak_reserved_bytes"],
        "peak_reserved_bytes_on": on["peak_reserved_bytes"],
        "stall_in_ms": on["stall_in_ms"],
        "stall_out_ms": on["stall_out_ms"],
        **{f"{key}_{name}": each[key] for key in FORWARD_KEYS for name, each in found.items() if key in each},
        **(megatrons_figures(off, found[MEGATRONS], live_bytes) if MEGATRONS in found else {}),
    }


def megatrons_figures(off: Sample, on: Sample, live_bytes: float) -> Sample:
    """The same of Megatron-Core's engine, for the bytes that this project's has alive."""
    return {
        "megatrons_step_ms": on["ms"],
        "megatrons_throughput_lost_percent": 100 * (1 - off["ms"] / on["ms"]),
        "megatrons_saved_of_offloaded": (off["peak_allocated_bytes"] - on["peak_allocated_bytes"]) / live_bytes,
        "megatrons_peak_allocated_bytes": on["peak_allocated_bytes"],
        "megatrons_peak_reserved_bytes": on["peak_reserved_bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--microbatches", type=int, default=32 if HAS_GPU else 8, metavar="N", help="per step")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    parser.add_argument(
        "--inflight",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="GIB",
        help="bounds of copies under way, one run each",
    )
    parser.add_argument(
        "--beside",
        nargs="*",
        default=[COPIES, MEGATRONS],
        choices=(COPIES, MEGATRONS),
        metavar="WAY",
        help="what takes turns with offloading and none: copies, which needs more memory than an engine; megatron",
    )
    parser.add_argument("--trace", action="store_true", help="profile a step without and with, after the last bound")
    options = parser.parse_args()
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"  # what Megatron-Core's engine needs of Transformer Engine
    prepare_process()
    return run(options)


def run(options: argparse.Namespace) -> int:
    from deepseek_stage import GIB, MODULES, Stage, is_bit_identical, make_policy, model_config
    from megatrons_engine import forget_megatrons_steps

    from nemo_rl_offload.megatron.build.bridge import bridge
    from nemo_rl_offload.megatron.build.model import init_process_groups

    # An optional package's failed import is kept, with all frames above it: here, none that holds tensors.
    bridge()
    sequence = 4096 if HAS_GPU else 32
    policy = make_policy(MODULES, sequence, options.impl)
    init_process_groups(policy, seed=1)
    can_megatrons = HAS_GPU and options.impl == "transformer_engine"
    ways = [*NEEDED, *(way for way in options.beside if way != MEGATRONS or can_megatrons)]
    same_bits = is_bit_identical(options.impl, min(sequence, 1024))
    for inflight_gib in options.inflight:
        give_back_memory()
        inflight_bytes = round(inflight_gib * GIB)
        stage = Stage(policy, options.layers, sequence, options.microbatches, inflight_bytes)
        data: dict[str, Any] = {
            "experiment": "E1",
            **environment(),
            "transformer_impl": options.impl,
            "model": model_config(options.layers, is_small=not HAS_GPU),
            "layers": options.layers,
            "sequence": sequence,
            "microbatches": options.microbatches,
            "modules": MODULES,
            "max_inflight_bytes": inflight_bytes,
            "bit_identical": same_bits,
            "published": PUBLISHED,
            "bytes_per_microbatch": 0,
            "samples": {way: [] for way in ways},
        }
        name = f"deepseek_{options.layers}_layers_{options.impl}_{inflight_gib:g}_gib_inflight.json"
        say(f"{inflight_gib:g} GiB in flight")
        measure(stage, data, options.rounds, options.out / name)
        if MEGATRONS in ways:
            forget_megatrons_steps()
        if options.trace and inflight_gib == options.inflight[-1]:
            trace(stage, data, options.out)
        stage.close()
        del stage
        say(f"{data['device']}, {inflight_gib:g} GiB in flight, same bits: {same_bits}")
        for key, value in data["figures"].items():
            print(f"{key:36} {value:,.3f}")
    return 0 if same_bits else 1


if __name__ == "__main__":
    sys.exit(main())
