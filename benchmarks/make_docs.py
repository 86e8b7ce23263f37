"""Writes `docs/benchmarks.md` and the table of `docs/results.md` from `results/`, and draws the pictures of results.

    python benchmarks/make_docs.py

Whatever stands there comes from the JSON files alone. `--no-pictures` leaves the pictures as they are.
"""

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import planned_choices
from bars import MET, NO_BAR, NOT_YET, Result, Row, load, of, rows
from constants import MODEL
from frontier import RIVALS, Level, Point, levels, points
from predictions import predictions, table

from nemo_rl_offload.units import GIB, gib

PROJECT = Path(__file__).resolve().parents[1]
RESULTS = PROJECT / "benchmarks" / "results"
DOCUMENT = PROJECT / "docs" / "benchmarks.md"
DIGEST = PROJECT / "docs" / "results.md"
BEGIN, END = "<!-- Written by `python benchmarks/make_docs.py`. -->\n", "<!-- Until here. -->\n"
SAME_BITS = {True: "yes", False: "**no**", None: "not checked"}

INTRODUCTION = """# Benchmarks

Written by `python benchmarks/make_docs.py` from the JSON files in `benchmarks/results/`, which hold every sample, the
device, the versions and the command. [benchmarks/README.md](../benchmarks/README.md) says how to repeat each. A bar is
the value that a figure was to reach, set before it was measured. Runs whose samples were not kept are not counted here;
[decisions.md](decisions.md) has their figures.

"""


def bars_table(found: list[Row]) -> Iterator[str]:
    """One row a bar and result."""
    yield "| | figure | must be | measured | | result |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        state = row.state if row.state in ("met", NO_BAR) else f"**{row.state}**"
        yield f"| {row.experiment} | {row.figure} | {row.bar} | {row.measured} | {state} | {row.source} |"


def digest(found: Sequence[Row]) -> Iterator[str]:
    """One row a bar, and whom it is beside: the least and the greatest of all results, and how many met it."""
    yield "| | figure | must be | measured | met in |"
    yield "|---|---|---|---|---|"
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        if row.state != NO_BAR:
            figure = f"{row.figure.partition(', beside')[0]}, beside {row.beside}" if row.beside else row.figure
            groups.setdefault((row.experiment, figure, row.bar), []).append(row)
    for names, each in groups.items():
        num_met = sum(row.state == MET for row in each)
        yield f"| {' | '.join(names)} | {_range(each)} | {num_met} of {len(each)} |"


def _range(found: Sequence[Row]) -> str:
    """The values of rows of one figure, or their sum where they are counts; a row without either says why itself."""
    counts = [re.fullmatch(r"(\d+) of (\d+)", row.measured) for row in found]
    if all(counts):
        return " of ".join(str(sum(int(each[part]) for each in counts if each)) for part in (1, 2))
    valued = sorted((row for row in found if row.value is not None), key=lambda row: row.value or 0.0)
    ends = dict.fromkeys(row.measured.partition(" (")[0] for row in valued[:1] + valued[-1:])
    without = Counter(row.measured.partition(" (")[0] for row in found if row.value is None)
    counted = [f"{reason} in {number}" if valued else reason for reason, number in without.items()]
    return "; ".join([*([" to ".join(ends)] if ends else []), *counted])


def link(results: Mapping[str, Result]) -> Iterator[str]:
    result = results["link"]
    yield "## The link to the host, and other ceilings\n"
    yield "| copies of | out | in | both ways at once | inside the device (read and write) |"
    yield "|---|---|---|---|---|"
    for size, rates in result["copies_gb_per_s"].items():
        yield f"| {size} | " + " | ".join(f"{rates[way]:.1f} GB/s" for way in ("out", "in", "both", "device")) + " |"
    size, ms = list(result["pin_ms"].items())[-1]
    yield f"\nbfloat16 matrix products: {result['bf16_tflops']:.0f} TFLOP/s. Pinning {size} on the host: {ms:.0f} ms."
    yield f"\n![rates by size](../benchmarks/results/{folder_name(result)}/link.png)\n"


def engine_cost(results: Mapping[str, Result]) -> Iterator[str]:
    yield "## The engine's own time on the host\n"
    yield "| tensors on | whose | a tensor, forward | backward | a group, forward | backward |"
    yield "|---|---|---|---|---|---|"
    keys = ("tensor_forward_us", "tensor_backward_us", "group_forward_us", "group_backward_us")
    for device in ("cpu", "cuda"):
        for name, figures in results["engine_cost"].get(device, {}).items():
            yield f"| {device} | {name} | " + " | ".join(f"{figures[key]:.0f} us" for key in keys) + " |"
    yield ""


