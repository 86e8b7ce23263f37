"""E4: the longest sequence, and the largest number of layers, that train on the one card.

    python benchmarks/reach.py --out benchmarks/results/DEVICE --variant "recompute: full" "ours: full recompute"

Layers of Qwen2.5-7B or of `--model` (all of them where the sequence is searched) with Adam's state, one sequence a
step. The vocabulary is small, with log-probabilities in chunks, or as large as `--vocabulary` says, without logits.
Attempts run in processes of their own, each of which takes ever larger steps until one does not fit, so that running
out of memory leaves nothing behind. What is known is in the result, which is written after each process; a further
command goes on from there. At the longest sequence of full recomputation, that and ours with recomputation take turns
in one process, for the time per token. That no bit changes is E2's to show, with the same variants.

A CPU runs out of nothing: there, steps above a made-up limit count as too large.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    HAS_GPU,
    Sample,
    command,
    environment,
    give_back_memory,
    in_turn,
    medians,
    prepare_process,
    say,
    timed,
)
from constants import MODEL, OPTIMIZERS, SMALL_VOCABULARY
from search import longest, next_candidates

from nemo_rl_offload.specs.catalogue import find_config

VARIANTS = ("recompute: full", "ours: full recompute", "nothing", "ours: all")
COMPARED = VARIANTS[:2]
SEQUENCE = 16384 if HAS_GPU else 48
"""Where the number of layers is searched."""
START = {"sequence": 8192 if HAS_GPU else 64, "layers": 8 if HAS_GPU else 1}
STEP = {"sequence": 1024 if HAS_GPU else 32, "layers": 1}
CPU_LIMIT = {"sequence": 100, "layers": 3}
RESERVE = 0.97
"""Share of the device's memory that is taken to be allocated before the allocator gives up. What it has reserved says
less: the step that makes the optimizer's state reserves more than a short one needs."""
ATTEMPT_TIMEOUT_S = 900
MOST_FAILURES = 2
"""In a row, of attempts that ended otherwise than by memory."""


def num_layers(model: str) -> int:
    """Where the sequence is searched: all that the model has."""
    return int((find_config(model) or {})["num_hidden_layers"]) if HAS_GPU else 2


def run_attempt(task: dict[str, Any]) -> None:
    """In a process of its own: print one line of JSON for each step that fits, and end at the first that does not."""
    prepare_process()
    import torch

    sizes = task["sizes"]
    steps = Steps(num_layers(task["model"]), max(sizes), task) if task["searched"] == "sequence" else None
    for size in sizes:

        def step(size: int = size) -> Sample:
            if not HAS_GPU and size > CPU_LIMIT[task["searched"]]:
                raise torch.OutOfMemoryError("the limit made up for a CPU")
            if steps:
                return steps.timed(task["variant"], size)
            return Steps(size, SEQUENCE, task).timed(task["variant"], SEQUENCE)

        found = {"size": size, **or_out_of_memory(step)}
        print(json.dumps(found), flush=True)
        if "out_of_memory" in found:
            break


def run_tries(task: dict[str, Any]) -> None:
    """As above, for sequences of several variants: where the optimizer's state takes minutes to pin."""
    prepare_process()
    steps = Steps(num_layers(task["model"]), max(size for _, size in task["tries"]), task)
    for variant, size in task["tries"]:
        sample = or_out_of_memory(partial(steps.timed, variant, size))
        print(json.dumps({"variant": variant, "size": size, **sample}), flush=True)


def or_out_of_memory(step: Callable[[], Sample]) -> dict[str, Any]:
    """What a step took, or what said that the device had no room."""
    try:
        return dict(step())
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"out_of_memory": str(error)}


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device had no room; libraries below torch say so in words alone."""
    import torch

    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in words or "alloc_failed" in words


class Steps:
    """A model that has taken a short step, which makes Adam's state, and steps of it."""

    def __init__(self, num_layers: int, longest: int, task: dict[str, Any]) -> None:
        from variants import MODULE_SETS, full_recompute, nothing, ours, ours_with_recompute
        from workload import Shape, Workload

        impl = task["impl"]
        found = [full_recompute(), ours_with_recompute(), nothing(), ours("all", MODULE_SETS[impl]["all"])]
        self.variants = {each.name: each for each in found}
        self.workload = Workload(
            Shape(
                num_layers,
                longest,
                1,
                transformer_impl=impl,
                vocabulary_size=task["vocabulary"],
                model=task["model"],
                optimizer=task["optimizer"],
                overrides=tuple(task["set"]),
            )
        )
        self.short = self.batch(min(512, longest))
        self.workload.step(self.short)
        self.optimizer_ms = timed(self.workload.model.optimizer.step)["ms"]

    def batch(self, sequence: int) -> Any:
        """Scored as equally likely tokens: the pass that would score them costs time and no memory."""
        import torch
        from workload import random_batch

        batch = random_batch([sequence], self.workload.vocabulary_size, 3)
        logprobs = torch.full(batch["input_ids"].shape, -math.log(self.workload.vocabulary_size))
        return {**batch, "prev_logprobs": logprobs, "reference_policy_logprobs": logprobs}

    def timed(self, name: str, sequence: int, *, is_warm: bool = False) -> Sample:
        """A step after a short one, which an engine learns the order of modules from, or after one as long."""
        give_back_memory()
        batch = self.batch(sequence)
        with self.variants[name].enter(self.workload):
            self.workload.step(batch if is_warm else self.short)
            return timed(lambda: self.workload.step(batch)) | {"optimizer_ms": self.optimizer_ms}


