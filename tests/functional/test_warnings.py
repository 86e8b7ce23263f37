"""What workers warn of reaches the user: on the screen, in the run directory and in the report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_processes import cpu_environment
from patience import PATIENCE_S

CLI = [sys.executable, "-m", "nemo_rl_offload.cli"]
SHORT = (
    *("sft.max_num_steps=4", "sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false"),
    *("checkpointing.enabled=false", "policy.megatron_cfg.scheduler.lr_warmup_iters=1"),
)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("offload_modules=auto", "activation_offload.gpu_memory_budget=1MiB"),
            "gpu_memory_budget: 1 MiB cannot be met by offloading",
        ),
        (
            ("min_offloaded_tensor_size=1048576",),
            "nothing is offloaded of attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm: the tensors",
        ),
    ],
)
def test_a_warning_of_a_worker(overrides: tuple[str, ...], words: str, tmp_path: Path) -> None:
    environment = {**os.environ, **cpu_environment(), "OMP_NUM_THREADS": "1"}
    command = [*CLI, "run", "sft", *SHORT, *(f"policy.megatron_cfg.{each}" for each in overrides)]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    shown = [line for line in (done.stdout + done.stderr).splitlines() if words in line]
    assert len(shown) == 1
    assert (tmp_path / "run" / "warnings.log").read_text().count(words) == 1
    subprocess.run([*CLI, "report", str(tmp_path / "run")], check=True)
    assert words in (tmp_path / "run" / "report.html").read_text()
