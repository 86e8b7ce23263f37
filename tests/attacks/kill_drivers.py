"""Drivers that are killed at any moment: what of their run lives on, and what stays on the disk.

`python tests/attacks/kill_drivers.py --cases 12 --seed 0` starts runs, kills each driver with SIGKILL after a random
time, most of them while Ray starts, waits for all processes of the run to end, and looks for folders of Ray. It waits
as long as the driver took to come to Ray's start, about 10 s: of three runs without the watchdog, two had processes
then, and none after 20 s.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from test_grpo_run import leftovers, start_run

from nemo_rl_offload.cluster.private_ray import NUM_KEPT, PREFIX


def survivors(run_dir: Path, after_s: float) -> list[str]:
    """Start a run, kill its driver so long after Ray's folder was made, and return what is left of its processes."""
    mark, before, begin_s = str(run_dir), folders(), time.monotonic()
    process = start_run(run_dir, mark=mark)
    try:
        while not folders() - before:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        start_s = time.monotonic() - begin_s
        time.sleep(after_s)
        processes = len(leftovers(mark))
    finally:
        process.kill()
        process.communicate()
    assert processes > 1, "nothing was there that could stay"
    end_s = time.monotonic() + start_s
    while (left := leftovers(mark)) and time.monotonic() < end_s:
        time.sleep(0.2)
    return left


def folders() -> set[Path]:
    """Ray's folders of runs."""
    return set(Path(os.environ["TMPDIR"]).glob(f"{PREFIX}*"))


def attack(num_cases: int, seed: int) -> tuple[list[str], int]:
    """The processes that lived on, each with the moment of its kill, and the number of folders left."""
    rng, left = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:  # short enough for names of sockets
        os.environ["TMPDIR"] = folder
        for case in range(num_cases):
            after_s = rng.choice([rng.uniform(0, 1), rng.uniform(0, 8), rng.uniform(8, 20)])
            found = survivors(Path(folder) / f"run{case}", after_s)
            left += [f"{after_s:.2f} s after Ray's start: {line}" for line in found]
        num_folders = len(folders())
        del os.environ["TMPDIR"]
    return left, num_folders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    left, num_folders = attack(options.cases, options.seed)
    for line in left:
        print(line)
    print(f"{options.cases} drivers killed; {len(left)} processes lived on; {num_folders} folders are left")
    return int(bool(left) or num_folders > NUM_KEPT + 1)


if __name__ == "__main__":
    sys.exit(main())
