"""The page of a run: every part is there, from a finished run and from one that was killed."""

import json
import os
import re
import shutil
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.observability.html_report import curves_of, read_metrics
from nemo_rl_offload.observability.svg import bar, line_chart, ticks
from nemo_rl_offload.units import KIB, human_bytes

SUMMARY = {
    "algorithm": "grpo",
    "steps": 2,
    "seed": 1,
    "train": {"loss": 0.5},
    "paged_stash": None,
    "run_dir": "results/a",
    "validation": {"first": 0.25, "last": 0.5},
    "validation_metric": "accuracy",
    "wall_seconds": 61.2,
    "world_size": 2,
    "device": "cpu",
    "skipped_steps": 1,
    "restarts": 3,
    "offload": {
        "engine": "native",
        "modules": ["core_attn", "mlp_norm"],
        "bytes_out": 4 << 20,
        "bytes_in": 3 << 20,
        "per_module": {
            "core_attn": {"bytes_out": 3 << 20, "bytes_in": 2 << 20},
            "mlp_norm": {"bytes_out": 1 << 20, "bytes_in": 1 << 20},
        },
        "peak_host_bytes": 4 << 20,
        "denied_bytes": 0,
        "ineffective_bytes": 0,
        "demand_reloads": 0,
    },
    "memory": {"peak_device_bytes": None},
}


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "a <run>"
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: grpo\ndata:\n  prompt_template: '<{question}>'\n")
    lines = [
        {"step": step, "prefix": prefix, "metrics": {"loss": 1.0 / (step + 1), "offloaded_bytes": 1e6, **timing}}
        for step, prefix, timing in (
            (0, "validation", {}),
            (1, "train", {"timing/train_s": 0.25, "timing/step_s": 1.0}),
            (2, "train", {"timing/train_s": 0.75, "timing/step_s": 1.0}),
            (2, "train", {"timing/train_s": 0.5, "timing/step_s": 1.0, "grad_norm": None}),
        )
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "pre')
    return folder


def report(run_dir: Path) -> Balanced:
    assert main(["report", str(run_dir)]) == 0
    page = Balanced()
    text = (run_dir / "report.html").read_text()
    assert "http" not in text.replace("http://www.w3.org", "")
    page.feed(text)
    assert page.open == []
    return page


def test_a_finished_run(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY))
    samples = [{"seconds": 0.1 * n, "used_bytes": n << 20, "offloaded_bytes": 512 * n} for n in range(5)]
    (run_dir / "memory_trace.json").write_text(json.dumps({"step": 3, "samples": samples}))
    text = report(run_dir).text
    for part in ("grpo: a <run>", "0.25 to 0.5", "2 on cpu", "Memory over step 3", "core_attn 75.0%", "3.00 MiB"):
        assert part in text, part
    assert "<{question}>" in text
    # Of step 2 the second record counts: 0.25 and 0.5 s.
    assert "train 37.5%" in text
    assert "375.0 ms" in text
    assert "other 62.5%" in text


def test_phases_and_host_memory_are_shown_where_they_were_counted(run_dir: Path) -> None:
    memory = {"peak_device_bytes": 7, "peak_device_bytes_by_phase": {"train": 7}, "host_bytes": {"activations": 2048}}
    counted = {"memory": memory, "phase_seconds": {"train": 1.5}}
    for more in ({}, counted):
        (run_dir / "summary.json").write_text(json.dumps(SUMMARY | more))
        text = report(run_dir).text
        for part in ("phase train1.5 s, peak 7 B", "host memory of activations2.00 KiB"):
            assert (part in text) == bool(more), part


def test_memory_by_class_is_drawn_while_the_run_goes_on(run_dir: Path) -> None:
    assert "Memory" not in report(run_dir).text
    sizes = {
        "memory/peak_device_bytes": [7 << 20] * 2,
        "memory/peak_device_bytes/train": [7 << 20, 5 << 20],
        **{f"memory/host_bytes/{name}": [1 << 20, 3 << 20] for name in ("activations", "reference_weights", "teacher")},
        "memory/host_bytes/optimizer": [2 << 20, 2 << 20],
        "memory/device_bytes/gradients": [6 << 20, 6 << 20],
    }
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in (1, 2):
            metrics = {name: values[step - 1] for name, values in sizes.items()}
            file.write(json.dumps({"step": step, "prefix": "train", "metrics": metrics}) + "\n")
    text = report(run_dir).text
    for part in (
        "device memory, the most of each phase",
        "train5.00 MiB7.00 MiB",
        "by what waits there",
        "throughout traininggradients6.00 MiB6.00 MiB",
        "reference weights3.00 MiB3.00 MiB",
        "optimizer2.00 MiB2.00 MiB",
        "1 more",  # memory/peak_device_bytes, and none of these a second time
    ):
        assert part in text, part


