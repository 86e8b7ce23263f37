"""Random plans, searched for what contradicts itself.

    python tests/unit/planner/plan_cases.py --cases 1000

A case is a command line: a model of the catalogue with a few of its layers, a layout, a device, lengths, what is
recomputed and offloaded already, and a budget near what it takes. `find_faults` reads what a user reads, the text and
the JSON, and asks for each row of it: its keys are given to another plan, as are the changes that are proposed.
"""

import argparse
import contextlib
import io
import json
import random
import re
import shlex
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_rl_offload.cli.parser import build_parser
from nemo_rl_offload.cli.plan import plan
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.report.tables import WIDTH, plan_tables
from nemo_rl_offload.specs.catalogue import CATALOGUE, find_config
from nemo_rl_offload.specs.devices import DEVICES
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES
from nemo_rl_offload.units import GIB, KIB, MIB, parse_bytes

CFG = "policy.megatron_cfg"
CLOSE_MS = 0.002
"""Times are rounded to a thousandth."""
RECURRENT = (
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B",
    "Qwen/Qwen3.5-35B-A3B",
)
"""Models whose layers are of plain torch alone."""
SAME_TIME = 1.02
"""Searches for two budgets may differ by so much, and lists of modules are preferred to `auto` within it."""


@dataclass(frozen=True)
class Planned:
    """What `plan` says."""

    data: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class Case:
    """A command line of `plan`."""

    config: str
    options: tuple[str, ...]
    overrides: tuple[str, ...]

    def plan(self, *more: str, options: tuple[str, ...] | None = None) -> Planned:
        """Raises ConfigError as the command does."""
        words = ["plan", str(PROJECT_ROOT / "examples/configs" / self.config), "--format", "json"]
        parsed = build_parser().parse_args([*words, *(self.options if options is None else options)])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            found = plan(parsed, [*self.overrides, *more])
        console = Console(width=WIDTH, record=True, markup=False, file=io.StringIO(), highlight=False, soft_wrap=True)
        console.print(plan_tables(found))
        return Planned(json.loads(printed.getvalue()), console.export_text())

    def __str__(self) -> str:
        return " ".join(["plan", self.config, *self.options, *self.overrides])


def draw(seed: int, folder: Path) -> Case:
    """A case that can be planned; models are written below `folder`."""
    rng = random.Random(seed)
    while True:
        case = _draw(rng, folder)
        try:
            free = case.plan()
        except ConfigError:
            continue
        outcomes, frontier = free.data["outcomes"], free.data["frontier"]
        most, least = outcomes["nothing_offloaded"]["peak_bytes"], frontier[0]["peak_bytes"]
        device = DEVICES[free.data["device"]].memory_bytes
        peak = rng.choice((most, least, *(point["peak_bytes"] for point in frontier)))
        share = rng.choice((1.0, 1.0, rng.uniform(0.3, 1.05), rng.uniform(0.9, 1.0)))
        budget = min(device, round(least + (peak - least) * share) + rng.choice((0, 1, -1, 500)) * MIB)
        memory = f"{max(budget, GIB) / MIB:.6f}MiB"
        return Case(case.config, (*case.options, "--memory", memory), case.overrides)


