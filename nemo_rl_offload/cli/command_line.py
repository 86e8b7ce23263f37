"""The command `nemo-rl-offload`. Heavy libraries are imported after the arguments and the configuration are checked."""

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_offload.cli import EXIT_INTERRUPTED
from nemo_rl_offload.cli.outlive import outliving_readers
from nemo_rl_offload.cli.parser import build_parser, option_names
from nemo_rl_offload.cluster.signals import never_unheard, terminated_like_interrupted
from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.plugins import import_object
from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError, ResourceError, WorkerError

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_rl_offload.config.schema import MasterConfig
    from nemo_rl_offload.config.sources import LoadedConfig
    from nemo_rl_offload.runs.origin import Origin

EXIT_USER_ERROR = 2
EXIT_OUTPUT_CLOSED = 141
"""A shell's code for SIGPIPE."""
_TAKE_KEYS = ("run", "check", "plan", "eval")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for what the user can mend, 130 when interrupted, 141 when
    a reader of standard output has had enough."""
    _print_everything()
    try:
        parser = build_parser()
    except ConfigError as error:  # a plugin's
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    # Overrides may stand before, between and after options, which argparse's own `nargs="*"` does not allow.
    options, overrides = parser.parse_known_args(arguments)
    if unknown := [word for word in overrides if word.startswith("-")]:
        near = get_close_matches(unknown[0].lstrip("-").partition("=")[0], option_names(parser, options.command), n=1)
        hint = f". Did you mean --{near[0]}?" if near else ""
        if unknown[0].partition("=")[0] == "--config" and options.command in ("check", "plan"):
            hint = f". The file stands by itself: `nemo-rl-offload {options.command} FILE`"
        known = ", ".join(f"--{name}" for name in option_names(parser, options.command))
        told = "keys of the configuration are set by KEY=VALUE, no dashes"
        told = told if options.command in _TAKE_KEYS else f"{options.command} has {known}"
        parser.error(f"unknown option: {' '.join(unknown)} ({told}){hint}")
    run_dirs: list[Path] = []
    try:
        outlives = outliving_readers() if options.command in ("run", "eval") else contextlib.nullcontext()
        with terminated_like_interrupted(), never_unheard(), outlives:
            if overrides and options.command not in _TAKE_KEYS:
                raise ConfigError(f"{options.command} takes no configuration: {' '.join(overrides)}")
            code = _EXECUTE[options.command](options, overrides, run_dirs)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except NemoRLOffloadError as error:
        hint = _how_to_go_on(options, run_dirs) if isinstance(error, WorkerError | ResourceError) else ""
        _refuse(options, f"{error}{hint}", getattr(error, "problems", ()))
        _keep_details(error, run_dirs)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return _interrupted(options, run_dirs)
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):
            return _output_closed()  # from Rich
        # By SIGTERM: from the cluster's handler, or from Ray's before that stands.
        return _interrupted(options, run_dirs)
    except BrokenPipeError:
        return _output_closed()
    except (OSError, MemoryError) as error:
        from nemo_rl_offload.specs.process_limits import explained

        if (text := explained(error)) is not None:
            _refuse(options, text)
            return EXIT_USER_ERROR
        if isinstance(error, MemoryError) or not _output_fails():
            raise
        _drop_output()
        told = f"cannot write standard output: {error.strerror}."
        print(f"error: {told}{_how_to_go_on(options, run_dirs)}", file=sys.stderr)
        return EXIT_USER_ERROR


def _refuse(options: argparse.Namespace, message: str, problems: Sequence[Mapping[str, str]] = ()) -> None:
    """Tell it; with `--format json` to the reader of that too, in the form that `check` has."""
    print(f"error: {message}", file=sys.stderr)
    if getattr(options, "format", None) == "json":
        try:
            told = problems or [{"path": "", "message": message, "origin": ""}]
            print(json.dumps({"problems": told}, indent=2), flush=True)
        except OSError:
            _drop_output()


def _run(options: argparse.Namespace, overrides: Sequence[str], run_dirs: list[Path]) -> int:
    from nemo_rl_offload.config.loader import PROJECT_ROOT
    from nemo_rl_offload.config.recipe import read_recipe
    from nemo_rl_offload.config.validation import check_config
    from nemo_rl_offload.planner.host_budget import host_problems
    from nemo_rl_offload.specs.process_limits import widen_limits

    source: Path = options.config or PROJECT_ROOT / ALGORITHMS[options.algorithm].example
    config = read_recipe(source, overrides, options.algorithm)
    checked = check_config(_for_algorithm(options.algorithm, config), str(source))
    if problems := list(host_problems(checked.config)):
        raise ConfigError(f"{source}: {problems[0]}")
    widen_limits()
    from nemo_rl_offload.runs.run_directory import (
        ERROR_FILE,
        SUMMARY_FILE,
        changed_on_resume,
        open_run_directory,
    )

    if options.force and options.run_dir is None:
        raise ConfigError("--force: needs --run-dir; without it, a run with another configuration gets another folder.")
    origin, told = _origin(options, checked.config)
    folder = checked.config["checkpointing"]["checkpoint_dir"]
    default = Path("results") / source.stem if folder is None else Path(folder).expanduser()
    with open_run_directory(
        options.run_dir, default, checked.config, origin=origin, force=options.force, told=told.append
    ) as run_dir:
        run_dirs.append(run_dir)
        from rich.console import Console

        console = Console(stderr=options.format == "json", highlight=False, markup=False, soft_wrap=True)
        for warning in checked.warnings:
            console.print(f"warning: {warning}", style="yellow")
        console.print(f"Run directory: {run_dir}")
        for line in told:
            console.print(line)
        summary_file = run_dir / SUMMARY_FILE
        if summary_file.exists():
            console.print("This run is finished; here is its summary.")
            if changed := changed_on_resume(run_dir, checked.config).told:
                console.print(f"warning: without effect: {changed}", style="yellow")
        else:
            if problems := list(_problems_here(checked.config)):
                raise ConfigError(f"{source}: {problems[0]}")
            for warning in _note_inputs(run_dir, checked.config):
                console.print(f"warning: {warning}", style="yellow")
            from nemo_rl_offload.cli.warned import warnings_as_lines

            with warnings_as_lines(console):
                _train(options.algorithm, checked.config, run_dir, console)
            with contextlib.suppress(OSError):
                (run_dir / ERROR_FILE).unlink(missing_ok=True)  # of a start before this one
        _show_summary(summary_file, options.format, console)
    return 0


def _problems_here(config: "MasterConfig") -> Iterator[str]:
    """What this machine's free memory says of a run that has all of its workers here."""
    from nemo_rl_offload.config.rules.machine import gpus_here, workers_here
    from nemo_rl_offload.offload.host_memory import free_host_bytes
    from nemo_rl_offload.planner.host_budget import Here, host_problems

    num_workers = workers_here(config["cluster"]["num_nodes"], config["cluster"]["gpus_per_node"])
    if num_workers is not None:
        yield from host_problems(config, Here(num_workers, free_host_bytes(), has_gpus=gpus_here() != 0))