def offload_bench(name: str, result: Result) -> Iterator[str]:
    """`nemo-rl-offload bench offload`."""
    shape, variants = result["shape"], result["variants"]
    yield f"## {shape['num_layers']} layers of Hugging Face's Qwen2, {shape['sequence_length']} tokens\n"
    about = f"{shape['num_microbatches']} microbatches, without an optimizer (`{name}.json`)"
    yield f"`nemo-rl-offload bench offload`, {about}. It is not E2, but read in the same way.\n"
    yield "| variant | step | beside none | peak | saved | offloaded a step | same bits |"
    yield "|---|---|---|---|---|---|---|"
    for each in variants:
        if each["error"]:
            yield f"| {each['name']} | {each['error']} | | | | | |"
            continue
        yield (
            f"| {each['name']} | {each['step_ms']:.1f} ms | {each['step_ms'] / variants[0]['step_ms']:.3f} "
            f"| {gib(each['peak_allocated_bytes'], 2)} | {gib(each['saved_bytes'], 2)} "
            f"| {gib(each['bytes_out'], 2)} | {SAME_BITS[each['bit_identical']]} |"
        )
    kinds = {"none": "nothing", "ours": "ours", "recompute": "recompute"}
    found = [
        Point(
            each["name"], kinds.get(each["name"].split(":")[0], "hooks"), each["peak_allocated_bytes"], each["step_ms"]
        )
        for each in variants
        if not each["error"]
    ]
    yield from equal_peaks(levels(found, RIVALS["recomputation and hooks"]))
    yield f"\n![memory against time](../benchmarks/results/{folder_name(result)}/{name}.png)\n"


E1_COLUMNS: dict[str, Callable[[float], str]] = {
    "step": "{:.0f} ms".format,
    "throughput lost": "{:.2f} %".format,
    "forward": "{:.1f} ms".format,
    "the host's work in it": "{:.1f} ms".format,
    "peak": lambda num_bytes: gib(num_bytes, 2),
    "reserved": lambda num_bytes: gib(num_bytes, 2),
    "saved of the offloaded bytes": "{:.3f}".format,
}
E1_WAYS = {
    "without offloading": (
        "step_ms_off",
        "",
        "forward_ms_off",
        "forward_host_ms_off",
        "peak_allocated_bytes_off",
        "peak_reserved_bytes_off",
        "",
    ),
    "this engine": (
        "step_ms_on",
        "throughput_lost_percent",
        "forward_ms_on",
        "forward_host_ms_on",
        "peak_allocated_bytes_on",
        "peak_reserved_bytes_on",
        "saved_of_offloaded",
    ),
    "the same copies without an engine": (
        "step_ms_copies",
        "throughput_lost_to_copies_percent",
        "forward_ms_copies",
        "forward_host_ms_copies",
        "",
        "",
        "",
    ),
    "Megatron-Core's engine": (
        "megatrons_step_ms",
        "megatrons_throughput_lost_percent",
        "forward_ms_megatron",
        "forward_host_ms_megatron",
        "megatrons_peak_allocated_bytes",
        "megatrons_peak_reserved_bytes",
        "megatrons_saved_of_offloaded",
    ),
}
"""The figures of each way, by column; "" where a way has none."""


def e1(name: str, result: Result) -> Iterator[str]:
    yield (
        f"### {result['layers']} DeepSeek-V3 layers ({result['transformer_impl']}), "
        f"{result['microbatches']} microbatches, at most {result['max_inflight_bytes'] / GIB:g} GiB on their way "
        f"(`{name}.json`)\n"
    )
    figures = result["figures"]
    yield f"| | {' | '.join(E1_COLUMNS)} |"
    yield "|---|" + "---|" * len(E1_COLUMNS)
    for way, keys in E1_WAYS.items():
        if keys[0] in figures:
            cells = zip(keys, E1_COLUMNS.values(), strict=True)
            yield (
                f"| {way} | " + " | ".join(show(figures[key]) if key in figures else "-" for key, show in cells) + " |"
            )
    waits = "; ".join(f"{way} {figures[f'stall_{key}_ms']:.0f} ms" for way, key in (("out", "out"), ("in", "in")))
    num_samples = min(len(samples) for samples in result["samples"].values())
    counted = (
        f"{num_samples} of each way, up to {figures['step_ms_spread']:.1%} apart"
        if num_samples > 1
        else "one of each way"
    )
    yield f"\nSamples: {counted}. Waits for copies in a step: {waits}."
    yield f"\n![step times and peaks](../benchmarks/results/{folder_name(result)}/{name}.png)\n"


