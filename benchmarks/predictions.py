"""E6: what the planner predicts for the runs of E1 to E4, beside what they measured. Needs no GPU.

    python benchmarks/predictions.py benchmarks/results/DEVICE

Memory: the predicted peak less the planner's allowances for the runtime and for fragmentation, beside the most that
torch's allocator had handed out. Time: the planner does not know what share of the device's peak rate a model
reaches, so that share is fitted to the run without offloading and recomputation of each result (where that did not
fit: to the first that recomputes; of E4: to the compared one with full recomputation), which is then no prediction
and is left out; the optimizer's part of a step, which the planner leaves out, is taken off. E4's attempts are first
steps of cold processes, which compile and choose kernels and pin memory: their times say nothing. Of E3, whose steps
all differ, the highest peak is predicted as that of its widest microbatch, and the time of all steps as that of their
microbatches one by one; results from before SwiGLU was fused, whose MLPs saved two tensors more, are left out. The
link's rates are those of `link.json`. What `auto` chooses is not predicted.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from constants import LOGPROB_CHUNK_SIZE, NUM_AHEAD, SMALL_VOCABULARY

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.cost.memory import Optimizer
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.simulate.pipeline_schedule import pipeline_schedule
from nemo_rl_offload.planner.simulate.simulated_step import run_steady_state
from nemo_rl_offload.planner.simulate.simulator import Segment, Transfers, simulate
from nemo_rl_offload.planner.simulate.stages import build_stages, job_link
from nemo_rl_offload.planner.simulate.steady_state import steady_state_actions
from nemo_rl_offload.specs.devices import Device, recognise
from nemo_rl_offload.specs.model_shape import read_model_shape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout
from nemo_rl_offload.units import gib

ALLOWANCES = ("runtime", "fragmentation")
BARS = {"memory": 0.03, "time": 0.05}


@dataclass(frozen=True)
class Figures:
    """Of one step, of E3 of all; `ms` is None where its time says nothing."""

    peak_bytes: int
    ms: float | None


@dataclass(frozen=True)
class Prediction:
    """`predicted_ms` is None where the time was fitted or not measured."""

    source: str
    variant: str
    measured: Figures
    predicted_peak_bytes: int
    predicted_ms: float | None

    @property
    def memory_error(self) -> float:
        """Relative; above 0: predicted too much."""
        return self.predicted_peak_bytes / self.measured.peak_bytes - 1

    @property
    def time_error(self) -> float | None:
        """Likewise."""
        if self.predicted_ms is None or self.measured.ms is None:
            return None
        return self.predicted_ms / self.measured.ms - 1


@dataclass(frozen=True)
class Run:
    """A measured step and the job that it was."""

    source: str
    variant: str
    job: Job
    modules: tuple[str, ...]
    measured: Figures
    num_ahead: int = 1
    """Stages of the pipeline whose first one it was; the others were as fast without offloading."""
    max_inflight_bytes: int | None = None
    widths: Mapping[int, int] = field(default_factory=dict)
    """Where microbatches differ: how many of each width took the measured time. The job's are the widest."""


def predict(run: Run, device: Device) -> tuple[int, float]:
    """The planner's peak in bytes and time in ms of a run on this device."""
    job = replace(run.job, device=device)
    if run.num_ahead == 1:
        outcome = run_steady_state(job, run.modules)
        static, peak_bytes, ms = outcome.stages[0].static_bytes, outcome.peak_bytes(0), outcome.step_ms
        if run.widths:
            ms = sum(
                number * run_steady_state(replace(job, sequence=width, num_microbatches=1), run.modules).step_ms
                for width, number in run.widths.items()
            )
    else:
        (stage,) = build_stages(job, run.modules)
        schedule = pipeline_schedule(run.num_ahead, job.num_microbatches)
        transfers = Transfers(job_link(job), max_inflight_bytes=run.max_inflight_bytes)
        lets_wait = run.max_inflight_bytes is not None
        (actions,) = steady_state_actions([stage], schedule[:1], transfers.link, lets_wait=lets_wait)
        (own,) = stage.segments(actions)
        alike = Segment(sum(each.forward_ms for each in own), sum(each.backward_ms for each in own))
        timeline = simulate(schedule, [[own], *[[[alike]]] * (run.num_ahead - 1)], transfers)
        static, ms = stage.static_bytes, timeline.step_ms
        peak_bytes = sum(static.values()) + timeline.stages[0].peak_bytes
    return peak_bytes - sum(static[name] for name in ALLOWANCES), ms


