"""Several runs beside each other: `nemo-rl-offload report A B C`, as tables of 80 columns or as a page."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from textwrap import TextWrapper
from typing import TypedDict

from rich.table import Table

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.observability.html_report import NOT_SHOWN_THEN, curves_of, read_metrics
from nemo_rl_offload.observability.page import framed
from nemo_rl_offload.observability.svg import line_chart
from nemo_rl_offload.runs.comparison import leaves
from nemo_rl_offload.runs.run_directory import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from nemo_rl_offload.runs.run_files import Summary, read_config_text, read_json
from nemo_rl_offload.specs.documents import read_yaml
from nemo_rl_offload.units import human_bytes

BESIDE = 3
"""Runs in a table of 80 columns."""
DIFFERING_KEYS = 30
_PER_STEP: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "timing/step_s": ("seconds a step", "{:.3g}".format),
    "memory/peak_device_bytes": ("peak device memory", human_bytes),
    "offloaded_bytes": ("offloaded a step", human_bytes),
}
DRAWN = ("loss", "reward", "accuracy", "grad_norm", "lr", "tokens_per_s")


class Run:
    """What is compared of a run. Raises ConfigError as the report of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _, self.algorithm = read_config_text(folder / CONFIG_FILE)
        self.config = leaves(read_yaml(folder / CONFIG_FILE))
        self.summary = read_json(folder / SUMMARY_FILE, Summary, NOT_SHOWN_THEN)
        self.metrics = read_metrics(folder / METRICS_FILE, self.summary)
        self.curves = curves_of(self.metrics)
        if not self.curves:
            raise ConfigError(f"{folder}: the run has logged nothing yet.")

    def _values(self, name: str, prefix: str) -> list[float]:
        return [value for _, value in self.curves.get(name, {}).get(prefix, [])]

    def data(self) -> "RunData":
        """What is compared of it, in numbers."""
        steps = [step for lines in self.curves.values() for line in lines.values() for step, _ in line]
        progress: dict[str, Progress] = {}
        for name in ("accuracy", "reward", "loss"):
            for prefix in ("validation", "train"):
                if values := self._values(name, prefix):
                    best = min(values) if name == "loss" else max(values)
                    (_, first), *_, (_, last) = 2 * self.metrics[name][prefix]
                    progress[f"{prefix}/{name}"] = {"first": first, "last": last, "best": best}
        return {
            "run_dir": str(self.folder),
            "algorithm": self.algorithm,
            "steps": int(max(steps)),
            "finished": self.summary is not None,
            "skipped_steps": self._values("skipped_updates", "train").count(1),
            "progress": progress,
            "per_step": {
                name: max(values) if "peak" in name else median(values)
                for name in _PER_STEP
                if (values := self._values(name, "train"))
            },
        }

    def figures(self) -> dict[str, str]:
        """The same as texts, by what they are."""
        data = self.data()
        found = {"algorithm": data["algorithm"], "steps": str(data["steps"])}
        found["state"] = "finished" if data["finished"] else "not finished"
        for path, values in data["progress"].items():
            name = path.replace("/", " ")
            found[name] = f"{_figure(values['first'])} to {_figure(values['last'])}"
            if path.startswith("validation"):
                found[f"best {name}"] = f"{values['best']:.3g}"
        if skipped := data["skipped_steps"]:
            found["steps skipped (not finite)"] = str(skipped)
        for name, value in data["per_step"].items():
            what, show = _PER_STEP[name]
            found[what] = show(value)
        return found


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


class Progress(TypedDict):
    """Of a metric."""

    first: float | None
    last: float | None
    """None where it is no finite number."""
    best: float
    """The least of a loss, the most of the others."""


class RunData(TypedDict):
    """What is compared of a run."""

    run_dir: str
    algorithm: str
    steps: int
    finished: bool
    skipped_steps: int
    """Whose loss or gradients were not finite in any update."""
    progress: dict[str, Progress]
    """By prefix and name of the metric, as `validation/accuracy`."""
    per_step: dict[str, float]
    """By the metrics' names: medians of the training steps, and the most of what is a peak."""