def test_warnings_and_an_engine_that_counts_nothing(run_dir: Path) -> None:
    counts = dict.fromkeys(SUMMARY["offload"]) | {"engine": "megatron", "modules": [], "per_module": {}, "overlap": 0.5}
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY | {"offload": counts}))
    assert "Warnings" not in report(run_dir).text
    (run_dir / "warnings.log").write_text("step 1: warning: <no> room\n")
    text = report(run_dir).text
    for part in (
        "Warnings",
        "step 1: warning: <no> room",
        "does not count what it offloads",
        "copies behind compute",
        "50.0%",
    ):
        assert part in text, part


def test_a_run_that_was_killed(run_dir: Path) -> None:
    text = report(run_dir).text
    assert "not finished" in text
    assert "Where the bytes went" not in text


def test_what_changed_on_the_way_and_where_the_run_began(run_dir: Path) -> None:
    assert "Changed on the way" not in report(run_dir).text
    change = {"step": 7, "changes": {"policy.megatron_cfg.optimizer.lr": {"before": "1e-05", "after": '"<b>"'}}}
    (run_dir / "changes.jsonl").write_text(json.dumps(change) + "\n")
    origin = {"checkpoint": "/runs/<first>/step_3", "takes": "weights", "start_weights": "/runs/<first>/step_3"}
    (run_dir / "origin.json").write_text(json.dumps(origin))
    text = report(run_dir).text
    for part in (
        "Changed on the way",
        "optimizer.lr",
        "1e-05",
        '"<b>"',
        "began with",
        "/runs/<first>/step_3 (weights)",
    ):
        assert part in text, part


def test_samples_of_the_first_and_last_validation_and_of_training(run_dir: Path) -> None:
    assert "Samples" not in report(run_dir).text
    base = {"reward": 0.5, "truncated": True, "num_tokens": 7, "num_turns": 1}
    keys = [("validation", 0), ("train", 5), ("validation", 5), ("train", 10), ("validation", 10)]
    records = [
        {
            "step": step,
            "prefix": prefix,
            "prompt": f"{prefix} {step} #{row}#",
            "response": "<b>\x1b[1m\u202e</pre>",
            **base,
        }
        for prefix, step in keys
        for row in range(20)
    ]
    (run_dir / "samples.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records) + '{"step": 11')
    text = report(run_dir).text
    for part in (
        "validation 0 #0#",
        "validation 10 #15#",
        "train 10 #3#",
        "<b>\\x1b[1m\\u202e</pre>",
        "reward 0.5, 7 tokens, cut",
    ):
        assert part in text, part
    for part in ("validation 5", "train 5", "#16#", "\x1b", "\u202e"):
        assert part not in text, part


def test_a_run_that_went_on_from_a_checkpoint_shows_no_step_that_it_gave_up(tmp_path: Path) -> None:
    steps = [("train", 1), ("train", 2), ("validation", 2), ("train", 3), ("validation", 3)]
    again = [("ray", 1), ("validation", 1), ("train", 2)]
    lines = [
        json.dumps({"step": step, "prefix": prefix, "metrics": {"loss": float(number), f"only {number}": 1.0}})
        for number, (prefix, step) in enumerate([*steps, *again])
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics["loss"] == {"ray": [(1, 5.0)], "train": [(1, 0.0), (2, 7.0)], "validation": [(1, 6.0)]}
    assert "only 3" not in metrics


def test_a_run_that_ended_before_shows_no_step_after(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 60, "prefix": "train", "metrics": {"loss": 0.0625}}) + "\n")
    (run_dir / "summary.json").unlink(missing_ok=True)
    assert "steps60" in report(run_dir).text
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY))
    assert "steps2" in report(run_dir).text


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("num_cut", [1, 2, 3, 20])
def test_a_sample_cut_off_within_a_letter_is_left_out(num_cut: int, end: str, run_dir: Path) -> None:
    sample = {"step": 1, "prefix": "train", "prompt": "p", "reward": 0.5, "num_tokens": 1, "num_turns": 1}
    sample |= {"truncated": False, "response": "Gr\u00f6\u00dfe \u65e5"}
    line = json.dumps(sample, ensure_ascii=False).encode()
    cut = line[: line.index("\u65e5".encode()) + 3 - num_cut]
    (run_dir / "samples.jsonl").write_bytes(line + b"\n" + cut + end.encode())
    assert report(run_dir).text.count("Gr\u00f6\u00dfe \u65e5") == 1


