"""Where a run began that did not begin with `policy.model_name`: another run's checkpoint.

A run takes over everything (weights, optimizer, step, place in the data), and goes on from there in a folder of its
own; or the weights alone, and begins at step 1. It keeps that in `origin.json`, for a reference model is made of the
start weights each time that the run is started.
"""

from pathlib import Path
from typing import Literal, TypedDict

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.runs.output import write_json_atomic
from nemo_rl_offload.runs.run_files import read_json

ORIGIN_FILE = "origin.json"
Takes = Literal["everything", "weights"]


class Origin(TypedDict):
    """`origin.json`."""

    checkpoint: str
    """Folder of the checkpoint that the run began with."""
    takes: Takes
    start_weights: str | None
    """Folder of the checkpoint whose weights count as the run's start weights; None: those of `policy.model_name`."""


def origin_of(checkpoint: Path, takes: Takes) -> Origin:
    """Of a new run from a checkpoint. The start weights of a run that is taken over as a whole stay what they were."""
    folder = checkpoint.resolve()
    before = read_origin(folder.parent.parent) if takes == "everything" else None
    start = str(folder) if takes == "weights" else before and before["start_weights"]
    return {"checkpoint": str(folder), "takes": takes, "start_weights": start}


def read_origin(run_dir: Path) -> Origin | None:
    """Of the run in a folder; None where it began with `policy.model_name`. Raises ConfigError: it is damaged."""
    return read_json(run_dir / ORIGIN_FILE, Origin, "Start the run in another folder.")


def write_origin(run_dir: Path, origin: Origin) -> None:
    """Keep it. Raises ResourceError."""
    write_json_atomic(run_dir / ORIGIN_FILE, origin)


def as_key(origin: Origin | None) -> dict[str, object]:
    """As a key among those of a configuration, by which runs are compared."""
    return {} if origin is None else {"--from-checkpoint": f"{origin['checkpoint']} ({origin['takes']})"}


def same_or_given(run_dir: Path, given: Origin | None) -> Origin | None:
    """The origin of a run in a folder that may go on: what was given, else what it had."""
    if given is not None:
        return given
    try:
        return read_origin(run_dir)
    except ConfigError:
        return None
