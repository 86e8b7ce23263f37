"""Trajectories of SFT and DPO agree with TRL's, where TRL is installed (`uv run --group trl pytest -m slow`)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_offload.algorithms.offline_loop import at_temperature_one
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.data.samples import collate, sample_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.policy.worker import PolicyWorker

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.slow

MODEL = PROJECT_ROOT / "examples/models/tiny_speller"
PAIRS = PROJECT_ROOT / "examples/data/spelling_pairs_train.jsonl"
NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 20, 8, 1e-4
OPTIMIZER = {"learning_rate": LEARNING_RATE, "adam_beta2": 0.98, "max_grad_norm": 1.0, "lr_scheduler_type": "constant"}
CHANGES = (
    f"policy.train_global_batch_size={BATCH_SIZE}",
    "policy.train_micro_batch_size=4",
    f"policy.megatron_cfg.optimizer.lr={LEARNING_RATE}",
    "policy.megatron_cfg.optimizer.weight_decay=0",
    "policy.megatron_cfg.optimizer.adam_beta2=0.98",
    "policy.megatron_cfg.optimizer.clip_grad=1",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    "policy.megatron_cfg.scheduler.lr_decay_style=constant",
    "data.shuffle=false",
)


def our_losses(algorithm: str, *overrides: str) -> list[float]:
    """Losses of the first steps in a worker in this process, with offloading on."""
    path = PROJECT_ROOT / "examples/configs" / f"{algorithm}_tiny.yaml"
    config: Any = load_config(path, [*CHANGES, *overrides])
    policy: Any = at_temperature_one(config["policy"])
    tokenizer = load_tokenizer(MODEL)
    stream, _, _ = sample_sets(config, tokenizer, [tokenizer.eos_token_id], seed=1)
    worker = PolicyWorker(policy, MODEL, seed=1, num_steps=NUM_STEPS, keep_reference=algorithm == "dpo")
    name, section = ("dpo", config["dpo"]) if algorithm == "dpo" else ("nll", {})
    losses = []
    for _ in range(NUM_STEPS):
        batch = collate(stream.next_batch(), tokenizer.pad_token_id)
        if algorithm == "dpo":
            batch["reference_policy_logprobs"] = torch.from_numpy(worker.get_reference_policy_logprobs(batch))
        losses.append(worker.train(batch, name, section, normalizers(batch))["loss"])
    return losses


def their_losses(trainer_class: type, arguments: Any, columns: dict[str, str]) -> list[float]:
    """Losses that TRL logs on the same data, in the same order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    dataset = Dataset.from_json(str(PAIRS)).select(range(NUM_STEPS * BATCH_SIZE))
    dataset = dataset.map(lambda row: {"prompt": row["prompt"] + "\n"}).rename_columns(columns)
    if "completion" in dataset.column_names:
        dataset = dataset.remove_columns("rejected")
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    trainer: Any = trainer_class(
        model=model, args=arguments, train_dataset=dataset, processing_class=load_tokenizer(MODEL)
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def common(folder: Path) -> dict[str, Any]:
    return OPTIMIZER | {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": BATCH_SIZE,
        "logging_steps": 1,
        "weight_decay": 0.0,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
    }


def test_sft(tmp_path: Path, megatron_process_group: None) -> None:
    arguments = trl.SFTConfig(**common(tmp_path), completion_only_loss=True)
    theirs = their_losses(trl.SFTTrainer, arguments, {"chosen": "completion"})
    data = tmp_path / "sft.jsonl"
    data.write_text(PAIRS.read_text().replace('"chosen"', '"completion"'))
    ours = our_losses("sft", f"data.train.path={data}", f"data.validation.path={data}")
    assert len(ours) == len(theirs) == NUM_STEPS
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_dpo(tmp_path: Path, megatron_process_group: None) -> None:
    arguments = trl.DPOConfig(**common(tmp_path), beta=0.1)
    theirs = their_losses(trl.DPOTrainer, arguments, {})
    ours = our_losses("dpo", "dpo.reference_policy_kl_penalty=0.1")
    assert len(ours) == len(theirs) == NUM_STEPS
    assert ours == pytest.approx(theirs, rel=1e-4)
