"""Make the tiny model that the default run starts from: `uv run python examples/models/make_tiny_speller.py`.

A Qwen2 of 430 thousand parameters over bytes learns to spell words backward, through the same workers and the same
optimizer step as every other run, and is stopped half-way: it solves about a third of the task, so that
reinforcement learning has something to find. Byte for byte the same on the same machine and thread count.

The teacher of distillation_tiny.yaml is the same model trained to the end: `--num-steps 250 --output
examples/models/tiny_teacher`.
"""

import argparse
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl_offload.batching.batch import Batch, pad_sequences
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import load_config
from nemo_rl_offload.config.validation import check_config
from nemo_rl_offload.data.reasoning_gym import ReasoningGymProblems
from nemo_rl_offload.data.tokenizer import encode_prompt, load_tokenizer, make_byte_tokenizer
from nemo_rl_offload.policy.driver import Policy

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs" / "grpo_tiny.yaml"
DESTINATION = HERE / "tiny_speller"
SEED = 0
NUM_STEPS, NUM_SCHEDULE_STEPS, BATCH_SIZE = 160, 250, 64


def make_start(folder: Path) -> None:
    """Write the untrained model and its tokenizer."""
    make_byte_tokenizer(folder)
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        eos_token_id=256,
        pad_token_id=257,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def examples(tokenizer: Any, template: str, task: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer tokens of the supervised problems: those that grpo_tiny.yaml keeps out of validation."""
    problems = ReasoningGymProblems(task["task"], task["params"], seed=0, size=4000)
    return [
        (
            encode_prompt(tokenizer, template, problem.question),
            [*tokenizer.encode(problem.answer, add_special_tokens=False), tokenizer.eos_token_id],
        )
        for problem in problems
    ]


def batch(rows: list[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    """A batch whose loss counts the answers only."""
    result = pad_sequences([prompt + answer for prompt, answer in rows], pad_id)
    result["token_mask"] = torch.zeros_like(result["input_ids"])
    for row, (prompt, answer) in enumerate(rows):
        result["token_mask"][row, len(prompt) : len(prompt) + len(answer)] = 1
    result["sample_mask"] = torch.ones(len(rows))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DESTINATION)
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "start"
        make_start(start)
        config = check_config(load_config(CONFIG, [f"policy.model_name={start}", *OVERRIDES]), str(CONFIG)).config
        tokenizer = load_tokenizer(start)
        rows = examples(tokenizer, config["data"]["prompt_template"] or "", config["env"]["reasoning_gym"])
        with VirtualCluster(num_nodes=1, gpus_per_node="auto") as cluster:
            policy = Policy(
                cluster,
                config["policy"],
                start,
                (tokenizer.eos_token_id,),
                seed=SEED,
                num_steps=NUM_SCHEDULE_STEPS,
                keep_reference=False,
            )
            draw = random.Random(SEED)
            for step in range(1, options.num_steps + 1):
                metrics = policy.train(batch(draw.sample(rows, BATCH_SIZE), tokenizer.pad_token_id), "nll", {})
                if step % 25 == 0 or step == options.num_steps:
                    print(f"step {step}  loss {metrics['loss']:.3f}", flush=True)
            policy.export_hf(options.output)
            policy.shutdown()
    # Saved by transformers with a version stamp and defaults that nobody reads.
    (options.output / "generation_config.json").unlink(missing_ok=True)
    shutil.rmtree(options.output / ".cache", ignore_errors=True)


OVERRIDES = (
    f"policy.train_global_batch_size={BATCH_SIZE}",
    f"policy.train_micro_batch_size={BATCH_SIZE}",
    "grpo.num_prompts_per_step=8",
    "policy.megatron_cfg.fine_grained_activation_offloading=false",
    "policy.megatron_cfg.offload_modules=null",
    "policy.megatron_cfg.optimizer.lr=2e-3",
    "policy.megatron_cfg.optimizer.min_lr=2e-4",
    "policy.megatron_cfg.optimizer.weight_decay=0.01",
    "policy.megatron_cfg.optimizer.adam_beta2=0.98",
    "policy.megatron_cfg.scheduler.lr_decay_style=cosine",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=50",
)


if __name__ == "__main__":
    main()
