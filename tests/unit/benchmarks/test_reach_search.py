"""E4's search for the largest that fits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reach
from search import RESOLUTION, longest, next_candidates

LIMIT_BYTES = 139 << 30


def find(peak_of: Callable[[int], float], start: int, step: int) -> tuple[dict[int, int | None], int]:
    """Search on a device of which only `peak_of` is known; what was tried, and in how many processes."""
    known: dict[int, int | None] = {}
    for number in range(30):
        sizes = next_candidates(known, LIMIT_BYTES, start, step)
        if not sizes:
            return known, number
        for size in sizes:
            assert size not in known
            assert size % step == 0
            known[size] = int(peak_of(size)) if peak_of(size) <= LIMIT_BYTES else None
            if known[size] is None:
                break
    raise AssertionError("no end")


@pytest.mark.parametrize("bytes_per_token", [100_000, 300_000, 510_000])
@pytest.mark.parametrize(("curve", "most_processes"), [(0.9, 7), (0.98, 4), (1.0, 4), (1.02, 4), (1.1, 10)])
def test_the_longest_sequence_is_found_in_few_processes(
    bytes_per_token: int, curve: float, most_processes: int
) -> None:
    def peak_of(sequence: int) -> float:
        return 1.1e11 + bytes_per_token * 50_000 * (sequence / 50_000) ** curve

    known, num_processes = find(peak_of, 8192, 1024)
    found = longest(known)
    assert found is not None
    refused = min(size for size, peak in known.items() if peak is None)
    assert peak_of(found) <= LIMIT_BYTES < peak_of(refused)
    assert refused - found <= max(1024, (RESOLUTION - 1) * found + 1024)
    assert num_processes <= most_processes


def test_what_is_reserved_short_of_the_limit_does_not_mislead() -> None:
    known, _ = find(lambda layers: 5e9 + 4.3e9 * layers + (1e12 if layers > 20 else 0), 8, 1)
    assert longest(known) == 20


def test_a_start_that_does_not_fit_is_halved() -> None:
    assert longest(find(lambda tokens: 1.4e11 + 4e6 * tokens, 8192, 1024)[0]) == 2048


def test_nothing_may_fit() -> None:
    assert longest(find(lambda tokens: 1e13, 4096, 1024)[0]) is None


def test_an_attempt_that_dies_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that dies, what it printed counts; a second death in a row ends the search."""
    fits = {"peak_allocated_bytes": 0}
    attempts = [
        ([{"size": 64, **fits}], "exit code -6: killed"),
        ([{"size": 96, **fits}], None),
        ([{"size": 128, "out_of_memory": "no room"}], None),
    ]
    monkeypatch.setattr(reach, "in_process", lambda _task: attempts.pop(0))
    entry: dict[str, Any] = {"tried": {}}
    about = {"variant": "nothing", "searched": "sequence", "impl": "torch"}
    reach.search(about, entry, LIMIT_BYTES, "a commit", lambda: None)
    assert (entry["largest"], entry["error"], attempts) == (96, None, [])
    attempts += [([], "exit code -6: killed")] * 3
    entry = {"tried": {}}
    reach.search(about, entry, LIMIT_BYTES, "a commit", lambda: None)
    assert (entry, len(attempts)) == ({"tried": {}, "error": "exit code -6: killed"}, 1)


def test_a_process_that_ends_otherwise_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "__file__", str(Path(__file__).with_name("missing.py")))
    samples, ended = reach.in_process({})
    assert samples == []
    assert ended is not None
    assert ended.startswith("exit code 2: ")
    assert ended.endswith("No such file or directory")
