"""GRPO whose responses are programs that are tested; the shipped tasks, and their solutions."""

import json
from pathlib import Path

import pytest
from example_runs import run_example

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import check_config
from nemo_rl_offload.data.prompts import prompt_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.environments.interface import Episode
from nemo_rl_offload.environments.pool import make_environment
from nemo_rl_offload.specs import sandbox

pytestmark = pytest.mark.skipif(sandbox.missing() is not None, reason=f"nothing is isolated here: {sandbox.missing()}")

TASKS = PROJECT_ROOT / "examples/data/python_tasks.jsonl"


@pytest.mark.slow
def test_the_shipped_tasks_are_solved_by_their_solutions_alone(tmp_path: Path) -> None:
    overrides = [
        "data.env_name=code_tests",
        f"data.train.path={TASKS}",
        "env.code_tests.num_workers=2",
        "env.code_tests.timeout_s=60",
    ]
    overrides += ["data.max_input_seq_length=300", "policy.max_total_sequence_length=320"]
    overrides += ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "data.shuffle=false"]
    overrides += ["checkpointing.metric_name=train:reward"]
    config = check_config(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)).config
    tokenizer = load_tokenizer(config["policy"]["model_name"])
    stream, _ = prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, 1)
    entries = [prompt.problem.entry for prompt in stream.next_batch(stream.num_problems)]
    programs = [f"```python\n{entry['solution']}\n```" for entry in entries]
    pool = make_environment(config, tmp_path)
    try:
        for shift, expected in ((0, 1.0), (1, 0.0)):
            shifted = programs[shift:] + programs[:shift]
            scores = pool.step(
                [
                    Episode(entry, [{"role": "assistant", "content": program}])
                    for entry, program in zip(entries, shifted, strict=True)
                ]
            )
            assert {score.reward for score in scores} == {expected}
            assert not any(score.scorer_error for score in scores)
    finally:
        pool.shutdown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled
@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    tests = {"tests": [{"input": "1", "output": "2"}]}
    lines = [json.dumps({"prompt": f"Write a program, number {number}.", **tests}) for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    done = run_example(
        *("grpo", tmp_path / "run", "data.env_name=code_tests", f"data.train.path={tmp_path}/tasks.jsonl"),
        *("data.train.split_validation_size=4", "data.validation.exclude=[]"),
        *("grpo.max_num_steps=2", "grpo.num_prompts_per_step=2"),
        *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "grpo.val_period=2"),
        *("grpo.max_val_samples=4", "policy.megatron_cfg.scheduler.lr_warmup_iters=1"),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    records = list(map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()))
    trained = [record["metrics"] for record in records if record["prefix"] == "train"]
    assert [(step["reward"], step["scorer_errors"]) for step in trained] == [(0, 0)] * 2, "it cannot write programs"
