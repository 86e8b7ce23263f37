"""Limits of the process: what a run says of them before it starts anything, and what is said where one is met."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_offload.cli import command_line
from nemo_rl_offload.errors import ResourceError
from nemo_rl_offload.observability.doctor import process_limits
from nemo_rl_offload.specs.process_limits import (
    LEAST_ADDRESSES_BYTES,
    LEAST_OPEN_FILES,
    allow_open_files,
    explained,
    widen_limits,
)

FILES, ADDRESSES = resource.RLIMIT_NOFILE, resource.RLIMIT_AS
UNLIMITED = resource.RLIM_INFINITY
Limits = dict[int, tuple[int, int]]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """What a process has, to be changed by a test."""
    there: Limits = {FILES: (LEAST_OPEN_FILES, 4096), ADDRESSES: (UNLIMITED, UNLIMITED)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: there[which])
    monkeypatch.setattr(resource, "setrlimit", there.__setitem__)
    return there


@pytest.mark.parametrize(
    ("which", "before", "after"),
    [
        (FILES, (64, 4096), (LEAST_OPEN_FILES, 4096)),
        (FILES, (64, UNLIMITED), (LEAST_OPEN_FILES, UNLIMITED)),
        (FILES, (2048, 4096), (2048, 4096)),
        (ADDRESSES, (1 << 30, UNLIMITED), (LEAST_ADDRESSES_BYTES, UNLIMITED)),
    ],
)
def test_what_may_be_raised_is_raised(
    limits: Limits, which: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits[which] = before
    widen_limits()
    assert limits[which] == after
    assert {finding.status for finding in process_limits()} == {"ok"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 100_000), (65_535, 100_000)),
        ((1024, UNLIMITED), (65_535, UNLIMITED)),
        ((90_000, 100_000), (90_000, 100_000)),
        ((UNLIMITED, UNLIMITED), (UNLIMITED, UNLIMITED)),
    ],
)
def test_more_files_are_allowed_as_far_as_they_may_be(
    limits: Limits, before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits[FILES] = before
    allow_open_files(65_535)
    assert limits[FILES] == after


def test_what_may_not_is_told_at_once(limits: Limits) -> None:
    limits[FILES], limits[ADDRESSES] = (64, 1023), (4 << 30, 4 << 30)
    with pytest.raises(ResourceError) as caught:
        widen_limits()
    files, addresses = str(caught.value).splitlines()
    assert files.startswith("open files (ulimit -n): a process may have 64, and a run needs 1024 at least")
    assert "ulimit -n 1024 or more" in files
    assert addresses.startswith("address space (ulimit -v): a process may have 4.00 GiB, and a run needs 8.00 GiB")
    assert [(each.status, each.detail) for each in process_limits()] == [("error", "64"), ("error", "4.00 GiB")]


@pytest.mark.slow
def test_a_run_under_limits_ends_with_our_words_before_it_begins(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(FILES, (64, 64))
        resource.setrlimit(ADDRESSES, (4 << 30, 4 << 30))

    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_offload.cli", "run", "grpo", "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: open files (ulimit -n): a process may have 64, ")
    assert len(done.stderr.splitlines()) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_files_that_run_out(limits: Limits, code: int) -> None:
    limits[FILES] = (64, 64)
    text = explained(OSError(code, ""))
    assert str(text).startswith(
        "no more files can be opened: a process may have 64 (ulimit -n). Raise it: ulimit -n 1024"
    )


def test_memory_that_runs_out(limits: Limits) -> None:
    assert explained(MemoryError()) == (
        "the process can get no more memory. Free some memory, or take a machine with more."
    )
    limits[ADDRESSES] = (4 << 30, 4 << 30)
    assert "Its address space is limited to 4.00 GiB (ulimit -v). Raise it: ulimit -v" in str(explained(MemoryError()))


@pytest.mark.parametrize("error", [ValueError(), OSError(errno.ENOSPC, ""), OSError("x")])
def test_other_errors_are_not_a_limit(error: Exception) -> None:
    assert explained(error) is None


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "")])
@pytest.mark.parametrize("command", ["check", "plan", "doctor", "report"])
def test_every_command_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, error: Exception
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setitem(command_line._EXECUTE, command, fail)
    assert command_line.main([command, *{"doctor": [], "plan": ["it", "--gpu", "h100"]}.get(command, ["it"])]) == 2
    assert capsys.readouterr().err == f"error: {explained(error)}\n"