def fitted(run: Run) -> Device:
    """The run's device with rates of which it takes as long as was measured; as it is where its time says nothing."""
    device = run.job.device
    if run.measured.ms is None:
        return device
    factor = predict(run, device)[1] / run.measured.ms
    return replace(device, achieved=device.achieved * factor, achieved_memory=device.achieved_memory * factor)


def compare(runs: Sequence[Run]) -> list[Prediction]:
    """Fit the device's rates to the first run, where its time was measured, then predict all."""
    first = runs[0]
    device = fitted(first)
    found = []
    for run in runs:
        peak_bytes, ms = predict(run, device)
        is_predicted = run is not first and run.measured.ms is not None and first.measured.ms is not None
        found.append(Prediction(run.source, run.variant, run.measured, peak_bytes, ms if is_predicted else None))
    return found


def predictions(folder: Path) -> list[Prediction]:
    """Of every result of E1 to E4 in a folder; none for results of a CPU."""
    found: list[Prediction] = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        readers = {"E1": _runs_of_e1, "E2": runs_of_e2, "E3": _runs_of_e3, "E4": _runs_of_e4}
        reader = readers.get(result.get("experiment"))
        if reader is None or not result["device_memory_bytes"]:
            continue
        if runs := list(reader(result, path.stem, device_of(result, folder))):
            found += compare(runs)
    return found


def device_of(result: Mapping[str, Any], folder: Path) -> Device:
    device = recognise(result["device"], result["device_memory_bytes"])
    link = folder / "link.json"
    if not link.exists():
        return device
    rates = list(json.loads(link.read_text(encoding="utf-8"))["copies_gb_per_s"].values())[-1]
    return replace(device, link_out_gb_per_s=rates["out"], link_in_gb_per_s=rates["in"])


def _job(model: Mapping[str, Any], device: Device, sequence: int, num_microbatches: int, impl: str) -> Job:
    shape = read_model_shape(model, "the result")
    makes_logits = shape.vocab_size <= SMALL_VOCABULARY
    return Job(
        shape,
        ParallelLayout(),
        device,
        sequence,
        1,
        num_microbatches,
        transformer_engine=impl == "transformer_engine",
        makes_logits=makes_logits,
        logprob_chunk_size=LOGPROB_CHUNK_SIZE if makes_logits else None,
    )


def _recompute(name: str | None) -> Recompute:
    if name == "full":
        return Recompute(method="uniform")
    return Recompute(modules=frozenset([name] if name else []))


def _planned_recompute(keys: Mapping[str, Any]) -> Recompute:
    """Of keys that `plan` wrote."""
    if keys.get("recompute_granularity") == "full":
        return Recompute(method=keys["recompute_method"], num_layers=keys["recompute_num_layers"])
    return Recompute(
        frozenset(keys.get("recompute_modules") or ()), num_counted_layers=keys.get("recompute_num_layers")
    )


def _runs_of_e1(result: Mapping[str, Any], source: str, device: Device) -> Iterator[Run]:
    job = replace(
        _job(result["model"], device, result["sequence"], result["microbatches"], result["transformer_impl"]),
        optimizer=Optimizer(distributed=False, gradient_bytes=2, state_bytes=0, master_bytes=0),
        min_elements=0,
        logprob_chunk_size=None,
    )
    figures = result["figures"]
    for name, modules in (("off", ()), ("on", tuple(result["modules"]))):
        measured = Figures(int(figures[f"peak_allocated_bytes_{name}"]), figures[f"step_ms_{name}"])
        yield Run(
            source, name, job, modules, measured, num_ahead=NUM_AHEAD, max_inflight_bytes=result["max_inflight_bytes"]
        )


def runs_of_e2(result: Mapping[str, Any], source: str, device: Device) -> Iterator[Run]:
    shape = result["shape"]
    job = _job(result["model"], device, shape["sequence"], shape["num_microbatches"], shape["transformer_impl"])
    measured_ones = [each for each in result["variants"] if "medians" in each and each["error"] is None]
    variants = [each for each in measured_ones if each["offload_modules"] != "auto"]
    order = ["nothing", "recompute", "ours"]
    for each in sorted(
        (each for each in variants if each["kind"] in order), key=lambda each: order.index(each["kind"])
    ):
        measured = Figures(int(each["medians"]["peak_allocated_bytes"]), each["medians"]["ms"] - result["optimizer_ms"])
        keys = each.get("keys")
        recompute = _planned_recompute(keys) if keys else _recompute(each["recompute"])
        yield Run(source, each["name"], replace(job, recompute=recompute), tuple(each["offload_modules"]), measured)


