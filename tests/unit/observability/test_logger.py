import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import ResourceError
from nemo_rl_offload.observability import logger as logger_module
from nemo_rl_offload.observability import trackers
from nemo_rl_offload.observability.gpu_monitor import SECONDS
from nemo_rl_offload.observability.html_report import read_metrics
from nemo_rl_offload.observability.logger import MetricLogger
from nemo_rl_offload.runs.output import write_json_atomic


def metric_logger(run_dir: Path, first_step: int = 0, **enabled: bool) -> MetricLogger:
    """A logger with these sinks and no other."""
    section: Any = load_config(PROJECT_ROOT / "examples/configs/sft_tiny.yaml")["logger"]
    section |= {
        f"{name}_enabled": enabled.get(name, False) for name in ("tensorboard", "jsonl", "wandb", "mlflow", "swanlab")
    }
    return MetricLogger(run_dir, section, {"grpo": {"seed": 1}, "logger": section}, first_step)


def test_both_sinks_hold_what_was_logged(tmp_path: Path) -> None:
    with metric_logger(tmp_path, tensorboard=True, jsonl=True) as logger:
        logger.log({"loss": 0.5, "grad_norm": math.inf}, step=3, prefix="train")
        logger.log({"accuracy": 0.25}, step=4, prefix="validation")
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: nothing is held back
    records = [json.loads(line) for line in lines]
    assert [(r["step"], r["prefix"], r["metrics"]) for r in records] == [
        (3, "train", {"loss": 0.5, "grad_norm": None}),
        (4, "validation", {"accuracy": 0.25}),
    ]
    assert records[0]["time"] <= records[1]["time"]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.5)]
    assert events.Scalars("train/grad_norm")[0].value == math.inf
    assert events.Scalars("validation/accuracy")[0].step == 4


def test_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with metric_logger(tmp_path, tensorboard=False, jsonl=True) as logger:
            logger.log({"loss": 1.0}, step=step, prefix="train")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert not (tmp_path / "tensorboard").exists()


def test_what_a_kill_cut_off_costs_no_record_of_the_resumed_run(tmp_path: Path) -> None:
    for first_step, last_step in ((0, 3), (1, 2)):
        with metric_logger(tmp_path, first_step, jsonl=True) as logger:
            for step in range(first_step + 1, last_step + 1):
                logger.log({"loss": float(last_step)}, step=step, prefix="train")
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-20] if last_step == 3 else path.read_bytes())
    metrics = read_metrics(path)
    assert metrics == {"loss": {"train": [(1, 3.0), (2, 2.0)]}}


@pytest.mark.parametrize("first", [0, 2])
def test_tensorboard_does_not_show_what_a_resumed_run_gave_up(first: int, tmp_path: Path) -> None:
    """By the reader that TensorBoard has of its own."""
    for first_step, last_step in ((0, 4), (first, first + 1)):
        with metric_logger(tmp_path, first_step, tensorboard=True) as logger:
            for step in range(first_step + 1, last_step + 1):
                logger.log({"loss": 4.0 if last_step == 4 else 3.0}, step=step, prefix="train")
            for seconds in (36, 72):
                logger._log_gpus({SECONDS: seconds, "util": 50.0})
    read = plugin_event_accumulator.EventAccumulator
    samples = read(str(tmp_path / "tensorboard" / "gpus")).Reload().Tensors("ray/util")
    assert [event.step for event in samples] == [36, 72, 36, 72], "whose steps are others"
    found = read(str(tmp_path / "tensorboard")).Reload().Tensors("train/loss")
    values = [(event.step, float(event.tensor_proto.float_val[0])) for event in found]
    assert values == [(step, 4.0) for step in range(1, first + 1)] + [(first + 1, 3.0)]


def test_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = metric_logger(tmp_path, tensorboard=False, jsonl=True)
    assert logger._lines is not None
    logger._lines._file.close()
    logger._lines._file = Path("/dev/full").open("wb")  # type: ignore[assignment]  # noqa: SIM115
    with pytest.raises(ResourceError, match=rf"{path}: No space left on device.*--run-dir"):
        logger.log({"loss": 1.0}, step=1, prefix="train")
    with pytest.raises(ResourceError, match="No space left"):
        logger.close()
    logger.close()


def test_unwritable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="file/run"):
        metric_logger(tmp_path / "file" / "run", jsonl=True)