def e2(name: str, result: Result) -> Iterator[str]:
    shape = result["shape"]
    yield (
        f"### {shape['algorithm'].upper()}, {shape['num_layers']} layers ({shape['transformer_impl']}), "
        f"{shape['sequence']} tokens, {shape['num_microbatches']} microbatches (`{name}.json`)\n"
    )
    yield "| variant | step | spread | peak | reserved | same bits |"
    yield "|---|---|---|---|---|---|"
    for each in result["variants"]:
        middle = each.get("medians")
        if each["error"] or middle is None:
            yield f"| {each['name']} | {each['error'] or 'not measured'} | | | | |"
            continue
        yield (
            f"| {each['name']} | {middle['ms']:.1f} ms | {middle['ms_spread']:.1%} "
            f"| {gib(middle['peak_allocated_bytes'], 2)} | {gib(middle['peak_reserved_bytes'], 2)} "
            f"| {SAME_BITS[each['bit_identical']]} |"
        )
    for kinds in RIVALS.values():
        yield from equal_peaks(levels(points(result["variants"]), kinds))
    yield f"\n![memory against time](../benchmarks/results/{folder_name(result)}/{name}.png)\n"


def equal_peaks(found: list[Level]) -> Iterator[str]:
    """What the best of ours takes where a rival has its peak."""
    for level in found:
        ours = f"{level.ours} takes {level.ratio:.3f} of the time" if level.ours else "nothing of ours needs so little"
        yield f"\nAt {gib(level.peak_bytes, 2)}, beside {level.rival}: {ours}."


def e3(name: str, result: Result) -> Iterator[str]:
    yield f"### {len(result['rollouts'])} steps, {result['shape']['transformer_impl']} (`{name}.json`)\n"
    yield "| variant | whole time | highest peak | largest step's own | host memory | largest step's own |"
    yield "|---|---|---|---|---|---|"
    keys = ("highest_peak_bytes", "largest_steps_own_peak_bytes", "host_bytes", "largest_steps_own_host_bytes")
    for each in result["variants"]:
        if "figures" not in each:
            yield f"| {each['name']} | {each['error']} | | | | |"
            continue
        sizes = " | ".join(gib(each["figures"][key], 2) for key in keys)
        yield f"| {each['name']} | {each['figures']['total_ms'] / 1e3:.1f} s | {sizes} |"
    yield f"\n![memory by step](../benchmarks/results/{folder_name(result)}/{name}.png)\n"


def e4(name: str, result: Result) -> Iterator[str]:
    about = f"{result['num_layers']} layers, the most layers at {result['sequence_of_layers']} tokens"
    yield f"### The longest sequence of {about} (`{name}.json`)\n"
    yield "| variant | longest sequence | most layers |"
    yield "|---|---|---|"
    longest, layers = result["figures"]["longest_sequence"], result["figures"]["most_layers"]
    for variant in dict.fromkeys([*longest, *layers]):
        tried = result["layers"].get(variant, {"tried": {}})["tried"]
        fitting = max((int(size) for size in tried if "out_of_memory" not in tried[size]), default=None)
        most = layers.get(variant) or (f"at least {fitting}" if fitting else "-")
        yield f"| {variant} | {longest.get(variant) or '-'} | {most} |"
    yield f"\n![reach](../benchmarks/results/{folder_name(result)}/{name}.png)\n"


