"""The folder that holds everything a run writes, and its checkpoints: each is either whole or absent.

A checkpoint is written under a name that nobody reads (`.step_50.partial`) and renamed when it is complete, with a
manifest of its files. What a killed run leaves half-written or half-removed is removed by the next one. A damaged
checkpoint ends the run that would go on from it: which older one to fall back to, and how many steps to give away for
that, is the user's to decide.

A run directory may come from elsewhere, so its names are looked at before anything is written (`plain_files.py`).
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple, NotRequired, TypedDict

import yaml
from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError, with_config

from nemo_rl_offload.errors import CheckpointError, ConfigError, ResourceError, where_else
from nemo_rl_offload.runs.comparison import Differences, differences, leaves, may_change, other_length
from nemo_rl_offload.runs.inputs import INPUTS_FILE
from nemo_rl_offload.runs.manifest import (
    Manifest,
    check_contents,
    check_sizes,
    file_digest,
    read_checkpoint_json,
    read_manifest,
)
from nemo_rl_offload.runs.origin import ORIGIN_FILE, Origin, as_key, same_or_given, write_origin
from nemo_rl_offload.runs.output import write_json_atomic, writing_in_run
from nemo_rl_offload.runs.plain_files import (
    aside_of,
    is_folder,
    make_folder,
    open_to_append,
    open_to_append_lines,
    why_no_folder,
    why_not_plain,
    written_anew,
)
from nemo_rl_offload.runs.run_files import Change, ChangeRecord, Count, LoopState, TrainingInfo
from nemo_rl_offload.specs.documents import RUN_BYTES, DocumentError, read_json, read_yaml
from nemo_rl_offload.specs.plain_file import NotPlainError

CONFIG_FILE, SUMMARY_FILE, STATE_FILE = "config.yaml", "summary.json", "training_info.json"
FORMER_SUMMARY_FILE = "former_summary.json"
EVALUATION_FILE = "evaluation.json"
MANIFEST_FILE, POLICY, CHECKPOINTS = "manifest.json", "policy", "checkpoints"
MEMORY_FILE = "memory_trace.json"
ERROR_FILE, RESTARTS_FILE, WARNINGS_FILE, LOCK_FILE = "error.log", "restarts.log", "warnings.log", ".lock"
SCORERS_FILE, METRICS_FILE, REPORT_FILE = "scorers.log", "metrics.jsonl", "report.html"
SAMPLES_FILE, CHANGES_FILE = "samples.jsonl", "changes.jsonl"
PROFILE = "profile"
TENSORBOARD, WANDB, WANDB_ID_FILE = "tensorboard", "wandb", ".wandb_run"
MLFLOW_DATABASE, MLFLOW_ID_FILE = "mlflow.db", ".mlflow_run"
SWANLAB, SWANLAB_ID_FILE = "swanlab", ".swanlab_run"
WRITTEN_WHOLE = (
    *(
        CONFIG_FILE,
        SUMMARY_FILE,
        FORMER_SUMMARY_FILE,
        EVALUATION_FILE,
        INPUTS_FILE,
        ORIGIN_FILE,
        MEMORY_FILE,
        ERROR_FILE,
        REPORT_FILE,
    ),
    *(WANDB_ID_FILE, MLFLOW_ID_FILE, SWANLAB_ID_FILE),
)
APPENDED_TO = (
    *(METRICS_FILE, SAMPLES_FILE, CHANGES_FILE, RESTARTS_FILE, WARNINGS_FILE, SCORERS_FILE, LOCK_FILE),
    *(f"{MLFLOW_DATABASE}{end}" for end in ("", "-journal", "-wal", "-shm")),
)
FOLDERS = (CHECKPOINTS, TENSORBOARD, WANDB, SWANLAB, PROFILE)
_STEP = re.compile(r"step_(\d+)")
BEFORE_TRAINING = {
    *(CONFIG_FILE, INPUTS_FILE, ORIGIN_FILE, ERROR_FILE, WARNINGS_FILE, SCORERS_FILE, LOCK_FILE),
    *(f".{CONFIG_FILE}.partial", f".{CONFIG_FILE}.part", f".{INPUTS_FILE}.part"),
}


_OF_A_RUN = (LOCK_FILE, SUMMARY_FILE, METRICS_FILE, EVALUATION_FILE)
"""One of which is beside the configuration of a run."""
FORMER = "former"
"""What the folders begin with that keep a run which another one took the place of."""


@contextmanager
def open_run_directory(
    explicit: Path | None,
    default: Path,
    config: Mapping[str, object],
    *,
    origin: Origin | None = None,
    force: bool = False,
    told: Callable[[str], object] = lambda _line: None,
) -> Iterator[Path]:
    """Create or re-enter the folder of a run, note its configuration there, and keep other processes out meanwhile.

    Without an explicit folder, an unfinished run of the same configuration under `default` is taken up again; any other
    run there is left alone, and `default-2`, `default-3`, ... is used. Configurations are the same but for
    `comparison.MEANS`. In an explicit folder a run with checkpoints may go on with other values of `may_change`, which
    are noted in `changes.jsonl`; one without checkpoints gives way to any configuration. With `force`, every run gives
    way. What gives way is moved to the folder's `former-1`, `former-2`, ..., checkpoints included: nothing is removed.
    A finished run stays as it is, unless it is in an explicit folder and gets another length: then it is unfinished,
    and its summary is kept under another name. `told` takes lines for the user.

    Raises:
        CheckpointError: a run that is to have another length has a damaged checkpoint; the folder is as it was.
        ConfigError: the explicit folder holds a run of another configuration or origin, or other files, or a link or a
            pipe where a run writes, or is in use.
        ResourceError: the folder cannot be written.
    """
    passed: list[str] = []
    for folder in [explicit] if explicit is not None else _numbered(default):
        with _explained(folder):
            obstacle = _obstacle(folder, config, origin, by_request=explicit is not None, force=force)
            if obstacle is not None:
                passed += _why_another(folder, obstacle)
                continue
            folder.mkdir(parents=True, exist_ok=True)
            lock = open_to_append(folder / LOCK_FILE)
        with lock:
            if not _acquire(lock):
                obstacle = "another process is running it"
                continue
            with _explained(folder):
                if explicit is not None and (force or _gives_way(folder, config, origin)):
                    _move_aside(folder, told)
                elif explicit is not None and length_on_resume(folder, config) and (folder / SUMMARY_FILE).exists():
                    (folder / SUMMARY_FILE).replace(folder / FORMER_SUMMARY_FILE)
            if passed and not (folder / CONFIG_FILE).exists():
                told(f"New run directory: {passed[-1]}")
            if not (folder / SUMMARY_FILE).exists():
                _note_changes(folder, config, told)
                _write_config(folder, config)
                if origin is not None:
                    write_origin(folder, origin)
            yield folder
            return
    assert obstacle is not None
    others = _OTHER_WAYS if obstacle.startswith(_HOLDS) else _GIVE_WAY if obstacle == _UNREADABLE else ""
    raise ConfigError(f"--run-dir {explicit}: {obstacle}. Choose another folder{others}.")


def check_no_run_in(folder: Path) -> None:
    """Raise ConfigError where a run trains in a folder: an evaluation's responses would take the place of its own."""
    if any((folder / name).exists() for name in (CHECKPOINTS, SUMMARY_FILE, METRICS_FILE)):
        raise ConfigError(
            f"{folder}: holds a run that trains, whose responses would be lost. Choose another folder with --run-dir."
        )