class Failing:
    """A tracker that fails at a moment."""

    def __init__(self, when: str, error: Exception) -> None:
        self._when, self._error = when, error
        self.num_written = 0
        self._fail("init")

    def _fail(self, when: str) -> None:
        if when == self._when:
            raise self._error

    def write(self, *_: object) -> None:
        self.num_written += 1
        self._fail("write")

    def close(self) -> None:
        self._fail("close")


@pytest.mark.parametrize("when", ["init", "write", "close"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError(), RuntimeError("one\ntwo")])
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "swanlab"])
def test_a_tracker_that_fails_is_told_of_once_and_left_out(
    name: str, error: Exception, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, attribute = (logger_module, "_TensorBoard") if name == "tensorboard" else (trackers, name.capitalize())
    monkeypatch.setattr(module, attribute, lambda *_: Failing(when, error))
    told = []
    with metric_logger(tmp_path, jsonl=True, **{name: True}) as logger:
        for step in (1, 2):
            logger.log({"loss": 0.5}, step=step, prefix="train")
            told += logger.notices()
        logger.close()
        told += logger.notices()
    reason = {OSError: "[Errno 28] No space left on device", ValueError: "ValueError", RuntimeError: "one"}[type(error)]
    assert told == [f"logger.{name}_enabled: {reason}. Nothing more is written there; the run goes on."]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_tensorboard_in_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tensorboard").symlink_to("elsewhere")
    with metric_logger(tmp_path, jsonl=True, tensorboard=True) as logger:
        logger.log({"loss": 0.5}, step=1, prefix="train")
        (text,) = logger.notices()
    assert "it is a link, and no folder" in text
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_metrics_that_go_nowhere_end_the_run(how: str, tmp_path: Path) -> None:
    logger = metric_logger(tmp_path, jsonl=True)
    logger.log({"loss": 0.5}, step=1, prefix="train")
    (tmp_path / "metrics.jsonl").unlink()
    if how == "replaced":
        (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ResourceError, match=r"metrics\.jsonl: was removed, moved or replaced"):
        logger.log({"loss": 0.5}, step=2, prefix="train")
    logger.close()


def log_twice(run_dir: Path, tracker: str) -> None:
    """Log in two runs, of which the second resumes the first."""
    for step in (1, 2):
        with metric_logger(run_dir, **{tracker: True}) as logger:
            logger.log({"loss": 1.0 / step, "grad_norm": math.inf}, step=step, prefix="train")
            logger.log({"accuracy": 0.25 * step}, step=step, prefix="validation")


def test_wandb_goes_on_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log_twice(tmp_path, "wandb")
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.stem for file in files}) == 1
    assert sum(file.read_bytes().count(b"validation/accuracy") for file in files) >= 2


def test_swanlab_goes_on_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    log_twice(tmp_path, "swanlab")
    files = list(tmp_path.glob("swanlab/run-*/run-*.swanlab"))
    assert len({file.stem for file in files}) == 1
    assert sum(file.read_bytes().count(b"validation/accuracy") for file in files) >= 2
    assert all(b"grpo" in (file.parent / "files" / "config.yaml").read_bytes() for file in files)


def test_mlflow_goes_on_in_one_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    log_twice(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'nemo-rl-offload'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == tmp_path.name
    assert run.data.params["grpo.seed"] == "1"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5)]
    assert run.data.metrics["validation/accuracy"] == 0.5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def blank_non_finite(obj: object) -> object:
    """Replace through the JSON decoder itself, which is what sees NaN and Infinity."""
    return json.loads(json.dumps(obj), parse_constant=lambda _: None)


@settings(max_examples=50, deadline=None)
@given(old=JSON, new=JSON)
def test_atomic_json_round_trip(tmp_path_factory: pytest.TempPathFactory, old: object, new: object) -> None:
    path = tmp_path_factory.mktemp("json") / "summary.json"
    for obj in (old, new):
        write_json_atomic(path, obj)
        assert json.loads(path.read_text()) == blank_non_finite(obj)
    assert os.listdir(path.parent) == ["summary.json"]


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"steps": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match=rf"{path}: No space left on device"):
        write_json_atomic(path, {"steps": 2})
    assert json.loads(path.read_text()) == {"steps": 1}
    assert os.listdir(tmp_path) == ["summary.json"]