def test_a_folder_whose_name_is_no_text_has_a_page(run_dir: Path) -> None:
    strange = run_dir.with_name("bad\udcff")
    run_dir.rename(strange)
    assert main(["report", str(strange)]) == 0
    assert "bad\\udcff" in (strange / "report.html").read_text()
    assert main(["report", str(strange), "--out", str(strange.with_name("page.html"))]) == 0


def test_curves_hold_the_last_of_each_step(run_dir: Path) -> None:
    curves = curves_of(read_metrics(run_dir / "metrics.jsonl"))
    assert curves["timing/train_s"] == {"train": [(1, 0.25), (2, 0.5)]}
    assert curves["loss"] == {"train": [(1, 0.5), (2, 1 / 3)], "validation": [(0, 1.0)]}
    assert "grad_norm" not in curves


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.yaml", "is no run directory: it has no config.yaml"),
        ("metrics.jsonl", "metrics.jsonl: there is none: the run has taken no step yet"),
    ],
)
def test_no_run_is_one_error(missing: str, words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / missing).unlink()
    assert main(["report", str(run_dir)]) == 2
    assert words in capsys.readouterr().err
    assert main(["report", f"{run_dir}x"]) == 2
    assert f"x: there is no such folder. Did you mean '{run_dir.name}'?" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{}, {"timing/step_s": 1.0, "timing/train_s": 0.5}])