def check_not_of_run(destination: Path) -> None:
    """Raise ConfigError where a file would take the place of what a run has written, but for its page."""
    target = destination.resolve()
    for folder in target.parents:
        # Which `Path.exists` raises errors of, for whoever writes there to tell.
        if not os.path.exists(folder / CONFIG_FILE) or not any(os.path.exists(folder / name) for name in _OF_A_RUN):
            continue
        files = {folder / name for name in (*WRITTEN_WHOLE, *APPENDED_TO) if name != REPORT_FILE}
        folders = [folder / name for name in FOLDERS] + list(folder.glob(f"{FORMER}-*"))
        if target in files or any(target.is_relative_to(each) for each in folders):
            raise ConfigError(f"{destination}: belongs to the run in {folder}, and would be lost. Give another name.")


def _numbered(default: Path) -> Iterator[Path]:
    default = default if default.name else default.absolute()
    yield default
    for number in count(2):
        yield default.parent / f"{default.name or 'run'}-{number}"


_HOLDS = "holds a run of another configuration"
_FINISHED = "holds a finished run"
_UNREADABLE = f"its {CONFIG_FILE} cannot be read"
_GIVE_WAY = ", or let it give way (--force), which moves it to a folder below"
_OTHER_WAYS = f", begin with that run's checkpoint (--from-checkpoint){_GIVE_WAY}"


def _why_another(folder: Path, obstacle: str) -> list[str]:
    """What a user who meant the run in `folder` should hear, where there is one."""
    if obstacle.startswith(_HOLDS):
        return [
            f"{folder} {obstacle}. Without these changes, the command is that run's. With --run-dir {folder}, it goes "
            "on there with those that may change."
        ]
    if obstacle == _FINISHED:
        return [f"{folder} {obstacle}. With --run-dir {folder}, the command shows it, or makes it longer."]
    return []