def _draw(rng: random.Random, folder: Path) -> Case:
    name = rng.choice((*sorted(CATALOGUE), *RECURRENT))
    num_layers = rng.choice((3, 4, 8, 8, 12))
    shape = {**(CATALOGUE.get(name) or find_config(name) or {}), "num_hidden_layers": num_layers}
    if "hybrid_override_pattern" in shape:
        shape["hybrid_override_pattern"] = shape["hybrid_override_pattern"][-num_layers:]
    if "mtp_num_hidden_layers" in shape:
        shape["mtp_num_hidden_layers"] = 0
    if "first_k_dense_replace" in shape:
        shape["first_k_dense_replace"] = rng.choice((0, 1, num_layers // 2))
    if "num_nextn_predict_layers" in shape:
        shape["num_nextn_predict_layers"] = rng.choice((0, 1))
    if shape.get("decoder_sparse_step") == 1:
        shape["mlp_only_layers"] = rng.choice(([], [0, 1], list(range(1, num_layers, 2))))
    has_experts = any("expert" in key for key in shape)
    model = folder / f"{name.split('/')[1]}-{num_layers}-{zlib.crc32(json.dumps(shape, sort_keys=True).encode())}"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(shape))

    tensor, pipeline = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 1, 2, 4))
    config = rng.choice(("sft.yaml", "dpo.yaml", "grpo_math_1B_megatron.yaml", "grpo_math_1B_megatron.yaml"))
    is_generating = config.startswith("grpo")
    micro_batch = rng.choice((1, 1, 2, 4, 8))
    packed = rng.choice(("true", "false"))
    implementation = "torch" if name in RECURRENT else rng.choice(("torch", "torch", "transformer_engine", "auto"))
    engine = "megatron" if implementation == "transformer_engine" and rng.random() < 0.5 else "native"
    length = rng.choice((1024, 2048, 4096, 8192, 16384))
    words = [
        f"policy.model_name={model}",
        f"policy.max_total_sequence_length={length}",
        f"policy.train_micro_batch_size={micro_batch}",
        f"policy.sequence_packing.enabled={packed}",
        f"policy.logprob_chunk_size={rng.choice(('null', 256, 1024))}",
        f"{CFG}.use_fused_linear_logprobs={rng.choice(('true', 'true', 'false'))}",
        f"{CFG}.tensor_model_parallel_size={tensor}",
        f"{CFG}.sequence_parallel={'true' if tensor > 1 and (has_experts or rng.random() < 0.7) else 'false'}",
        f"{CFG}.pipeline_model_parallel_size={pipeline}",
        f"{CFG}.virtual_pipeline_model_parallel_size={2 if pipeline > 1 and rng.random() < 0.3 else 'null'}",
        f"{CFG}.context_parallel_size={rng.choice((1, 1, 1, 2))}",
        f"{CFG}.expert_model_parallel_size={rng.choice((1, 2, 4, 8)) if has_experts else 1}",
        f"{CFG}.transformer_impl={implementation}",
        f"{CFG}.activation_offload.engine={engine}",
        f"{CFG}.optimizer.use_distributed_optimizer={rng.choice(('true', 'true', 'false'))}",
    ]
    if is_generating:
        words += [f"data.max_input_seq_length={length // 4}", f"policy.generation.max_new_tokens={length // 4}"]
    words += _offloading(rng, engine) + _recomputation(rng, has_experts, engine)
    if rng.random() < 0.15:
        words.append(f"{CFG}.activation_offload.host_memory_budget={rng.choice(('1GiB', '4GiB', '64GiB', '500GiB'))}")
    options = ("--gpu", rng.choice(sorted(DEVICES)), "--gpus-per-node", "8")
    return Case(config, options, tuple(words))


def _offloading(rng: random.Random, engine: str) -> list[str]:
    kind = rng.choice(("none", "none", "list", "list", "auto"))
    if kind == "none":
        return [f"{CFG}.fine_grained_activation_offloading=false"]
    if kind == "auto" and engine == "native":
        return [f"{CFG}.fine_grained_activation_offloading=true", f"{CFG}.offload_modules=auto"]
    modules = rng.sample(NATIVE_MODULES, rng.randint(1, 4))
    listed = [f"{CFG}.fine_grained_activation_offloading=true", f"{CFG}.offload_modules=[{','.join(modules)}]"]
    if rng.random() < 0.2:
        listed.append(f"{CFG}.activation_offload_fraction={rng.choice((0.25, 0.5, 0.75))}")
    return listed


def _recomputation(rng: random.Random, has_experts: bool, engine: str) -> list[str]:
    kind = rng.choice(("none", "none", "none", "selective", "full"))
    modules, method, num_layers = "null", "null", "null"
    if kind == "selective":
        names = ["core_attn", "layernorm", *(["mlp_act", "mlp_fc1"] if engine == "native" else ["mlp"])]
        names += ["moe_act", "moe", "shared_experts", "mla_up_proj"] if has_experts else []
        chosen = rng.sample(names, rng.randint(1, 2))
        modules = f"[{','.join(chosen)}]"
        num_layers = str(rng.choice((1, 2))) if "mlp_fc1" in chosen and rng.random() < 0.5 else "null"
    elif kind == "full":
        method, num_layers = rng.choice(("uniform", "block")), str(rng.choice((1, 2)))
    return [
        f"{CFG}.recompute_granularity={'null' if kind == 'none' else kind}",
        f"{CFG}.recompute_modules={modules}",
        f"{CFG}.recompute_method={method}",
        f"{CFG}.recompute_num_layers={num_layers}",
    ]


