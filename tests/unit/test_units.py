"""Sizes as people read them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.units import GIB, gib, human_bytes

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**59))
def test_human_bytes_is_close_and_short(num_bytes: int) -> None:
    text = human_bytes(num_bytes)
    value, unit = text.split()
    assert abs(float(value) * UNITS[unit] - num_bytes) <= 0.0051 * num_bytes
    assert len(value) <= 4


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (999.6 * 2**20, "0.98 GiB"),
    ],
)
def test_human_bytes_examples(num_bytes: float | None, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_gib_stays_in_its_unit_where_that_says_something() -> None:
    assert gib(0.26 * GIB) == "0.3 GiB"
    assert gib(2048 * GIB, decimals=2) == "2048.00 GiB"
    assert gib(0.02 * GIB) == "20.5 MiB"
