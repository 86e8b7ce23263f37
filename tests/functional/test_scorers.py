"""A run whose scorer does all that it should not, and is interrupted while one hangs."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from example_runs import python_path
from patience import PATIENCE_S
from test_grpo_run import interruptible, metrics, start_run, wait_for, wait_until_gone

from nemo_rl_offload.config.loader import PROJECT_ROOT

__all__ = ["interruptible"]

SCORER = """
import os, re, sys

def score(messages, entry):
    match entry["answer"]:
        case "exit":
            sys.exit("no exception")
        case "end":
            os._exit(0)
        case "fill":
            bytearray(1 << 40)
        case "hang":
            open(os.path.join(os.path.dirname(__file__), "hanging"), "w").close()
            re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0
"""


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_a_run_goes_on_until_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_scorer.py").write_text(SCORER)
    lines = [
        json.dumps({"question": f"Spell this word backward (example: sun -> nus): {word}", "answer": answer})
        for answer, word in zip(("exit", "end", "fill", "right", *["hang"] * 4), "abcdefgh", strict=True)
    ]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path, PROJECT_ROOT))
    process = start_run(
        tmp_path / "run",
        *("data.env_name=function", "env.function.path=hostile_scorer:score", "env.function.num_workers=2"),
        *(f"data.train.path={tmp_path / 'problems.jsonl'}", "data.shuffle=false", "grpo.num_prompts_per_step=4"),
        *("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
        *("policy.train_global_batch_size=32", "checkpointing.metric_name=train:reward"),
        mark=str(tmp_path),
    )
    wait_for((tmp_path / "hanging").exists, process)
    trained = metrics(tmp_path / "run")[1, "train"]
    assert trained["reward"] > 0
    assert 0 < trained["scorer_errors"] <= 24
    for _ in range(2):  # the first waits for the step, whose scorers hang
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors
    for words in (
        "raised SystemExit: no exception (",
        "took its process with it, which ended with",
        "MemoryError",
    ):
        assert errors.count(words) == 1
    wait_until_gone(str(tmp_path))