def whole_runs(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """E3's variants that took every step: a result is written on the way too, and a variant may fail there."""
    finished = [each for each in result["variants"] if each["error"] is None and "figures" in each]
    return [each for each in finished if each["figures"]["num_steps"] == len(result["rollouts"])]


def _runs_of_e3(result: Mapping[str, Any], source: str, device: Device) -> Iterator[Run]:
    if not result.get("swiglu_is_fused"):
        return
    widths = max((rollout["widths"] for rollout in result["rollouts"]), key=max)
    job = _job(result["model"], device, max(widths), len(widths), result["shape"]["transformer_impl"])
    counts = Counter(width for rollout in result["rollouts"] for width in rollout["widths"])
    for each in whole_runs(result):
        if each["kind"] in ("nothing", "ours"):
            ms = each["figures"]["total_ms"] - len(result["rollouts"]) * result["optimizer_ms"]
            measured = Figures(int(each["figures"]["highest_peak_bytes"]), ms)
            yield Run(
                source, f"{each['name']}, all steps", job, tuple(each["offload_modules"]), measured, widths=counts
            )


def _runs_of_e4(result: Mapping[str, Any], source: str, device: Device) -> Iterator[Run]:
    """Those at the number of layers of the longest sequence: the compared ones, then the attempts."""
    about = {"recompute: full": ("full", ()), "ours: full recompute": ("full", ("attn_norm",)), "nothing": (None, ())}
    model = {**result["model"], "num_hidden_layers": result["num_layers"]}

    def run(name: str, sequence: int, note: str, measured: Figures) -> Run:
        recompute, modules = about[name]
        job = replace(_job(model, device, sequence, 1, result["transformer_impl"]), recompute=_recompute(recompute))
        return Run(source, f"{name}, {sequence} tokens{note}", job, modules, measured)

    compared = result.get("compared", {"samples": {}})
    for name in about:
        if samples := compared["samples"].get(name):
            peak_bytes = int(median(each["peak_allocated_bytes"] for each in samples))
            ms = median(each["ms"] - each["optimizer_ms"] for each in samples)
            yield run(name, compared["sequence"], ", warm", Figures(peak_bytes, ms))
    for name in about:
        tried = result["sequence"].get(name, {"tried": {}})["tried"]
        for size in sorted((size for size in tried if "out_of_memory" not in tried[size]), key=int):
            yield run(name, int(size), "", Figures(int(tried[size]["peak_allocated_bytes"]), None))


def worst(found: Sequence[Prediction]) -> dict[str, float | None]:
    """The largest relative error of each kind, whatever its sign; None where nothing was predicted."""
    times = [abs(each.time_error) for each in found if each.time_error is not None]
    return {"memory": max((abs(each.memory_error) for each in found), default=None), "time": max(times, default=None)}


def table(found: Sequence[Prediction]) -> list[str]:
    """Markdown."""
    lines = ["| result | variant | peak | predicted | error | step | predicted | error |", "|---|---|" + "---|" * 6]
    for each in found:
        peaks = [gib(peak_bytes, 2) for peak_bytes in (each.measured.peak_bytes, each.predicted_peak_bytes)]
        lines.append(
            f"| {each.source} | {each.variant} | {peaks[0]} | {peaks[1]} | {each.memory_error:+.1%} | {_times(each)} |"
        )
    return lines


def _times(each: Prediction) -> str:
    """A row's cells of time."""
    if each.measured.ms is None:
        return "- | - | -"
    if each.time_error is None:
        return f"{each.measured.ms:.1f} ms | fitted | -"
    return f"{each.measured.ms:.1f} ms | {each.predicted_ms:.1f} ms | {each.time_error:+.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, metavar="DIR")
    options = parser.parse_args()
    try:
        found = predictions(options.results)
    except ConfigError as error:
        parser.error(str(error))
    if not found:
        print(f"{options.results} has no result of E1 to E4 from a GPU")
        return 1
    print("\n".join(table(found)))
    for kind, largest in worst(found).items():
        print(f"worst error of {kind}: {'-' if largest is None else f'{largest:.1%}'} (bar: {BARS[kind]:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