def _origin(options: argparse.Namespace, config: "MasterConfig") -> "tuple[Origin | None, list[str]]":
    """Where the run is to begin, if not with the model of the configuration; and what differs from the run there."""
    if options.from_checkpoint is None:
        if options.weights_only:
            raise ConfigError("--weights-only: needs --from-checkpoint, whose weights are meant.")
        return None, []
    from nemo_rl_offload.runs.begin import began_from, begin_from, changed_from

    if options.run_dir is not None and not options.force:
        there = began_from(options.run_dir, options.from_checkpoint, weights_only=options.weights_only)
        if there is not None:
            return there, []
    kept, begun = options.run_dir, options.from_checkpoint
    if options.force and kept is not None and begun.resolve().is_relative_to(kept.resolve()):
        raise ConfigError(
            f"--force: would move away what --from-checkpoint names, {begun}. Choose another folder with --run-dir."
        )
    origin = begin_from(options.from_checkpoint, config, weights_only=options.weights_only)
    from nemo_rl_offload.data.inputs import changed_frozen_weights
    from nemo_rl_offload.runs.begin import find_checkpoint
    from nemo_rl_offload.runs.inputs import read_inputs

    run_dir, _ = find_checkpoint(options.from_checkpoint)
    if changed := changed_frozen_weights(config, read_inputs(run_dir) or {}):
        raise ConfigError(f"--from-checkpoint {options.from_checkpoint}: {changed}")
    return origin, [] if options.weights_only else changed_from(options.from_checkpoint, config)


