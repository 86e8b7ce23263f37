"""The command `report`: a run's page, written or served; or several runs beside each other."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Group
from rich.text import Text

from nemo_rl_offload.cli.show import show
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.observability.html_report import RUN_FILES, run_page, write_report
from nemo_rl_offload.observability.page_server import PageServer
from nemo_rl_offload.observability.run_comparison import Run, comparison_data, letters, page, tables
from nemo_rl_offload.runs.output import write_text
from nemo_rl_offload.runs.run_directory import CHECKPOINTS, SUMMARY_FILE, check_not_of_run

_PORTS = range(1 << 16)


def report(options: argparse.Namespace) -> None:
    """Do what the command says. Raises NemoRLOffloadError."""
    run_dirs: list[Path] = options.run_dirs
    if options.port is not None and (not options.serve or options.port not in _PORTS):
        raise ConfigError(f"--port {options.port}: needs --serve, and a number from 0 to {_PORTS[-1]}.")
    if options.format == "json" and (options.serve or len(run_dirs) == 1):
        for run_dir in run_dirs:
            Run(run_dir)  # which says where there is none
        raise ConfigError(
            "--format json: compares several runs. Give their folders, without --serve. One run's figures are in its "
            f"{SUMMARY_FILE}, once it has ended."
        )
    if options.serve:
        if options.out is not None:
            raise ConfigError("--serve writes no file: leave --out away, or serve and write in two commands.")
        _serve(run_dirs, options.port or 0)
    elif len(run_dirs) == 1:
        destination = options.out or run_dirs[0] / "report.html"
        write_report(run_dirs[0], destination)
        print(f"Wrote {destination}")
    else:
        _compare(run_dirs, options.out, options.format)


def _compare(run_dirs: list[Path], destination: Path | None, form: str) -> None:
    if destination is not None:
        check_not_of_run(destination)
    runs = [Run(folder) for folder in run_dirs]
    folders = [
        Text(f"{name}: {run.folder}", no_wrap=True, overflow="ignore")
        for name, run in zip(letters(runs), runs, strict=True)
    ]
    show(form, lambda: comparison_data(runs), lambda width: Group(*folders, *tables(runs, width)))
    if destination is not None:
        write_text(destination, page(runs))
        print(f"Wrote {destination}", file=sys.stderr if form == "json" else sys.stdout)


def _serve(run_dirs: list[Path], port: int) -> None:
    make: Callable[[str], str]
    if len(run_dirs) == 1:
        (run_dir,) = run_dirs

        def make(script: str) -> str:
            return run_page(run_dir, script=script)
    else:

        def make(script: str) -> str:
            return page([Run(folder) for folder in run_dirs], script=script)

    if missing := [folder for folder in run_dirs if not folder.is_dir()]:
        raise ConfigError(f"{missing[0]}: is no folder. Give the folder of a run.")
    watched = [run_dir / name for run_dir in run_dirs for name in (*RUN_FILES, CHECKPOINTS)]
    with PageServer(port, make, watched) as server:
        print(f"Serving {server.address} to this machine; Ctrl-C ends it.", flush=True)
        print(f"From another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} HOST", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
