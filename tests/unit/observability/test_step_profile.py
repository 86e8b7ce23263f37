"""A step's trace: what Chrome's format asks for, with the phases of the step at their place in time."""

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_offload.errors import ResourceError
from nemo_rl_offload.observability.step_profile import Span, StepProfile, since_1970, with_phases


def of_phases(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "phase"]


def test_phases_stand_where_their_operators_are(tmp_path: Path) -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    profile, spans = StepProfile(), list[tuple[str, float, float]]()
    for name, work in (("logprobs", torch.exp), ("train", lambda x: (x @ x).sum().backward())):
        begin_s = time.perf_counter()
        thread = threading.Thread(target=work, args=(weight,))  # as a worker's calls may come
        thread.start()
        thread.join()
        spans.append((name, begin_s, time.perf_counter()))
    path = tmp_path / "profile" / "step_2_rank_0.json.gz"
    profile.finish(path, since_1970(spans))
    trace = json.loads(gzip.decompress(path.read_bytes()))
    phases = {event["name"]: event for event in of_phases(trace)}
    assert list(phases) == ["logprobs", "train"]
    for operator, name in (("aten::exp", "logprobs"), ("aten::mm", "train")):
        begins = [event["ts"] for event in trace["traceEvents"] if event.get("name") == operator]
        assert begins, operator
        phase = phases[name]
        assert all(phase["ts"] - 2000 <= each <= phase["ts"] + phase["dur"] + 2000 for each in begins)
    (named,) = [event for event in trace["traceEvents"] if event.get("name") == "process_name" and event["pid"] == -1]
    assert named["args"]["name"] == "phases of the step"


@pytest.mark.parametrize(
    ("trace", "begin_us"),
    [
        (b'{"baseTimeNanoseconds": 1000000, "traceEvents": [{"ph": "X"}]}', 2000.5),
        (b'{"baseTimeNanoseconds": 1000000, "traceEvents": [\n]}', 2000.5),
        (b'{"traceEvents": []}', 3000.5),
    ],
)
def test_times_are_since_the_traces_base(trace: bytes, begin_us: float) -> None:
    found = json.loads(with_phases(trace, [Span("train", 3_000_500, 3_001_500)]))
    (phase,) = of_phases(found)
    assert (phase["ts"], phase["dur"]) == (begin_us, 1.0)
    assert len(found["traceEvents"]) == 3 + trace.count(b"ph")


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    with pytest.raises(ResourceError, match=r"Cannot write .*step_1_rank_0"):
        StepProfile().finish(tmp_path / "profile" / "step_1_rank_0.json.gz", [])