def _obstacle(
    folder: Path, config: Mapping[str, object], origin: Origin | None, *, by_request: bool, force: bool
) -> str | None:
    """Why a folder cannot be entered; None where it can."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return "is a file"
    if strange := _strange(folder):
        return strange
    names = _names(folder)
    if names <= BEFORE_TRAINING:
        return None
    if CONFIG_FILE not in names:
        return f"holds files, and no run ({CONFIG_FILE} is missing)"
    if not by_request and SUMMARY_FILE in names:
        return _FINISHED
    if by_request and force:
        return None
    saved = _read_config(folder)
    if saved is None:
        return _UNREADABLE
    there, here = leaves(saved), leaves(config)
    steps = steps_in(folder / CHECKPOINTS)
    length = other_length(there, here, steps[-1]) if by_request and steps else {}
    kept = [
        {
            path: value
            for path, value in values.items()
            if not may_change(path, config.get("algorithm"), by_request=by_request)
        }
        for values in (there | length, here)
    ]
    origins = [as_key(each) for each in (same_or_given(folder, None), same_or_given(folder, origin))]
    num_steps, num_epochs = (f"{config.get('algorithm')}.max_num_{unit}" for unit in ("steps", "epochs"))
    found = differences(kept[0] | origins[0], kept[1] | origins[1])
    changed = found.told
    if by_request and steps and num_steps in found:
        changed += f"; {steps[-1]} steps are taken, and {num_steps} may be as many or more"
    if by_request and steps and found and found.keys() <= {num_steps, num_epochs}:
        as_there = " ".join(f"{path}={there}" for path, (there, _) in found.items())
        changed += f"; the command goes on there with {as_there}"
    if changed and (steps or names & {SUMMARY_FILE, EVALUATION_FILE} or not by_request):
        return f"{_HOLDS} ({changed})"
    if length:
        read_checkpoint(folder / CHECKPOINTS / f"step_{steps[-1]}")
    return None


def _names(folder: Path) -> set[str]:
    """Of what is in a folder, but for runs that gave way."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(f"{FORMER}-")}


def _gives_way(folder: Path, config: Mapping[str, object], origin: Origin | None) -> bool:
    """Whether the run in a folder has no checkpoint, and is not the one that is to run."""
    names = _names(folder)
    if names <= BEFORE_TRAINING or names & {SUMMARY_FILE, EVALUATION_FILE} or steps_in(folder / CHECKPOINTS):
        return False
    is_other = bool(changed_on_resume(folder, config))
    return is_other or as_key(same_or_given(folder, None)) != as_key(origin)


def _move_aside(folder: Path, told: Callable[[str], object]) -> None:
    """Make room for another run. Raises OSError."""
    own = [name for name in (*WRITTEN_WHOLE, *APPENDED_TO, *FOLDERS) if name != LOCK_FILE and (folder / name).exists()]
    if own:
        aside = next(path for number in count(1) if not (path := folder / f"{FORMER}-{number}").exists())
        make_folder(aside)
        for name in own:
            (folder / name).rename(aside / name)
        told(f"The run that was there has given way: it is in {aside}.")


def _note_changes(folder: Path, config: Mapping[str, object], told: Callable[[str], object]) -> None:
    """Keep with which other values a run goes on."""
    steps = steps_in(folder / CHECKPOINTS)
    found = changed_on_resume(folder, config) if steps else {}
    if not found:
        return
    changes: dict[str, Change] = {path: {"before": there, "after": here} for path, (there, here) in found.items()}
    record: ChangeRecord = {"step": steps[-1], "changes": changes}
    with writing_in_run(folder / CHANGES_FILE), open_to_append_lines(folder / CHANGES_FILE) as file:
        file.write((json.dumps(record) + "\n").encode())
    for path, change in changes.items():
        told(f"From step {steps[-1]} on, {path} is {change['after']} instead of {change['before']}.")


def _strange(folder: Path) -> str | None:
    """What in a run directory is not what a run writes at its name; None where all is."""
    for name in FOLDERS:
        if what := why_no_folder(folder / name):
            return f"{name} cannot be used: {what}"
    for name in (*WRITTEN_WHOLE, *APPENDED_TO):
        if what := why_not_plain(folder / name, may_have_other_names=name in WRITTEN_WHOLE):
            return f"{name} cannot be used: {what}"
    for aside in (aside_of(folder / name) for name in WRITTEN_WHOLE):
        if is_folder(aside):  # all else is removed
            return f"{aside.name} cannot be used: it is a folder, and no plain file"
    for path in sorted((folder / CHECKPOINTS).glob("*step_*")):
        if _STEP.fullmatch(path.name.removeprefix(".").removesuffix(".partial")) and (what := why_no_folder(path)):
            return f"{CHECKPOINTS}/{path.name} cannot be used: {what}"
    return None


