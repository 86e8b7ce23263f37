"""The test suite on this host's GPUs: every file in three modes of CUDA's allocator at once, and the engine's tests
under compute-sanitizer's memcheck.

    uv run --group test python tests/on_device.py --out DIR

Files run beside each other, the longest first, each on one of the GPUs. DIR gets `suite.json`, with what passed, failed
and was skipped by mode and file, and the output of what failed. Both are written after every file, so that a time limit
loses nothing; what runs when it is over is stopped and counted as cut.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

import torch

MODES = {
    "default": {},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "no caching": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}
NUM_PROCESSES = {"test_offloading.py": 6, "test_transformer_engine.py": 4, "test_huggingface.py": 4}
"""Of files that take minutes there, the longest first."""
NUM_BESIDE = 12
"""Files at a time on one GPU; their own memory is small."""
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--tb=short")
# With backtraces, memcheck keeps frames of Python alive, and all that they hold. The test left out gives the driver
# handles that are none.
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--show-backtrace", "no", "--error-exitcode", "9")
MEMCHECK_TESTS = ("-m", "cuda", "-k", "not driver_names_what_it_refuses", "tests/unit/offload")


@dataclass
class Job:
    """A file in a mode, and how it went."""

    mode: str
    target: str
    is_memcheck: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    ended: str = ""
    """ok, failed or cut."""
    seconds: float = 0.0

    def command(self, report: Path) -> list[str]:
        pytest = [sys.executable, *PYTEST, f"--junitxml={report}"]
        if self.is_memcheck:
            return [*MEMCHECK, *pytest, "-n", "0", *MEMCHECK_TESTS]
        num_processes = NUM_PROCESSES.get(Path(self.target).name, 0)
        return [*pytest, "-n", str(num_processes), "--dist", "load", self.target]

    def environment(self, gpu: int) -> dict[str, str]:
        found = {**os.environ, **MODES[self.mode], "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "2"}
        if "huggingface" in self.target:  # else torch's cuDNN loads parts of another one, where the host has that too
            own = Path(torch.__file__).parent.parent / "nvidia" / "cudnn" / "lib"
            found["LD_LIBRARY_PATH"] = f"{own}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        return found


def jobs(only: list[str]) -> list[Job]:
    """All of them, in the order in which they begin."""
    files = sorted(Path("tests").rglob("test_*.py"), key=lambda path: ("functional" not in path.parts, path))
    longest = list(NUM_PROCESSES)
    files.sort(key=lambda path: longest.index(path.name) if path.name in longest else len(longest))
    has_memcheck = shutil.which(MEMCHECK[0]) is not None
    found = [Job("no caching", "memcheck of the engine", is_memcheck=True)] if has_memcheck else []
    found += [Job(mode, str(path)) for path in files for mode in reversed(MODES)]
    return [job for job in found if not only or any(part in job.target for part in only)]


def run(job: Job, gpu: int, out: Path, left_s: float, processes: list[subprocess.Popen[bytes]]) -> None:
    """Fill in how it went; its process joins `processes`."""
    name = f"{job.mode} {job.target}".replace("/", "_").replace(" ", "_")
    log, report = out / f"{name}.log", out / f"{name}.xml"
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            job.command(report), stdout=output, stderr=output, env=job.environment(gpu), start_new_session=True
        )
        processes.append(process)
        try:
            job.ended = "ok" if process.wait(max(left_s, 0)) in (0, 5) else "failed"  # 5: none of its tests is chosen
        except subprocess.TimeoutExpired:
            kill(process)
            job.ended = "cut"
    job.seconds = round(time.monotonic() - start, 1)
    if report.exists():
        cases = ET.parse(report).iter("testcase")
        kinds = (next((each.tag for each in case if each.tag != "properties"), "passed") for case in cases)
        job.counts = dict(Counter(kinds))
        report.unlink()
    if job.ended == "ok":
        log.unlink()


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(found: list[Job], out: Path, limit_s: float) -> None:
    """Each on the GPU where a place is free."""
    start, lock = time.monotonic(), Lock()
    processes: list[subprocess.Popen[bytes]] = []
    gpus: SimpleQueue[int] = SimpleQueue()
    num_gpus = torch.cuda.device_count()
    slots = NUM_BESIDE * num_gpus or 1
    for number in range(slots):
        gpus.put(number % max(num_gpus, 1))

    def take(job: Job) -> None:
        gpu = gpus.get()
        run(job, gpu, out, limit_s - (time.monotonic() - start), processes)
        gpus.put(gpu)
        with lock:
            part = out / "suite.json.part"
            part.write_text(json.dumps([asdict(each) for each in found if each.ended], indent=1) + "\n")
            part.replace(out / "suite.json")

    pool = ThreadPoolExecutor(slots)
    try:
        list(pool.map(take, found))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            kill(process)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--limit-s", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("only", nargs="*", help="files whose path has this in it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = jobs(options.only)
    run_all(found, options.out, options.limit_s)
    if not any(job.is_memcheck for job in found):
        print(f"no memcheck: there is no {MEMCHECK[0]} here, or it was not among the files")
    for mode in MODES:
        counts: Counter[str] = Counter()
        for job in found:
            counts.update(job.counts if job.mode == mode and not job.is_memcheck else {})
        print(f"{mode}: {', '.join(f'{number} {kind}' for kind, number in counts.items())}")
    for job in found:
        if job.ended != "ok" or job.is_memcheck:
            print(f"{job.ended}: {job.target} ({job.mode}), {job.counts}, {job.seconds:.0f} s")
    return int(any(job.ended != "ok" for job in found))


if __name__ == "__main__":
    sys.exit(main())
