"""A run as one HTML page that needs nothing else: `nemo-rl-offload report RUN_DIR`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean, median

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.observability.page import framed
from nemo_rl_offload.observability.sample_text import outcome, visible
from nemo_rl_offload.observability.summary_table import host_rows, offload_figures, phase_rows, validation_figures
from nemo_rl_offload.observability.svg import bar, line_chart
from nemo_rl_offload.runs.begin import checkpoints_of
from nemo_rl_offload.runs.origin import ORIGIN_FILE, read_origin
from nemo_rl_offload.runs.output import write_text, written_aside
from nemo_rl_offload.runs.run_directory import (
    CHANGES_FILE,
    CONFIG_FILE,
    ERROR_FILE,
    FORMER_SUMMARY_FILE,
    MEMORY_FILE,
    METRICS_FILE,
    RESTARTS_FILE,
    SAMPLES_FILE,
    SCORERS_FILE,
    SUMMARY_FILE,
    WARNINGS_FILE,
    check_not_of_run,
)
from nemo_rl_offload.runs.run_files import (
    ChangeRecord,
    MemoryOfStep,
    MemorySample,
    MemoryTotals,
    OffloadTotals,
    SampleRecord,
    Summary,
    read_changes,
    read_config_text,
    read_json,
    read_log,
    read_records,
    read_samples,
)
from nemo_rl_offload.runs.samples import shortened
from nemo_rl_offload.units import KIB, human_bytes

NOT_SHOWN_THEN = "Move it away, and the page is written without it."
SAMPLES_SHOWN, SAMPLE_CHARACTERS = 16, 4000
"""Of a validation or a step, and of each of their texts."""
FIRST_CURVES = ("loss", "reward", "accuracy", "grad_norm", "lr", "tokens_per_s")
DEVICE_BY_PHASE, DEVICE_BY_CLASS, HOST_BY_CLASS = (
    f"memory/{name}/" for name in ("peak_device_bytes", "device_bytes", "host_bytes")
)
"""What metrics of memory begin with: the most on a device in each phase, what stands there, what waits on all hosts."""
Metrics = dict[str, dict[str, list[tuple[float, float | None]]]]
"""By metric and prefix: steps and values; None where that was no finite number."""
Curves = dict[str, dict[str, list[tuple[float, float]]]]

RUN_FILES = (
    *(CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, FORMER_SUMMARY_FILE, MEMORY_FILE, CHANGES_FILE, ORIGIN_FILE),
    *(RESTARTS_FILE, WARNINGS_FILE, SCORERS_FILE, ERROR_FILE, SAMPLES_FILE),
)


def write_report(run_dir: Path, destination: Path) -> None:
    """Write the page of a run, finished or not.

    Raises:
        ConfigError: the folder holds no run that has logged metrics, or a file there is damaged.
        ResourceError: the page cannot be written; one that was there still is.
    """
    check_not_of_run(destination)
    page = run_page(run_dir)
    if destination.parent.resolve() != run_dir.resolve():
        write_text(destination, page)
        return
    with written_aside(destination, replaces_links=False) as file:  # which others may have put there
        file.write(page.encode(errors="backslashreplace"))


def run_page(run_dir: Path, *, script: str = "") -> str:
    """The page of a run, finished or not. Raises ConfigError as `write_report`."""
    config, algorithm = read_config_text(run_dir / CONFIG_FILE)
    return framed(f"{algorithm}: {run_dir.resolve().name}", _body(run_dir, config), script=script)


def _body(run_dir: Path, config: str) -> Iterator[str]:
    summary = read_json(run_dir / SUMMARY_FILE, Summary, NOT_SHOWN_THEN)
    curves = curves_of(read_metrics(run_dir / METRICS_FILE, summary))
    if not curves:
        raise ConfigError(f"{run_dir}: the run has logged nothing yet.")
    yield from _overview(summary, curves, run_dir)
    yield from _changes(read_changes(run_dir / CHANGES_FILE))
    yield from _warnings(run_dir / WARNINGS_FILE)
    yield "<h2>Curves</h2>"
    yield from _curves(curves)
    yield from _memory_by_class(curves)
    yield from _samples(read_samples(run_dir / SAMPLES_FILE))
    if trace := read_json(run_dir / MEMORY_FILE, MemoryOfStep, NOT_SHOWN_THEN):
        yield f"<h2>Memory over step {trace['step']}</h2>"
        yield from _memory(trace["samples"], summary)
    if summary:
        yield "<h2>Where the bytes went</h2>"
        yield from _bytes(summary["offload"], summary["memory"])
        yield from _phases(summary)
    if "train" in curves.get("timing/step_s", {}):  # not before the first step has ended
        yield "<h2>Timings</h2>"
        yield from _timings(curves)
    yield f"<h2>Configuration</h2><details><summary>{CONFIG_FILE}</summary><pre>{escape(config)}</pre></details>"


def _changes(records: Iterable[ChangeRecord]) -> Iterator[str]:
    """With what the run went on otherwise than before."""
    rows = [
        f"<tr><td class='n'>{record['step']}</td><td>{escape(path)}</td><td>{escape(change['before'])}</td>"
        f"<td>{escape(change['after'])}</td></tr>"
        for record in records
        for path, change in record["changes"].items()
    ]
    if rows:
        yield "<h2>Changed on the way</h2><div class='wide'><table><tr><th class='n'>after step</th><th>key</th>"
        yield f"<th>before</th><th>after</th></tr>{''.join(rows)}</table></div>"


def _warnings(path: Path) -> Iterator[str]:
    if (text := read_log(path)) is not None:
        lines = text.splitlines()
        yield f"<h2>Warnings</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _samples(records: Iterable[SampleRecord]) -> Iterator[str]:
    """Of the first and the last validation, and of the last step of training that has any."""
    first: list[SampleRecord] = []
    last: dict[str, list[SampleRecord]] = {}
    for record in records:
        group = last.setdefault(record["prefix"], [])
        if group and group[0]["step"] != record["step"]:
            if record["prefix"] == "validation" and not first:
                first = group
            group = last[record["prefix"]] = []
        if len(group) < SAMPLES_SHOWN:
            group.append(record)
    groups = [("First validation", first), ("Last validation", last.get("validation", []))]
    groups.append(("Last of training", last.get("train", [])))
    if not any(group for _, group in groups):
        return
    yield "<h2>Samples</h2>"
    for name, group in groups:
        if group:
            yield f"<details><summary>{name}: step {group[0]['step']}</summary>"
            yield from map(_sample, group)
            yield "</details>"
    yield f"<p class='note'>More of them are in {SAMPLES_FILE}.</p>"


def _sample(record: SampleRecord) -> str:
    prompt, response = (
        escape(visible(shortened(record[key], SAMPLE_CHARACTERS), keeps="\n\t")) for key in ("prompt", "response")
    )
    return f"<h3>{escape(outcome(record))}</h3><pre class='prompt'>{prompt}</pre><pre class='said'>{response}</pre>"


def read_metrics(path: Path, summary: Summary | None = None) -> Metrics:
    """The metrics of a run, without those of steps that it gave up: a step that comes again takes the place of itself
    and of all after it, and a finished run has none after the last of its `summary`. What a kill cut off is left out.

    Raises:
        ConfigError: the file cannot be read, or is damaged.
    """
    latest: dict[tuple[str, str, int], float | None] = {}
    last_step = -1
    for record in read_records(path):
        if summary is not None and record["step"] > summary["steps"]:
            continue
        if record["prefix"] == "train":
            if record["step"] <= last_step:
                latest = {key: value for key, value in latest.items() if key[2] < record["step"]}
            last_step = record["step"]
        for name, value in record["metrics"].items():
            latest[name, record["prefix"], record["step"]] = value
    metrics: Metrics = {}
    for name, prefix, step in sorted(latest):
        metrics.setdefault(name, {}).setdefault(prefix, []).append((step, latest[name, prefix, step]))
    return metrics


def curves_of(metrics: Metrics) -> Curves:
    """What can be drawn: values that are finite numbers."""
    curves: Curves = {}
    for name, lines in metrics.items():
        for prefix, line in lines.items():
            if numbers := [(step, value) for step, value in line if value is not None]:
                curves.setdefault(name, {})[prefix] = numbers
    return curves


def _overview(summary: Summary | None, curves: Curves, run_dir: Path) -> Iterator[str]:
    last_step = max(step for prefixes in curves.values() for line in prefixes.values() for step, _ in line)
    rows = {"steps": f"{last_step:.0f}"}
    if summary is None:
        rows["state"] = "not finished"
    else:
        shown = validation_figures(summary, lambda value: "-" if value is None else f"{value:.4g}", " to ")
        rows |= {
            f"validation {summary['validation_metric']}": shown,
            "wall time": f"{summary['wall_seconds']:.0f} s",
            "workers": f"{summary['world_size']} on {summary['device']}",
            "steps skipped (not finite)": str(summary["skipped_steps"]),
            "restarts since it was last begun": str(summary["restarts"]),
        }
    if there := checkpoints_of(run_dir):
        rows["checkpoints"] = there
    if (run_dir / RESTARTS_FILE).exists():
        rows["why it was restarted"] = f"see {RESTARTS_FILE}"
    if (origin := read_origin(run_dir)) is not None:
        rows["began with"] = f"{origin['checkpoint']} ({origin['takes']})"
    yield _table(rows)


def _table(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _curves(curves: Curves) -> Iterator[str]:
    names = [
        name for name in curves if not name.startswith(("timing/", DEVICE_BY_PHASE, DEVICE_BY_CLASS, HOST_BY_CLASS))
    ]
    first = [name for name in FIRST_CURVES if name in names]
    yield _charts(_figure(name, curves[name]) for name in first)
    others = [name for name in names if name not in first]
    yield f"<details><summary>{len(others)} more</summary>{_charts(_figure(name, curves[name]) for name in others)}"
    yield "</details>"


def _charts(figures: Iterable[str]) -> str:
    return f"<div class='charts'>{''.join(figures)}</div>"


def _figure(name: str, lines: Mapping[str, list[tuple[float, float]]]) -> str:
    is_bytes = name.endswith("_bytes") or "bytes_" in name
    chart = line_chart(lines, "step", human_bytes, KIB) if is_bytes else line_chart(lines, "step")
    return f"<figure><h3>{escape(name)}</h3>{chart}</figure>"


def _memory_by_class(curves: Curves) -> Iterator[str]:
    """Of training steps: curves and a table of the most on a device in each phase, and of what waits on the hosts."""
    groups = {
        "device memory, the most of each phase": _lines_below(DEVICE_BY_PHASE, curves),
        "memory of the fullest worker's device throughout training": _lines_below(DEVICE_BY_CLASS, curves),
        "host memory of all workers, by what waits there": _lines_below(HOST_BY_CLASS, curves),
    }
    found = {name: lines for name, lines in groups.items() if lines}
    if not found:
        return
    yield "<h2>Memory</h2>"
    yield _charts(
        f"<figure><h3>{name}</h3>{line_chart(lines, 'step', human_bytes, KIB)}</figure>"
        for name, lines in found.items()
    )
    yield "<div class='wide'><table><tr><th></th><th class='n'>last step</th><th class='n'>most</th></tr>"
    for name, lines in found.items():
        yield f"<tr><th colspan='3'>{name}</th></tr>"
        for what, line in lines.items():
            sizes = (line[-1][1], max(size for _, size in line))
            cells = "".join(f"<td class='n'>{human_bytes(size)}</td>" for size in sizes)
            yield f"<tr><td>{escape(what)}</td>{cells}</tr>"
    yield "</table></div>"


def _lines_below(beginning: str, curves: Curves) -> dict[str, list[tuple[float, float]]]:
    """By phase or class."""
    return {
        name.removeprefix(beginning).replace("_", " "): lines["train"]
        for name, lines in curves.items()
        if name.startswith(beginning) and "train" in lines
    }


def _memory(samples: Sequence[MemorySample], summary: Summary | None) -> Iterator[str]:
    is_device = bool(summary and summary["memory"]["peak_device_bytes"])
    used = "device memory" if is_device else "memory of the process"
    lines = {
        used: [sample["used_bytes"] for sample in samples],
        "offloaded, in host memory": [sample["offloaded_bytes"] for sample in samples],
    }
    figures = []
    for name, sizes in lines.items():
        line = [(1000 * sample["seconds"], size) for sample, size in zip(samples, sizes, strict=True)]
        chart = line_chart({name: line}, "ms since the step began", human_bytes, KIB)
        figures.append(f"<figure><h3>{name}</h3>{chart}</figure>")
    yield _charts(figures)
    yield "<p class='note'>Of the first worker, generation and log-probabilities included.</p>"


def _bytes(offload: OffloadTotals, memory: MemoryTotals) -> Iterator[str]:
    modules = offload["per_module"]
    if any(module["bytes_out"] for module in modules.values()):
        yield bar({name: module["bytes_out"] for name, module in modules.items()})
        yield "<div class='wide'><table><tr><th>module</th><th class='n'>to host memory</th><th class='n'>back</th>"
        yield "</tr>"
        for name, module in modules.items():
            moved = (module["bytes_out"], module["bytes_in"])
            cells = "".join(f"<td class='n'>{human_bytes(num_bytes)}</td>" for num_bytes in moved)
            yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
        yield "</table></div>"
    elif offload["engine"] == "megatron":
        yield "<p>Megatron-Core's engine does not count what it offloads.</p>"
    else:
        yield "<p>Nothing was offloaded.</p>"
    yield _table(offload_figures(offload) | {"peak device memory": human_bytes(memory["peak_device_bytes"])})


def _phases(summary: Summary) -> Iterator[str]:
    """Device memory and seconds of each phase, and the host's memory by what waits there."""
    if rows := phase_rows(summary):
        yield f"<h3>Phases of all steps</h3>{_table(rows)}"
    if sizes := summary["memory"].get("device_bytes"):
        yield f"<h3>Memory of the fullest worker's device throughout training</h3>{bar(sizes)}"
        yield _table({name: human_bytes(size) for name, size in sizes.items()})
    if sizes := summary["memory"].get("host_bytes"):
        yield f"<h3>Host memory of all workers</h3>{bar({name: size for name, size in sizes.items() if size})}"
        yield _table(host_rows(summary["memory"]))


def _timings(curves: Curves) -> Iterator[str]:
    phases = {
        name.removeprefix("timing/").removesuffix("_s"): [value for _, value in lines["train"]]
        for name, lines in curves.items()
        if name.startswith("timing/") and "train" in lines
    }
    steps = phases.pop("step")
    if phases:
        others = max(0.0, sum(steps) - sum(map(sum, phases.values())))
        yield bar({name: sum(values) for name, values in phases.items()} | {"other": others})
    names = "".join(f"<th class='n'>{name}</th>" for name in ("mean", "median", "longest"))
    yield f"<div class='wide'><table><tr><th>phase</th>{names}</tr>"
    for name, values in (*phases.items(), ("step", steps)):
        cells = "".join(f"<td class='n'>{1000 * f(values):,.1f} ms</td>" for f in (mean, median, max))
        yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
    yield "</table></div>"
