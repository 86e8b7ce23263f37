"""Metric files of a run: JSON lines, TensorBoard events, and trackers."""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from nemo_rl_offload.config.schema import LoggerConfig
from nemo_rl_offload.runs.output import without_nan, writing_in_run

METRICS_FILE = "metrics.jsonl"


class _Sink(Protocol):
    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None: ...
    def close(self) -> None: ...


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path
        with writing_in_run(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None:
        record = {"step": step, "prefix": prefix, "time": wall_time_s, "metrics": dict(metrics)}
        with writing_in_run(self._path):
            self._file.write(json.dumps(without_nan(record), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing_in_run(self._path):
            self._file.close()


class _TensorBoard:
    # TensorBoard's own EventFileWriter writes in a thread, where a full disk ends in a printed traceback.
    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        start_s = time.time()
        self._path = folder / f"events.out.tfevents.{int(start_s):010d}.{socket.gethostname()}.{os.getpid()}"
        with writing_in_run(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
            self._records = RecordWriter(self._file)
        self._append(Event(wall_time=start_s, file_version="brain.Event:2"))

    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None:
        values = [self._summary.Value(tag=f"{prefix}/{name}", simple_value=value) for name, value in metrics.items()]
        self._append(self._event(wall_time=wall_time_s, step=step, summary=self._summary(value=values)))

    def _append(self, event: Any) -> None:
        with writing_in_run(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()

    def close(self) -> None:
        with writing_in_run(self._path):
            self._file.close()


class MetricLogger:
    """Writes metrics under ``run_dir`` as they come, to what the section ``logger`` enables; a context manager.

    ``metrics.jsonl`` has one object a line, ``{"step", "prefix", "time", "metrics"}``, with the time in
    seconds since the epoch and null for a value that is not finite; a resumed run appends. ``tensorboard/``
    has the same under ``prefix/name``, and so have trackers, which are given the whole ``config`` besides.

    Raises:
        ResourceError: a file cannot be written (here and in every method).
    """

    def __init__(self, run_dir: Path, section: LoggerConfig, config: Mapping[str, object]) -> None:
        self._sinks: list[_Sink] = []
        if section["jsonl_enabled"]:
            self._sinks.append(_JsonLines(run_dir / METRICS_FILE))
        if section["tensorboard_enabled"]:
            self._sinks.append(_TensorBoard(run_dir / "tensorboard"))
        if section["wandb_enabled"]:
            from nemo_rl_offload.observability.trackers import Wandb

            self._sinks.append(Wandb(run_dir, section["wandb"], config))
        if section["mlflow_enabled"]:
            from nemo_rl_offload.observability.trackers import Mlflow

            self._sinks.append(Mlflow(run_dir, section["mlflow"], config))

    def log(self, metrics: Mapping[str, float], step: int, prefix: str) -> None:
        """Write the metrics of one step; ``prefix`` says what they belong to, such as ``train``."""
        wall_time_s = time.time()
        for sink in self._sinks:
            sink.write(metrics, step, prefix, wall_time_s)

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
