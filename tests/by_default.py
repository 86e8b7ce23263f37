"""Long tables, of which a plain run takes the first cases, and `.ci/run` a share of the others."""

from collections.abc import Sequence
from typing import Any

import pytest

SAMPLED = (pytest.mark.slow, pytest.mark.sampled)


def first(number: int, cases: Sequence[Any]) -> list[Any]:
    """The cases, of which those after the first `number` are slow and drawn by share."""
    tail = [case if isinstance(case, tuple) else (case,) for case in cases[number:]]
    return [*cases[:number], *(pytest.param(*case, marks=SAMPLED) for case in tail)]
