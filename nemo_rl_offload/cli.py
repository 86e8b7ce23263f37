"""The command `nemo-rl-offload`. Heavy libraries are imported after the arguments and the configuration are checked."""

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError

if TYPE_CHECKING:
    from rich.console import Console

PROJECT_ROOT = Path(__file__).parent.parent
ALGORITHMS = {"grpo": "examples/configs/grpo_tiny.yaml"}
EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130

EPILOG = """\
overrides (Hydra's grammar):
  a.b=value     change a key       policy.megatron_cfg.optimizer.lr=1e-4
  +a.b=value    add a key          +env.reasoning_gym.params.max_word_len=6
  ~a.b          remove a key       ~env.reasoning_gym.params.max_word_len
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="nemo-rl-offload", description="Post-train language models on Megatron-Core with activation offloading."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="train a model",
        description="Train a model. Without --config, a small example that runs anywhere.",
        usage="%(prog)s ALGORITHM [options] [KEY=VALUE ...]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("algorithm", choices=sorted(ALGORITHMS))
    run.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML configuration (default: the algorithm's example)"
    )
    run.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where everything goes (default: results/<config name>)"
    )
    run.add_argument(
        "--format", choices=("table", "json"), default="table", help="how the summary is printed at the end"
    )
    run.set_defaults(execute=_run)
    check = commands.add_parser(
        "check",
        help="check a configuration",
        description="Check a configuration, offline and in seconds, all problems at once; exit code 2 if there are any",
        usage="%(prog)s FILE [KEY=VALUE ...]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("config", type=Path, metavar="FILE", help="YAML configuration")
    check.set_defaults(execute=_check)
    doctor = commands.add_parser(
        "doctor",
        help="look at this machine",
        description="Look at what offloading needs of this machine. Exit code 2 if something makes it impossible.",
    )
    doctor.add_argument("--format", choices=("table", "json"), default="table")
    doctor.set_defaults(execute=_doctor)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for what the user can mend, 130 when interrupted."""
    parser = build_parser()
    # Overrides may stand before, between and after options, which argparse's own `nargs="*"` does not allow.
    options, overrides = parser.parse_known_args(arguments)
    if unknown := [word for word in overrides if word.startswith("-")]:
        parser.error(f"unknown option: {' '.join(unknown)} (keys of the configuration are set by KEY=VALUE, no dashes)")
    run_dirs: list[Path] = []
    try:
        with _terminated_like_interrupted():
            return int(options.execute(options, overrides, run_dirs))
    except NemoRLOffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        _keep_details(error, run_dirs)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return _interrupted(run_dirs)
    except SystemExit as exit_:
        if exit_.code == 128 + signal.SIGTERM:  # from the cluster's handler, which stands once Ray runs
            return _interrupted(run_dirs)
        return _output_closed(run_dirs)  # from Rich
    except BrokenPipeError:
        return _output_closed(run_dirs)


def _run(options: argparse.Namespace, overrides: Sequence[str], run_dirs: list[Path]) -> int:
    from nemo_rl_offload.config.checks import check_config
    from nemo_rl_offload.config.loader import load_config

    source: Path = options.config or PROJECT_ROOT / ALGORITHMS[options.algorithm]
    checked = check_config(load_config(source, overrides), str(source))
    from nemo_rl_offload.observability.run_directory import SUMMARY_FILE, open_run_directory

    with open_run_directory(options.run_dir, Path("results") / source.stem, checked.config) as run_dir:
        run_dirs.append(run_dir)
        from rich.console import Console

        console = Console(stderr=options.format == "json", highlight=False, soft_wrap=True)
        for warning in checked.warnings:
            console.print(f"warning: {warning}", style="yellow", markup=False)
        console.print(f"Run directory: {run_dir}", markup=False)
        summary_file = run_dir / SUMMARY_FILE
        if summary_file.exists():
            console.print("This run is finished; here is its summary.")
        else:
            _train(options.algorithm, checked.config, run_dir, console)
        _show_summary(summary_file.read_text(), options.format, console)
    return 0


def _check(options: argparse.Namespace, overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.config.checks import check_config
    from nemo_rl_offload.config.loader import load_config

    checked = check_config(load_config(options.config, overrides), str(options.config), run_here=False)
    for warning in checked.warnings:
        print(f"warning: {warning}")
    print(f"{options.config}: no problems")
    return 0


def _doctor(options: argparse.Namespace, overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    if overrides:
        raise ConfigError(f"doctor takes no configuration: {' '.join(overrides)}")
    from nemo_rl_offload.observability.doctor import findings, report

    found = findings()
    print(report(found, options.format))
    return EXIT_USER_ERROR if any(finding.status == "error" for finding in found) else 0


def _train(algorithm: str, config: Any, run_dir: Path, console: "Console") -> None:
    assert algorithm == "grpo"
    # transformers says that it found no PyTorch or what it would rather have; Ray warns about its own defaults.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from nemo_rl_offload.algorithms.grpo import run_grpo

    def say(line: str) -> None:
        console.print(f"{line} ...", markup=False)

    run_grpo(config, run_dir, say, sys.stderr if console.stderr else None)


def _show_summary(text: str, form: str, console: "Console") -> None:
    if form == "json":
        print(text, end="", flush=True)
        return
    from nemo_rl_offload.observability.report import summary_table

    console.print(summary_table(json.loads(text)))


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that workers and Ray are gone when the process ends."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _keep_details(error: NemoRLOffloadError, run_dirs: list[Path]) -> None:
    """Put the traceback, a worker's own above all, into the run directory."""
    if not run_dirs:
        return
    from nemo_rl_offload.observability.run_directory import ERROR_FILE

    path = run_dirs[0] / ERROR_FILE
    with contextlib.suppress(OSError):  # the disk may be what failed, and the message is on the screen
        path.write_text(error.details + "".join(traceback.format_exception(error)))
        print(f"Details: {path}", file=sys.stderr)


def _interrupted(run_dirs: list[Path]) -> int:
    print(f"Interrupted.{_how_to_go_on(run_dirs)}", file=sys.stderr)
    return EXIT_INTERRUPTED


def _output_closed(run_dirs: list[Path]) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
    print(f"error: standard output was closed.{_how_to_go_on(run_dirs)}", file=sys.stderr)
    return EXIT_USER_ERROR


def _how_to_go_on(run_dirs: list[Path]) -> str:
    if not run_dirs or not any(run_dirs[0].glob("checkpoints/step_*")):
        return ""
    return f" The same command goes on from the last checkpoint in {run_dirs[0]}."


if __name__ == "__main__":
    sys.exit(main())