def test_a_run_in_its_first_step_has_no_timings_yet(more: dict[str, float], run_dir: Path) -> None:
    """The validation at the start is not of a step, whatever it times."""
    record = {"step": 0, "prefix": "validation", "metrics": {"accuracy": 0.25, **more}}
    (run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    text = report(run_dir).text
    assert "Curves" in text
    assert "Timings" not in text


RECORD = b'{"step": 1, "prefix": "train", "metrics": {"loss": 1}}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", b"", "is damaged: line 1: is empty.*Move it away"),
        ("summary.json", b"{}", "is damaged: offload: Field required"),
        ("summary.json", b"null", "is damaged: Input should be a valid dictionary"),
        ("summary.json", json.dumps({**SUMMARY, "offload": {"engine": 3}}).encode(), "damaged: offload.engine"),
        ("memory_trace.json", b"", "is damaged: line 1: is empty"),
        ("memory_trace.json", b'{"step": 3, "samples": []}', "is damaged: samples: List should have at least 1"),
        ("memory_trace.json", b'{"step": 3, "samples": [{"seconds": 1}]}', "is damaged: samples.0.used_bytes"),
        ("memory_trace.json", b'{"step": 3, "samples": [{"seconds": 1e400}]}', "is damaged: samples.0.seconds: "),
        ("metrics.jsonl", RECORD + b"3\n", "is damaged: line 2: Input should be .*Remove that line"),
        ("metrics.jsonl", b"\xff\xfe\n" + RECORD, "is damaged: line 1: it is not UTF-8 text"),
        ("metrics.jsonl", RECORD.replace(b"1}}", b'"x"}}'), "is damaged: line 1: metrics.loss: "),
        ("metrics.jsonl", RECORD.replace(b"1}}", b"1e999}}"), "is damaged: line 1: metrics.loss: .*finite"),
        ("config.yaml", b"", "is damaged: Input should be a valid dictionary.*Restore it from a copy"),
        ("config.yaml", b"data: {}", "is damaged: algorithm: Field required"),
        ("config.yaml", b"algorithm: grpo\na: {", "is damaged: line [23]: "),
        ("config.yaml", b"algorithm: grpo\nday: 2024-99-99", "is damaged: .*month must be in"),
        ("config.yaml", b"\xff", "is damaged: is not UTF-8 text"),
        ("config.yaml", b"a: " + b"[" * 5000, "is damaged: line 1: is nested over 100 levels"),
    ],
)
def test_a_damaged_file_is_one_error_that_names_it(
    name: str, content: bytes, message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / name).write_bytes(content)
    assert main(["report", str(run_dir)]) == 2
    assert re.fullmatch(rf"error: {re.escape(str(run_dir / name))}: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "name",
    [
        *("config.yaml", "warnings.log", "former_summary.json", "inputs.json", ".lock", "mlflow.db"),
        *("checkpoints/step_2/manifest.json", "checkpoints/step_2/policy/.metadata", "tensorboard/events.out"),
        "former-1/metrics.jsonl",
    ],
)
@pytest.mark.parametrize("is_its_own", [True, False])
def test_the_page_does_not_take_a_file_of_a_run(
    name: str, is_its_own: bool, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reported = run_dir if is_its_own else Path(shutil.copytree(run_dir, tmp_path / "another"))
    if not (run_dir / name).exists():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("kept")
    before = (run_dir / name).read_text()
    assert main(["report", str(reported), "--out", str(run_dir / name)]) == 2
    assert f"belongs to the run in {run_dir}, and would be lost. Give another name." in capsys.readouterr().err
    assert (run_dir / name).read_text() == before


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    "name", ["report.html", "warnings.log", "memory_trace.json", "summary.json", "metrics.jsonl", "samples.jsonl"]
)
def test_links_and_pipes_of_others_are_refused(
    kind: str, name: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / name).unlink(missing_ok=True)
    (tmp_path / "private").write_text("secret")
    if kind == "pipe":
        os.mkfifo(run_dir / name)
    else:
        (run_dir / name).symlink_to(tmp_path / "private")
    assert main(["report", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert str(run_dir / name) in error
    assert f"is a {kind}, and no plain file" in error
    assert (tmp_path / "private").read_text() == "secret"
    assert not (run_dir / "report.html").is_file() or name == "report.html"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1, 500, [100, 200, 300, 400, 500]),
        (-0.3, 0.4, [-0.2, 0, 0.2, 0.4]),
        (7, 7, [7]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    "values",
    [
        (1e308, -1e308),
        (-1.7e308, -1.7e308),
        (1.7e308, 1.7e308),
        (0.0, 1.7e308),
        (0.0, 5e-324),
        (0.0, 1e-322),
        (-5e-324, 5e-324),
        (1.0, 1.0000000000000002),
        (1e300, 1.0000000000000002e300),
    ],
)
def test_extreme_values_are_drawn(values: tuple[float, float], run_dir: Path) -> None:
    for show, unit in (("{:g}".format, 10.0), (human_bytes, KIB)):
        chart = line_chart({"a": list(enumerate(values)), "b": [(10**400, 1.0)]}, "step", show, unit)
        numbers = [float(n) for pair in re.findall(r"points='([^']*)'", chart) for n in re.split("[ ,]", pair)]
        assert all(0 <= number <= 420 for number in numbers)
        assert escape(show(values[0])) in chart
    records = [
        {"step": step, "prefix": "train", "metrics": {"loss": loss}} for step, loss in enumerate(values, start=1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert main(["report", str(run_dir)]) == 0


def test_charts_stay_inside_their_frame() -> None:
    chart = line_chart({"a": [(1, -5.0), (100, 1e9)], "b": [(50, 3.0)]}, "step")
    numbers = [float(n) for pair in re.findall(r"points='([^']*)'", chart) for n in re.split("[ ,]", pair)]
    assert all(0 <= number <= 420 for number in numbers)
    widths = [float(width) for width in re.findall(r"width='([\d.]+)' height='26' fill", bar({"a": 3, "b": 1}))]
    assert widths == [645, 215]


def test_bytes_that_are_all_0_have_a_bar() -> None:
    assert "0.0%" in bar({"weights": 0.0, "gradients": 0.0})


def test_many_steps_are_counted_to_the_last(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 1_234_567, "prefix": "train", "metrics": {"loss": 1.0}}) + "\n")
    assert "1234567" in report(run_dir).text
