"""Runs in a row in one process and one folder: nothing that a run takes is still held after it.

`python tests/attacks/runs_in_a_row.py --cases 20` runs tiny SFT that often, each run in a directory of its own, and
counts after each: open files, threads, child processes, memory of this process, entries of the temporary folder and of
/dev/shm. The first run loads libraries and fills caches; after it nothing may grow, but for a little memory, and for
what Ray leaves: `ray.init`, an actor and `ray.shutdown` by themselves leave up to three sockets and a thread of Ray's
C++ each time.
"""

import argparse
import contextlib
import gc
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from patience import PATIENCE_S

from nemo_rl_offload.cli.command_line import main as command

SMALL = (
    "sft.max_num_steps=2",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=1",
    "sft.val_period=0",
    "sft.val_at_start=false",
    "sft.max_val_samples=8",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=1",
    "checkpointing.is_async=true",
)
NUM_FIRST = 1
"""Runs after which nothing grows."""
MEMORY_BYTES, MEMORY_PER_RUN_BYTES = 12 << 20, 4 << 20
LEFT_BY_RAY = {"sockets": 3, "threads of libraries": 2}
"""After each run."""
SHARED_MEMORY = Path("/dev/shm")


def held(temporary: Path) -> dict[str, int]:
    """What this process has, by name."""
    files = [_file_of(descriptor) for descriptor in os.listdir("/proc/self/fd")]
    num_sockets = sum(file.startswith("socket:") for file in files)
    return {
        "open files": len(files) - num_sockets,
        "sockets": num_sockets,
        "threads": threading.active_count(),
        "threads of libraries": len(os.listdir("/proc/self/task")) - threading.active_count(),
        "child processes": len(psutil.Process().children(recursive=True)),
        "temporary entries": sum(name != "ray" for name in os.listdir(temporary)),  # Ray keeps its sessions there
    }


def _file_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the listing's own
        return ""


def settled(temporary: Path, limits: Mapping[str, int]) -> dict[str, int]:
    """What this process has, once that is no more than `limits`, or after a while."""
    end_s = time.monotonic() + PATIENCE_S
    while any((found := held(temporary))[name] > limit for name, limit in limits.items()):
        if time.monotonic() > end_s:
            break
        time.sleep(0.2)
    return found


def left_in_shared_memory(before: set[str]) -> set[str]:
    """What came and stays, though no other process of the machine has it."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        of_others = _inodes_of_others()
        left = {
            entry.name
            for entry in os.scandir(SHARED_MEMORY)
            if entry.name not in before and entry.inode() not in of_others
        }
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.2)


def _inodes_of_others() -> set[int]:
    """Of what other processes have mapped there; a semaphore was mapped by another name."""
    found = set[int]()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            lines = [] if pid == os.getpid() else Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if f"{SHARED_MEMORY}/" in line}
    return found


def run_in_a_row(results: Path, temporary: Path, num_runs: int) -> list[str]:
    """Returns what went wrong."""
    shared_before = set(os.listdir(SHARED_MEMORY))
    limits = {"child processes": 0}
    wrong: list[str] = []
    memory_bytes: list[int] = []
    for number in range(num_runs):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = command(["run", "sft", *SMALL, "--run-dir", str(results / str(number))])
        if code:
            return [f"run {number} ended with {code}: {output.getvalue()[-3000:]}"]
        gc.collect()
        found = settled(temporary, limits)
        memory_bytes.append(psutil.Process().memory_info().rss)
        print(f"run {number}: {found}, {memory_bytes[-1] >> 20} MiB", flush=True)
        wrong += [
            f"run {number}: {found[name]} {name}, allowed are {limit}"
            for name, limit in limits.items()
            if found[name] > limit
        ]
        if number == NUM_FIRST - 1:
            limits = found | limits
        limits = {name: limit + LEFT_BY_RAY.get(name, 0) for name, limit in limits.items()}
    grown_bytes = memory_bytes[-1] - memory_bytes[min(NUM_FIRST, num_runs) - 1]
    if grown_bytes > MEMORY_BYTES + MEMORY_PER_RUN_BYTES * (num_runs - NUM_FIRST):
        wrong.append(f"memory grew by {grown_bytes >> 20} MiB in {num_runs - NUM_FIRST} runs")
    if left := left_in_shared_memory(shared_before):
        wrong.append(f"{SHARED_MEMORY} has {sorted(left)} more")
    if len(os.listdir(results)) != num_runs:
        wrong.append(f"beside the runs there is {sorted(os.listdir(results))}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20, help=f"more than {NUM_FIRST}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(prefix="row") as temporary:
        os.environ["TMPDIR"] = temporary
        tempfile.tempdir = None
        wrong = run_in_a_row(Path(folder), Path(temporary), options.cases)
    print("\n".join([*wrong, f"runs_in_a_row: {options.cases} runs, {len(wrong)} problems"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
