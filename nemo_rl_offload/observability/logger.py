"""Metric files of a run: JSON lines, TensorBoard events, and trackers.

`metrics.jsonl` is the run's own record, and a run that cannot write it ends. TensorBoard and trackers are besides: one
that fails, at any moment and in whatever way, is told of once and left out from then on.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Protocol, Self

import pynvml

from nemo_rl_offload.config.schema import LoggerConfig
from nemo_rl_offload.errors import ResourceError
from nemo_rl_offload.observability.gpu_monitor import PREFIX, SECONDS, GpuMonitor
from nemo_rl_offload.runs.output import without_nan, writing_in_run
from nemo_rl_offload.runs.plain_files import Place, make_folder, open_to_append, open_to_append_lines
from nemo_rl_offload.runs.run_directory import METRICS_FILE, TENSORBOARD

GPUS = "gpus"
"""TensorBoard's run of their samples."""


class _Sink(Protocol):
    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None: ...
    def close(self) -> None: ...


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._path = path
        with writing_in_run(path):
            self._file = open_to_append_lines(path)
            self._place = Place(path)

    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None:
        record = {"step": step, "prefix": prefix, "time": wall_time_s, "metrics": dict(metrics)}
        with writing_in_run(self._path):
            self._file.write((json.dumps(without_nan(record), allow_nan=False) + "\n").encode())
            self._file.flush()
        if not self._place.is_same():
            raise ResourceError(
                f"{self._path}: was removed, moved or replaced while the run was at work. Start the run again: it goes "
                "on from the last checkpoint."
            )

    def close(self) -> None:
        with writing_in_run(self._path):
            self._file.close()


class _EventFile:
    # TensorBoard's own EventFileWriter writes in a thread, where a full disk ends in a printed traceback.
    def __init__(self, folder: Path, hidden_from: int | None = None) -> None:
        """Of events in earlier files there, those from a step on are not shown."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        start_s = time.time()
        self._path = folder / f"events.out.tfevents.{int(start_s):010d}.{socket.gethostname()}.{os.getpid()}"
        with writing_in_run(self._path):
            make_folder(folder)
            self._file = open_to_append(self._path)
            self._records = RecordWriter(self._file)
        self._append(Event(wall_time=start_s, file_version="brain.Event:2"))
        if hidden_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=start_s, step=hidden_from, session_log=start))

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


class _TensorBoard:
    """What attempts that were given up have written of steps after `step` is not shown. Samples of GPUs, whose steps
    are seconds, are in a run of their own: they would be hidden too."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._files = {False: _EventFile(folder, hidden_from=step + 1)}
        """By whether they are of GPUs."""

    def write(self, metrics: Mapping[str, float], step: int, prefix: str, wall_time_s: float) -> None:
        of_gpus = prefix == PREFIX
        if of_gpus not in self._files:
            self._files[of_gpus] = _EventFile(self._folder / GPUS)
        self._files[of_gpus].write(metrics, step, prefix, wall_time_s)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class MetricLogger:
    """Writes metrics under ``run_dir`` as they come, to what the section ``logger`` enables; a context manager.

    ``metrics.jsonl`` has one object a line, ``{"step", "prefix", "time", "metrics"}``, with the time in
    seconds since the epoch and null for a value that is not finite; a resumed run appends. ``tensorboard/``
    has the same under ``prefix/name``, and so have trackers, which are given the whole ``config`` besides. The run
    goes on after ``first_step``.

    Raises:
        ResourceError: `metrics.jsonl` cannot be written (here and in every method).
    """

    def __init__(self, run_dir: Path, section: LoggerConfig, config: Mapping[str, object], first_step: int = 0) -> None:
        self._notices: list[str] = []
        self._step = first_step
        self._lock = Lock()
        """Of the files, which the monitor's thread writes too."""
        self._sinks: dict[str, _Sink] = {}
        """Those besides `metrics.jsonl`, by the names that their keys begin with."""

        def wandb() -> _Sink:
            from nemo_rl_offload.observability.trackers import Wandb

            return Wandb(run_dir, section["wandb"], config)

        def swanlab() -> _Sink:
            from nemo_rl_offload.observability.trackers import Swanlab

            return Swanlab(run_dir, section["swanlab"], config)

        def mlflow() -> _Sink:
            from nemo_rl_offload.observability.trackers import Mlflow

            return Mlflow(run_dir, section["mlflow"], config)

        self._lines = _JsonLines(run_dir / METRICS_FILE) if section["jsonl_enabled"] else None
        makers: dict[str, tuple[bool, Callable[[], _Sink]]] = {
            "tensorboard": (section["tensorboard_enabled"], lambda: _TensorBoard(run_dir / TENSORBOARD, first_step)),
            "wandb": (section["wandb_enabled"], wandb),
            "mlflow": (section["mlflow_enabled"], mlflow),
            "swanlab": (section["swanlab_enabled"], swanlab),
        }
        for name, (is_enabled, make) in makers.items():
            if is_enabled:
                self._try(name, self._add, name, make)
        self._monitor: GpuMonitor | None = None
        if section["monitor_gpus"]:
            self._watch_gpus(**section["gpu_monitoring"])

    def _watch_gpus(self, collection_interval: float, flush_interval: float) -> None:
        try:
            self._monitor = GpuMonitor(collection_interval, flush_interval, self._log_gpus)
        except pynvml.NVMLError as error:
            self._notices.append(f"logger.monitor_gpus: has no effect on this machine: {error}.")

    def _log_gpus(self, metrics: Mapping[str, float]) -> None:
        """Write a sample, with the last step of the run in `metrics.jsonl`, and elsewhere its seconds as the step."""
        with suppress(ResourceError):  # which the next step's metrics will meet
            self._write(metrics, self._step, int(metrics[SECONDS]), PREFIX)

    def _add(self, name: str, make: Callable[[], _Sink]) -> None:
        self._sinks[name] = make()

    def _try[*Ts](self, name: str, use: Callable[[*Ts], None], *arguments: *Ts) -> None:
        """Do something with a sink, which is left out from then on where that fails."""
        try:
            use(*arguments)
        except Exception as error:  # noqa: BLE001 - trackers raise what they like
            self._sinks.pop(name, None)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")
            self._notices.append(f"logger.{name}_enabled: {reason}. Nothing more is written there; the run goes on.")

    def notices(self) -> list[str]:
        """What has failed since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def log(self, metrics: Mapping[str, float], step: int, prefix: str) -> None:
        """Write the metrics of one step; ``prefix`` says what they belong to, such as ``train``."""
        self._step = step
        self._write(metrics, step, step, prefix)

    def _write(self, metrics: Mapping[str, float], step: int, step_elsewhere: int, prefix: str) -> None:
        wall_time_s = time.time()
        with self._lock:
            if self._lines is not None:
                self._lines.write(metrics, step, prefix, wall_time_s)
            for name, sink in list(self._sinks.items()):
                self._try(name, sink.write, metrics, step_elsewhere, prefix, wall_time_s)

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._monitor is not None:
            monitor, self._monitor = self._monitor, None
            monitor.close()
        while self._sinks:
            name, sink = self._sinks.popitem()
            self._try(name, sink.close)
        if self._lines is not None:
            lines, self._lines = self._lines, None
            lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
