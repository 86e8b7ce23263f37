"""Several runs beside each other: their figures, and what they have otherwise."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from run_dirs import make_run

from nemo_rl_offload.cli import command_line
from nemo_rl_offload.observability.run_comparison import Run, page, rows_of, tables


def test_figures_and_keys_that_differ(tmp_path: Path) -> None:
    runs = [Run(make_run(tmp_path / "a")), Run(make_run(tmp_path / "b", 2, lr=0.5))]
    rows = rows_of(runs)
    assert rows["steps"] == ["3", "2"]
    assert rows["validation accuracy"] == ["0.1 to 0.3", "0.1 to 0.2"]
    assert rows["best validation accuracy"] == ["0.3", "0.2"]
    assert rows["train loss"] == ["1 to 0.333", "1 to 0.5"]
    assert rows["policy.lr"] == ["1e-05", "0.5"]
    assert "grpo.seed" not in rows
    assert "<polyline" in page(runs)


def test_json_has_numbers_and_values_as_configured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a", lr=0.25), make_run(tmp_path / "b", 2, lr=0.5)
    with (b / "config.yaml").open("a") as file:
        file.write("only_here: null\n")
    words = ["report", str(a), str(b), "--format", "json"]
    assert command_line.main([*words, "--out", str(tmp_path / "page.html")]) == 0
    data = json.loads(capsys.readouterr().out)
    first, second = data["runs"]["A"], data["runs"]["B"]
    assert [(each["run_dir"], each["steps"]) for each in (first, second)] == [(str(a), 3), (str(b), 2)]
    assert first["progress"]["validation/accuracy"] == pytest.approx({"first": 0.1, "last": 0.3, "best": 0.3})
    assert second["progress"]["train/loss"] == {"first": 1.0, "last": 0.5, "best": 0.5}
    assert data["differing_keys"]["policy.lr"] == {"A": 0.25, "B": 0.5}
    assert data["differing_keys"]["only_here"] == {"B": None}
    assert (tmp_path / "page.html").exists()
    for more in (["--serve"], []):
        assert command_line.main(["report", *words[1 if more else 2 :], *more]) == 2
        assert "--format json: compares several runs" in capsys.readouterr().err


@pytest.mark.parametrize("num_runs", [2, 3, 5])
def test_tables_fit_80_columns(num_runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(make_run(tmp_path / f"run{number}", number + 1, lr=number)) for number in range(num_runs)]
    assert command_line.main(["report", *folders, "--out", str(tmp_path / "page.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if folders[-1] in line] == [f"{'ABCDE'[num_runs - 1]}: {folders[-1]}"]
    drawn = [line for line in lines if line.startswith(("│", "┃", "┏", "└"))]
    assert {len(line) for line in drawn} == {80}
    assert sum(line.startswith("┏") for line in drawn) == -(-num_runs // 3)
    assert (tmp_path / "page.html").read_text().count("<th>") == num_runs + 1


def test_values_that_look_alike_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for folder, lines in ((a, "x: null\ny: '1'\nz: .inf\nw: 1\n"), (b, "x: 'None'\ny: 1\nz: 2000-01-01\nw: 1\n")):
        with (folder / "config.yaml").open("a") as file:
            file.write(lines)
    assert command_line.main(["report", str(a), str(b), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))["differing_keys"]
    assert found == {"x": {"A": None, "B": "None"}, "y": {"A": "1", "B": 1}, "z": {"A": None, "B": "2000-01-01"}}
    rows = rows_of([Run(a), Run(b)])
    assert (rows["x"], rows["y"]) == (["None", "'None'"], ["'1'", "1"])


@pytest.mark.parametrize("columns", [1, 5, 8])
def test_no_room_for_a_table_is_no_fault(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    folders = [str(make_run(tmp_path / name, 3, lr=number)) for number, name in enumerate("ab")]
    assert command_line.main(["report", *folders]) == 0


@pytest.mark.parametrize(("columns", "beside"), [(40, 1), (60, 2), (20, 1), (200, 3)])
def test_tables_fit_a_narrow_terminal(
    columns: int, beside: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    folders = [str(make_run(tmp_path / name, 3, lr=number)) for number, name in enumerate("ab")]
    assert command_line.main(["report", *folders]) == 0
    lines = capsys.readouterr().out.splitlines()
    drawn = [line for line in lines if line.startswith(("│", "┃", "┏", "└"))]
    assert {len(line) for line in drawn} == {min(columns, 80)}
    assert sum(line.startswith("┏") for line in drawn) == -(-2 // beside)


def test_keys_are_broken_at_dots_and_underscores(tmp_path: Path) -> None:
    runs = [Run(make_run(tmp_path / name)) for name in "abc"]
    runs[0].config["checkpointing.metric_name"] = "loss"
    runs[0].config["policy.megatron_cfg.activation_offload.host_memory_budget"] = "2GiB"
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(*tables(runs, 80))
    cells = [line.split("│")[1].strip() for line in console.export_text().splitlines() if line.startswith("│")]
    assert cells[-5:] == [
        "checkpointing.metric_",
        "name",
        "policy.megatron_cfg.",
        "activation_offload.",
        "host_memory_budget",
    ]


def test_a_page_takes_no_file_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert command_line.main(["report", str(a), str(b), "--out", str(b / "metrics.jsonl")]) == 2
    captured = capsys.readouterr()
    assert "belongs to the run" in captured.err
    assert captured.out == ""
    assert command_line.main(["report", str(a), str(tmp_path / "c")]) == 2
    assert "c: there is no such folder. Give that of a run." in capsys.readouterr().err


def test_a_run_that_diverged_does_not_look_as_it_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was no number was left out, so that the last figure of a run was its first."""
    diverged = make_run(tmp_path / "a", 1)
    with (diverged / "metrics.jsonl").open("a") as file:
        for step in (2, 3):
            metrics = {"train": {"loss": None, "skipped_updates": 1.0}, "validation": {"accuracy": None}}
            for prefix, values in metrics.items():
                file.write(json.dumps({"step": step, "prefix": prefix, "metrics": values}) + "\n")
    runs = [diverged, make_run(tmp_path / "b")]
    rows = rows_of([*map(Run, runs)])
    assert rows["train loss"] == ["1 to not finite", "1 to 0.333"]
    assert rows["validation accuracy"][0] == "0.1 to not finite"
    assert rows["steps skipped (not finite)"] == ["2", "-"]
    words = ["report", *map(str, runs), "--format", "json", "--out", str(tmp_path / "page.html")]
    assert command_line.main(words) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"].values()
    assert first["progress"]["train/loss"] == {"first": 1.0, "last": None, "best": 1.0}
    assert [first["skipped_steps"], second["skipped_steps"]] == [2, 0]