def _note_inputs(run_dir: Path, config: "MasterConfig") -> list[str]:
    """Keep which files the run reads; returns what changed since a run that goes on was last started."""
    from nemo_rl_offload.data.inputs import changed_frozen_weights, changed_inputs, read_inputs_of
    from nemo_rl_offload.runs.inputs import read_inputs, write_inputs
    from nemo_rl_offload.runs.output import OptionalLog
    from nemo_rl_offload.runs.run_directory import CHECKPOINTS, WARNINGS_FILE, steps_in

    there, here = read_inputs(run_dir), read_inputs_of(config)
    steps = steps_in(run_dir / CHECKPOINTS)
    if steps and (changed := changed_frozen_weights(config, there or {})):
        raise ConfigError(changed)
    found = list(changed_inputs(config, there, here)) if steps and there is not None else []
    if found:
        lines = "".join(f"step {steps[-1]}: warning: {line}\n" for line in found)
        found += OptionalLog(run_dir / WARNINGS_FILE).append(lines)
    write_inputs(run_dir, here)
    return found


def _for_algorithm(algorithm: str, config: "LoadedConfig") -> "LoadedConfig":
    """The configuration, with a problem more where it is for another algorithm."""
    other = config.values.get("algorithm")
    if other not in ALGORITHMS or other == algorithm:
        return config
    problem = (
        f"algorithm: this configuration is for {other}, not for {algorithm}. "
        f"Run `nemo-rl-offload run {other}`, or set algorithm={algorithm}."
    )
    return replace(config, problems=[*config.problems, problem])