def whole_model(name: str, result: Result, folder: str) -> Iterator[str]:
    """Sequences of a whole model whose optimizer is on the host: each that was tried."""
    where = {"host": "streamed from the host"}.get(result["optimizer"], result["optimizer"])
    host, vocabulary = gib(result["host"]["memory_bytes"]), result["model"]["vocab_size"]
    model = result.get("of_model", MODEL).partition("/")[2]
    yield f"### {model}: {result['num_layers']} layers, vocabulary of {vocabulary:,}, host of {host} (`{name}.json`)\n"
    settings = "".join(f", `{each}`" for each in result.get("overrides", ()))
    yield f"Main weights and Adam's state: {where}{settings}. One sequence a step, after a short one.\n"
    yield "| variant | sequence | peak | step | of it the optimizer | tokens/s |"
    yield "|---|---|---|---|---|---|"
    for variant, entry in result["sequence"].items():
        for size, each in entry["tried"].items():
            if "out_of_memory" in each:
                yield f"| {variant} | {int(size):,} | out of memory | | | |"
                continue
            peak, rate = gib(each["peak_allocated_bytes"]), int(size) / each["ms"] * 1e3
            step, optimizer = (f"{each[key] / 1e3:.1f} s" for key in ("ms", "optimizer_ms"))
            yield f"| {variant} | {int(size):,} | {peak} | {step} | {optimizer} | {rate:,.0f} |"
    if result["error"]:
        yield f"\nThe sequences that followed: {result['error']}"
    yield f"\n![memory by length](../benchmarks/results/{folder}/{name}.png)\n"


def e5(name: str, result: Result) -> Iterator[str]:
    """`nemo-rl-offload bench stash`."""
    yield "Copies into pages and back, beside a device copy of the live rows:\n"
    yield "| bytes a row | rows a page | live | device copy | stash | restore |"
    yield "|---|---|---|---|---|---|"
    for each in result["copies"]:
        rates = " | ".join(f"{each[f'{way}_gb_per_s']:.0f} GB/s" for way in ("copy", "stash", "restore"))
        yield f"| {each['row_bytes']} | {each['page_size']} | {each['live_fraction']:.0%} | {rates} |"
    shape, number = result["shape"], result["microbatches"]
    yield f"\n{shape['num_layers']} MoE layers, {number} microbatches of {shape['num_tokens']} tokens:\n"
    yield "| variant | step | peak | pages | live bytes | same bits |"
    yield "|---|---|---|---|---|---|"
    for each in result["layers"]:
        sizes = [each[key] and gib(each[key]) for key in ("peak_bytes", "stash_bytes", "live_bytes")]
        yield (
            f"| {each['name']} | {each['step_ms']:.1f} ms | {' | '.join(size or '-' for size in sizes)} "
            f"| {SAME_BITS[each['bit_identical']]} |"
        )
    yield f"\n![stash](../benchmarks/results/{folder_name(result)}/{name}.png)\n"


CASES = {
    "packs": "packs of 16 sequences of 1,024 tokens",
    "rows": "eight rows of 184 tokens a microbatch",
    "whole": "microbatches of one sequence",
}


def training_rate(name: str, result: Result) -> Iterator[str]:
    """Of whole models with their own vocabulary."""
    yield (
        f"### {result['model']}, {CASES[result['case']]}, {result['num_sequences']} sequences of "
        f"{result['lengths'][0]} tokens a step, {result['implementation']} (`{name}.json`)\n"
    )
    yield "| variant | step | TFLOP/s | beside the first | moved out | stalls | device busy | host busy |"
    yield "|---|---|---|---|---|---|---|---|"
    for variant, each in result["rates"].items():
        if not each["samples"]:
            yield f"| {variant} | out of memory | | | | | | |"
            continue
        counts, profile = each.get("per_step", {}), each.get("profile", {})
        stalls = counts.get("stall_in_ms", 0) + counts.get("stall_out_ms", 0)
        beside = f"{1 + each['cost']:.3f}" if "cost" in each else "-"
        busy = " | ".join(f"{profile[f'{lane}_ms']:.0f} ms" if profile else "-" for lane in ("compute", "host"))
        yield (
            f"| {variant} | {each['medians']['ms']:.0f} ms | {each['tflops']:.0f} | {beside} "
            f"| {gib(int(counts.get('bytes_out', 0)), 1)} | {stalls:.0f} ms | {busy} |"
        )
    if scored := result.get("logprobs"):
        busy = (
            f", of which the device computes for {scored['profile']['compute_ms']:.0f}" if "profile" in scored else ""
        )
        yield f"\nLog-probabilities: {scored['ms']:.0f} ms{busy}; {scored['tflops']:.0f} TFLOP/s."
    yield ""