class ComparisonData(TypedDict):
    """What `report --format json` prints."""

    runs: dict[str, RunData]
    differing_keys: dict[str, dict[str, object]]
    """Of the configurations: values by the runs that have the key."""


def comparison_data(runs: Sequence[Run]) -> ComparisonData:
    """Figures, and all keys that differ."""
    named = dict(zip(letters(runs), runs, strict=True))
    return {
        "runs": {name: run.data() for name, run in named.items()},
        "differing_keys": {
            key: {name: run.config[key] for name, run in named.items() if key in run.config}
            for key in _differing_keys(runs)
        },
    }


def _differing_keys(runs: Sequence[Run]) -> list[str]:
    keys = sorted({key for run in runs for key in run.config})
    return [key for key in keys if len({repr(run.config.get(key, _ABSENT)) for run in runs}) > 1]


def _shown(runs: Sequence[Run], key: str) -> list[str]:
    """Values as they are written; a text in quotation marks where another run has what looks like it."""
    values = [run.config.get(key, _ABSENT) for run in runs]
    texts = [str(value) for value in values]
    return texts if len({*texts}) == len({*map(repr, values)}) else list(map(repr, values))


class _Absent:
    """A run's configuration has no such key."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def rows_of(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Figures and keys that differ, by what they are; one text for each run."""
    figures = [run.figures() for run in runs]
    names = list(dict.fromkeys(name for each in figures for name in each))
    rows = {name: [each.get(name, "-") for each in figures] for name in names}
    differing = _differing_keys(runs)
    rows |= {key: _shown(runs, key) for key in differing[:DIFFERING_KEYS]}
    if (more := len(differing) - DIFFERING_KEYS) > 0:
        rows[f"and {more} more keys"] = ["" for _ in runs]
    return rows


def letters(runs: Sequence[Run]) -> list[str]:
    """What each run is called in the tables."""
    return [chr(ord("A") + number) if number < 26 else f"R{number + 1}" for number in range(len(runs))]


def tables(runs: Sequence[Run], width: int = 80) -> Iterator[Table]:
    """Tables with some runs each, of at most 80 columns, and no wider than `width`."""
    rows, width = rows_of(runs), min(width, 80)
    beside = max(1, BESIDE * width // 80)
    for start in range(0, len(runs), beside):
        part = slice(start, start + beside)
        names = letters(runs)[part]
        wrapper = _AtDots(max(1, (width - 3 * len(names) - 4) * 3 // (3 + 2 * len(names))))
        table = Table(width=width)
        table.add_column("", overflow="fold", width=wrapper.width)
        for name in names:
            table.add_column(name, overflow="fold", ratio=1)
        for what, values in rows.items():
            table.add_row(wrapper.fill(what), *values[part])
        yield table


class _AtDots(TextWrapper):
    """Breaks keys behind dots and underscores, where that is possible."""

    wordsep_re = re.compile(r"(?<=[\s._])")


def page(runs: Sequence[Run], *, script: str = "") -> str:
    """The same as a page, with the runs' curves over each other."""
    return framed(f"{len(runs)} runs", _body(runs), script=script)


def _body(runs: Sequence[Run]) -> Iterator[str]:
    named = dict(zip(letters(runs), runs, strict=True))
    yield "<ul>" + "".join(f"<li>{name}: {escape(str(run.folder))}</li>" for name, run in named.items()) + "</ul>"
    head = "".join(f"<th>{name}</th>" for name in named)
    yield f"<div class='wide'><table><tr><th></th>{head}</tr>"
    for what, values in rows_of(runs).items():
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        yield f"<tr><td>{escape(what)}</td>{cells}</tr>"
    yield "</table></div><h2>Curves</h2><div class='charts'>"
    for prefix in ("validation", "train"):
        for name in DRAWN:
            if lines := _lines(named, name, prefix):
                yield f"<figure><h3>{prefix} {name}</h3>{line_chart(lines, 'step')}</figure>"
    yield "</div>"


def _lines(named: Mapping[str, Run], name: str, prefix: str) -> dict[str, list[tuple[float, float]]]:
    found = {letter: run.curves.get(name, {}).get(prefix, []) for letter, run in named.items()}
    return {letter: line for letter, line in found.items() if line}
