"""Two runs of `runs_in_a_row.py`, in a process of their own."""

import pytest
from example_runs import run_python

pytestmark = pytest.mark.slow


@pytest.mark.sampled
def test_a_second_run_leaves_no_more_than_the_first() -> None:
    done = run_python("tests/attacks/runs_in_a_row.py", "--cases", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("runs_in_a_row: 2 runs, 0 problems\n")