def training_phases(result: Result) -> Iterator[str]:
    """What an optimizer on the host costs of a training phase, by the length of its microbatches."""
    yield f"## A training phase of {result['num_microbatches']} microbatches, with its optimizer step\n"
    yield (
        f"Of Qwen2.5-1.5B, {result['transformer_impl']}; the faster of two phases in a process for each place. At most "
        f"{result['lengths'][0]['bound']:.3f} of the time with the state on the device was aimed at "
        "(`residency_phase.json`).\n"
    )
    yield "| tokens a microbatch | state on the device | on the host | host over device | the optimizer step alone |"
    yield "|---|---|---|---|---|"
    for row in result["lengths"]:
        found = {each["place"]: each for each in result["measured"] if each["length"] == row["length"]}
        times = [f"{found[place]['ms'] / 1e3:.2f} s" for place in ("device", "host")]
        alone = " and ".join(f"{found[place]['optimizer_ms'] / 1e3:.2f}" for place in ("device", "host"))
        yield f"| {row['length']:,} | {' | '.join(times)} | {row['ratio']:.3f} | {alone} s |"
    yield ""


PHASES = ("refit", "generation", "logprobs", "reference_logprobs", "train", "step")


def grpo_steps(results: Mapping[str, Result], folder: str) -> Iterator[str]:
    """Whole steps by phase, and what the engine does by itself."""
    steps = {
        name: each["parts"]["step"] for name, each in results.items() if "medians" in each["parts"].get("step", {})
    }
    yield "## A whole GRPO step of a 1.5B model with its own vocabulary, by phase\n"
    yield "256 responses of 128 tokens to 16 prompts of about 70, by `nemo-rl-offload run grpo`: medians.\n"
    yield f"| result | {' | '.join(PHASES)} | tokens/s | peak | first step | from command to end of it | set besides |"
    yield "|" + "---|" * (len(PHASES) + 6)
    for name, step in steps.items():
        found = step["medians"]
        seconds = _phase_seconds(found)
        until_first_s = step["until_first_step_s"]
        own = _overrides(results[name])
        yield (
            f"| `{name}.json` | {' | '.join(seconds)} | {found['tokens_per_s']:,.0f} "
            f"| {gib(step['summary']['memory']['peak_device_bytes'], 1)} | {step['first_step_s']:.1f} s "
            f"| {until_first_s:.0f} s | {own} |"
        )
    yield f"\n![phases of a step](../benchmarks/results/{folder}/grpo_step.png)\n"
    for name, each in results.items():
        for part in ("alone", "engine"):
            if "tokens_per_s" in (found := each["parts"].get(part, {})):
                yield from _of_the_engine(name, part, found)


def _phase_seconds(found: Mapping[str, float]) -> list[str]:
    def cell(phase: str) -> str:
        if (exposed := found.get(f"timing/exposed_{phase}_s")) is not None:
            return f"{exposed:.2f} s waited for"
        seconds = found.get(f"timing/{phase}_s")
        return f"{seconds:.2f} s" if seconds else "-"

    return [cell(phase) for phase in PHASES]


def _overrides(result: Mapping[str, Any]) -> str:
    return ", ".join(f"`{text.removeprefix('policy.')}`" for text in result.get("overrides", [])) or "-"


_SIZES_BESIDE_TRL = {"responses": 256, "response_tokens": 128, "prompts": 16, "prompt_tokens": 0, "card_gib": None}
"""Of results that do not say them."""


def beside_trl(results: Mapping[str, Result]) -> Iterator[str]:
    """Each attempt at GRPO steps of one shape, by phase."""
    yield "## GRPO steps at TRL's settings\n"
    yield "Responses to prompts of about 70 tokens where nothing else is said, with vLLM on the same GPU: medians."
    yield "Memory is the highest in use of all processes.\n"
    by_size: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        responses, tokens, prompts, prompt_tokens, card_gib = (
            result.get(key, size) for key, size in _SIZES_BESIDE_TRL.items()
        )
        size = f"{responses} responses of {tokens:,} tokens to {prompts} prompt{'s' if prompts > 1 else ''}"
        size += f" of {prompt_tokens:,} tokens" if prompt_tokens else ""
        size += f", {card_gib} GiB of the card" if card_gib else ""
        by_size.setdefault(size, {})[name] = result
    for size, alike in by_size.items():
        yield f"{size}:\n"
        yield from _attempts_beside_trl(alike)
    for name, result in results.items():
        if "note" in result:
            yield f"`{name}.json`: {result['note']}\n"


