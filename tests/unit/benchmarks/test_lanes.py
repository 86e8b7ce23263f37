"""A profile's lanes, from the events of a trace."""

from pathlib import Path
from typing import Any

import pytest
from lanes import figures, joined, lanes, overlap_ms


def event(category: str, name: str, start_us: float, duration_us: float, **other: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us, **other}


TRACE = [
    event("cpu_op", "aten::mm", 1000, 500),
    event("cuda_runtime", "cudaLaunchKernel", 1400, 200),
    event("user_annotation", "ProfilerStep#1", 0, 90_000),
    event("kernel", "gemm", 2000, 3000),
    event("gpu_memset", "Memset (Device)", 5000, 1000),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4000, 4000),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 9000, 1000),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 8000, 500),
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 10},
]


def test_events_go_to_their_lanes_in_ms_since_the_first() -> None:
    found = lanes(TRACE)
    assert found == {
        "host": [pytest.approx((0.0, 0.6))],
        "compute": [pytest.approx((1.0, 5.0)), pytest.approx((7.0, 7.5))],
        "copy out": [pytest.approx((3.0, 7.0))],
        "copy in": [pytest.approx((8.0, 9.0))],
    }


def test_figures_say_what_went_on_beside_compute() -> None:
    found = figures(lanes(TRACE))
    assert found["span_ms"] == pytest.approx(9.0)
    assert (found["compute_ms"], found["copy_out_ms"]) == (pytest.approx(4.5), pytest.approx(4.0))
    assert found["copy_out_beside_compute_ms"] == pytest.approx(2.0)
    assert found["copy_in_beside_compute_ms"] == 0


def test_overlaps_count_once_and_in_any_pattern() -> None:
    assert joined([(5, 6), (0, 2), (1, 3), (3.004, 4)]) == [(0, 4), (5, 6)]
    assert joined([(0, 9), (1, 2)]) == [(0, 9)]
    assert overlap_ms([(0, 10)], [(1, 2), (3, 5), (9, 12)]) == pytest.approx(4)
    assert overlap_ms([(1, 2), (3, 5), (9, 12)], [(0, 10)]) == pytest.approx(4)


def test_an_empty_trace_has_no_span(tmp_path: Path) -> None:
    assert figures(lanes([]))["span_ms"] == 0
