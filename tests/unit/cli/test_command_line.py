"""The command line up to the point where training starts, which is replaced by a stand-in."""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.cli import command_line as cli
from nemo_rl_offload.cli import parser as command_line
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.runs.output import RunFolderGoneError

SUMMARY: dict[str, Any] = {
    "algorithm": "grpo",
    "steps": 1,
    "seed": 1,
    "skipped_steps": 0,
    "world_size": 1,
    "device": "cpu",
    "restarts": 0,
    "wall_seconds": 1.0,
    "validation_metric": "accuracy",
    "validation": {"first": 0.5, "last": None},
    "train": {"loss": None},
    "paged_stash": None,
    "offload": {
        "engine": None,
        "modules": [],
        "bytes_out": 0,
        "bytes_in": 0,
        "peak_host_bytes": 0,
        "denied_bytes": 0,
        "ineffective_bytes": 0,
        "demand_reloads": 0,
        "per_module": {},
    },
    "memory": {"peak_device_bytes": None},
    "run_dir": "out",
}
IMPORTS_NOTHING_HEAVY = """
import sys
from nemo_rl_offload.cli.command_line import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
heavy = {"torch", "ray", "megatron", "transformers", "reasoning_gym"} & sys.modules.keys()
print("code", code, "heavy", sorted(heavy))
"""
NO_CHECKPOINT = " There is no checkpoint yet, from which to go on."


class Training:
    """Takes the place of training; keeps the configurations that it was called with."""

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.error: BaseException | None = None
        self.warning: str | None = None

    def __call__(self, algorithm: str, config: Any, run_dir: Path, console: Any) -> None:
        self.configs.append(config)
        console.print("training")
        if self.warning is not None:
            warnings.warn(self.warning, stacklevel=1)
        if self.error is not None:
            raise self.error
        (run_dir / "summary.json").write_text(json.dumps(SUMMARY, indent=2) + "\n")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Training:
    stand_in = Training()
    monkeypatch.setattr(cli, "_train", stand_in)
    monkeypatch.chdir(tmp_path)
    return stand_in


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["run", "grpo", "--help"], 0),
        (["run", "grpo", "grpo.seeed=1", "--run-dir", "unused"], 2),
        (["run", "grpo", "--unknown"], 2),
    ],
)
def test_answers_without_heavy_imports(arguments: list[str], code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS_NOTHING_HEAVY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == f"code {code} heavy []"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["rn"], "Did you mean 'run'?"),
        (["run", "gpro"], "invalid choice: 'gpro'"),
        (["run", "--config", "my.yaml"], "required: algorithm, one of distillation, dpo, grpo, sft, as in `run sft"),
        (["run", "gpro"], "Did you mean 'grpo'?"),
        (["run", "grpo", "--sed", "1"], "unknown option: --sed"),
        (["run", "my.yaml"], "A file follows --config, as in `run sft --config my.yaml`."),
        (["check", "--config", "my.yaml"], "The file stands by itself: `nemo-rl-offload check FILE`"),
        (["plan", "--config", "my.yaml", "--gpu", "h100-80gb"], "by itself: `nemo-rl-offload plan FILE`"),
        (["run", "grpo", "--confg", "a.yaml"], "no dashes). Did you mean --config?"),
        (["trian"], "'completion'). Did you mean 'run'?"),
        (["run", "ppo"], "'sft').\n"),
        (["report", "a", "--servee"], "). Did you mean --serve?"),
        (
            ["export", "a", "b", "--format", "json"],
            "unknown option: --format (export has --help, --dtype, --adapter)",
        ),
        (["run", "grpo", "--format", "xml"], "invalid choice: 'xml'"),
        *(
            (["plan", "a.yaml", *words], f"--layouts: '{wrong}' is no number of layouts: give a whole number from 1 on")
            for wrong in ("x", "2.5", "0", "-1")
            for words in (["--layouts", wrong], [f"--layouts={wrong}"])
        ),
    ],
)
def test_usage_errors(
    arguments: list[str], message: str, training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert training.configs == []


@pytest.mark.parametrize(
    ("words", "number"), [("a.yaml --layouts", 5), ("a.yaml --layouts 3", 3), ("--layouts a.yaml", 5)]
)
@pytest.mark.parametrize("more", [[], ["grpo.seed=2"], ["+a.b=x"], ["~a.b"], ["--gpu", "h100"]])
def test_what_follows_layouts_may_be_something_else(words: str, number: int, more: list[str]) -> None:
    options, overrides = command_line.build_parser().parse_known_args(["plan", *words.split(), *more])
    assert (options.config, options.layouts) == (Path("a.yaml"), number)
    assert overrides == [word for word in more if options.gpu is None]


def test_every_format_has_the_same_words() -> None:
    parser = command_line.build_parser()
    for name, each in command_line.subparsers(parser).items():
        for action in each._actions:
            if "--format" in action.option_strings:
                assert (action.choices, action.default) == (("table", "json"), "table"), name
    assert parser.parse_args(["check", "a.yaml", "--format", "text"]).format == "table"


def test_overrides_stand_anywhere(training: Training) -> None:
    order = ["grpo.seed=7", "--run-dir", "out", "grpo.max_num_steps=3", "--format", "table", "grpo.val_period=0"]
    assert cli.main(["run", "grpo", *order]) == 0
    grpo = training.configs[0]["grpo"]
    assert (grpo["seed"], grpo["max_num_steps"], grpo["val_period"]) == (7, 3, 0)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("data.prompt_template='Say: {question}'", "data.prompt_template", "Say: {question}"),
        ("policy.megatron_cfg.offload_modules=[core_attn,mlp_norm]", None, ["core_attn", "mlp_norm"]),
        ("checkpointing.keep_top_k=null", "checkpointing.keep_top_k", None),
        ("grpo.seed=0", "grpo.seed", 0),
        ("+env.reasoning_gym.params.max_word_len=6", "env.reasoning_gym.params.max_word_len", 6),
    ],
)
def test_odd_overrides(override: str, path: str | None, value: object, training: Training) -> None:
    base = ["~env.reasoning_gym.params.max_word_len"] if override.startswith("+") else []
    assert cli.main(["run", "grpo", *base, override]) == 0
    node = training.configs[0]
    for key in (path or override.split("=")[0]).split("."):
        node = node[key]
    assert node == value