def describe(model: str, vocabulary: int) -> None:
    """In a process of its own, since this one is to take no memory of the device: print what the results are of."""
    from workload import Shape, model_config

    shape = Shape(num_layers(model), SEQUENCE, 1, vocabulary_size=vocabulary, model=model)
    print(json.dumps({**environment(), "model": model_config(shape)}), flush=True)


def compare(sequence: int, task: dict[str, Any]) -> None:
    """In a process of its own: print the compared variants' samples at one sequence."""
    prepare_process()
    steps = Steps(num_layers(task["model"]), sequence, task)
    samples: dict[str, list[Sample]] = {name: [] for name in COMPARED}
    for _, name in in_turn(COMPARED, 2):
        samples[name].append(steps.timed(name, sequence, is_warm=True))
    print(json.dumps(samples), flush=True)


def in_process(task: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Run this script for a task: what it printed before it ended, and how it ended where that was no success."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--out", ".", "--task", json.dumps(task)]
    done: subprocess.CompletedProcess[bytes] | subprocess.TimeoutExpired
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=ATTEMPT_TIMEOUT_S)
        ended = f"exit code {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as error:
        done, ended = error, f"took more than {ATTEMPT_TIMEOUT_S} s"
    printed, complaints = ((written or b"").decode() for written in (done.stdout, done.stderr))
    if ended:
        say(complaints)
        ended += f": {complaints.strip().rpartition('\n')[2]}"
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")], ended


def keep(samples: list[dict[str, Any]], entry: dict[str, Any], commit: str | None) -> None:
    """Fills the entry."""
    for sample in samples:
        entry["tried"][str(sample["size"])] = sample | {"commit": commit}


def peaks(entry: dict[str, Any]) -> dict[int, int | None]:
    """Of what was tried, None where it did not fit."""
    return {
        int(size): None if "out_of_memory" in sample else int(sample["peak_allocated_bytes"])
        for size, sample in entry["tried"].items()
    }


def search(about: dict[str, str], entry: dict[str, Any], limit_bytes: int, commit: str | None, write: Any) -> None:
    """Try until the largest that fits is known; fills the entry, whose keys are sizes as text.

    `about` is what an attempt's task says of itself: variant, searched, impl. `commit` is what the attempts run at.
    """
    searched = about["searched"]
    entry["error"] = None
    num_failures = 0
    while num_failures < MOST_FAILURES:
        known = peaks(entry)
        sizes = next_candidates(known, limit_bytes, START[searched], STEP[searched])
        if not sizes:
            entry["largest"] = longest(known)
            write()
            return
        say(f"{about['variant']}: {searched} {', '.join(map(str, sizes))}")
        # Another number of layers is another model, which the one before would leave no room for.
        for together in [sizes] if searched == "sequence" else [[size] for size in sizes]:
            samples, entry["error"] = in_process({**about, "sizes": together})
            keep(samples, entry, commit)
            if entry["error"] or "out_of_memory" in samples[-1]:
                break
        num_failures = num_failures + 1 if entry["error"] else 0
        write()


def figures(data: dict[str, Any]) -> dict[str, Any]:
    """What E4's bars are held against."""
    sequences = {name: entry.get("largest") for name, entry in data["sequence"].items()}
    alone, ours = (sequences.get(name) for name in COMPARED)
    found: dict[str, Any] = {
        "longest_sequence": sequences,
        "most_layers": {name: entry.get("largest") for name, entry in data["layers"].items()},
        "longer": ours / alone if alone and ours else None,
        "time_per_token": None,
    }
    if (compared := data.get("compared")) and compared["samples"]:
        times = [medians(compared["samples"][name])["ms"] for name in COMPARED]
        found["time_per_token"] = times[1] / times[0]
    return found


