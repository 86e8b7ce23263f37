"""`nemo-rl-offload bench`: from the command line's options to figures."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_rl_offload.errors import ConfigError, ResourceError
from nemo_rl_offload.runs.output import make_writable


def run_offload_bench(options: argparse.Namespace) -> int:
    """Run the offloading bench; returns the exit code, 1 when a variant of ours changed a bit or failed.

    Raises:
        ConfigError: an option is wrong, or nothing can be written to `--out`; before anything is measured.
        ResourceError: a file there cannot be written after all.
    """
    # Before the first CUDA call: without it, matrix products are not reproducible enough to be compared bit by bit.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from nemo_rl_offload.bench import offload, report

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fields = {"layers": "num_layers", "sequence": "sequence_length", "microbatches": "num_microbatches"}
    wanted = _wanted(options, fields)
    shape = dataclasses.replace(offload.QWEN2_7B_LAYERS if device.type == "cuda" else offload.SMALL, **wanted)
    _prepare(options)
    name = f"offload_{shape.num_layers}_layers_{shape.sequence_length}_tokens"

    def keep(figures: Sequence[offload.Figures]) -> None:
        if options.out is not None:
            report.write_json(options.out / f"{name}.json", offload.to_json(shape, figures, device))

    progress = _progress_console()
    with _told(progress) as tell:
        tell("building the model")
        figures = offload.run(shape, device, num_rounds=options.rounds, names=options.variant, progress=tell, keep=keep)
    data = offload.to_json(shape, figures, device)
    if options.format == "json":
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    else:
        Console(highlight=False, width=150).print(report.table(figures, device.type == "cuda"))
    if options.out is not None:
        path = report.write_json(options.out / f"{name}.json", data)
        progress.print(f"wrote {path}")
        _draw(path.with_suffix(".png"), progress, lambda picture: report.plot(picture, data, figures))
    ours = [each for each in figures if each.name.startswith("ours")]
    return 1 if any(each.error is not None or not each.bit_identical for each in ours) else 0


def run_stash_bench(options: argparse.Namespace) -> int:
    """Run the paged stash's bench; returns the exit code, 1 when a variant changed a bit or failed.

    Raises as `run_offload_bench`.
    """
    if useless := [f"--{name}" for name in ("microbatches", "variant") if getattr(options, name) is not None]:
        raise ConfigError(f"{', '.join(useless)}: for `bench offload` alone. Leave that out.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from nemo_rl_offload.bench import report, stash, stash_report
    from nemo_rl_offload.bench.expert_layers import one_rank

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = _wanted(options, {"layers": "num_layers", "sequence": "num_tokens"})
    shape = dataclasses.replace(stash.ON_DEVICE if device.type == "cuda" else stash.SMALL, **wanted)
    _prepare(options)
    progress = _progress_console()
    with _told(progress) as tell:
        tell("copies")
        copies = stash.measure_copies(device, options.rounds)
        with one_rank():
            layers = stash.measure_layers(shape, device, options.rounds, lambda name: tell(f"layers: {name}"))
    data = stash.to_json(shape, device, copies, layers)
    if options.format == "json":
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    else:
        console = Console(highlight=False, width=150)
        console.print(stash_report.copies_table(copies), stash_report.layers_table(layers))
    if options.out is not None:
        path = report.write_json(options.out / "stash.json", data)
        progress.print(f"wrote {path}")
        _draw(path.with_suffix(".png"), progress, lambda picture: stash_report.plot(picture, data, copies, layers))
    return 0 if all(each.error is None and each.bit_identical for each in layers) else 1


def _prepare(options: argparse.Namespace) -> None:
    if options.out is not None:
        make_writable(options.out, f"--out {options.out}")


def _draw(path: Path, console: Console, draw: Callable[[Path], None]) -> None:
    """Draw a picture, which a bench can do without: its figures are written."""
    try:
        draw(path)
    except ResourceError as error:
        console.print(f"warning: {error}")
    else:
        console.print(f"wrote {path}")


def _progress_console() -> Console:
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _told(console: Console) -> Iterator[Callable[[str], None]]:
    """What is being measured: one line that changes on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield console.print
        return
    with console.status("starting") as status:
        yield status.update


def _wanted(options: argparse.Namespace, fields: Mapping[str, str]) -> dict[str, Any]:
    """The changes of a shape that were asked for, `fields` by their options. Raises ConfigError: one is below 1."""
    given = {name: value for name in (*fields, "rounds") if (value := getattr(options, name)) is not None}
    if bad := [f"--{name} {value}" for name, value in given.items() if value < 1]:
        raise ConfigError(f"{', '.join(bad)}: give at least 1")
    return {field: given[name] for name, field in fields.items() if name in given}