def _set_besides(result: Result) -> list[str]:
    """Overrides of ours by the command."""
    behind = itertools.dropwhile(lambda word: word != "--set", result["command"])
    return list(itertools.takewhile(lambda word: not word.startswith("--"), list(behind)[1:]))


def _set_for(attempt: Mapping[str, Any], result: Result) -> str:
    """What an attempt had besides; of one that ended early, and of TRL's, by the command."""
    if "overrides" in attempt:
        return _overrides(attempt)
    given = result["command"]
    share = [f"vLLM's share {given[given.index('--share') + 1]}"] if "--share" in given else []
    besides = _set_besides(result) if attempt["side"] == "ours" else []
    return ", ".join([*share, *([_overrides({"overrides": besides})] if besides else [])]) or "-"


def _attempts_beside_trl(results: Mapping[str, Result]) -> Iterator[str]:
    figures = "tokens/s | device | host | first step | from command to end of it | set besides"
    yield f"| result | attempt | {' | '.join(PHASES)} | {figures} |"
    yield "|" + "---|" * (len(PHASES) + 8)
    for name, result in results.items():
        for attempt in result["attempts"]:
            device, host = (gib(attempt["memory"][f"peak_{where}_bytes"], 1) for where in ("device", "host"))
            about, own = f"| `{name}.json` | {attempt['name']}", _set_for(attempt, result)
            if attempt["error"]:
                nothing = " | ".join("-" * (len(PHASES) + 1))
                yield f"{about}: {attempt['error']} | {nothing} | {device} | {host} | - | - | {own} |"
                continue
            found = attempt["medians"]
            seconds = _phase_seconds(found)
            rate = f"{found['tokens_per_s']:,.0f}" if found["tokens_per_s"] else "-"
            until = f"{attempt['until_first_step_s']:.0f} s" if "until_first_step_s" in attempt else "-"
            yield (
                f"{about} | {' | '.join(seconds)} | {rate} "
                f"| {device} | {host} | {attempt['first_step_s']:.1f} s | {until} | {own} |"
            )
    yield ""


def sft_beside_trl(results: Mapping[str, Result]) -> Iterator[str]:
    """Each attempt at steps of supervised fine-tuning."""
    yield "## Steps of supervised fine-tuning at TRL's settings\n"
    yield "Medians; memory is the highest in use of all processes.\n"
    for name, result in results.items():
        keys = "".join(f", `{text.removeprefix('policy.')}`" for text in _set_besides(result))
        yield (
            f"Shape `{result['shape']}`{keys}, {result['sequences']} sequences of up to {result['tokens']:,} tokens, "
            f"packs of {result['pack_tokens']:,} tokens (`{name}.json`):\n"
        )
        yield "| attempt | tokens/s | a step | device | host | first step |"
        yield "|---|---|---|---|---|---|"
        for attempt in result["attempts"]:
            if attempt["error"]:
                yield f"| {attempt['name']} | {attempt['error']} |"
                continue
            found = attempt["medians"]
            device, host = (gib(attempt["memory"][f"peak_{where}_bytes"], 1) for where in ("device", "host"))
            seconds = f"{found['timing/step_s']:.2f} s | {device} | {host} | {attempt['first_step_s']:.1f} s"
            yield f"| {attempt['name']} | {found['tokens_per_s']:,.0f} | {seconds} |"
        yield ""
        if "note" in result:
            yield f"{result['note']}\n"


def adapters(results: Mapping[str, Result]) -> Iterator[str]:
    """The engine in programs of others, beside what these have."""
    programs = {"trl": "TRL's SFTTrainer", "fsdp2": "FSDP2, one rank, transformers' own loss"}
    yield "## The engine inside other programs\n"
    yield "A model of Qwen2.5-1.5B's shape, float32 weights that compute in bfloat16, one sequence a step: medians."
    yield "`attention` is `attn_norm`, `core_attn` and `attn_proj`; `activations` is `mlp_act`; `layers` is"
    yield "`model.layers.*`."
    for name, result in results.items():
        yield f"\n{programs[result['program']]}, {result['length']:,} tokens (`{name}.json`):\n"
        yield "| way | a step | highest allocated | to the host |"
        yield "|---|---|---|---|"
        for way, found in result["attempts"].items():
            if "error" in found:
                yield f"| {way} | {found['error']} |"
                continue
            sizes = [gib(int(found[key]), 1) for key in ("peak_allocated_bytes", "bytes_out")]
            moved = sizes[1] if "ours" in way else "-"
            yield f"| {way} | {found['ms']:.0f} ms | {sizes[0]} | {moved} |"
    yield ""


