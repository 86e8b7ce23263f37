"""A trace as a picture: phases, threads that ran, and how operators lie inside of one another."""

import gzip
import json
from pathlib import Path

from trace_picture import PHASES, Slice, draw, tracks

from nemo_rl_offload.observability.step_profile import Span, with_phases


def test_tracks_of_a_trace(tmp_path: Path) -> None:
    names = {"forward": (100, 400), "aten::mm": (150, 100), "aten::add": (300, 100), "MmBackward": (600, 200)}
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 7, "ts": begin, "dur": length}
        for name, (begin, length) in names.items()
    ]
    idle = {"ph": "X", "cat": "cpu_op", "name": "aten::sum", "pid": 1, "tid": 8, "ts": 1, "dur": 1}
    events += [event | {"ts": event["ts"] + 1000 * number} for number in range(1, 40) for event in events[:4]]
    content = json.dumps({"baseTimeNanoseconds": 0, "traceEvents": [idle, *events]}).encode()
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(with_phases(content, [Span("train", 50_000, 40_000_000)])))
    found = tracks(path)
    assert list(found) == [PHASES, "thread 1"]
    assert found[PHASES] == [Slice("train", 0.0, 39.95, 0)]
    expected = [("forward", 0.05, 0), ("aten::mm", 0.1, 1), ("aten::add", 0.25, 1), ("MmBackward", 0.55, 0)]
    assert [(each.name, round(each.begin_ms, 6), each.depth) for each in found["thread 1"][:4]] == expected
    draw(found, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
