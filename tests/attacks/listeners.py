"""Who of a run's processes listens, and where: nobody may be reached from another machine.

`python tests/attacks/listeners.py --workers 2` trains some steps and asks the kernel, while it does, for every
listening TCP socket and every UDP socket of the run's processes, Ray's daemons among them. The addresses must be of
loopback. `--cases` is the number of runs, of 1, 2, ... workers. Other words are overrides of the configuration, such as
another generation backend.
"""

import argparse
import ipaddress
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "functional"))

from test_grpo_run import start_run, wait_for, wait_until_gone


@dataclass(frozen=True, order=True)
class Listener:
    """A socket that takes what others send."""

    process: str
    address: str
    port: int

    @property
    def is_open(self) -> bool:
        """Whether more than this machine reaches it."""
        address = ipaddress.ip_address(self.address)
        inner = getattr(address, "ipv4_mapped", None) or address
        return not inner.is_loopback


def listeners_of(pid: int) -> set[Listener]:
    """Of a process and all below it."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            name = " ".join(process.cmdline())
            name = next((word for word in ("gcs_server", "raylet", "monitor.py", "dashboard.py") if word in name), name)
            for socket in process.net_connections("inet"):
                is_connected_udp = socket.status == psutil.CONN_NONE and socket.raddr
                if socket.laddr and socket.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and not is_connected_udp:
                    found.add(Listener(name.strip()[:40], socket.laddr.ip, socket.laddr.port))
        except psutil.Error:  # it has ended
            continue
    return found


def listeners_of_a_run(run_dir: Path, num_workers: int, *overrides: str) -> set[Listener]:
    """Train some steps, and collect the listeners from the first to the end."""
    short = ("grpo.max_num_steps=12", "grpo.val_at_start=false")  # on a busy machine, a look takes as long as steps
    process = start_run(run_dir, f"cluster.gpus_per_node={num_workers}", *short, *overrides, mark=str(run_dir))
    found: set[Listener] = set()
    wait_for((run_dir / "metrics.jsonl").exists, process)
    while process.poll() is None:
        try:
            found |= listeners_of(process.pid)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    output = process.communicate()
    assert process.returncode == 0, output
    wait_until_gone(str(run_dir))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2, help="runs, of 1, 2, ... workers")
    parser.add_argument("--workers", type=int, help="one run, of so many workers")
    options, overrides = parser.parse_known_args()
    reached = total = 0
    for num_workers in [options.workers] if options.workers else range(1, options.cases + 1):
        with tempfile.TemporaryDirectory() as folder:
            for listener in sorted(listeners_of_a_run(Path(folder) / "run", num_workers, *overrides)):
                print(f"{num_workers} worker(s): {'OPEN ' if listener.is_open else ''}{listener}")
                total, reached = total + 1, reached + listener.is_open
    print(f"{total} listeners, {reached} of them for other machines")
    return int(reached > 0)


if __name__ == "__main__":
    sys.exit(main())