def changed_on_resume(folder: Path, config: Mapping[str, object]) -> Differences:
    """In what the configuration of the run in a folder differs."""
    return differences(leaves(_read_config(folder) or {}), leaves(config))


def length_on_resume(folder: Path, config: Mapping[str, object]) -> dict[str, object]:
    """Keys of a run's length with which the run in a folder can go on, and did not have; none without a checkpoint."""
    steps = steps_in(folder / CHECKPOINTS)
    return other_length(leaves(_read_config(folder) or {}), leaves(config), steps[-1]) if steps else {}


def _read_config(folder: Path) -> dict[str, object] | None:
    """The configuration of the run in a folder; None where there is none that can be read."""
    try:
        saved = read_yaml(folder / CONFIG_FILE, follows_links=False)
    except (OSError, DocumentError):
        return None
    return saved if isinstance(saved, dict) else None


def _acquire(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nothing keeps a second process out
        return True
    return True


def _write_config(folder: Path, config: Mapping[str, object]) -> None:
    with _explained(folder), written_anew(folder / CONFIG_FILE) as file:
        file.write(yaml.safe_dump(dict(config), sort_keys=False).encode())


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"Cannot write {path}: {error.strerror or error}. "
            f"{where_else(error, 'choose another folder with --run-dir')}"
        ) from error


@with_config(ConfigDict(strict=True, extra="allow"))
class CheckpointState(TypedDict):
    """What `training_info.json` has of every checkpoint; a loop's own is in it too (`loop_state`)."""

    step: Count
    metric: FiniteFloat | None
    has_optimizer: NotRequired[bool]


class Checkpoint(NamedTuple):
    """A checkpoint as it was found."""

    folder: Path
    state: CheckpointState
    policy_files: Manifest
    """Files of the folder `policy`, by their names there."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's own files, and compare the sizes of all others.

    Raises:
        CheckpointError: something is missing, has another size, or is no file of the folder; the message says how to
            go on.
    """
    try:
        manifest = read_manifest(folder, MANIFEST_FILE)
        if STATE_FILE not in manifest:
            raise CheckpointError(f"{folder} is damaged: {MANIFEST_FILE} does not name {STATE_FILE}.")
        check_sizes(folder, manifest)
        check_contents(folder, manifest, [STATE_FILE])
        state = read_state(folder)
        if (match := _STEP.fullmatch(folder.name)) and state["step"] != int(match[1]):
            raise CheckpointError(f"{folder} is damaged: {STATE_FILE} is of step {state['step']}.")
    except CheckpointError as error:
        raise CheckpointError(f"{error} {recovery_hint(folder)}") from error
    files = {name.removeprefix(f"{POLICY}/"): digest for name, digest in manifest.items() if name != STATE_FILE}
    return Checkpoint(folder, state, files)


def read_state(folder: Path) -> CheckpointState:
    """The driver's own state in a checkpoint; CheckpointError where it cannot be read."""
    return read_checkpoint_json(folder, STATE_FILE, TypeAdapter(CheckpointState))


def loop_state(checkpoint: Checkpoint) -> TrainingInfo:
    """Where the loop stands that wrote a checkpoint. Raises CheckpointError: that is missing, or is something else."""
    try:
        return TypeAdapter(TrainingInfo).validate_python(checkpoint.state)
    except ValidationError as error:
        first, folder = error.errors(include_url=False, include_input=False)[0], checkpoint.folder
        raise CheckpointError(
            f"{folder} is damaged: {STATE_FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}. "
            f"{recovery_hint(folder)}"
        ) from error


def recovery_hint(folder: Path) -> str:
    """What to do about a damaged checkpoint of a run, or a copy of one that a user made beside."""
    if (match := _STEP.fullmatch(folder.name)) is None:
        return "It is a copy, from which no run goes on: choose another checkpoint."
    older = [step for step in steps_in(folder.parent) if step < int(match[1])]
    return f"Remove {folder} to {f'go on from step {older[-1]}' if older else 'start again'}."


