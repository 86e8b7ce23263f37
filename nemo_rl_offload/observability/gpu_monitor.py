"""Utilization and memory of this machine's GPUs while a run is at work: `logger.monitor_gpus`.

A thread asks NVML every few seconds, and hands on what it has every few more. NeMo-RL reads the same from Ray's
endpoints for Prometheus, on every machine; a Ray that a run starts for itself has none, so that the driver's machine
alone is read here. The metrics have NeMo-RL's names, `node.0.gpu.1.util` (percent) and `node.0.gpu.1.mem_gb` (GiB).
"""

import time
from collections.abc import Callable
from threading import Event, Thread

import psutil
import pynvml

Metrics = dict[str, float]
PREFIX, SECONDS = "ray", "ray_step"
"""NeMo-RL's names: what the metrics belong to, and the metric with the seconds since the beginning."""
_GIB = 1 << 30


class GpuMonitor:
    """Samples until `close`; `take` gets each sample, from another thread, and has to see to its own errors.

    Raises pynvml.NVMLError where there is no NVIDIA driver, or no GPU that it lists.
    """

    def __init__(self, interval_s: float, flush_interval_s: float, take: Callable[[Metrics], None]) -> None:
        pynvml.nvmlInit()
        self._num_gpus = pynvml.nvmlDeviceGetCount()
        if not self._num_gpus:
            pynvml.nvmlShutdown()
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        self._interval_s, self._flush_interval_s, self._take = interval_s, flush_interval_s, take
        self._ends = Event()
        self._thread = Thread(target=self._run, name="GPU monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start_s = flushed_s = time.monotonic()
        waiting: list[Metrics] = []
        is_over = False
        while not is_over:
            now_s = time.monotonic()
            waiting.append({**self._sample(), SECONDS: float(int(now_s - start_s))})
            is_over = self._ends.wait(self._interval_s)
            if is_over or time.monotonic() - flushed_s >= self._flush_interval_s:
                for metrics in waiting:
                    self._take(metrics)
                waiting, flushed_s = [], time.monotonic()

    def _sample(self) -> Metrics:
        memory = psutil.virtual_memory()
        found: Metrics = {"node.0.mem_gb": memory.used / _GIB, "node.0.mem_total_gb": memory.total / _GIB}
        for index in range(self._num_gpus):
            asked: dict[str, Callable[[object], float]] = {
                "util": lambda handle: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                "mem_gb": lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB,
            }
            for name, ask in asked.items():
                try:
                    found[f"node.0.gpu.{index}.{name}"] = ask(pynvml.nvmlDeviceGetHandleByIndex(index))
                except pynvml.NVMLError:  # one fell off the bus, or is divided and has no utilization
                    continue
        return found

    def close(self) -> None:
        """End the thread, which hands on what it has."""
        self._ends.set()
        self._thread.join()
        pynvml.nvmlShutdown()