def learning(name: str, result: Result, folder: str) -> Iterator[str]:
    """What runs learned, with what the model said before and after."""
    yield f"## What runs learned: {result['title']} (`{name}.json`)\n"
    what = "right" if result["runs"][0].get("metric", "accuracy") == "accuracy" else "validation loss"
    evaluated = [run["evaluation"] for run in result["runs"] if "evaluation" in run]
    yield f"| run | {what} before | after | steps | a step | whole run |{' right afterwards |' if evaluated else ''}"
    yield f"|---|---|---|---|---|---|{'---|' if evaluated else ''}"
    for run in result["runs"]:
        before, after = run["validation"][0][1], run["validation"][-1][1]
        times = f"{run['medians']['timing/step_s']:.1f} s | {run['wall_s']:.0f} s"
        row = f"| {run.get('name', f'seed {run["seed"]}')} | {before:.3f} | {after:.3f} | {run['steps']} | {times} |"
        if found := run.get("evaluation"):
            row += f" {found['accuracy']:.3f} +- {found['standard_error']:.3f} of {found['num_problems']} |"
        yield row
    yield f"\n![validation by step](../benchmarks/results/{folder}/{name}.png)\n"
    if evaluated:
        yield "| run | problem | answered afterwards |"
        yield "|---|---|---|"
    for run in result["runs"]:
        for sample in run.get("evaluation", {"samples": []})["samples"]:
            problem, said = _one_line(sample["prompt"].split("user")[-1]), _one_line(sample["response"])
            yield f"| {run['name']} | {problem} | {said} ({sample['reward']:g}) |"
    if evaluated:
        yield ""
    shown = [each for run in result["runs"] for each in run["samples"]]
    if shown:
        yield "| problem | before | after |"
        yield "|---|---|---|"
    for sample in shown:
        said = [f"{_one_line(sample[when]['response'])} ({sample[when]['reward']:g})" for when in ("before", "after")]
        yield f"| {_one_line(sample['prompt'].split('user')[-1])} | {' | '.join(said)} |"
    yield ""


def _one_line(text: str) -> str:
    """Of a conversation's turn, without its marks."""
    return " ".join(re.sub(r"<\|im_(start|end)\|>(assistant)?", " ", text).replace("|", "\\|").split())


def _of_the_engine(name: str, part: str, found: Mapping[str, Any]) -> Iterator[str]:
    what = "vLLM alone" if part == "alone" else "vLLM beside the policy that trains"
    yield f"{what}, 256 requests of 512 tokens (`{name}.json`):\n"
    for key, rates in found.items():
        if key.startswith("tokens_per_s"):
            how = key.removeprefix("tokens_per_s").replace("_", " ").strip() or (
                "asked for tokens" if part == "alone" else "in all"
            )
            yield f"- {median(rates):,.0f} tokens/s {how}"
    for key, seconds in found.get("seconds", {}).items():
        yield f"- {key.replace('_', ' ')}: {median(seconds):.2f} s"
    yield ""


def folder_name(result: Result) -> str:
    return str(result["device"]).lower().replace(" ", "-")


SECTIONS = {
    "E1": ("The first pipeline stage of Megatron-LM's PR 1913", e1),
    "E2": ("Dense layers: memory against step time", e2),
    "E3": ("Steps of different sizes", e3),
    "E4": ("Reach", e4),
}


def has_bars(results: Mapping[str, Result]) -> bool:
    """Whether one of E1 to E6 was measured there."""
    return any(str(each.get("experiment", "")).startswith("E") for each in results.values())


def _experiments(results: Mapping[str, Result], folder: Path) -> Iterator[str]:
    yield from bars_table(rows(results, folder))
    yield ""
    for experiment, (title, section) in SECTIONS.items():
        yield f"## {experiment}: {title}\n"
        found = of(results, experiment)
        for name, result in found.items():
            yield from section(name, result)
        if not found:
            yield "Not yet measured.\n"
    yield "## E5: the paged stash\n"
    yield from e5("stash", results["stash"]) if "stash" in results else ["Not yet measured.\n"]
    yield "## E6: the planner's predictions\n"
    if found_predictions := predictions(folder):
        yield from table(found_predictions)
        yield f"\n![errors of predictions](../benchmarks/results/{folder.name}/predictions.png)\n"
        yield from planned(folder)
    else:
        yield "Nothing to compare yet: no result of E1 to E4.\n"


