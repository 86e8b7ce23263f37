"""The sandbox's table of calls, and what is said of kernels that have none. What it stops: `test_code_attacks.py`.

A kernel without Landlock is one in which a filter of seccomp's answers for it, with the errors that are documented.
"""

import errno
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.specs import sandbox

HEADERS = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))
WITHOUT_LANDLOCK = """
import ctypes, os, struct, sys
sys.path.insert(0, {root!r})
from nemo_rl_offload.specs import sandbox as box
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | {error}), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and box.missing() is None
assert libc.prctl(22, 2, struct.pack("H6xP", len(lines), ctypes.addressof(code)), 0, 0) == 0
{then}
"""
no_sandbox = pytest.mark.skipif(sandbox.missing() is not None, reason=f"nothing to take away: {sandbox.missing()}")


def without_landlock(error: int, then: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT_LANDLOCK.format(root=str(PROJECT_ROOT), error=error, then=then)
    env = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


@no_sandbox
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errno.ENOSYS, f"the kernel ({platform.release()}) has no Landlock, which came with Linux 5.13"),
        (errno.EOPNOTSUPP, "the kernel has Landlock, and was started without it (lsm=landlock,...)"),
        (errno.EPERM, "Landlock is refused: Operation not permitted"),
    ],
)
def test_why_a_kernel_has_no_sandbox(error: int, words: str) -> None:
    done = without_landlock(error, "print(box.missing(), end='')")
    assert (done.stdout, done.stderr) == (words, "")


@no_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("command", ["run grpo --run-dir {folder}/run --config", "check"])
def test_a_run_is_refused_before_ray(command: str, tmp_path: Path) -> None:
    exemplar = PROJECT_ROOT / "examples/configs/grpo_code_1B.yaml"
    words = [*command.format(folder=tmp_path).split(), str(exemplar), "policy.model_name=examples/models/tiny_speller"]
    words += ["cluster.gpus_per_node=1"]
    words = [sys.executable, "-m", "nemo_rl_offload.cli", *words]
    then = f"os.chdir({str(PROJECT_ROOT)!r}); os.execv(sys.executable, {words})"
    done = without_landlock(errno.ENOSYS, then)
    assert "env.code_tests.sandbox: what a model writes would run with your rights here: the kernel" in (
        done.stderr + done.stdout
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if command.startswith("run") else 0), "a check says what only a run needs"
    assert not (tmp_path / "run").exists()


def test_other_machines_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("darwin", "arm64"), ("linux", "riscv64")):
        monkeypatch.setattr(sandbox.sys, "platform", name)
        monkeypatch.setattr(sandbox.platform, "machine", lambda value=value: value)
        assert f"this is {name} on {value}" in str(sandbox.missing())


@pytest.mark.parametrize("column", [0, 1])
def test_the_filter_is_whole(column: int) -> None:
    lines = list(sandbox._filter(column, 1))
    assert len(lines) < 4096, "the kernel takes no more"
    for place, (code, yes, no, _) in enumerate(lines):
        assert code != sandbox._EQUAL or place + 1 + max(yes, no) < len(lines)
    assert lines[-1] == (sandbox._RETURN, 0, 0, sandbox._ERROR | errno.EPERM)


@pytest.mark.skipif(not all(map(Path.exists, HEADERS)), reason="the kernel's headers are not here")
@pytest.mark.parametrize("column", [0, 1])
def test_calls_have_the_kernels_numbers(column: int) -> None:
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text())
    numbers = {name: int(number) for name, number in defined}
    numbers |= {"newfstatat": numbers.get("newfstatat", numbers.get("fstatat", -1))}
    calls = [call.split() for call in sandbox._CALLS.split(",")]
    calls += [
        [name.strip("_").lower(), *(str(number) for number in getattr(sandbox, name))]
        for name in ("_OPENAT", "_FCNTL", "_CLONE", "_CLONE3", "_KILL", "_TGKILL", "_PRLIMIT64")
    ]
    told = {call[0]: int(call[1 + column]) for call in calls if call[1 + column] != "-"}
    assert told == {name: numbers[name] for name in told}
    left_out = {call[0] for call in calls} - told.keys()
    assert not left_out & numbers.keys()
