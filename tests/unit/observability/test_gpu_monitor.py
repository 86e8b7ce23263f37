"""Metrics of GPUs: this machine has none, so NVML's answers are made up where one is needed."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from patience import eventually
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.observability import gpu_monitor
from nemo_rl_offload.observability.logger import MetricLogger
from nemo_rl_offload.runs.output import writing_in_run

GIB = 1 << 30
CONFIG = PROJECT_ROOT / "examples/configs/sft_tiny.yaml"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs of which the second has no utilization; and the calls that are no questions."""
    calls: list[str] = []

    def utilization(handle: int) -> SimpleNamespace:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=73)

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: calls.append("init"),
        "nvmlShutdown": lambda: calls.append("shutdown"),
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": utilization,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=(handle + 1) * 3 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(gpu_monitor.pynvml, name, answer)
    return calls


def logger(run_dir: Path, **monitoring: float) -> MetricLogger:
    section: Any = load_config(CONFIG, ["logger.monitor_gpus=true"])["logger"]
    return MetricLogger(run_dir, section | {"gpu_monitoring": section["gpu_monitoring"] | monitoring}, {})


def test_samples_before_the_first_step_of_a_resumed_run_are_of_the_last_one(gpus: list[str], tmp_path: Path) -> None:
    section: Any = load_config(CONFIG, ["logger.monitor_gpus=true"])["logger"]
    MetricLogger(tmp_path, section, {}, 100).close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {record["step"] for record in records} == {100}
    assert gpus[-1] == "shutdown"


def test_samples_have_the_names_of_nemo_rl_and_are_handed_on_at_the_end(gpus: list[str]) -> None:
    found: list[gpu_monitor.Metrics] = []
    gpu_monitor.GpuMonitor(100.0, 100.0, found.append).close()
    assert len(found) >= 1
    node = {key: found[0].pop(key) for key in ("node.0.mem_gb", "node.0.mem_total_gb")}
    assert 0 < node["node.0.mem_gb"] < node["node.0.mem_total_gb"]
    assert found[0] == {"node.0.gpu.0.util": 73, "node.0.gpu.0.mem_gb": 3, "node.0.gpu.1.mem_gb": 6, "ray_step": 0}
    assert gpus == ["init", "shutdown"]


def test_they_are_metrics_of_the_last_step_and_of_a_second(gpus: list[str], tmp_path: Path) -> None:
    with logger(tmp_path, collection_interval=0.01, flush_interval=0.01) as open_logger:
        for step in range(1, 200):
            open_logger.log({"loss": 1.0}, step, "train")
        assert eventually(lambda: (tmp_path / "metrics.jsonl").read_text().count('"prefix": "ray"') >= 3)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    sampled = [record for record in records if record["prefix"] == "ray"]
    assert {record["metrics"]["node.0.gpu.0.util"] for record in sampled} == {73}
    assert sampled[-1]["step"] == 199
    assert [record["step"] for record in records if record["prefix"] == "train"] == [*range(1, 200)]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "gpus")).Reload().Scalars("ray/node.0.gpu.1.mem_gb")
    assert [event.step for event in events] == [record["metrics"]["ray_step"] for record in sampled]
    assert open_logger.notices() == []


def test_without_a_driver_one_line_says_that_it_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(gpu_monitor.pynvml, "nvmlInit", no_driver)
    with logger(tmp_path) as open_logger:
        open_logger.log({"loss": 1.0}, 1, "train")
    assert open_logger.notices() == [
        "logger.monitor_gpus: has no effect on this machine: NVML Shared Library Not Found."
    ]
    (record,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(record)["prefix"] == "train"


def test_a_driver_without_gpus_is_none(tmp_path: Path, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor.pynvml, "nvmlDeviceGetCount", lambda: 0)
    with logger(tmp_path) as open_logger:
        assert len(open_logger.notices()) == 1
    assert gpus == ["init", "shutdown"]


def test_a_full_disk_is_met_by_the_steps_and_not_by_the_monitor(
    tmp_path: Path, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_logger = logger(tmp_path, collection_interval=0.01, flush_interval=0.01)
    assert open_logger._lines is not None
    met: list[str] = []

    def full(metrics: object, step: int, prefix: str, wall_time_s: float) -> None:
        met.append(prefix)
        with writing_in_run(tmp_path / "metrics.jsonl"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(open_logger._lines, "write", full)
    assert eventually(lambda: len(met) >= 2)
    open_logger.close()
    assert set(met) == {"ray"}