def _check(options: argparse.Namespace, overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.cli.check import as_json, as_text, check_file, with_data

    found = with_data(check_file(options.config, overrides))
    if options.megatron:
        from nemo_rl_offload.megatron.runtime.optional_packages import leave_out_broken_packages
        from nemo_rl_offload.megatron.runtime.quiet import quiet

        with quiet():
            leave_out_broken_packages()
            from nemo_rl_offload.megatron.build.config_check import ask_megatron

            found = ask_megatron(found)
    if options.format == "json":
        print(as_json(options.config, found))
    else:
        print(
            as_text(options.config, found, verbose=options.verbose), file=sys.stderr if found.problems else sys.stdout
        )
    return EXIT_USER_ERROR if found.problems else 0


def _plan(options: argparse.Namespace, overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.cli.layouts import plan_layouts
    from nemo_rl_offload.cli.plan import plan

    if options.layouts is not None:
        return 0 if plan_layouts(options, overrides).fits else EXIT_USER_ERROR
    found = plan(options, overrides)
    return EXIT_USER_ERROR if found.shortfall_bytes or found.lacking else 0


def _doctor(options: argparse.Namespace, _overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.observability.doctor import findings, report

    if options.write_device is not None:
        from nemo_rl_offload.observability.device_file import write_device_file

        write_device_file(options.write_device)
    found = findings()
    print(report(found, options.format))
    if options.write_device is not None and options.format == "table":
        print(f"Wrote {options.write_device}")
    return EXIT_USER_ERROR if any(finding.status == "error" for finding in found) else 0


def _export(options: argparse.Namespace, _overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.megatron.runtime.quiet import quiet

    with quiet(), contextlib.redirect_stdout(io.StringIO()):  # Bridge and Megatron-Core print what they load
        from nemo_rl_offload.megatron.build.export import export_checkpoint

        notes = export_checkpoint(options.checkpoint, options.destination, options.dtype, adapter_alone=options.adapter)
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    print(f"Wrote {options.destination}")
    return 0


def _eval(options: argparse.Namespace, overrides: Sequence[str], run_dirs: list[Path]) -> int:
    from nemo_rl_offload.cli.evaluate import evaluate

    file = evaluate(options, overrides, run_dirs)
    if options.format == "json":
        print(file.read_text(), end="", flush=True)
    return 0


def _report(options: argparse.Namespace, _overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.cli.report import report

    report(options)
    return 0


def _bench(options: argparse.Namespace, _overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.bench.run import run_offload_bench, run_stash_bench

    return run_stash_bench(options) if options.what == "stash" else run_offload_bench(options)


def _completion(_options: argparse.Namespace, _overrides: Sequence[str], _run_dirs: list[Path]) -> int:
    from nemo_rl_offload.cli.completion import script

    print(script(build_parser()), end="")
    return 0


def _train(algorithm: str, config: "MasterConfig", run_dir: Path, console: "Console") -> None:
    # transformers says that it found no PyTorch or what it would rather have; Ray warns about its own defaults.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    run = import_object(ALGORITHMS[algorithm].runner)

    def say(line: str) -> None:
        console.print(line if line.endswith(".") else f"{line} ...")

    run(config, run_dir, say, sys.stderr if console.stderr else None)


def _show_summary(path: Path, form: str, console: "Console") -> None:
    from nemo_rl_offload.runs.run_files import Summary, read_json, read_log

    recovery_hint = "Move it away, and the run goes on where it ended."
    if form == "json":
        read_json(path, dict, recovery_hint)
        print(read_log(path), end="", flush=True)
        return
    from nemo_rl_offload.observability.summary_table import summary_table

    if (summary := read_json(path, Summary, recovery_hint)) is not None:
        console.print(summary_table(summary, console.width))
        for line in _what_next(path.parent, summary["algorithm"]):
            console.print(line)


def _what_next(run_dir: Path, algorithm: str) -> list[str]:
    """The last checkpoint, and commands that begin with it."""
    from nemo_rl_offload.cli.evaluate import has_problems
    from nemo_rl_offload.config.recipe import read_recipe
    from nemo_rl_offload.runs.run_directory import CHECKPOINTS, CONFIG_FILE, steps_in

    if not (steps := steps_in(run_dir / CHECKPOINTS)):
        return []
    last, config, further = (shlex.quote(f"{run_dir}{end}") for end in (f"/step_{steps[-1]}", f"/{CONFIG_FILE}", "_b"))
    data = read_recipe(run_dir / CONFIG_FILE).values["data"]
    is_scored = ALGORITHMS[algorithm].generates and not ENVIRONMENTS[data["env_name"]].leads_episodes
    is_measured = is_scored and has_problems(data)
    longer = f"{algorithm}.max_num_steps={2 * steps[-1]} {algorithm}.max_num_epochs=null"
    return [
        f"Last checkpoint: {run_dir / CHECKPOINTS}/step_{steps[-1]}",
        "What can be done with it:",
        f"  nemo-rl-offload export {last} {shlex.quote(f'{run_dir}_step_{steps[-1]}_hf')}",
        *([f"  nemo-rl-offload eval --checkpoint {last}"] if is_measured else []),
        f"  nemo-rl-offload run {algorithm} --config {config} --from-checkpoint {last} --run-dir {further} {longer}",
    ]


def _print_everything() -> None:
    """What the terminal's encoding lacks is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _keep_details(error: NemoRLOffloadError, run_dirs: list[Path]) -> None:
    """Put the traceback, a worker's own above all, into the run directory."""
    if not run_dirs:
        return
    from nemo_rl_offload.runs.output import RunFolderGoneError
    from nemo_rl_offload.runs.plain_files import written_anew
    from nemo_rl_offload.runs.run_directory import ERROR_FILE

    if isinstance(error, RunFolderGoneError):
        return
    path = run_dirs[0] / ERROR_FILE
    with contextlib.suppress(OSError):  # the disk may be what failed, and the message is on the screen
        with written_anew(path) as file:
            file.write((error.details + "".join(traceback.format_exception(error))).encode(errors="backslashreplace"))
        print(f"Details: {path}", file=sys.stderr)


def _interrupted(options: argparse.Namespace, run_dirs: list[Path]) -> int:
    none = " There is no checkpoint yet, from which to go on." if run_dirs and options.command == "run" else ""
    print(f"Interrupted.{_how_to_go_on(options, run_dirs) or none}", file=sys.stderr)
    return EXIT_INTERRUPTED


def _output_fails() -> bool:
    """Whether standard output takes nothing more: what could not be written waits there, and fails again."""
    if sys.stdout is None:
        return False
    try:
        sys.stdout.write("\n")  # where nothing waits, as with PYTHONUNBUFFERED
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _output_closed() -> int:
    """`plan ... | head -1` wanted no more."""
    _drop_output()
    return EXIT_OUTPUT_CLOSED


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end


def _how_to_go_on(options: argparse.Namespace, run_dirs: list[Path]) -> str:
    if not run_dirs or options.command != "run":
        return ""
    from nemo_rl_offload.runs.run_directory import CHECKPOINTS, steps_in

    folder = run_dirs[0] / CHECKPOINTS
    steps = steps_in(folder)
    if not steps:
        return ""
    same = "The same command without --force" if options.force else "The same command"
    return f" {same} goes on from the last checkpoint, {folder}/step_{steps[-1]}."


_EXECUTE: dict[str, Callable[[argparse.Namespace, Sequence[str], list[Path]], int]] = {
    "run": _run,
    "check": _check,
    "plan": _plan,
    "eval": _eval,
    "doctor": _doctor,
    "export": _export,
    "report": _report,
    "bench": _bench,
    "completion": _completion,
}
