"""Runs on several Ray nodes of one machine, each in a network and a `/tmp/ray` of its own; one is lost and comes back.

`sudo python tests/functional/many_nodes.py --out benchmarks/results/many_nodes.json` needs root, `ip` and `unshare`. A
node has an address on a bridge, a raylet, and one worker; all see the same files. Runs on four of them are compared
with one of four workers on one machine: the losses and gradient norms of each step. Where vLLM is installed, a fourth
run has an engine on a node of its own, which every update of weights goes to. Delay and loss, which `tc` adds with the
kernel's `netem`, are added where that is there.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import psutil
from patience import eventually
from test_grpo_run import SMALL

from nemo_rl_offload.config.loader import PROJECT_ROOT

NUM_NODES = 4
HEAD, PORT = "10.77.0.1", 6379
BRIDGE, NAME = "nrl-bridge", "nrl-node"
DELAY = ("delay", "2ms", "loss", "0.1%")
START_S, RUN_S = 90, 900
COMPARED = ("loss", "reward", "grad_norm")
RANK = "ray::RankActor"
AWAY_S = 20
SETTINGS = (
    *SMALL,
    "grpo.max_num_steps=3",
    "grpo.val_period=0",
    "checkpointing.save_period=1",
    "policy.train_micro_batch_size=4",
    "fault_tolerance.max_restarts=1",
)


class Nodes:
    """A head without workers, and nodes with one each. Number 0 is the head."""

    def __init__(self) -> None:
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}
        tokens = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env = {**os.environ, **tokens, "RAY_ADDRESS": f"{HEAD}:{PORT}", "OMP_NUM_THREADS": "1"}
        self.has_delay = True

    def __enter__(self) -> Self:
        Path("/tmp/ray").mkdir(exist_ok=True)
        _do("ip", "link", "add", BRIDGE, "type", "bridge")
        _do("ip", "link", "set", BRIDGE, "up")
        for number in range(NUM_NODES + 1):
            name = f"{NAME}{number}"
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "link", "set", name, "master", BRIDGE, "up")
            _do("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _do("ip", "-n", name, "link", "set", device, "up")
            delayed = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", *DELAY]
            self.has_delay &= not subprocess.run(delayed, capture_output=True, check=False).returncode
            self.start(number)
        return self

    def start(self, number: int) -> None:
        """Start a node's raylet, for the second time where it was lost, and wait until Ray knows it."""
        how = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
        how = [f"--address={HEAD}:{PORT}", "--num-cpus=1"] if number else how
        how += [f"--node-ip-address=10.77.0.{number + 1}", "--object-store-memory=200000000", "--disable-usage-stats"]
        ray = f"mount -t tmpfs tmpfs /tmp/ray && exec {Path(sys.executable).parent}/ray start --block {' '.join(how)}"
        apart = ["ip", "netns", "exec", f"{NAME}{number}", "unshare", "--mount", "bash", "-c", ray]
        env = {name: value for name, value in self.env.items() if name != "RAY_ADDRESS"}
        self._raylets[number] = subprocess.Popen(apart, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(START_S):
            if self.processes(number, "raylet"):
                return
            assert self._raylets[number].poll() is None, f"the raylet of node {number} has ended"
            time.sleep(1)
        raise AssertionError(f"the raylet of node {number} does not start")

    def processes(self, number: int, name: str = "") -> list[psutil.Process]:
        """Of a node, whose names begin so."""
        found = subprocess.run(["ip", "netns", "pids", f"{NAME}{number}"], capture_output=True, text=True, check=False)
        alive = [psutil.Process(int(pid)) for pid in found.stdout.split() if psutil.pid_exists(int(pid))]
        return [each for each in alive if each.name().startswith(name)]

    def lose(self, number: int) -> None:
        """Kill all that runs on a node."""
        for process in self.processes(number):
            process.send_signal(signal.SIGKILL)
        self._raylets.pop(number).wait()

    def run(self, run_dir: Path, *words: str) -> "subprocess.Popen[str]":
        """Start a run whose driver is on the head."""
        (raylet,) = self.processes(0, "raylet")
        inside = ["nsenter", f"--target={raylet.pid}", "--mount", "--net", f"--wd={PROJECT_ROOT}"]
        return _start([*inside, *_command(run_dir, *words)], self.env)

    def __exit__(self, *_: object) -> None:
        for number in range(NUM_NODES + 1):
            for process in self.processes(number):
                process.kill()
            subprocess.run(["ip", "netns", "del", f"{NAME}{number}"], check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


def _do(*words: str) -> None:
    subprocess.run(words, check=True)


def _command(run_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "nemo_rl_offload.cli", "run", "grpo", "--run-dir", str(run_dir), *words]


def _start(command: list[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(process: "subprocess.Popen[str]") -> str:
    """What a run has said, which has to end well."""
    said, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, said
    return said


def steps(run_dir: Path) -> list[list[float]]:
    """The compared figures of each step."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[each["metrics"][name] for name in COMPARED] for each in records if each["prefix"] == "train"]


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    """Wait until a run has written something."""

    def is_written() -> bool:
        if path.exists():
            return True
        assert process.poll() is None, process.communicate()[0]
        return False

    assert eventually(is_written), path


def on_several_nodes(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """Runs of four workers: on one machine, on four nodes, and on four of which one is lost after a step."""
    there = ("cluster.gpus_per_node=1", f"cluster.num_nodes={NUM_NODES}")
    here = (f"cluster.gpus_per_node={NUM_NODES}",)
    alone = {name: value for name, value in nodes.env.items() if not name.startswith("RAY_")}
    finished(_start(_command(folder / "one", *SETTINGS, *here), alone))
    expected = steps(folder / "one")

    run = nodes.run(folder / "four", *SETTINGS, *there)
    wait_for(folder / "four/checkpoints/step_1", run)
    ranks = [len(nodes.processes(number, RANK)) for number in range(NUM_NODES + 1)]
    finished(run)

    run = nodes.run(folder / "lost", *SETTINGS, *there)
    wait_for(folder / "lost/checkpoints/step_1", run)
    nodes.lose(2)
    time.sleep(AWAY_S)
    nodes.start(2)
    said = finished(run).replace(str(folder), "RUNS")
    return {
        "workers_by_node": ranks,
        "steps": expected,
        "equal_on_four_nodes": steps(folder / "four") == expected,
        "equal_after_a_loss": steps(folder / "lost") == expected,
        "said": [line for line in said.splitlines() if line.startswith(("Restarting", "Waiting", "Resuming"))],
    }


def with_an_engine_apart(nodes: Nodes, folder: Path) -> dict[str, Any]:
    """Training on one node, vLLM on another."""
    apart = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.num_nodes=1")
    apart += ("policy.generation.colocated.resources.gpus_per_node=1",)
    exemplar = ("--config", str(PROJECT_ROOT / "examples/configs/grpo_tiny_vllm.yaml"))
    run = nodes.run(
        folder / "vllm", *exemplar, *SETTINGS, *apart, "cluster.num_nodes=2", "cluster.gpus_per_node=1"
    )  # fmt: skip
    wait_for(folder / "vllm/checkpoints/step_1", run)
    ranks = [len(nodes.processes(number, RANK)) for number in range(NUM_NODES + 1)]
    finished(run)
    records = [json.loads(line) for line in (folder / "vllm/metrics.jsonl").read_text().splitlines()]
    errors = [each["metrics"]["token_mult_prob_error"] for each in records if each["prefix"] == "train"]
    return {"workers_by_node": ranks, "token_mult_prob_error": errors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    found: dict[str, Any] = {"nodes": NUM_NODES}
    with tempfile.TemporaryDirectory() as name, Nodes() as nodes:
        found["delay"] = " ".join(DELAY) if nodes.has_delay else None
        found |= on_several_nodes(nodes, Path(name))
        if find_spec("vllm"):
            found["engine_apart"] = with_an_engine_apart(nodes, Path(name))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0 if found["equal_on_four_nodes"] and found["equal_after_a_loss"] else 1


if __name__ == "__main__":
    sys.exit(main())
