"""The property tests draw the same examples at every run; `HYPOTHESIS_PROFILE=default pytest` draws new ones."""

import hashlib
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest
from hypothesis import settings

os.environ.pop("COLUMNS", None)  # which tables and prose follow
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets a worker wait for whatever else the machine does
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job; what is started inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if find_spec("transformer_engine"):  # before a test imports Megatron
    import torch

    from nemo_rl_offload.megatron.runtime.cpu import hide_transformer_engine

    if not torch.cuda.is_available():
        hide_transformer_engine()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=float, default=1.0, metavar="SHARE", help="run this share of each `sampled` test")
    parser.addoption("--slow", type=float, default=1.0, metavar="SHARE", help="and of other slow tests")
    parser.addoption("--cases-seed", default="", metavar="TEXT", help="what the shares are drawn by")
    parser.addoption("--within", type=float, metavar="MINUTES", help="skip what would begin later; files in any order")


BEGIN_S = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--within")
    if minutes is not None and time.monotonic() - BEGIN_S > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes are over")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `sampled(N)` tests N plain cases, spread over their table; the others are slow. Draw the share of the slow.

    Cases are drawn by what stands in their brackets, so that tests of one table share cases, and what these set up.
    Other slow tests are drawn by file, the `sampled` ones of all files together. At least one of each is drawn.
    """
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) and mark.args and not item.get_closest_marker("slow"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for table in tables.values():
        (number,) = table[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        plain = {index * len(table) // number for index in range(number)}
        for index, item in enumerate(table):
            if index not in plain:
                item.add_marker(pytest.mark.slow)

    seed = config.getoption("--cases-seed")
    cases: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    others: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        test, bracket, case = item.nodeid.partition("[")
        if not item.get_closest_marker("slow"):
            continue
        is_sampled = item.get_closest_marker("sampled") is not None
        if is_sampled and bracket:
            cases[test][case] = item
        else:
            others["" if is_sampled else test.partition("::")[0]][item.nodeid] = item
    left_out = {
        *_not_drawn(cases, config.getoption("--cases"), seed),
        *_not_drawn(others, config.getoption("--slow"), seed),
    }
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if config.getoption("--within") is not None:  # or the last files would be left out each time
        items.sort(key=lambda item: _by_seed(seed, item.nodeid.partition("::")[0]))


def _not_drawn(tables: dict[str, dict[str, pytest.Item]], share: float, seed: str) -> Iterator[pytest.Item]:
    for table in tables.values():
        drawn = sorted(table, key=lambda name: _by_seed(seed, name))
        yield from (table[name] for name in drawn[math.ceil(share * len(drawn)) :])


def _by_seed(seed: str, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """What a failed test has started ends with it: a run that goes on would slow down all tests that follow."""
    report = yield
    if call.when == "call" and report.failed:
        for process in psutil.process_iter():
            try:
                if process.environ().get("PYTEST_CURRENT_TEST") == f"{item.nodeid} (call)":
                    process.kill()
            except psutil.Error:
                continue
    return report
