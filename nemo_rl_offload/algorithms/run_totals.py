"""What a run did over all processes and workers that took part in it, whose own counters begin again with each."""

import time
from collections.abc import Mapping
from typing import Any

from nemo_rl_offload.policy.interface import PolicyInterface
from nemo_rl_offload.runs.run_files import RunTotals

_HIGHEST = {
    *("peak_host_bytes", "host_capacity_bytes", "peak_device_bytes", "peak_reserved_bytes"),
    "peak_device_bytes_by_phase",
    *("peak_bytes", "device_bytes", "host_bytes"),  # of a paged stash; the last of a worker too
}


class Elapsed:
    """Seconds of a run, those before it was taken up again included. Lives as long as the process works on the run."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._earlier_s: float | None = None

    def go_on_from(self, seconds: float) -> None:
        """Count what an earlier process took. Heeded once: a restart of workers takes time of this process."""
        if self._earlier_s is None:
            self._earlier_s = seconds

    @property
    def seconds(self) -> float:
        """Until now."""
        return (self._earlier_s or 0.0) + self.of_this_process_s

    @property
    def of_this_process_s(self) -> float:
        """The same without those before the run was taken up again."""
        return time.monotonic() - self._start_s


def run_totals(policy: PolicyInterface, before: RunTotals | None, phase_seconds: Mapping[str, float]) -> RunTotals:
    """Counters of `policy`'s workers, and seconds of this process by phase, beside what the checkpoint that the run was
    taken up from held of these."""
    now: RunTotals = {
        "offload": policy.offload_stats(),
        "paged_stash": policy.paged_stash_stats(),
        "memory": policy.memory(),
        "phase_seconds": dict(phase_seconds),
    }
    whole: RunTotals = added(before, now)
    return whole


def added(before: Any, now: Any, name: str = "") -> Any:
    """Two figures of one name, or sections of them, as one: sums, but for peaks and factors. None is not counted."""
    if before is None or now is None:
        return before if now is None else now
    if isinstance(now, Mapping):
        names = {key: name if name in _HIGHEST else key for key in [*now, *(before.keys() - now.keys())]}
        whole = {key: added(before.get(key), now.get(key), called) for key, called in names.items()}
        if before.get("overlap") is not None and now.get("overlap") is not None:
            parts = [part["overlap"] * part["copy_ms"] for part in (before, now)]
            whole["overlap"] = sum(parts) / whole["copy_ms"]
        return whole
    if isinstance(now, list):
        return [*now, *(each for each in before if each not in now)]
    if isinstance(now, str):
        return now
    return max(before, now) if name in _HIGHEST or name.endswith("_factor") else before + now
