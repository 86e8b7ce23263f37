"""What goes wrong in a run is one clear error, exit code 2, and nothing is left behind."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cpu_processes import cpu_cluster
from example_runs import run_python
from patience import PATIENCE_S
from test_grpo_run import SMALL, start_run, wait_for, wait_until_gone

from nemo_rl_offload.cli.command_line import main
from nemo_rl_offload.cluster import virtual_cluster
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.runs.run_directory import Checkpoints

MODEL = PROJECT_ROOT / "examples/models/tiny_speller"
Fail = Callable[..., str]


@pytest.fixture
def fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Fail:
    """Run the command line in this process, which must fail, and return its error."""

    def fail(*overrides: str, run_dir: Path = tmp_path / "run") -> str:
        capsys.readouterr()
        assert main(["run", "grpo", *SMALL, "--run-dir", str(run_dir), *overrides]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("error: ")
        assert output.err.count("error: ") == 1
        assert "Traceback" not in output.err + output.out
        assert not (run_dir / "summary.json").exists()
        return output.err

    return fail


@pytest.fixture(scope="module")
def ray_running() -> Iterator[VirtualCluster]:
    """Ray, started once for this module; one slot of two stays taken."""
    with cpu_cluster(1) as cluster:
        yield cluster


@pytest.fixture
def copied_model(tmp_path: Path) -> Path:
    return shutil.copytree(MODEL, tmp_path / "model")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.model_name=no/such/model", "policy.model_name: 'no/such/model' is not a local Hugging Face folder"),
        ("env.reasoning_gym.task=spell_backwards", "Did you mean 'spell_backward'?"),
        ("+env.reasoning_gym.params.max_word_length=5", "Did you mean 'max_word_len'?"),
        ("env.reasoning_gym.params.min_word_len=9", "env.reasoning_gym.params"),
    ],
)
def test_before_ray_starts(override: str, message: str, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_cluster, "_connect", lambda _: pytest.fail("Ray was started"))
    assert message in fail(override)


@pytest.mark.slow
@pytest.mark.sampled
def test_a_cluster_that_is_too_small(ray_running: VirtualCluster, fail: Fail) -> None:
    assert "The Ray cluster is too small for cluster.num_nodes=2" in fail("cluster.num_nodes=2")


@pytest.mark.sampled
@pytest.mark.slow
def test_a_busy_cluster(ray_running: VirtualCluster, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_cluster, "PLACEMENT_TIMEOUT_S", 1)
    num_workers = int(ray_running.layout.nodes[0].num_cores)
    with VirtualCluster(1, 1) as rest:
        held = [VirtualCluster(1, 1) for _ in range(num_workers - 2)]
        error = fail("cluster.gpus_per_node=1")
        for cluster in held:
            cluster.shutdown()
    assert rest.placement_groups == ()
    assert "another job holds them" in error


def test_a_model_without_weights(copied_model: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_cluster, "_connect", lambda _: pytest.fail("Ray was started"))
    (copied_model / "model.safetensors").unlink()
    error = fail(f"policy.model_name={copied_model}")
    assert f"policy.model_name: {copied_model} has a config.json and no weights: neither model.safetensors" in error


@pytest.mark.slow
def test_damaged_weights(ray_running: VirtualCluster, copied_model: Path, fail: Fail, tmp_path: Path) -> None:
    weights = copied_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500_000])
    error = fail(f"policy.model_name={copied_model}")
    assert f"policy.model_name: {weights} cannot be read: " in error
    assert not (tmp_path / "run").exists(), "nothing has begun"


@pytest.mark.sampled
@pytest.mark.slow
def test_a_full_disk_leaves_the_earlier_checkpoint(ray_running: VirtualCluster, fail: Fail, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=7m", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        run_dir, every_step = disk / "run", "checkpointing.save_period=1"
        error = fail(every_step, run_dir=run_dir)
        assert "Cannot write the checkpoint" in error
        assert "No space left on device" in error
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_1"]
        folder, state, _ = Checkpoints(run_dir, None, True).latest() or pytest.fail("none")
        assert state["step"] == 1
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert main(["run", "grpo", *SMALL, "--run-dir", str(run_dir), every_step]) == 0
        assert json.loads((run_dir / "summary.json").read_text())["steps"] == 4
        assert folder.exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.sampled
@pytest.mark.slow
def test_a_killed_worker(tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", str(tmp_path)
    process = start_run(run_dir, "grpo.max_num_steps=1000", mark=mark)
    wait_for((run_dir / "checkpoints" / "step_2").exists, process)
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if is_rank(child)]
    assert len(ranks) == 1
    os.kill(ranks[0].pid, signal.SIGKILL)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    (problem,) = json.loads(output)["problems"]
    assert problem["message"].startswith("rank 0 of 1 (")
    assert "error: rank 0 of 1 (" in errors
    assert f"pid {ranks[0].pid}): the process died." in errors
    assert "Traceback" not in errors
    wait_until_gone(mark)


def is_rank(process: psutil.Process) -> bool:
    return any(part.startswith("ray::RankActor") for part in process.cmdline())


TERMINATED_IN_RAYS_START = """
import os, signal, sys, threading, time
import ray._private.worker as ray_worker

def terminate():
    while not getattr(ray_worker.global_worker, "core_worker", None):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=terminate, daemon=True).start()
from nemo_rl_offload.cli.command_line import main
code = main(sys.argv[1:])
sys.exit("an alarm is set" if signal.alarm(0) else code)
"""


@pytest.mark.sampled
@pytest.mark.slow
def test_sigterm_that_meets_rays_native_part(tmp_path: Path) -> None:
    """Its handler sets an alarm that aborts the process 3 s later, which may take longer to end."""
    done = run_python("-c", TERMINATED_IN_RAYS_START, "run", "grpo", *SMALL, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 130, done.stderr
    assert "Interrupted." in done.stderr


TERMINATED_WHILE_RAY_ENDS = """
import os, signal, sys, threading, time
import ray
from nemo_rl_offload import cli
from nemo_rl_offload.cli import command_line
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster

has_ended = threading.Event()
shutdown = ray.shutdown

def terminate():
    while not has_ended.wait(0.05):
        os.kill(os.getpid(), signal.SIGTERM)

def interrupted(**options):
    threading.Thread(target=terminate, daemon=True).start()
    shutdown(**options)
    has_ended.set()

def begin(*_):
    with VirtualCluster(1, 1):
        ray.shutdown = interrupted
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

command_line._EXECUTE = {"doctor": begin}
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.sampled
@pytest.mark.slow
def test_sigterm_again_and_again_while_ray_ends() -> None:
    """Half ended, Ray ends the process with code 1; and it sets SIGTERM to its default, which is 143: for 0.2 ms, which
    one of these signals in 250 may meet."""
    done = run_python("-c", TERMINATED_WHILE_RAY_ENDS)
    assert (done.returncode, done.stderr) == (130, "Ending as soon as Ray's end is done ...\nInterrupted.\n")
