"""A step under torch's profiler, as a trace that Perfetto opens: `logger.profile`.

Each rank's profiler knows its operators and kernels, and not what they are done for. The driver knows when the phases
of the step began and ended (`Stopwatch`). So a rank writes its trace with the phases as a track of their own, above its
threads. Both count from 1970: the profiler by `baseTimeNanoseconds` in its file, the driver by its clock at the end of
the step. On another node the two clocks may differ, by what its time service leaves.

The phases are put into the file as text, for a trace of hundreds of megabytes is not to be read again as JSON.
"""

import gzip
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

from nemo_rl_offload.runs.output import writing_in_run
from nemo_rl_offload.runs.plain_files import make_folder, written_anew

PHASES_TRACK = -1
"""Process number of the phases, which no process has; Perfetto sorts by it."""
_BASE = re.compile(rb'"baseTimeNanoseconds": (\d+)')
_EVENTS = b'"traceEvents": ['


class Span(NamedTuple):
    """When a phase was, in nanoseconds since 1970."""

    name: str
    begin_ns: int
    end_ns: int


def since_1970(spans: Sequence[tuple[str, float, float]]) -> list[Span]:
    """Spans by `time.perf_counter` of this process as those of the clock, as it is now."""
    offset_ns = time.time_ns() - time.perf_counter_ns()
    return [Span(name, offset_ns + int(begin_s * 1e9), offset_ns + int(end_s * 1e9)) for name, begin_s, end_s in spans]


class StepProfile:
    """Records this process from its construction on, all threads and its GPU."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = torch.profiler.profile(
            activities=activities,
            acc_events=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()

    def finish(self, path: Path, spans: Sequence[Span]) -> None:
        """Stop, and write the trace with these phases, compressed. Raises ResourceError: it cannot be written."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.stop()
        with TemporaryDirectory() as folder, writing_in_run(path):
            own = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(own))
            trace = with_phases(own.read_bytes(), spans)
            make_folder(path.parent)
            with written_anew(path) as file, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3) as packed:
                packed.write(trace)


def with_phases(trace: bytes, spans: Sequence[Span]) -> bytes:
    """A Chrome trace with a track of phases; times there are microseconds since its base."""
    base_ns = int(found[1]) if (found := _BASE.search(trace)) else 0
    events = [
        {"ph": "M", "name": "process_name", "pid": PHASES_TRACK, "tid": 0, "args": {"name": "phases of the step"}},
        {"ph": "M", "name": "process_sort_index", "pid": PHASES_TRACK, "tid": 0, "args": {"sort_index": -1}},
        *(
            {
                "ph": "X",
                "cat": "phase",
                "name": span.name,
                "pid": PHASES_TRACK,
                "tid": 0,
                "ts": (span.begin_ns - base_ns) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
            }
            for span in spans
        ),
    ]
    before, mark, after = trace.partition(_EVENTS)
    assert mark, "what torch's profiler writes"
    comma = b"" if after.lstrip().startswith(b"]") else b","
    return before + mark + json.dumps(events)[1:-1].encode() + comma + after