def keep_commit(data: dict[str, Any]) -> None:
    """What earlier commands measured stays marked with their commit, which the file's own will no longer be."""
    entries = [*data["sequence"].values(), *data["layers"].values()]
    measured = [sample for entry in entries for sample in entry["tried"].values()]
    for each in [*measured, *([data["compared"]] if "compared" in data else [])]:
        each.setdefault("commit", data["commit"])


def run(options: argparse.Namespace) -> int:
    from nemo_rl_offload.bench.report import write_json

    name = "reach" if options.impl == "torch" else f"reach_{options.impl}"
    name += "" if options.vocabulary == SMALL_VOCABULARY else f"_{options.vocabulary}"
    name += "" if options.optimizer == "device" else f"_{options.optimizer.replace(' ', '_').replace("'", '')}"
    name += "" if options.model == MODEL else f"_{options.model.partition('/')[2]}"
    name += "" if options.name is None else f"_{options.name}"
    path = options.out / f"{name}.json"
    of_all = {key: getattr(options, key) for key in ("impl", "model", "vocabulary", "optimizer", "set")}
    experiment = "E4" if options.optimizer == "device" else "whole_model"
    data: dict[str, Any] = {"experiment": experiment, "optimizer": options.optimizer, "sequence": {}, "layers": {}}
    if path.exists():
        data |= json.loads(path.read_text(encoding="utf-8"))
        if data.get("overrides", []) != options.set:
            raise SystemExit(f"{path} is of other settings: {data['overrides']}. Give another --name.")
        keep_commit(data)
    ((machine,), _) = in_process({"describe": True, **of_all})
    data |= machine | {"command": command()}
    data |= {
        "of_model": options.model,
        "num_layers": num_layers(options.model),
        "sequence_of_layers": SEQUENCE,
        "transformer_impl": options.impl,
        "overrides": options.set,
    }
    limit_bytes = int(data["device_memory_bytes"] * RESERVE)

    def write() -> None:
        data["figures"] = figures(data)
        write_json(path, data)

    if options.tries:
        samples, data["error"] = in_process({"tries": options.tries, **of_all})
        for variant, size in options.tries:
            entry = data["sequence"].setdefault(variant, {"tried": {}, "error": None})
            keep(
                [each for each in samples if (each["variant"], each["size"]) == (variant, size)], entry, data["commit"]
            )
            entry["largest"] = longest(peaks(entry))
        write()
        print(json.dumps(data["figures"], indent=1))
        return 0
    for searched in options.search:
        for name in options.variant or VARIANTS:
            about = {"variant": name, "searched": searched, **of_all}
            search(about, data[searched].setdefault(name, {"tried": {}}), limit_bytes, data["commit"], write)
        alone, known = data["sequence"].get(COMPARED[0], {}).get("largest"), data.get("compared", {})
        if searched == "sequence" and alone and (known.get("sequence") != alone or known["error"]):
            say(f"time per token at {alone} tokens")
            samples, error = in_process({"compare": alone, **of_all})
            compared = {"sequence": alone, "samples": samples[0] if samples else {}, "error": error}
            data["compared"] = compared | {"commit": data["commit"]}
            write()
    print(json.dumps(data["figures"], indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--search", nargs="+", choices=("sequence", "layers"), default=["sequence"])
    parser.add_argument("--variant", nargs="+", choices=VARIANTS)
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    parser.add_argument("--model", default=MODEL, metavar="NAME", help="of the catalogue; default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=SMALL_VOCABULARY)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help="where its state is")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of policy.megatron_cfg")
    parser.add_argument("--name", help="of what is set, at the end of the result's name")
    parser.add_argument(
        "--tries",
        type=json.loads,
        metavar="JSON",
        help="in place of a search, these sequences in one process: [[VARIANT, N], ...]",
    )
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if find_config(options.model) is None:
        parser.error(f"--model: the catalogue has no {options.model}")
    if options.set and options.name is None:
        parser.error("--set: give the result another name, by --name")
    if unknown := {variant for variant, _ in options.tries or []} - {*VARIANTS}:
        parser.error(f"--tries: {', '.join(sorted(unknown))} is not one of {', '.join(VARIANTS)}")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if options.task is None:
        return run(options)
    if "describe" in options.task:
        describe(options.task["model"], options.task["vocabulary"])
    elif "tries" in options.task:
        run_tries(options.task)
    elif "compare" in options.task:
        compare(options.task["compare"], options.task)
    else:
        run_attempt(options.task)
    return 0


if __name__ == "__main__":
    sys.exit(main())