def as_overrides(keys: Mapping[str, Any], path: str = CFG) -> Iterator[str]:
    """Keys of a plan as a user gives them."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from as_overrides(value, f"{path}.{key}")
        else:
            said = json.dumps(value) if not isinstance(value, list) else f"[{','.join(value)}]"
            yield f"{path}.{key}={said}"


def find_faults(case: Case) -> Iterator[str]:
    """What contradicts itself, one line each."""
    found = case.plan()
    yield from _minimum(found)
    yield from _choice(found)
    yield from _counts(found)
    yield from _text(found)
    yield from _other_budgets(case, found)
    yield from _rows_can_be_asked_for(case, found)
    yield from _recomputes_for_something(case, found)
    yield from _changes_do(case, found)


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, int, float, int | None]]:
    """All that is shown: where, peak, time, and host memory where that is shown."""
    for name, row in data["outcomes"].items():
        yield name, row["peak_bytes"], row["step_ms"], row["host_bytes"]
    for number, point in enumerate(data["frontier"]):
        yield f"row {number}", point["peak_bytes"], point["step_ms"], None


def _minimum(found: Planned) -> Iterator[str]:
    """Nothing that is shown takes less memory than what is said to be needed, or fits where nothing is said to."""
    data = found.data
    chosen, budget, host = data["outcomes"]["chosen"], data["budget_bytes"], data["host"]["pinned_limit_per_rank_bytes"]
    if data["training_fits"] != (chosen["peak_bytes"] <= budget):
        yield f"minimum: fits is {data['fits']}, with a peak of {chosen['peak_bytes']} of {budget}"
    if chosen["host_bytes"] > host:
        yield f"minimum: the choice takes {chosen['host_bytes']} of the host, which has {host}"
    if data["training_fits"]:
        return
    for name, peak, _, host_bytes in _rows(data):
        if peak < chosen["peak_bytes"] and (host_bytes or 0) <= host:
            yield f"minimum: {name} takes {peak}, less than the {chosen['peak_bytes']} that are needed"


def _other_budgets(case: Case, found: Planned) -> Iterator[str]:
    """What is shown where there is more memory does not fit where nothing is said to."""
    free = case.plan(options=case.options[: case.options.index("--memory")]).data
    budget, host = found.data["budget_bytes"], found.data["host"]["pinned_limit_per_rank_bytes"]
    for name, peak, ms, host_bytes in _rows(free):
        if peak <= budget and (host_bytes or 0) <= host and not found.data["training_fits"]:
            yield f"budgets: {name} of a plan with more memory takes {peak} and {ms} ms, and nothing is said to fit"
    for point in free["frontier"]:
        if point["peak_bytes"] > budget:
            continue
        if found.data["outcomes"]["chosen"]["step_ms"] > SAME_TIME * point["step_ms"]:
            yield f"budgets: {point} of a plan with more memory is faster than {found.data['outcomes']['chosen']}"


def _choice(found: Planned) -> Iterator[str]:
    """The choice is the fastest of what fits, and a row of the frontier; none of the others is beaten."""
    data = found.data
    chosen, budget, host = data["outcomes"]["chosen"], data["budget_bytes"], data["host"]["pinned_limit_per_rank_bytes"]
    for name, peak, ms, host_bytes in _rows(data):
        if peak <= budget and (host_bytes or 0) <= host:
            if not data["training_fits"]:
                yield f"choice: {name} fits, and the choice does not"
            elif ms < chosen["step_ms"] - CLOSE_MS:
                yield f"choice: {name} fits and takes {ms} ms, less than the choice's {chosen['step_ms']}"
    rows = data["frontier"]
    for less, more in pairwise(rows):
        is_equal = less["step_ms"] == more["step_ms"] == chosen["step_ms"]
        if less["peak_bytes"] >= more["peak_bytes"] or (less["step_ms"] <= more["step_ms"] and not is_equal):
            yield f"choice: row {less} beats {more}, or stands behind it"
    if {key: chosen[key] for key in ("peak_bytes", "step_ms")} not in rows:
        yield "choice: it is no row"


def _counts(found: Planned) -> Iterator[str]:
    """Layers are counted once."""
    for stage in found.data["stages"]:
        most = sum(stop - start for start, stop in stage["layers"])
        for row in stage["modules"]:
            counted = re.fullmatch(r"(.+) of (\d+)", row["goes"])
            if counted is None:
                continue
            numbers = [int(number) for number in re.findall(r"\d+", counted[1])]
            if sum(numbers) != int(counted[2]):
                yield f"counts: {row['module']} of stage {stage['stage']}: {row['goes']}"
            if int(counted[2]) > most + 1:  # of multi-token prediction
                yield f"counts: {row['module']} of stage {stage['stage']}: {row['goes']}, which has {most} layers"


def _text(found: Planned) -> Iterator[str]:
    """The text says what the JSON does, and sizes that differ look so."""
    data, text, lines = found.data, found.text, found.text.splitlines()
    titles = {
        "nothing_offloaded": "nothing offloaded",
        "as_configured": "as configured",
        "chosen": "chosen for the budget",
        "written": "as whole modules",
    }
    for name, title in titles.items():
        (line,) = [line for line in lines if line.startswith(f"{title}: ")] or [""]
        row = data["outcomes"].get(name)
        if (row is None) != (not line):
            yield f"text: '{title}' is said, or is data, alone"
        elif row is not None:
            said = f"peak {row['peak_bytes'] / GIB:.1f} GiB, step {row['step_ms'] / 1e3:.2f} s"
            if said not in line:
                yield f"text: {line!r} is not {said}"
    does_fit, does_not = bool(re.search(r"\n(the training step alone )?fits with", text)), "does not fit: " in text
    if does_fit != data["training_fits"] or does_not == data["training_fits"]:
        yield f"text: fits is {data['fits']}, and the text says something else"
    keys = data["megatron_cfg"]
    if data["training_fits"] and ("fits without offloading" in text) != (
        not keys["offload_modules"] and not keys.get("recompute_granularity")
    ):
        yield f"text: 'fits without offloading' with {keys}"
    if needs := re.search(r"needs ([\d.]+) GiB, ([\d.]+) ([KMG]iB) more than there is", text):
        stage = max(data["stages"], key=lambda each: each["shortfall_bytes"])
        lacking = float(needs[2]) * {"KiB": KIB / GIB, "MiB": MIB / GIB, "GiB": 1}[needs[3]]
        sizes = (stage["peak_bytes"], data["shortfall_bytes"])
        for shown, size in zip((float(needs[1]), lacking), sizes, strict=True):
            if abs(shown - size / GIB) > 0.051:
                yield f"text: {needs[0]} where it is {size}"
        if float(needs[2]) == 0 and data["shortfall_bytes"] > 2**17:
            yield f"text: {needs[0]}"
    for point in data["frontier"]:
        ratio = point["step_ms"] / data["outcomes"]["nothing_offloaded"]["step_ms"]
        if not re.search(rf"{point['peak_bytes'] / GIB:.1f} GiB +{point['step_ms'] / 1e3:.2f} s +{ratio:.3f}", text):
            yield f"text: {point} is in no row"


def _differs(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return row["peak_bytes"] != other["peak_bytes"] or abs(row["step_ms"] - other["step_ms"]) > CLOSE_MS


def _rows_can_be_asked_for(case: Case, found: Planned) -> Iterator[str]:
    """Keys of a row, given to another plan, are allowed and come back as configured."""
    data = found.data
    asked = {"chosen": (data["outcomes"]["chosen"], data["megatron_cfg"])}
    for number, point in enumerate(data["frontier"]):
        all_keys = data.get("frontier_megatron_cfg")
        if all_keys is None:
            yield f"rows: row {number} cannot be asked for"
        else:
            asked[f"row {number}"] = (point, all_keys[number])
    without_memory = case.options[: case.options.index("--memory")]
    for name, (row, keys) in asked.items():
        options = without_memory if keys["offload_modules"] == "auto" else case.options
        try:
            again = case.plan(*as_overrides(keys), options=options)
        except ConfigError as error:
            yield f"rows: {name} is refused: {error}"
            continue
        came = again.data["outcomes"]["as_configured" if keys["offload_modules"] else "nothing_offloaded"]
        if _differs(row, came):
            yield f"rows: {name} is {row}, and came back as {came} with {keys}"
        if name == "chosen" and data["training_fits"] and not again.data["training_fits"]:
            yield f"rows: the choice fits, and does not when it is asked for, with {keys}"


def _recomputes_for_something(case: Case, found: Planned) -> Iterator[str]:
    """What is recomputed more than before takes less memory than without, or less time: it needs no copy then."""
    data = found.data
    before = next(word for word in case.overrides if word.startswith(f"{CFG}.recompute_modules="))
    given = set(re.findall(r"\w+", before.partition("=")[2])) - {"null"}
    rows = [(data["outcomes"]["chosen"], data["megatron_cfg"])]
    rows += zip(data["frontier"], data.get("frontier_megatron_cfg", []), strict=False)
    for row, keys in rows:
        listed = keys.get("recompute_modules") or []
        for name in sorted(set(listed) - given):
            less = sorted((set(listed) - {name}) | given)
            changed = {**keys, "recompute_modules": less}
            if not less:
                changed |= {"recompute_granularity": None, "recompute_modules": None, "recompute_num_layers": None}
            elif not {"mlp", "mlp_fc1"} & set(less):
                changed |= {"recompute_num_layers": None}
            try:
                again = case.plan(*as_overrides(changed))
            except ConfigError:
                continue
            came = again.data["outcomes"]["as_configured" if keys["offload_modules"] else "nothing_offloaded"]
            is_as_good = came["peak_bytes"] <= row["peak_bytes"] and came["step_ms"] <= row["step_ms"] + CLOSE_MS
            is_as_good &= came["host_bytes"] <= data["host"]["pinned_limit_per_rank_bytes"]
            if is_as_good and keys["offload_modules"] != "auto":
                yield f"recomputes: {name} in vain: {row}, without it {came}"


def _changes_do(case: Case, found: Planned) -> Iterator[str]:
    """Changes that would do make it fit; the nearest is as near as it is said to be."""
    changes = found.data["changes"]
    if found.data["fits"]:
        if changes:
            yield f"changes: it fits, and {changes}"
        return
    for text in changes:
        if text == "none that was tried":
            continue
        nearest = re.fullmatch(r"none that was tried; (.+) comes nearest, (.+) short", text)
        partly = re.fullmatch(r"none that was tried; with (.+) training and .+ fit, and there is left: (.+)", text)
        one = nearest or partly
        try:
            again = case.plan(*shlex.split(one[1] if one else text))
        except ConfigError as error:
            yield f"changes: '{text}' is refused: {error}"
            continue
        if not one and not again.data["fits"]:
            yield f"changes: with '{text}' there is left: {again.data['lacking']}"
        if partly and (again.data["fits"] or partly[2] != " ".join(again.data["lacking"])):
            yield f"changes: with '{text}' there is left: {again.data['lacking']}"
        if not nearest and not again.data["training_fits"]:
            yield f"changes: '{text}' is {again.data['shortfall_bytes'] / GIB:.2f} GiB short"
        if nearest and abs(again.data["shortfall_bytes"] - parse_bytes(nearest[2])) > 0.051 * GIB:
            yield f"changes: '{text}' is {again.data['shortfall_bytes'] / GIB:.2f} GiB short"


def run_cases(seeds: Iterable[int], say: Callable[[str], None] | None = None) -> tuple[list[str], Counter[str]]:
    """What was wrong, by case, and how often each situation came up."""
    seen: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            case = draw(seed, Path(folder))
            faults = list(find_faults(case))
            data = case.plan().data
            auto = data["megatron_cfg"]["offload_modules"] == "auto"
            seen["fits" if data["training_fits"] else "does not fit"] += 1
            seen["auto"] += auto
            seen["recomputes"] += bool(data["megatron_cfg"].get("recompute_granularity"))
            seen["rows"] += len(data["frontier"])
            seen["changes"] += len(data["changes"])
            seen["stages"] += len(data["stages"]) > 1
            lines = [f"case {seed}: {fault}\n    {case}" for fault in faults]
            wrong += lines
            if say is not None:
                for line in lines:
                    say(line)
    return wrong, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    wrong, seen = run_cases(range(options.first, options.first + options.cases), lambda line: print(line, flush=True))
    kinds = Counter(fault.split(": ")[1] for fault in wrong)
    print(f"{options.cases} cases, {len(wrong)} contradictions", dict(kinds) if wrong else "")
    print("seen:", ", ".join(f"{name} {number}" for name, number in sorted(seen.items())))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