def device_page(folder: Path) -> Iterator[str]:
    """Everything that was measured on one device."""
    results = load(folder)
    yield f"# {next((str(each['device']) for each in results.values() if 'device' in each), folder.name)}\n"
    if has_bars(results):
        yield from _experiments(results, folder)
    for name, result in of(results, "profile").items():
        yield f"## A steady step\n\n![lanes](../benchmarks/results/{folder_name(result)}/{name}.png)\n"
    if rates := of(results, "training_rate"):
        yield "## Training steps of whole models, the optimizer's step left out of the rate\n"
        for name, result in rates.items():
            yield from training_rate(name, result)
    if whole := of(results, "whole_model"):
        yield "## The longest sequence of a whole model, with the optimizer on the host\n"
        for name, result in whole.items():
            yield from whole_model(name, result, folder.name)
    if phases := results.get("residency_phase"):
        yield from training_phases(phases)
    if steps := of(results, "grpo_step"):
        yield from grpo_steps(steps, folder.name)
    if attempts := of(results, "beside_trl"):
        yield from beside_trl(attempts)
    if attempts := of(results, "sft_beside_trl"):
        yield from sft_beside_trl(attempts)
    if programs := of(results, "adapters"):
        yield from adapters(programs)
    for name, result in of(results, "learning").items():
        yield from learning(name, result, folder.name)
    for name, result in results.items():
        if name.startswith("offload_"):
            yield from offload_bench(name, result)
    for name, general in (("link", link), ("engine_cost", engine_cost)):
        if name in results:
            yield from general(results)


def planned(folder: Path) -> Iterator[str]:
    """What `plan` chooses for E2."""
    if found := planned_choices.choices(folder):
        yield "What `plan` chooses for the memory that recomputation takes in E2, by its prediction, the best mixture"
        yield "of ours that was measured there, and a run of what was chosen, where there is one:\n"
        yield from planned_choices.table(found)
        yield ""


def document() -> str:
    """The whole page."""
    lines = [line for folder in device_folders() for line in device_page(folder)]
    return INTRODUCTION + "\n".join(lines).rstrip() + "\n"


def digest_page() -> str:
    """`docs/results.md` with its table made anew."""
    text = DIGEST.read_text(encoding="utf-8")
    own = re.search(re.escape(BEGIN) + ".*" + re.escape(END), text, re.DOTALL)
    assert own, f"{DIGEST} has lost the lines {BEGIN} and {END}"
    found = [row for folder in device_folders() if has_bars(each := load(folder)) for row in rows(each, folder)]
    measured = [row for row in found if row.state != NOT_YET]
    lines = [*digest(measured)]
    if others := len(found) - len(measured):
        lines += ["", f"{others} more figures have a bar and no kept result yet."]
    return text[: own.start()] + BEGIN + "\n".join(lines) + "\n" + END + text[own.end() :]


def device_folders() -> list[Path]:
    """Those with an experiment's results; what else was measured stands in pages of its own."""
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
    return [path for path in folders if any("experiment" in each for each in load(path).values())]


def draw_pictures(folders: Sequence[Path]) -> None:
    """Beside each result, and one of the planner's predictions; `bench` drew its own."""
    import plots

    drawers = {
        "E1": plots.draw_ways,
        "E2": lambda path, result: plots.draw_frontier(path, result, points(result["variants"])),
        "E3": plots.draw_steps,
        "E4": plots.draw_reach,
        "whole_model": plots.draw_lengths,
        "profile": plots.draw_lanes,
        "learning": plots.draw_learning,
    }
    for folder in folders:
        results = load(folder)
        for experiment, draw in drawers.items():
            for name, result in of(results, experiment).items():
                draw(folder / f"{name}.png", result)
        if steps := of(results, "grpo_step"):
            plots.draw_phases(folder / "grpo_step.png", steps)
        if "link" in results:
            plots.draw_link(folder / "link.png", results["link"])
        if found := predictions(folder):
            plots.draw_predictions(folder / "predictions.png", results, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-pictures", action="store_true")
    options = parser.parse_args()
    if not options.no_pictures:
        draw_pictures(device_folders())
    DOCUMENT.write_text(document(), encoding="utf-8")
    DIGEST.write_text(digest_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
