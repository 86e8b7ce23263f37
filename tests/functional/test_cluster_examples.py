"""What `examples/cluster` holds: a job on a Ray cluster that is up; scripts and manifest as far as they can be read."""

import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cpu_processes import cpu_environment
from patience import PATIENCE_S, eventually
from test_grpo_run import SMALL, wait_until_gone

from nemo_rl_offload.cli.parser import build_parser
from nemo_rl_offload.config.loader import PROJECT_ROOT, read_config

CLUSTER = PROJECT_ROOT / "examples/cluster"
RAY = str(Path(sys.executable).parent / "ray")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Ray tells a job to join the cluster whose address was last written into its folder, which is the machine's unless
    it is named: another test's, perhaps. Short, since sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.sampled
@pytest.mark.slow
def test_a_submitted_job(tmp_path: Path, ray_folder: str) -> None:
    dashboard = free_port()
    environment = {
        **os.environ,
        "PATH": f"{Path(RAY).parent}{os.pathsep}{os.environ['PATH']}",
        **cpu_environment(),
        "OMP_NUM_THREADS": "1",
        "RUN_MARK": str(tmp_path),
        "RAY_TMPDIR": ray_folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "NEMO_RL_OFFLOAD": f"{sys.executable} -m nemo_rl_offload.cli",
    }
    names = ("port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    ports = {name: free_port() for name in names}
    given_ports = (f"--{name}={port}" for name, port in ports.items())
    address = ("--node-ip-address=127.0.0.1", f"--dashboard-port={dashboard}", "--disable-usage-stats")
    head = subprocess.Popen(
        [RAY, "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=200000000", *given_ports, *address],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_port(dashboard, head)
        wait_for_port(ports["dashboard-agent-listen-port"], head)  # who takes jobs starts last
        run_dir = tmp_path / "run"
        command = [CLUSTER / "ray_job_submit.sh", "grpo", "--run-dir", run_dir, *SMALL, "cluster.gpus_per_node=1"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((run_dir / "summary.json").read_text())["steps"] == 4
        assert "succeeded" in done.stdout + done.stderr
        refused = subprocess.run(
            [*command[:3], tmp_path / "other", *SMALL, "cluster.num_nodes=2"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert refused.returncode != 0
        assert "The Ray cluster is too small for cluster.num_nodes=2" in refused.stdout + refused.stderr
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(PATIENCE_S)
    wait_until_gone(str(tmp_path))


def wait_for_port(port: int, process: subprocess.Popen[Any]) -> None:
    def answers() -> bool:
        assert process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    assert eventually(answers), f"nothing listens on port {port}"


@pytest.mark.parametrize("script", ["ray_job_submit.sh", "ray.sub"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(CLUSTER / script, os.X_OK)
    assert subprocess.run(["bash", "-n", CLUSTER / script], check=False).returncode == 0


def test_the_manifests_command_is_one_of_ours() -> None:
    job = yaml.safe_load((CLUSTER / "ray_job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    words = shlex.split(job["spec"]["entrypoint"])
    start = words.index("nemo-rl-offload")
    options, overrides = build_parser().parse_known_args(words[start + 1 :])
    config = read_config(PROJECT_ROOT / options.config, overrides).values
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    assert config["cluster"] == {
        "num_nodes": group["replicas"],
        "gpus_per_node": int(worker["resources"]["limits"]["nvidia.com/gpu"]),
        "bind": "auto",
    }
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert head["terminationGracePeriodSeconds"] > config["fault_tolerance"]["grace_period_s"]
    assert head["containers"][0]["image"] == worker["image"]
