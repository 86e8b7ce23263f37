"""The stash's bench from the command line, as it runs on a CPU."""

import json
from pathlib import Path

import pytest
from example_runs import run_python

pytestmark = pytest.mark.slow


def test_every_variant_has_the_same_bits(tmp_path: Path) -> None:
    done = run_python("-m", "nemo_rl_offload.cli", "bench", "stash", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "stash.json").read_text())
    assert (tmp_path / "stash.png").stat().st_size > 0
    layers = {each["name"]: each for each in data["layers"]}
    assert {"dynamic", "fixed buffers", "stash", "stash on the host", "offload"} <= layers.keys()
    assert all(each["bit_identical"] for each in layers.values())
    assert 1.0 <= layers["stash"]["stash_bytes"] / layers["stash"]["live_bytes"] < 1.15
    assert all(
        min(each["copy_gb_per_s"], each["stash_gb_per_s"], each["restore_gb_per_s"]) > 0 for each in data["copies"]
    )


def test_an_option_of_the_other_bench_is_refused() -> None:
    done = run_python("-m", "nemo_rl_offload.cli", "bench", "stash", "--variant", "stash", "--microbatches", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--microbatches, --variant: for `bench offload` alone. Leave that out." in done.stderr
