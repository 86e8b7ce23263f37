"""The loops of SFT and DPO over a stand-in for the policy, with real data and checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakePolicy, Recorder

from nemo_rl_offload.algorithms.dpo import DPO
from nemo_rl_offload.algorithms.offline_loop import OfflineLoop, at_temperature_one
from nemo_rl_offload.algorithms.sft import SFT
from nemo_rl_offload.cluster.signals import Termination
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.samples import sample_sets

LOOPS: dict[str, type[OfflineLoop]] = {"sft": SFT, "dpo": DPO}
Make = Callable[..., tuple[OfflineLoop, FakePolicy]]


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path) -> Make:
    """Build a loop over 12 training and 5 validation samples."""

    def make(algorithm: str, *overrides: str, run_dir: Path = tmp_path / "run") -> tuple[OfflineLoop, FakePolicy]:
        for name, size in (("train", 12), ("validation", 5)):
            pairs = [{"prompt": f"{name} {n}?", "chosen": f"yes {n}", "rejected": "no"} for n in range(size)]
            answers = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
            records = pairs if algorithm == "dpo" else answers
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        small = (
            f"algorithm={algorithm}",
            f"{algorithm}.max_num_epochs=null",
            f"{algorithm}.max_num_steps=6",
            f"{algorithm}.val_period=2",
            f"{algorithm}.seed=3",
            "policy.train_global_batch_size=4",
            "checkpointing={save_period: 3, keep_top_k: null, metric_name: 'val:loss', higher_is_better: false}",
            f"data.train.path={tmp_path}/train.jsonl",
            f"data.validation.path={tmp_path}/validation.jsonl",
        )
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*small, *overrides])
        policy = FakePolicy()
        samples = sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=3)
        run_dir.mkdir(exist_ok=True)
        return LOOPS[algorithm](config, policy, samples, 0, run_dir), policy

    return make


def run(loop: OfflineLoop) -> Recorder:
    recorder: Any = Recorder()
    loop.run(recorder, recorder, Termination(0))
    return recorder  # type: ignore[no-any-return]


@pytest.mark.parametrize("algorithm", LOOPS)
def test_what_happens_when(algorithm: str, make: Make, tmp_path: Path) -> None:
    loop, policy = make(algorithm)
    logged = run(loop).logged
    assert [step for step, prefix in logged if prefix == "train"] == [1, 2, 3, 4, 5, 6]
    assert [step for step, prefix in logged if prefix == "validation"] == [0, 2, 4, 6]
    assert loop.validation == {"first": 10.0, "last": 4.0}
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"step_3", "step_6"}
    state = json.loads((tmp_path / "run/checkpoints/step_6/training_info.json").read_text())
    assert state["metric"] == 4.0
    summary = loop.summary()
    assert summary["data"]["data.train"] == {
        "num_samples": 12,
        "num_truncated": 0,
        "num_dropped": 0,
        "num_too_long": 0,
        "num_ties": 0,
        "num_identical": 0,
        "num_bad_records": 0,
    }
    loop.close()
    assert policy.is_shut_down


def test_sft_learns_answers(make: Make, tokenizer: Any) -> None:
    loop, policy = make("sft")
    run(loop)
    assert policy.losses == [("nll", loop.config["sft"])] * 6
    assert policy.num_reference_calls == 0
    questions = []
    for batch in policy.batches:
        for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True):
            prompt, answer = tokenizer.decode(ids[mask == 0]).split("\n")[0], tokenizer.decode(ids[mask == 1])
            assert answer == f"yes {prompt.split()[1].rstrip('?')}<|im_end|>"
            questions.append(prompt)
    assert sorted(questions[:12]) == sorted(questions[12:]) == sorted(f"train {n}?" for n in range(12))
    assert all(len(batch["input_ids"]) == 5 for batch in policy.evaluated)


def test_dpo_compares_pairs_with_the_start_model(make: Make, tokenizer: Any) -> None:
    loop, policy = make("dpo")
    run(loop)
    name, config = policy.losses[0]
    assert (name, config["reference_policy_kl_penalty"]) == ("dpo", 0.05)
    for batch in (*policy.batches, *policy.evaluated):
        answers = [
            tokenizer.decode(ids[mask == 1]) for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)
        ]
        assert all(answer.startswith("yes") for answer in answers[0::2])
        assert set(answers[1::2]) == {"no<|im_end|>"}
        assert torch.equal(batch["reference_policy_logprobs"], torch.full(batch["input_ids"].shape, -0.2))
    assert [len(batch["input_ids"]) for batch in policy.batches] == [8] * 6
    assert [len(batch["input_ids"]) for batch in policy.evaluated] == [10] * 4
    assert policy.num_reference_calls == 6 + 1  # validation pairs once


@pytest.mark.parametrize(("epochs", "steps"), [("1", 3), ("2", 6), ("5", 6), ("null", 6)])
def test_epochs_end_a_run(epochs: str, steps: int, make: Make) -> None:
    loop, _ = make("sft", f"sft.max_num_epochs={epochs}")
    shown = run(loop).shown
    assert loop.step == loop.num_steps == steps
    said = [line for line in shown if "sft.max_num_epochs=null" in line]
    assert [line.split(", ")[0] for line in said] == (["This run ends by step 3"] if steps == 3 else [])


def test_validation_takes_so_many_samples(make: Make) -> None:
    loop, policy = make("sft", "sft.max_val_samples=2")
    loop.measure()
    assert len(policy.evaluated[0]["input_ids"]) == 2


@pytest.mark.parametrize("algorithm", LOOPS)
def test_resuming_gives_the_same_run(algorithm: str, make: Make, tmp_path: Path) -> None:
    whole, policy = make(algorithm)
    expected = run(whole)
    stopped, _ = make(algorithm, f"{algorithm}.max_num_steps=3", run_dir=tmp_path / "again")
    first = run(stopped)
    resumed, resumed_policy = make(algorithm, run_dir=tmp_path / "again")
    assert resumed.resume() == tmp_path / "again/checkpoints/step_3"
    second = run(resumed)
    assert {
        key: value for key, value in (first.logged | second.logged).items() if key != (3, "validation")
    } == expected.logged
    for batch, other in zip(policy.batches[3:], resumed_policy.batches, strict=True):
        assert all(torch.equal(batch[key], other[key]) for key in batch)


def test_given_answers_are_scored_at_temperature_one() -> None:
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", ["policy.generation.temperature=0.5"])
    changed = at_temperature_one(config["policy"])
    assert changed["generation"] == {**config["policy"]["generation"], "temperature": 1.0}
    assert config["policy"]["generation"]["temperature"] == 0.5
