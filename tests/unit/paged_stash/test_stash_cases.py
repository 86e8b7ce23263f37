"""The kernels against the page bookkeeping: a few random cases, more among the slow tests, and planted faults."""

import importlib.util
import sys
from pathlib import Path

import pytest
import stash_cases
from stash_cases import run_cases

from nemo_rl_offload.paged_stash import kernels

FAULTS = {
    "the head stays": ("tl.store(state, head_device + on_device)", "tl.store(state, head_device)"),
    "the tail stays": ("tl.store(state + 2, tail_device + on_device)", "tl.store(state + 2, tail_device)"),
    "the last program comes too early": ("== num_programs - 1", "== 0"),
    "a page too few": ("wanted = (rows + page_size - 1) // page_size", "wanted = rows // page_size"),
    "pages return in another order": (
        "tl.store(ring + (tail_device + index)",
        "tl.store(ring + (tail_device + on_device - 1 - index)",
    ),
    "a full pool counts as too full": ("fits = on_host <= tail_host", "fits = on_host < tail_host"),
    "overflow takes what there is": ("on_device = tl.where(fits, on_device, 0)", "on_device += 0"),
    "a row is forgotten": (
        "tl.store(target + index * page_words + offsets, words, mask=offsets < live)",
        "tl.store(target + index * page_words + offsets, words, mask=offsets < live - row_words)",
    ),
}


def test_kernels_do_what_the_reference_does() -> None:
    wrong, seen = run_cases(range(25))
    assert not wrong
    assert min(seen[name] for name in ("overflow", "spill", "all rows live", "full", "1F1B", "interleaved")) > 0


@pytest.mark.sampled
@pytest.mark.slow
def test_five_hundred_random_cases() -> None:
    wrong, seen = run_cases(range(500))
    assert not wrong
    assert seen["far away"] > 0


@pytest.fixture(params=FAULTS)
def faulty_kernels(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    right, fault = FAULTS[request.param]
    source = Path(kernels.__file__).read_text(encoding="utf-8")
    assert right in source
    file = tmp_path / "faulty_kernels.py"
    file.write_text(source.replace(right, fault), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faulty_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faulty_kernels", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(stash_cases, "Pool", module.Pool)
    return str(request.param)


@pytest.mark.slow
def test_cases_find_planted_faults(faulty_kernels: str) -> None:
    for seed in range(200):
        if run_cases([seed])[0]:
            return
    pytest.fail(f"not found: {faulty_kernels}")