def test_all_problems_at_once(training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(
        ["run", "grpo", "grpo.max_num_steps=many", "env.reasoning_gym.task=spel_backward", "policy.model_name=nowhere"]
    )
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert re.match(r"error: .*grpo_tiny.yaml: \d problems\n", output.err)
    for text in ("grpo.max_num_steps", "Did you mean 'spell_backward'?", "policy.model_name"):
        assert text in output.err
    assert "Traceback" not in output.err
    assert training.configs == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "grpo: [", "- a list\n", "\x00\x01"])
def test_unreadable_configuration(
    content: str | None, training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "mine.yaml").write_text(content)
    assert cli.main(["run", "grpo", "--config", "mine.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: mine.yaml")
    assert "Traceback" not in error


def test_json_on_stdout_and_the_rest_on_stderr(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    off = "policy.megatron_cfg.fine_grained_activation_offloading=false"
    assert cli.main(["run", "grpo", "--format", "json", "--run-dir", "out", off]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == SUMMARY
    assert "warning: policy.megatron_cfg.offload_modules: ignored" in output.err
    assert "Run directory: out" in output.err


def test_long_lines_are_not_broken(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    run_dir = tmp_path / ("a long name " * 10) / "[run]"
    off = "policy.megatron_cfg.fine_grained_activation_offloading=false"
    assert cli.main(["run", "grpo", "--run-dir", str(run_dir), off]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"Run directory: {run_dir}" in lines
    assert sum(line.startswith("warning: ") and "grpo_tiny.yaml:" in line for line in lines) == 1


def test_default_run_directories(training: Training, tmp_path: Path) -> None:
    for _ in range(2):
        assert cli.main(["run", "grpo"]) == 0
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["grpo_tiny", "grpo_tiny-2"]


def test_a_finished_run_is_not_repeated(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli.main(["run", "grpo", "--run-dir", "out", "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out) == SUMMARY
    assert len(training.configs) == 1


def test_a_folders_name_is_no_markup(training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a[/b] [red]c"
    assert cli.main(["run", "grpo", "--run-dir", name]) == 0
    (tmp_path / name / "summary.json").write_text(json.dumps({**SUMMARY, "run_dir": name}))
    capsys.readouterr()
    assert cli.main(["run", "grpo", "--run-dir", name]) == 0
    assert f" {name} " in capsys.readouterr().out
    assert len(training.configs) == 1


def test_what_differs_from_a_finished_run_has_no_effect(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 0
    written = (tmp_path / "out" / "config.yaml").read_text()
    capsys.readouterr()
    assert cli.main(["run", "grpo", "--run-dir", "out", "fault_tolerance.max_restarts=7"]) == 0
    assert "warning: without effect: fault_tolerance.max_restarts is 0 there, 7 here" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.yaml").read_text() == written


def test_the_end_names_the_last_checkpoint_and_what_can_be_done_with_it(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 0
    assert "checkpoint" not in capsys.readouterr().out, "there is none"
    for step in (2, 10):
        (tmp_path / "out" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 0
    _, found, end = capsys.readouterr().out.partition("Last checkpoint: out/checkpoints/step_10\n")
    assert found
    commands = [shlex.split(line) for line in end.splitlines()[1:]]
    assert [words[1] for words in commands] == ["export", "eval", "run"]
    parser = command_line.build_parser()
    for words in commands:
        parsed, overrides = parser.parse_known_args(words[1:])
        assert Path("out/step_10") in vars(parsed).values()
        assert overrides == (["grpo.max_num_steps=20", "grpo.max_num_epochs=null"] if words[1] == "run" else [])


def test_a_damaged_summary_is_one_error(training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 0
    (tmp_path / "out" / "summary.json").write_text("{")
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 2
    assert "error: out/summary.json: is damaged: " in capsys.readouterr().err


def test_error_of_a_run(training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training.error = WorkerError("rank 1 of 2 (host, pid 3): OSError: lost")
    training.error.details = "the worker's own traceback\n"
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 2
    output = capsys.readouterr()
    assert output.err == "error: rank 1 of 2 (host, pid 3): OSError: lost\nDetails: out/error.log\n"
    log = (tmp_path / "out" / "error.log").read_text()
    assert log.startswith("the worker's own traceback\nTraceback")


def test_a_run_directory_of_another_gets_no_details(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.error = RunFolderGoneError("out: the run directory was removed")
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 2
    assert capsys.readouterr().err == "error: out: the run directory was removed\n"
    assert not (tmp_path / "out" / "error.log").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), SystemExit(15), SystemExit(1)])
@pytest.mark.parametrize("saved", [False, True])
def test_interrupted(
    error: BaseException, saved: bool, training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if saved:
        (tmp_path / "out").mkdir()
        training.error = WorkerError("first")
        cli.main(["run", "grpo", "--run-dir", "out"])
        (tmp_path / "out" / "checkpoints" / "step_1").mkdir(parents=True)
        capsys.readouterr()
    training.error = error
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 130
    hint = " The same command goes on from the last checkpoint, out/checkpoints/step_1."
    assert capsys.readouterr().err == f"Interrupted.{hint if saved else NO_CHECKPOINT}\n"


def test_one_that_was_forced_goes_on_without_force(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save_and_stop(_: object, __: object, run_dir: Path, ___: object) -> None:
        (run_dir / "checkpoints" / "step_1").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_train", save_and_stop)
    assert cli.main(["run", "grpo", "--run-dir", "out", "--force"]) == 130
    said = "The same command without --force goes on from the last checkpoint, out/checkpoints/step_1."
    assert capsys.readouterr().err == f"Interrupted. {said}\n"


def test_sigterm_is_an_interrupt(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "_train", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["run", "grpo"]) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == f"Interrupted.{NO_CHECKPOINT}\n"


class Garbage:
    """Its end is when a signal arrives: Python prints what is raised there, and goes on."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("in_the_background", [False, True])
def test_no_interrupt_is_lost(
    number: int,
    in_the_background: bool,
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def collect_and_go_on(*_: object) -> None:
        Garbage(number)
        time.sleep(1)
        raise WorkerError("went on")

    monkeypatch.setattr(cli, "_train", collect_and_go_on)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if in_the_background else signal.default_int_handler)
    try:
        code = cli.main(["run", "grpo"])
    finally:
        signal.signal(signal.SIGINT, handler)
    if in_the_background and number == signal.SIGINT:
        assert code == 2
    else:
        assert (code, capsys.readouterr().err) == (130, f"Interrupted.{NO_CHECKPOINT}\n")


def test_other_errors_of_destructors_are_printed(
    training: Training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    class Faulty:
        def __del__(self) -> None:
            raise ValueError

    def collect_and_fail(*_: object) -> None:
        Faulty()
        raise WorkerError("after that")

    monkeypatch.setattr(cli, "_train", collect_and_fail)
    assert cli.main(["run", "grpo"]) == 2
    assert [unraisable.exc_type for unraisable in seen] == [ValueError]
    assert sys.unraisablehook == seen.append


def test_an_error_of_the_system_from_elsewhere_is_not_hidden(training: Training) -> None:
    training.error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        cli.main(["run", "grpo"])


def test_a_run_directory_that_cannot_be_written(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["run", "grpo", "--run-dir", "file/out"]) == 2
    assert capsys.readouterr().err.startswith("error: Cannot write file/out: Not a directory.")


@pytest.mark.parametrize("algorithm", sorted(command_line.ALGORITHMS))
def test_each_algorithm_has_an_example_and_a_script(
    algorithm: str, training: Training, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = PROJECT_ROOT / "examples" / f"run_{algorithm}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--run-dir", "out", f"{algorithm}.seed=5"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(path), run_name="__main__")
    assert exit_.value.code == 0
    assert training.configs[0]["algorithm"] == algorithm
    assert training.configs[0][algorithm]["seed"] == 5


def test_warnings_while_training_are_lines_like_others(
    training: Training, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    warnings.simplefilter("default")
    training.warning = "data.train: left 1 bad record(s) out [see there]"
    assert cli.main(["run", "grpo", "--run-dir", "out", "--format", "json"]) == 0
    assert f"\nwarning: {training.warning}\n" in capsys.readouterr().err
    assert len(recwarn) == 0


def test_the_log_of_a_failed_start_goes_with_the_next_that_succeeds(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    training.error = WorkerError("lost")
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 2
    assert Path("out/error.log").exists()
    training.error = None
    assert cli.main(["run", "grpo", "--run-dir", "out"]) == 0
    assert not Path("out/error.log").exists()


def test_a_configuration_for_another_algorithm(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    exemplar = PROJECT_ROOT / "examples" / "configs" / "grpo_tiny.yaml"
    assert cli.main(["run", "dpo", "--config", str(exemplar)]) == 2
    assert capsys.readouterr().err == (
        f"error: {exemplar}: 1 problem\nalgorithm: this configuration is for grpo, not for dpo. "
        "Run `nemo-rl-offload run grpo`, or set algorithm=dpo.\n"
    )
    assert cli.main(["run", "dpo", "--config", str(exemplar), "policy.precision=fp8"]) == 2
    assert "2 problems\nalgorithm: " in (text := capsys.readouterr().err)
    assert "\npolicy.precision: " in text
    assert training.configs == []


def test_every_command_has_examples_that_parse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = command_line.build_parser()
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    assert commands.keys() == command_line.EXAMPLES.keys()
    monkeypatch.setenv("COLUMNS", "80")
    for command, examples in command_line.EXAMPLES.items():
        with pytest.raises(SystemExit):
            parser.parse_args([command, "--help"])
        shown = capsys.readouterr().out
        assert max(len(line) for line in shown.splitlines() if "nemo-rl-offload" not in line) <= 80
        for example in examples:
            assert f"  nemo-rl-offload {example}\n" in shown
            options, overrides = parser.parse_known_args(example.split())
            assert options.command == command
            assert all("=" in override for override in overrides)