def steps_in(folder: Path) -> list[int]:
    """The steps whose checkpoints are there, in order; what has other names is not a run's own."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("step_*"))
    return sorted(int(match[1]) for match in matches if match)


def remove_unfinished(run_dir: Path) -> None:
    """Remove what was written or removed by half. Raises OSError."""
    for leftover in (run_dir / CHECKPOINTS).glob(".*.partial"):
        shutil.rmtree(leftover)


@with_config(ConfigDict(strict=True))
class _Ranked(TypedDict):
    """What pruning reads of `training_info.json`."""

    metric: FiniteFloat | None


class Checkpoints:
    """The checkpoints of a run directory: `checkpoints/step_N`, each with the driver's own state as JSON.

    `keep_top_k` best ones by the metric are kept (all where it is None), and always the latest. One whose metric cannot
    be read, or that cannot be removed, is kept beside them, and `notices` tells of it once.
    """

    def __init__(self, run_dir: Path, keep_top_k: int | None, higher_is_better: bool) -> None:
        self._folder = run_dir / CHECKPOINTS
        self._keep_top_k = keep_top_k
        self._higher_is_better = higher_is_better
        self._told: set[int] = set()
        self._notices: list[str] = []
        with _explained(self._folder):
            remove_unfinished(run_dir)

    def begin(self, step: int, write: Callable[[Path], None]) -> None:
        """Begin a checkpoint, which nobody reads yet: `write` fills the folder `policy` in it, or begins to.

        Raises:
            ResourceError: it could not be written; then it is absent, and older ones are untouched.
        """
        with self._absent_on_failure(step):
            make_folder(self._folder)
            self._partial(step).mkdir()
            write(self._partial(step) / POLICY)

    def commit(self, step: int, state: LoopState, metric: float | None, complete: Callable[[], Manifest]) -> Path:
        """End what `begin` began: `complete` waits until `policy` is whole and returns its files.

        Returns where the checkpoint stands. Raises as `begin`.
        """
        partial, final = self._partial(step), self._path(step)
        with self._absent_on_failure(step):
            manifest = {f"{POLICY}/{name}": digest for name, digest in complete().items()}
            info: TrainingInfo = {"step": step, "metric": metric, **state}
            write_json_atomic(partial / STATE_FILE, info)
            manifest[STATE_FILE] = file_digest(partial / STATE_FILE)
            write_json_atomic(partial / MANIFEST_FILE, manifest)
            partial.rename(final)
        self._prune()
        return final

    @contextmanager
    def _absent_on_failure(self, step: int) -> Iterator[None]:
        try:
            with _explained(self._path(step)):
                yield
        except BaseException:
            shutil.rmtree(self._partial(step), ignore_errors=True)
            raise

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint; None without one.

        Raises:
            CheckpointError: it is damaged, as far as that shows without reading everything.
        """
        steps = self._steps()
        return read_checkpoint(self._path(steps[-1])) if steps else None

    def _steps(self) -> list[int]:
        return steps_in(self._folder)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    def _partial(self, step: int) -> Path:
        return self._folder / f".step_{step}.partial"

    def notices(self) -> list[str]:
        """What there is to tell since the last call: checkpoints that stay though they need not."""
        notices, self._notices = self._notices, []
        return notices

    def _prune(self) -> None:
        if self._keep_top_k is None:
            return
        steps = self._steps()
        sign = -1.0 if self._higher_is_better else 1.0
        ranks: list[tuple[bool, float, int]] = []
        for step in steps:
            try:
                metric = self._metric(step)
            except (OSError, ValidationError, DocumentError) as error:
                if self._path(step).exists():  # else somebody has removed it meanwhile
                    reason = error.strerror if isinstance(error, OSError) else "it is damaged"
                    reason = f"it {error.reason}" if isinstance(error, DocumentError) else reason
                    self._keep(step, f"{STATE_FILE} cannot be read: {reason}")
            else:
                ranks.append((metric is None, sign * (metric or 0.0), -step))
        for _, _, negative in sorted(ranks)[self._keep_top_k :]:
            if (step := -negative) != steps[-1]:
                try:
                    self._path(step).rename(self._partial(step))
                    shutil.rmtree(self._partial(step))
                except OSError as error:
                    self._keep(step, f"it cannot be removed: {error.strerror or error}")

    def _metric(self, step: int) -> float | None:
        """What a checkpoint is ranked by. Raises OSError, ValidationError, DocumentError."""
        if what := why_no_folder(self._path(step)):
            raise NotPlainError(self._path(step), what)
        state = read_json(self._path(step) / STATE_FILE, RUN_BYTES, follows_links=False)
        return TypeAdapter(_Ranked).validate_python(state)["metric"]

    def _keep(self, step: int, why: str) -> None:
        if step not in self._told:
            self._told.add(step)
            self._notices.append(f"{self._path(step)} is kept: {why}. Remove it if it is not needed.")
